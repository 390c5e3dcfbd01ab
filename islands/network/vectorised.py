"""A ring that is alone on its FIFO links, computed a phase at a time as arrays.

When no two lanes of a ring share a resource and no other traffic can come between, the order of
service is known beforehand: phase after phase. So the event loop's formulas hold element by element
for all members at once, and the same operations in the same order give the same bits.

Lanes have unequal numbers of hops. A shorter one is padded, before its in-port, with hops that
change nothing: such a hop takes over start and finish of the hop before it unchanged, because its
ready time is that start (the term of cutting through is −inf), it is never busy longer than the hop
before it, and it serves at that hop's bandwidth.

The chain of each member's latest arrival goes along: in every phase it moves to the next member,
grows by what its transfer waited and by the delays it crossed, and starts anew where the member was
not ready before. From the phase on in which no member was later than its arrival, none ever is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from islands.network.collectives import Ring, Rings, Why

#: Members from which a phase costs less as a few array operations than as that many events.
FASTER_AS_ARRAYS = 6
#: So many service times of WAN links are kept before they are handed on.
_KEPT = 1 << 20

#: Told, per WAN link and in order of time: resource, starts and finishes of what it served.
Served: TypeAlias = Callable[[int, NDArray[np.float64], NDArray[np.float64]], None]


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
        #: Where the WAN links are in the flattened (levels, 2, members) array of starts and ends.
        self._wan = [
            (resource, level * 2 * self.members + lane)
            for level, row in enumerate(resources)
            for lane, resource in enumerate(row)
            if 0 <= resource < rings.wan_links
        ]
        self._slots = np.array(slots, dtype=np.intp)

    def run(self, ring: Ring, free_s: list[float], served: Served) -> None:
        """Finish a ring for all its members, move ``free_s`` on and tell what WAN links served.

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
        ready, queued_s = np.empty(shape), np.zeros(shape)
        # [0] is when a hop starts, [1] when it has finished, which is also when it is free again.
        busy = np.empty((levels, 2, members))
        start, free = busy[:, 0], busy[:, 1]
        free[:] = np.array(
            [-inf if number < 0 else free_s[number] for number in self._resources]
        ).reshape(shape)
        chains = _Chains(own, self._after)
        waited = chains.waited
        kept = _Kept(self._wan, busy, self.phases, served)
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
            kept.keep()
            if phase == self.phases - 1:
                chains.leave()
            received[0] = received[members]
            maximum(own, received_s, out=first_ready)
            chains.move(received_s)
        kept.hand_on()
        ring.first_s = first_s.ravel()[self._slots].tolist()
        ring.last_s = (free + self._delay).ravel()[self._slots].tolist()
        ring.queued_s = queued_s.ravel()[self._slots].tolist()
        for number, moment in zip(self._resources, free.ravel().tolist(), strict=True):
            if number >= 0:
                free_s[number] = moment
        left_s = free[0]
        ring.done_s = maximum(received_s, left_s).tolist()
        ring.why = chains.why(received_s > left_s)
        ring.finished = members


class _Chains:
    """The chain of every member's next transfer, and what the present phase adds to it.

    ``waited`` is the array (levels, members) into which each phase's waiting is to be written.
    """

    def __init__(self, own: NDArray[np.float64], after: NDArray[np.float64]) -> None:
        levels, members = after.shape
        self.waited = np.empty((levels, members))
        self._own = own
        #: Where the chains began, ``_passed`` members before the present ones.
        self._root, self._passed = own, 0
        self._chain: list[NDArray[np.float64]] = []  # own_s, propagation_s
        self._steps: list[tuple[NDArray[np.float64], ...]] = []
        self._wraps: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        for adds in (self.waited, after):
            # A chain that is delivered is the next member's: the same memory, one place on.
            wide = np.zeros(members + 1)
            chain, delivered = wide[:-1], wide[1:]
            outs = [np.empty(members) for _ in range(levels - 1)]
            self._steps += zip([chain, *outs], adds, [*outs, delivered], strict=True)
            self._chain.append(chain)
            self._wraps.append((wide[:1], wide[-1:]))
        self._early = np.ones(members, dtype=bool)
        self._any_early = True
        self._left = np.empty((3, members))

    def leave(self) -> None:
        """Before the last :meth:`move`: the chains of what leaves the members' ports."""
        queued_s, propagation_s = self._chain
        self._left[0] = np.roll(self._root, self._passed)
        self._left[1] = queued_s + self.waited[0]
        self._left[2] = propagation_s

    def move(self, received_s: NDArray[np.float64]) -> None:
        """After a phase: the chains as they arrive at the next members, and which go on there."""
        for chain, added, out in self._steps:
            np.add(chain, added, out)
        for first, last in self._wraps:
            first[:] = last
        self._passed += 1
        if self._any_early:
            np.less_equal(received_s, self._own, out=self._early)
            self._any_early = bool(self._early.any())
            self._root = np.where(self._early, self._own, np.roll(self._root, self._passed))
            self._passed = 0
            for chain in self._chain:
                np.copyto(chain, 0.0, where=self._early)

    def why(self, arrived_last: NDArray[np.bool_]) -> list[Why]:
        """What decided each member's end: its last arrival or the last that left its port."""
        arrived = [np.roll(self._root, self._passed), *self._chain]
        root, own, propagation = np.where(arrived_last, arrived, self._left).tolist()
        return [
            (since_s, queued_s, 0.0, delay_s, 0.0)
            for since_s, queued_s, delay_s in zip(root, own, propagation, strict=True)
        ]


class _Kept:
    """When the WAN links served, phase by phase, until enough of it is there to be handed on."""

    def __init__(
        self,
        wan: Sequence[tuple[int, int]],
        busy: NDArray[np.float64],
        phases: int,
        served: Served,
    ) -> None:
        members = busy.shape[2]
        starts = [at for _, at in wan]
        self._resources = [resource for resource, _ in wan]
        self._index = np.array([*starts, *(at + members for at in starts)], dtype=np.intp)
        self._busy = busy.reshape(-1)
        self._served = served
        most = min(phases, max(1, _KEPT // max(1, len(self._index))))
        self._rows = np.empty((most if wan else 0, len(self._index)))
        self._filled = 0

    def keep(self) -> None:
        """Note the present phase."""
        if not self._resources:
            return
        # Clipping never happens; it only spares the copy that an error would need.
        self._busy.take(self._index, out=self._rows[self._filled], mode="clip")
        self._filled += 1
        if self._filled == len(self._rows):
            self.hand_on()

    def hand_on(self) -> None:
        """Tell what is kept, and begin anew."""
        links = len(self._resources)
        for n, resource in enumerate(self._resources):
            rows = self._rows[: self._filled]
            if len(rows):
                self._served(resource, rows[:, n].copy(), rows[:, links + n].copy())
        self._filled = 0
