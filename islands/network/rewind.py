"""Undoing what a worker did in advance of the moment at which it died."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from islands.network.workers import Worker

#: (worker, first step, starts, ends), as in Timings.
Steps: TypeAlias = tuple[int, int, NDArray[np.float64], NDArray[np.float64]]


class _Stretch(NamedTuple):
    """A worker's clock and sums at one moment."""

    clock_s: float
    compute_s: float
    wait_s: float
    away_s: float
    waited_s: list[float]


class Past:
    """Where a worker was before each move of its clock, as far back as the present."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._moves: deque[_Stretch] = deque()

    def note(self, now_s: float) -> None:
        """The clock is about to move; nothing before ``now_s`` will ever be undone."""
        moves = self._moves
        while len(moves) > 1 and moves[1].clock_s <= now_s:
            moves.popleft()
        moves.append(self._stretch())

    def rewind(self, now_s: float) -> None:
        """Set the clock to the present: back, or on if the worker was waiting."""
        worker, moves = self._worker, self._moves
        if worker.clock_s > now_s:
            after = self._stretch()
            while moves[-1].clock_s > now_s:
                after = moves.pop()
            before = moves[-1]
            share = (now_s - before.clock_s) / (after.clock_s - before.clock_s)

            def part(was: float, then: float) -> float:
                return was + share * (then - was)

            worker.clock_s = now_s
            worker.compute_s = part(before.compute_s, after.compute_s)
            worker.wait_s = part(before.wait_s, after.wait_s)
            worker.away_s = part(before.away_s, after.away_s)
            worker.waited_s = list(map(part, before.waited_s, after.waited_s))
        elif not worker.ended:
            worker.wait_until(now_s, (now_s, 0.0, 0.0, 0.0, 0.0))
        moves.clear()

    def _stretch(self) -> _Stretch:
        w = self._worker
        return _Stretch(w.clock_s, w.compute_s, w.wait_s, w.away_s, [*w.waited_s])


def split(part: Steps, until_s: float) -> tuple[list[Steps], list[Steps]]:
    """The steps that have ended by ``until_s``, and the others; each a list of one or none."""
    worker, first, starts, ends = part
    done = int(np.searchsorted(ends, until_s, side="right"))
    before = [(worker, first, starts[:done], ends[:done])] if done else []
    after = [(worker, first + done, starts[done:], ends[done:])] if done < len(ends) else []
    return before, after
