"""The coordinator's work: drive the engine, combine payloads, evaluate, write the results.

The CoordinatorActor adds only Ray to this; the in-process run uses it as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from islands.compression import Statistics, decode
from islands.compression.formats import Buffer
from islands.data import validation_windows
from islands.engine import Engine, Interrupted
from islands.errors import RunError
from islands.flat import BufferSet, FlatModel, load_state, parameters_sha256
from islands.job import Job
from islands.methods import Shared
from islands.models import build_model, window_loss
from islands.plugins import one_line
from islands.protocols import Network, Workers
from islands.replica import learning_rate
from islands.results.display import Progress
from islands.results.folder import EXPERIMENT, MODEL, SUMMARY, write_json, write_text
from islands.results.recorder import RunRecorder
from islands.results.summary import summarize
from islands.timed import TimedEngine

#: Validation windows per forward pass: bounds the memory of an evaluation.
EVAL_BATCH = 64


class Evaluator:
    """The shared model on the coordinator, and its loss on the validation windows.

    ``flat.params`` are the shared parameters themselves; a method whose replicas hold them hands
    them over before each evaluation.
    """

    def __init__(self, job: Job) -> None:
        experiment = job.experiment
        assert experiment.data.window is not None
        model = build_model(experiment.model.name, experiment.model.settings)
        load_state(model, job.initial)
        self.flat = FlatModel(model.eval(), job.layout)
        self.buffers = BufferSet(model, job.synced_buffers)
        windows = validation_windows(
            job.corpus.val, experiment.data.window, experiment.eval.windows
        )
        self._windows: Tensor = torch.from_numpy(windows)

    @torch.no_grad()
    def evaluate(self, parameters: Sequence[Buffer], buffers: Statistics | None) -> float:
        """Mean loss in nats. The mean of ``parameters``, one replica's each and taken in fp64,
        replaces the current ones unless there is none, and so do ``buffers`` unless None."""
        if parameters:
            fmt = "fp64" if self.flat.params.dtype == torch.float64 else "fp32"
            mean = decode(parameters[0], fmt).to(torch.float64, copy=True)
            for other in parameters[1:]:
                mean += decode(other, fmt)
            self.flat.params.copy_(mean.div_(len(parameters)))
        if buffers is not None:
            self.buffers.unpack(buffers)
        self.flat.publish()
        total = 0.0
        for windows in torch.split(self._windows, EVAL_BATCH):
            total += float(window_loss(self.flat.model, windows)) * len(windows)
        return total / len(self._windows)

    def save(self, path: Path) -> None:
        """The shared model as safetensors, under its state dict's names; tied weights once."""
        self.flat.publish()
        persistent = self.flat.model.state_dict(keep_vars=True)
        seen: set[int] = set()
        tensors: dict[str, Tensor] = {}
        for name, tensor in persistent.items():
            if isinstance(tensor, Tensor) and id(tensor) not in seen:  # extra state is no tensor
                seen.add(id(tensor))
                tensors[name] = tensor.detach().clone().contiguous()
        unfinished = path.with_name(f".{path.name}.tmp")
        save_file(tensors, unfinished)
        unfinished.replace(path)


class Coordinator:
    """One run from its first plan to its summary."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self._started = time.monotonic()
        self._phase = "training"
        write_text(folder / EXPERIMENT, job.experiment.dump_yaml())
        self.recorder = RunRecorder(
            folder,
            island_of=job.island_of,
            steps=job.experiment.steps,
            fragments=len(job.layout.fragments),
            rate=learning_rate(job.experiment),
            compute=job.compute,
            mortal=job.timed and not job.experiment.method.timed,
        )
        self.evaluator = Evaluator(job)

    def run(
        self, workers: Workers, network: Network, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Train to the end and return the summary, which is also written.

        On a failed or interrupted run everything so far is written before RunError or Interrupted
        goes on to the caller.
        """
        job, experiment = self.job, self.job.experiment
        sizes = tuple(shard.tokens for shard in job.shards)
        params = self.evaluator.flat.params
        policy = experiment.policy
        shared = Shared(
            job.layout,
            params,
            shard_sizes=sizes,
            seed=experiment.seed,
            mean=policy.mean,
            trim=policy.trim,
            lr=learning_rate(experiment).at,
        )
        for note in job.notes:
            self.recorder.event(0.0, "note", experiment.method.name, note)
        drive = partial(
            TimedEngine,
            detect_s=experiment.detect or 0.0,
            heals=job.heals,
        )
        engine = (drive if job.timed else Engine)(
            method=experiment.method,
            shared=shared,
            steps=experiment.steps,
            eval_every=experiment.eval.every,
            island_of=job.island_of,
            workers=workers,
            network=network,
            recorder=self.recorder,
            evaluate=self.evaluator.evaluate,
            merge_buffers=self.evaluator.buffers.merge,
            stop=stop,
            wall=job.on_wall_clock,
            faults=job.faults,
            policy=experiment.policy,
            may_lose=job.may_lose,
        )
        for fault in experiment.faults:
            self.recorder.event(0.0, "fault", fault.kind, fault.settings())
        try:
            experiment.method.begin_shared(shared)
            engine.run()
            return self._finish("done")
        except (Interrupted, KeyboardInterrupt):
            self._salvage(engine, "interrupted")
            raise
        except RunError:
            self._salvage(engine, "failed")
            raise
        except Exception as error:  # the method's or the model's own code, on the coordinator
            self._salvage(engine, "failed")
            name = experiment.method.name
            raise RunError(f"method {name} failed on the coordinator: {one_line(error)}") from error

    def _salvage(self, engine: Engine, status: str) -> None:
        """Write what a run has that ends early; what cannot be had any more must not prevent it."""
        try:
            engine.settle()
        except Exception as error:  # the network is gone: the tables end where its times end
            now_s = max(clock.clock_s for clock in self.recorder.clocks)
            self.recorder.event(now_s, "untimed", "network", one_line(error))
        self._finish(status)

    def _finish(self, status: str) -> dict[str, Any]:
        self._phase = status
        self.recorder.close()
        self.evaluator.save(self.folder / MODEL)
        summary = summarize(
            self.job,
            self.recorder,
            status=status,
            parameters_sha256=parameters_sha256(self.evaluator.flat),
            wall_s=time.monotonic() - self._started,
            versions={name: package_version(name) for name in ("islands", "torch", "ray", "numpy")},
        )
        write_json(self.folder / SUMMARY, summary)
        return summary

    def progress(self) -> Progress:
        """Where the run is; may be asked from another thread."""
        recorder = self.recorder
        return Progress(
            step=recorder.steps_done,
            steps=self.job.experiment.steps,
            workers=self.job.workers,
            rounds=recorder.rounds,
            train_loss=recorder.last_loss,
            val_loss=recorder.evals[-1][2] if recorder.evals else None,
            emulated_s=max(clock.clock_s for clock in recorder.clocks),
            wire_bytes=recorder.wire_bytes,
            wan_bytes=recorder.wan_bytes,
            wall_s=time.monotonic() - self._started,
            phase=self._phase,
        )
