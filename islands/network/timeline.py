"""Times a trace: gives every operation of every worker its moment on the emulated clock.

Each worker has a clock of its own. Computing moves it, sending hands a payload to a collective and
goes on, receiving waits until the collective is done for this worker. Workers run ahead as far as
their known operations carry them, which leaves sends at future moments in the fabric; the fabric
then processes what happens between the workers.

Causality: a worker that ran out of operations at clock c may yet send at c or later, so nothing at
or after c is processed before more operations of it are known. A waiting worker cannot send, so it
holds up nothing. That makes the result independent of how the operations are handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from islands.clock import ComputeModel, FixedSteps
from islands.errors import InputError, nearest
from islands.network.collectives import (
    COLLECTIVES,
    Collective,
    Contribution,
    Ring,
    Rings,
    Star,
    Stars,
)
from islands.network.fabric import Fabric
from islands.network.ledger import Ledger, LinkTotals, TransferRow
from islands.network.topology import Topology
from islands.network.vectorised import FASTER_AS_ARRAYS, RingArrays
from islands.trace import Bytes, Compute, End, Mark, Op, Receive, Send


class Arrival(NamedTuple):
    """A worker's contribution has reached the coordinator at ``time_s``."""

    time_s: float
    worker: int
    fragment: int
    version: int


class SyncTiming(NamedTuple):
    """One worker's passage through one round: ready to send, done receiving, time spent waiting."""

    fragment: int
    version: int
    worker: int
    step: int
    ready_s: float
    done_s: float
    wait_s: float
    wire_bytes: int


class WorkerClock(NamedTuple):
    """How far a worker has come, and what it spent its emulated time on."""

    compute_s: float
    wait_s: float
    clock_s: float


@dataclass
class Timings:
    """What became known since the last :meth:`Timeline.take`.

    ``steps`` holds (worker, first step, starts, ends), the last two float64 arrays in seconds.
    ``marks`` holds (step, moment when the last worker passed it); ``clocks`` has every worker's as
    of now, ``links`` the totals so far of every link.
    """

    steps: list[tuple[int, int, NDArray[np.float64], NDArray[np.float64]]] = field(
        default_factory=list
    )
    syncs: list[SyncTiming] = field(default_factory=list)
    transfers: list[TransferRow] = field(default_factory=list)
    marks: list[tuple[int, float]] = field(default_factory=list)
    clocks: list[WorkerClock] = field(default_factory=list)
    links: dict[str, LinkTotals] = field(default_factory=dict)


class _Worker:
    """One worker's clock and the operations it has not come to yet."""

    __slots__ = ("clock_s", "compute_s", "ended", "number", "ops", "sends", "wait_s", "waits_for")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ops: deque[Op] = deque()
        self.clock_s = 0.0
        self.compute_s = 0.0
        self.wait_s = 0.0
        self.sends = 0
        self.waits_for: Collective | None = None
        self.ended = False


