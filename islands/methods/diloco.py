"""DiLoCo: many local steps, then an outer optimizer on how far the workers moved.

Douillard et al. 2023, arXiv:2311.08105, Algorithm 1. Workers keep their inner optimizer's state for
ever: it is neither reset nor averaged. The pseudo-gradient is *anchor − local*, so that the outer
optimizer, which descends, moves towards the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from islands.compression import Payload, Update, decode, encode
from islands.layout import Layout, Stream
from islands.methods.base import Arrival, Context, Method, Shared, WorkerState, mean_of
from islands.optim import FlatOptimizer

#: Adam's epsilon for an outer step: pseudo-gradients are small, and 1e-8 would turn them into signs
#: (DiLoCo, appendix: Adam needed 0.1).
OUTER_ADAM_EPS = 0.1


class OuterOptimizer(BaseModel):
    """The optimizer of the shared parameters; its gradient is the averaged pseudo-gradient.

    ``momentum`` is Adam's beta 1 for ``adam`` and must be absent for ``sgd``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Literal["sgd", "momentum", "nesterov", "adam"] = "nesterov"
    lr: float = Field(0.7, gt=0, allow_inf_nan=False)
    momentum: float = Field(0.9, ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _by_name_and_sgd_without_momentum(cls, data: object) -> object:
        if isinstance(data, str):
            data = {"name": data}
        if isinstance(data, dict) and data.get("name") == "sgd":
            return {"momentum": 0.0, **data}
        return data

    @model_validator(mode="after")
    def _momentum_fits(self) -> OuterOptimizer:
        if self.name == "sgd" and self.momentum:
            raise ValueError("outer optimizer 'sgd' has no momentum; use 'momentum' or 'nesterov'")
        return self

    def build(self, params: torch.Tensor) -> FlatOptimizer:
        """The optimizer that updates ``params`` (n,) in place."""
        return FlatOptimizer(self.name, params, momentum=self.momentum, eps=OUTER_ADAM_EPS)


class PseudoGradient(Method):
    """The worker side of methods that send how far ``sync_every`` local steps went.

    A worker measures from its anchor, the shared value it last adopted.
    """

    sync_every: int = Field(50, ge=1)

    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        names = tuple(t.name for t in layout.tensors)
        return (Stream(names, period=self.sync_every, first=self.sync_every),)

    def begin(self, state: WorkerState, ctx: Context) -> None:
        state.slots["anchor"] = state.params.clone()

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        pseudo_gradient = state.slots["anchor"][part] - state.params[part]
        return Payload(encode(pseudo_gradient, self.payload_dtype), self.payload_dtype)

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        part = ctx.layout.fragments[fragment]
        state.params[part] = decode(update.values, update.fmt)
        state.slots["anchor"][part] = state.params[part]


class DiLoCo(PseudoGradient):
    """Inner optimizer for ``sync_every`` steps, then an outer step on the mean pseudo-gradient."""

    name: str = "diloco"
    outer: OuterOptimizer = OuterOptimizer()

    def begin_shared(self, shared: Shared) -> None:
        shared.slots["outer"] = [
            self.outer.build(shared.params[p]) for p in shared.layout.fragments
        ]

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        part = shared.layout.fragments[fragment]
        outer: FlatOptimizer = shared.slots["outer"][fragment]
        mean = mean_of(arrivals, self.payload_dtype)
        outer.step(mean.to(shared.params.dtype), self.outer.lr)
        return master_update(shared.params[part])


def master_update(params: torch.Tensor) -> Update:
    """The shared parameters themselves, in the masters' own precision: nothing is rounded twice."""
    fmt = "fp64" if params.dtype == torch.float64 else "fp32"
    return Update(encode(params, fmt), fmt)
