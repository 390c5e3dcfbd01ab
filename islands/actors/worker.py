"""The WorkerActor: one replica in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
from numpy.typing import NDArray

from islands.compression import Update
from islands.plan import Answer, PlanOp
from islands.plugins import look_also_in
from islands.replica import Replica, ReplicaSpec


class WorkerActor:
    """Owns one replica. Kept and set up anew for each run of a study."""

    def __init__(self, paths: Sequence[str]) -> None:
        """``paths``: where the driver's imports come from."""
        look_also_in(paths)
        # One thread each: the workers share a host, and the number of threads changes the rounding.
        torch.set_num_threads(1)

    def set_up(self, spec: ReplicaSpec, tokens: NDArray[Any]) -> str:
        """Make the replica; ``tokens`` is a view of the node's object store. Returns the node's
        id."""
        self._replica = Replica(spec, tokens)
        return str(ray.get_runtime_context().get_node_id())

    def run(self, plan: Sequence[PlanOp], *updates: Update | None) -> Answer:
        """Carry out a plan. Large updates are references, which Ray resolves before the call."""
        return self._replica.run(plan, updates)
