"""The largest values of each row, and where they stand, as bytes without headers.

A fragment's flat vector is cut into rows: whole tensors (top-k) or chunks of them (DeMo). Of every
row the same number of values is kept for its width, so sender and receiver derive everything but
values and positions from the layout. Rows of one width are worked on together: nothing here loops
over rows.

A position counts inside its row. In a chunk it takes 1 byte up to 256 of them, 2 up to 65,536, else
4; in a whole tensor at least 2. A tensor that would so become larger than all of its values goes as
all of its values, in order and without positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from islands.compression.formats import decode, encode, itemsize
from islands.compression.payload import Payload
from islands.trace import Bytes

Magnitudes: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` rows of ``width`` values, one after the other from ``start`` of the flat vector; of
    each row ``keep`` values are sent."""

    start: int
    width: int
    count: int
    keep: int

    @property
    def stop(self) -> int:
        return self.start + self.width * self.count

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.stop, self.width, dtype=np.int64)


def index_dtype(width: int, chunked: bool = True) -> np.dtype[np.unsignedinteger]:
    """The type of a position among so many values of a chunk, or of a whole tensor."""
    if width <= 1 << 8 and chunked:
        return np.dtype(np.uint8)
    return np.dtype("<u2" if width <= 1 << 16 else "<u4")


def encoded_bytes(rows: Iterable[Rows], fmt: str, *, chunked: bool = True) -> Bytes:
    """What the values and positions of some rows take: from shapes alone, before there are any."""
    values = indices = 0
    for part in rows:
        count = part.count * part.keep
        values += count * itemsize(fmt)
        if part.keep < part.width:
            indices += count * index_dtype(part.width, chunked).itemsize
    return Bytes(values, indices)


def rows_of_tensor(
    start: int, cut: Sequence[tuple[int, int]], keep: int, fmt: str, *, chunked: bool = True
) -> list[Rows]:
    """A tensor's rows from ``start`` of the flat vector, ``keep`` values of each to be sent.

    ``cut`` says how many values a row has and how many such rows follow. ``keep`` is clamped to the
    row; all values of all rows are sent where that takes fewer bytes.
    """
    rows: list[Rows] = []
    for width, count in cut:
        if width * count:
            rows.append(Rows(start, width, count, min(keep, width)))
            start += width * count
    whole = [replace(part, keep=part.width) for part in rows]
    takes = [encoded_bytes(form, fmt, chunked=chunked).total for form in (rows, whole)]
    return rows if takes[0] <= takes[1] else whole


def largest(magnitude: Magnitudes, keep: int) -> NDArray[np.int64]:
    """Positions of the ``keep`` largest in each row of (r, w), ascending; (r, keep).

    Of equal ones the lowest position wins; NaN counts as largest. Needs 0 < keep < w.
    """
    rows, width = magnitude.shape
    at = width - keep
    if magnitude.size and np.isnan(magnitude.max()):  # the maximum is NaN if anything is
        magnitude = np.where(np.isnan(magnitude), np.inf, magnitude)
    chosen = magnitude >= np.partition(magnitude, at, axis=1)[:, at, None]
    found: NDArray[np.int64] = np.flatnonzero(chosen)
    if len(found) > rows * keep:  # more values at a row's threshold than it may send
        tied = np.flatnonzero(np.count_nonzero(chosen, axis=1) > keep)
        order = np.argsort(-magnitude[tied], axis=1, kind="stable")
        chosen[tied] = False
        chosen[tied[:, None], order[:, :keep]] = True
        found = np.flatnonzero(chosen)
    return found.reshape(rows, keep) - np.arange(0, rows * width, width)[:, None]


