"""From an experiment to everything a run needs: model, data, network and clock, checked before it
starts.

Whatever a user can get wrong about an experiment shows here, in one message, before an actor
exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, nan

import torch

from islands.clock import ComputeModel, FixedSteps, flop_seconds
from islands.compression.formats import Buffer
from islands.config import Cluster, Experiment
from islands.data import Corpus, Shard, load_corpus, split
from islands.errors import InputError
from islands.fault_kinds import TIMED_KINDS
from islands.faults import Faults
from islands.fields import MEASURED
from islands.flat import pack_state
from islands.fragments import hidden_matrices
from islands.layout import Layout
from islands.methods import Method
from islands.models import build_model, check_model, must_have_shapes
from islands.network import Topology
from islands.network.choose import schemes_seconds
from islands.network.emulation import Emulation
from islands.optim import must_be_available
from islands.outages import with_outages
from islands.plugins import one_line
from islands.probe import Payloads, step_seconds
from islands.replica import ReplicaSpec
from islands.rng import seed_for
from islands.stragglers import Stretched
from islands.units import format_bytes, format_seconds
from islands.warm_start import distinct, load_model, warm_up


@dataclass(frozen=True)
class Job:
    """One run, ready to start. Travels to the coordinator; only ``corpus.train`` goes another way.

    ``initial`` is the model that every worker starts from, ``parameters`` the number of all its
    parameters, ``layout`` the trainable ones arranged by the method's fragments, ``shards`` what
    each worker draws from. ``chosen_collective`` says which collective was chosen and why, if
    ``collective`` was auto.
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
    chosen_collective: str = ""

    @property
    def workers(self) -> int:
        return self.topology.workers

    @property
    def island_of(self) -> list[str]:
        """Each worker's island."""
        return [i.name for i in self.experiment.cluster.islands for _ in range(i.workers)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user must know about how the method runs on this model and so many steps."""
        method, steps = self.experiment.method, self.experiment.steps
        lost = [
            (steps - stream.first) % stream.period
            for stream in method.streams(self.layout)
            if stream.overlap == stream.period and steps > stream.first
        ]
        notes = method.notes(self.layout)
        if self.experiment.optimizer.name == "muon" and not hidden_matrices(self.layout):
            notes += ("optimizer: the model has no hidden matrices, so muon is adamw here",)
        if any(lost):
            notes += (
                f"steps: after {steps} steps what is on its way lands on up to {max(lost)} local "
                f"steps that were not sent yet; end at a multiple of the period",
            )
        return notes

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
            self.may_lose,
        )

    @property
    def faults(self) -> Faults:
        """What goes wrong."""
        experiment = self.experiment
        return Faults(experiment.faults, experiment.seed, self.island_of, experiment.replicas)

    @property
    def may_lose(self) -> bool:
        """Whether a payload may count for nothing, so that workers keep what they send."""
        faults = self.faults
        return faults.drops or faults.corrupts or self.timed

    @property
    def timed(self) -> bool:
        """Whether rounds close by the clock, so that times decide what is trained."""
        experiment = self.experiment
        clocked = experiment.policy.timed or self.faults.crashes_happen
        return experiment.method.timed or clocked

    def heals(self, worker: int, time_s: float, both: bool = False) -> float:
        """From when on a worker can reach the coordinator that wants to at ``time_s``, and with
        ``both`` also be reached; infinite: never. Links that are cut hold up the word that it is
        ready."""
        topology = self.topology
        here, there = topology.island_of[worker], topology.coordinator_island
        route = [*topology.routes[here][there], *(topology.routes[there][here] if both else ())]
        while True:
            blocked_s = time_s
            for link in route:
                bandwidth = topology.links[link].bandwidth
                if bandwidth is not None:
                    value, until_s = bandwidth.piece(time_s)
                    blocked_s = until_s if value == 0.0 else blocked_s
            if blocked_s in (time_s, inf):
                return blocked_s
            time_s = blocked_s

    @property
    def on_wall_clock(self) -> bool:
        """Whether the network delivers at the pace of the real world."""
        return self.experiment.clock == "wall"

    def emulation(self) -> Emulation:
        """What the run's network is made from."""
        experiment = self.experiment
        return Emulation(
            self.topology,
            self.compute,
            experiment.policy.collective(experiment.method.collective),
            scheme=experiment.collective,
            ring_order=experiment.ring_order,
            seed=experiment.seed,
            timed=self.timed,
            per_transfer=self.per_transfer,
            initial_bytes=self.initial_bytes,
            time_scale=experiment.time_scale if self.on_wall_clock else None,
            spared=() if self.timed else tuple(self._spared()),
        )

    def _spared(self) -> Iterator[tuple[str, Topology, ComputeModel]]:
        """Links and speeds without one kind of fault after the other, as far as there are any."""
        faults, topology, compute = self.experiment.faults, self.topology, self.compute
        for kind in TIMED_KINDS:
            kept = tuple(fault for fault in faults if fault.kind != kind)
            if len(kept) < len(faults):
                topology = with_outages(self.experiment.cluster.topology(), kept)
                if isinstance(compute, Stretched):
                    compute = compute.without(kind)
                yield kind, topology, compute
            faults = kept

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
    _must_last(experiment)
    corpus = load_corpus(data.name, data.tokenizer, data.vocab_size, data.window, data.column)
    topology = with_outages(experiment.cluster.topology(), experiment.faults)
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
    job = _choose_collective(_measure(replace(job, layout=arranged)))
    return replace(job, compute=job.faults.compute(job.compute))


def _measure(job: Job) -> Job:
    """Time a step on this host, if an island's speed is to be measured, and keep to that."""
    cluster = job.experiment.cluster
    if not any(island.step_time == MEASURED for island in cluster.islands):
        return job
    device = pick_device(job.experiment, float(torch.cuda.device_count()))
    cluster = cluster.measured(step_seconds(job, device))
    experiment = job.experiment.model_copy(update={"cluster": cluster})
    return replace(job, experiment=experiment, compute=compute_model(experiment, job.parameters))


def _choose_collective(job: Job) -> Job:
    """Resolve ``collective: auto`` to what is quickest for the method's payloads."""
    if job.experiment.collective != "auto":
        return job
    needs_star = job.experiment.method.collective == "star"
    payloads = None if needs_star else Payloads.of(job)
    experiment, why = with_collective(job.experiment, job.layout, payloads)
    return replace(job, experiment=experiment, chosen_collective=why)


def with_collective(
    experiment: Experiment, layout: Layout, payloads: Payloads | None
) -> tuple[Experiment, str]:
    """``experiment``, whose collective is auto, with the quickest one, and why in a line.

    Quickest on an otherwise idle network, as the mean over the method's synchronisations if its
    fragments differ. A method that needs a star gets one, for which nothing (None) is compared.
    """
    if payloads is None:
        return experiment.model_copy(update={"collective": "star"}), ""
    method, topology = experiment.method, experiment.cluster.topology()
    shares = [1 / stream.period for stream in method.streams(layout)]
    seconds: dict[str, float] = {}
    for share, size, itemsize in zip(shares, payloads.sizes, payloads.itemsizes, strict=True):
        found = schemes_seconds(
            topology, method.collective, [size] * topology.workers, itemsize, experiment.ring_order
        )
        for name, seconds_ in found.items():
            seconds[name] = seconds.get(name, 0.0) + seconds_ * share / sum(shares)
    first, *others = sorted(seconds, key=lambda name: seconds[name])
    than = ", ".join(f"{name} {format_seconds(seconds[name])}" for name in others)
    took = f"{format_seconds(seconds[first])} a synchronisation"
    order = None if first == "star" else experiment.ring_order
    chosen = experiment.model_copy(update={"collective": first, "ring_order": order})
    return chosen, f"collective: auto chose {first}: {took}; {than}"


def undecided(experiment: Experiment) -> bool:
    """Whether something of it is only decided when the run begins: see :func:`as_begun`."""
    measured = any(island.step_time == MEASURED for island in experiment.cluster.islands)
    return measured or experiment.collective == "auto"


def as_begun(planned: Experiment, begun: Experiment) -> Experiment:
    """``planned`` with what is only decided when a run begins as it was for ``begun``: the step
    times that are measured and the collective that is chosen."""
    cluster = with_step_times(planned.cluster, begun.cluster)
    changed: dict[str, object] = {"cluster": cluster}
    if planned.collective == "auto":
        changed |= {"collective": begun.collective, "ring_order": begun.ring_order}
    return planned.model_copy(update=changed)


def with_step_times(cluster: Cluster, measured: Cluster) -> Cluster:
    """``cluster`` with those step times of ``measured``, island by island, that are to be
    measured."""
    islands = tuple(
        one.model_copy(update={"step_time": other.step_time}) if one.step_time == MEASURED else one
        for one, other in zip(cluster.islands, measured.islands, strict=True)
    )
    return cluster.model_copy(update={"islands": islands})


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


def _must_last(experiment: Experiment) -> None:
    """Refuse a trace that ends before computing alone does; waiting may still reach its end."""
    times = [island.step_time for island in experiment.cluster.islands]
    fixed = [step_s for step_s in times if isinstance(step_s, float)]
    least_s = experiment.steps * min(fixed) if len(fixed) == len(times) else 0.0
    for field, ends_s in experiment.cluster.trace_ends():
        if ends_s < least_s:
            raise InputError(
                f"{field}: the trace ends at {format_seconds(ends_s)}, but {experiment.steps} "
                f"steps take at least {format_seconds(least_s)}; set repeat: true"
            )


#: Bytes of host memory that one setting may ask for.
MOST_BYTES = 8e9


def _must_fit(field: str, value: int, need_bytes: int) -> None:
    if need_bytes > MOST_BYTES:
        raise InputError(f"{field}: {value} would take {format_bytes(need_bytes)} of memory")


def compute_model(experiment: Experiment, parameters: int) -> ComputeModel:
    """Seconds per local step of every worker: the island's own time, or that of its arithmetic;
    NaN where it is still to be measured."""
    data = experiment.data
    assert data.window is not None
    tokens = data.batch * data.window * experiment.optimizer.accumulate
    seconds: list[float] = []
    for island in experiment.cluster.islands:
        if island.flops_per_second is not None:
            step_s = flop_seconds(parameters, tokens, island.flops_per_second)
        else:
            assert island.step_time is not None
            step_s = nan if island.step_time == MEASURED else float(island.step_time)
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
