"""Who takes part in what, when that is not everyone: declared rounds, and steps that are passed.

A timeline of a run in which every round is everyone's has none of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

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


def check_members(workers: Sequence[int], everyone: int) -> tuple[int, ...]:
    """Members in order, each once; ValueError if there is none, or one that does not exist."""
    members = tuple(sorted(set(workers)))
    if not members or not 0 <= members[0] <= members[-1] < everyone:
        raise ValueError(f"members {workers} are not some of the workers 0 … {everyone - 1}")
    return members
