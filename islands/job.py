"""From an experiment to everything a run needs: model, data, network and clock, checked before it
starts.

Whatever a user can get wrong about an experiment shows here, in one message, before an actor
exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from islands.clock import ComputeModel, FixedSteps, flop_seconds
from islands.compression.formats import Buffer
from islands.config import Experiment
from islands.data import Corpus, Shard, load_corpus, split
from islands.errors import InputError
from islands.flat import pack_state
from islands.layout import Layout
from islands.methods import Method
from islands.models import build_model, check_model, must_have_shapes
from islands.network import Topology
from islands.optim import must_be_available
from islands.plugins import one_line
from islands.replica import ReplicaSpec
from islands.rng import seed_for
from islands.units import format_bytes
from islands.warm_start import distinct, load_model, warm_up


@dataclass(frozen=True)
class Job:
    """One run, ready to start. Travels to the coordinator; only ``corpus.train`` goes another way.

    ``initial`` is the model that every worker starts from, ``parameters`` the number of all its
    parameters, ``layout`` the trainable ones arranged by the method's fragments, ``shards`` what
    each worker draws from.
    """

    experiment: Experiment
    topology: Topology
    compute: ComputeModel
    corpus: Corpus
    layout: Layout
    initial: Mapping[str, Buffer]
    initial_bytes: int
    parameters: int
    synced_buffers: tuple[str, ...]
    device: str
    per_transfer: bool
    shards: tuple[Shard, ...]

    @property
    def workers(self) -> int:
        return self.topology.workers

    @property
    def island_of(self) -> list[str]:
        """Each worker's island."""
        return [i.name for i in self.experiment.cluster.islands for _ in range(i.workers)]

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one worker trains on in one local step."""
        data = self.experiment.data
        assert data.window is not None
        return data.batch * data.window * self.experiment.optimizer.accumulate

    def replica(self, worker: int) -> ReplicaSpec:
        """What the given worker is made from."""
        return ReplicaSpec(
            self.experiment,
            worker,
            self.workers,
            self.layout,
            self.initial,
            self.synced_buffers,
            self.device,
            self.shards[worker],
        )

    def on(self, device: str) -> Job:
        """The same job with its workers on another device."""
        return replace(self, device=device)


def prepare(experiment: Experiment, *, per_transfer: bool = False, device: str = "cpu") -> Job:
    """Check an experiment against its data and model, and make what the run starts from.

    Raises InputError for a corpus that is too short, a model that does not fit, and the like.
    """
    experiment = experiment.resolved()
    data = experiment.data
    assert data.window is not None
    assert data.tokenizer is not None
    assert data.vocab_size is not None
    workers = experiment.cluster.workers
    must_be_available(experiment.optimizer.name)
    _must_fit("steps", experiment.steps, 3 * 8 * workers * experiment.steps)
    _must_fit("data.batch", data.batch, 8 * data.batch * (data.window + 1))
    if type(experiment.method).close is not Method.close and not experiment.method.timed:
        name = experiment.method.name
        raise InputError(f"method: {name} closes rounds its own way, so it must set timed = True")
    corpus = load_corpus(data.name, data.tokenizer, data.vocab_size, data.window, data.column)
    topology = experiment.cluster.topology()
    shards = split(
        corpus.train,
        data.shards,
        workers=workers,
        window=data.window,
        seed=experiment.seed,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(experiment.seed, "model"))
        model = build_model(experiment.model.name, experiment.model.settings)
    must_have_shapes(model)
    if isinstance(experiment.warm_start, str):
        load_model(model, experiment.warm_start)
    layout = Layout.of(model)
    job = Job(
        experiment=experiment,
        topology=topology,
        compute=compute_model(experiment, sum(p.numel() for p in model.parameters())),
        corpus=corpus,
        layout=layout,
        initial=pack_state(model),
        initial_bytes=4
        * sum(t.numel() for t in distinct(model.state_dict(keep_vars=True)).values()),
        parameters=sum(p.numel() for p in model.parameters()),
        synced_buffers=(),
        device=device,
        per_transfer=per_transfer,
        shards=shards,
    )
    trial = torch.from_numpy(job.replica(0).batches(corpus.train).draw(0)[:2])
    job = replace(job, synced_buffers=check_model(model, trial, data.vocab_size))
    arranged = arrange(layout, experiment.method)
    if isinstance(experiment.warm_start, int) and experiment.warm_start:
        job = replace(job, initial=warm_up(job, experiment.warm_start))
    return replace(job, layout=arranged)


def arrange(layout: Layout, method: Method) -> Layout:
    """The tensors arranged by the method's fragments. Raises InputError if its streams do not
    fit."""
    try:
        return layout.arranged(method.streams(layout))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"method: {method.name} has no valid streams: {one_line(error)}"
        ) from error


#: Bytes of host memory that one setting may ask for.
MOST_BYTES = 8e9


def _must_fit(field: str, value: int, need_bytes: int) -> None:
    if need_bytes > MOST_BYTES:
        raise InputError(f"{field}: {value} would take {format_bytes(need_bytes)} of memory")


def compute_model(experiment: Experiment, parameters: int) -> ComputeModel:
    """Seconds per local step of every worker: the island's own time, or that of its arithmetic."""
    data = experiment.data
    assert data.window is not None
    tokens = data.batch * data.window * experiment.optimizer.accumulate
    seconds: list[float] = []
    for island in experiment.cluster.islands:
        if island.flops_per_second is not None:
            step_s = flop_seconds(parameters, tokens, island.flops_per_second)
        else:
            assert island.step_time is not None
            step_s = island.step_time
        seconds += [step_s] * island.workers
    return FixedSteps(tuple(seconds))


def pick_device(experiment: Experiment, gpus: float) -> str:
    """``cpu`` or ``cuda``, from what was asked for and how many GPUs there are.

    Raises InputError if CUDA was asked for and there is none.
    """
    if experiment.device == "cuda" and not gpus:
        raise InputError(
            "device: 'cuda' was asked for, but there is no GPU; choose 'auto' or 'cpu'"
        )
    return "cuda" if gpus and experiment.device != "cpu" else "cpu"


def gpus_per_worker(experiment: Experiment, gpus: float) -> float:
    """The share of a GPU that each worker asks Ray for: the setting, or an even split, at most
    one."""
    if experiment.gpus_per_worker is not None:
        return experiment.gpus_per_worker
    return min(1.0, gpus / experiment.cluster.workers)
