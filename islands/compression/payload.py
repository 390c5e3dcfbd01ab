"""What one worker hands to one collective, and what comes back: buffers and nothing else."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from islands.compression.formats import Buffer, all_finite, itemsize
from islands.trace import Bytes


@dataclass(frozen=True, slots=True)
class Statistics:
    """A model's running statistics, as they travel: ``floats`` (fp32) and ``integers`` (int64)."""

    floats: NDArray[np.float32]
    integers: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return self.floats.nbytes + self.integers.nbytes


#: What a checksum takes on the wire, counted as control.
CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Payload:
    """One worker's encoded contribution to one round.

    ``values``   the numbers, encoded in ``fmt``
    ``buffers``  the model's running statistics, or None; counted as values
    ``indices``  where the values belong, for methods that send some of them, or None
    ``scales``   what quantised values are multiples of, encoded in ``scale_fmt``, or None
    ``checksum`` the CRC-32 of all buffers as they were sent; None where nothing can damage them

    Buffers of several tensors stand one after the other without headers: what belongs where follows
    from the layout and the method's settings.
    """

    values: Buffer
    fmt: str
    buffers: Statistics | None = None
    indices: Buffer | None = None
    scales: Buffer | None = None
    scale_fmt: str = "fp32"
    checksum: int | None = None

    @property
    def size(self) -> Bytes:
        extra = 0 if self.buffers is None else self.buffers.nbytes
        return Bytes(
            values=self.values.nbytes + extra,
            indices=0 if self.indices is None else self.indices.nbytes,
            scales=0 if self.scales is None else self.scales.nbytes,
        )

    @property
    def nbytes(self) -> int:
        return self.size.total

    @property
    def itemsize(self) -> int:
        """Bytes that a ring must not split. Running statistics travel as 4- and 8-byte numbers."""
        own = itemsize(self.fmt)
        return own if self.buffers is None else math.gcd(own, 4)

    def is_finite(self) -> bool:
        """False if any value is NaN or infinite: such a payload must not reach the shared model."""
        if self.buffers is not None and not np.isfinite(self.buffers.floats).all():
            return False
        if self.scales is not None and not all_finite(self.scales, self.scale_fmt):
            return False
        return all_finite(self.values, self.fmt)

    def sealed(self) -> Payload:
        """The same with its checksum."""
        return replace(self, checksum=self._crc())

    def is_intact(self) -> bool:
        """Whether the buffers are those that were sent, as far as a checksum can tell."""
        return self.checksum is None or self.checksum == self._crc()

    def _crc(self) -> int:
        parts = [self.values, self.indices, self.scales]
        if self.buffers is not None:
            parts += [self.buffers.floats.view(np.uint8), self.buffers.integers.view(np.uint8)]
        crc = 0
        for part in parts:
            if part is not None:
                crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
        return crc


@dataclass(frozen=True, slots=True)
class Update:
    """What a round made of its payloads, as each worker gets it.

    ``values`` is in ``fmt``. Its length says nothing about the network: there, every receiver is
    charged what the collective really delivers (the rounded mean), and repeats the outer step
    itself; here the coordinator takes that step once and hands out the outcome. ``optimizer`` is
    the inner optimizer's state, for a worker that joins replicas which must stay equal.
    """

    values: Buffer
    fmt: str
    buffers: Statistics | None = None
    optimizer: Mapping[str, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        parts = [self.values.nbytes, 0 if self.buffers is None else self.buffers.nbytes]
        return sum(parts) + sum(tensor.nbytes for tensor in (self.optimizer or {}).values())
