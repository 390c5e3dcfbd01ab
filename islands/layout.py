"""The flat view of a model's trainable parameters, in which every fragment is one contiguous slice.

Methods work on flat vectors: one kernel per operation instead of one per tensor, and the bytes of a
payload are the bytes of a slice. Tensor boundaries stay known, for what must be done per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import nn


@dataclass(frozen=True)
class TensorSpec:
    """One trainable tensor: its name, its shape, and where it starts in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    fragment: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Stream:
    """When one fragment is synchronised: after steps ``first``, ``first + period``, …

    The result of what was sent after step s is applied after step s + ``overlap``.
    """

    tensors: tuple[str, ...]
    period: int
    first: int
    overlap: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= self.period or self.period < 1 or self.first < 1:
            raise ValueError(f"no such schedule: {self}")

    def is_due(self, step: int) -> bool:
        """Whether the fragment is sent after ``step`` local steps."""
        return step >= self.first and (step - self.first) % self.period == 0

    def next_due(self, after: int) -> int:
        """The first such step after ``after``."""
        if after < self.first:
            return self.first
        return after + self.period - (after - self.first) % self.period


@dataclass(frozen=True)
class Layout:
    """All trainable tensors in flat order, and the fragments as slices of that order."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[slice, ...]

    def __hash__(self) -> int:  # slices have none, and layouts are keys of what is made from them
        return hash((len(self.tensors), len(self.fragments)))

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    def of_fragment(self, fragment: int) -> tuple[TensorSpec, ...]:
        """The tensors of one fragment, in flat order."""
        return tuple(t for t in self.tensors if t.fragment == fragment)

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Every trainable tensor once (tied weights too), in the model's order, as one fragment."""
        shapes = [(n, tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad]
        return cls._packed([shapes])

    def arranged(self, streams: Sequence[Stream]) -> Layout:
        """The same tensors reordered so that each stream's fragment is one slice.

        Raises ValueError unless the streams name every tensor exactly once.
        """
        shape = {t.name: t.shape for t in self.tensors}
        named = [name for stream in streams for name in stream.tensors]
        if sorted(named) != sorted(shape):
            raise ValueError("streams must name every trainable tensor exactly once")
        return self._packed([[(n, shape[n]) for n in stream.tensors] for stream in streams])

    @classmethod
    def _packed(cls, groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]]) -> Layout:
        tensors: list[TensorSpec] = []
        fragments: list[slice] = []
        offset = 0
        for group in groups:
            start = offset
            for name, shape in group:
                tensors.append(TensorSpec(name, shape, offset, len(fragments)))
                offset += prod(shape)
            fragments.append(slice(start, offset))
        return cls(tuple(tensors), tuple(fragments))
