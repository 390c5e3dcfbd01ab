"""The event loop of transfers: every collective in flight meets the others here, hop by hop.

On a *fifo* route a transfer is served at each hop of its path in order of its ready time there, and
it cuts through: a hop may begin as soon as the first bytes arrive, provided it will not run dry
before the last ones do. For hop k of a transfer of n bytes::

    ready_k  = max(start_{k-1} + delay_{k-1}, finish_{k-1} + delay_{k-1} - n / bandwidth_k)
    start_k  = max(ready_k, free_k)
    finish_k = free_k = start_k + n / bandwidth_k
    delivered = finish + delay of the last hop

So one event per hop is enough: when a transfer's turn comes at its ready time, everything about
that hop is decided, because nothing that becomes ready later can be served before it. Other jobs'
transfers that arrived before it are served first, and a changing bandwidth is integrated.

On a *fair* route a transfer occupies all of its hops at once and shares them with the others
present (:mod:`islands.network.fair`).

Events are ordered by (time, kind, id). The id is intrinsic to the transfer (which send of its
member, phase, member) and never a counter of calls, so the caller may submit the same sends in any
order or in any pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from islands.network.fair import FairShare, Finished
from islands.network.line import Line, Stuck
from islands.network.shared_pipe import EndedOn
from islands.network.steps import Steps
from islands.network.topology import Path, Topology

#: At one moment, what has happened is seen before anything new is served: control bytes, members
#: that are done, arrivals, collectives that have ended, and moments that were asked for. Before
#: these last ones, what is on its way goes on (ONWARD): it may yet arrive at that moment.
CHARGED, PASSES, ARRIVED, CLOSED, ONWARD, WAKES, READY = range(7)
#: Instead of a hop's number: not a transfer but an announcement; a transfer on a fair route.
ANNOUNCED, SHARED = -1, -2

#: Where the time of a chain of transfers went, carried along by the last of them: the ready time of
#: the worker that it began with, then the seconds of queueing behind other transfers of this run,
#: of queueing behind background, of propagation, and of waiting for others. What is left of the
#: time since the beginning is transmission.
Chain: TypeAlias = list[float]


class Owner(Protocol):
    """What a transfer belongs to: it keeps the times of its hops and is told when they matter."""

    first_s: list[float]
    last_s: list[float]
    queued_s: list[float]
    final_phase: int

    def left(self, lane: int, finish_s: float, chain: Chain) -> None:
        """A transfer of the final phase leaves its sender's port for good at ``finish_s``.
        ``chain`` goes on changing."""
        ...

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        """A transfer's last byte arrives at ``time_s``, which may be later than the present."""
        ...


#: (path, bytes, owner, first slot of its times, lane, phase, chain): one light record per transfer.
Transfer: TypeAlias = tuple[Path, int, Owner, int, int, int, Chain]


class Others(NamedTuple):
    """Other jobs' transfers on one link: when the first began and the last had left, and how long
    they queued in sum (where a link is shared fairly: how much longer than alone they took)."""

    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    first_start_s: float
    last_s: float
    queued_s: float


