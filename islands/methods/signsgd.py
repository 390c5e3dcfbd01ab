"""One bit per value: signs with a scale, and what they got wrong is sent later.

EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847, Algorithm 1) on several workers, after 1-bit
SGD (Seide et al. 2014). Each worker adds its gradient to its residual, sends sign and mean
magnitude of every tensor, and keeps the difference. The step is plain SGD with the average at the
learning rate of the local step, so ``optimizer.name`` plays no part; the learning rate is outside
of the residual. ``optimizer.clip`` bounds each worker's own gradient; weight decay (0 unless set)
is decoupled. A median of what was sent is a majority vote that keeps the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from islands.compression import Payload, SignCode, Update
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
from islands.methods.gathered import GatheredGradient


class SignSGD(GatheredGradient):
    """Signs and a scale per tensor, every step.

    ``error_feedback``  False: what the signs got wrong is lost (an ablation)
    """

    default_lr: ClassVar[float | None] = 3.0

    name: str = "signsgd"
    error_feedback: bool = True

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        residual = state.slot("residual")[part]
        accumulated = residual + state.grad[part]
        code = self._code(ctx.layout, fragment)
        payload = code.write(accumulated)
        if not payload.is_finite():  # it will be refused: as if this gradient had never been
            self.keep(state, fragment, ctx)
        elif self.error_feedback:
            self.keep(state, fragment, ctx, residual=accumulated)
            residual.copy_(accumulated - code.read(payload).to(accumulated))
        return payload

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        code = self._code(shared.layout, fragment)
        parts = (code.read(arrival.payload) for arrival in arrivals)
        return dense_update(weighted_mean(parts, code.wide, weights_of(arrivals), shared))

    def _code(self, layout: Layout, fragment: int) -> SignCode:
        return _code(tuple(t.numel for t in layout.of_fragment(fragment)), self.payload_dtype)


@lru_cache(maxsize=16)
def _code(sizes: tuple[int, ...], fmt: str) -> SignCode:
    return SignCode(sizes, fmt)
