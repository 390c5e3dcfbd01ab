"""Values that change in steps: look-ups, integrals forwards and backwards, windows, ends."""

from __future__ import annotations

import pickle
from itertools import pairwise
from math import inf, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.network.steps import Steps, TraceEnded, Window, overlapping

RATES = st.sampled_from([0.0, 1.0, 2.5, 8.0, 1e6])
#: Multiples of 1/8, so that the plain formulas of these tests do not round.
MOMENTS = st.integers(0, 400).map(lambda eighths: eighths / 8)
SPANS = st.integers(1, 80).map(lambda eighths: eighths / 8)


@st.composite
def windows(draw: st.DrawFn, *, final: bool = True) -> Window:
    """Any window."""
    from_s, length = draw(MOMENTS), draw(SPANS)
    if final and draw(st.booleans()) and draw(st.booleans()):
        return Window(from_s, inf, None, draw(RATES))
    every = draw(st.none() | SPANS.map(lambda gap: length + gap))
    return Window(from_s, from_s + length, every, draw(RATES))


@st.composite
def any_steps(draw: st.DrawFn) -> Steps:
    """A constant or a trace that goes on, repeats or ends, with up to two windows."""
    spans = draw(st.lists(SPANS, max_size=4))
    times = [0.0]
    for span in spans:
        times.append(times[-1] + span)
    values = tuple(draw(RATES) for _ in times)
    kind = draw(st.sampled_from(["goes on", "repeats", "ends"]))
    end = times[-1] + draw(SPANS)
    return Steps(
        tuple(times),
        values,
        period_s=end if kind == "repeats" else None,
        ends_s=end if kind == "ends" else inf,
        windows=tuple(draw(st.lists(windows(), max_size=2))),
    )


def value_at(steps: Steps, time_s: float) -> float:
    """The value by its definition."""
    for window in steps.windows:
        since = time_s - window.from_s
        if since >= 0 and window.every_s is not None:
            since %= window.every_s
        if 0 <= since < window.to_s - window.from_s:
            return window.value
    time_s = max(time_s, 0)
    if steps.period_s is not None:
        time_s %= steps.period_s
    return [v for t, v in zip(steps.times, steps.values, strict=True) if t <= time_s][-1]


def integral(steps: Steps, start_s: float, finish_s: float) -> float:
    """The integral by its definition, between all moments at which anything may change."""
    edges = {start_s, finish_s}
    rounds = range(8 * int(finish_s) + 9)  # no period is below an eighth of a second
    for time in steps.times:
        edges |= {time + k * steps.period_s for k in rounds} if steps.period_s else {time}
    for window in steps.windows:
        for time in (window.from_s, window.to_s):
            edges |= {time + k * window.every_s for k in rounds} if window.every_s else {time}
    inside = sorted(edge for edge in edges if start_s <= edge <= finish_s)
    return sum(value_at(steps, (a + b) / 2) * (b - a) for a, b in pairwise(inside))


def rounding(steps: Steps, amount: float, time_s: float) -> float:
    """What the fastest piece carries in the last bits of a time, and the last bits of an amount."""
    fastest = max(*steps.values, *(window.value for window in steps.windows), 0.0)
    return 1e-12 * amount + 1e-14 * (1 + time_s) * (1 + fastest)


@settings(deadline=None)
@given(any_steps(), MOMENTS)
def test_a_piece_holds_the_value_until_it_says(steps: Steps, time_s: float) -> None:
    """At the moment, half-way and just before the end of the piece; then time has moved on."""
    if time_s >= steps.ends_s:
        with pytest.raises(TraceEnded) as caught:
            steps.piece(time_s)
        assert caught.value.time_s == steps.ends_s
        return
    value, until_s = steps.piece(time_s)
    assert until_s > time_s
    last = min(until_s, time_s + 1000)
    for inside in (time_s, (time_s + last) / 2, last - 1 / 64):
        assert value == value_at(steps, inside)


@settings(deadline=None)
@given(any_steps(), MOMENTS)
def test_a_piece_before_is_the_piece_of_the_moments_before(steps: Steps, time_s: float) -> None:
    """The value on [since, time) is the one that piece finds there."""
    if time_s > steps.ends_s:
        with pytest.raises(TraceEnded):
            steps.piece_before(time_s)
        return
    value, since_s = steps.piece_before(time_s)
    assert since_s < time_s
    first = max(since_s, time_s - 1000)
    for inside in (first, (time_s + first) / 2, time_s - 1 / 64):
        assert value == value_at(steps, inside)


