"""Comparing methods: the protocol by hand, resuming, what is refused, and what is printed."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from islands import experiment as driver
from islands.cli import app
from islands.comparison import compare, summarize_runs
from islands.config import Experiment
from islands.errors import InputError, RunError
from islands.results.result import Result
from islands.results.study_tables import print_comparison
from islands.study import Study, method_settings, study_of

TINY = ("eval.every=4", "eval.windows=4")


def tiny(*methods: str, **changes: Any) -> Study:
    """A study of 12 steps per run."""
    overrides = (*TINY, *changes.pop("overrides", ()))
    return study_of(methods or ("dense", "diloco:sync_every=5"), None, overrides, STEPS, **changes)


STEPS: dict[str, object] = {"steps": 12}
GRID: dict[str, Any] = {"lr": [0.003, 0.03], "seeds": 2}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["compare", "--in-process", *arguments])


# ------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("dense", {"name": "dense"}),
        ("diloco:sync_every=10", {"name": "diloco", "sync_every": 10}),
        (
            "diloco:sync_every=10,outer.lr=0.4,outer.name=sgd",
            {"name": "diloco", "sync_every": 10, "outer": {"lr": 0.4, "name": "sgd"}},
        ),
        ("a.b:C", {"name": "a.b:C"}),
        ("a.b:C:pull=0.25,of=[1, 2]", {"name": "a.b:C", "pull": 0.25, "of": [1, 2]}),
    ],
)
def test_a_method_with_settings_in_one_text(text: str, settings: dict[str, Any]) -> None:
    """``NAME:key=value,…``; a user's method has a colon of its own, a value may hold commas."""
    assert method_settings(text) == settings


def test_every_method_rate_and_seed_is_one_run() -> None:
    """Labels come from the settings that were given; folders are readable; seeds are paired."""
    planned = tiny(**GRID).runs()
    assert [(p.method, p.lr, p.seed) for p in planned] == [
        (method, lr, seed)
        for method in ("dense", "diloco sync_every=5")
        for lr in (0.003, 0.03)
        for seed in (0, 1)
    ]
    assert planned[-1].place == "diloco-sync_every-5/lr-0.03/seed-1"
    assert planned[-1].experiment.optimizer.lr == 0.03
    assert planned[-1].experiment.seed == 1


def test_without_a_grid_a_method_has_its_default_rate() -> None:
    """The resolved experiment's, whatever that is."""
    (planned,) = tiny("dense").runs()
    assert planned.lr == planned.experiment.optimizer.lr == Experiment().resolved().optimizer.lr


def test_a_study_file_is_the_same_study(tmp_path: Path) -> None:
    """Grids and labels per method, the study's grid otherwise; what is written reads back equal."""
    file = tmp_path / "study.yaml"
    file.write_text(
        "experiment: {cluster: laptop, steps: 100}\n"
        "seeds: 3\nlr: [0.01, 0.03]\ntarget_loss: 2.5\n"
        "methods:\n- dense\n- {method: {name: diloco, sync_every: 10}, label: far, lr: 1}\n"
    )
    study = Study.load(file, TINY, {"steps": 8})
    assert study.seeds == (0, 1, 2)
    assert study.experiment.steps == 8
    assert study.experiment.cluster.name == "laptop"
    places = {p.place for p in study.runs()}
    assert places == {
        f"{run}/seed-{seed}"
        for run in ("dense/lr-0.01", "dense/lr-0.03", "far/lr-1.0")
        for seed in range(3)
    }
    (tmp_path / "again.yaml").write_text(study.dump_yaml())
    again = Study.load(tmp_path / "again.yaml")
    assert again.dump_yaml() == study.dump_yaml()
    assert [p.experiment for p in again.runs()] == [p.experiment for p in study.runs()]
    assert Study.load(file, seeds=[4], lr=[0.1]).seeds == (4,)


def test_the_shipped_study_is_valid() -> None:
    """Five methods, at least three rates each, three seeds, 2,000 steps, 4 workers, 4 windows."""
    study = Study.load(Path(__file__).parent.parent / "examples" / "studies" / "notes.yaml")
    assert len(study.methods) == 5
    assert all(len(one.lr or ()) >= 3 for one in study.methods)
    assert study.seeds == (0, 1, 2)
    experiment = study.experiment
    assert (experiment.steps, experiment.cluster.workers, experiment.data.batch) == (2000, 4, 4)
    assert (experiment.model.name, experiment.data.name) == ("decoder", "python-docs")


