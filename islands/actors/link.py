"""The LinkActor: the network of one experiment, in a process of its own.

It sees metadata only (who sends how many bytes when what is finished), never a payload, and does
not load torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from islands.clock import ComputeModel
from islands.network import Arrival, Timeline, Timings, Topology
from islands.trace import Op


class LinkActor:
    """Gives operations their emulated times (see :class:`islands.network.Timeline`)."""

    def set_up(
        self,
        topology: Topology,
        compute: ComputeModel,
        collective: str,
        timed: bool,
        per_transfer: bool,
        initial_bytes: int,
    ) -> None:
        """Begin a run: idle links, clocks at zero, the initial model handed out."""
        self._timeline = Timeline(
            topology, compute, collective, timed=timed, per_transfer=per_transfer
        )
        for worker in range(topology.workers):
            self._timeline.control(worker, initial_bytes)

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        """Take in more of the graph."""
        self._timeline.extend(ops)

    def time(self, ops: Sequence[tuple[int, Op]]) -> Timings:
        """Take in more of the graph, simulate as far as it goes, and give the times known by
        now."""
        self._timeline.extend(ops)
        self._timeline.advance()
        return self._timeline.take()

    def decide(self) -> tuple[Timings, Arrival | None]:
        """Timed runs: simulate up to the next arrival, or to where more operations are needed."""
        arrival = self._timeline.advance()
        return self._timeline.take(), arrival

    def reply(self, worker: int, fragment: int, version: int, nbytes: int, itemsize: int) -> None:
        """Timed runs: send the coordinator's answer, at the moment of the last arrival."""
        self._timeline.reply(worker, fragment, version, nbytes, itemsize)