@settings(deadline=None)
@given(any_steps(), MOMENTS, st.floats(0, 1e4))
def test_finish_is_where_the_integral_reaches_the_amount(
    steps: Steps, start_s: float, amount: float
) -> None:
    """And it is the first such moment, unless the trace ends before or nothing ever comes."""
    end_s = steps.ends_s
    if start_s >= end_s or (end_s < inf and integral(steps, start_s, end_s) < amount):
        with pytest.raises(TraceEnded):
            steps.finish(start_s, amount)
        return
    finish_s = steps.finish(start_s, amount)
    if finish_s == inf:
        assert integral(steps, start_s, start_s + 1000) < amount
    elif finish_s < 1000:
        carried = integral(steps, start_s, finish_s)
        assert isclose(carried, amount, rel_tol=0, abs_tol=rounding(steps, amount, finish_s))


@settings(deadline=None)
@given(any_steps(), MOMENTS, st.floats(1e-3, 1e4))
def test_begin_undoes_finish(steps: Steps, start_s: float, amount: float) -> None:
    """Between the start that was used and the latest possible one nothing is carried."""
    try:
        finish_s = steps.finish(start_s, amount)
    except TraceEnded:
        return
    begin_s = steps.begin(finish_s, amount)
    if finish_s == inf:
        assert begin_s == inf
    elif finish_s < 1000:
        between = integral(steps, min(start_s, begin_s), max(start_s, begin_s))
        assert between <= rounding(steps, amount, finish_s)


@settings(deadline=None)
@given(any_steps(), MOMENTS, st.floats(1e-3, 1e3))
def test_finish_undoes_begin(steps: Steps, finish_s: float, amount: float) -> None:
    """From the latest start on, exactly the amount is carried by then."""
    if finish_s > steps.ends_s:
        return
    begin_s = steps.begin(finish_s, amount)
    assert begin_s <= finish_s
    if begin_s >= 0:
        carried = integral(steps, begin_s, finish_s)
        assert isclose(carried, amount, rel_tol=0, abs_tol=rounding(steps, amount, finish_s))
    elif begin_s > -inf:
        assert integral(steps, 0.0, finish_s) < amount


def test_a_trace_by_hand() -> None:
    """10 B/s, from 2 s on 5 B/s, from 4 s on nothing, again every 8 s."""
    steps = Steps((0.0, 2.0, 4.0), (10.0, 5.0, 0.0), period_s=8.0)
    assert steps.piece(1.0) == (10.0, 2.0)
    assert steps.piece(2.0) == (5.0, 4.0)
    assert steps.piece(13.0) == (0.0, 16.0)
    assert steps.finish(1.0, 15.0) == 3.0
    assert steps.finish(1.0, 20.0) == 4.0
    assert steps.finish(1.0, 25.0) == 8.5
    assert steps.finish(5.0, 0.0) == 5.0
    assert steps.begin(8.5, 25.0) == 1.0
    assert steps.begin(8.0, 5.0) == 3.0
    assert steps.mean() == 30 / 8
    assert steps.finish(0.0, 30.0 * 1_000_000_000 + 5) == 8e9 + 0.5


def test_a_cut_stops_what_is_in_flight() -> None:
    """100 bytes at 10 B/s that a cut of 5 s interrupts end 5 s later; for good: never."""
    cut = Steps((0.0,), (10.0,), windows=(Window(4.0, 9.0, None, 0.0),))
    assert cut.piece(0.0) == (10.0, 4.0)
    assert cut.finish(0.0, 100.0) == 15.0
    assert cut.finish(0.0, 40.0) == 4.0
    assert cut.begin(15.0, 100.0) == 0.0
    assert cut.begin(9.0, 40.0) == 0.0
    assert cut.begin(15.0, 1000.0) == -90.0
    gone = Steps((0.0,), (10.0,), windows=(Window(4.0, inf, None, 0.0),))
    assert gone.finish(0.0, 40.0) == 4.0
    assert gone.finish(0.0, 40.5) == inf
    assert gone.finish(inf, 1.0) == inf
    assert cut.mean() == 10.0


