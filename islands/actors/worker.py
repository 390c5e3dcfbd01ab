"""The WorkerActor: one replica in a process of its own."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from numpy.typing import NDArray

from islands.compression import Update
from islands.compression.formats import Buffer
from islands.plan import Answer, PlanOp
from islands.plugins import look_also_in
from islands.replica import Replica, ReplicaSpec

#: More bytes than this go through the object store; fewer travel inside the call.
INLINE_BYTES = 100_000


class WorkerActor:
    """Owns one replica. Kept and set up anew for each run of a study."""

    def __init__(self, paths: Sequence[str]) -> None:
        """``paths``: where the driver's imports come from."""
        look_also_in(paths)
        # One thread each: the workers share a host, and the number of threads changes the rounding.
        torch.set_num_threads(1)
        gc.freeze()  # what the imports left lives for ever: the collector need not walk through it

    def set_up(self, spec: ReplicaSpec, initial: Mapping[str, Buffer], tokens: NDArray[Any]) -> str:
        """Make the replica of ``spec`` with the ``initial`` model; returns the node's id.

        ``initial`` and ``tokens`` are views of the node's object store, shared by its workers.
        """
        self._replica = Replica(replace(spec, initial=initial), tokens)
        return str(ray.get_runtime_context().get_node_id())

    def run(self, packed: bytes, *large: Update) -> bytes | Answer:
        """Carry out a plan (see :func:`pack`); ``large`` updates come from the object store."""
        plan, updates = unpack(packed, large)
        answer = self._replica.run(plan, updates)
        small = sum(payload.nbytes for payload in answer.payloads) <= INLINE_BYTES
        return pickle.dumps(answer, protocol=5) if small and not answer.snapshots else answer


def pack(plan: Sequence[PlanOp], updates: Sequence[Update | int | None]) -> bytes:
    """A plan with its small updates as bytes; an int stands for a large one by its position.

    Every worker gets mostly the same plan, and Ray would pickle it anew for each of them.
    """
    return pickle.dumps((plan, updates), protocol=5)


def unpack(
    packed: bytes, large: Sequence[Update]
) -> tuple[Sequence[PlanOp], Sequence[Update | None]]:
    """The plan and updates that :func:`pack` was given, with the large ones in place."""
    plan, updates = pickle.loads(packed)
    return plan, [large[u] if isinstance(u, int) else u for u in updates]
