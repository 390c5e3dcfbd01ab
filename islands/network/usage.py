"""How busy one link was: in all, and over one-second bins.

A run may have 1e9 idle seconds or one transfer of a week, so bins are not an array with an entry
per second. What is kept is a list of (first bin, how many, busy share): bins that one interval uses
all through are one entry, and idle ones are whatever is left. Bins are added up in the order of the
calls, so no total depends on when collected intervals happen to be folded into them.
"""

from __future__ import annotations

from math import ceil, floor
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Intervals that are collected before they are folded into bins.
_FOLD = 1 << 15

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]


class UsageTotals(NamedTuple):
    """Seconds of full use, and the largest and the 95th percentile share of one-second bins."""

    busy_s: float
    peak: float
    p95: float


class _Bins(NamedTuple):
    """Stretches of bins with the same use: (stretches,) each, in time order, none idle."""

    first: _Ints
    length: _Ints
    value: _Floats

    @classmethod
    def of(cls, starts_s: _Floats, finishes_s: _Floats, shares: _Floats) -> _Bins:
        """Up to three per interval: the bin it begins in, those it fills, the one it ends in."""
        first = np.floor(starts_s).astype(np.int64)
        last = np.floor(finishes_s).astype(np.int64)
        within = first == last
        head = np.where(within, finishes_s, first + 1.0) - starts_s
        tail = np.where(within, 0.0, finishes_s - last)
        one = np.ones_like(first)
        stacked = cls(
            np.stack((first, first + 1, last), 1).ravel(),
            np.stack((one, last - first - 1, one), 1).ravel(),
            np.stack((head * shares, shares, tail * shares), 1).ravel(),
        )
        return stacked.where((stacked.length > 0) & (stacked.value > 0))

    def where(self, mask: NDArray[np.bool_] | slice) -> _Bins:
        """The stretches that ``mask`` picks."""
        return _Bins(self.first[mask], self.length[mask], self.value[mask])

    def then(self, other: _Bins) -> _Bins:
        """These and the following ones, where a bin that both use is one."""
        both = _Bins.joined([self, other])
        new = np.ones(len(both.first), dtype=np.bool_)
        new[1:] = both.first[1:] != both.first[:-1]
        # bincount adds one after the other, so that a carried sum goes on exactly.
        value = np.bincount(np.cumsum(new) - 1, weights=both.value).astype(np.float64)
        return _Bins(both.first[new], both.length[new], value)

    def split(self, at: int) -> tuple[_Bins, _Bins]:
        """The stretches before position ``at``, and the others."""
        return self.where(slice(None, at)), self.where(slice(at, None))

    @staticmethod
    def joined(parts: list[_Bins]) -> _Bins:
        """All stretches of ``parts``, one after the other."""
        return _Bins(
            np.concatenate([part.first for part in parts]),
            np.concatenate([part.length for part in parts]),
            np.concatenate([part.value for part in parts]),
        )


_NONE = _Bins(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64))


class Usage:
    """Collects when a link was in use, in time order and without overlaps.

    For a FIFO link ``share`` is 1; for a shared one it is the rate in use over the capacity.
    """

    def __init__(self) -> None:
        self._intervals: tuple[list[float], list[float], list[float]] = ([], [], [])
        # The last interval stays open: what follows without a gap makes it longer.
        self._start = self.finish_s = -1.0  # before any
        self._share = 0.0
        self._closed: list[_Bins] = []
        self._last = _NONE  # the last bin of what is folded, to which more may come

    def add(self, start_s: float, finish_s: float, share: float = 1.0) -> None:
        """The link was used on [``start_s``, ``finish_s``] at ``share`` of its capacity.

        ``start_s`` must not be before the ``finish_s`` of an earlier call; ``finish_s`` may be inf.
        """
        before = self.finish_s
        if start_s < before:  # by rounding
            start_s = before
        if finish_s <= start_s or share <= 0:
            return
        if start_s == before and share == self._share:
            self.finish_s = finish_s
            return
        self._push()
        self._start, self.finish_s, self._share = start_s, finish_s, share

    def add_many(self, starts_s: _Floats, finishes_s: _Floats) -> None:
        """Many intervals of full use, (intervals,) each; the same as :meth:`add` for every one."""
        used = finishes_s > starts_s
        if not used.all():
            starts_s, finishes_s = starts_s[used], finishes_s[used]
        if not len(starts_s):
            return
        gaps = np.flatnonzero(starts_s[1:] > finishes_s[:-1])
        first = [float(starts_s[0]), *starts_s[gaps + 1].tolist()]
        last = [*finishes_s[gaps].tolist(), float(finishes_s[-1])]
        self.add(first[0], last[0])
        if len(first) > 1:
            self._push()
            starts, finishes, shares = self._intervals
            starts += first[1:-1]
            finishes += last[1:-1]
            shares += [1.0] * (len(first) - 2)
            self._start, self.finish_s, self._share = first[-1], last[-1], 1.0

    def fold(self) -> None:
        """Turn collected intervals into bins now. Needs not be called; it changes no total."""
        bins = self._last.then(_Bins.of(*map(np.array, self._intervals)))
        for part in self._intervals:
            part.clear()
        closed, self._last = bins.split(-1)
        if len(closed.first):
            self._closed.append(closed)

    def summary(self, end_s: float) -> UsageTotals:
        """Totals over the bins [0, 1), [1, 2), … up to ``end_s``, idle ones included.

        The last bin may be a part of a second; its share is that of its own length. The percentile
        is NumPy's (linear between neighbours). What is used after ``end_s`` does not count, to the
        second for intervals that are folded, exactly for the latest ones.
        """
        bins = ceil(end_s)
        if bins <= 0:
            return UsageTotals(0.0, 0.0, 0.0)
        starts, finishes, shares = (
            np.array([*part, latest])
            for part, latest in zip(
                self._intervals, (self._start, self.finish_s, self._share), strict=True
            )
        )
        finishes = np.minimum(finishes, end_s)
        open_bins = _Bins.of(*(part[starts < end_s] for part in (starts, finishes, shares)))
        first, length, value = _Bins.joined([*self._closed, self._last.then(open_bins)])
        value = np.minimum(value, 1.0)
        # The last bin on its own: only it can be shorter than a second.
        width = end_s - (bins - 1)
        at_last = (first < bins) & (first + length >= bins)
        last = min(float(value[at_last].sum()), width)
        whole = first < bins - 1
        counts = np.append(np.minimum(length, bins - 1 - first)[whole], 1)
        values = np.append(value[whole], last / width)
        busy_s = float((values[:-1] * counts[:-1]).sum()) + last
        idle = bins - int(counts.sum())
        order = np.argsort(values, kind="stable")
        ranked, ranks = values[order], np.cumsum(counts[order]) + idle

        def rank(number: int) -> float:
            """The share of bin ``number`` when they are sorted; the idle ones come first."""
            if number < idle:
                return 0.0
            return float(ranked[np.searchsorted(ranks, number, side="right")])

        position = 0.95 * (bins - 1)
        low = floor(position)
        low_value, high_value = rank(low), rank(min(low + 1, bins - 1))
        p95 = float(np.interp(position - low, (0.0, 1.0), (low_value, high_value)))
        return UsageTotals(busy_s, float(values.max()), p95)

    def _push(self) -> None:
        """The open interval is complete."""
        if self._share:
            starts, finishes, shares = self._intervals
            starts.append(self._start)
            finishes.append(self.finish_s)
            shares.append(self._share)
            if len(starts) >= _FOLD:
                self.fold()
