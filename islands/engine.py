"""The loop over rounds: hands out plans, closes rounds, lets the method combine, evaluates.

It knows neither Ray nor torch: workers and network are two small protocols. Each worker has a
cursor in its own program (see :mod:`islands.schedule`), and is driven from boundary to boundary;
lock-step is merely what happens when every round waits for everyone.

Two regimes, one loop:

* *untimed* (a round closes when all have arrived): training does not depend on the network, so the
  graph of operations goes to the network in batches, and times come back whenever they are ready.
  Rounds are combined and evaluations made in the order of the program's receives, whatever the
  order in which the host's answers come in.
* *timed* (the method closes rounds by the clock): each decision is taken at an emulated moment, in
  the order (time, kind, id). The network never simulates past the earliest moment at which some
  worker could still send.

On the wall clock both are the same but for one rule: a worker gets a round's result when the
network delivers it, and the network delivers nothing before its moment has come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from math import inf, isnan
from typing import TYPE_CHECKING, NamedTuple

from islands.compression import Update
from islands.errors import RunError
from islands.methods.base import Arrival, Method, Shared
from islands.plan import Apply, PlanOp, SendOut, Snapshot, Steps
from islands.protocols import Likeness, Network, Part, Recorder, Workers
from islands.schedule import Action, Due, program
from islands.trace import Compute, End, Mark, Op, Receive, RoundKey, Send

if TYPE_CHECKING:
    from islands.compression import Statistics
    from islands.compression.formats import Buffer
    from islands.network import Arrival as NetworkArrival
    from islands.network import Timings


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


class Outcome(NamedTuple):
    """What a round committed: the update (None: nothing) and the fragment's version after it."""

    update: Update | None
    version: int


