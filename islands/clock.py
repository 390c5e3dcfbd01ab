"""Emulated compute time: how long each local step of each worker takes on the emulated clock.

Never measured while training: the host's speed must not leak into the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ComputeModel(Protocol):
    """Step durations, a pure function of (worker, step)."""

    def seconds(self, worker: int, first: int, count: int) -> NDArray[np.float64]:
        """Durations of steps ``first`` … ``first + count − 1`` of one worker, in seconds;
        (count,)."""
        ...


@dataclass(frozen=True)
class FixedSteps:
    """The same time for every step of a worker, in seconds, one entry per worker."""

    step_s: tuple[float, ...]

    def seconds(self, worker: int, first: int, count: int) -> NDArray[np.float64]:
        return np.full(count, self.step_s[worker])


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """What every step took in a run that was recorded, in seconds, one array per worker."""

    step_s: tuple[NDArray[np.float64], ...]

    def seconds(self, worker: int, first: int, count: int) -> NDArray[np.float64]:
        return self.step_s[worker][first : first + count]


def flop_seconds(parameters: int, tokens: int, flops_per_second: float) -> float:
    """Time of one training step from its arithmetic: 6·N·tokens / rate.

    Two floating-point operations per parameter and token in the forward pass, four in the backward
    pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    return 6.0 * parameters * tokens / flops_per_second
