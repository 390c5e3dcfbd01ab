"""A model whose trainable parameters are views of one flat master vector.

An optimizer step, a pseudo-gradient or a payload is then one operation on one tensor. Masters are
fp32 (fp64 if the model has fp64 parameters). Parameters of that type *are* the masters' memory;
parameters of a lower precision are rounded copies, refreshed by :meth:`FlatModel.publish`, because
an update such as 1 + 0.001 vanishes in bf16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from islands.compression import Statistics
from islands.compression.formats import Buffer
from islands.layout import Layout


class FlatModel:
    """Rebinds a model's trainable parameters to a flat vector and its gradient.

    ``params`` and ``grad``: (N,) in layout order. Tied weights appear once; frozen parameters stay
    as they are; a parameter without a gradient has zeros in ``grad``.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model = model
        self.layout = layout
        by_name = dict(model.named_parameters())
        trainable = [(spec, by_name[spec.name]) for spec in layout.tensors]
        wide = any(p.dtype == torch.float64 for _, p in trainable)
        master = torch.float64 if wide else torch.float32
        device = trainable[0][1].device if trainable else torch.device("cpu")
        self.params = torch.empty(layout.numel, dtype=master, device=device)
        self.grad = torch.zeros_like(self.params)
        self._rounded: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for spec, parameter in trainable:
            value = self.params[spec.slice].view(spec.shape)
            grad = self.grad[spec.slice].view(spec.shape)
            value.copy_(parameter.detach())
            if parameter.dtype == master:
                parameter.data = value
                parameter.grad = grad
            else:
                self._rounded.append((parameter, value, grad))

    def publish(self) -> None:
        """Round the masters into parameters of a lower precision. Nothing to do for ordinary
        models."""
        for parameter, value, _ in self._rounded:
            parameter.data.copy_(value)

    def clear_grad(self) -> None:
        self.grad.zero_()
        for parameter, _, _ in self._rounded:
            parameter.grad = None

    def collect_grad(self) -> None:
        """Bring gradients of low-precision parameters into the flat gradient."""
        for parameter, _, grad in self._rounded:
            if parameter.grad is not None:
                grad.copy_(parameter.grad)


class BufferSet:
    """A model's synchronised buffers (running statistics).

    Policy: floating buffers are averaged over the workers, integer ones are the first worker's.
    Only buffers that training changes are here; constant ones never travel.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        found = dict(model.named_buffers())
        self._floats = [found[n] for n in names if found[n].is_floating_point()]
        self._integers = [found[n] for n in names if not found[n].is_floating_point()]

    def __bool__(self) -> bool:
        return bool(self._floats or self._integers)

    def pack(self) -> Statistics | None:
        """A copy of all buffers; None if the model has no such buffer."""
        if not self:
            return None
        floats = [b.detach().to("cpu", torch.float32).reshape(-1) for b in self._floats]
        integers = [b.detach().to("cpu", torch.int64).reshape(-1) for b in self._integers]
        return Statistics(
            torch.cat([torch.empty(0), *floats]).numpy(),
            torch.cat([torch.empty(0, dtype=torch.int64), *integers]).numpy(),
        )

    def unpack(self, packed: Statistics) -> None:
        """Load packed buffers into the model."""
        _fill(self._floats, packed.floats)
        _fill(self._integers, packed.integers)

    @staticmethod
    def merge(packed: Sequence[Statistics]) -> Statistics:
        """The policy above over several workers' buffers, in worker order."""
        total = packed[0].floats.astype(np.float64)
        for other in packed[1:]:
            total += other.floats
        return Statistics((total / len(packed)).astype(np.float32), packed[0].integers)


def _fill(buffers: Sequence[Tensor], values: NDArray[np.generic]) -> None:
    at = 0
    for buffer in buffers:
        chunk = torch.from_numpy(values[at : at + buffer.numel()])
        buffer.copy_(chunk.view(buffer.shape))
        at += buffer.numel()


def pack_state(model: nn.Module) -> dict[str, Buffer]:
    """Every parameter and buffer, also non-persistent ones, as raw bytes by name."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: t.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, t in tensors.items()
        if t.numel()
    }


@torch.no_grad()
def load_state(model: nn.Module, state: Mapping[str, Buffer]) -> None:
    """Load :func:`pack_state`'s bytes into a model of the same architecture."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, raw in state.items():
        target = tensors[name]
        target.copy_(torch.from_numpy(raw).view(target.dtype).view(target.shape))


def state_sha256(state: Mapping[str, Buffer]) -> str:
    """Digest of a packed model's bytes, in name order."""
    digest = hashlib.sha256()
    for _, raw in sorted(state.items()):
        digest.update(raw.tobytes())
    return digest.hexdigest()


def parameters_sha256(flat: FlatModel) -> str:
    """Digest of all parameters as little-endian fp32, in name order: equal exactly if the models
    are. Trainable ones are read from the masters, whatever the model itself rounds them to."""
    values = {name: p.detach() for name, p in flat.model.named_parameters()}
    values |= {spec.name: flat.params[spec.slice] for spec in flat.layout.tensors}
    digest = hashlib.sha256()
    for _, value in sorted(values.items()):
        digest.update(value.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()
