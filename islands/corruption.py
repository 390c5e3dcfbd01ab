"""Bad payloads, made from good ones.

A bad worker sends other numbers, under a checksum that is right. A bad wire changes bytes under
way, and the checksum tells. Only the numbers are touched, so that a payload stays readable whatever
is made of it: positions are another part of the transfer, and a receiver knows how long each part
is, so that what did not arrive is zero.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from islands.compression import Buffer, Payload, decode, encode
from islands.rng import generator

#: Bits that a bad wire flips in one payload.
_BITS = 8


def corrupt(payload: Payload, how: str, factor: float = 10.0, seed: int = 0) -> Payload:
    """A payload as it arrives, with its checksum, from the one that was made.

    ``nan`` and ``inf`` in place of every number, ``scale`` by ``factor``, ``flip`` of every sign;
    ``truncate``: the last bytes, at least one, and the checksum after them are missing; ``bits``:
    some are flipped. Which ones is drawn from ``seed``. A payload without values stays as it is.
    """
    if how in ("truncate", "bits"):
        return _damaged(payload.sealed(), how, generator(seed, "damage"))
    by = {"nan": np.nan, "inf": np.inf, "scale": factor, "flip": -1.0}[how]
    if payload.scales is not None:  # quantised values are multiples of these
        return replace(payload, scales=_times(payload.scales, payload.scale_fmt, by)).sealed()
    return replace(payload, values=_times(payload.values, payload.fmt, by)).sealed()


def _times(buffer: Buffer, fmt: str, by: float) -> Buffer:
    numbers = decode(buffer, fmt).double()
    return encode(numbers * by if np.isfinite(by) else numbers.fill_(by), fmt)


def _damaged(payload: Payload, how: str, draw: np.random.Generator) -> Payload:
    values = payload.values.copy()
    if not values.size:
        return payload
    if how == "truncate":
        values[draw.integers(values.size) :] = 0
        return replace(payload, values=values, checksum=0)
    count = 8 * values.size
    for bit in draw.choice(count, min(_BITS, count), replace=False).tolist():
        values[bit // 8] ^= 1 << bit % 8
    return replace(payload, values=values)
