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
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, NamedTuple, Protocol

from islands.compression import Update
from islands.errors import RunError
from islands.methods.base import Arrival, Method, Shared
from islands.plan import Answer, Apply, PlanOp, SendOut, Snapshot, Steps
from islands.schedule import Action, Due, program
from islands.trace import Compute, End, Mark, Op, Receive, RoundKey, Send

if TYPE_CHECKING:
    from islands.compression import Statistics
    from islands.compression.formats import Buffer
    from islands.network import Arrival as NetworkArrival
    from islands.network import Timings


class Workers(Protocol):
    """Where plans are carried out. Answers may come in any order."""

    def share(self, update: Update) -> Update:
        """Make one update cheap to hand to many workers; what is returned goes into ``start``."""
        ...

    def start(self, worker: int, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> None:
        """Begin a plan; each worker has at most one under way."""
        ...

    def answers(self, everyone: bool) -> Iterable[tuple[int, Answer]]:
        """Wait for plans to end: for all of them under way, or for at least one."""
        ...


class Network(Protocol):
    """What gives the operations their times (:class:`islands.network.Timeline`, or an actor of
    it)."""

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        """Operations in each worker's order; returns at once."""
        ...

    def results(self, wait: bool) -> Iterable[Timings]:
        """Times that are known by now; with ``wait``, of everything handed in so far."""
        ...

    def decide(self) -> tuple[Timings, NetworkArrival | None]:
        """Timed runs: simulate up to the next arrival, or to where more operations are needed
        (None)."""
        ...

    def reply(self, worker: int, fragment: int, version: int, nbytes: int, itemsize: int) -> None:
        """Timed runs: send the coordinator's answer, at the moment of the last arrival."""
        ...


class Part(NamedTuple):
    """One worker's part in a closed round: what it sent as (fragment, version), and its fate."""

    worker: int
    fragment: int
    version: int
    status: str  # ok | rejected


class Likeness(NamedTuple):
    """How alike the contributions of two workers to a round were; None beside a zero vector."""

    fragment: int
    version: int
    step: int
    worker: int
    other: int
    cosine: float | None


class Recorder(Protocol):
    """What keeps the results."""

    def losses(self, worker: int, losses: Sequence[float]) -> None: ...
    def closed(self, parts: Sequence[Part]) -> None: ...
    def compared(self, pairs: Sequence[Likeness]) -> None: ...
    def evaluated(self, step: int, loss: float) -> None: ...
    def traced(self, ops: Sequence[tuple[int, Op]]) -> None: ...
    def timed(self, timings: Timings) -> None: ...


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
        self.ended = False

    def advance(self) -> None:
        self.next = next(self._actions, End())

    def put_back(self, rest: Action) -> None:
        """What comes after the current action, before anything else."""
        self._actions = chain([rest], self._actions)


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
    ) -> None:
        """``island_of`` names each worker's island. ``evaluate(parameters, buffers)`` gives the
        validation loss of the mean of some replicas' parameters; none of them, or None, stands for
        the coordinator's own. ``stop()`` is asked once per turn."""
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
        """Train to the end. Raises RunError if a worker fails, Interrupted if asked to stop."""
        self._go_on()
        while self._agenda or any(c.busy or not c.ended for c in self._cursors):
            if self._stop():
                raise Interrupted
            if self.method.timed:
                self._decide()
            else:
                self._take_answers(self._in_step)
                self._close_in_order()
            self._go_on()
            late = time.monotonic() - self._handed_over > BATCH_S
            if late or len(self._ops) >= BATCH_OPS:
                self._hand_over()
        self.settle()

    def settle(self) -> None:
        """Bring in the times of everything that was handed out."""
        self._hand_over()
        for timings in self._network.results(wait=True):
            self._recorder.timed(timings)

    def _hand_over(self) -> None:
        self._handed_over = time.monotonic()
        if self._ops:
            ops, self._ops = self._ops, []
            self._recorder.traced(ops)
            self._network.extend(ops)
        if not self.method.timed:
            for timings in self._network.results(wait=False):
                self._recorder.timed(timings)

    # --- workers --------------------------------------------------------------------------------
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
                        self._ops.append((worker, action))
                        cursor.waits = True
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
                self._ops.append((worker, action))
            cursor.advance()
        if plan:
            cursor.busy = True
            cursor.begun = time.monotonic()
            self._workers.start(worker, plan, updates)

    def _outcome(self, key: RoundKey, worker: int) -> Outcome | None:
        """What a round made of this worker's part, once; None while the round is open."""
        waiting = self._outcomes.get(key, {})
        outcome = waiting.pop(worker, None)
        if outcome is not None and not waiting:
            del self._outcomes[key]
        return outcome

    def _take_answers(self, everyone: bool) -> None:
        for worker, answer in self._workers.answers(everyone):
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
        self._hand_over()
        timings, event = self._network.decide()
        self._recorder.timed(timings)
        # Workers run ahead of the clock, so a mark may be known long before its moment has come.
        self._passed.extend(timings.marks)
        if event is None and any(c.busy for c in self._cursors):
            self._take_answers(False)
            return
        while self._passed and (event is None or self._passed[0][1] < event.time_s):
            step, _ = self._passed.popleft()
            self._agenda.popleft()
            while not self._try_evaluate(step):  # the clock may be ahead of the host's answers
                if not any(c.busy for c in self._cursors):
                    raise RunError(f"no snapshot for the evaluation at step {step}")
                self._take_answers(False)
        if event is None:
            if not all(c.ended for c in self._cursors):
                raise RunError("workers wait for a round that no arrival can close any more")
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
