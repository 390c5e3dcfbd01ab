"""Eager DiLoCo: a worker's own new pseudo-gradient counts at once, the others' one round later.

Kale et al. 2025, arXiv:2502.12996. At the boundary t the mean of the last round is there, and in it
the worker's own term is replaced by the one that it is just sending:

    Δ̃_m = (1/M)·(Δ_m^t + Σ_{j≠m} Δ_j^{t−H})

Workers so take different outer steps, and each keeps outer parameters and outer momentum of its
own; the shared model is the mean of the outer parameters. Every pseudo-gradient counts exactly
once: in a worker's first result its own term was not counted before, so the new one comes on top of
it, and when the last round lands without a new one, only what was not counted yet is left of it.
A round whose result a worker does not get counts for nothing there, its own term included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch

from islands.compression import Payload, Update, decode
from islands.methods.base import (
    Arrival,
    Context,
    Shared,
    WorkerState,
    dense_update,
    weights_of,
)
from islands.methods.diloco import DiLoCo
from islands.policy import Mean

_OPTIMIZER = "outer."


class EagerDiLoCo(DiLoCo):
    """DiLoCo with one round of overlap and eager own updates: bytes as DiLoCo."""

    shared_in: ClassVar[Literal["coordinator", "replicas", "diverged"]] = "diverged"
    takes_late: ClassVar[bool] = False  # a worker has counted its own term by then

    name: str = "eager_diloco"

    @property
    def means(self) -> tuple[Mean, ...]:
        return ("mean",)  # of others a term can be replaced

    @property
    def lag(self) -> int:
        return self.sync_every

    def begin(self, state: WorkerState, ctx: Context) -> None:
        super().begin(state, ctx)
        state.slots["outer"] = state.params.clone()

    def shared_params(self, state: WorkerState) -> torch.Tensor:
        return state.slots["outer"]

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        payload = super().send(state, fragment, ctx)
        if payload.is_finite():  # else it will be refused
            fresh = state.slot("fresh")[ctx.layout.fragments[fragment]]
            fresh.copy_(self.read(ctx.layout, fragment, payload))
        return payload

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        self.reanchor(state, fragment, update, ctx)
        part = ctx.layout.fragments[fragment]
        self.adopt(state, part, state.slots["outer"][part])

    def reanchor(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        """The outer step alone."""
        part = ctx.layout.fragments[fragment]
        size = part.stop - part.start
        outer, fresh, counted = (state.slot(name)[part] for name in ("outer", "fresh", "counted"))
        received = decode(update.values, update.fmt).to(outer)
        mean, shares = received[:size], received[size:]
        share = float(shares[state.worker]) if state.worker < len(shares) else 0.0
        fresh.mul_(share)
        direction = mean + fresh - counted
        counted.copy_(fresh)
        fresh.zero_()
        self._step(state, outer, direction)

    def _step(self, state: WorkerState, outer: torch.Tensor, direction: torch.Tensor) -> None:
        """One step of the worker's own outer optimizer, whose state is in the worker's slots."""
        optimizer = self.outer.build(outer)
        names = [name for name in state.slots if name.startswith(_OPTIMIZER)]
        if names:
            optimizer.load_state_dict({n.removeprefix(_OPTIMIZER): state.slots[n] for n in names})
        optimizer.step(direction, self.outer.lr)
        for name, tensor in optimizer.state_dict().items():
            state.slots[_OPTIMIZER + name] = tensor

    def begin_shared(self, shared: Shared) -> None:
        """Nothing: outer states are the workers' own."""

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        """The mean pseudo-gradient, then each worker's share in it (0: it took no part)."""
        mean = self.average(shared, fragment, arrivals)
        weights = weights_of(arrivals, self._weights(shared, arrivals))
        shares = torch.zeros(1 + max(arrival.worker for arrival in arrivals), dtype=mean.dtype)
        for arrival, weight in zip(arrivals, weights, strict=True):
            shares[arrival.worker] = weight / sum(weights)
        return dense_update(torch.cat([mean, shares]))
