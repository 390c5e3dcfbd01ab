"""SPARTA: everyone trains alone, and each step a random sliver of the parameters is averaged.

Exo 2025, "Sparse parameter averaging". Which coordinates they are is drawn from the seed and the
step, the same on every worker, so that only values travel and an all-reduce can carry them. The
replicas differ from each other; the shared model is their mean.

A worker sends the *difference* to what the coordinate was when it was last averaged, which is the
same number on every worker: a low-precision wire then rounds a small step and never the parameters
themselves. What comes back is the coordinate's new value, so that a worker that missed a round, or
has just come, agrees with the others again. Inner optimizer, clipping and weight decay are the
worker's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from islands.compression import Payload, Update, decode, encode
from islands.methods.base import (
    MEANS,
    Arrival,
    Context,
    Method,
    Shared,
    WorkerState,
    dense_update,
    mean_of,
)
from islands.policy import Mean
from islands.rng import generator


class Sparta(Method):
    """``fraction`` of the coordinates, at least one, is averaged after every step."""

    shared_in: ClassVar[Literal["coordinator", "replicas", "diverged"]] = "diverged"
    anchored: ClassVar[bool] = True
    takes_late: ClassVar[bool] = False  # another round averages other coordinates

    name: str = "sparta"
    fraction: float = Field(0.005, gt=0, le=1, allow_inf_nan=False)

    @property
    def means(self) -> tuple[Mean, ...]:
        return MEANS

    def begin(self, state: WorkerState, ctx: Context) -> None:
        state.slots["averaged"] = state.params.clone()

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        chosen = self._chosen(ctx.seed, part, fragment, state.step).to(state.params.device)
        moved = state.params[part][chosen] - state.slots["averaged"][part][chosen]
        return Payload(encode(moved, self.payload_dtype), self.payload_dtype)

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        self.reanchor(state, fragment, update, ctx)
        part = ctx.layout.fragments[fragment]
        chosen = self._chosen(ctx.seed, part, fragment, state.step).to(state.params.device)
        state.params[part][chosen] = state.slots["averaged"][part][chosen]

    def reanchor(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        """What the worker has moved since then is still its own, and is sent when the coordinate's
        turn comes again."""
        part = ctx.layout.fragments[fragment]
        chosen = self._chosen(ctx.seed, part, fragment, state.step).to(state.params.device)
        averaged = state.slots["averaged"][part]
        averaged[chosen] = decode(update.values, update.fmt).to(averaged)

    def begin_shared(self, shared: Shared) -> None:
        shared.slots["averaged"] = shared.params.clone()

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        part = shared.layout.fragments[fragment]
        chosen = self._chosen(shared.seed, part, fragment, arrivals[0].step)
        averaged = shared.slots["averaged"][part]
        averaged[chosen] += mean_of(arrivals, self.payload_dtype, shared=shared).to(averaged)
        return dense_update(averaged[chosen])

    def _chosen(self, seed: int, part: slice, fragment: int, step: int) -> Tensor:
        size = part.stop - part.start
        return _chosen(seed, fragment, step, size, min(size, max(1, round(size * self.fraction))))


@lru_cache(maxsize=4)
def _chosen(seed: int, fragment: int, step: int, size: int, count: int) -> Tensor:
    """``count`` of ``size`` coordinates, ascending: those of one round, for every worker alike."""
    draw = generator(seed, "sparta", fragment, step)
    found = draw.choice(size, count, replace=False, shuffle=False)
    found.sort()
    return torch.from_numpy(found)