class _Group:
    """Rows of one width, of which one number of values is kept."""

    def __init__(self, parts: Sequence[Rows], chunked: bool) -> None:
        """``parts`` in flat order, none of them next to another."""
        first = parts[0]
        self.width, self.keep = first.width, first.keep
        self.dtype = index_dtype(self.width, chunked)
        self._slices = [slice(part.start, part.stop) for part in parts]
        starts = np.concatenate([part.starts for part in parts])
        #: The start of the row that each kept value is of; its place itself where all are kept.
        self.base = np.repeat(starts, self.keep)
        if self.whole:
            self.base += np.tile(np.arange(self.width), len(starts))

    @property
    def whole(self) -> bool:
        """Whether all values are kept, so that positions need not be said."""
        return self.keep == self.width

    @property
    def index_bytes(self) -> int:
        return len(self.base) * self.dtype.itemsize

    def index(self, magnitude: Magnitudes) -> NDArray[np.int64]:
        """Each kept value's position in its row, from the flat vector's magnitudes (n,)."""
        parts = [magnitude[part].reshape(-1, self.width) for part in self._slices]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return largest(rows, self.keep).reshape(-1)


class SparseCode:
    """How one fragment's rows are written and read. Values and positions stand group by group.

    A group is the rows of one width and one number of kept values. Groups are in the order of their
    first rows, rows in flat order, positions ascending. Choosing runs on the CPU in NumPy, whose
    partition is several times as fast as torch's top-k on short rows.
    """

    def __init__(self, size: int, rows: Iterable[Rows], fmt: str, *, chunked: bool = True) -> None:
        """``size`` is the flat vector's length, ``rows`` are in flat order, ``fmt`` is the values'
        format; ``chunked``: rows are chunks, not whole tensors."""
        self.size = size
        self.fmt = fmt
        self.wide = torch.float64 if fmt == "fp64" else torch.float32
        together: dict[tuple[int, int], list[Rows]] = {}
        for part in rows:
            group = together.setdefault((part.width, part.keep), [])
            if group and group[-1].stop == part.start:
                part = Rows(group[-1].start, part.width, group.pop().count + part.count, part.keep)
            group.append(part)
        self._groups = [_Group(parts, chunked) for parts in together.values()]

    def write(self, flat: Tensor) -> tuple[Payload, Tensor]:
        """The payload of a flat vector (n,), and the flat positions (kept,) of its values."""
        magnitude = flat.abs().cpu().numpy()
        positions = [np.empty(0, np.int64)]
        indices = [np.empty(0, np.uint8)]
        for group in self._groups:
            if group.whole:
                positions.append(group.base)
            else:
                index = group.index(magnitude)
                positions.append(group.base + index)
                indices.append(index.astype(group.dtype).view(np.uint8))
        where = torch.from_numpy(np.concatenate(positions)).to(flat.device)
        written = np.concatenate(indices)
        values = encode(flat[where], self.fmt)
        return Payload(values, self.fmt, indices=written if len(written) else None), where

    def read(self, payloads: Sequence[Payload]) -> tuple[Tensor, Tensor]:
        """Several payloads' values and flat positions, one payload after the other; (p·kept,).

        Values are widened to fp32 (fp64 for fp64 payloads).
        """
        values = torch.cat([decode(p.values, self.fmt) for p in payloads]).to(self.wide)
        positions = [np.empty((len(payloads), 0), np.int64)]
        written = [p.indices for p in payloads if p.indices is not None]
        at = 0
        for group in self._groups:
            found = np.broadcast_to(group.base, (len(payloads), len(group.base)))
            if not group.whole:
                end = at + group.index_bytes
                found = found + np.stack([index[at:end].view(group.dtype) for index in written])
                at = end
            positions.append(found)
        return values, torch.from_numpy(np.concatenate(positions, axis=1).reshape(-1))

    def total(self, payloads: Sequence[Payload]) -> tuple[Tensor, Tensor]:
        """The payloads' sum as a flat vector (n,), added in their order, and the positions that
        were sent, one payload after the other; (p·kept,)."""
        values, where = self.read(payloads)
        # On the CPU a one-dimensional index_add_ goes through its sources one by one, in order.
        return torch.zeros(self.size, dtype=self.wide).index_add_(0, where, values), where
