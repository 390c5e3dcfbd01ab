"""Top-k with error feedback: send the largest values, keep the rest for later.

Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887, Algorithm 1 with momentum correction
and momentum factor masking). Each worker folds its gradient into a momentum u and that into an
accumulator v, and sends the largest of v, tensor by tensor. The step is plain SGD with the average,
at the learning rate of the local step: the momentum is already inside, so ``optimizer.name`` plays
no part. Without momentum this is sparsified SGD with memory (Stich et al. 2018, arXiv:1809.07599).

What was *encoded* is subtracted from v, so that the rounding to ``payload_dtype`` is sent later
too. A payload that got lost leaves v and u as if nothing had been sent. Weight decay (0 unless set)
shrinks the parameters by learning rate times decay, outside of the momentum.

A median or trimmed mean is taken of the dense vectors that the payloads stand for, zero where a
worker sent nothing: a coordinate moves only if enough workers chose it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import Field

from islands.compression import Payload, SparseCode, Update, decode, rows_of_tensor
from islands.layout import Layout
from islands.methods.base import (
    Arrival,
    Context,
    Shared,
    WorkerState,
    dense_update,
    weighted_mean,
    weights_of,
)
from islands.methods.gathered import GatheredGradient, is_plain

#: The density that a warm-up starts from (Lin et al. 2018, section 3.3).
FIRST_DENSITY = 0.25


class TopK(GatheredGradient):
    """The top 1/``ratio`` of each tensor, at least one value, with error feedback.

    ``momentum``        factor of the local momentum; 0: none
    ``factor_masking``  forget the momentum where a value was sent
    ``clip_norm``       θ of the local rule: the worker's own gradient is bounded to θ/√p; None:
                        bounded to ``optimizer.clip`` as it is
    ``density_warmup``  local steps over which the density falls geometrically from 25 % to 1/ratio
    ``error_feedback``  False: what is not sent is lost (an ablation)
    ``dense_vectors``   tensors of one dimension or none send all of their values
    """

    default_lr: ClassVar[float | None] = 1.0
    feedback: ClassVar[tuple[str, ...]] = ("residual", "momentum")

    name: str = "topk"
    ratio: float = Field(16.0, ge=1, allow_inf_nan=False)
    momentum: float = Field(0.9, ge=0, lt=1, allow_inf_nan=False)
    factor_masking: bool = True
    clip_norm: float | None = Field(None, gt=0, allow_inf_nan=False)
    density_warmup: int = Field(0, ge=0)
    error_feedback: bool = True
    dense_vectors: bool = False

    @property
    def settled_after(self) -> int:
        return self.density_warmup

    def density(self, step: int) -> float:
        """The fraction of each tensor that is sent in local step ``step``, counted from 1."""
        last = 1 / self.ratio
        if step > self.density_warmup or last >= FIRST_DENSITY:
            return last
        progress = (step - 1) / self.density_warmup
        return float(FIRST_DENSITY * (last / FIRST_DENSITY) ** progress)

    def local_bound(self, ctx: Context) -> float | None:
        """Independent gradients of norm θ/√p add up to one of norm θ (Lin et al. 2018, 3.2)."""
        return ctx.clip if self.clip_norm is None else self.clip_norm / math.sqrt(ctx.workers)

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        momentum, residual = state.slot("momentum")[part], state.slot("residual")[part]
        corrected = torch.add(state.grad[part], momentum, alpha=self.momentum)
        accumulated = residual + corrected
        code = self._code(ctx.layout, fragment, state.step)
        payload, where = code.write(accumulated)
        if not payload.is_finite():  # it will be refused: as if this gradient had never been
            self.keep(state, fragment, ctx)
            return payload
        if self.error_feedback:
            sent = decode(payload.values, code.fmt).to(accumulated)
            if ctx.may_lose:
                self.keep(state, fragment, ctx, residual=accumulated.clone(), momentum=corrected)
            accumulated.index_add_(0, where, sent, alpha=-1)
            residual.copy_(accumulated)
        momentum.copy_(corrected)
        if self.factor_masking:
            momentum.index_fill_(0, where, 0.0)
        return payload

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        code = self._code(shared.layout, fragment, arrivals[0].step)
        if is_plain(shared, arrivals):
            total, _ = code.total([arrival.payload for arrival in arrivals])
            return dense_update(total.div_(len(arrivals)))
        dense = (
            self._code(shared.layout, fragment, arrival.step).total([arrival.payload])[0]
            for arrival in arrivals
        )
        return dense_update(weighted_mean(dense, code.wide, weights_of(arrivals), shared))

    def _code(self, layout: Layout, fragment: int, step: int) -> SparseCode:
        settings = (self.density(step), self.dense_vectors, self.payload_dtype)
        return _code(layout, fragment, *settings)


@lru_cache(maxsize=16)
def _code(
    layout: Layout,
    fragment: int,
    density: float,
    dense_vectors: bool,
    fmt: str,
) -> SparseCode:
    """One row per tensor."""
    part = layout.fragments[fragment]
    rows = []
    for tensor in layout.of_fragment(fragment):
        whole = dense_vectors and len(tensor.shape) < 2
        # 1/49 is a little less in binary; two of 98 values are meant.
        keep = tensor.numel if whole else max(1, int(tensor.numel * density + 1e-9))
        rows += rows_of_tensor(
            tensor.offset - part.start, [(tensor.numel, 1)], keep, fmt, chunked=False
        )
    return SparseCode(part.stop - part.start, rows, fmt, chunked=False)
