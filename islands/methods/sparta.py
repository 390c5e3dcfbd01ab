"""SPARTA: everyone trains alone, and each step a random sliver of the parameters is averaged.

Exo 2025, "Sparse parameter averaging". Which coordinates they are is drawn from the seed and the
step, the same on every worker, so that only values travel and an all-reduce can carry them. The
replicas differ from each other; the shared model is their mean.

A worker sends the *difference* to what the coordinate was when it was last averaged, which is the
same number on every worker: a low-precision wire then rounds a small step and never the parameters
themselves. Inner optimizer, clipping and weight decay are the worker's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from islands.compression import Payload, Update, decode, encode
from islands.methods.base import Arrival, Context, Method, Shared, WorkerState, mean_of
from islands.rng import generator


class Sparta(Method):
    """``fraction`` of the coordinates, at least one, is averaged after every step."""

    shared_in: ClassVar[Literal["coordinator", "replicas", "diverged"]] = "diverged"

    name: str = "sparta"
    fraction: float = Field(0.005, gt=0, le=1, allow_inf_nan=False)

    def begin(self, state: WorkerState, ctx: Context) -> None:
        state.slots["averaged"] = state.params.clone()

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        chosen = self._chosen(state, fragment, ctx)
        moved = state.params[part][chosen] - state.slots["averaged"][part][chosen]
        return Payload(encode(moved, self.payload_dtype), self.payload_dtype)

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        part = ctx.layout.fragments[fragment]
        chosen = self._chosen(state, fragment, ctx)
        averaged = state.slots["averaged"][part]
        averaged[chosen] += decode(update.values, update.fmt).to(averaged)
        state.params[part][chosen] = averaged[chosen]

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        mean = mean_of(arrivals, self.payload_dtype)
        return Update(encode(mean, self.payload_dtype), self.payload_dtype)

    def _chosen(self, state: WorkerState, fragment: int, ctx: Context) -> Tensor:
        part = ctx.layout.fragments[fragment]
        size = part.stop - part.start
        count = min(size, max(1, round(size * self.fraction)))
        return _chosen(ctx.seed, fragment, state.step, size, count).to(state.params.device)


@lru_cache(maxsize=4)
def _chosen(seed: int, fragment: int, step: int, size: int, count: int) -> Tensor:
    """``count`` of ``size`` coordinates, ascending: those of one round, for every worker alike."""
    draw = generator(seed, "sparta", fragment, step)
    found = draw.choice(size, count, replace=False, shuffle=False)
    found.sort()
    return torch.from_numpy(found)
