"""What is decided when a run begins and fixed from then on: measured step times, and the collective
that ``auto`` stands for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import PROSE, Fragments, assert_identical, cluster, experiment, train
from rich.console import Console
from typer.testing import CliRunner

import islands
from islands import job as jobs
from islands import probe
from islands.check import describe, print_description
from islands.cli import app
from islands.comparison import compare
from islands.config import Experiment
from islands.errors import InputError
from islands.job import as_begun, prepare, with_collective
from islands.layout import Stream
from islands.network.choose import schemes_seconds
from islands.probe import TIMED_STEPS, WARM_UP_STEPS, Payloads, step_seconds
from islands.scale import scale
from islands.study import contenders, study_of
from islands.trace import Bytes
from islands.units import format_seconds


def measured(**changes: Any) -> dict[str, Any]:
    """Two islands, the first of which is to be measured."""
    found = cluster((1, 2), (0.25, 0.5), **changes)
    found["islands"][0]["step_time"] = "measured"
    return found


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Makes the timed steps take these seconds, by a clock that only this sees."""

    def take(seconds: list[float]) -> None:
        moments = iter([m for at, s in enumerate(seconds) for m in (100.0 * at, 100.0 * at + s)])
        monkeypatch.setattr(probe.time, "perf_counter", lambda: next(moments))

    return take


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Measuring gives 0.2 s, 0.3 s, …: what was handed out so far."""
    found: list[float] = []

    def give(*arguments: object) -> float:
        found.append(0.2 + 0.1 * len(found))
        return found[-1]

    monkeypatch.setattr(jobs, "step_seconds", give)
    return found


# --- step times


def test_the_median_of_ten_steps_counts(stopwatch: Callable[[list[float]], None]) -> None:
    """Slow first steps do not count, and neither does one that was interrupted; three digits."""
    timed = [0.0123456] * (TIMED_STEPS // 2 + 1) + [9.0] * (TIMED_STEPS // 2 - 1)
    job = prepare(experiment())
    stopwatch([50.0] * WARM_UP_STEPS + timed)
    assert step_seconds(job, "cpu") == 0.0123


def test_measuring_leaves_no_trace(tmp_path: Path) -> None:
    """A run whose step was measured is the run with that time written: the trial neither draws
    from its random numbers nor trains its model."""
    run = train(experiment("helpers:build_dropout", cluster=measured()))
    assert run.error is None
    (step_s,) = {
        round(e - s, 9) for w, s, e in run.rows("steps", "worker", "start_s", "end_s") if w == 0
    }
    written = cluster((1, 2), (step_s, 0.5))
    same = train(experiment("helpers:build_dropout", cluster=written))
    for name, tensor in run.parameters.items():
        assert tensor.equal(same.parameters[name])
    assert run.summary["final_val_loss"] == same.summary["final_val_loss"]


def test_the_written_experiment_has_seconds(counted: list[float], tmp_path: Path) -> None:
    """The time goes into experiment.yaml, only where it was asked for; running that again measures
    nothing and gives the same times."""
    first = islands.run(experiment(cluster=measured()), out=tmp_path / "a", in_process=True)
    assert counted == [0.2]
    written = Experiment.load(tmp_path / "a" / "experiment.yaml")
    assert [island.step_time for island in written.cluster.islands] == [0.2, 0.5]
    again = islands.run(written, out=tmp_path / "b", in_process=True)
    assert counted == [0.2]
    assert again.summary["emulated_s"] == first.summary["emulated_s"]
    assert first.table("steps").equals(again.table("steps"))


def test_a_run_says_what_it_measured(counted: list[float], tmp_path: Path) -> None:
    """On stderr, where it says everything that it decided itself."""
    path = tmp_path / "experiment.yaml"
    path.write_text(experiment(cluster=measured()).dump_yaml(), encoding="utf-8")
    out = str(tmp_path / "run")
    result = CliRunner().invoke(app, ["run", "--config", str(path), "--in-process", "--out", out])
    assert result.exit_code == 0
    assert "step_time: measured 200 ms for a local step on this host" in result.stderr


def test_a_measured_step_time_is_written_as_such() -> None:
    """Before the run it stays what it is, through a file and back."""
    found = experiment(cluster=measured()).resolved()
    assert "step_time: measured" in found.dump_yaml()
    assert Experiment.parse(found.model_dump(mode="json")) == found


@pytest.mark.parametrize("value", ["mesured", "5", 5, "0 s", ""])
def test_other_step_times_are_refused(value: object) -> None:
    """One message with the field, the value and, where that may be meant, the word."""
    wrong = measured()
    wrong["islands"][0]["step_time"] = value
    with pytest.raises(InputError, match=r"cluster\.islands\.0\.step_time: ") as info:
        experiment(cluster=wrong)
    assert "measured" in str(info.value) or value == "0 s"


def test_measured_stands_beside_no_flop_rate() -> None:
    """As any other step time."""
    wrong = measured()
    wrong["islands"][0]["flops_per_second"] = "1 TFLOP/s"
    with pytest.raises(InputError, match="is given beside step_time measured"):
        experiment(cluster=wrong)


def test_check_measures_nothing(counted: list[float]) -> None:
    """A cluster can be looked at on a machine that is not to train."""
    found = describe(experiment(cluster=measured()))
    assert counted == []
    assert [island["workers"] for island in found["islands"]] == [1, 2]
    assert found["islands"][1]["step_s"] == 0.5
    console = Console(width=80, file=io.StringIO())
    print_description(found, console)
    assert isinstance(console.file, io.StringIO)
    row = next(line for line in console.file.getvalue().splitlines() if line.startswith("a "))
    assert row.split()[1:3] == ["1", "measured"]


def test_a_study_measures_each_method_once(counted: list[float], tmp_path: Path) -> None:
    """Seeds and rates of a method have one time, also when the study goes on in another process,
    and what is finished is not trained again."""
    config = tmp_path / "base.yaml"
    base = {"cluster": measured(), "steps": 2, "eval": {"every": 0, "windows": 1}}
    config.write_text(json.dumps({**base, "data": {"name": PROSE}}), encoding="utf-8")

    def study(seeds: int) -> Any:
        return study_of(["dense", "diloco"], config, seeds=seeds)

    folder = tmp_path / "study"
    first = compare(study(2), out=folder, in_process=True)
    assert counted == pytest.approx([0.2, 0.3])
    again = compare(study(3), out=folder, in_process=True)
    assert again.runs[0]["emulated_s"] == first.runs[0]["emulated_s"]
    for method, step_s in (("dense", 0.2), ("diloco", 0.3)):
        written = sorted((folder / method).rglob("experiment.yaml"))
        times = [Experiment.load(path).cluster.islands[0].step_time for path in written]
        assert times == pytest.approx([step_s] * 3)
    loss = {run["final_val_loss"] for run in again.runs}
    assert len(loss) > 1


def test_a_finished_run_of_other_settings_is_still_refused(
    counted: list[float], tmp_path: Path
) -> None:
    """What was measured may differ from run to run; nothing else may."""
    config = tmp_path / "base.yaml"
    base = {"cluster": measured(), "steps": 2, "eval": {"every": 0, "windows": 1}}
    config.write_text(json.dumps({**base, "data": {"name": PROSE}}), encoding="utf-8")
    compare(study_of(["dense"], config), out=tmp_path / "study", in_process=True)
    for other in ("optimizer.clip=0.5", "cluster.islands.1.step_time=90 ms"):
        with pytest.raises(InputError, match="other settings"):
            compare(study_of(["dense"], config, [other]), out=tmp_path / "study", in_process=True)
    three = [f"cluster={json.dumps(cluster((1, 1, 1), (0.1, 0.1, 0.1)))}"]
    with pytest.raises(InputError, match="other settings"):
        compare(study_of(["dense"], config, three), out=tmp_path / "study", in_process=True)


def test_scaling_measures_each_method_once(counted: list[float]) -> None:
    """All numbers of workers of a method have its time: 0.2 s beside the other island's 0.5 s."""
    base = experiment(cluster=measured(), steps=4, eval={"every": 0, "windows": 1})
    found = scale(base, contenders(["dense"]), [2, 4, 6], bytes_only=True, in_process=True)
    assert counted == [0.2]
    assert all(0.5 < row["emulated_s_per_step"] < 1.5 for row in found.rows)


