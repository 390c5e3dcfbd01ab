"""Fluid max-min fair sharing: the flows present share all resources of their routes.

This is SimGrid's flow model (Velho et al. 2013, "On the validity of flow-level TCP network models
for grid and cloud simulations") with equal weights: at every moment the rates are the max-min fair
ones (:mod:`islands.network.maxmin`), and they change only when a flow begins or ends or a bandwidth
changes. Between such events everything is linear, so the next one is known exactly.

Only the component that an event touches is looked at: the flows that are joined to it by shared
resources. Other jobs' flows on a resource that none of ours uses are served later, all at once,
when one of ours comes or the run ends: until then they share with nobody but themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple

from islands.network.background import Arrivals
from islands.network.maxmin import Group, Pipe, component, fill
from islands.network.shared_pipe import BackgroundTotals, EndedOn, SharedPipe
from islands.network.steps import Steps
from islands.network.usage import Usage

#: What an event is: a first end within a component, or something on a pipe. Ends come first.
_END, _PIPE = 0, 1


class Finished(NamedTuple):
    """A flow of ours has all of its bytes at ``finish_s``.

    ``own_s`` and ``background_s`` are the seconds that it lost to our other flows and to other
    jobs: they and the time that it would have taken alone make up the time that it took.
    """

    finish_s: float
    order: int
    what: Any
    own_s: float
    background_s: float


class FairShare:
    """Resources that our flows and other jobs' flows share max-min fairly.

    Args:
        capacity: bandwidth of every resource, bytes per second; may be infinite.
        cap: what one flow may get there at most, bytes per second.
        arrivals: other jobs' flows, by resource. Each crosses that resource only.
        usage: told how busy a resource was, by resource.

    A resource that is cut for good holds the flows on it for ever; they are forgotten, and
    :meth:`stuck` names it. Methods that reach the end of a trace raise EndedOn.
    """

    def __init__(
        self,
        capacity: Sequence[Steps | float],
        cap: Sequence[float],
        arrivals: Mapping[int, Arrivals],
        usage: Mapping[int, Usage],
    ) -> None:
        self._pipes = [
            SharedPipe(number, limit, most, arrivals.get(number), usage.get(number))
            for number, (limit, most) in enumerate(zip(capacity, cap, strict=True))
        ]
        self._groups: dict[tuple[int, ...], Group] = {}
        self._now_s = 0.0
        self._at_once: list[Finished] = []
        self._events: list[tuple[float, int, int, int, Any]] = []
        self._most_events = 64
        self._serial = count()
        self._mark = 0
        self._touched: list[Pipe] = []
        self._free: list[Group] = []  # that cross nothing but unlimited pipes, and have a cap
        self._cut: int | None = None

    @property
    def background(self) -> dict[int, BackgroundTotals]:
        """What other jobs have sent so far over each resource where they do."""
        return {pipe.number: pipe.totals for pipe in self._pipes if pipe.arrivals is not None}

    @property
    def next_s(self) -> float:
        """When something happens next to the flows of ours; inf if nothing does."""
        if self._at_once:
            return self._now_s
        self._settle()
        events = self._events
        while events and not _valid(events[0]):
            heappop(events)
        return events[0][0] if events else inf

    def stuck(self) -> int | None:
        """The resource, cut for good, on which flows of ours wait when nothing else can happen."""
        return self._cut if self._cut is not None and self.next_s == inf else None

    def begin(
        self, now_s: float, order: int, route: tuple[int, ...], size: float, what: object
    ) -> None:
        """A flow of ours of ``size`` bytes starts over the resources of ``route``.

        ``order`` sorts what finishes at one moment. Raises ValueError if ``now_s`` is before
        something that has been processed or after something that has not.
        """
        if now_s != self._now_s:
            if not self._now_s <= now_s <= self.next_s:
                raise ValueError(
                    f"a flow cannot begin at {now_s!r}: {self._now_s!r} has been processed, "
                    f"{self.next_s!r} is next"
                )
            self._now_s = now_s
        group = self._groups.get(route)
        if group is None:
            crossed = [self._pipes[number] for number in route]
            limits = [pipe for pipe in crossed if not pipe.unlimited]
            cap_per_s = min((pipe.others.cap_per_s for pipe in crossed), default=inf)
            group = self._groups[route] = Group(route, limits, cap_per_s, False)
        if size <= 0.0 or (not group.pipes and group.cap_per_s == inf):
            self._at_once.append(Finished(now_s, order, what, 0.0, 0.0))
            return
        pipes = [self._pipes[pipe.number] for pipe in group.pipes]
        idle = [pipe for pipe in pipes if not pipe.own]
        for pipe in idle:
            pipe.alone_until(now_s)
        for pipe in idle:
            if pipe.cut_for_good:
                self._hold(pipe)
                return
        for pipe in idle:
            if pipe.others.flows:
                pipe.groups.append(pipe.others)
            self._watch(pipe)
        for pipe in pipes:
            pipe.own += 1
        if group.flows:
            group.advance(now_s)
        else:
            group.restart(now_s)
            group.find_alone()
            for pipe in pipes:
                pipe.groups.append(group)
        lost = group.lost_own, group.lost_background
        group.add((group.service + size, order, next(self._serial), *lost, what))
        if pipes:
            self._touched.append(pipes[0])
        else:
            self._free.append(group)

    def step(self) -> list[Finished]:
        """Let everything happen that happens at :attr:`next_s`; what of ours ended, by order."""
        now_s = self._now_s if self._at_once else self.next_s
        if now_s == inf:
            return []
        self._now_s = now_s
        found, self._at_once = self._at_once, []
        events = self._events
        while events and events[0][0] <= now_s:
            event = heappop(events)
            if not _valid(event):
                continue
            if event[1] == _PIPE:
                self._change(event[-1])
                continue
            for group in event[-1]:
                self._end(group, found)
        return sorted(found, key=lambda flow: flow.order)

    def catch_up(self, end_s: float) -> None:
        """Serve other jobs' flows and account for all use up to the end of the run."""
        next_s = self.next_s
        for pipe in self._pipes:
            if pipe.own:
                pipe.note(min(end_s, next_s))
                continue
            try:
                pipe.alone_until(end_s)
            except EndedOn as ended:  # nobody asked for more of it
                pipe.note(ended.time_s)
            else:
                pipe.note(end_s)

    # What happens

    def _end(self, group: Group, found: list[Finished]) -> None:
        """The flows of a group that have all of their bytes by now."""
        now_s = self._now_s
        group.advance(now_s)
        if group.background:
            pipe = self._pipes[group.route[0]]
            if pipe.own:  # otherwise it has just been left to itself
                pipe.leave(now_s)
                self._touched.append(pipe)
                if not group.flows:
                    pipe.groups.remove(group)
            return
        ended = group.ended()
        for _, order, _, own_s, background_s, what in ended:
            lost = group.lost_own - own_s, group.lost_background - background_s
            found.append(Finished(now_s, order, what, *lost))
        self._take_away(group, len(ended))

    def _take_away(self, group: Group, flows: int) -> None:
        """So many flows of a group of ours are gone from their pipes."""
        for crossed in group.pipes:
            pipe = self._pipes[crossed.number]
            pipe.own -= flows
            if not group.flows:
                pipe.groups.remove(group)
            if pipe.own:
                self._touched.append(pipe)
            else:
                self._leave_alone(pipe)
        if not group.pipes and group.flows:
            self._free.append(group)

    def _leave_alone(self, pipe: SharedPipe) -> None:
        """The last flow of ours has left a pipe: what others do there is looked at later."""
        pipe.others.advance(self._now_s)
        pipe.others.seen = -1
        pipe.groups.clear()
        pipe.epoch += 1
        if not pipe.others.flows:
            pipe.used(self._now_s, 0.0)

    def _watch(self, pipe: SharedPipe) -> None:
        """Have the pipe's next arrival or change among the events."""
        next_s = pipe.next_s
        if next_s < inf:
            heappush(self._events, (next_s, _PIPE, next(self._serial), pipe.epoch, pipe))

    def _change(self, pipe: SharedPipe) -> None:
        """Arrivals on a pipe with flows of ours, or another bandwidth of it."""
        now_s, others = self._now_s, pipe.others
        others.advance(now_s)
        was_empty, before = not others.flows, pipe.bytes_per_s
        pipe.join(now_s)
        if was_empty and others.flows:
            pipe.groups.append(others)
        pipe.look(now_s)
        if pipe.cut_for_good:
            for group in [group for group in pipe.groups if not group.background]:
                flows = len(group.flows)
                group.flows.clear()
                group.seen = -1
                self._take_away(group, flows)
            self._hold(pipe)
            return
        if pipe.bytes_per_s != before:
            for group in pipe.groups:
                group.find_alone()
        self._touched.append(pipe)
        self._watch(pipe)

    def _hold(self, pipe: Pipe) -> None:
        self._cut = pipe.number if self._cut is None else min(self._cut, pipe.number)

    # Rates

    def _settle(self) -> None:
        """Find the rates anew in every component that something has touched."""
        if not self._touched and not self._free:
            return
        self._mark += 1
        for pipe in self._touched:
            if pipe.seen != self._mark and pipe.groups:
                self._share(*component(pipe, self._mark))
        for group in self._free:
            if group.seen != self._mark and group.flows:
                group.seen = self._mark
                self._share([], [group])
        self._touched.clear()
        self._free.clear()
        if len(self._events) > self._most_events:
            self._events = [event for event in self._events if _valid(event)]
            heapify(self._events)
            self._most_events = 2 * len(self._events) + 64

    def _share(self, pipes: list[Pipe], groups: list[Group]) -> None:
        """New rates of one component, and its first end among the events."""
        now_s = self._now_s
        fill(pipes, groups)
        first_s = inf
        first: list[Group] = []
        for group in groups:
            rate = group.level
            own = background = 0.0
            full = group.bottleneck
            if full is not None and rate < group.alone_per_s:
                own = lost = 1.0 - rate / group.alone_per_s
                here = 0 if group.background else len(full.others.flows)
                if here and full.own == 1:
                    own, background = 0.0, lost
                elif here:
                    # All that the full pipe carries beside this flow took part in slowing it.
                    part = here * full.others.level / (full.bytes_per_s - rate)
                    background = lost * min(1.0, part)
                    own = lost - background
            if rate != group.rate or own != group.own_slope or background != group.background_slope:
                group.advance(now_s)
                group.rate, group.own_slope, group.background_slope = rate, own, background
                group.plan()
            if group.finish_s <= first_s:
                if group.finish_s < first_s:
                    first_s = group.finish_s
                    first = []
                first.append(group)
        if first_s < inf:
            heappush(self._events, (first_s, _END, next(self._serial), self._mark, first))
        for pipe in pipes:
            limit = pipe.bytes_per_s
            share = (limit - pipe.left) / limit if 0.0 < limit < inf else 0.0
            self._pipes[pipe.number].used(now_s, share)


def _valid(event: tuple[float, int, int, int, Any]) -> bool:
    """Whether an event still stands: its component or pipe is as it was."""
    _, kind, _, stamp, what = event
    return bool((what[0].seen if kind == _END else what.epoch) == stamp)
