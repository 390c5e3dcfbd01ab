"""DeMo: each worker keeps a momentum of its own, and sends what moves fastest in it.

Peng, Quesnelle and Kingma 2024, arXiv:2411.19870, Algorithm 1. The gradient is folded into the
worker's momentum; the momentum's chunks are cosine-transformed; the largest coefficients of each
chunk are sent and leave the momentum, whose rest is the residual. Everyone merges what was
gathered, transforms it back and steps by its sign. That step is the method's own, at the learning
rate of the local step: ``optimizer.name`` plays no part. Weight decay is decoupled (0 unless set),
and ``optimizer.clip`` bounds each worker's own gradient, as the authors' configuration does.

The default learning rate is the model's, made for AdamW: a step by signs moves a weight as far as
one of Adam's, and the authors use one rate for both.

With ``transform: tiles``, ``merge: senders``, fp32 values and a constant learning rate the updates
are those of the authors' optimizer, up to rounding. It folds lr·gradient into its momentum, which
makes no difference to a sign as long as lr is constant. (Where a tensor's sparse form would be
larger than all of its values, all are sent here and only k of each chunk there.)

A median or trimmed mean is taken of the workers' values after the transform back, where every value
of a chunk is there; of coefficients, of which each worker sends others, little would be left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from islands.compression import Payload, SparseCode, Update, decode, rows_of_tensor
from islands.compression.dct import ChunkedDCT, Cut, blocks
from islands.layout import Layout
from islands.methods.base import (
    MEANS,
    Arrival,
    Context,
    Shared,
    WorkerState,
    dense_update,
    weighted_mean,
    weights_of,
)
from islands.methods.gathered import GatheredGradient, is_plain
from islands.policy import Mean


class DeMo(GatheredGradient):
    """The ``k`` largest cosine coefficients of each chunk of the momentum, every step.

    ``decay``      factor of the momentum per step
    ``chunk``      the longest side of a chunk
    ``k``          coefficients sent per chunk; all of them where a chunk is smaller
    ``transform``  flat: runs of the flattened tensor; tiles: matrices in two-dimensional tiles
    ``merge``      divide a coefficient's sum by the number of workers (the paper), or only by those
                   that sent it (the authors' implementation)
    ``apply``      step by the sign of what was merged, or by itself
    ``alpha``      how much of what was sent leaves the momentum
    """

    feedback: ClassVar[tuple[str, ...]] = ("momentum",)

    name: str = "demo"
    decay: float = Field(0.999, ge=0, le=1, allow_inf_nan=False)
    chunk: int = Field(64, ge=1, le=4096)  # the transform is a matrix of chunk × chunk
    k: int = Field(4, ge=1)
    transform: Cut = "flat"
    merge: Literal["workers", "senders"] = "workers"
    apply: Literal["sign", "identity"] = "sign"
    alpha: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        momentum = state.slot("momentum")[part]
        folded = torch.add(state.grad[part], momentum, alpha=self.decay)
        dct, code = self._chunks(ctx.layout, fragment)
        payload, where = code.write(dct.forward(folded))
        if not payload.is_finite():  # it will be refused: as if this gradient had never been
            self.keep(state, fragment, ctx)
            return payload
        self.keep(state, fragment, ctx, momentum=folded)
        values = decode(payload.values, code.fmt).to(folded)
        sent = torch.zeros_like(folded).index_copy_(0, where, values)
        torch.sub(folded, dct.inverse(sent), alpha=self.alpha, out=momentum)
        return payload

    @property
    def means(self) -> tuple[Mean, ...]:
        return MEANS if self.merge == "workers" else ("mean",)

    def direction(self, merged: Tensor) -> Tensor:
        return merged.sign() if self.apply == "sign" else merged

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        dct, code = self._chunks(shared.layout, fragment)
        if self.merge == "senders":
            return dense_update(dct.inverse(_mean_of_senders(code, arrivals)))
        if is_plain(shared, arrivals):
            merged, _ = code.total([arrival.payload for arrival in arrivals])
            return dense_update(dct.inverse(merged.div_(len(arrivals))))
        sent = (dct.inverse(code.total([arrival.payload])[0]) for arrival in arrivals)
        return dense_update(weighted_mean(sent, code.wide, weights_of(arrivals), shared))

    def _chunks(self, layout: Layout, fragment: int) -> _Chunks:
        settings = (self.chunk, self.k, self.transform, self.payload_dtype)
        return _chunks(layout, fragment, *settings)


def _mean_of_senders(code: SparseCode, arrivals: Sequence[Arrival]) -> Tensor:
    """Each coefficient's weighted mean over those who sent it, 0 where nobody did; (n,)."""
    merged = torch.zeros(code.size, dtype=code.wide)
    weight = torch.zeros_like(merged)
    for arrival in arrivals:
        values, where = code.total([arrival.payload])
        merged.add_(values, alpha=arrival.weight)
        weight[where] += arrival.weight
    return merged.div_(torch.where(weight == 0, 1.0, weight))


class _Chunks(NamedTuple):
    dct: ChunkedDCT
    code: SparseCode


@lru_cache(maxsize=16)
def _chunks(
    layout: Layout,
    fragment: int,
    chunk: int,
    k: int,
    cut: Cut,
    fmt: str,
) -> _Chunks:
    """A fragment's chunks, and a code with one row for each."""
    part = layout.fragments[fragment]
    grids = []
    rows = []
    for tensor in layout.of_fragment(fragment):
        start = tensor.offset - part.start
        found = blocks(tensor, start, chunk, cut)
        widths = [(block.h * block.w, block.chunks) for block in found]
        grids += found
        rows += rows_of_tensor(start, widths, k, fmt)
    return _Chunks(ChunkedDCT(grids), SparseCode(part.stop - part.start, rows, fmt))
