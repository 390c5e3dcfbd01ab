"""Other jobs' transfers: Poisson arrivals, steady or in bursts, that queue on a link like ours.

With transfers of one size this is the queue M/D/1, with exponential sizes M/M/1. Arrivals are drawn
in numbered chunks, each from a generator of its own and only when somebody asks, so they depend
neither on our traffic nor on who looks how far ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log1p
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from islands.network.steps import Steps, TraceEnded
from islands.network.usage import Usage
from islands.rng import generator

#: Arrivals in the first chunk; every one is twice as long as the one before, up to the last number.
_FIRST, _MOST = 64, 1 << 14
#: Bursts that are drawn at once.
_BURSTS = 256
#: So many arrivals are served one after the other, more as arrays, which is quicker from there on.
_FEW = 24

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """Background load of a link: the share of its bandwidth, and the size of one transfer.

    ``exponential`` draws sizes with this mean instead of all the same. With ``on_s`` and ``off_s``
    the transfers come in bursts: mean lengths of exponential on- and off-periods, with the same
    load on average.
    """

    load: float
    size_bytes: float
    exponential: bool = False
    on_s: float | None = None
    off_s: float | None = None


class Arrivals:
    """The arrivals of one link's background in time order, each handed out once.

    ``bytes_per_s`` is the link's nominal bandwidth, of which ``spec.load`` is the share asked for.
    """

    def __init__(self, spec: Load, bytes_per_s: float, seed: int, link: str) -> None:
        if spec.load > 0 and not 0 < bytes_per_s < inf:
            raise ValueError(f"no background load on a link of {bytes_per_s} bytes per second")
        self._key = (seed, "background", link)
        self._exponential = spec.exponential
        # Whole bytes, and the rate from what is sent, so that rounding does not change the load.
        self.size_bytes = float(max(1, round(spec.size_bytes)))
        self._rate = spec.load * bytes_per_s / self.size_bytes
        self._bursts: _Bursts | None = None
        if spec.on_s is not None and spec.off_s is not None and spec.off_s > 0:
            self._rate *= (spec.on_s + spec.off_s) / spec.on_s
            self._bursts = _Bursts(self._key, spec.on_s, spec.off_s)
        self._chunk = 0
        self._drawn_s = 0.0
        self._at = 0
        self._times = self._sizes = np.empty(0)
        self.peek_s = inf
        """When the next one arrives that was not handed out; inf: none ever."""
        if self._rate > 0:
            self._draw()

    def pop(self) -> tuple[float, float]:
        """The next arrival: its time in seconds, its size in bytes."""
        if self.peek_s == inf:
            raise IndexError("no arrivals")
        found = self.peek_s, self._sizes.item(self._at)
        self._move(self._at + 1)
        return found

    def until(self, time_s: float) -> tuple[_Floats, _Floats]:
        """Times and sizes, (arrivals,) each, of all up to and including ``time_s``."""
        if time_s == inf and self.peek_s < inf:
            raise ValueError("there is no end of arrivals")
        parts = [(np.empty(0), np.empty(0))]
        while self.peek_s <= time_s and self.peek_s < inf:
            parts.append(self.piece(time_s))
        times, sizes = (np.concatenate(part) for part in zip(*parts, strict=True))
        return times, sizes

    def piece(self, time_s: float) -> tuple[_Floats, _Floats]:
        """The first of :meth:`until`, so many that memory stays bounded."""
        begin = self._at
        end = begin + int(np.searchsorted(self._times[begin:], time_s, side="right"))
        found = self._times[begin:end], self._sizes[begin:end]
        self._move(end)
        return found

    def more_than(self, count: int, time_s: float) -> bool:
        """Whether :meth:`piece` would hand out more than ``count``."""
        at = self._at + count
        return at < len(self._times) and bool(self._times[at] <= time_s)

    def _move(self, at: int) -> None:
        self._at = at
        if at == len(self._times):
            self._draw()
        else:
            self.peek_s = self._times.item(at)

    def _draw(self) -> None:
        """The next chunk. Exponential sizes, rounded up, are geometric: whole bytes, exact mean."""
        rng = generator(*self._key, self._chunk)
        count = min(_FIRST << self._chunk, _MOST) if self._chunk < 32 else _MOST
        gaps = rng.standard_exponential(count)
        gaps /= self._rate
        gaps[0] += self._drawn_s
        times = np.cumsum(gaps)
        self._drawn_s = float(times[-1])
        if self._exponential:
            mean = self.size_bytes
            scale = -1.0 / log1p(-1.0 / mean) if mean > 1 else 0.0
            self._sizes = np.maximum(np.ceil(rng.standard_exponential(count) * scale), 1.0)
        elif len(self._sizes) < count:
            self._sizes = np.full(count, self.size_bytes)
        self._times = times if self._bursts is None else self._bursts.place(times)
        self._chunk += 1
        self._move(0)


class _Bursts:
    """Where time that counts only on-periods lies on the clock.

    On- and off-periods alternate, both exponential; whether it begins with on or off is drawn in
    proportion to their means, which with the exponential's lack of memory is the steady state.
    """

    def __init__(self, key: tuple[int, str, str], on_s: float, off_s: float) -> None:
        self._key = key
        self._means = (on_s, off_s)
        self._chunk = 0
        rng = generator(*key, "bursts")
        begins_off = rng.random() * (on_s + off_s) >= on_s
        self._on_s = 0.0  # seconds of on-periods that are placed
        self._off_s = float(rng.standard_exponential()) * off_s if begins_off else 0.0
        self._ends = self._before = np.empty(0)

    def place(self, times: _Floats) -> _Floats:
        """Clock times of moments counted in on-time; both (moments,), not before earlier ones."""
        placed = np.empty_like(times)
        at = 0
        while True:
            upto = at + int(np.searchsorted(times[at:], self._on_s, side="right"))
            some = times[at:upto]
            period = np.searchsorted(self._ends, some, side="left")
            placed[at:upto] = some + self._before[period]
            at = upto
            if at == len(times):
                return placed
            self._draw()

    def _draw(self) -> None:
        """The next bursts: on-time at which each ends, and off-time before it."""
        rng = generator(*self._key, "bursts", self._chunk)
        on_s, off_s = (rng.standard_exponential(_BURSTS) * mean for mean in self._means)
        self._chunk += 1
        on_s[0] += self._on_s
        self._ends = np.cumsum(on_s)
        off_s = np.cumsum(np.concatenate(([self._off_s], off_s)))
        self._before, self._off_s = off_s[:-1], float(off_s[-1])
        self._on_s = float(self._ends[-1])


class FifoBackground:
    """The other jobs' transfers on one FIFO link, of constant or changing bandwidth.

    Everything is counted when it is served: ``bytes`` and ``count`` of the transfers, when the
    first started and the last finished, and the seconds that all of them waited. A transfer that
    never finishes, because the link is cut for good or its trace ends, is not counted, and the link
    is never free again.

    ``waits``, if given, is handed the waiting times of the transfers in order, (transfers,) at a
    time.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        rate: float | Steps,
        usage: Usage,
        waits: Callable[[_Floats], None] | None = None,
    ) -> None:
        self.arrivals = arrivals
        self.bytes = 0
        self.count = 0
        self.first_start_s = inf
        self.last_s = -inf
        self.queued_s = 0.0
        self._steps = rate if isinstance(rate, Steps) else Steps.constant(rate)
        self._usage = usage
        self._waits = waits
        self._piece = (0.0, 0.0, 0.0)  # since, rate, until: the piece last looked at
        self._ahead: deque[tuple[float, float]] = deque()

    def serve(self, now_s: float, free_s: float) -> float:
        """Let all that arrived up to and including ``now_s`` join the queue, before us.

        ``free_s`` is when the link has served all it was given so far; returns the new one, which
        is inf if that never happens. ``now_s`` must not decrease from call to call.
        """
        arrivals = self.arrivals
        while arrivals.peek_s <= now_s:
            if arrivals.more_than(_FEW, now_s):
                free_s = self._serve_many(*arrivals.piece(now_s), now_s, free_s)
            else:
                free_s = self._serve_one(*arrivals.pop(), now_s, free_s)
        return free_s

    def ahead(self, now_s: float, start_s: float) -> float:
        """Seconds of [``now_s``, ``start_s``] in which the link serves background.

        For a transfer of ours that became ready at ``now_s``, after :meth:`serve` of that moment.
        ``now_s`` must not decrease from call to call.
        """
        kept = self._ahead
        while kept and kept[0][1] <= now_s:
            kept.popleft()
        total = 0.0
        for start, finish in kept:
            if start >= start_s:
                break
            total += min(finish, start_s) - max(start, now_s)
        return total

    def _keep(self, start_s: float, finish_s: float) -> None:
        if self._ahead and self._ahead[-1][1] == start_s:
            start_s = self._ahead.pop()[0]
        self._ahead.append((start_s, finish_s))

    def _count(self, count: int, size: int, first_s: float, last_s: float, waited_s: float) -> None:
        self.count += count
        self.bytes += size
        self.first_start_s = min(self.first_start_s, first_s)
        self.last_s = last_s
        self.queued_s += waited_s

    def _finish(self, start_s: float, size: float) -> float:
        """When a transfer that starts at ``start_s`` has left; inf: never."""
        since_s, rate, until_s = self._piece
        try:
            if not since_s <= start_s < until_s:
                if start_s == inf:
                    return inf
                rate, until_s = self._steps.piece(start_s)
                self._piece = (start_s, rate, until_s)
            if rate > 0:
                finish_s = start_s + size / rate
                if finish_s <= until_s:
                    return finish_s
            return self._steps.finish(start_s, size)
        except TraceEnded:
            return inf

    def _serve_one(self, time_s: float, size: float, now_s: float, free_s: float) -> float:
        """Serve the next arrival; returns when it has left."""
        start_s = free_s if free_s > time_s else time_s
        finish_s = self._finish(start_s, size)
        if start_s < inf:
            self._usage.add(start_s, finish_s)
            if finish_s > now_s:
                self._keep(start_s, finish_s)
        if finish_s < inf:
            self._count(1, int(size), start_s, finish_s, start_s - time_s)
            if self._waits is not None:
                self._waits(np.array([start_s - time_s]))
        return finish_s

    def _serve_many(self, times: _Floats, sizes: _Floats, now_s: float, free_s: float) -> float:
        """Serve the next arrivals, (transfers,) each; returns when the last one has left."""
        starts, finishes = self._schedule(times, sizes, free_s)
        self._usage.add_many(starts, finishes)
        later = int(np.searchsorted(finishes, now_s, side="right"))
        if later < len(finishes) and starts[later] < inf:
            # All of them have arrived, so from here on they are served without a gap.
            self._keep(float(starts[later]), float(finishes[-1]))
        done = int(np.searchsorted(finishes, inf))
        if done:
            waits = (starts - times)[:done]
            size = int(sizes[:done].astype(np.int64).sum())
            first_s, last_s = float(starts[0]), float(finishes[done - 1])
            self._count(done, size, first_s, last_s, float(waits.sum()))
            if self._waits is not None:
                self._waits(waits)
        return float(finishes[-1])

    def _schedule(self, times: _Floats, sizes: _Floats, free_s: float) -> tuple[_Floats, _Floats]:
        """Starts and finishes, as arrays between two changes of the bandwidth at a time."""
        starts, finishes = np.empty_like(times), np.empty_like(times)
        sent = np.cumsum(sizes)
        count, at = len(times), 0
        while at < count:
            begin_s = max(free_s, float(times[at]))
            # One by itself: it finds the present piece, and may reach over the end of the last one.
            starts[at] = begin_s
            finishes[at] = free_s = self._finish(begin_s, float(sizes[at]))
            at += 1
            if free_s == inf:
                starts[at:] = finishes[at:] = inf
                break
            _, rate, until_s = self._piece
            if at == count or rate == 0 or free_s >= until_s:
                continue
            end = at + int(np.searchsorted(times[at:], until_s))
            if until_s < inf:
                # Nor more than can be sent before the change.
                fit = sent[at - 1] + (until_s - free_s) * rate
                end = min(end, int(np.searchsorted(sent, fit, side="right")))
            if end > at:
                begun, done = lindley(times[at:end], sizes[at:end] / rate, free_s)
                whole = int(np.searchsorted(done, until_s, side="right"))
                starts[at : at + whole], finishes[at : at + whole] = begun[:whole], done[:whole]
                if whole:
                    at += whole
                    free_s = float(done[whole - 1])
        return starts, finishes


def lindley(times: _Floats, durations: _Floats, free_s: float) -> tuple[_Floats, _Floats]:
    """Starts and finishes in a FIFO queue that is free from ``free_s`` on; all (transfers,).

    finish_i = max(time_i, finish_{i−1}) + duration_i, solved for all at once (Lindley 1952, "The
    theory of queues with a single server"): with S_i = duration_1 + … + duration_i it is
    finish_i = S_i + max over j ≤ i of (time_j − S_{j−1}), where time_1 counts as max(time_1, free).
    """
    total = np.cumsum(durations)
    slack = times - total
    slack += durations
    slack[0] = max(slack[0], free_s)
    finishes = np.maximum.accumulate(slack, out=slack)
    finishes += total
    # Rounding must not let one finish before it arrives.
    np.maximum(finishes, times, out=finishes)
    starts = np.empty_like(finishes)
    starts[0] = max(free_s, float(times[0]))
    np.maximum(times[1:], finishes[:-1], out=starts[1:])
    return starts, finishes
