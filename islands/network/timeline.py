"""Times a trace: gives every operation of every worker its moment on the emulated clock.

Each worker has a clock of its own. Computing moves it, sending hands a payload to a collective and
goes on, receiving waits until the collective is done for this worker. Workers run ahead as far as
their known operations carry them, which leaves sends at future moments in the fabric; the fabric
then processes what happens between the workers.

Causality: a worker that ran out of operations at clock c may yet send at c or later, so nothing at
or after c is processed before more operations of it are known. A waiting worker cannot send, so it
holds up nothing. That makes the result independent of how the operations are handed in.

Rounds may be of some workers only. Who is no member may look on: it waits until the last member is
done. Who is away joins when those who are there have passed a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from islands.clock import ComputeModel
from islands.errors import InputError, nearest
from islands.network.collectives import COLLECTIVES, Collective, Ring, Rings, Scheme
from islands.network.fabric import CHARGED, Fabric
from islands.network.ledger import Ledger, LinkTotals
from islands.network.membership import Charge, Declared, Gate, Passers, check_members
from islands.network.schemes import plan_for
from islands.network.timings import Event, SyncTiming, Timings
from islands.network.topology import Topology
from islands.network.vectorised import FASTER_AS_ARRAYS, RingArrays
from islands.network.workers import Worker
from islands.trace import (
    Compute,
    Control,
    End,
    Idle,
    Join,
    Leave,
    Mark,
    Members,
    Op,
    Pass,
    Receive,
    Send,
)

#: So many sets of members are remembered with the lanes between them.
_SUBSETS_KEPT = 64


class Timeline:
    """Gives every operation of a trace its emulated time.

    ``collective`` is what the method needs: ``all_reduce``, ``all_gather`` or ``star``; ``scheme``
    how the first two are carried out: ``ring``, ``star`` or ``hierarchical``. ``ring_order`` names
    the islands in the ring's order (None: chosen). ``seed`` decides other jobs' transfers and
    jitter. ``per_transfer`` gives a ledger row per transfer instead of per round and link. A ring
    that meets no other traffic is computed as arrays where that is faster; ``vectorise`` forces or
    forbids it, and changes no bit of any result. It is given up when members are declared, which
    must be before the first ring was computed so.

    Rounds that close by the clock are in :class:`islands.network.timed_timeline.TimedTimeline`.
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
        per_transfer: bool = False,
        vectorise: bool | None = None,
    ) -> None:
        if collective not in COLLECTIVES:
            raise InputError(
                f"collective: unknown {collective!r}{nearest(collective, COLLECTIVES)}"
            )
        self.topology = topology
        self.wire_bytes = 0
        self._compute = compute
        self._fabric = Fabric(topology, seed)
        self._ledger = Ledger(topology, self._fabric, per_transfer=per_transfer)
        everyone = topology.ring(ring_order)

        def over(members: tuple[int, ...] | None) -> Scheme:
            return plan_for(
                topology, collective, scheme, everyone, members=members, per_transfer=per_transfer
            )

        plan = self._plan = over(None)
        self._over = over
        self._subsets: dict[tuple[int, ...], Scheme] = {}
        self._arrays = None
        if vectorise is None:
            vectorise = topology.workers >= FASTER_AS_ARRAYS
        alone = vectorise and topology.workers > 1 and not per_transfer
        if alone and isinstance(plan, Rings) and plan.disjoint:
            self._arrays = RingArrays(plan)
        self._as_arrays = 0  # rings computed so
        self._workers = [Worker(number) for number in range(topology.workers)]
        self._runnable: list[Worker] = []
        self._starved = set(self._workers)
        self._waiting = 0
        self._open: dict[tuple[int, int], Collective] = {}
        self._declared: dict[tuple[int, int], Declared[Worker]] = {}
        self._passers = Passers(topology.workers)
        self._gates: dict[int, Gate[Worker]] = {}  # kept, since somebody may yet join there
        self._flying = 0
        self._held: Ring | None = None
        self._passed: dict[int, list[float]] = {}
        self._found = Timings()
        self._home = topology.island_of.index(topology.coordinator_island)  # of control bytes

    # What goes in

    def extend(self, ops: Iterable[tuple[int, Op]]) -> None:
        """More operations, as (worker, operation), in each worker's own order."""
        for number, op in ops:
            if type(op) is Members:
                self._declare(op)
                continue
            worker = self._workers[number]
            if worker.ended:
                raise ValueError(f"worker {number} has ended and cannot {op}")
            worker.ops.append(op)
            if worker in self._starved:
                self._starved.remove(worker)
                self._runnable.append(worker)

    def control(self, worker: int, nbytes: int) -> None:
        """Count bytes handed to ``worker`` out of band, such as the initial model: no time passes.

        They come from the first worker of the coordinator's island, which itself gets nothing.
        """
        if worker != self._home and nbytes:
            self._ledger.control(self._home, worker, nbytes, self._workers[worker].clock_s)

    def _declare(self, op: Members) -> None:
        """Who takes part in a round, or passes a step."""
        members = check_members(op.workers, len(self._workers))
        if op.fragment < 0:
            self._passers.declare(op.version, members)
            return
        key = (op.fragment, op.version)
        declared = self._declared.get(key)
        if declared is not None:
            if declared.members != members:
                raise ValueError(f"round {key} has members {declared.members} and {members}")
            return
        if key in self._open or self._as_arrays:
            raise ValueError(f"the members of round {key} are declared too late")
        self._declared[key] = Declared(key, members)
        self._arrays = None
        if self._held is not None:
            self._release()

    # What comes out

    def take(self) -> Timings:
        """Everything that was found since the last call, and every worker's clock as of now."""
        found, self._found = self._found, Timings()
        found.transfers = self._ledger.take()
        found.clocks = [worker.clock for worker in self._workers]
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
    def left(self) -> list[int]:
        """How many operations of each worker have not happened yet."""
        return [len(worker.ops) for worker in self._workers]

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

    def advance(self) -> Event | None:
        """Simulate as far as causality permits, which needs no decisions here.

        None means that more operations are needed, or that all is done.
        """
        while True:
            while self._runnable:
                self._run(self._runnable.pop())
            held = self._held
            if held is None:
                self._fabric.horizon_s = min((w.clock_s for w in self._starved), default=inf)
                happened = self._fabric.run()
                if happened is not None:
                    event = self._happens(*happened)
                    if event is not None:
                        return event
                elif self._held is None:
                    break
            elif self._waiting == len(self._workers):
                self._finish_at_once(held)
            elif self._starved:
                break
            else:
                self._release()
        if self._waiting and not self._starved and not self._fabric.stuck:
            self._nothing_can_happen()
        return None

    def _happens(self, time_s: float, what: object) -> Event | None:
        """What was announced for now; returns what the caller must decide on."""
        assert isinstance(what, Charge)
        self._ledger.charge(self._home, what.worker, what.nbytes, time_s)
        return None

    def _nothing_can_happen(self) -> None:
        """Everybody waits or has ended, and nothing is on its way."""
        stuck = next(w for w in self._workers if w.waits_for is not None)
        why = stuck.waits_for
        if isinstance(why, Collective):
            why = f"waits for round {why.key}, which {why.entered} of {why.members} workers joined"
        raise ValueError(f"worker {stuck.number} {why}")

    def _run(self, worker: Worker) -> None:
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
            elif type(op) is End:
                worker.ended = True
                if ops:
                    raise ValueError(f"worker {worker.number} has operations after its end")
                return
            elif not self._rarely(worker, op):
                return
        self._starved.add(worker)
        if worker.clock_s < self._fabric.horizon_s:
            self._fabric.horizon_s = worker.clock_s

    def _rarely(self, worker: Worker, op: Op) -> bool:
        """Operations of runs whose rounds are not everyone's; whether the worker can go on now."""
        match op:
            case Pass(step):
                self._pass_step(worker, step)
            case Join(step):
                return self._join(worker, step)
            case Control(nbytes):
                self._charge(worker, nbytes, worker.clock_s)
            case Idle(until_s):
                worker.away_until(until_s)
            case Leave():
                pass
            case _:
                raise ValueError(f"worker {worker.number} cannot {op}")
        return True

    def _compute_steps(self, worker: Worker, op: Compute) -> None:
        moments = worker.compute(self._compute.seconds(worker.number, op.first, op.count))
        if op.count:
            self._found.steps.append((worker.number, op.first, moments[:-1], moments[1:]))

    def _mark(self, worker: Worker, step: int) -> None:
        passed = self._passed.setdefault(step, [])
        passed.append(worker.clock_s)
        if len(passed) == len(self._passers.of(step)):
            self._found.marks.append((step, max(passed)))
            del self._passed[step]

    def _charge(self, worker: Worker, nbytes: int, time_s: float) -> None:
        """Control bytes reach a worker at ``time_s``, in the order of time."""
        if worker.number != self._home and nbytes:
            what = Charge(worker.number, nbytes)
            self._fabric.announce(time_s, CHARGED, worker.number, what)

    # Leaving and joining

    def _gate(self, step: int) -> Gate[Worker]:
        return self._gates.setdefault(step, Gate(step))

    def _pass_step(self, worker: Worker, step: int) -> None:
        gate = self._gate(step)
        gate.pass_by(worker.number, worker.clock_s)
        if gate.joiners and (opens_s := gate.opens_s(self._passers.of(step))) is not None:
            joiners, gate.joiners = gate.joiners, []
            for joiner in joiners:
                self._go_on(joiner)
                joiner.away_until(opens_s)
                self._run(joiner)

    def _join(self, worker: Worker, step: int) -> bool:
        gate = self._gate(step)
        opens_s = gate.opens_s(self._passers.of(step))
        if opens_s is None:
            gate.joiners.append(worker)
            self._wait(worker, gate)
            return False
        worker.away_until(opens_s)
        return True

    def _wait(self, worker: Worker, what: object) -> None:
        worker.waits_for = what
        self._waiting += 1

    def _go_on(self, worker: Worker) -> None:
        worker.waits_for = None
        self._waiting -= 1

    # Rounds

    def _send(self, worker: Worker, op: Send) -> None:
        key = (op.fragment, op.version)
        collective = self._open.get(key)
        if collective is None:
            collective = self._open[key] = self._begin(key)
        member = collective.position.get(worker.number)
        if member is None:
            raise ValueError(f"worker {worker.number} sends to round {key} and is no member of it")
        worker.sends += 1
        collective.enter(member, worker.sends, worker.clock_s, op)

    def _begin(self, key: tuple[int, int]) -> Collective:
        """Open a round. A ring that may prove to be alone is held back: see `_finish_at_once`."""
        if self._held is not None:
            self._release()
        self._flying += 1
        plan = self._plan
        if (declared := self._declared.get(key)) is not None:
            if declared.end is not None:
                raise ValueError(f"round {key} has ended")
            plan = self._subset(declared.members)
        collective = plan.open(key, self._fabric, self._done)
        if isinstance(collective, Ring):
            if self._arrays is not None and self._flying == 1:
                self._held = collective
            else:
                collective.launch()
        return collective

    def _subset(self, members: tuple[int, ...]) -> Scheme:
        """The scheme over some of the workers."""
        if len(members) == len(self._workers):
            return self._plan
        found = self._subsets.get(members)
        if found is None:
            if len(self._subsets) >= _SUBSETS_KEPT:
                self._subsets.clear()
            found = self._subsets[members] = self._over(members)
        return found

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
        self._fabric.horizon_s = inf
        while (happened := self._fabric.run()) is not None:  # control bytes come before it
            self._happens(*happened)
        self._held = None
        self._as_arrays += 1
        self._arrays.run(ring, self._fabric.free_s, self._fabric.served)
        self._complete(ring)
        for worker in self._workers:
            self._wake(worker, ring, ring.position[worker.number])
        self._runnable += self._workers

    def _done(self, collective: Collective, member: int) -> None:
        """A member is done with a collective: it goes on if it was waiting for that."""
        if collective.finished == collective.members:
            self._complete(collective)
        worker = self._workers[collective.order[member]]
        if worker.waits_for is collective:
            self._wake(worker, collective, member)
            self._run(worker)

    def _complete(self, collective: Collective) -> None:
        self._flying -= 1
        self._ledger.add(collective.rows())
        self.wire_bytes += sum(collective.wire)
        declared = self._declared.get(collective.key) if self._declared else None
        if declared is not None:
            for worker in declared.close(collective):
                self._go_on(worker)
                self._look_on(worker, declared)
                self._run(worker)

    def _wake(self, worker: Worker, collective: Collective, member: int) -> None:
        self._waiting -= 1
        worker.waits_for = None
        self._pass(worker, collective, member)

    def _receive(self, worker: Worker, op: Receive) -> bool:
        """Whether the worker can go on now."""
        key = (op.fragment, op.version)
        declared = self._declared.get(key) if self._declared else None
        if declared is not None and worker.number not in declared.members:
            return self._look_on(worker, declared)
        collective = self._open.get(key)
        member = -1 if collective is None else collective.position[worker.number]
        if collective is None or collective.ready_s[member] != collective.ready_s[member]:
            raise ValueError(f"worker {worker.number} receives {key} without having sent")
        if collective.done_s[member] != collective.done_s[member]:
            worker.waits_for = collective
            self._waiting += 1
            return False
        self._pass(worker, collective, member)
        return True

    def _look_on(self, worker: Worker, declared: Declared[Worker]) -> bool:
        """Wait for the end of a round of others; whether the worker can go on now."""
        if declared.end is None:
            declared.onlookers.append(worker)
            self._wait(worker, declared)
            return False
        asked_s = worker.clock_s
        done_s, why = declared.end
        wait_s = worker.wait_until(done_s, why)
        self._found.syncs.append(
            SyncTiming(*declared.key, worker.number, 0, asked_s, done_s, wait_s, 0, worker.clock_s)
        )
        return True

    def _pass(self, worker: Worker, collective: Collective, member: int) -> None:
        done_s = collective.done_s[member]
        wait_s = worker.wait_until(done_s, collective.why[member])
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
            del self._open[collective.key]
