"""Whom the engine talks to: workers, network and recorder, as protocols, and what it tells them.

Each has an implementation in this process and one that is an actor, and the engine sees no
difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from islands.compression import Update
from islands.plan import Answer, PlanOp
from islands.trace import Op

if TYPE_CHECKING:
    from islands.network.timed import Action, Result
    from islands.network.timings import Event, Timings


class Workers(Protocol):
    """Where plans are carried out. Answers may come in any order."""

    def share(self, update: Update) -> Update:
        """Make one update cheap to hand to many workers; what is returned goes into ``start``."""
        ...

    def start(self, worker: int, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> None:
        """Begin a plan; each worker has at most one under way."""
        ...

    def answers(self, everyone: bool, within_s: float = inf) -> Iterable[tuple[int, Answer]]:
        """Wait for plans to end: for all of them under way, or for at least one; no longer than
        ``within_s``, if waiting is all that is done meanwhile."""
        ...


class Network(Protocol):
    """What gives the operations their times (:class:`islands.network.emulation.LocalNetwork`, or
    an actor of it)."""

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        """Operations in each worker's order; returns at once."""
        ...

    def results(self, wait: bool) -> Iterable[Timings]:
        """Times that are known by now; with ``wait``, of everything handed in so far."""
        ...

    def decide(self, hold_s: float) -> tuple[Timings, Event | None, float]:
        """Timed runs: simulate up to the next event, or to where more operations are needed
        (None). On the wall clock, timed or not: what is due by now, after at most ``hold_s`` of
        waiting if nothing is; and the seconds to what is due next (infinite if nothing will be
        without more operations)."""
        ...

    def act(self, actions: Sequence[Action]) -> Sequence[Result]:
        """Timed runs: do all this, in order, at the moment of the latest event; what each gives
        back. A worker that was killed gets no operations before it is revived."""
        ...

    def end(self) -> Timings:
        """The final totals, and all that was not handed out before."""
        ...


class Part(NamedTuple):
    """One worker's part in a closed round: what it sent as (fragment, version), its fate, and the
    number of the fragment's round, which for most is the version."""

    worker: int
    fragment: int
    version: int
    status: str  # ok | dropped | late | rejected | absent
    number: int
    passes: bool = True  # whether the network tells when the worker went on, unless it was absent
    used: bool = False  # a late contribution that counts in a later round
    unheard: bool = False  # the result is lost on its way to the worker
    first: bool = False  # of its round


class Likeness(NamedTuple):
    """How alike the contributions of two workers to a round were; None beside a zero vector."""

    fragment: int
    version: int
    step: int
    worker: int
    other: int
    cosine: float | None


class Recorder(Protocol):
    """What keeps the results."""

    def losses(self, worker: int, losses: Sequence[float]) -> None: ...
    def absent(self, worker: int, first: int, last: int) -> None: ...
    def closed(self, parts: Sequence[Part]) -> None: ...
    def missed(self, parts: Sequence[Part]) -> None: ...
    def stopped(self, worker: int, step: int) -> None: ...
    def spent(self, wire_bytes: int) -> None: ...
    def lost(self, kind: str, worker: int, seconds: float) -> None: ...
    def event(self, emulated_s: float, kind: str, subject: str, detail: str) -> None: ...
    def compared(self, pairs: Sequence[Likeness]) -> None: ...
    def unused(self, nbytes: int) -> None: ...
    def evaluated(self, step: int, loss: float, time_s: float | None = None) -> None: ...
    def traced(self, ops: Sequence[tuple[int, Op]]) -> None: ...
    def timed(self, timings: Timings) -> None: ...
