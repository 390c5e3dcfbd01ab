"""Other jobs' transfers: arrivals, service behind and before ours, waits against theory."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from islands.errors import InputError
from islands.network.background import Arrivals, FifoBackground, Load, lindley
from islands.network.steps import Steps, Window
from islands.network.usage import Usage
from islands.network.waits import Cycles, mean_wait, queue_waits


class Given(Arrivals):
    """Arrivals by hand: (time, size) pairs."""

    def __init__(self, *pairs: tuple[float, float]) -> None:
        super().__init__(Load(0.0, 1.0), 1.0, 0, "by hand")
        self._times, self._sizes = (
            np.array(column) for column in zip(*pairs, (inf, 0.0), strict=True)
        )
        self._move(0)


def one_by_one(
    times: list[float], durations: list[float], free_s: float
) -> tuple[list[float], list[float]]:
    """The queue by its definition."""
    starts, finishes = [], []
    for time, duration in zip(times, durations, strict=True):
        starts.append(max(time, free_s))
        free_s = starts[-1] + duration
        finishes.append(free_s)
    return starts, finishes


# Arrivals


@pytest.mark.parametrize(
    "spec",
    [
        Load(0.3, 1e4),
        Load(0.9, 1e4, exponential=True),
        Load(0.5, 10.0, exponential=True),
        Load(0.5, 1.0, exponential=True),
        Load(0.5, 2e3, on_s=0.5, off_s=1.5),
        Load(0.7, 2e3, True, on_s=2.0, off_s=0.25),
    ],
)
def test_arrivals_bring_the_load_that_was_asked_for(spec: Load) -> None:
    """Over a long time bytes per second are the load times the bandwidth, in bursts as well."""
    times, sizes = Arrivals(spec, 1e6, 3, "wan").until(1000.0 if spec.size_bytes > 100 else 10.0)
    assert (np.diff(times) >= 0).all()
    assert (sizes == np.round(sizes)).all()
    assert isclose(sizes.sum() / times[-1], spec.load * 1e6, rel_tol=0.05)
    assert isclose(sizes.mean(), spec.size_bytes, rel_tol=0.02)


def test_sizes_and_gaps_have_the_asked_distribution() -> None:
    """Coefficients of variation: gaps 1, equal sizes 0, exponential sizes 1."""
    times, sizes = Arrivals(Load(0.5, 1e3), 1e6, 0, "wan").until(300.0)
    assert isclose(np.diff(times).std() / np.diff(times).mean(), 1.0, rel_tol=0.02)
    assert set(sizes) == {1e3}
    _, sizes = Arrivals(Load(0.5, 1e3, True), 1e6, 0, "wan").until(300.0)
    assert isclose(sizes.std() / sizes.mean(), 1.0, rel_tol=0.02)


def test_bursts_have_pauses() -> None:
    """A quarter of the time on: nothing comes in most seconds, four times as much in the others."""
    spec = Load(0.2, 1e4, on_s=50.0, off_s=150.0)
    times, _ = Arrivals(spec, 1e6, 0, "wan").until(40_000.0)
    seconds = np.bincount(times.astype(int), minlength=40_000)
    assert isclose((seconds == 0).mean(), 0.75, abs_tol=0.05)
    assert isclose(np.median(seconds[seconds > 0]), 80, rel_tol=0.05)
    # It begins with on or off in proportion to their means.
    first = [Arrivals(spec, 1e6, seed, "wan").peek_s < 0.2 for seed in range(400)]
    assert isclose(np.mean(first), 0.25, abs_tol=0.06)


@settings(deadline=None)
@given(
    st.sampled_from([Load(0.5, 1e3), Load(0.5, 1e3, True), Load(0.4, 1e3, True, 0.1, 0.3)]),
    st.lists(st.integers(0, 2000), min_size=1, max_size=8),
)
def test_arrivals_do_not_depend_on_who_asks_how(spec: Load, asked: list[int]) -> None:
    """One by one, up to any moments, or all at once: the same times and sizes to the bit."""
    whole = Arrivals(spec, 1e6, 7, "wan")
    times, sizes = whole.until(2.0)
    cut, found = Arrivals(spec, 1e6, 7, "wan"), []
    for count, moment in enumerate(sorted(asked)):
        some = cut.until(moment / 1000)
        assert (some[0] <= moment / 1000).all()
        found += list(zip(*(column.tolist() for column in some), strict=True))
        if count % 2 and cut.peek_s <= 2.0:
            found.append(cut.pop())
    found += list(zip(*(column.tolist() for column in cut.until(2.0)), strict=True))
    assert found == list(zip(times.tolist(), sizes.tolist(), strict=True))
    assert cut.peek_s == whole.peek_s > 2.0


def test_seed_and_link_name_the_arrivals() -> None:
    """Other seeds and other links see other arrivals; the same ones the same."""
    spec = Load(0.5, 1e3)
    first = [
        Arrivals(spec, 1e6, seed, link).peek_s
        for seed, link in ((0, "a"), (0, "b"), (1, "a"), (0, "a"))
    ]
    assert first[0] == first[3]
    assert len(set(first)) == 3


def test_no_load_is_no_arrivals() -> None:
    """And a load on a link without limit has no meaning."""
    nothing = Arrivals(Load(0.0, 1e3), inf, 0, "wan")
    assert nothing.peek_s == inf
    assert len(nothing.until(1e9)[0]) == len(nothing.until(inf)[0]) == 0
    with pytest.raises(IndexError):
        nothing.pop()
    with pytest.raises(ValueError):
        Arrivals(Load(0.1, 1e3), inf, 0, "wan")
    with pytest.raises(ValueError):
        Arrivals(Load(0.1, 1e3), 1e6, 0, "wan").until(inf)


# The queue


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3)), min_size=1, max_size=60),
    st.floats(0, 50),
    st.sampled_from([0.0, 1e9]),
)
def test_vectorised_lindley_is_the_plain_loop(
    gaps: list[tuple[float, float]], free_s: float, origin_s: float
) -> None:
    """For any arrivals, late in a long run too, up to the rounding of such times."""
    times = origin_s + np.cumsum([gap for gap, _ in gaps])
    durations = np.array([duration for _, duration in gaps])
    starts, finishes = lindley(times, durations, origin_s + free_s)
    plain = one_by_one(times.tolist(), durations.tolist(), origin_s + free_s)
    tolerance = 1e-9 if origin_s == 0 else 1e-4
    assert np.allclose(starts, plain[0], rtol=0, atol=tolerance)
    assert np.allclose(finishes, plain[1], rtol=0, atol=tolerance)
    assert (starts >= times).all()
    assert (finishes >= starts).all()
    assert (starts[1:] >= finishes[:-1]).all()


CHANGING = Steps((0.0, 0.25, 0.75), (1e6, 3e5, 2e6), 1.5, windows=(Window(0.5, 0.875, 4.0, 0.0),))
DYING = Steps((0.0, 2.0), (1e6, 0.0))
ENDING = Steps((0.0, 0.5), (1e6, 5e5), ends_s=3.0)


@pytest.mark.parametrize("rate", [1e6, inf, CHANGING, DYING, ENDING])
@pytest.mark.parametrize("load", [0.5, 0.9])
def test_many_at_once_are_served_as_one_by_one(rate: float | Steps, load: float) -> None:
    """Under a bandwidth that changes, is cut, dies, or whose trace ends."""
    spec = Load(load, 2e3, exponential=True)
    seen: list[NDArray[np.float64]] = []
    usage, slow_usage = Usage(), Usage()
    queue = FifoBackground(Arrivals(spec, 1e6, 0, "wan"), rate, usage, seen.append)
    free = queue.serve(4.0, 0.0)
    slow = FifoBackground(Arrivals(spec, 1e6, 0, "wan"), rate, slow_usage)
    slow_free, arrivals = 0.0, Arrivals(spec, 1e6, 0, "wan")
    while arrivals.peek_s <= 4.0:
        slow_free = slow.serve(arrivals.pop()[0], slow_free)
    assert free == pytest.approx(slow_free, abs=1e-9)
    assert (free == inf) == (rate in (DYING, ENDING))
    assert (queue.count, queue.bytes) == (slow.count, slow.bytes)
    assert queue.queued_s == pytest.approx(slow.queued_s, rel=1e-9)
    assert queue.queued_s == pytest.approx(sum(part.sum() for part in seen))
    assert (queue.first_start_s, queue.last_s) == pytest.approx((slow.first_start_s, slow.last_s))
    assert queue.ahead(4.0, 5.0) == pytest.approx(slow.ahead(4.0, 5.0), abs=1e-9)
    assert usage.summary(4.5) == pytest.approx(slow_usage.summary(4.5), abs=1e-9)


def test_ours_queue_behind_theirs_and_theirs_behind_ours() -> None:
    """Ours of 1 s is ready at 1 s behind one of 2 s; one that comes at 1.5 s goes after ours."""
    queue = FifoBackground(Given((0.0, 200.0), (1.5, 50.0), (9.0, 100.0)), 100.0, Usage())
    free = queue.serve(1.0, 0.0)
    assert free == 2.0
    assert queue.ahead(1.0, free) == 1.0
    free += 1.0
    free = queue.serve(2.0, free)
    assert free == 3.5
    assert queue.ahead(2.0, free) == 0.5
    assert queue.ahead(2.0, 3.25) == 0.25
    assert queue.ahead(3.25, 3.5) == 0.25
    assert (queue.count, queue.bytes, queue.queued_s) == (2, 250, 1.5)
    assert (queue.first_start_s, queue.last_s) == (0.0, 3.5)
    assert queue.serve(8.0, free) == 3.5
    assert queue.ahead(8.0, 8.0) == 0.0
    assert queue.serve(9.0, free) == 10.0


def test_at_one_moment_theirs_go_first() -> None:
    """What arrives exactly when ours is ready joins the queue before it."""
    queue = FifoBackground(Given((1.0, 100.0)), 100.0, Usage())
    assert queue.serve(1.0, 0.0) == 2.0
    assert queue.ahead(1.0, 2.0) == 1.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0.001, 0.1)), max_size=40), st.data())
def test_time_ahead_is_the_time_in_which_theirs_are_served(
    ours: list[tuple[float, float]], data: st.DataObject
) -> None:
    """For any transfers of ours: waiting = theirs ahead + ours ahead, and nobody overlaps."""
    queue = FifoBackground(Arrivals(Load(0.6, 3e4, True), 1e6, 5, "wan"), 1e6, Usage())
    now, free = 0.0, 0.0
    own: list[tuple[float, float]] = []
    for gap, duration in ours:
        now += gap
        free = queue.serve(now, free)
        start = max(now, free)
        mine = sum(max(0.0, finish - max(begin, now)) for begin, finish in own)
        theirs = queue.ahead(now, start)
        assert isclose(theirs + mine, start - now, abs_tol=1e-9)
        part = now + (start - now) * data.draw(st.floats(0, 1))
        assert 0 <= queue.ahead(now, part) <= min(theirs, part - now) + 1e-12
        free = start + duration
        own.append((start, free))
    assert all(one[1] <= other[0] for one, other in pairwise(own))


@settings(deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=10))
def test_answers_do_not_change_when_more_arrives(moments: list[float]) -> None:
    """Looking later as well gives the same at each moment: nothing overtakes, all is counted."""
    spec, answers = Load(0.7, 1e4), []
    for last in range(1, len(moments) + 1):
        queue = FifoBackground(Arrivals(spec, 1e6, 1, "wan"), 1e6, Usage())
        free, found = 0.0, []
        for moment in sorted(moments)[:last]:
            free = queue.serve(moment, free) + 0.001
            found.append(free)
        answers.append(found)
        times, sizes = Arrivals(spec, 1e6, 1, "wan").until(sorted(moments)[last - 1])
        assert (queue.count, queue.bytes) == (len(times), int(sizes.sum()))
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(answers))


def test_late_in_a_long_run_the_queue_still_works() -> None:
    """At 1e9 s: a day's worth of 13.5 GB transfers waits about as long as theory says."""
    seen: list[NDArray[np.float64]] = []
    arrivals = Arrivals(Load(0.5, 13.5e9), 12.5e9, 0, "wan")
    queue = FifoBackground(arrivals, 12.5e9, Usage(), seen.append)
    arrivals._drawn_s = 1e9
    arrivals.until(arrivals._times[-1])
    free = queue.serve(1e9 + 86400, 0.0)
    waits = np.concatenate(seen)
    assert free > 1e9 + 86300
    assert (waits >= 0).all()
    assert isclose(waits.mean() / 1.08, mean_wait(0.5, False), rel_tol=0.05)


