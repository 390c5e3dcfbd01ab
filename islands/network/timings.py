"""What a timeline finds out: moments of steps and rounds, clocks, and where the waiting went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from islands.network.ledger import LinkTotals, TransferRow

if TYPE_CHECKING:
    from islands.network.pace import Pace


class Arrival(NamedTuple):
    """A worker's contribution has reached the coordinator at ``time_s``, or, where there is none
    to reach, the worker has its part of a collective ready."""

    time_s: float
    worker: int
    fragment: int
    version: int


class Closed(NamedTuple):
    """The launched collective ``number`` has ended for the last of its members at ``time_s``."""

    time_s: float
    number: int


class Wake(NamedTuple):
    """The moment ``time_s`` that was asked for under ``tag`` has come."""

    time_s: float
    tag: int


#: At what a timed run stops for a decision. At one moment they come in this order, then by number.
Event: TypeAlias = Arrival | Closed | Wake


class Spent(NamedTuple):
    """Wire bytes of a worker's part in a round that no :class:`SyncTiming` tells of: the collective
    was aborted, or the worker died before it went on with the result."""

    time_s: float
    worker: int
    fragment: int
    version: int
    wire_bytes: int


class SyncTiming(NamedTuple):
    """One worker's passage through one round: ready to send, done receiving, time spent waiting.

    ``passed_s`` is when it went on with the result, which may have been there before.
    """

    fragment: int
    version: int
    worker: int
    step: int
    ready_s: float
    done_s: float
    wait_s: float
    wire_bytes: int
    passed_s: float


class WorkerClock(NamedTuple):
    """How far a worker has come, and what it spent its emulated time on.

    Computing, waiting and being away (``away_s``: left, not there yet, or dead) make up
    ``clock_s``. The five between say where its waiting went and sum to ``wait_s``. A wait ends when
    the last of a chain of transfers arrives; the chain begins with some worker that was ready. What
    lies before that is ``others_s``; along the chain, the time is spent queueing behind other jobs
    (``background_s``) or transfers of this run (``queue_s``), propagating, or being transmitted. If
    this worker began to wait in the middle of the chain, each gets its share of what was left.
    """

    compute_s: float = 0.0
    wait_s: float = 0.0
    clock_s: float = 0.0
    background_s: float = 0.0
    queue_s: float = 0.0
    transmission_s: float = 0.0
    propagation_s: float = 0.0
    others_s: float = 0.0
    away_s: float = 0.0


@dataclass
class Timings:
    """What became known since the last :meth:`Timeline.take`.

    ``steps`` holds (worker, first step, starts, ends), the last two float64 arrays in seconds.
    ``marks`` holds (step, moment when the last worker passed it), ``now_s`` is how far a timed run
    has come. ``spent`` has the wire bytes that
    are in no sync: those of all syncs and these are the run's. ``clocks`` has every worker's as
    of now, ``links`` the totals so far of every link. ``stalled`` says why the run can never go on.
    In the end, ``pace`` says how well the wall clock was kept, and ``lost_s`` by how much each kind
    of fault of the network delayed the workers, summed over them.
    """

    steps: list[tuple[int, int, NDArray[np.float64], NDArray[np.float64]]] = field(
        default_factory=list
    )
    syncs: list[SyncTiming] = field(default_factory=list)
    transfers: list[TransferRow] = field(default_factory=list)
    marks: list[tuple[int, float]] = field(default_factory=list)
    spent: list[Spent] = field(default_factory=list)
    clocks: list[WorkerClock] = field(default_factory=list)
    links: dict[str, LinkTotals] = field(default_factory=dict)
    now_s: float = 0.0
    stalled: str | None = None
    pace: Pace | None = None
    lost_s: dict[str, float] = field(default_factory=dict)


def wait_parts(
    why: tuple[float, float, float, float, float], clock_s: float, done_s: float
) -> tuple[float, float, float, float, float]:
    """Where the wait from ``clock_s`` to ``done_s`` went, as in a WorkerClock."""
    root_s, own_s, background_s, propagation_s, others_s = why
    span_s = done_s - root_s
    transmission_s = span_s - own_s - background_s - propagation_s - others_s
    if root_s >= clock_s:  # whoever the chain begins with was not ready yet
        others_s += root_s - clock_s
        return background_s, own_s, transmission_s, propagation_s, others_s
    share = (done_s - clock_s) / span_s
    return (
        background_s * share,
        own_s * share,
        transmission_s * share,
        propagation_s * share,
        others_s * share,
    )