# -------------------------------------------------------------------------------------- the judge


def outcome(method: str, lr: float, seed: int, loss: float, reached: int | None = None) -> Any:
    return {
        "method": method,
        "lr": lr,
        "seed": seed,
        "diverged": not math.isfinite(loss),
        "final_val_loss": loss,
        "best_val_loss": loss,
        "payload_bytes_per_step": 10.0,
        "wire_bytes_per_step": 15.0,
        "emulated_s": 3.0,
        "steps_to_target": reached,
        "time_to_target_s": None if reached is None else reached / 10,
        "dropped_share": 0.0,
    }


def test_the_best_rate_has_the_lowest_mean() -> None:
    """Mean and sample deviation over the seeds: (2.0, 2.4) is 2.2 ± 0.4/√2."""
    runs = [
        outcome("m", lr, seed, loss)
        for lr, losses in {0.1: (2.1, 2.6), 0.3: (2.0, 2.4), 1.0: (1.9, 9.0)}.items()
        for seed, loss in enumerate(losses)
    ]
    (row,) = summarize_runs(runs)
    assert row["lr"] == 0.3
    assert row["final_val_loss"] == pytest.approx(2.2)
    assert row["final_val_loss_std"] == pytest.approx(0.4 / math.sqrt(2))
    assert not row["lr_at_edge"]
    assert [at["final_val_loss"] for at in row["grid"]] == pytest.approx([2.35, 2.2, 5.45])


def test_a_rate_with_a_diverged_seed_comes_last() -> None:
    """Also when its other seed is the best of all; a method that only diverges keeps its row."""
    runs = [outcome("m", 0.1, 0, 5.0), outcome("m", 0.1, 1, 6.0)]
    runs += [outcome("m", 0.3, 0, 1.0), outcome("m", 0.3, 1, math.nan)]
    runs += [outcome("n", 1.0, 0, math.inf), outcome("n", 3.0, 0, math.nan)]
    m, n = summarize_runs(runs)
    assert (m["lr"], m["diverged"], m["lr_at_edge"]) == (0.1, 0, True)
    assert m["grid"][1]["diverged"] == 1
    assert (n["lr"], n["diverged"]) == (1.0, 1)
    assert math.isnan(n["final_val_loss"])


def test_steps_to_target_need_every_seed() -> None:
    """A mean over those that got there would favour a method that often does not."""
    row = summarize_runs([outcome("m", 1.0, 0, 2.0, 40), outcome("m", 1.0, 1, 2.0, 60)])[0]
    assert (row["reached"], row["steps_to_target"], row["time_to_target_s"]) == (2, 50, 5)
    row = summarize_runs([outcome("m", 1.0, 0, 2.0, 40), outcome("m", 1.0, 1, 2.0)])[0]
    assert (row["reached"], row["steps_to_target"]) == (1, None)


def test_equal_rates_go_to_the_smaller_and_one_rate_has_no_edge() -> None:
    """Deterministic, and a grid of one was not a choice."""
    rows = summarize_runs([outcome("m", 1.0, 0, 2.0), outcome("m", 0.5, 0, 2.0)])
    assert rows[0]["lr"] == 0.5
    assert not summarize_runs([outcome("m", 1.0, 0, 2.0)])[0]["lr_at_edge"]


# --------------------------------------------------------------------------------------- running


def test_rows_are_what_the_runs_say(tmp_path: Path) -> None:
    """Losses, bytes, times and first evaluations below the target, from each run's own folder."""
    found = compare(tiny(target_loss=4.0, **GRID), out=tmp_path / "s", in_process=True)
    table = pq.read_table(tmp_path / "s" / "study.parquet").to_pylist()
    assert table == found.runs
    assert len(table) == 8
    for run in table:
        result = Result.load(tmp_path / "s" / run["folder"])
        assert result.summary["final_val_loss"] == run["final_val_loss"]
        assert result.summary["wire_bytes_per_step"] == run["wire_bytes_per_step"]
        evals = result.table("evals").to_pylist()
        first = next((e for e in evals if e["val_loss"] <= 4.0), {"step": None})
        assert run["steps_to_target"] == first["step"]
        assert run["time_to_target_s"] == first.get("emulated_s")
    chosen = {(run["method"], run["lr"]) for run in table if run["chosen"]}
    assert chosen == {(row["method"], row["lr"]) for row in found.rows}
    # Paired: before the first step all runs of a seed are one model, and seeds differ.
    before = {
        (run["seed"], Result.load(tmp_path / "s" / run["folder"]).table("evals")["val_loss"][0])
        for run in table
    }
    assert len(before) == 2


