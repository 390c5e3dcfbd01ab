"""Trimming: of every output row of a tensor only the largest values are sent.

An output row is one index of a tensor's first dimension: a neuron with its incoming weights. The
smallest share of each row is left out, as in the pruning experiment of DiLoCo (Douillard et al.
2023, arXiv:2311.08105, Table 6; after TIES-merging, arXiv:2306.01708). Rows of one value, such as
a bias, are sent whole.

Which values were kept is said by a bit for every value or by positions inside the row, whichever
takes fewer bytes; a tensor for which neither pays is sent whole. All of this follows from shape,
share and number format, so nothing but values and positions travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from islands.compression.formats import Buffer, decode, encode, itemsize
from islands.compression.payload import Payload
from islands.compression.sparse import index_dtype, largest
from islands.layout import TensorSpec

#: A share such as 0.29 is a little less than that in binary; 29 of 100 values are meant.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a fragment: (rows, width) values from ``start``, of each row ``keep`` sent."""

    start: int
    rows: int
    width: int
    keep: int
    form: Literal["whole", "bits", "positions"]

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.rows * self.width)

    @property
    def kept(self) -> int:
        """Values that are sent of the tensor."""
        return self.rows * (self.width if self.form == "whole" else self.keep)

    @property
    def said(self) -> int:
        """Bytes that say which values these are."""
        if self.form == "whole":
            return 0
        if self.form == "bits":
            return -(-self.rows * self.width // 8)
        return self.kept * index_dtype(self.width).itemsize


def _tensor(spec: TensorSpec, start: int, share: float, fmt: str) -> _Tensor:
    rows = spec.shape[0] if spec.shape else 1
    width = spec.numel // max(1, rows)
    keep = width - math.floor(share * width + _ROUNDING)
    whole, bits, positions = (
        _Tensor(start, rows, width, keep, form) for form in ("whole", "bits", "positions")
    )
    smaller = min((bits, positions), key=lambda way: way.said)
    worth_it = smaller.kept * itemsize(fmt) + smaller.said < whole.kept * itemsize(fmt)
    return smaller if worth_it else whole


class RowTrim:
    """How one fragment's tensors are trimmed, written and read.

    ``share`` in (0, 1) is left out of each row, rounded down to whole values, so at least one
    value of each row is sent. Of equal magnitudes the lower position is kept.
    """

    def __init__(self, tensors: Sequence[TensorSpec], share: float, fmt: str) -> None:
        """``tensors`` of one fragment in flat order; ``fmt`` is the values' format."""
        self._fmt = fmt
        begin = tensors[0].offset if tensors else 0
        self._tensors = [_tensor(spec, spec.offset - begin, share, fmt) for spec in tensors]

    def write(self, flat: Tensor) -> Payload:
        """The trimmed payload of the fragment's values (n,)."""
        values: list[Tensor] = [torch.empty(0, dtype=flat.dtype, device=flat.device)]
        said: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
        for tensor in self._tensors:
            rows = flat[tensor.slice].view(tensor.rows, tensor.width)
            if tensor.form == "whole":
                values.append(rows.reshape(-1))
                continue
            where = largest(rows.abs().cpu().numpy(), tensor.keep)
            index = torch.from_numpy(where).to(rows.device)
            values.append(rows.gather(1, index).reshape(-1))
            if tensor.form == "bits":
                mask = np.zeros((tensor.rows, tensor.width), bool)
                np.put_along_axis(mask, where, True, axis=1)
                said.append(np.packbits(mask.reshape(-1)))
            else:
                said.append(where.astype(index_dtype(tensor.width)).reshape(-1).view(np.uint8))
        indices = np.concatenate(said)
        return Payload(
            encode(torch.cat(values), self._fmt),
            self._fmt,
            indices=indices if indices.size else None,
        )

    def read(self, payload: Payload) -> Tensor:
        """The fragment's values (n,), zero where nothing was sent, in the payload's own type."""
        values = decode(payload.values, self._fmt)
        said: Buffer = np.empty(0, np.uint8) if payload.indices is None else payload.indices
        flat = torch.zeros(sum(t.rows * t.width for t in self._tensors), dtype=values.dtype)
        at = told = 0
        for tensor in self._tensors:
            part = values[at : at + tensor.kept]
            at += tensor.kept
            code = said[told : told + tensor.said]
            told += tensor.said
            into = flat[tensor.slice]
            if tensor.form == "whole":
                into.copy_(part)
            elif tensor.form == "bits":
                mask = np.unpackbits(code, count=len(into)).astype(bool)
                into[torch.from_numpy(mask)] = part
            else:
                where = np.ascontiguousarray(code).view(index_dtype(tensor.width))
                index = torch.from_numpy(where.astype(np.int64)).view(tensor.rows, tensor.keep)
                into.view(tensor.rows, -1).scatter_(1, index, part.view(tensor.rows, -1))
        return flat
