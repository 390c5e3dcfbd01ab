"""One WAN link while a run goes on: what it serves besides our transfers, and how busy it is.

A link that never changes and carries nobody else is *plain*: the event loop then needs no more than
its two numbers. Everything else about a link is here.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from islands.network.background import Arrivals, FifoBackground
from islands.network.steps import Steps, TraceEnded
from islands.network.topology import Link
from islands.network.usage import Usage
from islands.rng import generator
from islands.units import format_seconds

#: Random delays are drawn in chunks of so many.
JITTER_CHUNK = 1024


class Stuck(Exception):
    """A transfer can never be delivered: its link is cut for good, or not known any further."""


class Line:
    """The state of one link. Times are emulated seconds, rates bytes per second.

    ``rate`` is what one transfer can get: the bandwidth, or ``flow_bytes_per_s`` if that is less.
    """

    def __init__(self, link: Link, seed: int) -> None:
        self.link = link
        self.usage = Usage()
        self.rate: Steps | float = min(link.bytes_per_s, link.flow_bytes_per_s)
        if link.bandwidth is not None:
            self.rate = link.bandwidth.capped(link.flow_bytes_per_s)
        self.arrivals = (
            None
            if link.background is None
            else Arrivals(link.background, link.bytes_per_s, seed, link.name)
        )
        self.background = (
            None
            if self.arrivals is None or link.fair
            else FifoBackground(self.arrivals, self.rate, self.usage)
        )
        changes = link.bandwidth is not None or link.delay is not None or link.jitter_s > 0
        self.plain = not (link.fair or changes or link.background)
        self._seed = seed
        self._jitter_s: NDArray[np.float64] = np.empty(0)
        self._drawn = 0
        self._delivered_s = 0.0
        self._ready_s = 0.0

    def serve(
        self, time_s: float, free_s: float, size: int, chain: list[float]
    ) -> tuple[float, float, float, float]:
        """One transfer of ours that is ready at ``time_s``: when it starts and finishes, when its
        first bytes are through and when its last are out at the far end.

        The seconds that it queues are added to ``chain``. Raises Stuck.
        """
        try:
            if self.background is not None:
                free_s = self.background.serve(time_s, free_s)
            start = max(time_s, free_s)
            if start > time_s:
                behind = 0.0
                if self.background is not None:
                    behind = self.background.ahead(time_s, start)
                chain[1] += start - time_s - behind
                chain[2] += behind
            finish = self.finish(start, size)
            jitter_s = self.jitter()
            through = start + self.delay_at(start) + jitter_s
            # The last byte never overtakes the first one, nor the last one of the transfer before.
            out = max(finish + self.delay_at(finish) + jitter_s, through, self._delivered_s)
        except TraceEnded as ended:
            raise Stuck(self.ended(ended)) from None
        if finish == inf:
            raise Stuck(self.cut(time_s))
        self.usage.add(start, finish)
        self._delivered_s = out
        return start, finish, through, out

    def finish(self, start_s: float, size: float) -> float:
        """When ``size`` bytes that start at ``start_s`` have left; inf: never."""
        rate = self.rate
        return rate.finish(start_s, size) if isinstance(rate, Steps) else start_s + size / rate

    def begin(self, finish_s: float, size: float) -> float:
        """The latest start from which ``size`` bytes are through by ``finish_s``."""
        rate = self.rate
        if not isinstance(rate, Steps):
            return finish_s - size / rate
        try:
            return rate.begin(finish_s, size)
        except TraceEnded as ended:
            raise Stuck(self.ended(ended)) from None

    def delay_at(self, time_s: float) -> float:
        """The delay of what leaves at ``time_s``, jitter aside."""
        if self.link.delay is None:
            return self.link.delay_s
        try:
            return self.link.delay.piece(time_s)[0]
        except TraceEnded as ended:
            raise Stuck(self.ended(ended)) from None

    def jitter(self) -> float:
        """The next transfer's own addition to the delay, evenly drawn from ± the link's jitter."""
        if not self.link.jitter_s:
            return 0.0
        at = self._drawn % JITTER_CHUNK
        if at == 0:
            chunk = self._drawn // JITTER_CHUNK
            draws = generator(self._seed, "jitter", self.link.name, chunk)
            self._jitter_s = draws.uniform(-self.link.jitter_s, self.link.jitter_s, JITTER_CHUNK)
        self._drawn += 1
        return float(self._jitter_s[at])

    def in_order(self, ready_s: float) -> float:
        """When a transfer may be ready at the next hop: not before the one ahead of it here."""
        self._ready_s = max(self._ready_s, ready_s)
        return self._ready_s

    def cut(self, time_s: float | None) -> str:
        """Why a transfer waits for ever that was to be served at ``time_s``, or is under way."""
        windows = () if self.link.bandwidth is None else self.link.bandwidth.windows
        ends = [w.from_s for w in windows if w.to_s == inf and not w.value]
        since = f" from {format_seconds(min(ends))} on" if ends else ""
        when = "under way" if time_s is None else f"that is ready at {format_seconds(time_s)}"
        name = self.link.name
        return f"link {name} is cut for good{since}: a transfer {when} would wait for ever"

    def ended(self, ended: TraceEnded) -> str:
        """Why it is not known how the link goes on."""
        return (
            f"the trace of link {self.link.name} ends at {format_seconds(ended.time_s)} "
            "and does not repeat"
        )
