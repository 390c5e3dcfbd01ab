"""Chunks and their orthonormal cosine transform (DCT-II): nothing is lost, only rearranged.

Two ways to cut tensors into chunks of at most ``chunk`` values a side:

* *flat*: the flattened tensor in runs of ``chunk`` values, the last one shorter;
* *tiles*: a matrix in tiles whose sides are the largest divisors of its own sides up to ``chunk``,
  transformed along both; a vector in runs of its own divisor. This is what DeMo's reference
  implementation does. A tensor of more dimensions is the matrix whose rows are its last one.

Chunks of one shape are transformed together, by one matrix product a side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from islands.layout import TensorSpec

Cut = Literal["flat", "tiles"]


@lru_cache(maxsize=256)
def basis(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The DCT-II as an orthonormal matrix (size, size): row f holds frequency f, so that
    ``basis @ x`` are the coefficients of x and ``basis.T @ c`` gives x back."""
    f = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * f[:, None] * (f + 0.5)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix.to(device, dtype)


def largest_divisor(size: int, limit: int) -> int:
    """The largest divisor of ``size`` that is at most ``limit``; 1 for an empty side."""
    return max((d for d in range(1, min(size, limit) + 1) if size % d == 0), default=1)


@dataclass(frozen=True)
class Block:
    """A part of a flat vector that is a grid of equal chunks.

    It holds a matrix of (y·h, x·w) values: ``y`` by ``x`` chunks of ``h`` by ``w`` each. Runs of a
    vector are y chunks of one row.
    """

    start: int
    y: int
    h: int
    x: int
    w: int

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.y * self.h * self.x * self.w)

    @property
    def chunks(self) -> int:
        return self.y * self.x

    @property
    def runs(self) -> bool:
        """Whether chunks already stand one after the other."""
        return self.x == self.h == 1

    def cut(self, values: Tensor) -> Tensor:
        """Its chunks of a flat vector, (chunks, h, w); a view if they are runs."""
        if self.runs:
            return values[self.slice].view(self.y, 1, self.w)
        grid = values[self.slice].view(self.y, self.h, self.x, self.w)
        return grid.transpose(1, 2).reshape(self.chunks, self.h, self.w)

    def paste(self, chunks: Tensor, values: Tensor) -> None:
        """The opposite of :meth:`cut`."""
        if self.runs:
            values[self.slice] = chunks.reshape(-1)
            return
        grid = values[self.slice].view(self.y, self.h, self.x, self.w)
        grid.copy_(chunks.view(self.y, self.x, self.h, self.w).transpose(1, 2))


def blocks(tensor: TensorSpec, start: int, chunk: int, cut: Cut) -> list[Block]:
    """A tensor that starts at ``start`` as grids of chunks; none for an empty tensor."""
    if not tensor.numel:
        return []
    if cut == "flat":
        full, rest = divmod(tensor.numel, chunk)
        runs = [Block(start, full, 1, 1, chunk)] if full else []
        return runs + ([Block(start + full * chunk, 1, 1, 1, rest)] if rest else [])
    *others, width = tensor.shape or (1,)
    w = largest_divisor(width, chunk)
    if not others:
        return [Block(start, width // w, 1, 1, w)]
    height = math.prod(others)
    h = largest_divisor(height, chunk)
    return [Block(start, height // h, h, width // w, w)]


class ChunkedDCT:
    """The transform of a flat vector. Every block's coefficients stand in its own place, chunk by
    chunk, row by row inside a chunk."""

    def __init__(self, all_blocks: Iterable[Block]) -> None:
        """The blocks, in flat order, cover the vector."""
        self._groups: dict[tuple[int, int], list[Block]] = {}
        for block in all_blocks:
            group = self._groups.setdefault((block.h, block.w), [])
            if group and block.runs and group[-1].runs and group[-1].slice.stop == block.start:
                group[-1] = replace(group[-1], y=group[-1].y + block.y)
            else:
                group.append(block)
        only = [block for group in self._groups.values() for block in group]
        #: The length of all chunks if they are runs of one length, or None.
        self._width = only[0].w if len(only) == 1 and only[0].runs else None

    def forward(self, values: Tensor) -> Tensor:
        """(n,) values to (n,) coefficients."""
        if self._width is not None:
            return (values.view(-1, self._width) @ _basis(self._width, values).T).view(-1)
        out = torch.empty_like(values)
        for (h, w), group in self._groups.items():
            chunks = _together([block.cut(values) for block in group])
            chunks = _product(chunks, _basis(h, values).T, _basis(w, values).T)
            for block, part in zip(group, _apart(chunks, group), strict=True):
                out[block.slice] = part.reshape(-1)
        return out

    def inverse(self, coefficients: Tensor) -> Tensor:
        """(n,) coefficients to (n,) values."""
        if self._width is not None:
            chunks = coefficients.view(-1, self._width)
            return (chunks @ _basis(self._width, coefficients)).view(-1)
        out = torch.empty_like(coefficients)
        for (h, w), group in self._groups.items():
            chunks = _together([coefficients[block.slice].view(-1, h, w) for block in group])
            chunks = _product(chunks, _basis(h, out), _basis(w, out))
            for block, part in zip(group, _apart(chunks, group), strict=True):
                block.paste(part, out)
        return out


def _basis(size: int, like: Tensor) -> Tensor:
    return basis(size, like.dtype, like.device)


def _product(chunks: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ · chunk · right of every chunk of (chunks, h, w)."""
    if len(left) == 1:
        return (chunks.view(-1, len(right)) @ right).view_as(chunks)
    return left.T @ (chunks @ right)


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _apart(chunks: Tensor, group: list[Block]) -> tuple[Tensor, ...]:
    return torch.split(chunks, [block.chunks for block in group]) if len(group) > 1 else (chunks,)
