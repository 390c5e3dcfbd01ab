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
from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from islands.clock import ComputeModel
from islands.errors import InputError, nearest
from islands.network.collectives import COLLECTIVES, Collective, Ring, Rings
from islands.network.fabric import Fabric
from islands.network.ledger import Ledger, LinkTotals
from islands.network.schemes import plan_for
from islands.network.star import Contribution, Contributions
from islands.network.timings import Arrival, SyncTiming, Timings, WorkerClock, wait_parts
from islands.network.topology import Topology
from islands.network.vectorised import FASTER_AS_ARRAYS, RingArrays
from islands.trace import Bytes, Compute, Mark, Op, Receive, Send


class _Worker:
    """One worker's clock and the operations it has not come to yet."""

    __slots__ = (
        "clock_s",
        "compute_s",
        "ended",
        "number",
        "ops",
        "sends",
        "wait_s",
        "waited_s",
        "waits_for",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.ops: deque[Op] = deque()
        self.clock_s = 0.0
        self.compute_s = 0.0
        self.wait_s = 0.0
        self.waited_s = [0.0] * 5  # the last five of a WorkerClock
        self.sends = 0
        self.waits_for: Collective | None = None
        self.ended = False


class Timeline:
    """Gives every operation of a trace its emulated time.

    ``collective`` is what the method needs: ``all_reduce``, ``all_gather`` or ``star``; ``scheme``
    how the first two are carried out: ``ring``, ``star`` or ``hierarchical``. ``ring_order`` names
    the islands in the ring's order (None: chosen). ``seed`` decides other jobs' transfers and
    jitter. With ``timed`` (star only) every send is a contribution of its own, and the caller
    decides at each :class:`Arrival` whom to answer. ``per_transfer`` gives a ledger row per
    transfer instead of per round and link. A ring that meets no other traffic is computed as arrays
    where that is faster; ``vectorise`` forces or forbids it, and changes no bit of any result.
    """

    def __init__(
        self,
        topology: Topology,
        compute: ComputeModel,
        collective: str,
        *,
        scheme: str = "ring",
        ring_order: Sequence[str] | None = None,
        seed: int = 0,
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
        self._fabric = Fabric(topology, seed)
        self._ledger = Ledger(topology, self._fabric, per_transfer=per_transfer)
        plan = plan_for(
            topology, collective, scheme, ring_order, timed=timed, per_transfer=per_transfer
        )
        self._plan = plan
        self._position = {worker: n for n, worker in enumerate(plan.order)}
        self._arrays = None
        if vectorise is None:
            vectorise = topology.workers >= FASTER_AS_ARRAYS
        alone = vectorise and topology.workers > 1 and not per_transfer
        if alone and isinstance(plan, Rings) and plan.disjoint:
            self._arrays = RingArrays(plan)
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
        found.clocks = [
            WorkerClock(w.compute_s, w.wait_s, w.clock_s, *w.waited_s) for w in self._workers
        ]
        found.links = self._ledger.links
        found.stalled = self._fabric.stuck
        return found

    def end(self) -> Timings:
        """The run is over, finished or not: the other jobs' transfers up to the last worker's
        clock, and how busy every link was."""
        end_s = max(worker.clock_s for worker in self._workers)
        self._ledger.end(end_s)
        return self.take()

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
        if self._waiting and not self._starved and not self._timed and not self._fabric.stuck:
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

    def _position_of(self, worker: _Worker) -> int:
        return 0 if self._timed else self._position[worker.number]

    def _send(self, worker: _Worker, op: Send) -> None:
        key = self._key(worker, op)
        collective = self._open.get(key)
        if collective is None:
            collective = self._open[key] = self._begin(worker, (op.fragment, op.version))
        worker.sends += 1
        collective.enter(self._position_of(worker), worker.sends, worker.clock_s, op)

    def _begin(self, worker: _Worker, key: tuple[int, int]) -> Collective:
        """Open a round. A ring that may prove to be alone is held back: see `_finish_at_once`."""
        if self._held is not None:
            self._release()
        self._flying += 1
        if isinstance(self._plan, Contributions):
            return self._plan.open_for(worker.number, key, self._fabric, self._done)
        collective = self._plan.open(key, self._fabric, self._done)
        if isinstance(collective, Ring):
            if self._arrays is not None and self._flying == 1:
                self._held = collective
            else:
                collective.launch()
        return collective

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
        self._arrays.run(ring, self._fabric.free_s, self._fabric.served)
        self._complete(ring)
        for worker in self._workers:
            self._wake(worker, ring, self._position_of(worker))
        self._runnable += self._workers

    def _done(self, collective: Collective, member: int) -> None:
        """A member is done with a collective: it goes on if it was waiting for that."""
        if collective.finished == collective.members:
            self._complete(collective)
        worker = self._workers[
            collective.worker if isinstance(collective, Contribution) else self._plan.order[member]
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
        collective, member = self._open.get(self._key(worker, op)), self._position_of(worker)
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
            for n, part in enumerate(wait_parts(collective.why[member], worker.clock_s, done_s)):
                worker.waited_s[n] += part
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
                worker.clock_s,
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
