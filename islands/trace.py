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


Op: TypeAlias = Compute | Send | Receive | Mark | End
