"""SlowMo: local SGD with a slow momentum over the rounds.

Wang et al. 2020, arXiv:1910.00643, Algorithm 1: after each round of averaging, with γ the inner
learning rate,

    u ← β·u + (x₀ − x̄)/γ        x ← x₀ − α·γ·u

γ is the rate of the round's last local step; in it the momentum is one of gradients, so a round at
a high rate does not outweigh later ones. Inner optimizers keep their state over rounds (the paper's
"maintain"). Bytes are those of local SGD.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from islands.compression import Update
from islands.methods.base import Arrival, Shared, dense_update
from islands.methods.diloco import PseudoGradient


class SlowMo(PseudoGradient):
    """Plain averaging followed by a momentum step; ``slow_lr`` is α, ``slow_momentum`` β."""

    name: str = "slowmo"
    slow_lr: float = Field(1.0, gt=0, allow_inf_nan=False)
    slow_momentum: float = Field(0.7, ge=0, lt=1)

    def begin_shared(self, shared: Shared) -> None:
        shared.slots["momentum"] = torch.zeros_like(shared.params)

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        part = shared.layout.fragments[fragment]
        params, momentum = shared.params[part], shared.slots["momentum"][part]
        rate = shared.lr(max(arrival.step for arrival in arrivals) - 1)
        mean = self.average(shared, fragment, arrivals).to(params)
        momentum.mul_(self.slow_momentum).add_(mean, alpha=1.0 / rate)
        params.sub_(momentum, alpha=self.slow_lr * rate)
        return dense_update(params)
