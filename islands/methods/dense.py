"""Dense synchronous data parallelism: every step, everyone's gradient is averaged.

The baseline of every comparison. The inner optimizer steps on the *averaged* gradient, and clipping
comes after averaging: clipping each worker's gradient first would be another algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from islands.compression import Payload, Update, decode, encode
from islands.methods.base import MEANS, Arrival, Context, Method, Shared, WorkerState, mean_of
from islands.policy import Mean


class Dense(Method):
    """All-reduce of the gradient after each step."""

    shared_in: ClassVar[Literal["coordinator", "replicas"]] = "replicas"
    name: str = "dense"

    @property
    def means(self) -> tuple[Mean, ...]:
        return MEANS

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        """Only the gradient: the optimizer steps when the average has come back."""
        return ctx.gradient(state, batch)

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        part = ctx.layout.fragments[fragment]
        return Payload(encode(state.grad[part], self.payload_dtype), self.payload_dtype)

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        state.grad[ctx.layout.fragments[fragment]] = decode(update.values, update.fmt)
        ctx.optimize(state)

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        mean = mean_of(arrivals, self.payload_dtype, shared=shared)
        return Update(encode(mean, self.payload_dtype), self.payload_dtype)
