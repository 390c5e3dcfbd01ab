"""The price of waiting for the slowest of eight workers, against its exact expectation."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.stragglers import expected_time, lone_steps, round_times


def assert_near(sample: NDArray[np.float64], exact: float) -> None:
    """The sample's mean is within three of its standard errors."""
    assert abs(sample.mean() - exact) <= 3 * sample.std(ddof=1) / sqrt(len(sample))


@pytest.mark.parametrize(("sync_every", "exact"), [(1, 1.2718), (10, 1.1492), (50, 1.1210)])
def test_synchronised_steps_take_as_long_as_the_slowest(sync_every: int, exact: float) -> None:
    """The network's clocks over 10,000 steps of 1 + Exp(0.1) show 1 + 0.1 E[max of 8 Gamma(n)] / n
    for a sync every n steps; that is 1 + 0.1 H_8 for n = 1."""
    expected = expected_time(sync_every)
    assert round(expected, 4) == exact
    assert_near(round_times(sync_every), expected)


def test_the_exact_value_of_one_step() -> None:
    """The integral is the harmonic sum in the case that has one."""
    assert expected_time(1) == pytest.approx(1 + 0.1 * sum(1 / k for k in range(1, 9)), abs=1e-7)


def test_a_worker_that_never_waits_takes_the_mean() -> None:
    """Without syncs the same steps take 1.1 nominal steps each."""
    steps = lone_steps()
    assert len(steps) == 80_000
    assert_near(steps, 1.1)