class Timeline:
    """Gives every operation of a trace its emulated time.

    ``collective`` is ``all_reduce``, ``all_gather`` or ``star``. With ``timed`` (star only) every
    send is a contribution of its own, and the caller decides at each :class:`Arrival` whom to
    answer. ``per_transfer`` gives a ledger row per transfer instead of per round and link.
    A ring that meets no other traffic is computed as arrays where that is faster; ``vectorise``
    forces or forbids it, and changes no bit of any result.
    """

    def __init__(
        self,
        topology: Topology,
        compute: ComputeModel,
        collective: str,
        *,
        timed: bool = False,
        per_transfer: bool = False,
        vectorise: bool | None = None,
    ) -> None:
        if collective not in COLLECTIVES:
            raise InputError(
                f"collective: unknown {collective!r}{nearest(collective, COLLECTIVES)}"
            )
        if timed and collective != "star":
            raise ValueError("only a star can answer by time")
        self.topology = topology
        self.wire_bytes = 0
        self._compute = compute
        self._timed = timed
        self._fabric = Fabric(topology.resources)
        self._ledger = Ledger(topology, per_transfer=per_transfer)
        self._stars = Stars(topology, per_transfer=per_transfer) if collective == "star" else None
        self._rings = Rings(
            topology,
            "all_reduce" if collective == "star" else collective,
            per_transfer=per_transfer,
        )
        self._arrays = None
        if vectorise is None:
            vectorise = topology.workers >= FASTER_AS_ARRAYS
        able = self._rings.disjoint and topology.workers > 1 and collective != "star"
        if vectorise and able and not per_transfer:
            self._arrays = RingArrays(self._rings)
        self._workers = [_Worker(number) for number in range(topology.workers)]
        self._runnable: list[_Worker] = []
        self._starved = set(self._workers)
        self._waiting = 0
        self._open: dict[tuple[int, int, int], Collective] = {}
        self._flying = 0
        self._held: Ring | None = None
        self._now_s = 0.0
        self._passed: dict[int, list[float]] = {}
        self._found = Timings()

    # What goes in

    def extend(self, ops: Iterable[tuple[int, Op]]) -> None:
        """More operations, as (worker, operation), in each worker's own order."""
        for number, op in ops:
            worker = self._workers[number]
            if worker.ended:
                raise ValueError(f"worker {number} has ended and cannot {op}")
            worker.ops.append(op)
            if worker in self._starved:
                self._starved.remove(worker)
                self._runnable.append(worker)

    def reply(self, worker: int, fragment: int, version: int, nbytes: int, itemsize: int) -> None:
        """Answer a contribution that has arrived, at the time of the latest :class:`Arrival`.

        ``itemsize`` is part of the interface for collectives that cut answers at whole values.
        """
        contribution = self._open.get((fragment, version, worker))
        if not isinstance(contribution, Contribution) or not contribution.arrived:
            raise ValueError(f"nothing of worker {worker} for {(fragment, version)} has arrived")
        if contribution.answered:
            raise ValueError(f"worker {worker} was answered for {(fragment, version)} before")
        contribution.answer(self._now_s, Bytes(values=nbytes))

    def control(self, worker: int, nbytes: int) -> None:
        """Count bytes handed to ``worker`` out of band, such as the initial model: no time passes.

        They come from the first worker of the coordinator's island, which itself gets nothing.
        """
        source = self.topology.island_of.index(self.topology.coordinator_island)
        if worker != source and nbytes:
            self._ledger.control(source, worker, nbytes, self._workers[worker].clock_s)

    # What comes out

    def take(self) -> Timings:
        """Everything that was found since the last call, and every worker's clock as of now."""
        found, self._found = self._found, Timings()
        found.transfers = self._ledger.take()
        found.clocks = [WorkerClock(w.compute_s, w.wait_s, w.clock_s) for w in self._workers]
        found.links = self._ledger.links
        return found

    @property
    def links(self) -> dict[str, LinkTotals]:
        """Totals of every WAN link and LAN over the collectives completed so far."""
        return self._ledger.links

    @property
    def wan_bytes(self) -> int:
        """Bytes over all WAN links so far."""
        return self._ledger.wan_bytes

    @property
    def lan_bytes(self) -> int:
        """Bytes inside islands so far."""
        return self._ledger.lan_bytes

    @property
    def control_bytes(self) -> int:
        """Control bytes so far, summed over the links they crossed."""
        return self._ledger.control_bytes

    @property
    def hops(self) -> int:
        """Events that the event loop has processed; the vectorised path needs none."""
        return self._fabric.hops

    # The loop

    def advance(self) -> Arrival | None:
        """Simulate as far as causality permits.

        With ``timed`` it stops at every arrival, having processed nothing later, and returns it.
        None means that more operations (or the answers still owed) are needed, or that all is done.
        """
        while True:
            while self._runnable:
                self._run(self._runnable.pop())
            held = self._held
            if held is None:
                self._fabric.horizon_s = min((w.clock_s for w in self._starved), default=inf)
                event = self._fabric.run()
                if event is not None:
                    return self._arrived(*event)
                if self._held is None:
                    break
            elif self._waiting == len(self._workers):
                self._finish_at_once(held)
            elif self._starved:
                break
            else:
                self._release()
        if self._waiting and not self._starved and not self._timed:
            stuck = next(w for w in self._workers if w.waits_for is not None)
            assert stuck.waits_for is not None
            raise ValueError(
                f"worker {stuck.number} waits for round {stuck.waits_for.key}, which "
                f"{stuck.waits_for.entered} of {len(self._workers)} workers joined"
            )
        return None

    def _run(self, worker: _Worker) -> None:
        """Let a worker go on until it waits, ends, or has no more operations."""
        ops = worker.ops
        while ops:
            op = ops.popleft()
            if type(op) is Compute:
                self._compute_steps(worker, op)
            elif type(op) is Send:
                self._send(worker, op)
            elif type(op) is Receive:
                if not self._receive(worker, op):
                    return
            elif type(op) is Mark:
                self._mark(worker, op.step)
            else:
                worker.ended = True
                if ops:
                    raise ValueError(f"worker {worker.number} has operations after its end")
                return
        self._starved.add(worker)
        if worker.clock_s < self._fabric.horizon_s:
            self._fabric.horizon_s = worker.clock_s

    def _compute_steps(self, worker: _Worker, op: Compute) -> None:
        # One addition per step, for clock and sum alike: cutting an operation changes no bit.
        sums = np.empty((2, op.count + 1))
        sums[0, 0], sums[1, 0] = worker.clock_s, worker.compute_s
        sums[:, 1:] = self._compute.seconds(worker.number, op.first, op.count)
        sums = sums.cumsum(axis=1)
        worker.clock_s, worker.compute_s = sums[:, -1].tolist()
        if op.count:
            self._found.steps.append((worker.number, op.first, sums[0, :-1], sums[0, 1:]))

    def _mark(self, worker: _Worker, step: int) -> None:
        passed = self._passed.setdefault(step, [])
        passed.append(worker.clock_s)
        if len(passed) == len(self._workers):
            self._found.marks.append((step, max(passed)))
            del self._passed[step]

    # Rounds

    def _key(self, worker: _Worker, op: Send | Receive) -> tuple[int, int, int]:
        return op.fragment, op.version, worker.number if self._timed else -1

    def _member(self, worker: _Worker) -> int:
        return 0 if self._timed else worker.number

    def _send(self, worker: _Worker, op: Send) -> None:
        key = self._key(worker, op)
        collective = self._open.get(key)
        if collective is None:
            collective = self._open[key] = self._begin(worker, (op.fragment, op.version))
        worker.sends += 1
        collective.enter(self._member(worker), worker.sends, worker.clock_s, op)

    def _begin(self, worker: _Worker, key: tuple[int, int]) -> Collective:
        """Open a round. A ring that may prove to be alone is held back: see `_finish_at_once`."""
        if self._held is not None:
            self._release()
        self._flying += 1
        if self._stars is not None and self._timed:
            return Contribution(self._stars, key, worker.number, self._fabric, self._done)
        if self._stars is not None:
            return Star(self._stars, key, self._fabric, self._done)
        ring = Ring(self._rings, key, self._fabric, self._done)
        if self._arrays is not None and self._flying == 1:
            self._held = ring
        else:
            ring.launch()
        return ring

    def _release(self) -> None:
        """The held ring meets other traffic after all: give it to the event loop."""
        ring, self._held = self._held, None
        assert ring is not None
        ring.launch()

    def _finish_at_once(self, ring: Ring) -> None:
        """All workers wait for this ring and nothing else is in flight: compute it as arrays.

        Holding a ring back is safe: as long as nothing else flies, no event is processed, and no
        member of a ring can be done before all have entered it.
        """
        assert self._arrays is not None
        self._held = None
        self._arrays.run(ring, self._fabric.free_s)
        self._complete(ring)
        for worker in self._workers:
            self._wake(worker, ring, worker.number)
        self._runnable += self._workers

    def _done(self, collective: Collective, member: int) -> None:
        """A member is done with a collective: it goes on if it was waiting for that."""
        if collective.finished == collective.members:
            self._complete(collective)
        worker = self._workers[
            collective.worker if isinstance(collective, Contribution) else member
        ]
        if worker.waits_for is collective:
            self._wake(worker, collective, member)
            self._run(worker)

    def _complete(self, collective: Collective) -> None:
        self._flying -= 1
        self._ledger.add(collective.rows())
        self.wire_bytes += sum(collective.wire)

    def _wake(self, worker: _Worker, collective: Collective, member: int) -> None:
        self._waiting -= 1
        worker.waits_for = None
        self._pass(worker, collective, member)

    def _receive(self, worker: _Worker, op: Receive) -> bool:
        """Whether the worker can go on now."""
        collective, member = self._open.get(self._key(worker, op)), self._member(worker)
        if collective is None or collective.ready_s[member] != collective.ready_s[member]:
            raise ValueError(
                f"worker {worker.number} receives {(op.fragment, op.version)} without having sent"
            )
        if collective.done_s[member] != collective.done_s[member]:
            worker.waits_for = collective
            self._waiting += 1
            return False
        self._pass(worker, collective, member)
        return True

    def _pass(self, worker: _Worker, collective: Collective, member: int) -> None:
        done_s = collective.done_s[member]
        wait_s = 0.0
        if done_s > worker.clock_s:
            wait_s = done_s - worker.clock_s
            worker.clock_s = done_s
            worker.wait_s += wait_s
        self._found.syncs.append(
            SyncTiming(
                *collective.key,
                worker.number,
                collective.step[member],
                collective.ready_s[member],
                done_s,
                wait_s,
                collective.wire[member],
            )
        )
        collective.received += 1
        if collective.received == collective.members:
            key = (*collective.key, worker.number if self._timed else -1)
            del self._open[key]

    def _arrived(self, time_s: float, contribution: Contribution) -> Arrival:
        contribution.arrived = True
        self._now_s = time_s
        self._ledger.add(contribution.rows())
        return Arrival(time_s, contribution.worker, *contribution.key)


def collective_seconds(topology: Topology, collective: str, nbytes: int, itemsize: int) -> float:
    """Time of one collective of ``nbytes`` per member, alone, with everyone ready at 0; seconds."""
    timeline = Timeline(topology, FixedSteps((0.0,) * topology.workers), collective)
    for worker in range(topology.workers):
        send = Send(0, 1, 0, Bytes(values=nbytes), itemsize)
        timeline.extend((worker, op) for op in (send, Receive(0, 1), End()))
    timeline.advance()
    return max(clock.clock_s for clock in timeline.take().clocks)