def test_the_last_bits_of_a_transfer_do_not_wait_for_the_end_of_a_cut() -> None:
    """What is to be through when a cut begins is through, though no float is its exact start."""
    steps = Steps((0.0, 7.1), (1e9 / 3, 1e9 / 7), windows=(Window(12.3, inf, None, 0.0),))
    for tenth in range(1, 200):
        amount = tenth * 1e7 / 1.7
        assert steps.finish(steps.begin(12.3, amount), amount) == pytest.approx(12.3, rel=1e-15)


def test_nothing_for_ever_is_found_out() -> None:
    """Also where trace and window of different periods cover each other for good."""
    assert Steps.constant(0.0).finish(3.0, 1.0) == inf
    assert Steps.constant(0.0).begin(3.0, 1.0) == -inf
    assert Steps((0.0, 1.0), (0.0, 0.0), period_s=2.0).finish(0.0, 1.0) == inf
    covered = Steps((0.0, 1.0), (7.0, 0.0), 2.0, windows=(Window(0.0, 1.0, 2.0, 0.0),))
    assert covered.finish(0.0, 1.0) == inf


def test_a_nightly_dip_comes_every_night() -> None:
    """A window that repeats replaces the base at every repetition, a million days on too."""
    dip = Window(3600.0, 7200.0, 86400.0, 1.0)
    steps = Steps((0.0,), (10.0,), windows=(dip,))
    for day in (0, 1, 1_000_000):
        midnight = day * 86400.0
        assert steps.piece(midnight) == (10.0, midnight + 3600)
        assert steps.piece(midnight + 3600) == (1.0, midnight + 7200)
        assert steps.piece_before(midnight + 3600) == (
            10.0,
            max(midnight - 79200, -inf) if day else -inf,
        )
    assert steps.finish(0.0, 10 * 3600 + 3600 + 5) == 7200.5


def test_a_piece_ends_at_a_real_change() -> None:
    """Equal neighbours are one piece, over the seam of two periods too."""
    repeats = Steps((0.0, 1.0, 2.0, 3.0), (5.0, 5.0, 6.0, 5.0), period_s=4.0)
    assert repeats.piece(0.5) == (5.0, 2.0)
    assert repeats.piece(3.5) == (5.0, 6.0)
    assert Steps((0.0, 9.0), (5.0, 5.0), period_s=10.0).piece(123.0) == (5.0, inf)
    same = Steps((0.0,), (5.0,), windows=(Window(3.0, 4.0, None, 5.0), Window(8.0, 9.0, None, 1.0)))
    assert same.piece(0.0) == (5.0, 8.0)


def test_moments_as_handed_out_move_on() -> None:
    """Periods that binary fractions cannot hold: walking from change to change never stalls."""
    steps = Steps((0.0, 0.1, 0.7), (1.0, 2.0, 3.0), 1.1, windows=(Window(0.3, 0.4, 0.7, 9.0),))
    for start in (0.0, 1e6, 1e9):
        time_s, carried = start, 0.0
        for _ in range(200):
            value, until_s = steps.piece(time_s)
            assert until_s > time_s
            before, since_s = steps.piece_before(until_s)
            assert since_s < until_s
            assert before == value
            carried += value * (until_s - time_s)
            time_s = until_s
        assert isclose(steps.finish(start, carried), time_s, rel_tol=1e-14, abs_tol=1e-9)
        assert isclose(steps.begin(time_s, carried), start, rel_tol=1e-14, abs_tol=1e-9)


def test_unlimited_bandwidth_carries_anything_at_once() -> None:
    """Infinity is a rate, alone and beside cuts."""
    assert Steps.constant(inf).finish(5.0, 1e18) == 5.0
    assert Steps.constant(inf).begin(5.0, 1e18) == 5.0
    steps = Steps((0.0, 1.0), (0.0, inf), period_s=2.0)
    assert steps.finish(0.25, 1e18) == 1.0
    assert steps.finish(1.25, 1e18) == 1.25
    assert steps.begin(2.5, 1.0) == 2.0
    assert steps.mean() == inf


