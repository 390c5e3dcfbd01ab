"""A ring that is alone on its FIFO links, computed a phase at a time as arrays.

When no two lanes of a ring share a resource and no other traffic can come between, the order of
service is known beforehand: phase after phase. So the event loop's formulas hold element by element
for all members at once, and the same operations in the same order give the same bits.

Lanes have unequal numbers of hops. A shorter one is padded, before its in-port, with hops that
change nothing: such a hop takes over start and finish of the hop before it unchanged, because its
ready time is that start (the term of cutting through is −inf), it is never busy longer than the hop
before it, and it serves at that hop's bandwidth.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from islands.network.collectives import Ring, Rings

#: Members from which a phase costs less as a few array operations than as that many events.
FASTER_AS_ARRAYS = 6


class RingArrays:
    """Bandwidths and delays of a ring's hops as arrays of shape (levels, members)."""

    def __init__(self, rings: Rings) -> None:
        paths = rings.lanes.paths
        self.members = rings.members
        self.phases = rings.phases
        self.levels = max((len(path) for path in paths), default=0)
        shape = (self.levels, self.members)
        self._rate = np.ones(shape)
        self._padding = np.zeros(shape)  # inf where a hop is only padding
        self._after = np.zeros(shape)  # delay to the next level
        self._delay = np.zeros(shape)  # delay of the hop itself
        resources = [[-1] * self.members for _ in range(self.levels)]
        slots = []
        for lane, path in enumerate(paths):
            padded = [*path[:-1], *[None] * (self.levels - len(path)), path[-1]]
            for level, hop in enumerate(padded):
                here, before = (level, lane), (level - 1, lane)
                if hop is None:
                    self._rate[here] = self._rate[before]
                    self._padding[here] = inf
                    self._after[here], self._after[before] = self._after[before], 0.0
                    continue
                self._rate[here] = hop.bytes_per_s
                self._after[here] = self._delay[here] = hop.delay_s
                resources[level][lane] = hop.resource
                slots.append(level * self.members + lane)
        self._resources = [number for row in resources for number in row]
        self._slots = np.array(slots, dtype=np.intp)

    def run(self, ring: Ring, free_s: list[float]) -> None:
        """Finish a ring for all its members and move ``free_s`` on.

        All members must have entered ``ring``, and none may have a transfer in flight.
        """
        plan = ring.plan
        ring.wire = plan.wire
        members, levels = self.members, self.levels
        # Twice in a row, so that a slice is the piece of every member in a phase.
        pieces = np.array(plan.totals * 2, dtype=np.float64)
        even = len(set(plan.totals)) == 1
        own: NDArray[np.float64] = np.array(ring.ready_s)
        shape = (levels, members)
        serve, cut = np.empty(shape), np.empty(shape)
        ready, waited, queued_s = np.empty(shape), np.empty(shape), np.zeros(shape)
        # [0] is when a hop starts, [1] when it has finished, which is also when it is free again.
        busy = np.empty((levels, 2, members))
        start, free = busy[:, 0], busy[:, 1]
        free[:] = np.array(
            [-inf if number < 0 else free_s[number] for number in self._resources]
        ).reshape(shape)
        handed = np.empty((2, members))
        through, full = handed
        received = np.empty(members + 1)
        delivered, received_s = received[1:], received[:-1]
        # Views made once: per level what it works on, and the next level's cut and ready time.
        works_on = (ready, start, free, serve, busy, self._after)
        inner = [
            (*(array[level] for array in works_on), cut[level + 1], ready[level + 1])
            for level in range(levels - 1)
        ]
        last_ready, last_start, last_free = ready[-1], start[-1], free[-1]
        last_serve, last_delay = serve[-1], self._after[-1]
        add, subtract, maximum = np.add, np.subtract, np.maximum
        first_ready = ready[0]
        first_ready[:] = own
        first_s = start
        for phase in range(self.phases):
            if phase == 0 or not even:
                at = members - phase % members
                np.divide(pieces[at : at + members], self._rate, serve)
                add(serve, self._padding, cut)
            for r, s, f, serving, both, after, next_cut, next_ready in inner:
                maximum(r, f, out=s)
                add(s, serving, f)
                add(both, after, handed)
                subtract(full, next_cut, full)
                maximum(through, full, out=next_ready)
            maximum(last_ready, last_free, out=last_start)
            add(last_start, last_serve, last_free)
            add(last_free, last_delay, delivered)
            subtract(start, ready, waited)
            add(queued_s, waited, queued_s)
            if phase == 0:
                first_s = start.copy()
            received[0] = received[members]
            maximum(own, received_s, out=first_ready)
        ring.first_s = first_s.ravel()[self._slots].tolist()
        ring.last_s = (free + self._delay).ravel()[self._slots].tolist()
        ring.queued_s = queued_s.ravel()[self._slots].tolist()
        for number, moment in zip(self._resources, free.ravel().tolist(), strict=True):
            if number >= 0:
                free_s[number] = moment
        ring.done_s = maximum(received_s, free[0]).tolist()
        ring.finished = members
