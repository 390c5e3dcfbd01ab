"""Where a worker is in its program, as the engine drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import TypeAlias

from islands.rounds import Admission
from islands.schedule import Action, Due
from islands.trace import Compute, End, Mark, Pass

#: When a worker hands over its parameters. A Mark and a Pass of one step are two moments, but as
#: tuples they are equal.
Moment: TypeAlias = tuple[str, int]


def moment(at: Mark | Pass) -> Moment:
    """The moment of an operation."""
    return type(at).__name__, at.step


class Cursor:
    """Where one worker is in its program, and what it still waits for."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._actions = iter(actions)
        self.next: Action = next(self._actions)
        self.base: dict[int, int] = {}  # fragment -> version adopted last
        self.sends: dict[int, list[tuple[int, int]]] = {}  # fragment -> (own version, step)
        self.sent: deque[tuple[Due, int]] = deque()  # sends of the plan under way, with their base
        self.marks: deque[Moment] = deque()  # snapshots of the plan under way
        self.busy = False
        self.begun = 0.0  # host time at which the plan under way was handed out
        self.waits = False  # for a receive that the network knows of
        self.told = 0  # actions from the next one on that the network knows of already
        self.ended = False
        self.admission: Admission | None = None  # what to begin with, after so many local steps
        self.starts_at = 0

    def versions(self, step: int) -> dict[int, int]:
        """The version of each fragment that was sent last within ``step`` local steps."""
        return {
            fragment: max((version for version, at in sends if at <= step), default=0)
            for fragment, sends in self.sends.items()
        }

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
