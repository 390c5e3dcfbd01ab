"""The star: every member sends its payload to the coordinator, which answers each of them.

For the operation ``all_reduce`` all payloads have one size and so has the answer. For
``all_gather`` a member is sent everything of the others. For ``star``, the operation of methods
that need a coordinator, the answer has the size of the lowest member's payload; it may also depend
on time, and then every member's contribution is a collective of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from islands.network.collectives import (
    Carrier,
    Collective,
    Listener,
    Scheme,
    Standing,
    check_reduced,
)
from islands.network.fabric import ARRIVED, Chain
from islands.network.ledger import Lanes, TransferRow
from islands.network.topology import COORDINATOR, Topology
from islands.trace import Bytes


def others_of(sizes: Sequence[Bytes]) -> list[Bytes]:
    """For each member what the others have in all, kind by kind."""
    total = Bytes(*map(sum, zip(*sizes, strict=True)))
    return [Bytes(*(a - b for a, b in zip(total, size, strict=True))) for size in sizes]


class Stars(Scheme):
    """Paths up from every member, then down to every member; none for one that is alone."""

    def __init__(
        self,
        topology: Topology,
        operation: str,
        members: Collection[int] | None = None,
        *,
        per_transfer: bool,
    ) -> None:
        super().__init__(range(topology.workers), members)
        self.operation = operation
        self.per_transfer = per_transfer
        workers = self.order if self.members > 1 else ()
        up = [(worker, COORDINATOR) for worker in workers]
        down = [(COORDINATOR, worker) for worker in workers]
        self.lanes = Lanes(topology, [*up, *down])

    def open(self, key: tuple[int, int], fabric: Carrier, tell: Listener) -> Star:
        """The star of one round."""
        return Star(self, key, fabric, tell)

    def answers(self, sizes: Sequence[Bytes]) -> Sequence[Bytes]:
        """What each member is sent when the payloads have these sizes."""
        return others_of(sizes) if self.operation == "all_gather" else [sizes[0]] * len(sizes)


class Star(Collective):
    """All members' payloads go to the coordinator; when the last is in, each gets an answer."""

    def __init__(self, stars: Stars, key: tuple[int, int], fabric: Carrier, tell: Listener) -> None:
        super().__init__(stars, key, stars.lanes.width, fabric, tell)
        self._stars = stars
        self._sizes = [Bytes()] * stars.members
        self._answers: Sequence[Bytes] = ()
        self._reduced: tuple[Bytes, int] | None = None
        self._in = 0
        #: The arrival that closes the round: when, and from which member (as −lane, so that the
        #: greatest is the latest and, at one moment, the lowest member's), and its chain.
        self._last: tuple[float, int, Chain] = (-np.inf, 0, [])

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        if self._stars.operation == "all_reduce":
            self._reduced = self._reduced or (size, itemsize)
            check_reduced(self.key, member, (size, itemsize), self._reduced)
        self._sizes[member] = size
        if self.members == 1:
            self._alone()
        else:
            self._send(member, 0, self.ready_s[member], size.total, self._own(member))

    def _send(self, lane: int, phase: int, time_s: float, size: int, chain: Chain) -> None:
        lanes = self._stars.lanes
        transfer = (lanes.paths[lane], size, self, lanes.slots[lane], lane, phase, chain)
        order = self._first[lane % self.members] + phase * self._width
        self._fabric.send(time_s, order, transfer)

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        if phase == 1:
            self.finish(lane - self.members, time_s, chain)
            return
        self._in += 1
        self._last = max(self._last, (time_s, -lane, chain))
        if self._in == self.members:
            closed_s, _, binding = self._last
            self._answers = self._stars.answers(self._sizes)
            answers = [answer.total for answer in self._answers]
            self.wire = [up.total + down for up, down in zip(self._sizes, answers, strict=True)]
            for member, answer in enumerate(answers):
                self._send(self.members + member, 1, closed_s, answer, binding.copy())

    def rows(self) -> list[TransferRow]:
        lanes = self._stars.lanes
        if not lanes.paths:
            return []
        if self._stars.per_transfer:
            return lanes.rows_each(self.key, self, self.transfers())
        kinds = np.array([*self._sizes, *self._answers], dtype=np.int64)
        return lanes.rows(self.key, self, lanes.amounts(kinds, (kinds > 0).astype(np.int64)))

    def transfers(self) -> Iterator[tuple[int, int, Bytes]]:
        answers = self._answers or self._stars.answers(self._sizes)
        for lane, size in enumerate([*self._sizes, *answers] if self._stars.lanes.paths else ()):
            yield 0, lane, size


class Contributions:
    """The stars of single workers, whose answers depend on time."""

    def __init__(self, topology: Topology) -> None:
        workers = range(topology.workers)
        self.standings = [Standing(workers, [worker]) for worker in workers]
        #: Per worker its way up and its way down; none for a worker that is alone.
        self.pairs = [
            Lanes(topology, [(worker, COORDINATOR), (COORDINATOR, worker)])
            for worker in workers
            if topology.workers > 1
        ]

    def open_for(
        self, worker: int, key: tuple[int, int], fabric: Carrier, tell: Listener
    ) -> Contribution:
        """The round of one ``worker``."""
        return Contribution(self, key, worker, fabric, tell)


class Contribution(Collective):
    """One worker's own round in a star whose answers depend on time: up, a decision, down.

    Its only member has number 0 here, whichever worker it is.
    """

    def __init__(
        self,
        stars: Contributions,
        key: tuple[int, int],
        worker: int,
        fabric: Carrier,
        tell: Listener,
    ) -> None:
        lanes = self._lanes = stars.pairs[worker] if stars.pairs else None
        super().__init__(stars.standings[worker], key, lanes.width if lanes else 0, fabric, tell)
        self.worker = worker
        self.arrived = False
        self.answered = False
        self._sizes = [Bytes(), Bytes()]
        self._arrived_s = np.nan
        self._chain: Chain = []

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        self._chain = self._own(member)
        self._move(0, self.ready_s[member], size)

    def answer(self, time_s: float, size: Bytes) -> None:
        """The coordinator sends its answer at ``time_s``.

        What it took to decide (for others to arrive, as a rule) is the chain's ``others_s``.
        """
        self.answered = True
        self._chain[4] += time_s - self._arrived_s
        up = self._sizes[0].total
        self.wire = (up + size.total if self._lanes else 0,)
        self._move(1, time_s, size)

    def _move(self, lane: int, time_s: float, size: Bytes) -> None:
        self._sizes[lane] = size
        if self._lanes is None:
            self.delivered(lane, lane, time_s, self._chain)
            return
        path, slot = self._lanes.paths[lane], self._lanes.slots[lane]
        transfer = (path, size.total, self, slot, lane, lane, self._chain)
        self._fabric.send(time_s, self._first[0], transfer)

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        self._chain = chain
        if lane == 0:
            self._arrived_s = time_s
            self._fabric.announce(time_s, ARRIVED, self._first[0], self)
        else:
            self.finish(0, time_s, chain)

    def rows(self) -> list[TransferRow]:
        """The rows of the latest transfer: up when it has arrived, down when that has."""
        if self._lanes is None:
            return []
        lane = int(self.answered)
        return self._lanes.rows_each(self.key, self, [(0, lane, self._sizes[lane])])

    def transfers(self) -> Iterator[tuple[int, int, Bytes]]:
        for lane, size in enumerate(self._sizes if self._lanes else ()):
            yield 0, lane, size
