"""The wall clock: the same simulation, let out at the pace of the real world.

An emulated moment t has its deadline ``time_scale`` · t wall seconds after the start. What the
network delivers is held back until then, so whoever waits for it really waits. Nothing emulated
moves: if computing is late, so are the deliveries that depend on it, and that lag is reported.

Deadlines are absolute. A sleep that ends late makes one delivery late and not all later ones; the
last millisecond before a deadline is spent in very short waits, since a sleep may end late by more
than a small transfer takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from islands.clock import FixedSteps
from islands.network.ledger import KINDS, TransferRow
from islands.network.timed import Action, Kill, Result
from islands.network.timed_timeline import TimedTimeline
from islands.network.timeline import Timeline
from islands.network.timings import Event, SyncTiming, Timings
from islands.network.topology import Site, Topology, Wire
from islands.trace import Bytes, End, Op, Receive, Send

#: So long before a deadline sleeping ends and short waits begin, in seconds.
SPIN_S = 1e-3


@dataclass(frozen=True)
class Pace:
    """How well a run on the wall clock kept its pace.

    Args:
        links: per WAN link the bytes per emulated second that were asked for and achieved: bytes
            over the time from each round's first start on it to its last delivery, as simulated and
            as really let out.
        lag_mean_s, lag_max_s: wall seconds that workers went on with results, or events were
            decided on, after their deadlines.
        wall_s: wall seconds from the start to the end.
    """

    links: dict[str, tuple[float, float]]
    lag_mean_s: float
    lag_max_s: float
    wall_s: float


class _Crossing(NamedTuple):
    """A round's bytes on one link, and when the first of them began to cross it."""

    link: str
    bytes: int
    first_s: float


