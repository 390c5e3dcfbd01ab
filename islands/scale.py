"""``islands scale``: what a synchronisation costs as workers are added.

Payloads do not depend on how many workers there are, wire bytes do: a ring all-reduce makes each
worker send 2(p−1)/p payloads, which saturates at two, and a ring all-gather p − 1, which does not.
So a sparse payload, whose positions differ between workers and which must be gathered, pays only
below some number of workers. This module trains at each number that fits, and for numbers that do
not (or for all, with ``bytes_only``) takes the payload of one real round of one worker and lets the
same emulated network carry it.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from islands.compression import bits_of
from islands.config import Cluster, Experiment, load_experiment
from islands.errors import InputError, RunError, TooManyWorkers
from islands.experiment import Runner
from islands.job import Job, compute_model, prepare, with_step_times
from islands.network import Timeline
from islands.probe import Payloads
from islands.results.folder import new_folder, plain
from islands.results.recorder import LAN_PREFIX
from islands.results.result import Result
from islands.schedule import Due, program
from islands.study import Contender, refuse_settings_of_a_method
from islands.trace import Op, Send
from islands.units import format_seconds

WORKERS = (2, 4, 8, 16, 32)
METHODS = ("dense", "topk", "demo", "diloco")
#: Local steps of a training run, unless asked for others: two rounds of DiLoCo's default.
STEPS = 100
#: Memory of one replica in this process besides its tensors, and how many copies of the parameters
#: it holds: masters, gradient, model, the optimizer's two moments, an anchor or momentum.
REPLICA_BYTES, REPLICA_COPIES = 500_000, 6
#: Rounds whose mean time is taken where nothing is trained: fewer of many workers, at least two.
MOST_ROUNDS, ROUNDS_OF_ONE = 16, 20_000
ROWS = "scale.parquet"

#: ``scale.parquet`` and the rows: bytes and seconds are per local step. ``trained`` is False where
#: only the payload is real; ``pays`` where a dense ring all-reduce would send no more.
SCHEMA = pa.schema(
    {
        "method": pa.string(),
        "collective": pa.string(),
        "operation": pa.string(),
        "workers": pa.int64(),
        "trained": pa.bool_(),
        "payload_bytes": pa.float64(),
        "wire_bytes_per_worker": pa.float64(),
        "wire_bytes_total": pa.float64(),
        "wan_bytes": pa.float64(),
        "lan_bytes": pa.float64(),
        "emulated_s_per_step": pa.float64(),
        "dense_wire_bytes_per_worker": pa.float64(),
        "pays": pa.bool_(),
    }
)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Scaling:
    """``rows`` as in ``SCHEMA``, method by method; ``growth`` one fit per method; ``sites`` the
    workers of each island per number of workers."""

    rows: list[dict[str, Any]]
    growth: list[dict[str, Any]]
    sites: dict[int, dict[str, int]]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"rows": self.rows, "growth": self.growth, "islands": self.sites}


def scale(
    experiment: Experiment,
    methods: Sequence[Contender],
    workers: Sequence[int] | None = None,
    *,
    bytes_only: bool = False,
    out: str | Path | None = None,
    overwrite: bool = False,
    address: str | None = None,
    in_process: bool = False,
    quiet: bool = True,
) -> Scaling:
    """Bytes and emulated time per step of each method on clusters of so many workers.

    Args:
        experiment: everything but the method; its cluster's workers are replaced.
        methods: what to look at, under which names.
        workers: how many in all; None: those of ``WORKERS`` that give every island one.
        bytes_only: train nowhere.
        out: keep the rows (``scale.parquet``) and the training runs here; None: keep nothing.
        overwrite: replace what ``out`` holds of these.
        address, in_process: as for ``islands.run``.
        quiet: no line per row on stderr.

    Raises InputError or, if training failed, RunError.
    """
    if experiment.collective != "ring":
        raise InputError(
            f"collective: {experiment.collective!r}: here the growth of rings is shown; leave it "
            "out (islands links compares the collectives)"
        )

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    counts = _counts(workers, len(experiment.cluster.islands))
    clusters = {count: spread(experiment.cluster, count) for count in counts}
    with ExitStack() as stack:
        folder = _folder(out, overwrite, stack)
        probes = [Probe.of(_on(experiment, m, clusters[min(counts)])) for m in methods]
        runner = stack.enter_context(Runner(address, in_process, say))
        if not bytes_only:
            runner.connect()
        by_method: dict[str, list[dict[str, Any]]] = {one.label: [] for one in methods}
        for count in counts:  # outermost, since actors are kept while their number stays
            for contender, probe in zip(methods, probes, strict=True):
                cluster = with_step_times(clusters[count], probe.job.experiment.cluster)
                wanted = _on(experiment, contender, cluster)
                found = None
                if not bytes_only and _fits(probe, count, in_process):
                    place = folder / plain(contender.label) / f"workers-{count}"
                    found = _trained(runner, _whole_periods(wanted, probe), place, say)
                trained = found is not None
                found = found or _carried(wanted, probe)
                row = _row(contender.label, probe, count, trained, found)
                by_method[contender.label].append(row)
                how = "trained" if trained else "bytes only"
                seconds = format_seconds(found.emulated_s)
                say(f"{count:,} workers, {contender.label}: {seconds} per step ({how})")
            rows = [row for own in by_method.values() for row in own]
            if out is not None:  # after each number of workers, so that an interrupt loses little
                pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / ROWS)
        growth = [
            fit(own, probe.stops_paying_at)
            for own, probe in zip(by_method.values(), probes, strict=True)
        ]
    sites = {c: {i.name: i.workers for i in clusters[c].islands} for c in counts}
    return Scaling(rows, growth, sites)


def scale_experiment(
    config: Path | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> Experiment:
    """What is scaled unless told otherwise: few steps, and no evaluation that nobody looks at.

    The arguments are those of ``load_experiment``. Raises InputError.
    """
    refuse_settings_of_a_method(overrides)
    given = dict(options or {})
    if config is None and given.get("steps") is None:
        given["steps"] = STEPS
    return load_experiment(config, ["eval.every=0", "eval.windows=1", *overrides], given)


def _counts(workers: Sequence[int] | None, islands: int) -> list[int]:
    if workers is None:
        return [count for count in WORKERS if count >= islands] or [islands]
    if not workers:
        raise InputError("workers: [] is too short; give at least one number of workers")
    for n, count in enumerate(workers):
        if type(count) is not int or count < 1:
            raise InputError(f"workers: {count!r} is not a number of workers")
        if count in workers[:n]:
            raise InputError(f"workers: {count} is given twice")
        if count < islands:
            raise InputError(
                f"workers: {count} is too small; the cluster has {islands} islands, each with at "
                "least one worker"
            )
    return list(workers)


def spread(cluster: Cluster, workers: int) -> Cluster:
    """The same islands and links with ``workers`` in all, evenly; the first islands get the
    rest."""
    share, more = divmod(workers, len(cluster.islands))
    islands = tuple(
        island.model_copy(update={"workers": share + (n < more)})
        for n, island in enumerate(cluster.islands)
    )
    return cluster.model_copy(update={"islands": islands})


def _on(experiment: Experiment, contender: Contender, cluster: Cluster) -> Experiment:
    return experiment.model_copy(update={"method": contender.method, "cluster": cluster})


def _folder(out: str | Path | None, overwrite: bool, stack: ExitStack) -> Path:
    if out is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="islands-scale-")))
    if (Path(out) / ROWS).exists() and not overwrite:
        raise InputError(f"out: {out} already holds {ROWS}; give another folder, or --overwrite")
    return new_folder(Path(out), "scale", overwrite=False)


# ------------------------------------------------------------------------------ one real payload


@dataclass(frozen=True)
class Probe:
    """What one worker of a method sends: per fragment its payload, and how often it goes."""

    job: Job
    payloads: Payloads

    @classmethod
    def of(cls, experiment: Experiment) -> Probe:
        """One real payload of each fragment. Raises InputError."""
        job = prepare(experiment)
        return cls(job, Payloads.of(job))

    @property
    def operation(self) -> str:
        """all_reduce, all_gather or star."""
        return self.job.experiment.method.collective

    @property
    def payload_bytes(self) -> Fraction:
        """Payload bytes per local step, over many periods."""
        return self._per_step([size.total for size in self.payloads.sizes])

    @property
    def dense_bytes(self) -> Fraction:
        """The same for all values of each fragment in the method's own number format."""
        width = Fraction(bits_of(self.job.experiment.method.payload_dtype), 8)
        parts = self.job.layout.fragments
        return self._per_step([width * (part.stop - part.start) for part in parts])

    def _per_step(self, amounts: Sequence[int | Fraction]) -> Fraction:
        streams = self.job.experiment.method.streams(self.job.layout)
        pairs = zip(amounts, streams, strict=True)
        return sum((Fraction(amount) / stream.period for amount, stream in pairs), Fraction(0))

    @property
    def stops_paying_at(self) -> int | None:
        """The fewest workers at which gathering sends no less than a dense ring all-reduce as
        often.

        (p − 1)·S ≥ 2(p − 1)/p·D from p = 2D/S on: the density 2b/(p(b_v + b_i)) of sparse pairs.
        None unless the method gathers.
        """
        if self.operation != "all_gather" or not self.payload_bytes:
            return None
        return max(2, math.ceil(2 * self.dense_bytes / self.payload_bytes))


