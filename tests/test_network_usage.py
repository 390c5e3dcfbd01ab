"""How busy a link was: totals and bins, against plain arrays with one entry per second."""

from __future__ import annotations

from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.network.usage import Usage, UsageTotals


@st.composite
def intervals(draw: st.DrawFn) -> list[tuple[float, float, float]]:
    """Uses of a link in time order, some without a gap, some of no length, some of a part of it."""
    found, time_s = [], 0.0
    for _ in range(draw(st.integers(0, 12))):
        start = time_s + draw(st.just(0.0) | st.floats(0, 4))
        time_s = start + draw(st.just(0.0) | st.floats(0, 3) | st.integers(0, 5).map(float))
        found.append((start, time_s, draw(st.just(1.0) | st.floats(0.01, 1))))
    return found


def plain(uses: list[tuple[float, float, float]], end_s: float) -> UsageTotals:
    """The same with an array of bins."""
    bins = np.zeros(ceil(end_s))
    for start, finish, share in uses:
        for index in range(len(bins)):
            used = min(finish, end_s, index + 1) - max(start, index)
            bins[index] += max(used, 0.0) * share
    busy_s = bins.sum()
    bins[-1] /= end_s - (len(bins) - 1)
    return UsageTotals(busy_s, bins.max(), np.percentile(bins, 95))


@settings(deadline=None)
@given(intervals(), st.floats(0.01, 60))
def test_totals_are_those_of_plain_bins(
    uses: list[tuple[float, float, float]], end_s: float
) -> None:
    """Busy seconds, peak and 95th percentile, wherever the end cuts what is in use."""
    usage = Usage()
    for use in uses:
        usage.add(*use)
    assert usage.summary(end_s) == pytest.approx(plain(uses, end_s), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(intervals(), st.data())
def test_totals_do_not_depend_on_folding(
    uses: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    """Folding at any moment changes no bit, and asking for a summary changes nothing either."""
    one, other = Usage(), Usage()
    for use in uses:
        one.add(*use)
        other.add(*use)
        if data.draw(st.booleans()):
            other.fold()
        if data.draw(st.booleans()):
            other.summary(use[1])
    end_s = max((finish for _, finish, _ in uses), default=1.0) + 0.5
    assert one.summary(end_s) == other.summary(end_s)


@settings(deadline=None)
@given(intervals())
def test_many_at_once_are_the_same_as_one_by_one(uses: list[tuple[float, float, float]]) -> None:
    """Arrays of full uses give every bit of the single calls."""
    one, other = Usage(), Usage()
    for start, finish, _ in uses:
        one.add(start, finish)
    half = len(uses) // 2
    for part in (uses[:half], uses[half:]):
        other.add_many(np.array([use[0] for use in part]), np.array([use[1] for use in part]))
    assert one.summary(200.0) == other.summary(200.0)


def test_more_than_is_ever_held_unfolded() -> None:
    """A hundred thousand uses of a quarter of a second each, every other second."""
    usage = Usage()
    for second in range(0, 200_000, 2):
        usage.add(second + 0.5, second + 0.75)
    assert usage.summary(200_000.0) == UsageTotals(25_000.0, 0.25, 0.25)
    assert usage.summary(200_001.5).busy_s == 25_000.0


def test_a_billion_idle_or_busy_seconds_cost_nothing() -> None:
    """Idle bins and those that are used throughout are only counted."""
    usage = Usage()
    usage.add(0.25, 0.5)
    usage.add(4e8, 1e9, 0.5)
    usage.fold()
    assert usage.summary(1e9) == UsageTotals(0.25 + 3e8, 0.5, 0.5)
    usage.add(1e9, inf)
    assert usage.summary(2e9) == UsageTotals(0.25 + 3e8 + 1e9, 1.0, 1.0)


def test_the_last_bin_counts_for_its_own_length() -> None:
    """Half of the last quarter of a second is a share of one half."""
    usage = Usage()
    usage.add(1.125, 1.25)
    assert usage.summary(1.25) == UsageTotals(0.125, 0.5, np.percentile([0.0, 0.5], 95))
    assert usage.summary(1.125) == UsageTotals(0.0, 0.0, 0.0)


def test_a_link_that_nobody_used_is_idle() -> None:
    """Also over no time at all, and when all uses have no length."""
    usage = Usage()
    assert usage.summary(10.0) == UsageTotals(0.0, 0.0, 0.0)
    usage.add(1.0, 1.0)
    usage.add(inf, inf)
    usage.add(2.0, 3.0, 0.0)
    usage.add_many(np.array([4.0]), np.array([4.0]))
    usage.fold()
    assert usage.summary(10.0) == UsageTotals(0.0, 0.0, 0.0)
    assert usage.summary(0.0) == UsageTotals(0.0, 0.0, 0.0)


def test_back_to_back_uses_fill_their_bins() -> None:
    """Tenths of seconds that rounding cannot add up to one are a bin used throughout."""
    usage = Usage()
    for tenth in range(100):
        usage.add(tenth / 10, (tenth + 1) / 10)
    assert usage.summary(10.0) == UsageTotals(10.0, 1.0, 1.0)
