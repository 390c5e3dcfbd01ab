"""Runs with overlap that can be followed by hand: three scalars and inner steps without a gradient,
and the outer algebra once more in plain Python, one scalar at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import Abc, Run, cluster, experiment, train
from torch import nn

from islands.layout import Layout, Stream
from islands.methods import (
    CO2,
    Context,
    Delayed,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    Method,
    SlowMo,
    StreamingDiLoCo,
    WorkerState,
)
from islands.rng import generator

#: Worker w's inner step: x becomes x/2 − (w + 1).
WORKERS = 2
PAIR = cluster((1, 1), (0.1, 0.1))


def build_abc64() -> nn.Module:
    """Three float64 scalars and the loss a + 100 b + 10,000 c."""
    return Abc().double()


class Halving(Method):
    """The inner step above: where a worker stands matters for where it goes."""

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        state.params.mul_(0.5).sub_(state.worker + 1)
        return 0.0


class HalvingStreaming(Halving, StreamingDiLoCo):
    """Streaming DiLoCo that can be followed by hand."""


class HalvingDiLoCo(Halving, DiLoCo):
    """DiLoCo that can be followed by hand."""


class HalvingLocal(Halving, LocalSGD):
    """Local SGD that can be followed by hand."""


class HalvingDelayed(Halving, Delayed):
    """Delayed DiLoCo that can be followed by hand."""


class HalvingEager(Halving, EagerDiLoCo):
    """Eager DiLoCo that can be followed by hand."""


class HalvingSlowMo(Halving, SlowMo):
    """SlowMo that can be followed by hand."""


class HalvingCO2(Halving, CO2):
    """CO2 that can be followed by hand."""


class Recorded(Method):
    """Inner steps that were drawn beforehand: the same for a tensor whatever else is done."""

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        for t in ctx.layout.tensors:
            draw = generator(0, "recorded", t.name, state.worker, state.step)
            moves = torch.from_numpy(draw.standard_normal(t.numel)).to(state.params)
            state.params[t.slice] += moves
        return 0.0


class RecordedStreaming(Recorded, StreamingDiLoCo):
    """Streaming over recorded inner steps."""


class RecordedAt(Recorded, DiLoCo):
    """DiLoCo over recorded inner steps, first sent after step ``first``."""

    first: int

    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        names = tuple(t.name for t in layout.tensors)
        return (Stream(names, period=self.sync_every, first=self.first),)


def halving(name: str, steps: int, **settings: Any) -> Run:
    """Two workers, evaluated after every step, payloads in float64."""
    run = train(
        experiment(
            "overlapping:build_abc64",
            method={"name": f"overlapping:{name}", "payload_dtype": "fp64", **settings},
            cluster=PAIR,
            steps=steps,
            eval={"every": 1, "windows": 1},
        )
    )
    assert run.error is None
    return run


def nesterov(lr: float, momentum: float) -> Callable[[float], float]:
    """An outer optimizer of one scalar: how far a gradient moves it (torch's form)."""
    buffer: list[float] = []

    def move(gradient: float) -> float:
        buffer[:] = [momentum * buffer[0] + gradient] if buffer else [gradient]
        return -lr * (gradient + momentum * buffer[0])

    return move


def follow(
    *,
    first: int,
    period: int,
    overlap: int,
    alpha: float,
    steps: int,
    move: Callable[[float], float],
) -> tuple[list[float], list[float]]:
    """The outer value of one scalar after each step, and the workers' own at the end."""
    outer = 0.0
    local = [0.0] * WORKERS
    anchor = [0.0] * WORKERS
    flying: list[tuple[int, float]] = []  # lands after step, mean pseudo-gradient
    course = [outer]

    def send(step: int) -> None:
        gap = [anchor[w] - local[w] for w in range(WORKERS)]
        flying.append((step + overlap, sum(gap) / WORKERS))
        if overlap == period:
            anchor[:] = local

    def land(until: int) -> None:
        nonlocal outer
        while flying and flying[0][0] <= until:
            outer += move(flying.pop(0)[1])
            for w in range(WORKERS):
                local[w] = alpha * local[w] + (1 - alpha) * outer
                begun = alpha * anchor[w] + (1 - alpha) * outer
                anchor[w] = begun if overlap == period else outer

    for step in range(1, steps + 1):
        local[:] = [x / 2 - (w + 1) for w, x in enumerate(local)]
        due = step >= first and (step - first) % period == 0
        if due:
            send(step)
        land(step)
        if step == steps:
            land(steps + overlap)
            if not due:
                send(steps)
                land(steps + overlap)
        course.append(outer)
    return course, local


def losses(courses: Sequence[Sequence[float]]) -> list[float]:
    """The losses of a model whose scalars a, b, c take these courses."""
    return [a + 100 * b + 10_000 * c for a, b, c in zip(*courses, strict=True)]