# --- the quickest collective

#: The middle one of three islands in a row is near to both others.
ROW = cluster((2, 2, 2), (0.1, 0.1, 0.1), "10 Mbit/s", "40 ms")


class Two(Fragments):
    """Two fragments: all tensors but the last one after every step, that one after every fourth."""

    def streams(self, layout: Any) -> Any:
        names = [t.name for t in layout.tensors]
        return (
            Stream(tuple(names[:-1]), period=1, first=1, overlap=0),
            Stream(tuple(names[-1:]), period=4, first=4, overlap=0),
        )


@pytest.mark.parametrize("method", ["dense", "topk", "diloco"])
def test_auto_is_the_quickest_for_the_methods_payload(method: str) -> None:
    """The resolved experiment has one of the three, and the reason has all of them in order."""
    job = prepare(experiment(cluster=ROW, method=method, collective="auto"))
    payloads = Payloads.of(job)
    sizes = [payloads.sizes[0]] * 6
    seconds = schemes_seconds(
        job.topology, job.experiment.method.collective, sizes, payloads.itemsizes[0], None
    )
    first, second, third = sorted(seconds, key=lambda name: seconds[name])
    assert job.experiment.collective == first
    assert seconds[first] < seconds[second]
    texts = {name: format_seconds(seconds[name]) for name in seconds}
    assert job.chosen_collective == (
        f"collective: auto chose {first}: {texts[first]} a synchronisation; "
        f"{second} {texts[second]}, {third} {texts[third]}"
    )


