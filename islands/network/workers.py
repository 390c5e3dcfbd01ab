"""A worker as the network sees it: its clock, and the operations it has not come to yet."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from islands.network.collectives import Why
from islands.network.timings import WorkerClock, wait_parts
from islands.trace import Op


class Worker:
    """One worker's clock, what it spent it on, and the operations it has not come to yet.

    ``waits_for`` is what its present operation waits for, if anything.
    """

    __slots__ = (
        "away_s",
        "clock_s",
        "compute_s",
        "ended",
        "number",
        "ops",
        "sends",
        "wait_s",
        "waited_s",
        "waits_for",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.ops: deque[Op] = deque()
        self.clock_s = 0.0
        self.compute_s = 0.0
        self.wait_s = 0.0
        self.waited_s = [0.0] * 5  # where its waiting went, as in a WorkerClock
        self.away_s = 0.0
        self.sends = 0
        self.waits_for: object | None = None
        self.ended = False

    @property
    def clock(self) -> WorkerClock:
        """How far it has come, as it is told to others."""
        spent = (self.compute_s, self.wait_s, self.clock_s, *self.waited_s, self.away_s)
        return WorkerClock._make(spent)

    def compute(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take steps of these durations; returns the moments between which they lie, one more."""
        # One addition per step, for clock and sum alike: cutting an operation changes no bit.
        sums = np.empty((2, len(seconds) + 1))
        sums[0, 0], sums[1, 0] = self.clock_s, self.compute_s
        sums[:, 1:] = seconds
        sums = sums.cumsum(axis=1)
        self.clock_s, self.compute_s = sums[:, -1].tolist()
        moments: NDArray[np.float64] = sums[0]
        return moments

    def wait_until(self, done_s: float, why: Why) -> float:
        """The time up to ``done_s``, if it is not past, is spent waiting; returns how much."""
        if done_s <= self.clock_s:
            return 0.0
        wait_s = done_s - self.clock_s
        for n, part in enumerate(wait_parts(why, self.clock_s, done_s)):
            self.waited_s[n] += part
        self.clock_s = done_s
        self.wait_s += wait_s
        return wait_s

    def away_until(self, moment_s: float) -> None:
        """The time up to then, if it is not past, is spent away."""
        if moment_s > self.clock_s:
            self.away_s += moment_s - self.clock_s
            self.clock_s = moment_s