def test_a_resumed_study_equals_an_uninterrupted_one(
    tmp_path: Path, trained: list[Experiment]
) -> None:
    """Whatever is missing of a run's folder, that run and no other is trained again."""
    study = tiny(**GRID)
    whole = compare(study, out=tmp_path / "s", in_process=True)
    places = [tmp_path / "s" / run["folder"] for run in whole.runs]
    before = (tmp_path / "s" / "study.parquet").read_bytes()
    shutil.rmtree(places[0])
    (places[1] / "summary.json").unlink()
    shutil.rmtree(places[2] / "tables")
    next((places[3] / "tables" / "steps").iterdir()).unlink()
    summary = json.loads((places[4] / "summary.json").read_text())
    (places[4] / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    (places[5] / "experiment.yaml").unlink()
    (tmp_path / "s" / "study.parquet").unlink()
    trained.clear()
    again = compare(study, out=tmp_path / "s", in_process=True)
    planned = study.runs()
    assert trained == [p.experiment for p in planned[:6]]
    assert (again.runs, again.rows) == (whole.runs, whole.rows)
    assert (tmp_path / "s" / "study.parquet").read_bytes() == before
    trained.clear()
    compare(study, out=tmp_path / "s", in_process=True)
    assert not trained


def test_a_wider_grid_trains_only_what_is_new(tmp_path: Path, trained: list[Experiment]) -> None:
    """More rates, seeds, methods or another target go on from what is there."""
    compare(tiny("dense", lr=[0.01], seeds=1), out=tmp_path / "s", in_process=True)
    trained.clear()
    wider = tiny("dense", lr=[0.01, 0.03], seeds=1, target_loss=4.0)
    compare(wider, out=tmp_path / "s", in_process=True)
    assert [e.optimizer.lr for e in trained] == [0.03]


def test_runs_of_another_study_are_not_touched(tmp_path: Path, trained: list[Experiment]) -> None:
    """The same folder with other settings is refused before anything, or trained anew if asked."""
    compare(tiny("dense"), out=tmp_path / "s", in_process=True)
    other = tiny("dense", overrides=["data.batch=2"])
    trained.clear()
    with pytest.raises(InputError, match=r"other settings.*--overwrite"):
        compare(other, out=tmp_path / "s", in_process=True)
    assert not trained
    compare(other, out=tmp_path / "s", in_process=True, overwrite=True)
    assert len(trained) == 1
    with pytest.raises(InputError, match="holds a single run"):
        compare(other, out=next((tmp_path / "s" / "dense").iterdir()) / "seed-0")


def test_a_failure_keeps_the_finished_runs(tmp_path: Path) -> None:
    """The message says which run failed, why, and how to go on."""
    study = tiny("dense", "helpers:Failing")
    with pytest.raises(RunError, match=r"helpers:Failing, lr .*out of numbers.*--out") as caught:
        compare(study, out=tmp_path / "s", in_process=True)
    assert "\n" not in str(caught.value)
    (done,) = (tmp_path / "s" / "dense").glob("lr-*/seed-0")
    assert Result.load(done).summary["status"] == "done"


def test_an_interrupt_is_exit_code_130(tmp_path: Path) -> None:
    """Finished runs stay, and the same command goes on with the others."""
    arguments = ["--steps", "12", "--out", str(tmp_path / "s"), "--method", "dense"]
    result = invoke(*arguments, "--method", "helpers:Failing:interrupt=true")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert f"--out {tmp_path / 's'}" in result.stderr
    assert len(list((tmp_path / "s" / "dense").glob("lr-*/seed-0/summary.json"))) == 1


def test_a_diverged_run_is_kept_and_shown(tmp_path: Path) -> None:
    """Its loss is not a number, another rate is chosen, and the table says so."""
    overrides = ["optimizer.name=sgd", "optimizer.clip=null", "optimizer.schedule=constant"]
    study = tiny("dense", lr=[0.1, 1e30], overrides=overrides, target_loss=0.1)
    found = compare(study, out=tmp_path / "s", in_process=True)
    assert [run["diverged"] for run in found.runs] == [False, True]
    assert math.isnan(found.runs[1]["final_val_loss"])
    assert found.rows[0]["lr"] == 0.1
    printed = text_of(found)
    assert "diverged (1 of 1)" in printed.replace("\N{NO-BREAK SPACE}", " ")
    assert "not reached" in printed
    assert "edge" in printed


def text_of(found: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ------------------------------------------------------------------------------------ the command


def test_the_command_prints_a_table_and_json_has_the_same_rows(tmp_path: Path) -> None:
    """At most 80 columns; `--json` is alone on stdout."""
    arguments = ["--method", "dense", "--method", "diloco:sync_every=5,outer.lr=0.4", "--lr"]
    arguments += ["0.003,0.01,0.1", "--seeds", "0,2", "--steps", "12", "--target-loss", "4"]
    arguments += ["--set", "eval.windows=4", "--out", str(tmp_path / "s")]
    printed = invoke(*arguments)
    assert printed.exit_code == 0, printed.output
    lines = printed.stdout.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("results "))]
    assert max(map(len, table)) <= 80
    assert "1/12 dense, lr 0.003, seed 0" in printed.stderr
    found = json.loads(invoke(*arguments, "--json").stdout)
    assert [row["method"] for row in found["rows"]] == [
        "dense",
        "diloco sync_every=5 outer.lr=0.4",
    ]
    assert [run["seed"] for run in found["runs"]] == [0, 2] * 6
    for row in found["rows"]:
        assert f"{row['final_val_loss']:.4f} ± {row['final_val_loss_std']:.4f}" in printed.stdout
    assert found["rows"][0]["payload_bytes_per_step"] == 10_752
    assert found["rows"][0]["wire_bytes_per_step"] == 16_128


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["method", "--method", "--study"]),
        (["--method", "dense", "--study", "x.yaml"], ["method", "--study"]),
        (["--method", "densee"], ["'densee'", "'dense'"]),
        (["--method", "dense:ratio=2"], ["methods.0", "'ratio'"]),
        (["--method", "diloco:sync_evry=2"], ["'sync_evry'", "'sync_every'"]),
        (["--method", "dense:sync_every"], ["methods.0", "'sync_every'", "="]),
        (["--method", "topk:ratio=0"], ["ratio", "0", "at least 1"]),
        (["--method", "demo:k=0"], ["k", "0", "at least 1"]),
        (["--method", "diloco:sync_every=0"], ["sync_every", "0", "at least 1"]),
        (["--method", "dense", "--method", "dense"], ["methods", "'dense'", "twice"]),
        (["--method", "dense", "--lr", ""], ["lr", "at least one"]),
        (["--method", "dense", "--lr", "0"], ["lr", "0"]),
        (["--method", "dense", "--lr", "0.1,0.1"], ["lr", "0.1", "twice"]),
        (["--method", "dense", "--lr", "fast"], ["lr", "'fast'", "number"]),
        (["--method", "dense", "--seeds", "0"], ["seeds", "0", "at least one"]),
        (["--method", "dense", "--seeds", "1.5"], ["seeds", "1.5"]),
        (["--method", "dense", "--seeds", ""], ["seeds", "at least one"]),
        (["--method", "dense", "--seeds", "-1,2"], ["seeds", "-1"]),
        (["--method", "dense", "--seeds", "1,1"], ["seeds", "1", "twice"]),
        (["--method", "dense", "--target-loss", "-1"], ["target_loss", "-1"]),
        (["--method", "dense", "--cluster", "two_ilands"], ["'two_ilands'", "'two_islands'"]),
        (["--method", "dense", "--figure", "picture.txt"], ["figure", "picture.txt", ".png"]),
        (["--method", "dense", "--figure", "no/such/f.png"], ["figure", "no/such/f.png"]),
        (["--method", "dense", "--seeds", "9" * 23], ["seeds", "at most"]),
        (["--method", "diloco", "--set", "method.sync_every=1"], ["--method NAME:key=value"]),
        (["--method", "dense", "--set", "seed=4"], ["seed=4", "--seeds"]),
        (["--study", "missing.yaml"], ["missing.yaml"]),
        (["--method", "dense", "--set", "data.name=nowhere"], ["data.name", "'nowhere'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_wrong_input_is_one_message(
    arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, one line that names the field and the value, nothing trained or written."""
    monkeypatch.chdir(tmp_path)
    refused(invoke("--steps", "4", *arguments), *parts)
    assert not list(tmp_path.iterdir())


def test_a_config_with_a_seed_is_refused(tmp_path: Path) -> None:
    """A study varies the seed: one in the experiment file would be ignored, so it is refused."""
    (tmp_path / "own.yaml").write_text("seed: 7\n")
    config = ["--config", str(tmp_path / "own.yaml")]
    refused(invoke("--method", "diloco", *config), "'seed'")


def test_an_address_without_a_cluster_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written, by both commands."""
    monkeypatch.chdir(tmp_path)
    for command in ("compare", "scale"):
        arguments = [command, "--method", "dense", "--steps", "4", "--address", "127.0.0.1:1"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].startswith("error: --address: nobody answers")
    assert not list(tmp_path.iterdir())


def refused(result: Any, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("experiment: {cluster: marz}\nmethods: [dense]\n", ["cluster", "'marz'"]),
        ("methods: [dense]\nseed: 3\n", ["'seed'", "'seeds'"]),
        ("methods: []\n", ["methods", "at least one"]),
        ("seeds: [0]\n", ["methods", "missing"]),
        ("experiment: {method: dense}\nmethods: [dense]\n", ["experiment.method", "'methods'"]),
        ("methods: [{method: dense, lr: []}]\n", ["methods.0.lr", "at least one"]),
        ("methods: [{method: dense, rate: 1}]\n", ["methods.0", "'rate'"]),
        ("methods: [{method: {name: dense, k: 1}}]\n", ["methods.0.method", "'k'"]),
        ("methods: [dense]\nseeds: []\n", ["seeds", "at least one"]),
        ("methods: [{method: dense, label: a b}, {method: diloco, label: a-b}]\n", ["twice"]),
    ],
)
def test_a_wrong_study_file_is_one_message(text: str, parts: list[str], tmp_path: Path) -> None:
    """With the path inside the file."""
    file = tmp_path / "study.yaml"
    file.write_text(text)
    refused(invoke("--study", str(file), "--out", str(tmp_path / "s")), *parts)
    assert not (tmp_path / "s").exists()


# ----------------------------------------------------------------------------------------- picture


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    """Steps, bytes and seconds of each method's evaluations; mean and spread over the seeds."""
    pytest.importorskip("matplotlib")
    import numpy as np

    from islands.figures import curves, draw_comparison

    found = compare(tiny(seeds=2), out=tmp_path / "s", in_process=True)
    draw_comparison(found, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    dense, diloco = curves(found)
    assert dense.steps.tolist() == diloco.steps.tolist() == [0, 4, 8, 12]
    assert dense.sent_bytes == pytest.approx(16_128 * dense.steps)
    # Rounds after steps 5, 10 and (the rest) 12, each of 1.5 payloads.
    assert diloco.sent_bytes == pytest.approx([0, 0, 16_128, 3 * 16_128])
    evals = [
        Result.load(tmp_path / "s" / run["folder"]).table("evals").column("val_loss").to_pylist()
        for run in found.runs[:2]
    ]
    one, two = np.array(evals)
    assert dense.loss == pytest.approx((one + two) / 2)
    assert dense.spread == pytest.approx(abs(one - two) / math.sqrt(2))


def test_without_matplotlib_a_figure_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is trained, with the extra to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = str(tmp_path / "s")
    figure = str(tmp_path / "f.png")
    refused(invoke("--method", "dense", "--figure", figure, "--out", out), "islands[figures]")
    assert not (tmp_path / "s").exists()


# --------------------------------------------------------------------------------------------- Ray


@pytest.mark.ray
def test_on_actors_the_same_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors that are started once give every run the numbers that it has in one process."""
    started = []

    class Counted(driver.Actors):
        def __init__(self, *arguments: Any) -> None:
            started.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(driver, "Actors", Counted)
    study = tiny(seeds=2)
    here = compare(study, out=tmp_path / "a", in_process=True)
    there = compare(study, out=tmp_path / "b")
    assert (here.runs, here.rows) == (there.runs, there.rows)
    assert len(started) == 1
    one, other = ((tmp_path / x / "study.parquet").read_bytes() for x in "ab")
    assert one == other
