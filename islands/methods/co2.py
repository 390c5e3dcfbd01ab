"""CO2: local SGD with an outer momentum, whose communication is hidden behind a whole round.

Sun et al. 2024, arXiv:2401.16265. A round's average is applied when the next round ends, so it
moves parameters that have gone on since it was measured. Two things keep that stable: what arrives
is divided by a penalty on that staleness gap, and no element of the outer momentum exceeds a bound:

    u ← clip(β·u + (x₀ − x̄)/Λ, ±φ)        x ← x − α·u

The gap is measured as in gap-aware training (Barkai et al. 2020, arXiv:1909.10802), in units of an
update: Λ = 1 + ‖last outer step‖ / ‖largest outer step so far‖, because exactly one outer step lies
between the parameters that a worker measured from and those that its result moves. That is between
1 and 2; the authors' code has a constant instead, which ``penalty`` sets. As there, u is in units
of the parameters. Bytes are those of local SGD.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from islands.compression import Update
from islands.methods.base import Arrival, Shared, dense_update
from islands.methods.diloco import PseudoGradient


class CO2(PseudoGradient):
    """One round of overlap, staleness penalty and clipped outer momentum.

    ``slow_lr``        α
    ``slow_momentum``  β
    ``penalty``        Λ if it is to be constant (1: none); null: measured in every round
    ``clip``           φ, for each element of the outer momentum; null: no bound
    """

    name: str = "co2"
    slow_lr: float = Field(1.0, gt=0, allow_inf_nan=False)
    slow_momentum: float = Field(0.5, ge=0, lt=1)
    penalty: float | None = Field(None, ge=1, allow_inf_nan=False)
    clip: float | None = Field(1.0, gt=0, allow_inf_nan=False)

    @property
    def lag(self) -> int:
        return self.sync_every

    def begin_shared(self, shared: Shared) -> None:
        shared.slots["momentum"] = torch.zeros_like(shared.params)
        shared.slots["moved"] = shared.slots["most"] = 0.0  # norms of outer steps: last, largest

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        part = shared.layout.fragments[fragment]
        params, momentum = shared.params[part], shared.slots["momentum"][part]
        mean = self.average(shared, fragment, arrivals).to(params)
        momentum.mul_(self.slow_momentum).add_(mean, alpha=1.0 / self._gap(shared))
        if self.clip is not None:
            momentum.clamp_(-self.clip, self.clip)
        params.sub_(momentum, alpha=self.slow_lr)
        shared.slots["moved"] = self.slow_lr * float(torch.linalg.vector_norm(momentum))
        shared.slots["most"] = max(shared.slots["most"], shared.slots["moved"])
        return dense_update(params)

    def _gap(self, shared: Shared) -> float:
        if self.penalty is not None:
            return self.penalty
        most: float = shared.slots["most"]
        return 1.0 + shared.slots["moved"] / most if most else 1.0
