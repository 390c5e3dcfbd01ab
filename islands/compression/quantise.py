"""Few bits per value: codes of eight or four bits, and one scale per block of values.

A block is a whole tensor, or so many values of one (the last block of a tensor may be shorter; no
block spans two). Its scale s is its largest magnitude, in fp32. A value x becomes the code of a
level l, a magnitude in [0, 1] with a sign, and is read back as s·l; the top level is 1, so the
largest value of a block, and with it a block of one value, is exact in fp32. A block of zeros has
the scale 0 and stays zero.

====  ====  ===============================  =========================  ====================
name  bits  levels of |x| / s                rounding                   error
====  ====  ===============================  =========================  ====================
int8  8     k/127, k = 0 … 127               nearest, ties to even k    ≤ s/254
int4  4     k/7, k = 0 … 7                   nearest, ties to even k    ≤ s/14
e2m1  4     0, ½, 1, 1½, 2, 3, 4, 6, over 6  nearest, ties to even code ≤ s/6
e3m0  4     0, and 2^-6 … 1, powers of two   nearest in log space       ≤ (√2−1)·|x| or s/128
====  ====  ===============================  =========================  ====================

E3M0 has one sign bit and three of exponent: zero and seven powers of two either way, 64 from the
smallest to the largest (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512, which leaves
scale and rounding open). Rounding in log space keeps the length of a vector: on normal values the
gain is 1.02, where rounding to the nearest value gives 0.96. What is below half of the smallest
power, or equal to it, becomes zero. E2M1 is the four-bit float of OCP's microscaling formats.

Four-bit codes are sign and magnitude: bit 3 is set for negative values, bits 0 to 2 count the
levels from zero; two codes stand in a byte, the first in its low half. Codes of a fragment stand
one after the other in flat order without gaps; after an odd number of them comes a zero. Eight-bit
codes are two's complement. Minus zero, and -128, are never written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from islands.compression.formats import Buffer, bits_of, decode, encode
from islands.compression.payload import Payload

#: What scales are encoded in.
SCALE_FORMAT = "fp32"


class _Levels(NamedTuple):
    """The magnitudes of a format in units of its smallest step, ascending from 0, and where
    rounding goes one up: above each threshold, or, if ``at`` says so, on it."""

    magnitudes: tuple[float, ...]
    thresholds: tuple[float, ...]
    at: tuple[bool, ...]


def _nearest_even(magnitudes: tuple[float, ...]) -> _Levels:
    """Rounding to the nearest level, half-way to the one with the even code."""
    middles = tuple((low + high) / 2 for low, high in pairwise(magnitudes))
    up = tuple(code % 2 == 0 for code in range(1, len(magnitudes)))
    return _Levels(magnitudes, middles, up)


_POWERS = tuple(2.0**k for k in range(7))
_LEVELS = {
    "int4": _nearest_even(tuple(float(k) for k in range(8))),
    "e2m1": _nearest_even((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
    # Half of the smallest power goes to zero; between powers the geometric mean decides.
    "e3m0": _Levels(
        (0.0, *_POWERS), (0.5, *(p * math.sqrt(2.0) for p in _POWERS[:-1])), (False,) * 7
    ),
}


class BlockCode:
    """How one fragment's values are written and read. ``fmt``: int8, int4, e2m1 or e3m0."""

    def __init__(self, sizes: Sequence[int], fmt: str, block: int | None = None) -> None:
        """``sizes``: numbers of values of the fragment's tensors in flat order; ``block``: values
        per scale, None: a scale per tensor."""
        self.fmt = fmt
        lengths: list[int] = []
        for size in sizes:
            whole, rest = divmod(size, block or max(1, size))
            lengths += [block or size] * whole + [rest] * (rest > 0)
        self._lengths = np.array(lengths, dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._size = int(self._lengths.sum())
        if fmt == "int8":
            self._top = 127.0
        else:
            levels = _LEVELS[fmt]
            self._top = levels.magnitudes[-1]
            table = np.array(levels.magnitudes, np.float32) / np.float32(self._top)
            self._table = np.concatenate([table, -table])

    def write(self, flat: Tensor) -> Payload:
        """The payload of a flat vector (n,). A NaN or an infinity makes its scale one, by which
        the payload is refused."""
        values = flat.detach().cpu().numpy()
        magnitude = np.abs(values)
        scales = np.empty(0, np.float32)
        if self._size:
            with np.errstate(over="ignore"):  # too large: refused as infinite
                scales = np.maximum.reduceat(magnitude, self._starts).astype(np.float32)
        with np.errstate(invalid="ignore"):
            units = magnitude / np.repeat(np.where(scales > 0, scales, 1), self._lengths)
            units *= self._top
            codes = self._codes(units, np.signbit(values))
        return Payload(
            codes,
            self.fmt,
            scales=encode(torch.from_numpy(scales), SCALE_FORMAT),
            scale_fmt=SCALE_FORMAT,
        )

    def read(self, payload: Payload) -> Tensor:
        """What was written, (n,), in fp32."""
        assert payload.scales is not None
        scales = decode(payload.scales, SCALE_FORMAT).numpy()
        if self.fmt == "int8":
            levels = payload.values.view(np.int8).astype(np.float32) / np.float32(self._top)
        else:
            levels = self._table[unpack(payload.values, self._size)]
        return torch.from_numpy(levels * np.repeat(scales, self._lengths))

    def _codes(self, units: NDArray[np.floating[Any]], negative: NDArray[np.bool_]) -> Buffer:
        """Magnitudes (n,) in units of the smallest step, and signs, as encoded codes."""
        codes: NDArray[np.uint8]
        if self.fmt == "int8":
            # A scale that fp32 rounds down, below its smallest normal number, gives more than the
            # top.
            whole = np.minimum(np.rint(np.nan_to_num(units, nan=0.0, posinf=0.0)), self._top)
            codes = np.where(negative, -whole, whole).astype(np.int8).view(np.uint8)
            return codes
        codes = np.zeros(len(units), np.uint8)
        levels = _LEVELS[self.fmt]
        for threshold, at in zip(levels.thresholds, levels.at, strict=True):
            codes += units >= threshold if at else units > threshold
        codes[negative & (codes > 0)] |= 8
        return pack(codes)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the codes and of the scales, from shapes alone."""
        return -(-self._size * bits_of(self.fmt) // 8), 4 * len(self._lengths)


def pack(codes: NDArray[np.uint8]) -> Buffer:
    """Codes (n,) below 16, two to a byte: (⌈n/2⌉,); the first one in the low half."""
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    packed: Buffer = codes[0::2] | (codes[1::2] << np.uint8(4))
    return packed


def unpack(packed: Buffer, count: int) -> NDArray[np.uint8]:
    """The first ``count`` codes of a packed buffer."""
    codes = np.empty(2 * len(packed), np.uint8)
    codes[0::2] = packed & 15
    codes[1::2] = packed >> 4
    return codes[:count]