@dataclass(frozen=True)
class _Found:
    """Per local step: wire bytes of all workers, bytes over WAN links and in LANs, seconds; and
    the payload bytes of a worker."""

    payload_bytes: float
    wire_bytes: float
    wan_bytes: float
    lan_bytes: float
    emulated_s: float


def _row(label: str, probe: Probe, workers: int, trained: bool, found: _Found) -> dict[str, Any]:
    wire = found.wire_bytes / workers
    dense = float(2 * Fraction(workers - 1, workers) * probe.dense_bytes)
    return {
        "method": label,
        "collective": "star" if probe.operation == "star" else "ring",
        "operation": probe.operation,
        "workers": workers,
        "trained": trained,
        "payload_bytes": found.payload_bytes,
        "wire_bytes_per_worker": wire,
        "wire_bytes_total": found.wire_bytes,
        "wan_bytes": found.wan_bytes,
        "lan_bytes": found.lan_bytes,
        "emulated_s_per_step": found.emulated_s,
        "dense_wire_bytes_per_worker": dense,
        "pays": probe.operation != "all_gather" or wire < dense,
    }


# -------------------------------------------------------------------------- training, or carrying


def _fits(probe: Probe, workers: int, in_process: bool) -> bool:
    """Whether so many replicas fit into this process; on actors Ray's own memory decides."""
    if not in_process:
        return True
    need = workers * (REPLICA_BYTES + 4 * REPLICA_COPIES * probe.job.parameters)
    return need < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def _whole_periods(wanted: Experiment, probe: Probe) -> Experiment:
    """As many steps as asked for, rounded up to whole periods: a final round that covers fewer
    steps would be a cost that longer runs do not have."""
    period = math.lcm(*(s.period for s in wanted.method.streams(probe.job.layout)))
    return wanted.model_copy(update={"steps": math.ceil(wanted.steps / period) * period})


