"""Who takes part in what, when that is not everyone: declared rounds, and steps that are passed.

A timeline of a run in which every round is everyone's has none of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from islands.network.collectives import Collective, Why

#: A worker, as the timeline knows it.
W = TypeVar("W")


class Charge(NamedTuple):
    """Control bytes on their way to a worker."""

    worker: int
    nbytes: int


class Declared(Generic[W]):
    """A round that is not everyone's: its members, and the workers that wait to see its result.

    It is kept to the end of the run, since nobody knows who may yet ask: when it ended, and the
    chain of the last member to be done.
    """

    __slots__ = ("end", "key", "members", "onlookers")

    def __init__(self, key: tuple[int, int], members: tuple[int, ...]) -> None:
        self.key = key
        self.members = members
        self.end: tuple[float, Why] | None = None
        self.onlookers: list[W] = []

    def close(self, collective: Collective) -> list[W]:
        """The last member is done; returns who waited for that."""
        self.end = collective.last_end()
        waiting, self.onlookers = self.onlookers, []
        return waiting

    def __str__(self) -> str:
        return f"waits for round {self.key}, which nobody joined"


class Gate(Generic[W]):
    """A step that workers pass, and those who wait to join when all have."""

    __slots__ = ("joiners", "passed_s", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.passed_s: dict[int, float] = {}  # worker -> its clock then
        self.joiners: list[W] = []

    def pass_by(self, worker: int, clock_s: float) -> None:
        """A worker passes; twice is a ValueError."""
        if worker in self.passed_s:
            raise ValueError(f"worker {worker} passes step {self.step} twice")
        self.passed_s[worker] = clock_s

    def opens_s(self, passers: Sequence[int]) -> float | None:
        """When the last of ``passers`` passed; None before that."""
        if any(worker not in self.passed_s for worker in passers):
            return None
        return max(self.passed_s.values(), default=0.0)

    def __str__(self) -> str:
        return f"waits to join at step {self.step}, which {len(self.passed_s)} workers have passed"


class Passers:
    """Who passes which step: everyone, unless it was declared otherwise."""

    def __init__(self, workers: int) -> None:
        self._everyone = tuple(range(workers))
        self._declared: dict[int, tuple[int, ...]] = {}

    def declare(self, step: int, workers: tuple[int, ...]) -> None:
        """Only these pass ``step``; other words than before are a ValueError."""
        if self._declared.setdefault(step, workers) != workers:
            raise ValueError(f"step {step} is passed by {self._declared[step]} and by {workers}")

    def of(self, step: int) -> tuple[int, ...]:
        """The workers that pass ``step``."""
        return self._declared.get(step, self._everyone)


class Mortals(Passers):
    """The same where workers die and come back.

    ``died_s`` has those who are dead. Who comes back passes no step before its ``from_step``.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.died_s: dict[int, float] = {}
        self.from_step = [0] * workers

    def opens_s(self, gate: Gate[Any]) -> float | None:
        """When the last one passed that lives, or died before it passed; None before that."""
        passers = self.of(gate.step)
        alive = [
            worker
            for worker in passers
            if worker not in self.died_s and self.from_step[worker] <= gate.step
        ]
        opens_s = gate.opens_s(alive)
        if opens_s is None or not gate.passed_s:
            return None
        died_s = (self.died_s.get(worker, 0.0) for worker in passers if worker not in gate.passed_s)
        return max(opens_s, max(died_s, default=0.0))


class Marks:
    """Evaluation points of a timed run: told when everyone alive has passed them, once."""

    def __init__(self, passers: Mortals) -> None:
        self._passers = passers
        self.gates: dict[int, Gate[Any]] = {}  # those not told yet
        self._told: set[int] = set()

    def pass_by(self, step: int, worker: int, clock_s: float) -> None:
        """A worker passes; it is too late for a mark that was told while it was dead."""
        if step not in self._told:
            self.gates.setdefault(step, Gate(step)).pass_by(worker, clock_s)

    def take(self, until_s: float) -> list[tuple[int, float]]:
        """The marks that are passed by then, as (step, moment) in the order of time."""
        found = []
        for step, gate in self.gates.items():
            passed_s = self._passers.opens_s(gate)
            if passed_s is not None and passed_s <= until_s:
                found.append((passed_s, step))
        for _, step in found:
            del self.gates[step]
            self._told.add(step)
        return [(step, passed_s) for passed_s, step in sorted(found)]


def check_members(workers: Sequence[int], everyone: int) -> tuple[int, ...]:
    """Members in order, each once; ValueError if there is none, or one that does not exist."""
    members = tuple(sorted(set(workers)))
    if not members or not 0 <= members[0] <= members[-1] < everyone:
        raise ValueError(f"members {workers} are not some of the workers 0 … {everyone - 1}")
    return members
