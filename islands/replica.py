"""One worker: a model, its optimizer, its method state and its data, and how it carries out a plan.

This is the whole of what a WorkerActor does; the actor only adds Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from islands.compression import Payload, Update, decode, encode
from islands.compression.formats import Buffer
from islands.config import Experiment
from islands.data import Batches, Shard
from islands.flat import BufferSet, FlatModel, load_state
from islands.layout import Layout
from islands.methods import Context, WorkerState
from islands.models import build_model, window_loss
from islands.optim import InnerOptimizer, LearningRate
from islands.plan import Answer, Apply, Held, Lost, PlanOp, Reset, SendOut, Snapshot, Steps
from islands.plugins import one_line
from islands.rng import seed_for


@dataclass(frozen=True)
class ReplicaSpec:
    """Everything a replica is made from. ``experiment`` is resolved; ``initial`` is every worker's
    initial model; ``synced_buffers`` are the names of the buffers that training changes; ``shard``
    is where the worker's windows come from; ``may_lose``: payloads may get lost on their way."""

    experiment: Experiment
    worker: int
    workers: int
    layout: Layout
    initial: Mapping[str, Buffer]
    synced_buffers: tuple[str, ...]
    device: str
    shard: Shard
    may_lose: bool = False

    def batches(self, tokens: NDArray[Any]) -> Batches:
        """This worker's own stream of the training tokens."""
        experiment = self.experiment
        return Batches(
            tokens,
            self.shard,
            worker=self.worker,
            batch=experiment.data.batch,
            seed=experiment.seed,
        )


def learning_rate(experiment: Experiment) -> LearningRate:
    """The schedule that a resolved experiment asks for."""
    optimizer = experiment.optimizer
    assert optimizer.lr is not None
    assert optimizer.warmup is not None
    return LearningRate(optimizer.lr, optimizer.warmup, experiment.steps, optimizer.schedule)


def master_bytes(params: Tensor) -> Buffer:
    """Master parameters as bytes of their own type."""
    return encode(params, "fp64" if params.dtype == torch.float64 else "fp32")


