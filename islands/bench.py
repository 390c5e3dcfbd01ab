"""What the emulation costs on this machine: a run of islands beside two yardsticks.

* the *floor*: one process that does the workers' gradient and optimizer work, one worker after the
  other, and nothing else; its time is divided by the cores that the workers could have used;
* *gloo*: a plain ``torch.distributed`` program, one process per worker (:mod:`islands.bench_gloo`);
* *islands*: a run as users get it, with actors, link actor, trace, byte ledger and tables.

All three train the same model on the same batches with one torch thread per process. They take
turns, so that a machine that slows down slows all of them, and medians are compared.
"""

from __future__ import annotations

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

from islands.actors.cluster import Actors
from islands.bench_gloo import JOB, METHODS
from islands.config import Cluster, Experiment, load_experiment
from islands.errors import InputError, RunError
from islands.experiment import drive, session
from islands.job import Job, prepare
from islands.replica import Replica

#: Columns of the report.
WIDTH = 80
#: Seconds that the gloo program may take beyond `SLOWEST` times the work of all its workers.
GLOO_START_S = 120.0
SLOWEST = 20.0
#: Seconds between two looks at the gloo program: too seldom to take time from it.
LOOK_S = 0.1


@dataclass(frozen=True)
class BenchResult:
    """Medians over the repeats. Times are of training; starting processes is apart.

    ``islands_s`` is the coordinator's own time: training, the last evaluation, tables and summary.
    ``startup_s`` is from creating the actors until all workers are ready, without Ray's own start
    (``ray_start_s``); ``import_torch_s`` is one ``python -c 'import torch'`` to compare it with.
    ``unshared_mb_per_worker`` is the largest of any worker's, after training; None where the system
    does not tell. ``repeats`` has what the medians are of.
    """

    floor_s: float
    gloo_s: float
    islands_s: float
    ray_start_s: float
    startup_s: float
    import_torch_s: float
    unshared_mb_per_worker: float | None
    settings: Mapping[str, Any]
    repeats: Mapping[str, Sequence[float]]

    @property
    def to_floor(self) -> float:
        """Time of islands in units of the floor."""
        return self.islands_s / self.floor_s

    @property
    def to_gloo(self) -> float:
        """Time of islands in units of the gloo program's."""
        return self.islands_s / self.gloo_s

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        ratios = {
            "islands_to_floor": self.to_floor,
            "islands_to_gloo": self.to_gloo,
            "startup_to_import_torch": self.startup_s / self.import_torch_s,
        }
        return {**asdict(self), **ratios}

    def print(self, console: Console | None = None) -> None:
        """The report, at most 80 columns wide."""
        console = console or Console()
        console.print(self._title(), highlight=False, width=WIDTH)
        console.print()
        console.print(self._times(), width=WIDTH)
        console.print()
        console.print(self._costs(), width=WIDTH)

    def _title(self) -> str:
        s = self.settings
        every = "" if s["sync_every"] == 1 else f", synchronising every {s['sync_every']}"
        return (
            f"[bold]{s['method']}[/] on {s['model']} ({s['parameters']:,} parameters): "
            f"{s['workers']} workers, {s['steps']:,} steps of {s['batch']} x {s['window']} tokens"
            f"{every}; medians of {s['repeats']}, {s['cores']} cores"
        )

    def _times(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold cyan")
        for name in ("training", "seconds", "x floor", "x gloo", ""):
            table.add_column(name, justify="left" if name in ("training", "") else "right")
        rows = (
            ("floor", self.floor_s, "all gradient and optimizer work / cores"),
            ("gloo", self.gloo_s, "plain torch.distributed program"),
            ("islands", self.islands_s, "trace, ledger and tables on"),
        )
        for name, seconds, what in rows:
            floors, gloos = seconds / self.floor_s, seconds / self.gloo_s
            table.add_row(
                name, f"{seconds:.2f}", f"{floors:.2f}", f"{gloos:.2f}", f"[dim]{what}[/]"
            )
        return table

    def _costs(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        imports = self.startup_s / self.import_torch_s
        table.add_row(
            "actors ready",
            f"{self.startup_s:.2f} s",
            f"{imports:.1f} x one import of torch ({self.import_torch_s:.2f} s)",
        )
        table.add_row("Ray's own start", f"{self.ray_start_s:.2f} s", "")
        memory = self.unshared_mb_per_worker
        text = "unknown" if memory is None else f"{memory:.0f} MB"
        table.add_row("memory per worker", text, "not shared with any other process")
        return table


def bench(
    *,
    model: str = "decoder",
    workers: int = 4,
    method: str = "diloco",
    sync_every: int | None = None,
    steps: int = 2000,
    repeats: int = 3,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Measure islands and both yardsticks on this machine. Leaves no file and no process behind.

    Args:
        model, method, steps: as in an experiment; ``method`` is dense, diloco or local_sgd.
        workers: split evenly between two islands.
        sync_every: local steps between two synchronisations; None: the method's default.
        repeats: how often each of the three runs.
        overrides: further settings as ``key.path=value``, for example ``data.batch=8``.
        say: told what was measured, a line at a time.

    Raises:
        InputError: the settings cannot be measured.
        RunError: one of the three failed.
    """
    if repeats < 1:
        raise InputError(f"repeats: {repeats} is too small; it must be at least 1")
    job = prepare(_experiment(model, workers, method, sync_every, steps, overrides))
    seconds: dict[str, list[float]] = {}
    memory: list[float] = []

    def found(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)
        say(f"{name.removesuffix('_s').replace('_', ' ')}: {value:.2f} s")

    for repeat in range(repeats):
        say(f"repeat {repeat + 1} of {repeats}")
        found("import_torch_s", import_torch_seconds())
        work_s = work_seconds(job)
        found("floor_s", work_s / min(cores(), job.workers))
        found("gloo_s", gloo_seconds(job, GLOO_START_S + SLOWEST * work_s))
        memory += _islands(job, found)
    return BenchResult(
        **{name: statistics.median(values) for name, values in seconds.items()},
        unshared_mb_per_worker=max(memory) if memory else None,
        settings=_settings(job, repeats),
        repeats=seconds,
    )


def _experiment(
    model: str,
    workers: int,
    method: str,
    sync_every: int | None,
    steps: int,
    overrides: Sequence[str],
) -> Experiment:
    settings: dict[str, object] = {"name": method}
    if sync_every is not None:
        settings["sync_every"] = sync_every
    options = {
        "cluster": _cluster(workers),
        "method": settings,
        "model": model,
        "steps": steps,
    }
    # One small evaluation, at the end: neither yardstick has any.
    quiet = ("eval.every=0", "eval.windows=1", "device=cpu")
    experiment = load_experiment(None, [*quiet, *overrides], options)
    if not isinstance(experiment.method, METHODS):
        known = ", ".join(sorted(m.model_fields["name"].default for m in METHODS))
        raise InputError(
            f"method: {experiment.method.name!r} has no gloo program to compare with; "
            f"choose from {known}"
        )
    return experiment


def _cluster(workers: int) -> dict[str, Any]:
    """The default cluster with this many workers; one worker is alone on one island."""
    if workers < 1:
        raise InputError(f"workers: {workers} is too small; it must be at least 1")
    cluster = Cluster.load("two_islands").model_dump(mode="json")
    first, second = cluster["islands"]
    first["workers"], second["workers"] = workers - workers // 2, workers // 2
    if workers == 1:
        cluster["islands"], cluster["links"] = [first], []
    return cluster


def _settings(job: Job, repeats: int) -> dict[str, Any]:
    experiment = job.experiment
    return {
        "model": experiment.model.name,
        "parameters": job.parameters,
        "workers": job.workers,
        "method": experiment.method.name,
        "sync_every": getattr(experiment.method, "sync_every", 1),
        "steps": experiment.steps,
        "batch": experiment.data.batch,
        "window": experiment.data.window,
        "repeats": repeats,
        "cores": cores(),
        "torch": torch.__version__,
        "ray": ray.__version__,
    }


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- the three programs ---------------------------------------------------------------------------


def work_seconds(job: Job) -> float:
    """Seconds of the gradient and optimizer steps of all workers, one worker after the other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    total_s = 0.0
    try:
        with torch.random.fork_rng(devices=[]):
            for worker in range(job.workers):
                replica = Replica(job.replica(worker), job.corpus.train)
                # With the parameters in the replicas, a local step is only the gradient.
                steps_apart = replica.method.shared_in == "replicas"
                began = time.perf_counter()
                for _ in range(job.experiment.steps):
                    replica.local_step()
                    if steps_apart:
                        replica.context.optimize(replica.state)
                total_s += time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    return total_s


def gloo_seconds(job: Job, within_s: float) -> float:
    """Training seconds of the gloo program. Raises RunError if it fails or is not done in time."""
    with tempfile.TemporaryDirectory(prefix="islands-bench-") as name:
        folder = Path(name)
        (folder / JOB).write_bytes(pickle.dumps(job))
        # The job may name a user's module, which the processes must find where this one did.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(job.workers):
                with _out(folder, rank).open("wb") as out, _err(folder, rank).open("wb") as err:
                    command = [sys.executable, "-m", "islands.bench_gloo", name, str(rank)]
                    running.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                        )
                    )
            _wait(running, folder, time.monotonic() + within_s)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return float(_out(folder, 0).read_text())


def _out(folder: Path, rank: int) -> Path:
    return folder / f"out-{rank}"


def _err(folder: Path, rank: int) -> Path:
    return folder / f"err-{rank}"


def _wait(running: Sequence[subprocess.Popen[bytes]], folder: Path, until_s: float) -> None:
    """Wait for all processes; the first that fails is the cause of whatever the others do."""
    while True:
        codes = [process.poll() for process in running]
        for rank, code in enumerate(codes):
            if code:
                lines = _err(folder, rank).read_text(errors="replace").strip().splitlines()
                cause = lines[-1].removeprefix(f"[rank{rank}]: ") if lines else f"exit code {code}"
                raise RunError(f"process {rank} of the gloo program failed: {cause}")
        if None not in codes:
            return
        if time.monotonic() > until_s:
            raise RunError("the gloo program did not end in time")
        time.sleep(LOOK_S)


def _islands(job: Job, found: Callable[[str, float], None]) -> list[float]:
    """One run of islands on a Ray of its own; returns each worker's unshared memory in MB."""
    with tempfile.TemporaryDirectory(prefix="islands-bench-") as name:
        began = time.perf_counter()
        with session("local", lambda text: None):
            found("ray_start_s", time.perf_counter() - began)
            began = time.perf_counter()
            actors = Actors(job)
            try:
                actors.set_up(job)
                found("startup_s", time.perf_counter() - began)
                summary = drive(actors, job, Path(name), lambda progress: None)
                found("islands_s", float(summary["wall_s"]))
                ids = ray.get(
                    [a.__ray_call__.remote(lambda _: os.getpid()) for a in actors.workers]
                )
                sizes = [unshared_mb(process) for process in ids]
            finally:
                actors.end()
    return [size for size in sizes if size is not None]


def import_torch_seconds() -> float:
    """Seconds of a fresh Python process that only imports torch."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - began


def unshared_mb(process: int) -> float | None:
    """Memory of a process that no other one shares, in MB; None where Linux's /proc is missing."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return kib * 1024 / 1e6
