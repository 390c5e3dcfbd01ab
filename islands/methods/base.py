"""What a method is: hyper-parameters, what a worker sends, and what is made of it.

A method never sees Ray, a clock or a network. Its worker side runs inside each replica and keeps
all of its state in :class:`WorkerState`; its coordinator side turns the payloads of a round into
one update. Adding a method is one file and a name (see the README).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from islands.compression import FloatFormat, Payload, Update, decode, encode
from islands.layout import Layout, Stream
from islands.methods.robust import median, trimmed_mean
from islands.policy import Mean

Collective = Literal["all_reduce", "all_gather", "star"]


@dataclass
class WorkerState:
    """Everything that makes one replica what it is; saved and restored whole.

    ``params``  (N,) master parameters, fp32 (fp64 for float64 models), in layout order
    ``grad``    (N,) gradient buffer of the same type
    ``step``    local steps taken
    ``slots``   the method's own tensors by name: anchor, momentum, residual, …
    """

    worker: int
    params: Tensor
    grad: Tensor
    step: int = 0
    slots: dict[str, Tensor] = field(default_factory=dict)

    def slot(self, name: str) -> Tensor:
        """The method's tensor of that name; zeros like the parameters when first asked for."""
        if name not in self.slots:
            self.slots[name] = torch.zeros_like(self.params)
        return self.slots[name]


@dataclass(frozen=True)
class Context:
    """What a method may use on a worker besides its state.

    ``gradient(state, batch)``  forward and backward; fills ``state.grad``, returns the mean loss
    ``optimize(state)``         one step of the inner optimizer from ``state.grad``
    ``lr()``                    the scheduled learning rate of the latest local step

    The rest are settings, for methods that take a step of their own: ``weight_decay``, ``clip`` (a
    bound on the gradient's norm, or None) and the experiment's ``seed``; ``may_lose``: payloads may
    get lost, so that :meth:`Method.send` must keep what :meth:`Method.lost` needs.
    """

    layout: Layout
    workers: int
    gradient: Callable[[WorkerState, Any], float]
    optimize: Callable[[WorkerState], None]
    lr: Callable[[], float] = lambda: 1.0
    weight_decay: float = 0.0
    clip: float | None = None
    seed: int = 0
    may_lose: bool = False


@dataclass
class Shared:
    """The coordinator's state of one run.

    ``params``       (N,) the shared parameters, or the initial ones where only the replicas hold
                     them
    ``slots``        the method's own objects by name: outer optimizers, …
    ``shard_sizes``  tokens of text that each worker draws from
    ``seed``         the experiment's
    ``mean``         how payloads are averaged: mean, trimmed_mean (without the largest and the
                     smallest ``trim`` of them at each coordinate) or median (of each coordinate)
    ``lr(step)``     the scheduled learning rate of local step ``step``, counted from 0
    """

    layout: Layout
    params: Tensor
    slots: dict[str, Any] = field(default_factory=dict)
    shard_sizes: tuple[int, ...] = ()
    seed: int = 0
    mean: Mean = "mean"
    trim: float = 0.1
    lr: Callable[[int], float] = lambda step: 1.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One payload that takes part in a round. ``base`` is the version it was measured against,
    ``weight`` how much it counts: less than 1 if it came late and is discounted."""

    worker: int
    payload: Payload
    base: int
    step: int
    time_s: float = 0.0
    weight: float = 1.0


class Method(BaseModel):
    """A frozen set of hyper-parameters and the algorithm that they belong to."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    #: Where the shared parameters live: on the coordinator, in the replicas, which are equal, or
    #: in replicas that have diverged, whose mean they are.
    shared_in: ClassVar[Literal["coordinator", "replicas", "diverged"]] = "coordinator"
    #: True if rounds close by the clock, so that the network's times decide what is trained.
    timed: ClassVar[bool] = False
    #: Peak learning rate of a method that takes a step of its own; None: the model's, which is
    #: meant for the inner optimizer.
    default_lr: ClassVar[float | None] = None
    default_weight_decay: ClassVar[float] = 0.1
    #: Whether a worker measures what it sends from an anchor, and may go on from an old one.
    anchored: ClassVar[bool] = False
    #: Whether a payload may take part in a later round than its own.
    takes_late: ClassVar[bool] = True
    #: Error feedback: the slots that sending takes something out of.
    feedback: ClassVar[tuple[str, ...]] = ()

    name: str
    payload_dtype: FloatFormat = "bf16"

    @property
    def collective(self) -> Collective:
        """Which collective carries a round on the emulated network; it may depend on the settings.

        A method for which it does not just sets ``collective: ClassVar[Collective] = …``.
        """
        return "all_reduce"

    @property
    def means(self) -> tuple[Mean, ...]:
        """Which of :attr:`Shared.mean` ``combine`` can form. Methods that average with
        :func:`weighted_mean` or :func:`mean_of`, and hand them ``shared``, can form ``MEANS``."""
        return ("mean",)

    # --- when ---------------------------------------------------------------------------------
    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        """The fragments and their schedules. Default: the whole model after every step."""
        return (Stream(tuple(t.name for t in layout.tensors), period=1, first=1),)

    def notes(self, layout: Layout) -> tuple[str, ...]:
        """What a user must know about how this method runs on this model, a line each."""
        return ()

    @property
    def restores(self) -> bool:
        """Whether :meth:`lost` can return a payload to where it came from: not if the next one was
        taken out of there before the loss is known."""
        return True

    @property
    def measures_anew(self) -> bool:
        """For anchored methods: whether the next payload is measured from what was received."""
        return True

    @property
    def settled_after(self) -> int:
        """Local steps after which payloads have their final size; 0 if they have it at once."""
        return 0

    def close(self, arrivals: Sequence[Arrival], alive: int, now_s: float) -> bool:
        """Whether the open round of a fragment closes now. Default: when everyone has arrived."""
        return len(arrivals) == alive

    # --- worker side --------------------------------------------------------------------------
    def begin(self, state: WorkerState, ctx: Context) -> None:
        """Called with the initial parameters in place, or those with which a worker comes back."""

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        """One local step on one batch; returns its loss. Default: an inner optimizer step."""
        loss = ctx.gradient(state, batch)
        ctx.optimize(state)
        return loss

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        """This worker's contribution to the fragment's round."""
        raise NotImplementedError

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        """Take in what the round made of the contributions."""
        raise NotImplementedError

    def reanchor(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        """Learn what a round made of the contributions whose result this worker is not to adopt.

        Default: adopt it all the same, because replicas that hold the shared parameters must stay
        equal. A method with an anchor measures from there on, and leaves its parameters alone.
        """
        self.receive(state, fragment, update, ctx)

    def keep(self, state: WorkerState, fragment: int, ctx: Context, **unsent: Tensor) -> None:
        """For :meth:`send`: remember what the slots of ``feedback`` would hold had nothing been
        sent, each (n,) and not written to any more; without ``unsent``, that they hold it."""
        if ctx.may_lose:
            for name in self.feedback:
                state.slots.pop(_unsent(name, fragment), None)
            state.slots |= {_unsent(name, fragment): value for name, value in unsent.items()}

    def lost(self, state: WorkerState, fragment: int, ctx: Context) -> None:
        """What was sent of the fragment last did not arrive; called before it is sent again.

        The slots of ``feedback``, a residual or a momentum that was masked, become what they would
        be had nothing been sent, bit for bit. What a method without error feedback does not send
        is lost anyway, and so is this.
        """
        for name in self.feedback:
            unsent = state.slots.pop(_unsent(name, fragment), None)
            if unsent is not None:
                state.slot(name)[ctx.layout.fragments[fragment]] = unsent

    def shared_params(self, state: WorkerState) -> Tensor:
        """Where the replicas hold the shared parameters: this one's, (N,)."""
        return state.params

    # --- coordinator side -----------------------------------------------------------------------
    def begin_shared(self, shared: Shared) -> None:
        """Called once, with the initial parameters in place."""

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        """One update from the round's payloads, which come in worker order and are never empty."""
        raise NotImplementedError

    def similarity(
        self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]
    ) -> Tensor | None:
        """Cosines between what the workers of a round sent, (arrivals, arrivals); NaN for a zero
        vector. Default: None, nothing to compare."""
        return None