class Fabric:
    """All resources of a network and the transfers that are on their way.

    ``free_s`` holds, per resource, when it has served all it was given. ``horizon_s`` is the moment
    from which something unknown could still happen: no event at or after it is processed.
    ``stuck`` says why a transfer can never be delivered; nothing is processed after that.
    ``lines`` are the WAN links, by resource; a port, which has no more than a rate, is None.
    """

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        ports = topology.resources - len(topology.links)
        self.lines: list[Line | None] = [Line(link, seed) for link in topology.links]
        self.lines += [None] * ports
        self.free_s = [0.0] * topology.resources
        self.horizon_s = inf
        self.hops = 0
        self.stuck: str | None = None
        self._events: list[tuple[float, int, int, Any, int]] = []
        fair = any(link.fair for link in topology.links)
        self._fair = _fair_share(topology, self.lines) if fair else None
        self._delivered_s: dict[int, float] = {}  # the latest delivery per path of fair transfers

    def send(self, time_s: float, order: int, transfer: Transfer) -> None:
        """A transfer is ready at its first hop at ``time_s``; ``order`` breaks ties."""
        path = transfer[0]
        hop = SHARED if path[0][3] else 0  # its discipline, by number: this is the hottest call
        heappush(self._events, (time_s, READY, order, transfer, hop))

    def announce(self, time_s: float, kind: int, order: int, what: object) -> None:
        """Let :meth:`run` stop with ``what`` when everything before ``time_s`` has happened.

        ``kind`` is one of those before READY; ``order`` breaks ties within it.
        """
        heappush(self._events, (time_s, kind, order, what, ANNOUNCED))

    def cancel(self, gone: Callable[[Any, bool], bool]) -> list[Any]:
        """Take back what has not begun: announcements, and transfers before their first hop.

        ``gone(what, announced)`` decides; what was taken back is returned. A transfer has begun
        when its sender's port has had it in its queue, even if it was not its turn yet.
        """
        kept, taken = [], []
        for event in self._events:
            _, _, _, what, hop = event
            if hop <= 0 and gone(what, hop == ANNOUNCED):
                taken.append(what)
            else:
                kept.append(event)
        if taken:
            heapify(kept)
            self._events[:] = kept
        return taken

    def run(self) -> tuple[float, Any] | None:
        """Process events up to the horizon; stop at the first announcement and return it.

        Owners are called back in the middle, and may send or lower the horizon there.
        """
        if self.stuck is not None:
            return None
        try:
            return self._run()
        except Stuck as stuck:
            self.stuck = str(stuck)
        except EndedOn as ended:
            line = self.lines[ended.resource]
            assert line is not None
            self.stuck = line.ended(ended)
        return None

    def _run(self) -> tuple[float, Any] | None:
        events, free, lines, fair = self._events, self.free_s, self.lines, self._fair
        hops = 0
        try:
            while True:
                if fair is not None and fair.next_s <= (events[0][0] if events else inf):
                    if fair.next_s == inf:
                        self._must_move(fair)
                    if fair.next_s >= self.horizon_s:
                        return None
                    for finished in fair.step():
                        self._finish(finished)
                    continue
                if not events:
                    return None
                time, _, order, transfer, hop = events[0]
                if time >= self.horizon_s:
                    return None
                if hop < 0:
                    if hop == ANNOUNCED:
                        if events[0][1] == WAKES and self._hurry(time):
                            continue
                        heappop(events)
                        return time, transfer
                    self._begin_shared(time)
                    continue
                hops += 1
                path, size, owner, slot, lane, phase, chain = transfer
                resource, bytes_per_s, delay, _ = path[hop]
                slot += hop
                line = lines[resource]
                if line is None or line.plain:
                    start = free[resource]
                    if start <= time:
                        start = time
                    else:
                        waited = start - time
                        chain[1] += waited
                        owner.queued_s[slot] += waited
                    free[resource] = finish = start + size / bytes_per_s
                    through = start + delay
                    out = finish + delay
                    after = delay
                    if line is not None:
                        usage = line.usage
                        if usage.finish_s == start:  # without a gap: spares the call
                            usage.finish_s = finish
                        else:
                            usage.add(start, finish)
                else:
                    start, finish, through, out = line.serve(time, free[resource], size, chain)
                    free[resource] = finish
                    owner.queued_s[slot] += start - time
                    after = out - finish
                if start < owner.first_s[slot]:
                    owner.first_s[slot] = start
                owner.last_s[slot] = out
                hop += 1
                if hop == len(path):
                    chain[3] += after
                    heappop(events)
                    owner.delivered(lane, phase, out, chain)
                    continue
                following = path[hop]
                onward = lines[following[0]]
                if onward is None or onward.plain:
                    ready = out - size / following[1]
                else:
                    ready = onward.begin(out, size)
                if ready < through:
                    ready = through
                if line is not None and not line.plain:
                    ready = line.in_order(ready)
                heapreplace(events, (ready, READY, order, transfer, hop))
                # Only now: what is announced in there may come before everything. A path has more
                # than one hop.
                if hop == 1 and phase == owner.final_phase:
                    owner.left(lane, finish, chain)
                chain[3] += after
        finally:
            self.hops += hops

    def _hurry(self, time_s: float) -> bool:
        """Put what is ready on its way before what is announced for then; whether there was any."""
        events = self._events
        onward = [n for n, event in enumerate(events) if event[0] == time_s and event[-1] > 0]
        for n in onward:
            _, _, order, transfer, hop = events[n]
            events[n] = (time_s, ONWARD, order, transfer, hop)
        heapify(events)
        return bool(onward)

    # Fair routes

    def _begin_shared(self, time_s: float) -> None:
        """Everything on fair routes that is ready at this moment begins, so that rates are shared
        out anew only once."""
        assert self._fair is not None
        events = self._events
        while events and events[0][0] == time_s and events[0][-1] == SHARED:
            _, _, order, transfer, _ = heappop(events)
            path, size, owner, slot, _, _, _ = transfer
            passed_s = 0.0
            for hop, at in enumerate(path, start=slot):
                owner.first_s[hop] = min(owner.first_s[hop], time_s + passed_s)
                passed_s += self._delay(at.resource, at.delay_s, time_s)
            route = tuple(at.resource for at in path)
            self._fair.begin(time_s, order, route, size, transfer)

    def _must_move(self, fair: FairShare) -> None:
        """Nothing more will happen on fair routes by itself: that must not leave a transfer where
        it is. Raises Stuck."""
        cut = fair.stuck()
        if cut is not None:
            line = self.lines[cut]
            assert line is not None
            raise Stuck(line.cut(None))

    def _finish(self, finished: Finished) -> None:
        """A transfer on a fair route has left the last of its hops; its last byte is on its way."""
        path, _, owner, slot, lane, phase, chain = finished.what
        self.hops += len(path)
        finish = finished.finish_s
        chain[1] += finished.own_s
        chain[2] += finished.background_s
        # The ledger counts the slowdown where a route's first WAN link is.
        owner.queued_s[slot + (len(path) > 2)] += finished.own_s + finished.background_s
        if phase == owner.final_phase:
            owner.left(lane, finish, chain)
        out = finish
        for hop, at in enumerate(path, start=slot):
            line = self.lines[at.resource]
            out += self._delay(at.resource, at.delay_s, finish) + (line.jitter() if line else 0.0)
            owner.last_s[hop] = max(owner.last_s[hop], out)
        before = self._delivered_s.get(id(path), 0.0)
        out = self._delivered_s[id(path)] = max(out, before)  # jitter never reorders a stream
        owner.last_s[slot + len(path) - 1] = max(owner.last_s[slot + len(path) - 1], out)
        chain[3] += out - finish
        owner.delivered(lane, phase, out, chain)

    def _delay(self, resource: int, delay_s: float, time_s: float) -> float:
        line = self.lines[resource]
        return delay_s if line is None else line.delay_at(time_s)

    # Other jobs, and how busy the links are

    def served(
        self, resource: int, starts: NDArray[np.float64], finishes: NDArray[np.float64]
    ) -> None:
        """A plain link served transfers of ours outside of the event loop, in this order."""
        line = self.lines[resource]
        assert line is not None
        line.usage.add_many(starts, finishes)

    def settle(self, end_s: float) -> None:
        """Let the other jobs' transfers go on until ``end_s``, on links that we used or not."""
        if self._fair is not None:
            self._fair.catch_up(end_s)
        for resource, line in enumerate(self.lines):
            if line is not None and line.background is not None:
                free_s = line.background.serve(end_s, self.free_s[resource])
                self.free_s[resource] = free_s

    def others(self, resource: int) -> Others | None:
        """What other jobs sent over a link so far; None: nothing."""
        line = self.lines[resource]
        if line is None or line.arrivals is None:
            return None
        if line.background is not None:
            queued_s, sent = line.background.queued_s, line.background
            found = Others(sent.bytes, sent.count, sent.first_start_s, sent.last_s, queued_s)
        else:
            assert self._fair is not None
            shared = self._fair.background[resource]
            found = Others(
                shared.bytes, shared.count, shared.first_start_s, shared.last_s, shared.queued_s
            )
        return found if found.count else None


def _fair_share(topology: Topology, lines: Sequence[Line | None]) -> FairShare:
    """All resources of a network as fair ones; those on fifo routes never see a flow."""
    capacity: list[Steps | float] = [inf] * topology.resources
    cap = [inf] * topology.resources
    arrivals, usage = {}, {}
    for resource, line in enumerate(lines):
        if line is not None and line.link.fair:
            link = line.link
            capacity[resource] = link.bytes_per_s if link.bandwidth is None else link.bandwidth
            cap[resource] = link.flow_bytes_per_s
            usage[resource] = line.usage
            if line.arrivals is not None:
                arrivals[resource] = line.arrivals
    homes = [*topology.island_of, topology.coordinator_island]
    ports = [topology.sites[home].lan_bytes_per_s for home in homes for _ in range(2)]
    capacity[len(topology.links) :] = ports
    return FairShare(capacity, cap, arrivals, usage)
