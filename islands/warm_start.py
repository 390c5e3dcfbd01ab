"""The model that a run starts from, when that is not a freshly drawn one.

DiLoCo's main experiments begin with a model that was trained densely for a while (Douillard et al.
2023, arXiv:2311.08105). Here that is either a number of dense steps, taken in this process before
the run begins, or a ``model.safetensors`` of an earlier run. Both are outside of the emulation:
they cost no emulated time and no bytes, and the summary says what was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from islands.compression.formats import Buffer
from islands.errors import InputError, RunError
from islands.flat import BufferSet, pack_state
from islands.methods import Arrival, Dense, Shared
from islands.models import model_defaults
from islands.replica import Replica

if TYPE_CHECKING:
    from islands.config import OptimizerConfig
    from islands.job import Job


def distinct(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict's tensors, tied ones once and under their first name."""
    first: dict[int, str] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):  # a module's extra state may be anything
            first.setdefault(id(tensor), name)
    return {name: state[name] for name in first.values()}


@torch.no_grad()
def load_model(model: nn.Module, path: str) -> None:
    """Load the parameters and persistent buffers of a ``model.safetensors`` into ``model``.

    Raises:
        InputError: no such file, not a safetensors file, or one of another model; the first tensor
            that does not fit is named.
    """
    if not Path(path).is_file():
        hint = "; name the model.safetensors in it" if Path(path).is_dir() else ""
        raise InputError(f"warm_start: {path!r} is {'a folder' if hint else 'no file'}{hint}")
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"warm_start: {path!r} is no safetensors file ({reason})") from None
    wanted = distinct(model.state_dict(keep_vars=True))
    for name, tensor in wanted.items():
        if name not in found:
            raise _another_model(path, f"it has no tensor {name!r}")
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            there, here = _kind(found[name]), _kind(tensor)
            raise _another_model(path, f"its {name!r} is {there}, but this model's is {here}")
    for name in found:
        if name not in wanted:
            raise _another_model(path, f"its {name!r} is no tensor of this one")
    for name, tensor in wanted.items():
        tensor.copy_(found[name])


def _another_model(path: str, why: str) -> InputError:
    return InputError(f"warm_start: {path!r} holds another model: {why}")


def _kind(tensor: Tensor) -> str:
    shape = " x ".join(map(str, tensor.shape)) or "one number"
    return f"{shape} of {str(tensor.dtype).removeprefix('torch.')}"


def warm_up(job: Job, steps: int) -> dict[str, Buffer]:
    """The model after ``steps`` dense steps, packed as :func:`islands.flat.pack_state` does.

    They are the steps of the same experiment with method ``dense``, so many ``steps`` and gradients
    that are averaged without rounding: same data, seed, optimizer, and a schedule that ends after
    them. The optimizer's moments are not kept. All workers' replicas are in this process.
    ``job.layout`` has one fragment.

    Raises:
        RunError: a loss is not finite.
    """
    dense = Dense(payload_dtype="fp64")
    experiment = job.experiment.model_copy(
        update={"method": dense, "steps": steps, "optimizer": _optimizer(job), "warm_start": 0}
    )
    job = replace(job, experiment=experiment, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a run: the number of threads changes the rounding
    try:
        with torch.random.fork_rng(devices=[]):
            replicas = [Replica(job.replica(w), job.corpus.train) for w in range(job.workers)]
            for step in range(steps):
                _dense_step(dense, replicas, step)
    finally:
        torch.set_num_threads(threads)
    replicas[0].flat.publish()
    return pack_state(replicas[0].flat.model)


def _optimizer(job: Job) -> OptimizerConfig:
    """The run's inner optimizer. Where the learning rate is that of a method with a step of its
    own, which no other optimizer could use, the model's default takes its place."""
    experiment = job.experiment
    if experiment.method.default_lr is None:
        return experiment.optimizer
    defaults = model_defaults(experiment.model.name, experiment.model.settings)
    return experiment.optimizer.model_copy(update={"lr": defaults.lr})


def _dense_step(dense: Dense, replicas: Sequence[Replica], step: int) -> None:
    losses = torch.tensor([replica.local_step() for replica in replicas])
    if not losses.isfinite().all():
        raise RunError(f"warm_start: the loss of dense step {step + 1} is not finite")
    payloads = [replica.send(0) for replica in replicas]
    arrivals = [Arrival(w, payload, step, step + 1) for w, payload in enumerate(payloads)]
    layout = replicas[0].flat.layout
    update = dense.combine(Shared(layout, replicas[0].state.params), 0, arrivals)
    statistics = [payload.buffers for payload in payloads if payload.buffers is not None]
    if statistics:
        update = replace(update, buffers=BufferSet.merge(statistics))
    for replica in replicas:
        replica.receive(0, update)
