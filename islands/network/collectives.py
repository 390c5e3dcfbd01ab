"""What a collective puts on the wire: ring all-reduce, ring all-gather, and the star.

In a ring of p members, member i sends to member i + 1 in phases; in phase k it sends piece
(i − k) mod p and may do so once it has what arrived in phase k − 1. An all-gather has p − 1 phases
and piece j is the whole payload of member j. An all-reduce has 2(p − 1) phases and the pieces are p
nearly equal cuts of the payload at whole values: p − 1 phases of reduce-scatter, then p − 1 that
pass the sums round (Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms").

In a star every member sends its payload to the coordinator, which answers each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from islands.network.fabric import Fabric
from islands.network.ledger import Amounts, Lanes, Times, TransferRow
from islands.network.topology import COORDINATOR, Topology
from islands.trace import Bytes, Send

COLLECTIVES = ("all_reduce", "all_gather", "star")

#: Ids order ties by how many rounds the member entered before, then phase, then member. So a
#: member's later round never overtakes its earlier one, not even when both are ready at one moment.
_TRANSFER_BITS = 44


def cut(size: Bytes, itemsize: int, parts: int) -> tuple[Bytes, ...]:
    """Cut a payload into ``parts`` pieces at whole values, the first ones longer by one value.

    The payload is the buffer of values, then indices, then scales; a piece is a range of it. The
    last value may be short when the total is no multiple of ``itemsize``.
    """
    items = -(-size.total // itemsize)
    share, longer = divmod(items, parts)
    bounds = [min(size.total, itemsize * (c * share + min(c, longer))) for c in range(parts + 1)]
    pieces = []
    for low, high in pairwise(bounds):
        sizes, begin = [], 0
        for part in size:
            end = begin + part
            sizes.append(max(0, min(high, end) - max(low, begin)))
            begin = end
        pieces.append(Bytes(*sizes))
    return tuple(pieces)


class Listener(Protocol):
    """Who is told that a member is done with a collective."""

    def __call__(self, collective: Collective, member: int) -> None: ...


class Collective(Times):
    """One round of one fragment: who has entered it, and who is done since when.

    Times are emulated seconds, one entry per member; NaN until known.
    """

    final_phase = -1

    def __init__(
        self, key: tuple[int, int], members: int, slots: int, fabric: Fabric, tell: Listener
    ) -> None:
        super().__init__(slots)
        self.key = key
        self.members = members
        self.step = [0] * members
        self.ready_s = [np.nan] * members
        self.done_s = [np.nan] * members
        self.wire: Sequence[int] = ()
        self.entered = 0
        self.finished = 0
        self.received = 0
        self._fabric = fabric
        self._tell = tell
        self._order = [0] * members

    def enter(self, member: int, turn: int, ready_s: float, op: Send) -> None:
        """A member hands over its payload, in its own ``turn``-th send; twice is a ValueError."""
        if self.ready_s[member] == self.ready_s[member]:
            raise ValueError(f"worker {member} sends twice to round {self.key}")
        self.step[member] = op.step
        self._order[member] = turn << _TRANSFER_BITS
        self.ready_s[member] = ready_s
        self.entered += 1
        self._entered(member, op.size, op.itemsize)

    def finish(self, member: int, done_s: float) -> None:
        """Everything that this member sends has left and everything for it has arrived."""
        self.done_s[member] = done_s
        self.finished += 1
        self._tell(self, member)

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        raise NotImplementedError

    def left(self, lane: int, finish_s: float) -> None:
        """Only collectives whose members may be done before their data has arrived care."""

    def delivered(self, lane: int, phase: int, time_s: float) -> None:
        raise NotImplementedError

    def rows(self) -> list[TransferRow]:
        """The ledger rows of this collective, once all members are done."""
        raise NotImplementedError


class RingPlan:
    """All that follows from the sizes of a ring's pieces; computed once per distinct sizes."""

    def __init__(self, lanes: Lanes, pieces: Sequence[Bytes], turns: int) -> None:
        self.pieces = tuple(pieces)
        self.totals = [piece.total for piece in pieces]
        kinds = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        # Member i misses the last `turns` of turns·p phases: the pieces i + 1 … i + turns.
        sizes, counts = (
            turns * part.sum(0) - sum(np.roll(part, -j, axis=0) for j in range(1, turns + 1))
            for part in (kinds, (kinds > 0).astype(np.int64))
        )
        self.wire: list[int] = sizes.sum(1).tolist()
        self.amounts: Amounts = lanes.amounts(sizes, counts)


