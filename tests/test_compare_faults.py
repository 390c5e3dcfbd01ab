"""Faults as an axis of a study: what a method of its own may have, its name, runs and resuming."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from islands.cli import app
from islands.comparison import compare
from islands.config import Experiment
from islands.errors import InputError
from islands.results.result import Result
from islands.results.study_tables import print_comparison
from islands.study import Study

HEAD = "experiment: {steps: 12, eval: {every: 0, windows: 4}, data: {batch: 2}}\nlr: 0.01\n"
DROP = "drop:probability=0.5"
EXAMPLES = Path(__file__).parent.parent / "examples" / "studies"


def study(tmp_path: Path, *methods: str, **options: Any) -> Study:
    """The study file with these entries, of 12 steps a run."""
    return Study.load(written(tmp_path, *methods), (), options)


def written(tmp_path: Path, *methods: str) -> Path:
    file = tmp_path / "study.yaml"
    file.write_text(HEAD + "methods:\n" + "".join(f"- {one}\n" for one in methods))
    return file


def test_each_method_has_faults_of_its_own(tmp_path: Path) -> None:
    """They come after those of the experiment; policy and replicas take its place; of the data
    only what was given changes."""
    own = "{method: diloco, faults: [{kind: drop, probability: 0.5}], policy: {mean: median}, "
    own += "replicas: [[0, 2], [6, 4]], data: {shards: clustered}}"
    plain, other = study(tmp_path, "diloco", own, faults=["slow:factor=2"]).runs()
    assert [fault.kind for fault in plain.experiment.faults] == ["slow"]
    assert [fault.kind for fault in other.experiment.faults] == ["slow", "drop"]
    assert (plain.experiment.policy.mean, other.experiment.policy.mean) == ("mean", "median")
    assert (plain.experiment.replicas, other.experiment.replicas) == ((), ((0, 2), (6, 4)))
    assert (plain.experiment.data.shards, other.experiment.data.shards) == ("iid", "clustered")
    assert plain.experiment.data.batch == other.experiment.data.batch == 2


def test_the_label_says_what_is_its_own(tmp_path: Path) -> None:
    """So that the same method under two faults has two names, and two folders."""
    entries = ["diloco", f"{{method: diloco, faults: ['{DROP}']}}"]
    entries.append("{method: diloco, policy: {quorum: 2}, data: {shards: clustered}}")
    entries.append("{method: 'diloco:sync_every=5', replicas: [[0, 2], [6, 4]]}")
    planned = study(tmp_path, *entries).runs()
    assert [one.method for one in planned] == [
        "diloco",
        "diloco drop:probability=0.5",
        "diloco quorum=2 shards=clustered",
        "diloco sync_every=5 replicas=0:2,6:4",
    ]
    assert len({one.place for one in planned}) == 4


def test_a_study_with_faults_reads_back_equal(tmp_path: Path) -> None:
    """What is written into the study's folder is the same study again."""
    own = f"{{method: diloco, faults: ['{DROP}'], policy: {{deadline: 2 x median}}, "
    own += "data: {shards: clustered}}"
    one = study(tmp_path, "dense", own)
    (tmp_path / "again.yaml").write_text(one.dump_yaml())
    again = Study.load(tmp_path / "again.yaml")
    assert again.dump_yaml() == one.dump_yaml()
    assert [p.experiment for p in again.runs()] == [p.experiment for p in one.runs()]


def test_a_study_with_faults_goes_on_where_it_was(
    tmp_path: Path, trained: list[Experiment]
) -> None:
    """Runs in which not everyone takes every step count as finished; other faults are refused."""
    entries = ["{label: few, method: dense, replicas: [[0, 2], [6, 4]]}"]
    entries.append("{label: leave, method: dense, faults: [{kind: leave, worker: 1, step: 5}]}")
    first = compare(study(tmp_path, *entries), out=tmp_path / "s", in_process=True)
    assert len(trained) == 2
    steps = Result.load(tmp_path / "s" / first.runs[0]["folder"]).table("steps")
    assert steps.num_rows == 6 * 2 + 6 * 4
    again = compare(study(tmp_path, *entries), out=tmp_path / "s", in_process=True)
    assert len(trained) == 2
    assert again.rows == first.rows
    entries[1] = entries[1].replace("step: 5", "step: 6")
    with pytest.raises(InputError, match="other settings"):
        compare(study(tmp_path, *entries), out=tmp_path / "s", in_process=True)