def _trained(
    runner: Runner, wanted: Experiment, place: Path, say: Callable[[str], None]
) -> _Found | None:
    """What a run really sent; None if the Ray cluster has not the memory for it."""
    job = prepare(wanted)
    folder = new_folder(place, "run", overwrite=True)
    try:
        summary = runner.run(job, folder)
    except TooManyWorkers as error:
        say(f"{error}; going on with bytes only")
        return None
    # Without the initial model, which is handed out once and counts as control bytes.
    transfers = Result(folder, summary).table("transfers").select(["link", "kind", "bytes"])
    crossed = {True: 0, False: 0}
    for row in transfers.to_pylist():
        if row["kind"] != "control":
            crossed[row["link"].startswith(LAN_PREFIX)] += row["bytes"]
    steps = summary["steps"]
    return _Found(
        summary["payload_bytes_per_step"],
        summary["wire_bytes_total"] / steps,
        crossed[False] / steps,
        crossed[True] / steps,
        summary["emulated_s"] / steps,
    )


def _carried(wanted: Experiment, probe: Probe) -> _Found:
    """Let the emulated network carry the probe's payload for all workers of ``wanted``.

    Bytes are those of each fragment's first round. A round begins where the last one left each
    worker, so its time is the mean of several.
    """
    streams = wanted.method.streams(probe.job.layout)
    periods = [stream.period for stream in streams]
    topology = wanted.cluster.topology()
    compute = compute_model(wanted.resolved(), probe.job.parameters)
    timeline = Timeline(
        topology, compute, probe.operation, ring_order=wanted.ring_order, seed=wanted.seed
    )
    rounds = max(2, min(MOST_ROUNDS, ROUNDS_OF_ONE // topology.workers))
    steps = max(stream.first + (rounds - 1) * stream.period for stream in streams)
    ops: list[Op] = []
    for action in program(streams, steps, 0):
        if isinstance(action, Due):
            fragment, payloads = action.fragment, probe.payloads
            size, whole = payloads.sizes[fragment], payloads.itemsizes[fragment]
            ops.append(Send(fragment, action.version, action.step, size, whole))
        else:
            ops.append(action)
    for worker in range(topology.workers):
        timeline.extend((worker, op) for op in ops)
    timeline.advance()
    timings = timeline.take()
    if timings.stalled is not None:
        raise RunError(timings.stalled)
    wire = wan = lan = Fraction(0)
    for sync in timings.syncs:
        if sync.version == 1:
            wire += Fraction(sync.wire_bytes, periods[sync.fragment])
    for row in timings.transfers:
        if row.version == 1 and row.link.startswith(LAN_PREFIX):
            lan += Fraction(row.bytes, periods[row.fragment])
        elif row.version == 1:
            wan += Fraction(row.bytes, periods[row.fragment])
    return _Found(
        float(probe.payload_bytes),
        float(wire),
        float(wan),
        float(lan),
        max(clock.clock_s for clock in timings.clocks) / steps,
    )


# ----------------------------------------------------------------------------------------- growth


def fit(rows: Sequence[Row], stops_paying_at: int | None) -> dict[str, Any]:
    """How a method's wire bytes per worker grow, by least squares through the origin.

    An all-reduce is fitted with (p − 1)/p, whose factor is what it saturates at; an all-gather with
    p − 1, whose factor is what each worker more costs; a star is constant. ``payloads`` is that
    factor in units of the payload.
    """
    first = rows[0]
    counts = [row["workers"] for row in rows]
    shape = {
        "all_reduce": [(p - 1) / p for p in counts],
        "all_gather": [p - 1.0 for p in counts],
        "star": [1.0 for _ in counts],
    }[first["operation"]]
    wire = [row["wire_bytes_per_worker"] for row in rows]
    square = sum(x * x for x in shape)
    factor = sum(x * y for x, y in zip(shape, wire, strict=True)) / square if square else 0.0
    payload = sum(row["payload_bytes"] for row in rows) / len(rows)
    return {
        "method": first["method"],
        "operation": first["operation"],
        "bytes": factor,
        "payloads": factor / payload if payload else 0.0,
        "stops_paying_at": stops_paying_at,
    }
