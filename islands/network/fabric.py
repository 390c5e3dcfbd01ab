"""The event loop of transfers: every collective in flight meets the others here, hop by hop.

A transfer is served at each hop of its path in order of its ready time there (FIFO), and it cuts
through: a hop may begin as soon as the first bytes arrive, provided it will not run dry before the
last ones do. For hop k of a transfer of n bytes::

    ready_k  = max(start_{k-1} + delay_{k-1}, finish_{k-1} + delay_{k-1} - n / bandwidth_k)
    start_k  = max(ready_k, free_k)
    finish_k = free_k = start_k + n / bandwidth_k
    delivered = finish + delay of the last hop

So one event per hop is enough: when a transfer's turn comes at its ready time, everything about
that hop is decided, because nothing that becomes ready later can be served before it.

Events are ordered by (time, kind, id). The id is intrinsic to the transfer (which send of its
member, phase, member) and never a counter of calls, so the caller may submit the same sends in any
order or in any pieces.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Any, Protocol, TypeAlias

from islands.network.topology import Path

#: At one moment, what has arrived is seen before anything new is served.
ARRIVED, READY = 0, 1


class Owner(Protocol):
    """What a transfer belongs to: it keeps the times of its hops and is told when they matter."""

    first_s: list[float]
    last_s: list[float]
    queued_s: list[float]
    final_phase: int

    def left(self, lane: int, finish_s: float) -> None:
        """A transfer of the final phase leaves its sender's port for good at ``finish_s``."""
        ...

    def delivered(self, lane: int, phase: int, time_s: float) -> None:
        """A transfer's last byte arrives at ``time_s``, which may be later than the present."""
        ...


#: (path, bytes, owner, first slot of its times, lane, phase): one light record per transfer.
Transfer: TypeAlias = tuple[Path, int, Owner, int, int, int]


class Fabric:
    """FIFO resources and the transfers that are on their way.

    ``free_s`` holds, per resource, when it has served all it was given. ``horizon_s`` is the moment
    from which something unknown could still happen: no event at or after it is processed.
    """

    def __init__(self, resources: int) -> None:
        self.free_s = [0.0] * resources
        self.horizon_s = inf
        self.hops = 0
        self._events: list[tuple[float, int, int, Any, int]] = []

    def send(self, time_s: float, order: int, transfer: Transfer) -> None:
        """A transfer is ready at its first hop at ``time_s``; ``order`` breaks ties."""
        heappush(self._events, (time_s, READY, order, transfer, 0))

    def announce(self, time_s: float, order: int, what: object) -> None:
        """Let :meth:`run` stop with ``what`` when everything before ``time_s`` has happened."""
        heappush(self._events, (time_s, ARRIVED, order, what, -1))

    def run(self) -> tuple[float, Any] | None:
        """Process events up to the horizon; stop at the first announcement and return it.

        Owners are called back in the middle, and may send or lower the horizon there.
        """
        events, free = self._events, self.free_s
        hops = 0
        try:
            while events:
                time, _, order, transfer, hop = events[0]
                if time >= self.horizon_s:
                    return None
                if hop < 0:
                    heappop(events)
                    return time, transfer
                hops += 1
                path, size, owner, slot, lane, phase = transfer
                resource, bytes_per_s, delay = path[hop]
                start = free[resource]
                if start < time:
                    start = time
                free[resource] = finish = start + size / bytes_per_s
                out = finish + delay
                slot += hop
                if start < owner.first_s[slot]:
                    owner.first_s[slot] = start
                owner.last_s[slot] = out
                owner.queued_s[slot] += start - time
                following = hop + 1
                if following < len(path):
                    ready = start + delay
                    full = out - size / path[following][1]
                    if full > ready:
                        ready = full
                    heapreplace(events, (ready, READY, order, transfer, following))
                    if hop == 0 and phase == owner.final_phase:
                        owner.left(lane, finish)
                else:
                    heappop(events)
                    owner.delivered(lane, phase, out)
            return None
        finally:
            self.hops += hops
