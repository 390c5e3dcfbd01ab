"""Plans: what the coordinator asks of a worker in one call, and what comes back.

A plan is all that a worker can do before it needs the coordinator again: apply an update, run nine
steps, send fragment 3. One call carries one plan, never one call per tensor or per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from islands.compression import Payload, Statistics
    from islands.compression.formats import Buffer


class Steps(NamedTuple):
    """Run ``count`` local steps."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs


class SendOut(NamedTuple):
    """Encode the fragment's payload and hand it over."""

    fragment: int


class Apply(NamedTuple):
    """Take in update number ``update`` of this call (None there: the round committed nothing).

    ``adopt`` False: only measure from it from now on, and keep the parameters.
    """

    fragment: int
    update: int
    adopt: bool = True


class Lost(NamedTuple):
    """What was sent of the fragment last did not arrive, and returns to the residual."""

    fragment: int


class Reset(NamedTuple):
    """Come back fresh after ``step`` local steps: all parameters, in layout order, the running
    statistics and, if it is there, the inner optimizer's state from update number ``update``; the
    method as at the beginning."""

    update: int
    step: int


class Snapshot(NamedTuple):
    """Hand over the parameters and buffers as they are, for an evaluation; ``whole``: and the inner
    optimizer's state, for a worker that joins replicas which must stay equal."""

    whole: bool = False


PlanOp: TypeAlias = Steps | SendOut | Apply | Snapshot | Lost | Reset


class Held(NamedTuple):
    """What a Snapshot found: parameters as bytes of the masters' type, running statistics, and the
    state of the inner optimizer if it was asked for."""

    params: Buffer
    buffers: Statistics | None
    optimizer: dict[str, Any] | None = None


class Answer(NamedTuple):
    """What one plan produced, in order. ``failure`` names the cause if the worker raised.

    ``payloads`` one per SendOut, ``losses`` one per local step, ``snapshots`` one per Snapshot.
    """

    payloads: list[Payload]
    losses: list[float]
    snapshots: list[Held]
    failure: str | None = None
