"""Values that change in steps: a bandwidth or a delay as a function of emulated time.

A base (a constant, or a trace that ends or repeats) and windows that replace it for a while (a cut,
a nightly dip). Between two changes the value is constant, so everything asked of it is exact: there
are no time steps. Before time 0 the first value holds, so that looking back never runs out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import floor, inf, isinf, ulp

#: Pieces in a row that carry nothing after which nothing is taken to come any more. It decides only
#: for a trace and windows of different periods that cover each other.
_NEVER = 10_000
#: How many pieces of the same value one look-up joins when there are windows.
_JOIN = 4


class TraceEnded(Exception):
    """A trace was asked for a value at or after its end, ``time_s``."""

    def __init__(self, time_s: float) -> None:
        super().__init__(time_s)
        self.time_s = time_s


@dataclass(frozen=True)
class Window:
    """``value`` replaces the base on [``from_s``, ``to_s``), and again every ``every_s`` seconds.

    ``to_s`` may be infinite (for good). A bandwidth of 0.0 is a cut.
    """

    from_s: float
    to_s: float
    every_s: float | None
    value: float

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.to_s or isinf(self.from_s):
            raise ValueError(f"a window from {self.from_s} s to {self.to_s} s")
        if self.every_s is not None and not self.to_s - self.from_s < self.every_s < inf:
            raise ValueError(f"a window of {self.to_s - self.from_s} s every {self.every_s} s")

    def after(self, time_s: float) -> tuple[bool, float]:
        """Whether the window is open at ``time_s``, and when that next changes."""
        number = self._occurrence(time_s, before=False)
        if number < 0:
            return False, self.from_s
        if time_s < self._moved(self.to_s, number):
            return True, self._moved(self.to_s, number)
        return False, inf if self.every_s is None else self._moved(self.from_s, number + 1)

    def before(self, time_s: float) -> tuple[bool, float]:
        """Whether the window is open just before ``time_s``, and since when that is so."""
        number = self._occurrence(time_s, before=True)
        if number < 0:
            return False, -inf
        if time_s <= self._moved(self.to_s, number):
            return True, self._moved(self.from_s, number)
        return False, self._moved(self.to_s, number)

    def _moved(self, time_s: float, number: int) -> float:
        return time_s if self.every_s is None else time_s + number * self.every_s

    def _occurrence(self, time_s: float, *, before: bool) -> int:
        """The last occurrence that opens at or before ``time_s`` (or strictly before); −1: none."""
        if time_s < self.from_s or (before and time_s == self.from_s):
            return -1
        if self.every_s is None:
            return 0
        return _last(
            floor((time_s - self.from_s) / self.every_s),
            lambda number: self._moved(self.from_s, number),
            time_s,
            before=before,
        )


def _last(guess: int, moment: Callable[[int], float], time_s: float, *, before: bool) -> int:
    """The last index whose ``moment`` is at or before ``time_s`` (or strictly before).

    Corrects a guess that rounding may have put one off: comparing the moments as they are handed
    out means that asking at a moment gets the piece that begins there, so that walks never stall.
    """
    while guess > 0 and (moment(guess) > time_s or (before and moment(guess) == time_s)):
        guess -= 1
    while moment(guess + 1) < time_s or (not before and moment(guess + 1) == time_s):
        guess += 1
    return guess


def _rounding(time_s: float) -> float:
    """How far a time of this size may be off by rounding.

    Without it the last millionth of a byte of a transfer could wait for the end of a cut. What the
    fastest piece on the way carries in so little time counts, for that is what its edges may hide.
    """
    return 4 * ulp(time_s)


def overlapping(windows: Sequence[Window]) -> tuple[Window, Window] | None:
    """The first two windows that are open at the same moment, now or in some later period.

    Two repeating windows meet wherever their offsets agree to the greatest common divisor of their
    periods, which is exact on the decimal fractions that people write.
    """
    for pair in combinations(windows, 2):
        one, other = sorted(pair, key=lambda window: window.every_s is not None)
        if other.every_s is None:
            meet = one.from_s < other.to_s and other.from_s < one.to_s
        elif one.every_s is None:
            opened, next_s = other.after(one.from_s)
            meet = opened or next_s < one.to_s
        else:
            first, second = (Fraction(repr(window.every_s)) for window in (one, other))
            common = Fraction(_gcd(first, second))
            apart = (Fraction(repr(other.from_s)) - Fraction(repr(one.from_s))) % common
            meet = apart < _length(one) or common - apart < _length(other)
        if meet:
            return pair
    return None


def _gcd(one: Fraction, other: Fraction) -> Fraction:
    while other:
        one, other = other, one % other
    return one


def _length(window: Window) -> Fraction:
    return Fraction(repr(window.to_s)) - Fraction(repr(window.from_s))


@dataclass(frozen=True)
class Steps:
    """A piecewise constant function of emulated time, the value not negative, infinity allowed.

    ``values[i]`` holds on [``times[i]``, ``times[i+1]``), the last one for good, or until the base
    begins again (``period_s``), or until ``ends_s``, from where on nothing is defined. Where
    several ``windows`` are open the first of them counts.
    """

    times: tuple[float, ...]
    values: tuple[float, ...]
    period_s: float | None = None
    ends_s: float = inf
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        end = self.ends_s if self.period_s is None else self.period_s
        if (
            not self.times
            or len(self.times) != len(self.values)
            or self.times[0] != 0
            or any(a >= b for a, b in zip(self.times, (*self.times[1:], end), strict=True))
        ):
            raise ValueError("times must begin at 0, one per value, and increase up to the end")
        if not all(value >= 0 for value in (*self.values, *(w.value for w in self.windows))):
            raise ValueError("values must not be negative")
        if self.period_s is not None and self.ends_s < inf:
            raise ValueError("what repeats has no end")

    @classmethod
    def constant(cls, value: float) -> Steps:
        """The same value for ever."""
        return cls((0.0,), (value,))

    def piece(self, time_s: float) -> tuple[float, float]:
        """The value at ``time_s`` and when it next changes (inf: never).

        A trace that ends changes there: raises :class:`TraceEnded` from ``ends_s`` on.
        """
        if time_s >= self.ends_s:
            if time_s == self.ends_s == inf:
                return self.values[-1], inf
            raise TraceEnded(self.ends_s)
        value, until_s = self._piece(time_s)
        if self.windows:
            for _ in range(_JOIN):
                if until_s >= self.ends_s:
                    break
                following, later_s = self._piece(until_s)
                if following != value:
                    break
                until_s = later_s
        return value, min(until_s, self.ends_s)

    def piece_before(self, time_s: float) -> tuple[float, float]:
        """The value just before ``time_s`` and since when it has held (−inf: always)."""
        if time_s > self.ends_s:
            raise TraceEnded(self.ends_s)
        since_s = -inf
        for window in self.windows:
            opened, edge_s = window.before(time_s)
            since_s = max(since_s, edge_s)
            if opened:
                return window.value, since_s
        index = self._index(time_s, before=True)
        begun_s = self._moment(index) if index > 0 else -inf
        return self._base[1][index % len(self._base[1])], max(since_s, begun_s)

    def finish(self, start_s: float, amount: float) -> float:
        """When the integral from ``start_s`` on reaches ``amount``; inf: never.

        Raises :class:`TraceEnded` if the trace ends before that.
        """
        if start_s == inf and self.ends_s == inf:
            return inf
        if amount <= 0 and start_s < self.ends_s:
            return start_s
        time_s, left, slack, empty = start_s, amount, 0.0, 0
        period_s, cycle = self._cycle
        while empty < _NEVER:
            value, until_s = self.piece(time_s)
            if until_s == inf:
                return time_s + left / value if value > 0 else inf
            got = value * (until_s - time_s) if value > 0 else 0.0
            slack = max(slack, value * _rounding(until_s))
            if got + slack >= left:
                return min(time_s + left / value, until_s) if value > 0 else time_s
            left -= got
            time_s = until_s
            empty = empty + 1 if value == 0 else 0
            if 0 < 2 * cycle < left:
                whole = floor(left / cycle) - 1
                time_s += whole * period_s
                left -= whole * cycle
        return inf

    def begin(self, finish_s: float, amount: float) -> float:
        """The latest start from which the integral up to ``finish_s`` is ``amount``.

        Before time 0 the first value goes on; −inf: no start is early enough.
        """
        if finish_s == inf:
            return inf
        if amount <= 0:
            return finish_s
        time_s, left, slack, empty = finish_s, amount, 0.0, 0
        period_s, cycle = self._cycle
        while empty < _NEVER:
            value, since_s = self.piece_before(time_s)
            if since_s == -inf:
                return time_s - left / value if value > 0 else -inf
            got = value * (time_s - since_s) if value > 0 else 0.0
            slack = max(slack, value * _rounding(time_s))
            if got + slack >= left:
                return max(time_s - left / value, since_s) if value > 0 else time_s
            left -= got
            time_s = since_s
            empty = empty + 1 if value == 0 else 0
            if 0 < 2 * cycle < left and 2 * period_s < time_s:
                whole = floor(min(left / cycle, time_s / period_s)) - 1
                time_s -= whole * period_s
                left -= whole * cycle
        return -inf

    def capped(self, limit: float) -> Steps:
        """The same with no value above ``limit``."""
        if limit == inf:
            return self
        return replace(
            self,
            values=tuple(min(value, limit) for value in self.values),
            windows=tuple(replace(w, value=min(w.value, limit)) for w in self.windows),
        )

    def mean(self) -> float:
        """The mean of the base over time: over a period, or up to the end; windows left out.

        Of a base that goes on for good that is its last value.
        """
        end_s = self.ends_s if self.period_s is None else self.period_s
        if end_s == inf:
            return self.values[-1]
        ends = (*self.times[1:], end_s)
        spans = (b - a for a, b in zip(self.times, ends, strict=True))
        return sum(v * s for v, s in zip(self.values, spans, strict=True) if v > 0) / end_s

    @cached_property
    def _base(self) -> tuple[tuple[float, ...], tuple[float, ...], float | None]:
        """Times, values and period of the base, with equal neighbours joined."""
        kept = [i for i, v in enumerate(self.values) if i == 0 or v != self.values[i - 1]]
        period_s = self.period_s if len(kept) > 1 else None
        return tuple(self.times[i] for i in kept), tuple(self.values[i] for i in kept), period_s

    @cached_property
    def _wraps(self) -> bool:
        """Whether a period ends with the value with which the next begins."""
        _, values, period_s = self._base
        return period_s is not None and values[0] == values[-1]

    @cached_property
    def _cycle(self) -> tuple[float, float]:
        """The period and the integral over it, where whole periods may be skipped; else 0, 0."""
        period_s = self._base[2]
        if period_s is None or self.windows or isinf(max(self.values)):
            return 0.0, 0.0
        return period_s, self.mean() * period_s

    def _moment(self, index: int) -> float:
        """When piece ``index`` of the base begins, periods counted through; inf: never."""
        times, _, period_s = self._base
        if period_s is None:
            return times[index] if index < len(times) else inf
        cycle, at = divmod(index, len(times))
        return cycle * period_s + times[at]

    def _index(self, time_s: float, *, before: bool) -> int:
        """The piece of the base at ``time_s``, or just before it."""
        times, _, period_s = self._base
        find = bisect_left if before else bisect_right
        if period_s is None:
            return max(find(times, time_s) - 1, 0)
        cycle = max(floor(time_s / period_s), 0)
        guess = max(find(times, time_s - cycle * period_s) - 1, 0) + cycle * len(times)
        return _last(guess, self._moment, time_s, before=before)

    def _piece(self, time_s: float) -> tuple[float, float]:
        """Value and next change; with windows the next piece may have the same value."""
        until_s = inf
        for window in self.windows:
            opened, edge_s = window.after(time_s)
            until_s = min(until_s, edge_s)
            if opened:
                return window.value, until_s
        index = self._index(time_s, before=False)
        count = len(self._base[1])
        last = index % count == count - 1
        return self._base[1][index % count], min(
            until_s, self._moment(index + 2 if last and self._wraps else index + 1)
        )
