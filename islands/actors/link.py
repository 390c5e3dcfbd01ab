"""The LinkActor: the network of one experiment, in a process of its own.

It sees metadata only (who sends how many bytes when what is finished), never a payload, and does
not load torch. On the wall clock it holds deliveries back until their moment has come.
"""

from __future__ import annotations

from collections.abc import Sequence

from islands.network import Event, Timings
from islands.network.emulation import Emulation
from islands.network.timed import Action, Result
from islands.trace import Op


class LinkActor:
    """Gives operations their emulated times (see :mod:`islands.network.emulation`)."""

    def set_up(self, emulation: Emulation) -> None:
        """Begin a run: idle links, clocks at zero, the initial model handed out."""
        self._network = emulation.network()

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        """Take in more of the graph."""
        self._network.extend(ops)

    def time(self, ops: Sequence[tuple[int, Op]]) -> Timings:
        """Take in more of the graph, simulate as far as it goes, and give the times known by
        now."""
        self._network.extend(ops)
        (timings,) = self._network.results(wait=True)
        return timings

    def decide(self, hold_s: float) -> tuple[Timings, Event | None, float]:
        """As :class:`islands.protocols.Network`; on the wall clock this actor sleeps meanwhile."""
        return self._network.decide(hold_s)

    def act(self, actions: Sequence[Action]) -> Sequence[Result]:
        """Timed runs: do all this, in order, at the moment of the latest event."""
        return self._network.act(actions)

    def end(self) -> Timings:
        """The final totals, and all that was not handed out before."""
        return self._network.end()
