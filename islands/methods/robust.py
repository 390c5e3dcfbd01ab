"""Means that a few bad payloads cannot move far: at each coordinate by itself.

Yin et al. 2018, arXiv:1803.01498, Definitions 1 (median) and 2 (trimmed mean). NaN counts as the
largest of all values, so that it is left out before anything that is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Coordinates that are sorted together: bounds the memory.
_TOGETHER = 1 << 18
#: 0.29 of 100 is a little less than 29 in binary.
_ROUNDING = 1e-9


def trimmed_mean(
    parts: Sequence[Tensor], wide: torch.dtype, weights: Sequence[float], trim: float
) -> Tensor:
    """The weighted mean of what is left without the ``trim`` largest and smallest, rounded down to
    whole parts; (n,) in the type ``wide``."""
    out = int(trim * len(parts) + _ROUNDING)

    def middle(values: Tensor, weighs: Tensor) -> Tensor:
        values, weighs = values[out : len(values) - out], weighs[out : len(weighs) - out]
        return (values * weighs).sum(0) / weighs.sum(0)

    return _by_coordinate(parts, wide, weights, middle)


def median(parts: Sequence[Tensor], wide: torch.dtype, weights: Sequence[float]) -> Tensor:
    """The weighted median, the mean of the two middle ones where it lies between them; (n,) in the
    type ``wide``."""

    def middle(values: Tensor, weighs: Tensor) -> Tensor:
        up_to = weighs.cumsum(0)
        half = up_to[-1] / 2
        lower = (up_to < half).sum(0, keepdim=True)
        upper = (up_to <= half).sum(0, keepdim=True)
        return (values.gather(0, lower) + values.gather(0, upper))[0] / 2

    return _by_coordinate(parts, wide, weights, middle)


def _by_coordinate(
    parts: Sequence[Tensor],
    wide: torch.dtype,
    weights: Sequence[float],
    middle: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """``middle(values, weights)``, both (parts, coordinates) and ascending in the values."""
    given = torch.tensor(weights, dtype=wide)
    found = [torch.empty(0, dtype=wide)]
    for begin in range(0, len(parts[0]), _TOGETHER):
        stacked = torch.stack([part[begin : begin + _TOGETHER].to(wide) for part in parts])
        values, order = stacked.sort(stable=True, dim=0)
        found.append(middle(values, given[order]))
    return torch.cat(found)