def test_rows_have_the_share_that_was_dropped(tmp_path: Path) -> None:
    """Dropped contributions of all that were made; absent workers made none. Shown if there is
    any."""
    entries = ["dense", f"{{method: dense, label: half, faults: ['{DROP}'], replicas: [[0, 2]]}}"]
    found = compare(study(tmp_path, *entries), out=tmp_path / "s", in_process=True)
    none, half = found.runs
    summary = Result.load(tmp_path / "s" / half["folder"]).summary
    assert none["dropped_share"] == 0
    assert summary["dropped_syncs"] > 0
    assert half["dropped_share"] == summary["dropped_syncs"] / (12 * 2)
    assert pq.read_table(tmp_path / "s" / "study.parquet").to_pylist() == found.runs
    assert "dropped" in printed(found)
    assert f"{100 * half['dropped_share']:.1f} %" in printed(found)
    whole = compare(study(tmp_path, "dense"), out=tmp_path / "s", in_process=True)
    assert "dropped" not in printed(whole)


def printed(found: Any) -> str:
    file = io.StringIO()
    print_comparison(found, Console(file=file, width=200))
    return file.getvalue()


def test_faults_of_the_command_line_are_everybody_s(tmp_path: Path) -> None:
    """``--fault`` adds to every method, of a study file or of ``--method``."""
    file = written(tmp_path, "dense", "{method: 'diloco:sync_every=2', faults: ['slow:factor=2']}")
    for arguments in (["--study", str(file)], ["--method", "dense", "--steps", "12"]):
        out = tmp_path / arguments[0].strip("-")
        command = ["compare", "--in-process", "--json", "--quiet", "--out", str(out)]
        result = CliRunner().invoke(app, [*command, "--fault", DROP, *arguments])
        assert result.exit_code == 0, result.output
        assert all(run["dropped_share"] > 0 for run in json.loads(result.stdout)["runs"])
        assert all(math.isfinite(r["final_val_loss"]) for r in json.loads(result.stdout)["runs"])


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("{method: dense, faults: [{kind: drop, probability: 2}]}", ["methods.0.faults.0", "2"]),
        ("{method: dense, faults: [{kind: dorp}]}", ["methods.0.faults.0.kind", "'drop'"]),
        ("{method: dense, policy: {quorun: 2}}", ["methods.0.policy", "'quorun'", "'quorum'"]),
        ("{method: dense, replicas: [[1, 2]]}", ["methods.0.replicas.0", "step 0"]),
        ("{method: dense, data: {shards: clustred}}", ["methods.0.data.shards", "'clustered'"]),
        (
            "{method: dense, faults: ['drop:probability=0.5,anchor=last_received']}",
            ["dense drop", "faults.0.anchor", "'current'"],
        ),
        ("{method: dense, policy: {quorum: 9}}", ["dense quorum=9: policy.quorum", "9", "4"]),
        ("{method: dense, faults: ['leave:worker=7,step=2']}", ["faults.0.worker", "7", "4"]),
    ],
)
def test_what_does_not_fit_is_one_message(tmp_path: Path, entry: str, parts: list[str]) -> None:
    """Exit code 2 with the place in the study, before anything is trained."""
    command = ["compare", "--in-process", "--study", str(written(tmp_path, entry))]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "s")])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert all(part in line for part in parts), line
    assert not (tmp_path / "s").exists()


def test_the_shipped_schedules_compute_the_same() -> None:
    """Every schedule of replicas takes as many worker steps as the constant one."""
    one = Study.load(EXAMPLES / "schedules.yaml")
    steps = one.experiment.steps
    for planned in one.runs():
        edges = [*(step for step, _ in planned.experiment.replicas), steps]
        counts = [count for _, count in planned.experiment.replicas]
        spans = zip(edges, edges[1:], counts, strict=False)
        assert sum((last - first) * count for first, last, count in spans) == 4 * steps


@pytest.mark.parametrize("name", ["drops", "drops_gpt"])
def test_the_shipped_drops_are_what_their_labels_say(name: str) -> None:
    """The probability at a label's end, and clustered texts where it says so."""
    for planned in Study.load(EXAMPLES / f"{name}.yaml").runs():
        drops = [fault.probability for fault in planned.experiment.faults if fault.kind == "drop"]
        assert sum(drops) == float(planned.method.split()[-1])
        clustered = planned.experiment.data.shards == "clustered"
        assert clustered == ("clustered" in planned.method)
