"""Rounds that close by the clock: quorums, deadlines, methods that close as they like, and deaths.

Times decide here what is trained, so each decision is taken at an emulated moment, in the order of
the network's events. The network never simulates past the earliest moment at which some worker
could still send, and stops at every event for what follows from it.

A worker dies at a moment that the faults set. That is noticed after ``detect``, or when it comes
back before that: the collective that it was in is aborted, the survivors run it again, and nobody
waits for it any more. Who comes back starts from the shared parameters, and counts as a member
again from its first full round on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from islands.cursor import Cursor, moment
from islands.engine import HOLD_S, STUCK
from islands.errors import RunError
from islands.gathering import GatheringEngine
from islands.network.timed import Abort, Kill, Revive
from islands.network.timings import Arrival, Closed, Event, Timings, Wake
from islands.plan import Held
from islands.rounds import Admission, Contribution
from islands.schedule import Due, program, sends
from islands.trace import Mark, Pass

if TYPE_CHECKING:
    from islands.faults import Faults

#: Deaths in a row, without a round that commits, after which nothing is taken to come any more.
MOST_DEATHS = 1000


class TimedEngine(GatheringEngine):
    """Drives a run in which the clock decides.

    ``policy`` closes rounds; ``detect_s``: how long a death goes unnoticed; ``heals(worker, s)``:
    from when on a worker can reach the coordinator, if it wants to at ``s``, and with ``both`` also
    be reached.
    """

    def __init__(self, *, faults: Faults, detect_s: float, eval_every: int, **parts: Any) -> None:
        super().__init__(
            faults=faults, eval_every=eval_every, mortal=faults.crashes_happen, **parts
        )
        self._eval_every = eval_every
        self._detect_s = detect_s
        self._asked = True
        self._passed: deque[tuple[int, float]] = deque()
        self._deaths: list[Iterator[tuple[float, float]]] = [
            faults.crashes(worker) for worker in range(len(self._cursors))
        ]
        self._gone: set[int] = set()  # dead for good
        self._unnoticed: dict[int, tuple[int, ...]] = {}  # dead -> collectives that it broke off
        self._done = [0] * len(self._cursors)  # local steps whose times are certain
        self._drained = False
        self._agenda.clear()  # rounds close, and evaluations are due, by the clock

    # --- the loop ---------------------------------------------------------------------------------
    def run(self) -> None:
        for worker in range(len(self._cursors)):
            self._next_death(worker)
        super().run()

    def _over(self) -> bool:
        if self._gone and len(self._gone) == len(self._cursors):
            self._act(*(Abort(number) for number in self._flying))
            self._nobody_comes()
            self._evaluate_last()
            raise RunError("nobody is left: every worker has died or is cut off, for good")
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
            self._recorder.unused(sum(late.payload.size.total for late in gathering.late))
            gathering.missing, gathering.late = {}, []

    def _evaluate_last(self) -> None:
        """The shared parameters as the last round left them, unless they were evaluated since."""
        step = self._common_step()
        if self.method.shared_in == "coordinator" and step > self._evaluated:
            loss = self._evaluate([], self._rounds.statistics(()))
            self._recorder.evaluated(step, loss, self._now_s)

    def _evaluate_passed(self, event: Event | None) -> None:
        while self._passed and (event is None or self._passed[0][1] < event.time_s):
            step, _ = self._passed.popleft()
            while not self._try_evaluate(Mark(step)):  # the clock is ahead of the host's answers
                if not self._busy:
                    raise RunError(f"no snapshot for the evaluation at step {step}")
                self._take_answers(False)

    def _take_times(self, timings: Timings) -> None:
        super()._take_times(timings)
        # Workers go on without an event, so this may be after the latest one.
        self._now_s = max(self._now_s, timings.now_s)
        for worker, first, starts, _ in timings.steps:
            self._done[worker] = first + len(starts)
        self._recorder.spent(sum(spent.wire_bytes for spent in timings.spent))

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

    def _catch_up(self, worker: int) -> None:
        """It starts anew from one of the others, as after a death, but keeps what it has not
        sent."""
        self._stop_worker(worker)
        self._noticed.add(worker)  # nobody waits for it
        self._joining.append(worker)

    def _lose(self, worker: int, kind: str, detail: str) -> None:
        """The worker is away, and what it was part of is broken off."""
        self._unnoticed[worker] = self._stop_worker(worker)
        self._fresh.pop(worker, None)
        for fragment, gathering in enumerate(self._open):
            for waiting in (gathering.parts, gathering.parked):
                waiting[:] = [part for part in waiting if part.arrival.worker != worker]
            self._absent(fragment, {worker: gathering.missing.pop(worker, [])})
        self._recorder.event(self._now_s, kind, f"worker {worker}", detail)
        notices_s = self._now_s + self._detect_s
        self._wake_at(notices_s, partial(self._notice, worker, self._lives[worker]))

    def _die(self, worker: int, away_s: float) -> None:
        if max(self._done[worker], self._cursors[worker].starts_at) >= self._steps:
            return  # it took its last step
        if worker in self._dead:  # it waits for something to start from
            if worker not in self._gone:
                self._next_death(worker)
            return
        self._died += 1
        if self._died > MOST_DEATHS:
            raise RunError(
                f"workers died {MOST_DEATHS:,} times since the last round that was committed: they "
                "get nowhere; let them live longer (mtbf), or synchronise more often"
            )
        self._lose(worker, "crash", _for_how_long(away_s))
        self._recorder.lost("crash", worker, away_s if away_s < inf else self._detect_s)
        if away_s < inf:
            self._wake_at(self._now_s + away_s, partial(self._come_back, worker))
            self._next_death(worker)
        else:
            self._leave(worker)

    def _leave(self, worker: int) -> None:
        """It never comes back."""
        self._gone.add(worker)
        self._recorder.absent(worker, self._done[worker], self._steps)

    def _cut_off(self, worker: int) -> None:
        """As a death for good: it could train on, but nobody would ever hear of it."""
        self._lose(worker, "cut off", "for good: no link to the coordinator comes back")
        self._leave(worker)

    def _notice(self, worker: int, life: int) -> None:
        """A death is noticed: the survivors run again what it broke off."""
        if self._lives[worker] != life or worker not in self._unnoticed:
            return
        self._noticed.add(worker)
        for number in self._unnoticed.pop(worker):
            if number not in self._flying:
                continue
            fragment, parts, _ = self._flying.pop(number)
            gathering = self._open[fragment]
            gathering.flying = None
            self._act(Abort(number))
            # Who came meanwhile joins them, unless it is late for an earlier round.
            again = {p.arrival.worker: p for p in parts if p.arrival.worker not in self._dead}
            survivors = len(again)
            for part in gathering.parked:
                if part.arrival.worker not in gathering.missing:
                    again.setdefault(part.arrival.worker, part)
            gathering.parts = list(again.values())
            joined = {id(part) for part in gathering.parts}
            gathering.parked = [part for part in gathering.parked if id(part) not in joined]
            what = f"the {survivors} survivors run it again" if survivors else "nobody survived it"
            what = f"fragment {fragment}: {what}"
            self._recorder.event(self._now_s, "aborted", f"collective {number}", what)
            if gathering.parts:
                self._close(fragment)
            self._enter_parked(fragment)
        for fragment in range(len(self._open)):
            self._check(fragment)

    # --- coming back ------------------------------------------------------------------------------
    def _come_back(self, worker: int) -> None:
        """The downtime is over: start from what the coordinator has, or as soon as a replica can
        hand over what it has."""
        self._notice(worker, self._lives[worker])  # if nobody has: here it is again
        heals_s = self._heals(worker, self._now_s, both=True)
        others = [w for w, c in enumerate(self._cursors) if not c.ended and w not in self._dead]
        if heals_s == inf:
            self._leave(worker)
        elif heals_s > self._now_s:
            self._wake_at(heals_s, partial(self._come_back, worker))
        elif self.method.shared_in == "coordinator" or not others:
            self._admit(worker, self._rounds.admission(()), self._common_step())
        else:
            self._joining.append(worker)

    def _common_step(self) -> int:
        """After how many local steps the latest commits were."""
        return max((latest.step for latest in self._rounds.latest if latest is not None), default=0)

    def _admit_joining(self, donate: Pass, donor: Contribution, fragment: int) -> None:
        if self._wall:  # its result is there, but is to be told only with the next events
            self._delivered.add((donor.arrival.worker, fragment, donor.version))
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
        self._last[worker] = [
            versions.get(fragment, 0) + count
            for fragment, count in enumerate(sends(self._streams, self._steps, step))
        ]
        self._entered[worker] = [versions.get(n, 0) for n in range(len(self._streams))]
        cursor.sends = {fragment: [(version, 0)] for fragment, version in versions.items()}
        cursor.base = dict(enumerate(admission.versions))
        cursor.admission, cursor.starts_at = admission, step
        for fragment, gathering in enumerate(self._open):
            self._absent(fragment, {worker: gathering.missing.pop(worker, [])})
        self._dead.discard(worker)
        self._noticed.discard(worker)
        coming = program(self._streams, self._steps, 0, first=step, versions=versions)
        firsts = (action.fragment for action in coming if isinstance(action, Due))
        self._fresh[worker] = next(firsts, None)
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
