"""Local SGD: many local steps, then plain parameter averaging (also: federated averaging).

Stich 2018, arXiv:1805.09767. Workers send their *difference* to the last average, so that a
low-precision wire rounds a small step and never the parameters themselves. This makes it DiLoCo
without an outer optimizer, and that is how it is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from islands.compression import Update
from islands.methods.base import Arrival, Shared, dense_update
from islands.methods.diloco import PseudoGradient


class LocalSGD(PseudoGradient):
    """Inner optimizer for ``sync_every`` steps, then everyone continues from the average."""

    name: str = "local_sgd"

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        part = shared.layout.fragments[fragment]
        shared.params[part] -= self.average(shared, fragment, arrivals)
        return dense_update(shared.params[part])
