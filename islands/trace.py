"""The trace: what every worker did, in its own order, without a single time in it.

A run is a dependency graph. Each worker contributes a list of operations; a collective starts for a
member when that member has sent, and a receive waits for the collective. Torch decided these
operations; a network gives them their times, and another network can time them again.

Operations are named tuples so that thousands of them travel to the link actor in one cheap message.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

#: Round key: which fragment, and the version of it that this round produces (versions count from 1;
#: version 0 is the initial model).
RoundKey: TypeAlias = tuple[int, int]


class Bytes(NamedTuple):
    """One encoded payload's sizes by kind, in bytes; their sum is the payload."""

    values: int = 0
    indices: int = 0
    scales: int = 0

    @property
    def total(self) -> int:
        return self.values + self.indices + self.scales


class Compute(NamedTuple):
    """``count`` local steps, the first of which is step ``first`` (steps count from 0)."""

    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs


class Send(NamedTuple):
    """Hand a payload to the collective of a round, after ``step`` local steps.

    ``itemsize`` is the bytes of one value: a ring cuts payloads at whole values.
    """

    fragment: int
    version: int
    step: int
    size: Bytes
    itemsize: int


class Receive(NamedTuple):
    """Wait until the round's result has arrived, then go on."""

    fragment: int
    version: int


class Mark(NamedTuple):
    """An evaluation point after ``step`` local steps: takes no time, only remembers the clock."""

    step: int


class End(NamedTuple):
    """The worker has finished."""


# What follows is there only in runs whose rounds are not everyone's.


class Members(NamedTuple):
    """Who takes part in a round, when that is not everyone: their sends form the collective.

    It stands in any worker's list, and is handed in before anything that depends on it: the round's
    first send, or an onlooker's receive. Said again in the same words it changes nothing.
    ``fragment`` −1 says who passes the Mark and the Pass of step ``version``.
    """

    fragment: int
    version: int
    workers: tuple[int, ...]


class Pass(NamedTuple):
    """Like a Mark, but nothing is evaluated: the worker has done ``step`` local steps and all that
    lands there."""

    step: int


class Join(NamedTuple):
    """This worker, which did nothing before or left, begins when all who pass the Pass of ``step``
    have passed it; until then it is away."""

    step: int


class Leave(NamedTuple):
    """The worker takes no part until it joins again, or to the end. Its clock stays."""


class Control(NamedTuple):
    """``nbytes`` handed to this worker out of band, at its clock, by the first worker of the
    coordinator's island, which itself gets nothing."""

    nbytes: int


class Idle(NamedTuple):
    """The worker is away until ``until_s``, if that is later than its clock. A time of its own: a
    trace with it cannot be timed again."""

    until_s: float


Op: TypeAlias = (
    Compute | Send | Receive | Mark | End | Members | Pass | Join | Leave | Control | Idle
)
