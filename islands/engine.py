"""The loop over rounds: hands out plans, closes rounds, lets the method combine, evaluates.

It knows neither Ray nor torch: workers and network are two small protocols. Each worker has a
cursor in its own program (see :mod:`islands.schedule`), and is driven from boundary to boundary;
lock-step is merely what happens when every round waits for everyone.

Here a round closes when all of its members have arrived. So training does not depend on the
network, the graph of operations goes there in batches, and times come back whenever they are ready.
Rounds are combined and evaluations made in the order of the program's receives, whatever the order
in which the host's answers come in. Where rounds close by the clock (:mod:`islands.timed`), the
loop is the same and the decisions are others.

On the wall clock there is one more rule: a worker gets a round's result when the network delivers
it, and the network delivers nothing before its moment has come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from islands.compression import Update
from islands.cursor import Cursor, Moment, moment
from islands.errors import RunError
from islands.faults import Faults
from islands.methods.base import Arrival, Method, Shared
from islands.plan import Apply, Held, Lost, PlanOp, Reset, SendOut, Snapshot, Steps
from islands.policy import Policy
from islands.protocols import Network, Recorder, Workers
from islands.rounds import Admission, Contribution, Outcome, Rounds
from islands.schedule import Action, Due, Roster, program
from islands.trace import (
    Compute,
    Control,
    End,
    Join,
    Mark,
    Members,
    Op,
    Pass,
    Receive,
    RoundKey,
    Send,
)

if TYPE_CHECKING:
    from islands.compression import Statistics
    from islands.compression.formats import Buffer
    from islands.network import Timings
    from islands.network.timings import Event


class Interrupted(Exception):
    """The run was asked to stop; what is recorded stays."""


#: Operations go to the network when so many wait, which makes the call cheap per round, or after so
#: many seconds of host time, so that progress and tables are never far behind.
BATCH_OPS, BATCH_S = 1500, 0.5
#: Host time that a plan should take at the most: an interrupt waits for the plans under way. How a
#: run is cut into plans changes nothing in it.
PLAN_S = 0.5
#: Steps of the very first plan, before the pace of this host is known.
FIRST_STEPS = 8
#: On the wall clock: how long the network may wait at a time, so that an interrupt is answered.
HOLD_S = 0.5
#: Said of a run in which nothing can happen any more.
STUCK = "workers wait for a round that no arrival can close any more"


class Closing(NamedTuple):
    """A round in the program's order: who contributes, and who only adopts what comes of it."""

    fragment: int
    version: int
    contributors: tuple[int, ...]
    onlookers: tuple[int, ...]