def test_a_trace_that_ends_serves_up_to_its_end() -> None:
    """What is through by then is through; what is not raises with the moment of the end."""
    steps = Steps((0.0, 1.0), (4.0, 2.0), ends_s=3.0)
    assert steps.piece(2.0) == (2.0, 3.0)
    assert steps.piece_before(3.0) == (2.0, 1.0)
    assert steps.finish(0.0, 8.0) == 3.0
    assert steps.mean() == 8 / 3
    for ask in (
        lambda: steps.finish(0.0, 8.5),
        lambda: steps.finish(3.0, 0.0),
        lambda: steps.finish(inf, 1.0),
        lambda: steps.begin(3.5, 1.0),
    ):
        with pytest.raises(TraceEnded) as caught:
            ask()
        assert caught.value.time_s == 3.0


def test_a_cap_cuts_trace_and_windows() -> None:
    """No value above it, nothing else changed; no cap is the same object."""
    steps = Steps((0.0, 1.0), (4.0, 2.0), 3.0, windows=(Window(1.0, 2.0, None, 9.0),))
    assert steps.capped(3.0) == Steps(
        (0.0, 1.0), (3.0, 2.0), 3.0, inf, (Window(1.0, 2.0, None, 3.0),)
    )
    assert steps.capped(inf) is steps


def test_at_the_end_of_time_there_is_a_value() -> None:
    """What never starts may still ask for its delay."""
    dip = Window(1.0, 2.0, 5.0, 0.5)
    assert Steps((0.0, 1.0), (4.0, 2.0), 3.0, windows=(dip,)).piece(inf) == (2.0, inf)
    with pytest.raises(TraceEnded):
        Steps((0.0,), (4.0,), ends_s=5.0).piece(inf)


def test_steps_can_be_keys_and_travel() -> None:
    """Hashable, equal by content, and pickled without what look-ups keep."""
    steps = Steps((0.0, 1.0), (4.0, 2.0), 3.0, windows=(Window(1.0, 2.0, None, 0.0),))
    steps.finish(0.0, 100.0)
    other = pickle.loads(pickle.dumps(steps))
    assert other == steps
    assert len({steps, other, Steps.constant(4.0)}) == 2


@pytest.mark.parametrize(
    "build",
    [
        lambda: Steps((), ()),
        lambda: Steps((0.0, 1.0), (1.0,)),
        lambda: Steps((1.0,), (1.0,)),
        lambda: Steps((0.0, 2.0, 1.0), (1.0, 1.0, 1.0)),
        lambda: Steps((0.0, 2.0), (1.0, 1.0), period_s=2.0),
        lambda: Steps((0.0, 2.0), (1.0, 1.0), ends_s=1.0),
        lambda: Steps((0.0,), (1.0,), 2.0, ends_s=5.0),
        lambda: Steps((0.0,), (-1.0,)),
        lambda: Steps((0.0,), (float("nan"),)),
        lambda: Window(2.0, 2.0, None, 1.0),
        lambda: Window(0.0, 5.0, 5.0, 1.0),
        lambda: Window(-1.0, 5.0, None, 1.0),
    ],
)
def test_impossible_steps_are_refused(build: object) -> None:
    """Nothing that has no meaning can be built."""
    with pytest.raises(ValueError):
        build()  # type: ignore[operator]


@settings(deadline=None)
@given(windows(final=False), windows(final=False))
def test_overlaps_are_found(one: Window, other: Window) -> None:
    """Exactly those windows that are ever open together, by trying every eighth of a second."""
    # The offsets of two periods of up to 160 eighths come round within their product.
    horizon = 8 * 70 + 160 * 160 if one.every_s and other.every_s else 8 * 70
    together = any(
        one.after(eighth / 8)[0] and other.after(eighth / 8)[0] for eighth in range(horizon)
    )
    assert overlapping((one, other)) == ((one, other) if together else None)


def test_decimal_periods_do_not_meet_by_rounding() -> None:
    """0.1 s apart every 0.3 s never meets 0.1 s every 0.6 s half a step away; for good does."""
    one, other = Window(0.0, 0.1, 0.3, 0.0), Window(0.1, 0.2, 0.6, 0.0)
    assert overlapping((one, other)) is None
    good = Window(50.0, inf, None, 0.0)
    assert overlapping((one, other, good)) == (one, good)