class Replica:
    """One worker's training state and the loop that advances it."""

    def __init__(self, spec: ReplicaSpec, tokens: NDArray[Any]) -> None:
        experiment = spec.experiment
        self.method = experiment.method
        self._seed = experiment.seed
        self._step = 0  # whose gradient `state.grad` is; the learning rate's counter
        self._accumulate = experiment.optimizer.accumulate
        self._device = torch.device(spec.device)
        assert experiment.optimizer.weight_decay is not None
        model = build_model(experiment.model.name, experiment.model.settings)
        load_state(model, spec.initial)
        self.flat = FlatModel(model.to(self._device).train(), spec.layout)
        self.buffers = BufferSet(model, spec.synced_buffers)
        self.state = WorkerState(spec.worker, self.flat.params, self.flat.grad)
        self.optimizer = InnerOptimizer(
            experiment.optimizer.name,
            self.flat.params,
            self.flat.grad,
            learning_rate(experiment),
            weight_decay=experiment.optimizer.weight_decay,
            clip=experiment.optimizer.clip,
            layout=spec.layout,
        )
        self._batches = spec.batches(tokens)
        self.context = Context(
            spec.layout,
            spec.workers,
            self._gradient,
            self._optimize,
            lambda: self.optimizer.rate.at(self._step),
            experiment.optimizer.weight_decay,
            experiment.optimizer.clip,
            experiment.seed,
            spec.may_lose,
        )
        self._first_buffers = self.buffers.pack()
        self.method.begin(self.state, self.context)

    # --- what a method may call ---------------------------------------------------------------
    def _gradient(self, state: WorkerState, batch: Sequence[Tensor]) -> float:
        """Mean gradient over the micro-batches (each (batch, window+1) int64) into
        ``state.grad``."""
        self.flat.publish()
        self.flat.clear_grad()
        total = 0.0
        for micro in batch:
            loss = window_loss(self.flat.model, micro) / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.flat.collect_grad()
        return total

    def _optimize(self, state: WorkerState) -> None:
        self.optimizer.step(self._step)

    # --- plans ----------------------------------------------------------------------------------
    def run(self, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> Answer:
        """Carry out a plan. An exception becomes the answer's ``failure``, with what was done."""
        answer = Answer([], [], [])
        doing = ""
        try:
            for op in plan:
                if isinstance(op, Steps):
                    for _ in range(op.count):
                        doing = f"step {self.state.step + 1}"
                        answer.losses.append(self.local_step())
                elif isinstance(op, SendOut):
                    doing = f"send of fragment {op.fragment} after step {self.state.step}"
                    answer.payloads.append(self.send(op.fragment))
                elif isinstance(op, Apply):
                    doing = f"receive of fragment {op.fragment} after step {self.state.step}"
                    self.receive(op.fragment, updates[op.update], op.adopt)
                elif isinstance(op, Lost):
                    doing = f"loss of fragment {op.fragment} after step {self.state.step}"
                    self.method.lost(self.state, op.fragment, self.context)
                elif isinstance(op, Reset):
                    doing = f"return after step {op.step}"
                    self.reset(updates[op.update], op.step)
                elif isinstance(op, Snapshot):
                    answer.snapshots.append(self.snapshot(op.whole))
        except (Exception, SystemExit) as error:
            return answer._replace(failure=f"{doing}: {one_line(error)}")
        return answer

    def local_step(self) -> float:
        """One local step on this worker's next batch; returns the loss."""
        self._step = step = self.state.step
        # Dropout and the like draw from (seed, worker, step), so that neither the other replicas in
        # this process nor the way a run is cut into plans can change them.
        seed = seed_for(self._seed, "torch", self.state.worker, step)
        # Not `torch.manual_seed`: it also seeds devices that are absent, at a fifth of a small
        # step.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        loss = self.method.local_step(self.state, self.batch(step), self.context)
        self.state.step = step + 1
        return loss

    def batch(self, step: int) -> list[Tensor]:
        """The micro-batches of one local step: ``accumulate`` tensors (batch, window+1) int64."""
        first = step * self._accumulate
        draws = (self._batches.draw(first + i) for i in range(self._accumulate))
        return [torch.from_numpy(windows).to(self._device) for windows in draws]

    def send(self, fragment: int) -> Payload:
        payload = self.method.send(self.state, fragment, self.context)
        if not isinstance(payload, Payload):
            raise TypeError(f"send must return a Payload, but returned {type(payload).__name__}")
        if fragment == 0 and self.buffers:
            payload = replace(payload, buffers=self.buffers.pack())
        return payload

    def receive(self, fragment: int, update: Update | None, adopt: bool = True) -> None:
        """Take in an update, unless the round committed nothing. Without ``adopt`` the worker goes
        on from what it has, running statistics included, unless its replica must stay equal."""
        if update is None:
            return
        take_in = self.method.receive if adopt else self.method.reanchor
        take_in(self.state, fragment, update, self.context)
        if update.buffers is not None and (adopt or self.method.shared_in == "replicas"):
            self.buffers.unpack(update.buffers)

    def snapshot(self, whole: bool) -> Held:
        """The parameters and statistics as they are, and the inner optimizer's state."""
        optimizer = self.optimizer.inner.state_dict() if whole else None
        shared = self.method.shared_params(self.state)
        return Held(master_bytes(shared), self.buffers.pack(), optimizer)

    def reset(self, update: Update | None, step: int) -> None:
        """Be a worker that knows nothing but the shared model, and goes on after ``step`` local
        steps. ``update`` holds all parameters, (N,) in layout order; statistics that it has not
        are the initial ones."""
        assert update is not None
        self.state.params.copy_(decode(update.values, update.fmt))
        self.state.grad.zero_()
        self.state.slots.clear()
        self.state.step, self._step = step, max(0, step - 1)
        if update.optimizer is None:
            self.optimizer.inner.reset()
        else:
            self.optimizer.inner.load_state_dict(update.optimizer)
        found = self._first_buffers if update.buffers is None else update.buffers
        if found is not None:
            self.buffers.unpack(found)
        self.method.begin(self.state, self.context)

    # --- whole state ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, copied. Random numbers and the position in the
        data are functions of the step, and so is the learning rate."""
        return {
            "step": self.state.step,
            "gradient_of": self._step,
            "params": self.state.params.clone(),
            "slots": {name: tensor.clone() for name, tensor in self.state.slots.items()},
            "optimizer": self.optimizer.inner.state_dict(),
            "buffers": self.buffers.pack(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken, on a replica of the same spec."""
        self.state.step, self._step = saved["step"], saved["gradient_of"]
        self.state.params.copy_(saved["params"])
        self.state.slots = {name: tensor.clone() for name, tensor in saved["slots"].items()}
        self.optimizer.inner.load_state_dict(saved["optimizer"])
        if saved["buffers"] is not None:
            self.buffers.unpack(saved["buffers"])