class Paced:
    """A timeline on the wall clock, which starts when the first operations come.

    ``time_scale`` is wall seconds per emulated second. ``now`` and ``sleep`` are the host's
    monotonic clock and its sleep.
    """

    def __init__(
        self,
        timeline: Timeline,
        time_scale: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._timeline = timeline
        if isinstance(timeline, TimedTimeline):
            timeline.ahead = True
        self._time_scale = time_scale
        self._now = now
        self._sleep = sleep
        self._start: float | None = None
        self._held: list[tuple[float, int, SyncTiming | _Crossing]] = []  # a heap by moment
        self._count = 0  # keeps what has the same moment in its order
        self._event: Event | None = None
        self._wan = {link.name for link in timeline.topology.links}
        self._rates: dict[str, list[float]] = {}  # link -> bytes, seconds asked, seconds taken
        self._lags, self._lag_s, self._lag_max_s = 0, 0.0, 0.0

    # What goes in, as for a Timeline

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        """More operations, as (worker, operation), in each worker's own order."""
        if self._start is None:
            self._start = self._now()
        self._timeline.extend(ops)

    @property
    def left(self) -> list[int]:
        """As of a Timeline."""
        return self._timeline.left

    def act(self, actions: Sequence[Action]) -> list[Result]:
        """Decide about what was let out last. Whoever dies gets nothing any more."""
        if not isinstance(self._timeline, TimedTimeline):
            raise ValueError("rounds that wait for everyone need no decisions")
        found = self._timeline.act(actions)
        for action in actions:
            if isinstance(action, Kill):
                self._take_back(action.worker, self._timeline.now_s)
        return found

    def _take_back(self, worker: int, now_s: float) -> None:
        """What a worker has not got by now it will not get."""
        self._held = [
            held
            for held in self._held
            if not (isinstance(held[2], SyncTiming) and held[2].worker == worker)
            or held[2].passed_s <= now_s
        ]
        heapify(self._held)

    # What comes out

    def turn(self, hold_s: float) -> tuple[Timings, Event | None, float]:
        """Simulate as far as causality permits, and let out whatever is due.

        If nothing is, sleep until something is, but no longer than ``hold_s``. The last value is
        the wall seconds to the next deadline: 0 if one has passed by now, infinite if there is
        none. Only deliveries (``Timings.syncs`` and the event) are held back.
        """
        if self._event is None:
            self._event = self._timeline.advance()
        found = self._timeline.take()
        self._hold_back(found)
        until = self._now() + hold_s
        while True:
            now = self._now()  # one moment for both: whatever precedes an arrival is out before it
            found.syncs, event = self._let_out(now), self._take_event(now)
            deadline = self._deadline(self._next_s())
            if found.syncs or event is not None or deadline == inf or now >= until:
                return found, event, max(0.0, deadline - now)
            self._sleep_until(min(deadline, until))

    def end(self) -> Timings:
        """The run is over, finished or not: the final totals, the pace, and what was still held
        back."""
        while self._timeline.advance() is not None:
            pass  # nobody decides any more
        found = self._timeline.end()
        self._hold_back(found)
        found.syncs = [what for _, _, what in sorted(self._held) if isinstance(what, SyncTiming)]
        self._held.clear()
        found.pace = self._pace()
        return found

    # Holding back and letting out

    def _hold_back(self, found: Timings) -> None:
        for sync in found.syncs:
            self._hold(sync.passed_s, sync)
        for crossing, last_s in self._crossings(found.transfers):
            self._hold(last_s, crossing)

    def _hold(self, moment_s: float, what: SyncTiming | _Crossing) -> None:
        self._count += 1
        heappush(self._held, (moment_s, self._count, what))

    def _crossings(self, rows: Iterable[TransferRow]) -> Iterable[tuple[_Crossing, float]]:
        """A round's bytes on each WAN link, whatever their kind, and when all had crossed it."""
        rounds: dict[tuple[int, int, str], list[TransferRow]] = {}
        for row in rows:
            if row.link in self._wan and row.kind in KINDS:
                rounds.setdefault((row.fragment, row.version, row.link), []).append(row)
        for (_, _, link), parts in rounds.items():
            first_s = min(row.first_start_s for row in parts)
            crossing = _Crossing(link, sum(row.bytes for row in parts), first_s)
            yield crossing, max(row.last_delivered_s for row in parts)

    def _let_out(self, now: float) -> list[SyncTiming]:
        """The deliveries whose moment has come."""
        syncs: list[SyncTiming] = []
        while self._held and (late_s := now - self._deadline(self._held[0][0])) >= 0:
            moment_s, _, what = heappop(self._held)
            if isinstance(what, SyncTiming):
                self._note_lag(late_s)
                syncs.append(what)
            else:
                asked_s = moment_s - what.first_s
                totals = self._rates.setdefault(what.link, [0.0, 0.0, 0.0])
                taken_s = asked_s + late_s / self._time_scale
                totals[:] = (totals[0] + what.bytes, totals[1] + asked_s, totals[2] + taken_s)
        return syncs

    def _take_event(self, now: float) -> Event | None:
        """The event, if its moment has come."""
        event = self._event
        if event is None or (late_s := now - self._deadline(event.time_s)) < 0:
            return None
        self._note_lag(late_s)
        self._event = None
        return event

    def _note_lag(self, late_s: float) -> None:
        self._lags += 1
        self._lag_s += late_s
        self._lag_max_s = max(self._lag_max_s, late_s)

    # Deadlines

    def _next_s(self) -> float:
        """The next emulated moment at which there is something to let out; infinite if none."""
        moments = [self._held[0][0]] if self._held else []
        if self._event is not None:
            moments.append(self._event.time_s)
        return min(moments, default=inf)

    def _deadline(self, moment_s: float) -> float:
        start = self._now() if self._start is None else self._start
        return start + moment_s * self._time_scale

    def _sleep_until(self, deadline: float) -> None:
        while (left_s := deadline - self._now()) > 0:
            self._sleep(left_s - SPIN_S if left_s > SPIN_S else 0.0)

    def _pace(self) -> Pace:
        links = {
            link: (size / asked_s, size / taken_s)
            for link, (size, asked_s, taken_s) in sorted(self._rates.items())
            if asked_s > 0
        }
        mean_s = self._lag_s / self._lags if self._lags else 0.0
        wall_s = 0.0 if self._start is None else self._now() - self._start
        return Pace(links, mean_s, self._lag_max_s, wall_s)


def measure_pace(
    transfers: int = 1000,
    nbytes: int = 1000,
    bytes_per_s: float = 1.25e6,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[float, float]:
    """Seconds that so many transfers over one link take one after the other: nominal and real.

    Each is handed in when the one before has been let out, as a training run does.
    """
    sites = [Site(name, 1, inf, 0.0) for name in ("a", "b")]
    topology = Topology.build(sites, [Wire("link", ("a", "b"), bytes_per_s, 0.0)])
    paced = Paced(
        Timeline(topology, FixedSteps((0.0, 0.0)), "all_gather"), 1.0, now=now, sleep=sleep
    )
    began = now()
    ready = [(0, 0), (1, 0)]  # workers, and the versions that they have
    left = 2 * transfers
    while left:
        for worker, version in ready:
            send = Send(0, version + 1, version, Bytes(values=nbytes), 1)
            ops = (send, Receive(0, version + 1)) if version < transfers else (End(),)
            paced.extend([(worker, op) for op in ops])
        ready = [(sync.worker, sync.version) for sync in paced.turn(inf)[0].syncs]
        left -= len(ready)
    return transfers * nbytes / bytes_per_s, now() - began
