"""Streaming DiLoCo: fragments that take turns, travel while training goes on, in few bits.

Douillard et al. 2025, arXiv:2501.18512, Algorithm 2. Every ``sync_every`` steps each fragment's
pseudo-gradient is sent, at a moment of its own; what comes back ``overlap`` steps later is an outer
step from the current outer value, which the worker mixes into its own. Each of the three parts has
its setting, and with one fragment, no overlap and alpha 0 this is DiLoCo, bit for bit.

Two things follow from the algebra. alpha is felt without overlap too: what a worker keeps of its
own enters its next pseudo-gradient. And with alpha 0 the ``overlap`` steps that were taken while a
fragment travelled are overwritten when it arrives.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import Field, model_validator

from islands.compression import CODE_BITS, BlockCode, Payload, Update, WireFormat
from islands.fragments import Cut, Embeddings, Pattern, cut
from islands.layout import Layout, Stream
from islands.methods.base import Collective, Context, WorkerState
from islands.methods.diloco import DiLoCo
from islands.settings import FieldError


class StreamingDiLoCo(DiLoCo):
    """DiLoCo over several fragments, with overlap, mixing and quantised pseudo-gradients.

    ``fragments``       how many, embeddings included; 1: the whole model
    ``pattern``         block j goes to fragment j mod P (strided), or blocks go in runs
    ``embeddings``      one fragment of their own with the head, joined to the first one, or split:
                        the first fragment and, for the head, the last
    ``overlap``         local steps between sending a fragment and applying the result; when a whole
                        period, see :class:`islands.methods.diloco.PseudoGradient`
    ``alpha``           the share of its own value that a worker keeps when a result arrives
    ``payload_dtype``   int8, int4, e2m1 and e3m0 are codes with scales beside them: they cannot be
                        added on the way, so they are all-gathered and summed in fp32
    ``scale_block``     values per scale; null: one scale per tensor
    ``error_feedback``  what the number format lost is added to the next pseudo-gradient
    """

    feedback: ClassVar[tuple[str, ...]] = ("residual",)

    name: str = "streaming_diloco"
    payload_dtype: WireFormat = "bf16"  # type: ignore[assignment]  # more formats than the others'
    fragments: int = Field(1, ge=1)
    pattern: Pattern = "strided"
    embeddings: Embeddings = "own"
    overlap: int = Field(0, ge=0)
    alpha: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    scale_block: int | None = Field(None, ge=1)
    error_feedback: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> StreamingDiLoCo:
        if self.overlap > self.sync_every:
            raise FieldError(
                "overlap",
                f"{self.overlap} is too large; it must be at most a fragment's period, "
                f"sync_every {self.sync_every}",
            )
        if self.scale_block is not None and not self._coded:
            raise FieldError(
                "scale_block",
                f"{self.scale_block} has no use with payload_dtype {self.payload_dtype!r}; leave "
                f"it out or choose {', '.join(CODE_BITS)}",
            )
        if self.prune and (self._coded or self.error_feedback):
            other = "error_feedback" if self.error_feedback else f"payload_dtype {self._dtype!r}"
            raise FieldError("prune", f"{self.prune:g} cannot be combined with {other}; use 0")
        return self

    @property
    def _dtype(self) -> str:
        return self.payload_dtype

    @property
    def _coded(self) -> bool:
        return self._dtype in CODE_BITS

    @property
    def collective(self) -> Collective:
        return "all_gather" if self._coded else super().collective

    @property
    def lag(self) -> int:
        return self.overlap

    @property
    def kept(self) -> float:
        return self.alpha

    @property
    def restores(self) -> bool:
        return not self.error_feedback or self.overlap < self.sync_every

    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        pieces = self._cut(layout).fragments
        period, lag = self.sync_every, self.overlap
        firsts = self._firsts()
        return tuple(Stream(p, period, f, lag) for p, f in zip(pieces, firsts, strict=True))

    def notes(self, layout: Layout) -> tuple[str, ...]:
        notes = self._cut(layout).notes
        if self.sync_every % self.fragments:
            steps = ", ".join(str(first) for first in self._firsts())
            notes += (
                f"sync_every {self.sync_every} is no multiple of {self.fragments} fragments: they "
                f"are first sent after steps {steps}",
            )
        return notes

    def _firsts(self) -> list[int]:
        count = self.fragments
        return [max(1, (p + 1) * self.sync_every // count) for p in range(count)]

    def _cut(self, layout: Layout) -> Cut:
        return cut(layout, self.fragments, self.pattern, self.embeddings)

    def write(
        self, state: WorkerState, fragment: int, pseudo_gradient: torch.Tensor, ctx: Context
    ) -> Payload:
        if not self.error_feedback:
            return self._encoded(state, fragment, pseudo_gradient, ctx)
        residual = state.slot("residual")[ctx.layout.fragments[fragment]]
        accumulated = pseudo_gradient + residual
        payload = self._encoded(state, fragment, accumulated, ctx)
        state.slots.pop(_lost(fragment), None)
        if payload.is_finite():  # else it will be refused
            self.keep(state, fragment, ctx, residual=residual.clone())
            if ctx.may_lose:
                state.slots[_sent(fragment)] = pseudo_gradient
            sent = self.read(ctx.layout, fragment, payload)
            residual.copy_(accumulated - sent.to(accumulated))
        else:
            self.keep(state, fragment, ctx)
        return payload

    def lost(self, state: WorkerState, fragment: int, ctx: Context) -> None:
        """The residual is again as it was. The pseudo-gradient itself is still in the parameters,
        and so in the next one, unless the worker adopts the round's result."""
        super().lost(state, fragment, ctx)
        sent = state.slots.pop(_sent(fragment), None)
        if sent is not None:
            state.slots[_lost(fragment)] = sent

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        super().receive(state, fragment, update, ctx)
        lost = state.slots.pop(_lost(fragment), None)
        if lost is not None:  # but for what is kept, it is in the parameters no longer
            residual = state.slot("residual")[ctx.layout.fragments[fragment]]
            residual.add_(lost, alpha=1.0 - self.kept)

    def _encoded(
        self, state: WorkerState, fragment: int, values: torch.Tensor, ctx: Context
    ) -> Payload:
        if self._coded:
            return self._code(ctx.layout, fragment).write(values)
        return super().write(state, fragment, values, ctx)

    def read(self, layout: Layout, fragment: int, payload: Payload) -> torch.Tensor:
        if self._coded:
            return self._code(layout, fragment).read(payload)
        return super().read(layout, fragment, payload)

    def _code(self, layout: Layout, fragment: int) -> BlockCode:
        sizes = tuple(t.numel for t in layout.of_fragment(fragment))
        return _code(sizes, self._dtype, self.scale_block)


def _sent(fragment: int) -> str:
    return f"pseudo-gradient of {fragment}"


def _lost(fragment: int) -> str:
    return f"pseudo-gradient lost of {fragment}"


@lru_cache(maxsize=64)
def _code(sizes: tuple[int, ...], fmt: str, block: int | None) -> BlockCode:
    return BlockCode(sizes, fmt, block)