class Rings:
    """The ring over all workers in contiguous island order, and plans for payloads seen before."""

    def __init__(self, topology: Topology, collective: str, *, per_transfer: bool) -> None:
        self.members = topology.workers
        self.turns = 2 if collective == "all_reduce" else 1
        self.phases = self.turns * (self.members - 1)
        self.per_transfer = per_transfer
        ends = [(i, (i + 1) % self.members) for i in range(self.members)]
        self.lanes = Lanes(topology, ends if self.members > 1 else [])
        resources = [hop.resource for path in self.lanes.paths for hop in path]
        #: No two lanes share a resource, so lanes meet only where one hands over to the next.
        self.disjoint = len(set(resources)) == len(resources)
        self._plans: dict[tuple[Bytes | int, ...], RingPlan] = {}

    def plan(self, sizes: Sequence[Bytes], itemsize: int) -> RingPlan:
        """The plan for payloads of these sizes: one per member, or just one for an all-reduce."""
        reduce = self.turns == 2
        key = (sizes[0], itemsize) if reduce else tuple(sizes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= 64:  # sizes that vary from round to round are not worth keeping
                self._plans.clear()
            pieces = cut(sizes[0], itemsize, self.members) if reduce else sizes
            plan = self._plans[key] = RingPlan(self.lanes, pieces, self.turns)
        return plan


class Ring(Collective):
    """One ring collective. It waits for :meth:`launch` before it uses the event loop."""

    def __init__(self, rings: Rings, key: tuple[int, int], fabric: Fabric, tell: Listener) -> None:
        members = rings.members
        self.rings = rings
        self.launched = False
        self.final_phase = rings.phases - 1
        self._stride = rings.lanes.width if rings.per_transfer else 0
        self._sizes: list[Bytes | None] = [None] * members
        self._reduced = (Bytes(), 0)
        self._totals: list[int] = []
        self._inbox: list[list[float]] = [[] for _ in range(members)]
        self._left_s = [np.nan] * members
        self._arrived_s = [np.nan] * members
        slots = rings.lanes.width * (rings.phases if rings.per_transfer else 1)
        super().__init__(key, members, slots, fabric, tell)

    @property
    def plan(self) -> RingPlan:
        """Sizes of all pieces; known when all members have entered."""
        if self.rings.turns == 2:
            return self.rings.plan([self._reduced[0]], self._reduced[1])
        return self.rings.plan([size for size in self._sizes if size is not None], 1)

    def launch(self) -> None:
        """Start the sends of those who have entered; later ones start as they enter."""
        self.launched = True
        for member, size in enumerate(self._sizes):
            if size is not None:
                self._start(member)

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        self._sizes[member] = size
        if self.rings.turns == 1:
            if not self._totals:
                self._totals = [0] * self.members
            self._totals[member] = size.total
        elif self.entered == 1:
            self._reduced = (size, itemsize)
            self._totals = self.plan.totals
        elif (size, itemsize) != self._reduced:
            raise ValueError(
                f"worker {member} sends {(size, itemsize)} to all-reduce {self.key}, "
                f"others {self._reduced}"
            )
        if self.members == 1:
            self.wire = (0,)
            self.finish(member, self.ready_s[member])
        elif self.launched:
            self._start(member)

    def _start(self, member: int) -> None:
        ready_s = self.ready_s[member]
        self._send(member, 0, ready_s)
        # Neighbours may have been ready long before: what they sent need not wait any more.
        for phase, arrived_s in enumerate(self._inbox[member], start=1):
            if phase <= self.final_phase:
                self._send(member, phase, max(ready_s, arrived_s))

    def _send(self, member: int, phase: int, time_s: float) -> None:
        lanes = self.rings.lanes
        size = self._totals[(member - phase) % self.members]
        slot = lanes.slots[member] + phase * self._stride
        order = self._order[member] + phase * self.members + member
        self._fabric.send(time_s, order, (lanes.paths[member], size, self, slot, member, phase))

    def left(self, lane: int, finish_s: float) -> None:
        self._left_s[lane] = finish_s
        self._maybe_finish(lane)

    def delivered(self, lane: int, phase: int, time_s: float) -> None:
        member = lane + 1 if lane + 1 < self.members else 0
        if phase == self.final_phase:
            self._arrived_s[member] = time_s
            self._maybe_finish(member)
            return
        ready_s = self.ready_s[member]
        if ready_s == ready_s:
            self._send(member, phase + 1, time_s if time_s > ready_s else ready_s)
        else:
            self._inbox[member].append(time_s)

    def _maybe_finish(self, member: int) -> None:
        arrived_s, left_s = self._arrived_s[member], self._left_s[member]
        if arrived_s == arrived_s and left_s == left_s:
            self.wire = self.wire or self.plan.wire
            self.finish(member, max(arrived_s, left_s))

    def rows(self) -> list[TransferRow]:
        lanes, plan = self.rings.lanes, self.plan
        if self.rings.per_transfer:
            return lanes.rows_each(self.key, self, self._transfers(plan.pieces))
        return lanes.rows(self.key, self, plan.amounts)

    def _transfers(self, pieces: Sequence[Bytes]) -> Iterator[tuple[int, int, Bytes]]:
        for phase in range(self.rings.phases):
            for lane in range(self.members):
                yield phase, lane, pieces[(lane - phase) % self.members]


class Star(Collective):
    """All members' payloads go to the coordinator; when the last is in, each gets an answer.

    The answer has the size of the lowest member's payload.
    """

    def __init__(self, stars: Stars, key: tuple[int, int], fabric: Fabric, tell: Listener) -> None:
        super().__init__(key, stars.members, stars.lanes.width, fabric, tell)
        self._stars = stars
        self._sizes = [Bytes()] * stars.members
        self._in = 0
        self._closed_s = 0.0

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        self._sizes[member] = size
        if self.members == 1:
            self.wire = (0,)
            self.finish(member, self.ready_s[member])
        else:
            self._send(member, 0, self.ready_s[member], size.total)

    def _send(self, lane: int, phase: int, time_s: float, size: int) -> None:
        lanes = self._stars.lanes
        transfer = (lanes.paths[lane], size, self, lanes.slots[lane], lane, phase)
        order = self._order[lane % self.members] + lane
        self._fabric.send(time_s, order, transfer)

    def delivered(self, lane: int, phase: int, time_s: float) -> None:
        if phase == 1:
            self.finish(lane - self.members, time_s)
            return
        self._in += 1
        self._closed_s = max(self._closed_s, time_s)
        if self._in == self.members:
            answer = self._sizes[0].total
            self.wire = [size.total + answer for size in self._sizes]
            for down in range(self.members, 2 * self.members):
                self._send(down, 1, self._closed_s, answer)

    def rows(self) -> list[TransferRow]:
        lanes = self._stars.lanes
        if not lanes.paths:
            return []
        sizes = [*self._sizes, *[self._sizes[0]] * self.members]
        if self._stars.per_transfer:
            transfers = ((0, lane, size) for lane, size in enumerate(sizes))
            return lanes.rows_each(self.key, self, transfers)
        kinds = np.array(sizes, dtype=np.int64)
        return lanes.rows(self.key, self, lanes.amounts(kinds, (kinds > 0).astype(np.int64)))


class Stars:
    """Paths up from every worker, then down to every worker; none for a worker that is alone."""

    def __init__(self, topology: Topology, *, per_transfer: bool) -> None:
        self.members = topology.workers
        self.per_transfer = per_transfer
        workers = range(self.members if self.members > 1 else 0)
        up = [(worker, COORDINATOR) for worker in workers]
        down = [(COORDINATOR, worker) for worker in workers]
        self.lanes = Lanes(topology, [*up, *down])
        self.pairs = [Lanes(topology, list(ends)) for ends in zip(up, down, strict=True)]


class Contribution(Collective):
    """One worker's own round in a star whose answers depend on time: up, a decision, down.

    Its only member has number 0 here, whichever worker it is.
    """

    def __init__(
        self,
        stars: Stars,
        key: tuple[int, int],
        worker: int,
        fabric: Fabric,
        tell: Listener,
    ) -> None:
        self._lanes = stars.pairs[worker] if stars.pairs else None
        super().__init__(key, 1, self._lanes.width if self._lanes else 0, fabric, tell)
        self.worker = worker
        self.arrived = False
        self.answered = False
        self._sizes = [Bytes(), Bytes()]

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        self._order[member] += self.worker
        self._move(0, self.ready_s[member], size)

    def answer(self, time_s: float, size: Bytes) -> None:
        """The coordinator sends its answer at ``time_s``."""
        self.answered = True
        up = self._sizes[0].total
        self.wire = (up + size.total if self._lanes else 0,)
        self._move(1, time_s, size)

    def _move(self, lane: int, time_s: float, size: Bytes) -> None:
        self._sizes[lane] = size
        if self._lanes is None:
            self.delivered(lane, lane, time_s)
            return
        path, slot = self._lanes.paths[lane], self._lanes.slots[lane]
        self._fabric.send(time_s, self._order[0], (path, size.total, self, slot, lane, lane))

    def delivered(self, lane: int, phase: int, time_s: float) -> None:
        if lane == 0:
            self._fabric.announce(time_s, self._order[0], self)
        else:
            self.finish(0, time_s)

    def rows(self) -> list[TransferRow]:
        """The rows of the latest transfer: up when it has arrived, down when that has."""
        if self._lanes is None:
            return []
        lane = int(self.answered)
        return self._lanes.rows_each(self.key, self, [(0, lane, self._sizes[lane])])