class Engine:
    """Drives one run to its end."""

    def __init__(
        self,
        *,
        method: Method,
        shared: Shared,
        steps: int,
        eval_every: int,
        island_of: Sequence[str],
        workers: Workers,
        network: Network,
        recorder: Recorder,
        evaluate: Callable[[Sequence[Buffer], Statistics | None], float],
        merge_buffers: Callable[[Sequence[Statistics]], Statistics],
        stop: Callable[[], bool] = lambda: False,
        wall: bool = False,
        faults: Faults | None = None,
        policy: Policy | None = None,
        may_lose: bool = False,
    ) -> None:
        """``island_of`` names each worker's island. ``evaluate(parameters, buffers)`` gives the
        validation loss of the mean of some replicas' parameters; none of them, or None, stands for
        the coordinator's own. ``stop()`` is asked once per turn. ``wall``: the network is on the
        wall clock, and nobody gets a result before it is delivered. ``faults`` and ``policy`` say
        what goes wrong and what is made of rounds; ``may_lose``: workers keep what they send."""
        self.method = method
        self.shared = shared
        self._streams = method.streams(shared.layout)
        self._island_of = island_of
        self._workers = workers
        self._network = network
        self._recorder = recorder
        self._evaluate = evaluate
        self._stop = stop
        self._wall = wall
        # Wall clock: whose results were delivered, as (worker, fragment, version).
        self._delivered: set[tuple[int, int, int]] = set()
        self._stalled: str | None = None  # why the emulated network can never go on
        self._settled = False

        faults = Faults((), 0, island_of) if faults is None else faults
        self._rounds = Rounds(
            method=method,
            shared=shared,
            fragments=len(self._streams),
            workers=len(island_of),
            recorder=recorder,
            share=workers.share,
            merge_buffers=merge_buffers,
            faults=faults,
            policy=Policy() if policy is None else policy,
            may_lose=may_lose,
        )
        spans = [faults.spans(worker, steps) for worker in range(len(island_of))]
        self._steps = steps
        self._roster = Roster(self._streams, spans, steps)
        self._cursors = [
            Cursor(self._roster.program(worker, eval_every)) for worker in range(len(island_of))
        ]
        # The order in which rounds close and evaluations are made: the program's own.
        self._agenda = deque(self._in_order(eval_every))
        self._admissions: dict[int, Admission] = {}
        # Where training stops until a round has closed, no answer is of use before the last one.
        self._in_step = not any(s.overlap for s in self._streams)
        # Not if a result may come with control bytes, which must be told before what follows.
        self._tells_ahead = wall and not faults.drops and self._roster.everyone
        # The network simulates only as far as it is asked to.
        self._asked = wall
        self._arrived: dict[RoundKey, dict[int, Arrival]] = {}
        # What workers handed over for an evaluation, or for others to start from.
        self._snapshots: dict[Moment, dict[int, Held]] = {}
        self._evaluated = 0  # after so many local steps, the last time
        self._ops: list[tuple[int, Op]] = []
        self._handed_over = time.monotonic()
        self._most_steps = FIRST_STEPS

    def _in_order(self, eval_every: int) -> Iterator[Closing | Mark | Pass]:
        """What is decided in the program's order, with who takes part in it."""
        roster = self._roster
        everyone = tuple(range(len(self._island_of)))
        steps_of: dict[RoundKey, int] = {}
        now = 0
        for action in program(self._streams, roster.last_step, eval_every, roster.changes):
            match action:
                case Compute(first, count):
                    now = first + count
                case Due(fragment, version, step):
                    steps_of[fragment, version] = step
                case Receive(fragment, version):
                    step = steps_of.pop((fragment, version))
                    if roster.everyone:
                        yield Closing(fragment, version, everyone, ())
                    elif there := roster.contributors(fragment, step):
                        others = (w for w in roster.those_present(now) if w not in there)
                        yield Closing(fragment, version, there, tuple(others))
                case Mark() | Pass():
                    yield action

    def _declare(self) -> None:
        """Tell the network, and the recorder, who takes part in what, unless it is everyone."""
        if self._roster.everyone:
            return
        for item in self._agenda:
            if isinstance(item, Closing):
                if len(item.contributors) < len(self._island_of):
                    members = Members(item.fragment, item.version, item.contributors)
                    self._ops.append((0, members))
            else:
                present = self._roster.those_present(item.step)
                self._ops.append((0, Members(-1, item.step, present)))
        for worker in range(len(self._island_of)):
            for first, last in self._roster.gaps(worker, self._steps):
                self._recorder.absent(worker, first, last)

    # --- the loop -------------------------------------------------------------------------------
    def run(self) -> None:
        """Train to the end. Raises RunError if a worker fails or the emulated network stalls for
        ever, Interrupted if asked to stop."""
        if not self._roster.last_step:
            raise RunError("nobody is there at the beginning")
        self._declare()
        self._go_on()
        while not self._over():
            self._must_go_on()
            self._turn()
            self._go_on()
            late = time.monotonic() - self._handed_over > BATCH_S
            if late or len(self._ops) >= BATCH_OPS:
                self._hand_over()
        self.settle()
        self._must_go_on(stop=False)
        if self._roster.last_step < self._steps:
            raise RunError(f"nobody is left after step {self._roster.last_step}")

    def _over(self) -> bool:
        return not (self._agenda or self._busy) and all(c.ended for c in self._cursors)

    def _turn(self) -> None:
        """Wait for what comes next, and decide what it allows."""
        if self._wall:
            self._keep_pace()
        else:
            self._take_answers(self._in_step)
            self._close_in_order()

    def _must_go_on(self, stop: bool = True) -> None:
        if self._stalled is not None:
            raise RunError(self._stalled)
        if stop and self._stop():
            raise Interrupted

    def settle(self) -> None:
        """Bring in the times of everything that was handed out, and the final totals; once."""
        if self._settled:
            return
        self._settled = True
        self._hand_over()
        for timings in self._network.results(wait=True):
            self._take_times(timings)
        self._take_times(self._network.end())

    def _hand_over(self) -> None:
        self._handed_over = time.monotonic()
        if self._ops:
            ops, self._ops = self._ops, []
            self._recorder.traced(ops)
            self._network.extend(ops)
        if not self._asked:
            for timings in self._network.results(wait=False):
                self._take_times(timings)

    def _take_times(self, timings: Timings) -> None:
        self._recorder.timed(timings)
        self._stalled = timings.stalled
        if self._wall:
            self._delivered.update((s.worker, s.fragment, s.version) for s in timings.syncs)

    def _let_out(self, hold_s: float) -> tuple[Timings, Event | None, float]:
        """What the network lets out by now, with everything handed over that it could need."""
        self._hand_over()
        found = self._network.decide(hold_s)
        self._take_times(found[0])
        return found

    def _keep_pace(self) -> None:
        """Wall clock, where rounds wait for everyone: wait for a worker's answer or a delivery,
        whichever is first."""
        busy = self._busy
        timings, _, due_s = self._let_out(0.0 if busy else HOLD_S)
        if busy:
            self._take_answers(False, due_s)
        elif due_s == inf and not timings.syncs and not self._stalled:
            raise RunError(STUCK)
        self._close_in_order()

    # --- workers --------------------------------------------------------------------------------
    @property
    def _busy(self) -> bool:
        """Whether any worker has a plan under way."""
        return any(cursor.busy for cursor in self._cursors)

    def _go_on(self) -> None:
        for worker, cursor in enumerate(self._cursors):
            if not cursor.busy and not cursor.ended:
                self._plan(worker, cursor)

    def _plan(self, worker: int, cursor: Cursor) -> None:
        """Hand out all that this worker can do before it must send, or misses a result, but not
        more steps than keep it answering."""
        plan: list[PlanOp] = []
        updates: list[Update | None] = []
        if cursor.admission is not None:
            self._hand(worker, cursor.admission.nbytes)
            plan.append(Reset(len(updates), cursor.starts_at))
            updates.append(cursor.admission.update)
            cursor.admission = None
        sending = False
        steps_left = self._most_steps
        while not (sending or cursor.ended):
            action = cursor.next
            match action:
                case Compute(first, count):
                    if not steps_left:
                        break
                    if count > steps_left:
                        action = Compute(first, steps_left)
                        cursor.put_back(Compute(first + steps_left, count - steps_left))
                    steps_left -= action.count
                    plan.append(Steps(action.count))
                case Due(fragment):
                    plan.append(SendOut(fragment))
                    cursor.sent.append((action, cursor.base.get(fragment, 0)))
                    sending = True
                case Receive(fragment, version):
                    if not cursor.waits:  # said at once: who waits cannot send, so time may pass
                        self._tell(worker, action)
                        cursor.waits = True
                        self._tell_ahead(worker)
                    outcome = self._outcome((fragment, version), worker)
                    if outcome is None:
                        break
                    cursor.waits = False
                    self._take_in(worker, fragment, outcome, plan, updates)
                case Mark(step):
                    if worker in self._holders(step):
                        plan.append(Snapshot())
                        cursor.marks.append(moment(action))
                case Pass(step):
                    if worker in self._holders(step):
                        plan.append(Snapshot(whole=self.method.shared_in == "replicas"))
                        cursor.marks.append(moment(action))
                case Join(step):
                    if not cursor.waits:
                        self._tell(worker, action)
                        cursor.waits = True
                    admission = self._admissions.get(step)
                    if admission is None:
                        break
                    cursor.waits = False
                    self._hand(worker, admission.nbytes)
                    plan.append(Reset(len(updates), step))
                    updates.append(admission.update)
                    cursor.base = dict(enumerate(admission.versions))
                case End():
                    cursor.ended = True
            # A send is told when its payload's size is known, a wait when it begins.
            if not isinstance(action, Due | Receive | Join):
                self._tell(worker, action)
            cursor.advance()
        if plan:
            cursor.busy = True
            cursor.begun = time.monotonic()
            self._workers.start(worker, plan, updates)

    def _take_in(
        self,
        worker: int,
        fragment: int,
        outcome: Outcome,
        plan: list[PlanOp],
        updates: list[Update | None],
    ) -> None:
        """Plan what a round means for a worker."""
        self._hand(worker, outcome.control_bytes)
        if outcome.lost:
            plan.append(Lost(fragment))
        if outcome.update is not None:
            plan.append(Apply(fragment, len(updates), outcome.adopt))
            updates.append(outcome.update)
            self._cursors[worker].base[fragment] = outcome.version
        if outcome.donate is not None:
            plan.append(Snapshot(whole=self.method.shared_in == "replicas"))
            self._cursors[worker].marks.append(moment(outcome.donate))

    def _hand(self, worker: int, nbytes: int) -> None:
        """Bytes reach a worker out of band."""
        if nbytes:
            self._ops.append((worker, Control(nbytes)))

    def _holders(self, step: int) -> tuple[int, ...]:
        """The workers that hold the shared parameters after ``step`` local steps; none: it is the
        coordinator."""
        if self.method.shared_in == "coordinator":
            return ()
        there = self._roster.those_present(step)
        return there[:1] if self.method.shared_in == "replicas" else there

    def _tell(self, worker: int, action: Action) -> None:
        """Let the network know, unless it does."""
        cursor = self._cursors[worker]
        if cursor.told:
            cursor.told -= 1
        else:
            assert not isinstance(action, Due)
            self._ops.append((worker, action))

    def _tell_ahead(self, worker: int) -> None:
        """Wall clock: who will have its result now cannot send before its next step, whatever the
        result. So what others are to get at the same moment is known at that moment, and not only
        when this one has begun to go on."""
        cursor = self._cursors[worker]
        if self._tells_ahead and not cursor.told:
            coming = cursor.to_next_step()
            for action in coming:
                self._tell(worker, action)
            cursor.told = len(coming)

    def _outcome(self, key: RoundKey, worker: int) -> Outcome | None:
        """What a round made of this worker's part, once; None while the round is open, or on the
        wall clock its result on the way."""
        if self._wall and (worker, *key) not in self._delivered:
            return None
        outcome = self._rounds.outcome(key, worker)
        if outcome is not None:
            self._delivered.discard((worker, *key))
        return outcome

    def _take_answers(self, everyone: bool, within_s: float = inf) -> None:
        for worker, answer in self._workers.answers(everyone, within_s):
            cursor = self._cursors[worker]
            cursor.busy = False
            if answer.losses:
                self._pace(time.monotonic() - cursor.begun, len(answer.losses))
            if answer.losses:
                self._recorder.losses(worker, answer.losses)
            if answer.failure is not None:
                where = f"worker {worker} ({self._island_of[worker]})"
                raise RunError(f"{where} failed at {answer.failure}")
            for snapshot in answer.snapshots:
                self._snapshots.setdefault(cursor.marks.popleft(), {})[worker] = snapshot
            for payload in answer.payloads:
                due, base = cursor.sent.popleft()
                key = (due.fragment, due.version)
                self._hand(worker, self._rounds.checksum_bytes)
                self._ops.append((worker, Send(*key, due.step, payload.size, payload.itemsize)))
                arrival = Arrival(worker, payload, base, due.step)
                self._arrived.setdefault(key, {})[worker] = arrival
                sends = cursor.sends.setdefault(due.fragment, [])
                sends[:] = [*sends[-1:], (due.version, due.step)]  # at most one is ahead of time

    def _pace(self, took_s: float, steps: int) -> None:
        """Learn from a plan that came back how many steps the next ones may have."""
        self._most_steps = max(1, int(PLAN_S * steps / max(took_s, 1e-6)))

    # --- closing rounds -------------------------------------------------------------------------
    def _close_in_order(self) -> None:
        """Untimed: close what can be closed, in the program's order."""
        while self._agenda:
            head = self._agenda[0]
            if isinstance(head, Mark):
                if not self._try_evaluate(head):
                    return
            elif isinstance(head, Pass):
                if not self._try_admit(head):
                    return
            else:
                key = (head.fragment, head.version)
                arrived = self._arrived.get(key, {})
                if not self.method.close(list(arrived.values()), len(head.contributors), 0.0):
                    return
                del self._arrived[key]
                parts = [Contribution(head.version, arrived[w]) for w in sorted(arrived)]
                onlookers = [(worker, head.version) for worker in head.onlookers]
                self._rounds.close(head.fragment, parts, onlookers)
            self._agenda.popleft()

    def _try_evaluate(self, mark: Mark) -> bool:
        """Evaluate the shared parameters; False if a replica that holds them has not handed them
        over."""
        found = self._collect(mark)
        if found is None:
            return False
        params, buffers = [held.params for held in found], self._rounds.statistics(found)
        self._recorder.evaluated(mark.step, self._evaluate(params, buffers))
        self._evaluated = mark.step
        return True

    def _try_admit(self, step: Pass) -> bool:
        """Put together what those start from that join after a step; False as above."""
        found = self._collect(step)
        if found is None:
            return False
        self._admissions[step.step] = self._rounds.admission(found)
        return True

    def _collect(self, at: Mark | Pass) -> list[Held] | None:
        """What the holders of the shared parameters handed over; None if one has not yet."""
        holders, found = self._holders(at.step), self._snapshots.get(moment(at), {})
        if len(found) < len(holders):
            return None
        self._snapshots.pop(moment(at), None)
        return [found[worker] for worker in holders]