def _unsent(name: str, fragment: int) -> str:
    return f"{name} unsent of {fragment}"


#: Every way to average, for :attr:`Method.means`.
MEANS: tuple[Mean, ...] = ("mean", "trimmed_mean", "median")


def mean_of(
    arrivals: Sequence[Arrival],
    fmt: FloatFormat,
    weights: Sequence[float] | None = None,
    shared: Shared | None = None,
) -> Tensor:
    """The (weighted) mean payload, rounded once to ``fmt``: what a receiver of the all-reduce
    holds. ``shared`` says which mean; None: the plain one. Each arrival's own weight comes on top.

    What is summed is what was decoded, in worker order, in fp32 (fp64 for fp64 payloads). Partial
    sums are not rounded, unlike in a real ring (a stated limit of the emulation). Returns (n,).
    """
    wide = torch.float64 if fmt == "fp64" else torch.float32
    parts = (decode(arrival.payload.values, fmt) for arrival in arrivals)
    mean = weighted_mean(parts, wide, weights_of(arrivals, weights), shared)
    return decode(encode(mean, fmt), fmt).to(wide)


def weights_of(arrivals: Sequence[Arrival], weights: Sequence[float] | None = None) -> list[float]:
    """Each arrival's weight, times the method's own if there are such."""
    own = weights or [1.0] * len(arrivals)
    return [arrival.weight * weight for arrival, weight in zip(arrivals, own, strict=True)]


def weighted_mean(
    parts: Iterable[Tensor],
    wide: torch.dtype,
    weights: Sequence[float],
    shared: Shared | None = None,
) -> Tensor:
    """Σ wᵢ·partᵢ / Σ wᵢ, summed in the order given and in the type ``wide``, or the mean that
    ``shared`` asks for; (n,)."""
    if shared is not None and shared.mean == "median":
        return median(list(parts), wide, weights)
    if shared is not None and shared.mean == "trimmed_mean":
        return trimmed_mean(list(parts), wide, weights, shared.trim)
    total: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        if total is None:
            total = part.to(wide, copy=True)
            if weight != 1.0:
                total *= weight
        else:
            total.add_(part, alpha=weight)
    assert total is not None
    return total.div_(sum(weights))


def dense_update(values: Tensor) -> Update:
    """Values (n,) handed out in their own precision, fp32 or fp64."""
    fmt = "fp64" if values.dtype == torch.float64 else "fp32"
    return Update(encode(values, fmt), fmt)


def clip_gradient(state: WorkerState, bound: float | None) -> None:
    """Scale the worker's own gradient down to a norm of at most ``bound``, over all tensors."""
    if bound is not None:
        norm = float(torch.linalg.vector_norm(state.grad))
        if norm > bound:
            state.grad.mul_(bound / norm)


def step_along(state: WorkerState, fragment: int, direction: Tensor, ctx: Context) -> None:
    """θ ← (1 − lr·λ)·θ − lr·direction on one fragment: a method's own step, decoupled decay."""
    params, lr = state.params[ctx.layout.fragments[fragment]], ctx.lr()
    if ctx.weight_decay:
        params.mul_(1.0 - lr * ctx.weight_decay)
    params.sub_(direction.to(params), alpha=lr)
