"""Inner optimizers and their learning-rate schedule.

The optimizer works on the flat parameter vector as one tensor. Element-wise optimizers (AdamW, SGD)
do not care, and one fused kernel replaces one launch per tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Where the cosine ends, as a fraction of the peak (DeMo's reference configuration; nanoGPT).
FINAL_LR_FRACTION = 0.1


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then a cosine to a tenth of the peak, or a constant. One counter: local
    steps."""

    peak: float
    warmup: int
    steps: int
    schedule: str

    def at(self, step: int) -> float:
        """Learning rate of local step ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.peak
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return self.peak * (FINAL_LR_FRACTION + (1.0 - FINAL_LR_FRACTION) * cosine)


class InnerOptimizer:
    """A torch optimizer over the flat masters, stepped at the scheduled learning rate.

    ``clip`` bounds the global gradient norm of what is stepped with (None: no bound). Whether that
    is a worker's own or an averaged gradient is the method's business.
    """

    def __init__(
        self,
        name: str,
        masters: Tensor,
        grad: Tensor,
        rate: LearningRate,
        *,
        weight_decay: float,
        clip: float | None,
    ) -> None:
        self.rate = rate
        self.clip = clip
        self._param = torch.nn.Parameter(masters)  # shares the masters' memory
        self._param.grad = grad
        if name == "adamw":
            # beta 0.95 as in GPT pre-training; torch's 0.999 is slow to forget at these run
            # lengths.
            self.torch: torch.optim.Optimizer = torch.optim.AdamW(
                [self._param], lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
            )
        else:
            self.torch = torch.optim.SGD(
                [self._param], lr=0.0, weight_decay=weight_decay, fused=True
            )

    def step(self, step: int) -> None:
        """One update from the gradient buffer, at the learning rate of local step ``step``."""
        grad = self._param.grad
        assert grad is not None
        if self.clip is not None:
            norm = float(torch.linalg.vector_norm(grad))
            if norm > self.clip:
                grad.mul_(self.clip / norm)
        self.torch.param_groups[0]["lr"] = self.rate.at(step)
        self.torch.step()
