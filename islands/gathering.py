"""Rounds that close by the clock: who gets into them, when they close, and who is late.

A round gathers the workers that are ready, closes by its policy, and its collective begins. Who
comes later is late: it sends nothing, and goes on by the policy's rule. Where workers may die, a
round commits only when the last of its members is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from islands.engine import Engine
from islands.network.timed import Action, Launch, Release, Reply, WakeAt
from islands.protocols import Part
from islands.rounds import Contribution, Gathering, Outcome
from islands.schedule import sends
from islands.trace import Pass

if TYPE_CHECKING:
    from islands.policy import Policy


class GatheringEngine(Engine, ABC):
    """The part of :class:`islands.timed.TimedEngine` that is about rounds.

    It knows who is dead, and nothing of how workers die or come back.
    """

    def __init__(
        self, *, policy: Policy, heals: Callable[..., float], mortal: bool, **parts: Any
    ) -> None:
        super().__init__(policy=policy, **parts)
        self._policy = policy
        self._heals = heals
        self._mortal = mortal  # whether a member of a collective may die
        self._open = [Gathering() for _ in self._streams]
        self._now_s = 0.0
        self._numbers = count(1)
        # Collectives under way: of which fragment and whom, and who else was waited for.
        self._flying: dict[int, tuple[int, list[Contribution], set[int]]] = {}
        # Per worker, how often it sends each fragment in all, and how often it has.
        self._last = [sends(self._streams, self._steps) for _ in self._cursors]
        self._entered = [[0] * len(self._streams) for _ in self._cursors]
        self._wakes: dict[int, Callable[[], None]] = {}
        self._tags = count()
        self._dead: set[int] = set()
        self._noticed: set[int] = set()  # dead, and nobody waits for them
        # Came back, and were in no round yet: the fragment that each sends first.
        self._fresh: dict[int, int | None] = {}
        self._joining: list[int] = []  # wait for a replica to start from
        self._tells_ahead = False  # who is late gets control bytes
        self._died = 0  # deaths since the last round that was committed
        self._lives = [0] * len(self._cursors)  # how often each worker was stopped

    def _act(self, *actions: Action) -> list[Any]:
        """Let the network do something at the moment of the latest event."""
        self._hand_over()
        return list(self._network.act(actions))

    def _wake_at(self, time_s: float, what: Callable[[], None]) -> None:
        tag = next(self._tags)
        self._wakes[tag] = what
        self._act(WakeAt(time_s, tag))

    @abstractmethod
    def _catch_up(self, worker: int) -> None:
        """A replica that must stay equal to the others was too slow for a round."""

    @abstractmethod
    def _cut_off(self, worker: int) -> None:
        """No word of the worker will ever get through."""

    @abstractmethod
    def _admit_joining(self, donate: Pass, donor: Contribution, fragment: int) -> None:
        """A round has closed: those who wait start from what one of its members has then."""

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
        else:
            self._cut_off(worker)

    def _hear(self, fragment: int, part: Contribution, life: int) -> None:
        """The word of a worker gets through, unless it has died since."""
        if self._lives[part.arrival.worker] == life:
            self._enter(fragment, part)

    def _enter(self, fragment: int, part: Contribution) -> None:
        worker, gathering = part.arrival.worker, self._open[fragment]
        part = part._replace(arrival=replace(part.arrival, time_s=self._now_s))
        self._entered[worker][fragment] = part.version
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

    def _expected(self, fragment: int) -> set[int]:
        """Whom an open round waits for: who will send the fragment again. A death that nobody has
        noticed changes nothing.

        Who has come back is at another step than the others until a round has brought them
        together; if rounds waited for it before, they would wait for each other in two fragments.
        """
        alive = {
            worker
            for worker, entered in enumerate(self._entered)
            if worker not in self._noticed
            and (worker in self._dead or entered[fragment] < self._last[worker][fragment])
        }
        together = {worker for worker in alive if worker not in self._fresh}
        return together or {worker for worker in alive if self._fresh[worker] == fragment}

    def _check(self, fragment: int) -> None:
        """Close the round if it is time, or come back when it will be."""
        gathering = self._open[fragment]
        if gathering.flying is not None or not gathering.parts:
            return
        came = {part.arrival.worker for part in gathering.parts}
        alive = len(self._expected(fragment) | came)
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
        came = {part.arrival.worker for part in parts}
        expected = set() if self.method.timed else self._expected(fragment) - came
        gathering.parts, gathering.opened_s, gathering.wakes_s = [], self._now_s, inf
        for part in parts:
            self._fresh.pop(part.arrival.worker, None)
        if self.method.collective == "star":
            self._commit(fragment, parts, expected)
            self._act(
                *(
                    Reply(a.worker, fragment, v, a.payload.size.total, a.payload.itemsize)
                    for v, a in parts
                )
            )
        elif not self._policy.commits(len(parts)):
            self._commit(fragment, parts, expected)
            self._act(*(Release(a.worker, fragment, version, 0) for version, a in parts))
        else:
            number = gathering.launched = next(self._numbers)
            members = tuple((arrival.worker, version) for version, arrival in parts)
            self._act(Launch(members, fragment, number, self._mortal))
            if self._mortal:
                gathering.flying = number
                self._flying[number] = (fragment, parts, expected)
            else:
                self._commit(fragment, parts, expected)
        self._enter_parked(fragment)

    def _land(self, number: int) -> None:
        """A collective has ended for everyone in it."""
        fragment, parts, expected = self._flying.pop(number)
        gathering = self._open[fragment]
        gathering.flying = None
        came_since = {part.arrival.worker for part in gathering.parked}
        self._commit(fragment, parts, expected & (self._expected(fragment) | came_since))
        self._enter_parked(fragment)

    def _commit(self, fragment: int, parts: list[Contribution], expected: set[int]) -> None:
        """Combine a round. Those ``expected`` did not come in time, and may still."""
        gathering = self._open[fragment]
        number = self._rounds.closed[fragment] + 1
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
            self._died = 0
            for worker in expected:
                gathering.missing.setdefault(worker, []).append(number)
        else:
            gathering.late = late
            self._absent(fragment, {worker: [number] for worker in expected})
        if donate is not None:
            self._admit_joining(donate, donors[0], fragment)

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
