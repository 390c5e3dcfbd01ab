"""Number formats on the wire: torch tensors to byte buffers and back.

Masters stay in fp32 (fp64 in tests); a lower precision exists only inside a buffer. Buffers are
NumPy
``uint8`` arrays, because those cross a process boundary without copies and their length *is* the
number of bytes that a run reports.
"""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Buffer: TypeAlias = NDArray[np.uint8]
FloatFormat = Literal["bf16", "fp16", "fp32", "fp64"]
WireFormat = Literal["bf16", "fp16", "fp32", "fp64", "int8", "int4", "e2m1", "e3m0"]

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

#: Formats of codes with a scale beside them (:mod:`islands.compression.quantise`), and the bits of
#: a code. Codes cannot be added.
CODE_BITS = {"int8": 8, "int4": 4, "e2m1": 4, "e3m0": 4}

# Buffers that arrive through shared memory are read-only. They are only ever read here, and torch
# has no read-only tensors, so its warning about writing to them does not apply.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def encode(tensor: Tensor, fmt: str) -> Buffer:
    """The tensor's values, in order, rounded to nearest-even in ``fmt``, as a buffer that owns its
    memory."""
    rounded = tensor.detach().to(device="cpu", dtype=DTYPES[fmt], copy=True).reshape(-1)
    return rounded.view(torch.uint8).numpy() if rounded.numel() else np.empty(0, np.uint8)


def decode(buffer: Buffer, fmt: str) -> Tensor:
    """The values of a buffer as a 1-D CPU tensor of ``fmt``'s dtype. Shares the buffer's memory:
    read only."""
    return (
        torch.from_numpy(buffer).view(DTYPES[fmt])
        if buffer.size
        else torch.empty(0, dtype=DTYPES[fmt])
    )


def itemsize(fmt: str) -> int:
    """Bytes that hold whole values: of one, or of several where they are packed (``bits``, codes
    of four bits)."""
    return DTYPES[fmt].itemsize if fmt in DTYPES else 1


def bits_of(fmt: str) -> int:
    """Bits of one value."""
    return CODE_BITS[fmt] if fmt in CODE_BITS else 1 if fmt == "bits" else 8 * DTYPES[fmt].itemsize


#: Two-byte formats: the exponent's bits. All of them set means infinite or NaN.
_EXPONENT = {"bf16": 0x7F80, "fp16": 0x7C00}


def all_finite(buffer: Buffer, fmt: str) -> bool:
    """Whether no value of an encoded buffer is NaN or infinite. ``bits`` and codes always are
    finite: what they cannot express shows in their scales."""
    if fmt not in DTYPES:
        return True
    if fmt in _EXPONENT:
        bits = np.uint16(_EXPONENT[fmt])
        return not ((buffer.view(np.uint16) & bits) == bits).any()
    return bool(np.isfinite(buffer.view(np.float32 if fmt == "fp32" else np.float64)).all())
