"""Losses and times of all local steps, until both are known and can be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from islands.optim import LearningRate


class StepLog:
    """Every worker's steps, counted from 0. A step that a worker takes no part in has no row."""

    def __init__(self, island_of: Sequence[str], steps: int, rate: LearningRate) -> None:
        shape = (len(island_of), steps)
        self._islands = np.array(island_of, dtype=object)
        self._rate = rate
        self._loss, self._start, self._end = np.empty(shape), np.empty(shape), np.empty(shape)
        self._there = np.ones(shape, dtype=bool)
        self._trained = [0] * len(island_of)  # per worker the next step without a loss
        self._timed = [0] * len(island_of)  # per worker the next step without times
        self.written = 0

    @property
    def done(self) -> int:
        """How many are written, up to the last one that anybody took."""
        if self._there[:, self.written - 1].any():
            return self.written
        taken = np.flatnonzero(self._there[:, : self.written].any(axis=0))
        return int(taken[-1]) + 1 if len(taken) else 0

    @property
    def taken(self) -> int:
        """Steps of all workers together that are written."""
        return int(self._there[:, : self.written].sum())

    @property
    def last_loss(self) -> float | None:
        """Mean training loss over the workers' latest steps."""
        latest = [
            self._loss[worker, there[-1]]
            for worker, end in enumerate(self._trained)
            if len(there := np.flatnonzero(self._there[worker, :end]))
        ]
        return float(np.mean(latest)) if latest else None

    def absent(self, worker: int, first: int, last: int) -> None:
        """The worker does not take the steps ``first`` … ``last − 1``."""
        self._there[worker, first:last] = False
        for counts in (self._trained, self._timed):
            if counts[worker] >= first:  # what a dying worker did in advance is taken back
                counts[worker] = self._next(worker, last)

    def losses(self, worker: int, losses: Sequence[float]) -> None:
        """Those of the worker's next steps."""
        at = 0
        while at < len(losses):
            first = self._trained[worker]
            last = first + len(losses) - at
            gap = np.flatnonzero(~self._there[worker, first:last])
            last = first + int(gap[0]) if len(gap) else last
            self._loss[worker, first:last] = losses[at : at + last - first]
            at += last - first
            self._trained[worker] = self._next(worker, last)

    def times(
        self, worker: int, first: int, starts: NDArray[np.float64], ends: NDArray[np.float64]
    ) -> None:
        """When the worker's steps from ``first`` on began and ended."""
        self._start[worker, first : first + len(starts)] = starts
        self._end[worker, first : first + len(ends)] = ends
        self._timed[worker] = self._next(worker, first + len(ends))

    def rows(self) -> dict[str, Any] | None:
        """The columns of steps that all workers are past, by step and worker; each once."""
        first, last = self.written, min(*self._trained, *self._timed)
        if last <= first:
            return None
        count, workers = last - first, len(self._trained)
        part = slice(first, last)
        columns = {
            "worker": np.tile(np.arange(workers), count),
            "island": np.tile(self._islands, count),
            "step": np.repeat(np.arange(first + 1, last + 1), workers),
            "loss": self._loss[:, part].T.ravel(),
            "lr": np.repeat([self._rate.at(step) for step in range(first, last)], workers),
            "start_s": self._start[:, part].T.ravel(),
            "end_s": self._end[:, part].T.ravel(),
        }
        self.written = last
        there = self._there[:, part].T.ravel()
        return columns if there.all() else {name: c[there] for name, c in columns.items()}

    def _next(self, worker: int, step: int) -> int:
        """The first step from ``step`` on in which the worker takes part; all of them: the end."""
        there = self._there[worker]
        if step >= len(there) or there[step]:
            return step
        later = np.flatnonzero(there[step:])
        return step + int(later[0]) if len(later) else len(there)