# Waits against theory


@pytest.mark.parametrize("exponential", [False, True])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_waits_are_pollaczek_and_khinchines(load: float, exponential: bool) -> None:
    """ρ/(2(1−ρ)) for equal sizes, ρ/(1−ρ) for exponential ones, to 0.5 % of the value."""
    measured, stderr, theory, arrivals = queue_waits(load, exponential, 0.005, 0)
    assert theory == pytest.approx(load / (1 - load) / (1 if exponential else 2))
    assert stderr < 0.005 * measured
    assert abs(measured - theory) < 3 * stderr
    assert arrivals >= 200_000


def test_standard_errors_are_honest() -> None:
    """Over many seeds the deviations from theory are as large as the errors say."""
    off = []
    for seed in range(40):
        measured, stderr, theory, _ = queue_waits(0.6, False, 0.05, seed)
        off.append((measured - theory) / stderr)
    assert 0.7 < np.std(off) < 1.3
    assert abs(np.mean(off)) < 0.5


@given(st.lists(st.integers(0, 400), max_size=6))
@settings(deadline=None)
def test_cycles_go_on_over_the_cuts_of_chunks(cuts: list[int]) -> None:
    """Mean and standard error do not depend on how the waits come in."""
    waits = np.maximum(np.sin(np.arange(400.0) ** 2), 0.0)
    whole, parts = Cycles(), Cycles()
    whole.add(waits)
    for part in np.split(waits, sorted(cuts)):
        parts.add(part)
    assert parts.cycles == whole.cycles
    assert parts.mean() == pytest.approx(whole.mean(), rel=1e-12)
    # The plain ratio over complete cycles: the last one, from the last zero on, is left out.
    last = int(np.flatnonzero(waits == 0)[-1])
    assert whole.mean()[0] == pytest.approx(waits[:last].mean(), rel=1e-12)


def test_the_notes_numbers() -> None:
    """0.21 transfer times at load 0.3 and 4.5 at 0.9."""
    assert mean_wait(0.3, False) == pytest.approx(0.2143, abs=5e-5)
    assert mean_wait(0.9, False) == pytest.approx(4.5)


def test_loads_that_have_no_mean_wait_are_refused() -> None:
    """A load of one or more never settles; none at all waits for nobody."""
    assert queue_waits(0.0, True, 0.005, 0) == (0.0, 0.0, 0.0, 0)
    for load in (1.0, 1.5, -0.1, float("nan")):
        with pytest.raises(InputError, match="load"):
            queue_waits(load, False, 0.005, 0)
