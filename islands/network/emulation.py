"""The network of one run: what it is made from, and how the engine talks to it.

Both parts are used where the engine is and in the link actor, which has them in a process of its
own and does not load torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from islands.clock import ComputeModel
from islands.network.pace import Paced
from islands.network.timed import Action, Result
from islands.network.timed_timeline import TimedTimeline
from islands.network.timeline import Timeline
from islands.network.timings import Event, Timings
from islands.network.topology import Topology
from islands.trace import Op


@dataclass(frozen=True)
class Emulation:
    """Everything that the network of one run is made from.

    Args:
        topology, compute: the cluster's links and its workers' speed.
        collective: what the method needs: ``all_reduce``, ``all_gather`` or ``star``.
        scheme: how the first two are carried out; a method that needs a star gets one.
        ring_order: the islands in the ring's order; None: chosen.
        seed: decides other jobs' transfers and jitter.
        timed: rounds close by the clock.
        per_transfer: a ledger row per transfer instead of per round and link.
        initial_bytes: the initial model's, handed out before the start.
        time_scale: wall seconds per emulated second; None: nobody waits for the clock.
        spared: to tell what each kind of fault costs: its name, and links and speeds without it and
            all kinds before it. Not in timed runs, where it would have been decided otherwise.
    """

    topology: Topology
    compute: ComputeModel
    collective: str
    scheme: str = "ring"
    ring_order: tuple[str, ...] | None = None
    seed: int = 0
    timed: bool = False
    per_transfer: bool = False
    initial_bytes: int = 0
    time_scale: float | None = None
    spared: tuple[tuple[str, Topology, ComputeModel], ...] = ()

    def timeline(self) -> Timeline:
        """Idle links, clocks at zero, the initial model handed out."""
        return self._timeline(self.topology, self.compute)

    def without_faults(self) -> list[tuple[str, Timeline]]:
        """The same without each kind of fault of ``spared``."""
        return [(kind, self._timeline(links, speeds)) for kind, links, speeds in self.spared]

    def _timeline(self, topology: Topology, compute: ComputeModel) -> Timeline:
        kind = TimedTimeline if self.timed else Timeline
        timeline = kind(
            topology,
            compute,
            self.collective,
            scheme="star" if self.collective == "star" else self.scheme,
            ring_order=self.ring_order,
            seed=self.seed,
            per_transfer=self.per_transfer,
        )
        for worker in range(self.topology.workers):
            timeline.control(worker, self.initial_bytes)
        return timeline

    def network(self) -> LocalNetwork:
        """The network at the start of a run, on the clock that was asked for."""
        timeline, others = self.timeline(), self.without_faults()
        if self.time_scale is None:
            return LocalNetwork(timeline, others)
        return LocalNetwork(Paced(timeline, self.time_scale), others)


class LocalNetwork:
    """A timeline called directly; what the engine's ``Network`` says of each method holds here.

    ``spared`` are timelines of the same operations without a kind of fault, by its name.
    """

    def __init__(
        self, timeline: Timeline | Paced, spared: Sequence[tuple[str, Timeline]] = ()
    ) -> None:
        self._timeline = timeline
        self._spared = spared

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        self._timeline.extend(ops)
        for _, timeline in self._spared:
            timeline.extend(ops)
            timeline.advance()
            timeline.take()

    def results(self, wait: bool) -> Iterable[Timings]:
        """Emulated clock only: on the wall clock times come from ``decide``."""
        if isinstance(self._timeline, Paced):
            return []
        self._timeline.advance()
        return [self._timeline.take()]

    def decide(self, hold_s: float = 0.0) -> tuple[Timings, Event | None, float]:
        if isinstance(self._timeline, Paced):
            return self._timeline.turn(hold_s)
        event = self._timeline.advance()
        return self._timeline.take(), event, inf

    def act(self, actions: Sequence[Action]) -> Sequence[Result]:
        if isinstance(self._timeline, Paced | TimedTimeline):
            return self._timeline.act(actions)
        raise ValueError("rounds that wait for everyone need no decisions")

    def end(self) -> Timings:
        if isinstance(self._timeline, Timeline):
            while self._timeline.advance() is not None:
                pass  # nobody decides any more
        timings = self._timeline.end()
        before = timings.clocks
        for kind, timeline in self._spared:
            after = timeline.end().clocks
            if timeline.left == self._timeline.left:  # not so if it stalled, or was interrupted
                lost_s = sum(b.clock_s - a.clock_s for b, a in zip(before, after, strict=True))
                timings.lost_s[kind] = lost_s
            before = after
        return timings
