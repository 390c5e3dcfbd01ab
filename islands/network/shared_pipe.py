"""One resource of fair routes: its changing bandwidth, and other jobs' flows on it.

While no flow of ours is on it, a resource is a processor-sharing queue that nobody looks at. So it
is run only when one of ours comes or the run ends, from where it was left, event by event.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import inf

from islands.network.background import Arrivals
from islands.network.maxmin import Pipe
from islands.network.steps import Steps, TraceEnded
from islands.network.usage import Usage


@dataclass
class BackgroundTotals:
    """Other jobs' flows on one resource that have ended so far.

    ``first_start_s`` is inf if none has begun; ``queued_s`` sums how much longer they took than
    each of them would have alone.
    """

    bytes: int = 0
    count: int = 0
    first_start_s: float = inf
    last_s: float = -inf
    queued_s: float = 0.0


class EndedOn(TraceEnded):
    """The trace of ``resource`` ended at ``time_s`` while a flow of ours was on it."""

    def __init__(self, time_s: float, resource: int) -> None:
        super().__init__(time_s)
        self.resource = resource


class SharedPipe(Pipe):
    """A pipe whose bandwidth may change, with other jobs' arrivals and a record of its use."""

    def __init__(
        self,
        number: int,
        capacity: Steps | float,
        cap_per_s: float,
        arrivals: Arrivals | None,
        usage: Usage | None,
    ) -> None:
        bytes_per_s, until_s = (
            capacity.piece(0.0) if isinstance(capacity, Steps) else (float(capacity), inf)
        )
        self.capacity = capacity
        self.until_s = until_s
        self.arrivals = arrivals
        self.usage = usage
        self.epoch = 0
        self.totals = BackgroundTotals()
        self._serial = count()
        self._share = self._share_since_s = 0.0
        super().__init__(number, bytes_per_s, cap_per_s)
        self.others.find_alone()
        #: It never holds anything back, so it does not join the flows that cross it.
        self.unlimited = bytes_per_s == inf and until_s == inf

    @property
    def cut_for_good(self) -> bool:
        """Nothing gets through, now or later."""
        return self.bytes_per_s == 0.0 and self.until_s == inf

    @property
    def next_s(self) -> float:
        """The next arrival or change of the bandwidth."""
        arrival_s = self.arrivals.peek_s if self.arrivals is not None else inf
        return arrival_s if arrival_s < self.until_s else self.until_s

    def look(self, now_s: float) -> None:
        """Take over the bandwidth of this moment. Raises EndedOn."""
        if now_s >= self.until_s and isinstance(self.capacity, Steps):
            try:
                self.bytes_per_s, self.until_s = self.capacity.piece(now_s)
            except TraceEnded as ended:
                raise EndedOn(ended.time_s, self.number) from None
            self.others.find_alone()

    def join(self, now_s: float) -> None:
        """Other jobs' flows that have arrived begin; their group is advanced to ``now_s``."""
        arrivals, group = self.arrivals, self.others
        while arrivals is not None and arrivals.peek_s <= now_s:
            time_s, size = arrivals.pop()
            if self.totals.first_start_s == inf:
                self.totals.first_start_s = time_s
            end = group.service + size
            group.add((end, 0, next(self._serial), group.lost_own, 0.0, size))

    def leave(self, now_s: float) -> None:
        """Other jobs' flows that have all of their bytes end."""
        group, totals = self.others, self.totals
        ended = group.ended()
        for _, _, _, lost_s, _, size in ended:
            totals.count += 1
            totals.bytes += round(size)
            totals.queued_s += group.lost_own - lost_s
            totals.last_s = now_s
        if ended and not group.flows:
            group.restart(now_s)

    def used(self, now_s: float, share: float) -> None:
        """From now on this share of the bandwidth is in use."""
        if self.usage is not None and share != self._share:
            self.note(now_s)
            self._share = share

    def note(self, now_s: float) -> None:
        """Hand over what was in use up to now."""
        if self.usage is not None and self._share > 0.0 and now_s > self._share_since_s:
            self.usage.add(self._share_since_s, now_s, self._share)
        self._share_since_s = now_s

    def alone_until(self, now_s: float) -> None:
        """Serve other jobs' flows, with none of ours here, up to and including ``now_s``.

        Raises EndedOn.
        """
        if self.arrivals is None:
            self.look(now_s)
            return
        group = self.others
        while True:
            here = len(group.flows)
            rate, share = 0.0, 0.0
            if here and self.bytes_per_s > 0.0:
                rate, share = self.bytes_per_s / here, 1.0
                if group.cap_per_s < rate:
                    rate = group.cap_per_s
                    share = rate * here / self.bytes_per_s
            self.used(group.since_s, share)
            if rate != group.rate:
                group.rate = rate
                group.own_slope = 1.0 - rate / group.alone_per_s if rate else 0.0
                group.plan()
            event_s = min(group.finish_s, self.next_s)
            if event_s > now_s:
                return
            group.advance(event_s)
            self.leave(event_s)
            self.join(event_s)
            self.look(event_s)
