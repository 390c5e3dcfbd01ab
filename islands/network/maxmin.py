"""Max-min fair rates by progressive filling (Bertsekas & Gallager 1992, *Data Networks*, 6.5.2).

The rates of all flows grow together. When a pipe is full, the flows on it keep the rate that they
have; when a flow has reached its own cap, it keeps that. The others grow on. So no flow could get
more without taking from one that has no more than it.

Flows over the same pipes have the same rate at every moment, so they are one group with one
*service*: bytes that each of its flows has got since the group was last empty. A flow ends when the
service reaches what it was at the flow's beginning plus the flow's size.

Amounts are taken from a pipe once per level, as level × number of flows. Numbers of flows are
integers, so no rate depends on the order in which the groups were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, TypeAlias

#: (service at which it ends, order, serial number, own and background loss at its begin, what)
Flow: TypeAlias = tuple[float, int, int, float, float, Any]


class Group:
    """The flows over one set of pipes, of ours or (one group per pipe) of other jobs.

    ``lost_own`` and ``lost_background`` are the seconds that each flow of the group has lost to
    others so far, of ours and of other jobs. They grow at ``own_slope`` and ``background_slope``
    seconds per second. ``finish_s`` is when the first flow ends at the present rate.
    """

    __slots__ = (
        "alone_per_s",
        "background",
        "background_slope",
        "bottleneck",
        "cap_per_s",
        "finish_s",
        "flows",
        "level",
        "lost_background",
        "lost_own",
        "own_slope",
        "pipes",
        "rate",
        "route",
        "seen",
        "service",
        "since_s",
    )

    def __init__(
        self, route: tuple[int, ...], pipes: Sequence[Pipe], cap_per_s: float, background: bool
    ) -> None:
        self.route = route
        self.pipes = pipes
        self.cap_per_s = cap_per_s
        self.background = background
        self.flows: list[Flow] = []
        self.seen = -1
        self.level = -1.0
        self.bottleneck: Pipe | None = None
        self.alone_per_s = 0.0
        self.finish_s = inf
        self.restart(0.0)

    def restart(self, now_s: float) -> None:
        """The group is empty: count from zero, so that sums stay short and exact."""
        self.since_s = now_s
        self.service = self.rate = 0.0
        self.lost_own = self.lost_background = 0.0
        self.own_slope = self.background_slope = 0.0

    def advance(self, now_s: float) -> None:
        """Serve up to ``now_s`` at the present rate; a flow that ends then has all of its bytes."""
        elapsed_s = now_s - self.since_s
        if elapsed_s > 0.0:
            self.service += self.rate * elapsed_s
            self.lost_own += self.own_slope * elapsed_s
            self.lost_background += self.background_slope * elapsed_s
            self.since_s = now_s
        if now_s >= self.finish_s and self.flows[0][0] > self.service:
            self.service = self.flows[0][0]  # rounding must not leave a last fraction of a byte

    def plan(self) -> None:
        """Find when the first flow ends."""
        left = self.flows[0][0] - self.service if self.flows else inf
        if left <= 0.0:
            self.finish_s = self.since_s
        elif self.rate > 0.0:
            self.finish_s = self.since_s + left / self.rate
        else:
            self.finish_s = inf

    def add(self, flow: Flow) -> None:
        """One more flow, at the moment up to which the group is advanced."""
        heappush(self.flows, flow)
        self.plan()

    def ended(self) -> list[Flow]:
        """Take out the flows that have all of their bytes."""
        found = []
        while self.flows and (self.flows[0][0] <= self.service or self.rate == inf):
            found.append(heappop(self.flows))
        self.plan()
        return found

    def find_alone(self) -> None:
        """What one flow would get if nothing else were there."""
        self.alone_per_s = min([self.cap_per_s, *[pipe.bytes_per_s for pipe in self.pipes]])


class Pipe:
    """One shared resource: its present bandwidth and the groups that cross it.

    ``own`` counts our flows on it; ``others`` is the group of other jobs' flows, which cross
    nothing else.
    """

    def __init__(self, number: int, bytes_per_s: float, cap_per_s: float) -> None:
        self.number = number
        self.bytes_per_s = bytes_per_s
        self.groups: list[Group] = []
        self.others = Group((number,), [self], cap_per_s, True)
        self.own = 0
        self.seen = -1
        self.left = 0.0
        self.unfixed = 0
        self.fixing = 0


def component(pipe: Pipe, mark: int) -> tuple[list[Pipe], list[Group]]:
    """All pipes and groups that ``pipe`` is joined to by groups; each gets ``mark`` as ``seen``."""
    pipe.seen = mark
    pipes: list[Pipe] = [pipe]
    groups: list[Group] = []
    for found in pipes:  # grows while we go
        for group in found.groups:
            if group.seen != mark:
                group.seen = mark
                groups.append(group)
                for other in group.pipes:
                    if other.seen != mark:
                        other.seen = mark
                        pipes.append(other)
    return pipes, groups


def fill(pipes: Sequence[Pipe], groups: Sequence[Group]) -> None:
    """Give every group its ``level`` (its new rate) and ``bottleneck`` (None: its own cap).

    ``pipes`` must be all those that ``groups`` cross, and the other way round. What a pipe has left
    over is in ``left``.
    """
    # What is left over per flow grows while slower flows are fixed, so an old entry of the heap
    # is too small at most, and is put right when its turn comes.
    heap: list[tuple[float, int, Any]] = []
    for pipe in pipes:
        pipe.left = pipe.bytes_per_s
        pipe.unfixed = pipe.own + len(pipe.others.flows)
        if pipe.left < inf and pipe.unfixed:
            heap.append((pipe.left / pipe.unfixed, pipe.number, pipe))
    capped: dict[float, list[Group]] = {}
    for group in groups:
        group.level = -1.0
        group.bottleneck = None
        if group.cap_per_s < inf:
            capped.setdefault(group.cap_per_s, []).append(group)
    heap += [(cap, -1, members) for cap, members in capped.items()]
    heapify(heap)
    missing = len(groups)
    while missing and heap:
        level, number, what = heap[0]
        full: Pipe | None = None
        members: list[Group] = what
        if number >= 0:
            full = what
            if not full.unfixed:
                heappop(heap)
                continue
            share = full.left / full.unfixed
            if share > level:
                heapreplace(heap, (share, number, full))
                continue
            members = full.groups
        heappop(heap)
        touched: list[Pipe] = []
        for group in members:
            if group.level < 0.0:
                group.level = level
                group.bottleneck = full
                missing -= 1
                count = len(group.flows)
                for pipe in group.pipes:
                    if not pipe.fixing:
                        touched.append(pipe)
                    pipe.fixing += count
        for pipe in touched:
            pipe.left = max(0.0, pipe.left - level * pipe.fixing)
            pipe.unfixed -= pipe.fixing
            pipe.fixing = 0
        if full is not None:
            full.left = 0.0
    if missing:
        for group in groups:
            if group.level < 0.0:
                group.level = inf
