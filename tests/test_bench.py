"""`islands bench`: the yardsticks do the same training, and nothing is left behind."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import StringIO
from pathlib import Path
from threading import Barrier

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from islands.bench import BenchResult, bench, gloo_seconds, unshared_mb, work_seconds
from islands.bench_gloo import train
from islands.config import load_experiment
from islands.errors import InputError, RunError
from islands.experiment import run_in_process
from islands.job import Job, prepare
from islands.replica import Replica

DILOCO = {"name": "diloco", "sync_every": 3}


def small_job(method: dict[str, object]) -> Job:
    """Seven steps, with payloads that are not rounded, as in the gloo program."""
    options = {"method": {**method, "payload_dtype": "fp32"}, "steps": 7}
    return prepare(load_experiment(None, [], options))


def averages(workers: int) -> Callable[[int], Callable[[Tensor], None]]:
    """An all-reduce between threads: for each worker a function that takes the mean in place."""
    barrier, tensors = Barrier(workers, timeout=60), [torch.empty(0)] * workers

    def of(worker: int) -> Callable[[Tensor], None]:
        def average(tensor: Tensor) -> None:
            tensors[worker] = tensor.clone()
            barrier.wait()
            mean = torch.stack(tensors).mean(0)
            barrier.wait()
            tensor.copy_(mean)

        return average

    return of


def gloo_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "islands.bench_gloo" in p.cmdline()]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "method",
    [{"name": "dense"}, DILOCO, {"name": "local_sgd", "sync_every": 3}],
    ids=lambda method: method["name"],
)
def test_the_gloo_program_trains_what_islands_trains(
    method: dict[str, object], tmp_path: Path
) -> None:
    """With unrounded payloads both end at the same parameters, also after a last partial round."""
    job = small_job(method)
    replicas = [Replica(job.replica(w), job.corpus.train) for w in range(job.workers)]
    average = averages(job.workers)
    with ThreadPoolExecutor(job.workers) as threads:
        list(threads.map(lambda w: train(replicas[w], 7, average(w)), range(job.workers)))

    run_in_process(job, tmp_path)

    saved = load_file(tmp_path / "model.safetensors")
    for replica in replicas:
        for spec in job.layout.tensors:
            trained = replica.flat.params[spec.slice].view(spec.shape)
            torch.testing.assert_close(trained, saved[spec.name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [{"name": "dense"}, DILOCO], ids=lambda method: method["name"])
def test_the_floor_takes_every_gradient_and_optimizer_step(
    method: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four workers takes seven of either, whoever steps the optimizer in a real run."""
    calls = {"_gradient": 0, "_optimize": 0}
    for name in calls:
        real = getattr(Replica, name)

        def counted(self: Replica, *args: object, name: str = name, real: object = real) -> object:
            calls[name] += 1
            return real(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(Replica, name, counted)
    threads = torch.get_num_threads()

    assert work_seconds(small_job(method)) > 0
    assert calls == {"_gradient": 28, "_optimize": 28}
    assert torch.get_num_threads() == threads


def test_a_failing_gloo_process_is_named_with_its_cause(scratch: Path) -> None:
    """The message has the process's own last line, and neither process nor folder stays."""
    job = replace(small_job(DILOCO), initial={"nothing": np.zeros(4, np.uint8)})
    with pytest.raises(RunError, match=r"of the gloo program failed: KeyError: 'nothing'"):
        gloo_seconds(job, within_s=120)
    assert not gloo_processes()
    assert not list(scratch.iterdir())


def test_a_gloo_program_that_takes_too_long_is_ended(scratch: Path) -> None:
    """The wait is bounded, and neither process nor folder stays."""
    with pytest.raises(RunError, match="did not end in time"):
        gloo_seconds(small_job(DILOCO), within_s=0)
    assert not gloo_processes()
    assert not list(scratch.iterdir())


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, 2])
def test_all_three_are_measured_and_nothing_is_left(workers: int, scratch: Path) -> None:
    """Times, memory and settings are there, as text and as JSON; files and processes are not."""
    said: list[str] = []
    result = bench(workers=workers, sync_every=2, steps=4, repeats=1, say=said.append)

    values = json.loads(json.dumps(result.as_dict()))
    times = ("floor_s", "gloo_s", "islands_s", "startup_s", "import_torch_s", "ray_start_s")
    assert all(values[name] > 0 for name in times)
    assert values["islands_to_gloo"] == values["islands_s"] / values["gloo_s"]
    expected = {"workers": workers, "sync_every": 2, "steps": 4, "batch": 4, "window": 16}
    assert expected.items() <= values["settings"].items()
    if Path("/proc/self/smaps_rollup").exists():
        assert 20 < values["unshared_mb_per_worker"] < 2000
    assert any(line.startswith("gloo: ") for line in said)
    assert not gloo_processes()
    assert not list(scratch.glob("islands-bench-*"))


def test_medians_are_reported_beside_the_yardsticks_in_80_columns() -> None:
    """Ratios are to the floor and to gloo; what the system does not tell is unknown."""
    settings = {
        "model": "a.users.own.rather.long.package.name:build_the_model",
        "parameters": 15_826_944,
        "workers": 128,
        "method": "local_sgd",
        "sync_every": 500,
        "steps": 100_000,
        "batch": 64,
        "window": 1024,
        "repeats": 3,
        "cores": 128,
    }
    result = BenchResult(2000.0, 4000.0, 3000.0, 2.0, 7.0, 2.0, None, settings, {})
    assert (result.to_floor, result.to_gloo) == (1.5, 0.75)
    text = StringIO()
    result.print(Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    islands = next(line.split() for line in lines if line.startswith("islands"))
    assert islands[:4] == ["islands", "3000.00", "1.50", "0.75"]
    assert "3.5 x one import" in text.getvalue()
    assert "unknown" in text.getvalue()


def test_memory_counts_what_a_process_has_for_itself() -> None:
    """Filling 64 MB adds that much; a process that is not there has no size."""
    before = unshared_mb(os.getpid())
    if before is None:
        pytest.skip("no /proc on this system")
    block = np.ones(8_000_000)
    after = unshared_mb(os.getpid())
    assert after is not None
    assert after - before == pytest.approx(block.nbytes / 1e6, abs=8)
    assert unshared_mb(2**30) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, r"^workers: 0 is too small"),
        ({"repeats": 0}, r"^repeats: 0 is too small"),
        ({"steps": 0}, r"^steps: 0 is too small"),
        ({"method": "dilocco"}, r"did you mean 'diloco'"),
        ({"model": "decodr"}, r"did you mean 'decoder'"),
        ({"method": "dense", "sync_every": 10}, r"^method\.sync_every: unknown key"),
        ({"sync_every": 0}, r"^method\.sync_every: 0 is too small"),
        ({"overrides": ["data.batch=0"]}, r"^data\.batch: 0 is too small"),
        ({"overrides": ["data.batch"]}, r"KEY\.PATH=VALUE"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: dict[str, object], message: str
) -> None:
    """Before anything is started."""
    with pytest.raises(InputError, match=message) as caught:
        bench(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
