"""One bit per value and one scale per tensor.

A tensor a becomes (‖a‖₁/d)·sign(a) with d its size: the mean magnitude with a bit for the sign, as
in EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847, section 4); zero counts as positive. A
tensor of one value is its scale, sign included, and needs no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from islands.compression.formats import decode, encode
from islands.compression.payload import Payload


class SignCode:
    """How one fragment's tensors are written and read: eight signs a byte, in flat order, without
    gaps between tensors; scales in flat order, in the format ``fmt``."""

    def __init__(self, sizes: Sequence[int], fmt: str) -> None:
        """``sizes``: numbers of values of the fragment's tensors, in flat order."""
        self.fmt = fmt
        self.wide = torch.float64 if fmt == "fp64" else torch.float32
        self._sizes = [size for size in sizes if size]
        repeats = torch.tensor(self._sizes, dtype=torch.int64)
        self._tensor = torch.arange(len(self._sizes)).repeat_interleave(repeats)
        self._signed = (repeats > 1)[self._tensor].numpy()  # which values have a bit
        self._bits = int(self._signed.sum())

    def write(self, flat: Tensor) -> Payload:
        """The payload of a flat vector (n,)."""
        scales = [
            part if len(part) == 1 else part.abs().mean().view(1)
            for part in torch.split(flat, self._sizes)
        ]
        positive = (flat >= 0).cpu().numpy()
        return Payload(
            np.packbits(positive[self._signed]),
            "bits",
            scales=encode(torch.cat(scales) if scales else flat, self.fmt),
            scale_fmt=self.fmt,
        )

    def read(self, payload: Payload) -> Tensor:
        """What was written, (n,), in fp32 (fp64 for fp64 scales)."""
        assert payload.scales is not None
        out = decode(payload.scales, self.fmt).to(self.wide)[self._tensor].numpy()
        negative = np.unpackbits(payload.values, count=self._bits) == 0
        out[self._signed] *= np.where(negative, -1, 1).astype(out.dtype)
        return torch.from_numpy(out)
