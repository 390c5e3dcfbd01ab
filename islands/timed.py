"""Rounds that close by the clock: quorums, deadlines, methods that close as they like, and deaths.

Times decide here what is trained, so each decision is taken at an emulated moment, in the order of
the network's events. The network never simulates past the earliest moment at which some worker
could still send, and stops at every event for what follows from it.

A round gathers the workers that are ready, closes by its policy, and its collective begins. Who
comes later is late: it sends nothing, and goes on by the policy's rule. A worker dies at a moment
that the faults set. After ``detect`` it is noticed: the collective that it was in is aborted, the
survivors run it again, and nobody waits for it any more. So where workers may die, a round commits
only when the last of its members is done. Who comes back starts from the shared parameters, and
counts as a member again from its first full round on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from islands.cursor import Cursor, moment
from islands.engine import HOLD_S, STUCK, Engine
from islands.errors import RunError
from islands.network.timed import Abort, Action, Kill, Launch, Release, Reply, Revive, WakeAt
from islands.network.timings import Arrival, Closed, Event, Timings, Wake
from islands.plan import Held
from islands.protocols import Part
from islands.rounds import Admission, Contribution, Gathering, Outcome
from islands.schedule import program
from islands.trace import Mark, Pass

if TYPE_CHECKING:
    from islands.faults import Faults
    from islands.policy import Policy


class TimedEngine(Engine):
    """Drives a run in which the clock decides.

    ``policy`` closes rounds; ``detect_s``: how long a death goes unnoticed; ``heals(worker, s)``:
    from when on a worker can reach the coordinator, if it wants to at ``s``.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        faults: Faults,
        detect_s: float,
        eval_every: int,
        heals: Callable[[int, float], float],
        **parts: Any,
    ) -> None:
        super().__init__(policy=policy, faults=faults, eval_every=eval_every, **parts)
        self._policy = policy
        self._eval_every = eval_every
        self._detect_s = detect_s
        self._heals = heals
        self._asked = True
        self._open = [Gathering() for _ in self._streams]
        self._passed: deque[tuple[int, float]] = deque()
        self._now_s = 0.0
        self._numbers = count(1)
        self._flying: dict[int, tuple[int, list[Contribution]]] = {}
        self._wakes: dict[int, Callable[[], None]] = {}
        self._tags = count()
        self._deaths: list[Iterator[tuple[float, float]]] = [
            faults.crashes(worker) for worker in range(len(self._cursors))
        ]
        self._mortal = faults.crashes_happen
        self._dead: set[int] = set()
        self._gone: set[int] = set()  # dead for good
        self._noticed: set[int] = set()  # dead, and nobody waits for them
        self._fresh: set[int] = set()  # came back, and were in no round yet: none waits for them
        self._joining: list[int] = []  # wait for a replica to start from
        self._done = [0] * len(self._cursors)  # local steps whose times are certain
        self._lives = [0] * len(self._cursors)  # how often each worker was stopped
        self._drained = False
        self._agenda.clear()  # rounds close, and evaluations are due, by the clock

    # --- the loop ---------------------------------------------------------------------------------
    def run(self) -> None:
        for worker in range(len(self._cursors)):
            self._next_death(worker)
        super().run()

    def _over(self) -> bool:
        if self._gone and len(self._gone) == len(self._cursors):
            self._hand_over()
            self._nobody_comes()
            raise RunError("nobody is left: every worker has died and none comes back")
        return self._drained

    def _turn(self) -> None:
        """Take the next decision on the emulated clock, or let the host catch up."""
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
        self._evaluate_passed(event)
        if event is None:
            if all(cursor.ended for cursor in self._cursors):
                self._drained = True
                self._nobody_comes()
            elif not self._fewer_are_enough():
                raise RunError(STUCK)
            return
        self._now_s = event.time_s
        match event:
            case Arrival(_, worker, fragment, version):
                self._arrive(worker, fragment, version)
            case Closed(_, number):
                if number in self._flying:
                    self._land(number)
            case Wake(_, tag):
                self._wakes.pop(tag)()

    def _fewer_are_enough(self) -> bool:
        """Whoever else an open round waited for has ended: close what that allows."""
        open_before = [len(gathering.parts) for gathering in self._open]
        for fragment in range(len(self._open)):
            self._check(fragment)
        return open_before != [len(gathering.parts) for gathering in self._open]

    def _nobody_comes(self) -> None:
        """The run is over: who has not come to a round was absent from it."""
        for fragment, gathering in enumerate(self._open):
            self._absent(fragment, gathering.missing)
            gathering.missing = {}

    def _evaluate_passed(self, event: Event | None) -> None:
        while self._passed and (event is None or self._passed[0][1] < event.time_s):
            step, _ = self._passed.popleft()
            while not self._try_evaluate(Mark(step)):  # the clock is ahead of the host's answers
                if not self._busy:
                    raise RunError(f"no snapshot for the evaluation at step {step}")
                self._take_answers(False)

    def _take_times(self, timings: Timings) -> None:
        super()._take_times(timings)
        for worker, first, starts, _ in timings.steps:
            self._done[worker] = first + len(starts)
        self._recorder.spent(sum(spent.wire_bytes for spent in timings.spent))

    def _act(self, *actions: Action) -> list[Any]:
        """Let the network do something at the moment of the latest event."""
        self._hand_over()
        return list(self._network.act(actions))

    def _wake_at(self, time_s: float, what: Callable[[], None]) -> None:
        tag = next(self._tags)
        self._wakes[tag] = what
        self._act(WakeAt(time_s, tag))

    # --- gathering --------------------------------------------------------------------------------
    def _arrive(self, worker: int, fragment: int, version: int) -> None:
        """A worker is ready, or its upload is there: the coordinator hears of it at once, or when a
        link on the way is not cut any more."""
        key = (fragment, version)
        arrival = replace(self._arrived[key].pop(worker), time_s=self._now_s)
        if not self._arrived[key]:
            del self._arrived[key]
        part = Contribution(version, arrival)
        heals_s = self._now_s  # an upload has found its way
        if self.method.collective != "star":
            heals_s = self._heals(worker, self._now_s)
        if heals_s <= self._now_s:
            self._enter(fragment, part)
        elif heals_s < inf:
            self._wake_at(heals_s, partial(self._hear, fragment, part, self._lives[worker]))

    def _hear(self, fragment: int, part: Contribution, life: int) -> None:
        """The word of a worker gets through, unless it has died since."""
        if self._lives[part.arrival.worker] == life:
            self._enter(fragment, part)

    def _enter(self, fragment: int, part: Contribution) -> None:
        worker, gathering = part.arrival.worker, self._open[fragment]
        part = part._replace(arrival=replace(part.arrival, time_s=self._now_s))
        # With a whole period of overlap a worker is ready again while its last round is open.
        if gathering.flying is not None or worker in {p.arrival.worker for p in gathering.parts}:
            gathering.parked.append(part)
        elif numbers := gathering.missing.pop(worker, []):
            self._come_late(fragment, part, numbers)
        else:
            gathering.parts.append(part)
            self._check(fragment)

    def _enter_parked(self, fragment: int) -> None:
        """The next round is open, unless the last one's collective still is under way."""
        gathering = self._open[fragment]
        if gathering.flying is None:
            parked, gathering.parked = gathering.parked, []
            for part in parked:
                if part.arrival.worker not in self._dead:
                    self._enter(fragment, part)

    def _expected(self) -> set[int]:
        """Whom an open round waits for. A death that nobody has noticed changes nothing."""
        return {
            worker
            for worker, cursor in enumerate(self._cursors)
            if not cursor.ended or (worker in self._dead and worker not in self._noticed)
            if worker not in self._noticed and worker not in self._fresh
        }

    def _check(self, fragment: int) -> None:
        """Close the round if it is time, or come back when it will be."""
        gathering = self._open[fragment]
        if gathering.flying is not None or not gathering.parts:
            return
        came = {part.arrival.worker for part in gathering.parts}
        alive = len(self._expected() | came)
        if self.method.timed:
            arrivals = [part.arrival for part in gathering.parts]
            if self.method.close(arrivals, alive, self._now_s):
                self._close(fragment)
            return
        times = [part.arrival.time_s for part in gathering.parts]
        closes_s = self._policy.closes_at(gathering.opened_s, times, alive)
        if closes_s <= self._now_s:
            self._close(fragment)
        elif closes_s < gathering.wakes_s:
            gathering.wakes_s = closes_s
            self._wake_at(closes_s, partial(self._look_again, fragment, closes_s))

    def _look_again(self, fragment: int, wakes_s: float) -> None:
        if self._open[fragment].wakes_s == wakes_s:
            self._open[fragment].wakes_s = inf
            self._check(fragment)

    # --- closing ----------------------------------------------------------------------------------
    def _close(self, fragment: int) -> None:
        """Nobody else gets into this round: start its collective, or let everyone go on."""
        gathering = self._open[fragment]
        parts = sorted(gathering.parts, key=lambda part: part.arrival.worker)
        gathering.parts, gathering.opened_s, gathering.wakes_s = [], self._now_s, inf
        # Only now: who has come back is at another step than the others until a round has brought
        # them together, and meanwhile they would wait for each other in rounds of two fragments.
        self._fresh -= {part.arrival.worker for part in parts}
        if self.method.collective == "star":
            self._commit(fragment, parts)
            self._act(
                *(
                    Reply(a.worker, fragment, v, a.payload.size.total, a.payload.itemsize)
                    for v, a in parts
                )
            )
        elif not self._policy.commits(len(parts)):
            self._commit(fragment, parts)
            self._act(*(Release(a.worker, fragment, version, 0) for version, a in parts))
        else:
            number = gathering.launched = next(self._numbers)
            members = tuple((arrival.worker, version) for version, arrival in parts)
            self._act(Launch(members, fragment, number, self._mortal))
            if self._mortal:
                gathering.flying = number
                self._flying[number] = (fragment, parts)
            else:
                self._commit(fragment, parts)
        self._enter_parked(fragment)

    def _land(self, number: int) -> None:
        """A collective has ended for everyone in it."""
        fragment, parts = self._flying.pop(number)
        self._open[fragment].flying = None
        self._commit(fragment, parts)
        self._enter_parked(fragment)

    def _commit(self, fragment: int, parts: list[Contribution]) -> None:
        gathering = self._open[fragment]
        came = {part.arrival.worker for part in parts}
        number = self._rounds.closed[fragment] + 1
        expected = set() if self.method.timed else self._expected() - came
        donors = [part for part in parts if part.arrival.worker not in self._dead]
        donate = Pass(-number) if self._joining and donors else None
        late, gathering.late = gathering.late, []
        committed = self._rounds.close(
            fragment,
            parts,
            late=late,
            expected=expected,
            gone=self._dead,
            donate=None if donate is None else (donors[0].arrival.worker, donate),
        )
        if committed:
            for worker in expected:
                gathering.missing.setdefault(worker, []).append(number)
        else:
            gathering.late = late
            self._absent(fragment, {worker: [number] for worker in expected})
        if donate is not None:
            self._admit_joining(donate, donors[0])

    def _absent(self, fragment: int, missed: dict[int, list[int]]) -> None:
        """Workers that never came to these rounds."""
        parts = [
            Part(worker, fragment, number, "absent", number)
            for worker in sorted(missed)
            for number in missed[worker]
        ]
        if parts:
            self._recorder.missed(parts)

    def _come_late(self, fragment: int, part: Contribution, numbers: list[int]) -> None:
        """A worker is ready for a round that closed without it: by the policy's rule its payload
        counts in the next one, or for nothing."""
        version, arrival = part
        worker, gathering = arrival.worker, self._open[fragment]
        weight, latest = self._policy.late_weight, self._rounds.latest[fragment]
        assert latest is not None
        self._absent(fragment, {worker: numbers[1:]})
        if self.method.shared_in == "replicas":
            late = Part(worker, fragment, version, "late", numbers[0], passes=False)
            self._recorder.missed([late])
            self._catch_up(worker)
            return
        self._recorder.missed(
            [Part(worker, fragment, version, "late", numbers[0], passes=True, used=bool(weight))]
        )
        if weight is not None:
            gathering.late.append(replace(arrival, weight=weight))
        shared = self.method.shared_in == "coordinator"
        outcome = Outcome(
            latest.update if shared else None,
            self._rounds.versions[fragment],
            adopt=weight is not None,
            lost=weight is None,
            control_bytes=latest.nbytes if shared else 0,
        )
        self._rounds.tell((fragment, version), worker, outcome)
        self._act(Release(worker, fragment, version, 0, gathering.launched))

    def _catch_up(self, worker: int) -> None:
        """A replica that must stay equal to the others was too slow: it starts anew from one of
        them, as after a death, but keeps what it has not sent."""
        self._stop_worker(worker)
        self._noticed.add(worker)  # nobody waits for it
        self._joining.append(worker)

    # --- deaths -----------------------------------------------------------------------------------
    def _next_death(self, worker: int) -> None:
        for time_s, away_s in self._deaths[worker]:
            self._wake_at(max(time_s, self._now_s), partial(self._die, worker, away_s))
            return

    def _stop_worker(self, worker: int) -> tuple[int, ...]:
        """The worker does nothing more; the collectives that it leaves unfinished."""
        cursor = self._cursors[worker]
        while cursor.busy:
            self._take_answers(False)
        self._ops = [(other, op) for other, op in self._ops if other != worker]
        for arrived in self._arrived.values():
            arrived.pop(worker, None)
        self._arrived = {key: those for key, those in self._arrived.items() if those}
        self._rounds.forget(worker)
        cursor.ended = True
        self._dead.add(worker)
        self._lives[worker] += 1
        (unfinished,) = self._act(Kill(worker))
        self._recorder.stopped(worker, self._done[worker])
        return tuple(unfinished)

    def _die(self, worker: int, away_s: float) -> None:
        finished = max(self._done[worker], self._cursors[worker].starts_at) >= self._steps
        if finished or worker in self._dead:  # it took its last step, or is being replaced
            return
        unfinished = self._stop_worker(worker)
        self._fresh.discard(worker)
        for fragment, gathering in enumerate(self._open):
            for waiting in (gathering.parts, gathering.parked):
                waiting[:] = [part for part in waiting if part.arrival.worker != worker]
            self._absent(fragment, {worker: gathering.missing.pop(worker, [])})
        self._recorder.event(self._now_s, "crash", f"worker {worker}", _for_how_long(away_s))
        self._recorder.lost("crash", worker, away_s if away_s < inf else self._detect_s)
        self._wake_at(self._now_s + self._detect_s, partial(self._notice, worker, unfinished))
        if away_s < inf:
            self._wake_at(self._now_s + away_s, partial(self._come_back, worker))
            self._next_death(worker)
        else:
            self._gone.add(worker)
            self._recorder.absent(worker, self._done[worker], self._steps)

    def _notice(self, worker: int, unfinished: tuple[int, ...]) -> None:
        """A death is noticed: the survivors run again what it broke off."""
        if worker in self._dead:
            self._noticed.add(worker)
        for number in unfinished:
            if number not in self._flying:
                continue
            fragment, parts = self._flying.pop(number)
            gathering = self._open[fragment]
            gathering.flying = None
            self._act(Abort(number))
            what = f"fragment {fragment}: the survivors of {len(parts)} run it again"
            self._recorder.event(self._now_s, "aborted", f"collective {number}", what)
            # Who came meanwhile joins them, unless it is late for an earlier round.
            again = {part.arrival.worker: part for part in parts}
            for part in gathering.parked:
                if part.arrival.worker not in gathering.missing:
                    again.setdefault(part.arrival.worker, part)
            gathering.parts = [part for w, part in again.items() if w not in self._dead]
            joined = {id(part) for part in gathering.parts}
            gathering.parked = [part for part in gathering.parked if id(part) not in joined]
            if gathering.parts:
                self._close(fragment)
            self._enter_parked(fragment)
        for fragment in range(len(self._open)):
            self._check(fragment)

    def _come_back(self, worker: int) -> None:
        """The downtime is over: start from what the coordinator has, or as soon as a replica can
        hand over what it has."""
        others = [w for w, c in enumerate(self._cursors) if not c.ended and w not in self._dead]
        if self.method.shared_in == "coordinator" or not others:
            self._admit(worker, self._rounds.admission(()), self._common_step())
        else:
            self._joining.append(worker)

    def _common_step(self) -> int:
        """After how many local steps the latest commits were."""
        return max((latest.step for latest in self._rounds.latest if latest is not None), default=0)

    def _admit_joining(self, donate: Pass, donor: Contribution) -> None:
        """A round has closed: those who wait start from what one of its members has then."""
        while moment(donate) not in self._snapshots:
            self._go_on()
            if moment(donate) not in self._snapshots:
                self._take_answers(False)
        held = list(self._snapshots.pop(moment(donate)).values())
        joining, self._joining = self._joining, []
        for worker in joining:
            self._admit(worker, self._rounds.admission(held), donor.arrival.step)

    def _admit(self, worker: int, admission: Admission, step: int) -> None:
        """A worker goes on after ``step`` local steps, from what it is given."""
        step = max(step, self._done[worker])
        versions = self._cursors[worker].versions(self._done[worker])
        actions = program(
            self._streams,
            self._steps,
            self._eval_every,
            first=step,
            versions=versions,
        )
        cursor = self._cursors[worker] = Cursor(actions)
        cursor.sends = {fragment: [(version, 0)] for fragment, version in versions.items()}
        cursor.base = dict(enumerate(admission.versions))
        cursor.admission, cursor.starts_at = admission, step
        for fragment, gathering in enumerate(self._open):
            self._absent(fragment, {worker: gathering.missing.pop(worker, [])})
        self._dead.discard(worker)
        self._noticed.discard(worker)
        self._fresh.add(worker)
        self._recorder.absent(worker, self._done[worker], step)
        self._act(Revive(worker, self._now_s, step))
        what = f"goes on after step {step}"
        self._recorder.event(self._now_s, "rejoin", f"worker {worker}", what)

    # --- evaluations ------------------------------------------------------------------------------
    def _holders(self, step: int) -> tuple[int, ...]:
        """Who hands over parameters: anyone may die or be replaced before a mark is passed by all,
        so everyone does."""
        if self.method.shared_in == "coordinator":
            return ()
        return tuple(range(len(self._cursors)))

    def _collect(self, at: Mark | Pass) -> list[Held] | None:
        if self.method.shared_in == "coordinator":
            return []
        if self._busy:
            return None
        found = self._snapshots.pop(moment(at), {})
        alive = {worker: held for worker, held in found.items() if worker not in self._dead}
        those = [held for _, held in sorted((alive or found).items())]
        return those[:1] if self.method.shared_in == "replicas" else those


def _for_how_long(away_s: float) -> str:
    return "for good" if away_s == inf else f"for {away_s:g} s"