class Cursor:
    """Where one worker is in its program, and what it still waits for."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._actions = iter(actions)
        self.next: Action = next(self._actions)
        self.base: dict[int, int] = {}  # fragment -> version adopted last
        self.sent: deque[tuple[Due, int]] = deque()  # sends of the plan under way, with their base
        self.marks: deque[int] = deque()  # snapshots of the plan under way
        self.busy = False
        self.begun = 0.0  # host time at which the plan under way was handed out
        self.waits = False  # for a receive that the network knows of
        self.told = 0  # actions from the next one on that the network knows of already
        self.ended = False

    def advance(self) -> None:
        self.next = next(self._actions, End())

    def put_back(self, *rest: Action) -> None:
        """What comes after the current action, before anything else."""
        self._actions = chain(rest, self._actions)

    def to_next_step(self) -> list[Action]:
        """What comes after the current action, up to and with one step, or before a send."""
        coming: list[Action] = []
        while True:
            action = next(self._actions, End())
            if isinstance(action, Compute) and action.count > 1:
                self.put_back(Compute(action.first + 1, action.count - 1))
                action = Compute(action.first, 1)
            if isinstance(action, Due):
                self.put_back(*coming, action)
                return coming
            coming.append(action)
            if isinstance(action, Compute | End):
                self.put_back(*coming)
                return coming


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
    ) -> None:
        """``island_of`` names each worker's island. ``evaluate(parameters, buffers)`` gives the
        validation loss of the mean of some replicas' parameters; none of them, or None, stands for
        the coordinator's own. ``stop()`` is asked once per turn. ``wall``: the network is on the
        wall clock, and nobody gets a result before it is delivered."""
        self.method = method
        self.shared = shared
        self._streams = method.streams(shared.layout)
        self._island_of = island_of
        self._workers = workers
        self._network = network
        self._recorder = recorder
        self._evaluate = evaluate
        self._merge_buffers = merge_buffers
        self._stop = stop
        self._wall = wall
        # Wall clock: whose results were delivered, as (worker, fragment, version).
        self._delivered: set[tuple[int, int, int]] = set()
        self._stalled: str | None = None  # why the emulated network can never go on
        self._settled = False

        def actions() -> Iterable[Action]:
            return program(self._streams, steps, eval_every)

        self._cursors = [Cursor(actions()) for _ in island_of]
        # The order in which rounds close and evaluations are made: the program's own. In a timed
        # run rounds close by the clock, and only the evaluations stand here.
        kinds = Mark if method.timed else Receive | Mark
        self._agenda = deque(a for a in actions() if isinstance(a, kinds))
        # Where training stops until a round has closed, no answer is of use before the last one.
        self._in_step = not any(s.overlap for s in self._streams) and not method.timed
        self._versions = [0] * len(self._streams)  # of the shared fragments
        self._arrived: dict[RoundKey, dict[int, Arrival]] = {}
        # Timed runs: contributions of the rounds being gathered, and evaluations to come.
        self._open: list[list[tuple[int, Arrival]]] = [[] for _ in self._streams]
        self._passed: deque[tuple[int, float]] = deque()
        self._outcomes: dict[RoundKey, dict[int, Outcome]] = {}
        # Workers that hand over their parameters for an evaluation, and what they did, by step.
        holders = {"coordinator": 0, "replicas": 1, "diverged": len(island_of)}
        self._holders = range(holders[method.shared_in])
        self._snapshots: dict[int, dict[int, tuple[Buffer, Statistics | None]]] = {}
        self._buffers: Statistics | None = None
        self._ops: list[tuple[int, Op]] = []
        self._handed_over = time.monotonic()
        self._most_steps = FIRST_STEPS

    # --- the loop -------------------------------------------------------------------------------
    def run(self) -> None:
        """Train to the end. Raises RunError if a worker fails or the emulated network stalls for
        ever, Interrupted if asked to stop."""
        self._go_on()
        while self._agenda or self._busy or any(not c.ended for c in self._cursors):
            self._must_go_on()
            if self.method.timed:
                self._decide()
            elif self._wall:
                self._keep_pace()
            else:
                self._take_answers(self._in_step)
                self._close_in_order()
            self._go_on()
            late = time.monotonic() - self._handed_over > BATCH_S
            if late or len(self._ops) >= BATCH_OPS:
                self._hand_over()
        self.settle()
        self._must_go_on(stop=False)

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
        if not (self.method.timed or self._wall):
            for timings in self._network.results(wait=False):
                self._take_times(timings)

    def _take_times(self, timings: Timings) -> None:
        self._recorder.timed(timings)
        self._stalled = timings.stalled
        if self._wall:
            self._delivered.update((s.worker, s.fragment, s.version) for s in timings.syncs)

    def _let_out(self, hold_s: float) -> tuple[Timings, NetworkArrival | None, float]:
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
                    plan.append(Apply(fragment, len(updates)))
                    updates.append(outcome.update)
                    if outcome.update is not None:
                        cursor.base[fragment] = outcome.version
                case Mark(step):
                    if worker in self._holders:
                        plan.append(Snapshot())
                        cursor.marks.append(step)
                case End():
                    cursor.ended = True
            if not isinstance(action, Due | Receive):  # a send: when its payload's size is known
                self._tell(worker, action)
            cursor.advance()
        if plan:
            cursor.busy = True
            cursor.begun = time.monotonic()
            self._workers.start(worker, plan, updates)

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
        if self._wall and not cursor.told:
            coming = cursor.to_next_step()
            for action in coming:
                self._tell(worker, action)
            cursor.told = len(coming)

    def _outcome(self, key: RoundKey, worker: int) -> Outcome | None:
        """What a round made of this worker's part, once; None while the round is open, or on the
        wall clock its result on the way."""
        if self._wall and (worker, *key) not in self._delivered:
            return None
        waiting = self._outcomes.get(key, {})
        outcome = waiting.pop(worker, None)
        if outcome is not None:
            self._delivered.discard((worker, *key))
            if not waiting:
                del self._outcomes[key]
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
                self._ops.append((worker, Send(*key, due.step, payload.size, payload.itemsize)))
                arrival = Arrival(worker, payload, base, due.step)
                self._arrived.setdefault(key, {})[worker] = arrival

    def _pace(self, took_s: float, steps: int) -> None:
        """Learn from a plan that came back how many steps the next ones may have."""
        self._most_steps = max(1, int(PLAN_S * steps / max(took_s, 1e-6)))

    # --- closing rounds -------------------------------------------------------------------------
    def _close_in_order(self) -> None:
        """Untimed: close what can be closed, in the program's order."""
        while self._agenda:
            head = self._agenda[0]
            if isinstance(head, Mark):
                if not self._try_evaluate(head.step):
                    return
            else:
                key = (head.fragment, head.version)
                arrived = self._arrived.get(key, {})
                if not self.method.close(list(arrived.values()), len(self._cursors), 0.0):
                    return
                del self._arrived[key]
                self._commit(head.fragment, [(head.version, arrived[w]) for w in sorted(arrived)])
            self._agenda.popleft()

    def _decide(self) -> None:
        """Timed: take the next decision on the emulated clock, or let the host catch up."""
        timings, event, due_s = self._let_out(0.0 if self._busy else HOLD_S)
        if self._wall:  # who has its result now may have to hand over its parameters below
            self._go_on()
        # Workers run ahead of the clock, so a mark may be known long before its moment has come.
        self._passed.extend(timings.marks)
        if event is None and self._busy:
            self._take_answers(False, due_s)
            return
        if event is None and (due_s < inf or self._stalled):
            return  # a moment that the wall clock has yet to reach, or none any more
        while self._passed and (event is None or self._passed[0][1] < event.time_s):
            step, _ = self._passed.popleft()
            self._agenda.popleft()
            while not self._try_evaluate(step):  # the clock may be ahead of the host's answers
                if not self._busy:
                    raise RunError(f"no snapshot for the evaluation at step {step}")
                self._take_answers(False)
        if event is None:
            if not all(c.ended for c in self._cursors):
                raise RunError(STUCK)
            return
        key = (event.fragment, event.version)
        arrival = replace(self._arrived[key].pop(event.worker), time_s=event.time_s)
        if not self._arrived[key]:
            del self._arrived[key]
        self._open[event.fragment].append((event.version, arrival))
        gathered = self._open[event.fragment]
        if self.method.close([a for _, a in gathered], len(self._cursors), event.time_s):
            self._open[event.fragment] = []
            self._commit(event.fragment, sorted(gathered, key=lambda part: part[1].worker))
            for version, part in gathered:
                size = part.payload.size.total
                itemsize = part.payload.itemsize
                self._network.reply(part.worker, event.fragment, version, size, itemsize)

    def _commit(self, fragment: int, parts: Sequence[tuple[int, Arrival]]) -> None:
        """Combine what is finite of a round. Who was refused gets the outcome like everyone else.

        ``parts`` are the contributions in worker order, each with its own version. If none can be
        used nothing is committed: neither parameters nor outer momentum move, and nobody adopts
        anything.
        """
        usable = [part for part in parts if part[1].payload.is_finite()]
        fit = [arrival for _, arrival in usable]
        update: Update | None = None
        if fit:
            self._versions[fragment] += 1
            self._compare(fragment, usable)
            update = self.method.combine(self.shared, fragment, fit)
            if not isinstance(update, Update):
                raise TypeError(f"combine must return an Update, not {type(update).__name__}")
            packed = [a.payload.buffers for a in fit if a.payload.buffers is not None]
            if packed:
                self._buffers = self._merge_buffers(packed)
                update = replace(update, buffers=self._buffers)
            update = self._workers.share(update)
        outcome = Outcome(update, self._versions[fragment])
        taking_part = {arrival.worker for arrival in fit}
        fates = []
        for version, arrival in parts:
            worker = arrival.worker
            self._outcomes.setdefault((fragment, version), {})[worker] = outcome
            status = "ok" if worker in taking_part else "rejected"
            fates.append(Part(worker, fragment, version, status))
        self._recorder.closed(fates)

    def _compare(self, fragment: int, parts: Sequence[tuple[int, Arrival]]) -> None:
        """Record how alike the workers' contributions are, for methods that say."""
        if len(parts) < 2:
            return
        found = self.method.similarity(self.shared, fragment, [arrival for _, arrival in parts])
        if found is None:
            return
        cosine = found.tolist()
        self._recorder.compared(
            [
                Likeness(
                    fragment,
                    version,
                    one.step,
                    one.worker,
                    other.worker,
                    None if isnan(cosine[i][j]) else cosine[i][j],
                )
                for i, (version, one) in enumerate(parts)
                for j, (_, other) in enumerate(parts)
                if i < j
            ]
        )

    def _try_evaluate(self, step: int) -> bool:
        """Evaluate the shared parameters; False if a replica that holds them has not handed them
        over."""
        found = self._snapshots.get(step, {})
        if len(found) < len(self._holders):
            return False
        self._snapshots.pop(step, None)
        snapshots = [found[worker] for worker in self._holders]
        packed = [buffers for _, buffers in snapshots if buffers is not None]
        buffers = self._merge_buffers(packed) if packed else self._buffers
        self._recorder.evaluated(step, self._evaluate([p for p, _ in snapshots], buffers))
        return True
