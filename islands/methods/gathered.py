"""What methods share that gather compressed gradients every step and take a step of their own.

A worker only computes its gradient; what it compressed travels in an all-gather, everyone decodes
the same sum, and so the replicas stay equal without ever sending a parameter. Of ``optimizer`` such
a method uses the learning rate with its schedule, the clipping of a worker's own gradient, and
decoupled weight decay (none unless asked for).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from islands.compression import Update, decode
from islands.methods.base import (
    MEANS,
    Arrival,
    Collective,
    Context,
    Method,
    Shared,
    WorkerState,
    clip_gradient,
    step_along,
)
from islands.policy import Mean


class GatheredGradient(Method):
    """The worker side around ``send``: the local gradient before it, the common step after it."""

    collective: ClassVar[Collective] = "all_gather"
    shared_in: ClassVar[Literal["coordinator", "replicas", "diverged"]] = "replicas"
    default_weight_decay: ClassVar[float] = 0.0
    feedback: ClassVar[tuple[str, ...]] = ("residual",)

    @property
    def means(self) -> tuple[Mean, ...]:
        return MEANS

    def local_bound(self, ctx: Context) -> float | None:
        """The largest norm that a worker's own gradient may have; None: any."""
        return ctx.clip

    def direction(self, merged: Tensor) -> Tensor:
        """What the step follows, from what was merged; both (n,)."""
        return merged

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        """Only the gradient, clipped on the worker: the step follows when the others' came."""
        loss = ctx.gradient(state, batch)
        clip_gradient(state, self.local_bound(ctx))
        return loss

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        step_along(state, fragment, self.direction(decode(update.values, update.fmt)), ctx)


def is_plain(shared: Shared, arrivals: Sequence[Arrival]) -> bool:
    """Whether the payloads' plain mean is asked for, all of one step and of the same weight: then
    it can be formed from their sum, before anything is made dense."""
    alike = all(a.weight == 1.0 and a.step == arrivals[0].step for a in arrivals)
    return alike and shared.mean == "mean"
