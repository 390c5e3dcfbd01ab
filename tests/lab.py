"""Methods on plain tensors, without a run: gradients are given, rounds are a function call.

Also a model whose tensors are of every awkward kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from islands.compression import Payload, Update
from islands.faults import KEPT, Fate
from islands.layout import Layout, TensorSpec
from islands.methods import Arrival, Context, Method, Shared, WorkerState

#: Prime sizes, smaller than a chunk, of 0, 1, 3 and 4 dimensions, and without any element.
ZOO = ((97,), (13, 7), (), (1,), (3, 5, 2), (2, 3, 4, 5), (0, 4), (64,), (65, 4), (3,), (130,))


def layout_of(shapes: Sequence[tuple[int, ...]]) -> Layout:
    """One fragment of tensors ``t0``, ``t1``, … of these shapes."""
    tensors: list[TensorSpec] = []
    offset = 0
    for n, shape in enumerate(shapes):
        tensors.append(TensorSpec(f"t{n}", shape, offset))
        offset += tensors[-1].numel
    return Layout(tuple(tensors), (slice(0, offset),))


class Lab:
    """Some workers of one method, all of which start from zero (or ``start``)."""

    def __init__(
        self,
        method: Method,
        shapes: Sequence[tuple[int, ...]] = ((8,),),
        workers: int = 1,
        *,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        clip: float | None = None,
        start: float = 0.0,
        dtype: torch.dtype = torch.float64,
        may_lose: bool = False,
    ) -> None:
        self.method = method
        self.layout = layout_of(shapes)
        self.lr = lr

        def gradient(state: WorkerState, batch: Any) -> float:
            state.grad.copy_(batch)
            return 0.0

        def optimize(state: WorkerState) -> None:
            state.params -= self.lr * state.grad

        self.context = Context(
            self.layout,
            workers,
            gradient,
            optimize,
            lambda: self.lr,
            weight_decay,
            clip,
            may_lose=may_lose,
        )
        first = torch.full((self.layout.numel,), start, dtype=dtype)
        self.states = [
            WorkerState(n, first.clone(), torch.zeros_like(first)) for n in range(workers)
        ]
        for state in self.states:
            method.begin(state, self.context)
        self.shared = Shared(self.layout, first.clone())
        method.begin_shared(self.shared)
        self.update: Update | None = None

    def send(self, gradients: Sequence[Tensor]) -> list[Payload]:
        """One local step of everyone, and what each of them sends."""
        for state, gradient in zip(self.states, gradients, strict=True):
            self.method.local_step(state, gradient, self.context)
            state.step += 1
        return [self.method.send(state, 0, self.context) for state in self.states]

    def round(
        self, gradients: Sequence[Tensor], fates: Mapping[int, Fate] = MappingProxyType({})
    ) -> list[Payload]:
        """A local step, a send, a combine of what is finite and arrives, and a receive.

        ``fates``: what becomes of some workers' parts.
        """
        payloads = self.send(gradients)
        arrivals = []
        for n, payload in enumerate(payloads):
            fate = fates.get(n, KEPT)
            if payload.is_finite() and not fate.up:
                arrivals.append(Arrival(n, payload, 0, self.states[n].step))
            elif fate.restore:
                self.method.lost(self.states[n], 0, self.context)
        if arrivals:
            self.update = self.method.combine(self.shared, 0, arrivals)
            for n, state in enumerate(self.states):
                fate = fates.get(n, KEPT)
                if not fate.down:
                    self.method.receive(state, 0, self.update, self.context)
                elif fate.reanchor:
                    self.method.reanchor(state, 0, self.update, self.context)
        return payloads

    @property
    def params(self) -> Tensor:
        """Worker 0's parameters."""
        return self.states[0].params


def draws(seed: int, rounds: int, workers: int, size: int) -> Tensor:
    """Gradients (rounds, workers, size) in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rounds, workers, size, generator=generator, dtype=torch.float64)


class Zoo(nn.Module):
    """Every tensor of ``ZOO`` is drawn to the batch's mean token; one more is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in ZOO)
        self.unused = nn.Parameter(torch.ones(5))

    def loss(self, tokens: Tensor) -> Tensor:
        mean = tokens.float().mean() / 16
        return torch.stack([((p - mean) ** 2).sum() for p in self.used]).sum() / 100


def build_zoo() -> nn.Module:
    """A model of awkward tensors with its own loss."""
    return Zoo()
