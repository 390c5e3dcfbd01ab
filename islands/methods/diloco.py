"""DiLoCo: many local steps, then an outer optimizer on how far the workers moved.

Douillard et al. 2023, arXiv:2311.08105, Algorithm 1. Workers keep their inner optimizer's state for
ever: it is neither reset nor averaged. The pseudo-gradient is *anchor − local*, so that the outer
optimizer, which descends, moves towards the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from islands.compression import Payload, Update, decode, encode
from islands.compression.trim import RowTrim
from islands.layout import Layout, Stream
from islands.methods.base import (
    MEANS,
    Arrival,
    Collective,
    Context,
    Method,
    Shared,
    WorkerState,
    dense_update,
    mean_of,
    weighted_mean,
    weights_of,
)
from islands.optim import FlatOptimizer
from islands.policy import Mean

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

    A worker measures from its anchor, the shared value it last adopted. Where a whole period lies
    between sending and applying (``lag``), a payload has left before the previous result came, so
    a phase is measured from where it began instead: from what the worker adopted, or, before the
    first result, from its own parameters at the previous send. Each local step is so sent once.

    ``weights``  how much each worker counts in the average: the same, or by the tokens in its shard
                 (the paper's choice where shards are not i.i.d.); running statistics are always
                 averaged with equal weights
    ``prune``    the share of each output row that is not sent (see
                 :mod:`islands.compression.trim`). Workers then send different positions, so their
                 payloads are all-gathered, and a receiver averages them unrounded. From a few
                 workers on this puts *more* on the wire than a ring all-reduce of everything: p − 1
                 times the smaller payload against 2(p − 1)/p times the full one.
    """

    anchored: ClassVar[bool] = True

    sync_every: int = Field(50, ge=1)
    weights: Literal["uniform", "shard"] = "uniform"
    prune: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False)

    @property
    def collective(self) -> Collective:
        return "all_gather" if self.prune else "all_reduce"

    @property
    def means(self) -> tuple[Mean, ...]:
        return MEANS

    @property
    def lag(self) -> int:
        """Local steps between sending a fragment and applying the result."""
        return 0

    @property
    def measures_anew(self) -> bool:
        return self.lag < self.sync_every

    @property
    def kept(self) -> float:
        """The share of a worker's own value that is left when it applies a result."""
        return 0.0

    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        names = tuple(t.name for t in layout.tensors)
        return (Stream(names, period=self.sync_every, first=self.sync_every, overlap=self.lag),)

    def begin(self, state: WorkerState, ctx: Context) -> None:
        state.slots["anchor"] = state.params.clone()

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        anchor, local = state.slots["anchor"][part], state.params[part]
        payload = self.write(state, fragment, anchor - local, ctx)
        if self.lag == self.sync_every:
            anchor.copy_(local)
        return payload

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        part = ctx.layout.fragments[fragment]
        self.adopt(state, part, decode(update.values, update.fmt))

    def adopt(self, state: WorkerState, part: slice, outer: torch.Tensor) -> None:
        """local ← kept·local + (1 − kept)·outer. The next anchor is the outer value, not the mixed
        one: the steps since the send, which are kept in part, were not sent yet. With a whole
        period's lag they were, and a phase begins at the mixed value."""
        anchor, local = state.slots["anchor"][part], state.params[part]
        if not self.kept:
            local.copy_(outer)
            anchor.copy_(local)
            return
        outer = outer.to(local)
        torch.lerp(outer, local, self.kept, out=local)
        if self.lag == self.sync_every:
            torch.lerp(outer, anchor, self.kept, out=anchor)
        else:
            anchor.copy_(outer)

    def write(
        self, state: WorkerState, fragment: int, pseudo_gradient: torch.Tensor, ctx: Context
    ) -> Payload:
        """The payload of a pseudo-gradient (n,)."""
        if self.prune:
            return self._trim(ctx.layout, fragment).write(pseudo_gradient)
        return Payload(encode(pseudo_gradient, self.payload_dtype), self.payload_dtype)

    def read(self, layout: Layout, fragment: int, payload: Payload) -> torch.Tensor:
        """What was sent, (n,), zero where nothing was."""
        if self.prune:
            return self._trim(layout, fragment).read(payload)
        return decode(payload.values, self.payload_dtype)

    def reanchor(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        """The parameters go on from where they are (DiLoCo, section 3.2, dropped messages); what
        was not received is then part of the next pseudo-gradient. With a whole period's lag that
        was already sent, and a phase goes on from where it began."""
        if self.lag == self.sync_every:
            return
        anchor = state.slots["anchor"][ctx.layout.fragments[fragment]]
        anchor.copy_(decode(update.values, update.fmt))

    def average(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> torch.Tensor:
        """The round's mean pseudo-gradient as a receiver holds it, fp32 (fp64 for fp64); (n,)."""
        weights = self._weights(shared, arrivals)
        if self.collective == "all_reduce":
            return mean_of(arrivals, self.payload_dtype, weights, shared)
        wide = torch.float64 if self.payload_dtype == "fp64" else torch.float32
        sent = self._sent(shared, fragment, arrivals)
        return weighted_mean(sent, wide, weights_of(arrivals, weights), shared)

    def similarity(
        self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]
    ) -> torch.Tensor | None:
        return cosines(self._sent(shared, fragment, arrivals))

    def _trim(self, layout: Layout, fragment: int) -> RowTrim:
        return RowTrim(layout.of_fragment(fragment), self.prune, self.payload_dtype)

    def _sent(
        self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]
    ) -> list[torch.Tensor]:
        return [self.read(shared.layout, fragment, arrival.payload) for arrival in arrivals]

    def _weights(self, shared: Shared, arrivals: Sequence[Arrival]) -> list[float]:
        """In units of the largest, so that equal shards give exactly the uniform mean."""
        if self.weights == "uniform":
            return [1.0] * len(arrivals)
        sizes = [shared.shard_sizes[arrival.worker] for arrival in arrivals]
        return [size / max(sizes) for size in sizes]


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
        mean = self.average(shared, fragment, arrivals)
        outer.step(mean.to(shared.params.dtype), self.outer.lr)
        return dense_update(shared.params[part])


#: Coordinates that are compared together: bounds the memory.
_TOGETHER = 1 << 18


def cosines(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pairwise cosines of vectors (n,): (vectors, vectors) in float64; NaN beside a zero vector."""
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for begin in range(0, len(vectors[0]), _TOGETHER):
        part = torch.stack([v[begin : begin + _TOGETHER] for v in vectors]).double()
        products += part @ part.T
    norms = products.diagonal().sqrt()
    return (products / torch.outer(norms, norms)).clamp_(-1.0, 1.0)