def test_auto_trains_as_what_it_chose() -> None:
    """The same tables and parameters as with that collective in the experiment."""
    job = prepare(experiment(cluster=ROW, collective="auto"))
    asked = experiment(cluster=ROW, collective=job.experiment.collective)
    one, other = train(job), train(asked)
    assert one.error is None
    one.summary.pop("chosen_collective", None)
    other.summary.pop("chosen_collective", None)
    assert_identical(one, other)


def test_fragments_count_as_often_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 3 s and a star of 4 s for the fragment that goes four times as often, 13 s and 7 s
    for the other: (4 · 3 + 13) / 5 = 5 s and (4 · 4 + 7) / 5 = 4.6 s."""
    job = prepare(experiment(method="test_measured:Two"))

    def seconds(topology: Any, operation: str, sizes: list[Bytes], *rest: Any) -> dict[str, float]:
        often = sizes[0] == payloads.sizes[0]
        return {"ring": 3.0, "star": 4.0} if often else {"ring": 13.0, "star": 7.0}

    payloads = Payloads.of(job)
    monkeypatch.setattr(jobs, "schemes_seconds", seconds)
    chosen, why = with_collective(job.experiment, job.layout, payloads)
    assert chosen.collective == "star"
    assert why == "collective: auto chose star: 4.6 s a synchronisation; ring 5 s"


def test_a_chosen_star_has_no_ring_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is for the rings it was chosen from; what is written must read back."""
    monkeypatch.setattr(jobs, "schemes_seconds", lambda *_: {"ring": 2.0, "star": 1.0})
    wanted = experiment(collective="auto", ring_order=["b", "a"])
    found = prepare(wanted).experiment
    assert (found.collective, found.ring_order) == ("star", None)
    assert Experiment.parse(found.model_dump(mode="json")) == found
    assert as_begun(wanted.resolved(), found) == found


def test_auto_does_not_affect_a_method_that_needs_a_star() -> None:
    """Nothing is compared, and nothing is said."""
    job = prepare(experiment(method="helpers:EachArrival", collective="auto"))
    assert (job.experiment.collective, job.chosen_collective) == ("star", "")
    assert_identical(train(job), train(experiment(method="helpers:EachArrival")))


def test_one_worker_has_nothing_to_choose() -> None:
    """Every collective takes no time, and the ring is the first of them."""
    alone = {"name": "alone", "islands": [{"name": "a", "workers": 1}]}
    assert prepare(experiment(cluster=alone, collective="auto")).experiment.collective == "ring"


def test_a_run_says_what_it_chose(tmp_path: Path) -> None:
    """Which, and why, on stderr; the written experiment chooses no more."""
    out = str(tmp_path / "run")
    command = ["run", "--in-process", "--steps", "2", "--set", "eval.windows=1", "--out", out]
    result = CliRunner().invoke(app, [*command, "--set", "collective=auto"])
    assert result.exit_code == 0
    written = Experiment.load(tmp_path / "run" / "experiment.yaml")
    assert f"collective: auto chose {written.collective}: " in result.stderr
    assert written.collective in ("ring", "star", "hierarchical")
    summary = islands.Result.load(tmp_path / "run").summary
    assert summary["collective"] == written.collective
    assert summary["chosen_collective"] in result.stderr
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("bytes ")]
    assert row.split()[1:4] == ["collective", written.collective, "the"]
