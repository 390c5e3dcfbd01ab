"""Optimizers on flat vectors, inner and outer, and the learning-rate schedule.

An element-wise optimizer does not care where a tensor ends, so one kernel on the flat vector
replaces one launch per tensor. The kernels are torch's own, called as functions: its optimizer
*classes* load torch's compiler when the first one is made, a second and 70 MB in every worker's
process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from islands.errors import InputError

try:  # torch 2.9 is the first to have it
    from torch.optim._muon import muon
except ImportError:
    muon = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from islands.layout import Layout

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


class FlatOptimizer:
    """One of torch's optimizers on one tensor: ``sgd``, ``momentum``, ``nesterov``, ``adam``,
    ``adamw``.

    ``params`` is updated in place. ``momentum`` is the heavy-ball factor, and Adam's beta 1 for
    ``adam``.
    """

    def __init__(
        self,
        name: str,
        params: Tensor,
        *,
        momentum: float = 0.0,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._name = name
        self._params = params
        self._momentum = momentum
        self._beta2 = beta2
        self._eps = eps
        self._weight_decay = weight_decay
        self._adam = name in ("adam", "adamw")
        self.reset()

    def reset(self) -> None:
        """As before the first step."""
        # Adam: both moments and the step count. SGD: the momentum buffer, None before the first
        # step.
        moments = 2 if self._adam else 0
        self._moments = [torch.zeros_like(self._params) for _ in range(moments)]
        self._count = torch.zeros((), dtype=torch.float32, device=self._params.device)
        self._buffer: Tensor | None = None

    @torch.no_grad()
    def step(self, grad: Tensor, lr: float) -> None:
        """One update from ``grad``, which has the shape and type of the parameters."""
        if self._adam:
            function = adam if self._name == "adam" else adamw
            function(
                [self._params],
                [grad],
                [self._moments[0]],
                [self._moments[1]],
                [],
                [self._count],
                foreach=False,
                fused=True,
                amsgrad=False,
                beta1=self._momentum,
                beta2=self._beta2,
                lr=lr,
                weight_decay=self._weight_decay,
                eps=self._eps,
                maximize=False,
            )
            return
        buffers = [self._buffer]
        sgd(
            [self._params],
            [grad],
            buffers,
            foreach=False,
            fused=False,
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self._name == "nesterov" and self._momentum > 0,
            maximize=False,
        )
        self._buffer = buffers[0]

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of everything that the next step depends on."""
        named = dict(zip(("m", "v"), self._moments, strict=False)) | {"count": self._count}
        if self._buffer is not None:
            named["buffer"] = self._buffer
        return {name: tensor.clone() for name, tensor in named.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._moments = [saved[name].clone() for name in ("m", "v") if name in saved]
        self._count = saved["count"].clone()
        self._buffer = saved["buffer"].clone() if "buffer" in saved else None


class Stepped(Protocol):
    """An optimizer of one flat vector."""

    def reset(self) -> None: ...
    def step(self, grad: Tensor, lr: float) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None: ...


#: beta 2 of 0.95 as in GPT pre-training; torch's 0.999 is slow to forget at such run lengths
ADAMW = {"momentum": 0.9, "beta2": 0.95}


def must_be_available(name: str) -> None:
    """Raise InputError if this torch has not the optimizer."""
    if name == "muon" and not callable(muon):
        raise InputError(
            f"optimizer.name: 'muon' needs torch 2.9 or newer, not {torch.__version__}; "
            "choose 'adamw'"
        )


class MuonOptimizer:
    """Muon on the hidden matrices, AdamW on everything else, at one learning rate.

    Jordan et al. 2024; as MuLoCo uses it inside DiLoCo (Thérien et al. 2025, arXiv:2505.23725). An
    orthogonalised update is scaled to the size of one of AdamW's, 0.2·√(larger side) (Liu et al.
    2025, arXiv:2502.16982), which is what makes one rate, and AdamW's tuned ones, fit both.
    """

    MOMENTUM, STEPS, EPS = 0.95, 5, 1e-7
    COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, torch's defaults

    def __init__(self, params: Tensor, layout: Layout, *, weight_decay: float) -> None:
        # Here, since a model's parts are found by what optimizers need not know otherwise.
        from islands.fragments import hidden_matrices

        matrices = hidden_matrices(layout)
        self._weight_decay = weight_decay
        self._slices = [(t.slice, t.shape) for t in matrices]
        self._params = params
        self._matrices = [params[part].view(shape) for part, shape in self._slices]
        self._momentum = torch.zeros_like(params)
        self._buffers = [self._momentum[part].view(shape) for part, shape in self._slices]
        self._rest = _between(len(params), [part for part, _ in self._slices])
        self._adamw = [
            FlatOptimizer("adamw", params[part], weight_decay=weight_decay, **ADAMW)
            for part in self._rest
        ]

    def reset(self) -> None:
        """As before the first step."""
        self._momentum.zero_()
        for optimizer in self._adamw:
            optimizer.reset()

    @torch.no_grad()
    def step(self, grad: Tensor, lr: float) -> None:
        """One update from ``grad``, which has the shape and type of the parameters."""
        muon(
            self._matrices,
            [grad[part].view(shape) for part, shape in self._slices],
            self._buffers,
            lr=lr,
            weight_decay=self._weight_decay,
            momentum=self.MOMENTUM,
            nesterov=True,
            ns_coefficients=self.COEFFICIENTS,
            ns_steps=self.STEPS,
            eps=self.EPS,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )
        for part, optimizer in zip(self._rest, self._adamw, strict=True):
            optimizer.step(grad[part], lr)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of everything that the next step depends on."""
        saved = {"momentum": self._momentum.clone()}
        for number, optimizer in enumerate(self._adamw):
            saved |= {f"{number}.{name}": t for name, t in optimizer.state_dict().items()}
        return saved

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._momentum.copy_(saved["momentum"])
        for number, optimizer in enumerate(self._adamw):
            own = f"{number}."
            optimizer.load_state_dict(
                {k.removeprefix(own): t for k, t in saved.items() if k.startswith(own)}
            )


def _between(size: int, taken: list[slice]) -> list[slice]:
    """What is left of 0 … ``size`` around some slices that do not overlap."""
    at, left = 0, []
    for part in sorted(taken, key=lambda part: part.start):
        left.append(slice(at, part.start))
        at = part.stop
    return [part for part in [*left, slice(at, size)] if part.stop > part.start]


class InnerOptimizer:
    """A worker's optimizer over its masters, stepped at the scheduled learning rate.

    ``clip`` bounds the global norm of the gradient that is stepped with (None: no bound). Whether
    that is the worker's own or an averaged one is the method's business.
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
        layout: Layout | None = None,
    ) -> None:
        """``layout`` says which of the values are matrices; only ``muon`` needs it."""
        self.rate = rate
        self.clip = clip
        self._grad = grad
        self.inner: Stepped
        if name == "muon":
            assert layout is not None
            self.inner = MuonOptimizer(masters, layout, weight_decay=weight_decay)
        else:
            adam = ADAMW if name == "adamw" else {}
            self.inner = FlatOptimizer(name, masters, weight_decay=weight_decay, **adam)

    def step(self, step: int) -> None:
        """One update from the gradient buffer, at the learning rate of local step ``step``.

        A gradient with a NaN or an infinity is not stepped with, as loss scalers do: it would stay
        in the moments and the masters for ever.
        """
        norm = float(torch.linalg.vector_norm(self._grad))
        if not math.isfinite(norm):
            return
        if self.clip is not None and norm > self.clip:
            self._grad.mul_(self.clip / norm)
        self.inner.step(self._grad, self.rate.at(step))
