"""The `retime` command: lists of values, what is refused, tables, JSON and picture."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from helpers import cluster, experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from islands.cli import app
from islands.errors import RunError
from islands.experiment import run
from islands.results import tables
from islands.results.result import Result
from islands.retime import sweep
from islands.units import format_bandwidth, format_time, parse_bandwidth, parse_time


def trained(folder: Path, method: Any, **parts: Any) -> Result:
    """A run of 12 steps on three unequal islands in ``folder``."""
    where = cluster((2, 1, 1), (0.1, 0.23, 0.07), "1 Mbit/s", "40 ms")
    return run(experiment(method=method, cluster=where, **parts), out=folder, in_process=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of runs by method, each trained once."""
    base = tmp_path_factory.mktemp("runs")

    @cache
    def folder(method: str) -> Path:
        place = base / f"my-{method.rpartition(':')[2].lower()}"
        trained(place, method)
        return place

    return folder


# ------------------------------------------------------------------------------------------- lists


def bandwidths(text: str) -> list[str | None]:
    return [s.text for s in sweep("bandwidth", text, parse_bandwidth, format_bandwidth)]


def test_an_ellipsis_goes_on_by_the_same_factor() -> None:
    """Three dots or one character, with or without spaces, up or down, between other values."""
    assert bandwidths("1Mbit/s,10Mbit/s,…,100Gbit/s") == [
        "1Mbit/s",
        "10Mbit/s",
        "100Mbit/s",
        "1Gbit/s",
        "10Gbit/s",
        "100Gbit/s",
    ]
    assert bandwidths("1 Mbit/s, 2 Mbit/s, ..., 8 Mbit/s, 1 Gbit/s, unlimited") == [
        "1 Mbit/s",
        "2 Mbit/s",
        "4 Mbit/s",
        "8 Mbit/s",
        "1 Gbit/s",
        "unlimited",
    ]
    assert bandwidths("8 kbit/s,4 kbit/s,…,1 kbit/s")[-2:] == ["2 kbit/s", "1 kbit/s"]
    assert bandwidths("1 kbit/s,2 kbit/s,…,4 kbit/s") == ["1 kbit/s", "2 kbit/s", "4 kbit/s"]
    delays = sweep("delay", "1ms,10ms,…,1s", parse_time, format_time)
    assert [(d.text, d.value) for d in delays][2:] == [("100ms", pytest.approx(0.1)), ("1s", 1.0)]


@settings(max_examples=50, deadline=None)
@given(first=st.integers(1, 999), factor=st.integers(2, 9), more=st.integers(0, 12))
def test_any_progression_is_continued_to_its_end(first: int, factor: int, more: int) -> None:
    """Every value reads back as the one before times the factor."""
    values = [first * factor**n for n in range(more + 3)]
    text = f"{values[0]} kbit/s,{values[1]} kbit/s,…,{values[-1]} kbit/s"
    found = sweep("bandwidth", text, parse_bandwidth, format_bandwidth)
    assert [s.value for s in found] == pytest.approx([v * 125.0 for v in values])
    assert [parse_bandwidth(s.text) for s in found] == [s.value for s in found]


# --------------------------------------------------------------------------------------- bad input


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["retime", *arguments])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--cluster", "four_continents"], ["cluster", "8 workers", "needs 4", "two_islands"]),
        (["--cluster", "two_ilands"], ["cluster", "'two_ilands'", "'two_islands'"]),
        (["--bandwidth", "10"], ["bandwidth", "'10'", "unit"]),
        (["--bandwidth", "1Mbit/s,,2Mbit/s"], ["bandwidth", "''"]),
        (["--bandwidth", "0Mbit/s"], ["bandwidth", "0Mbit/s", "more than zero"]),
        (["--bandwidth", "1Mb/s"], ["bandwidth", "bits or bytes"]),
        (["--bandwidth", "1Mbit/s,…,9Mbit/s"], ["bandwidth", "'…'", "two values"]),
        (["--bandwidth", "1Mbit/s,3Mbit/s,…"], ["bandwidth", "ends"]),
        (["--bandwidth", "1Mbit/s,2Mbit/s,…,…,9Mbit/s"], ["bandwidth", "'…'"]),
        (["--bandwidth", "1Mbit/s,3Mbit/s,…,10Mbit/s"], ["bandwidth", "10Mbit/s", "factor"]),
        (["--bandwidth", "1Mbit/s,1Mbit/s,...,9Mbit/s"], ["bandwidth", "9Mbit/s"]),
        (["--bandwidth", "2Mbit/s,1Mbit/s,...,9Mbit/s"], ["bandwidth", "9Mbit/s"]),
        (["--bandwidth", "1Mbit/s,2Mbit/s,...,unlimited"], ["bandwidth", "unlimited"]),
        (["--delay", "0s,0s,...,1s"], ["delay", "1s"]),
        (["--load", "1"], ["load", "1", "less than 1"]),
        (["--load", "0,-0.1"], ["load", "-0.1"]),
        (["--load", "nan"], ["load", "nan"]),
        (["--load", "30%"], ["load", "'30%'", "0.3"]),
        (["--step-time", "0s"], ["step_time", "'0s'", "more than zero"]),
        (["--step-time", "100"], ["step_time", "'100'", "unit"]),
        (["--delay", "-1ms"], ["delay", "-1ms"]),
        (["--target-loss", "0"], ["target_loss", "0"]),
        (["--target-loss", "nan"], ["target_loss", "nan"]),
        (["--figure", "f.png"], ["figure", "--bandwidth"]),
        (["--figure", "f.jpg", "--bandwidth", "1Mbit/s"], ["figure", "f.jpg"]),
        (["--figure", "f.png", "--bandwidth", "unlimited"], ["figure", "--bandwidth"]),
        (["--cluster", "laptop", "--bandwidth", "1Mbit/s"], ["bandwidth", "'laptop'", "no link"]),
        (["--cluster", "laptop", "--load", "0.5"], ["load", "'laptop'", "no link"]),
        (["--cluster", "laptop", "--delay", "1s"], ["delay", "'laptop'", "no link"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_message(
    arguments: list[str], parts: list[str], runs: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Exit code 2, one line that names the field and the value, nothing written."""
    folder = str(runs("dense"))
    monkeypatch.chdir(tmp_path)
    refused(invoke(folder, *arguments), *parts)
    assert not list(tmp_path.iterdir())


def refused(result: Any, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line
    assert not result.stdout


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """None there, an empty one, and a study's."""
    refused(invoke(str(tmp_path / "nowhere")), "folder", "nowhere", "no run")
    refused(invoke(str(tmp_path)), "folder", str(tmp_path), "no run")


def test_a_run_that_did_not_end_is_refused(tmp_path: Path) -> None:
    """Its trace stops somewhere, so it has no time in all."""
    folder = tmp_path / "r"
    with pytest.raises(RunError):
        trained(folder, "helpers:Failing", steps=20)
    refused(invoke(str(folder)), "folder", str(folder), "end")


def test_a_run_that_depended_on_time_is_refused(tmp_path: Path) -> None:
    """Rounds that closed by the clock would have closed otherwise elsewhere."""
    folder = tmp_path / "r"
    trained(folder, {"name": "helpers:EachArrival", "sync_every": 4})
    refused(invoke(str(folder)), "folder", str(folder), "clock", "helpers:EachArrival")


def test_a_trace_with_a_hole_is_refused(runs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A part that is gone is noticed, and said so."""
    folder = tmp_path / "r"
    shutil.copytree(runs("dense"), folder)
    table = tables.read_table(folder, "trace")
    hole = pc.and_(pc.equal(table["worker"], 1), pc.equal(table["version"], 5))
    shutil.rmtree(folder / "trace")
    kept = table.filter(pc.invert(pc.fill_null(hole, False)))
    with tables.TableWriter(folder, "trace") as writer:
        writer.append(**{name: kept.column(name).to_pylist() for name in kept.schema.names})
    refused(invoke(str(folder)), "folder", str(folder), "not whole")


def test_nothing_is_timed_if_one_folder_is_wrong(runs: Any, tmp_path: Path) -> None:
    """All folders are looked at first."""
    refused(invoke(str(runs("dense")), str(tmp_path), "--json"), "folder", "no run")


# ---------------------------------------------------------------------------------- command line


def test_json_has_rows_and_needs_and_nothing_else(runs: Any) -> None:
    """What scripts read: names, what was given, times."""
    result = invoke(str(runs("dense")), "--bandwidth", "1Mbit/s,10Mbit/s", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == {"rows", "needs"}
    slow, fast = found["rows"]
    assert slow["folder"] == str(runs("dense"))
    assert (slow["bandwidth"], fast["bandwidth"]) == ("1Mbit/s", "10Mbit/s")
    assert (slow["cluster"], slow["load"], slow["step_time"], slow["delay"]) == (
        "test",
        None,
        None,
        None,
    )
    assert slow["emulated_s"] > fast["emulated_s"]
    assert 0 < slow["compute_utilization"] < fast["compute_utilization"] < 1
    assert slow["stalled"] is None
    assert 0 < slow["wan_utilization"] <= 1
    assert [need["utilization"] for need in found["needs"]] == [0.5, 0.8, 0.9, 0.95, 0.99]


def test_tables_fit_80_columns_from_any_folder(runs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Everything swept at once, several runs side by side, from another working folder."""
    monkeypatch.chdir(tmp_path)
    folders = [str(runs(method)) for method in ("dense", "helpers:Fragments", "dense")]
    sweeps = ["--bandwidth", "1Mbit/s,10Mbit/s", "--load", "0,0.3", "--step-time", "100 ms"]
    more = ["--delay", "10 ms", "--cluster", "two_islands", "--target-loss", "2.5"]
    result = invoke(*folders, *sweeps, *more)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for part in ("bandwidth", "load", "10Mbit/s", "100 ms", "not reached", "99 %", "my-dense"):
        assert part in result.stdout
    assert "two_islands" not in result.stdout  # there is only one
    plain = invoke(folders[0], "--cluster", "two_islands", "--cluster", "laptop")
    assert "laptop" in plain.stdout


def test_figure_shows_a_line_per_run_and_network(runs: Any, tmp_path: Path) -> None:
    """Utilisation against bandwidth; an SVG says what it shows in its text."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "f.svg"
    folders = [str(runs(method)) for method in ("dense", "diloco")]
    sweeps = ["--bandwidth", "1Mbit/s,10Mbit/s,…,1Gbit/s", "--load", "0,0.5"]
    assert invoke(*folders, *sweeps, "--figure", str(path)).exit_code == 0
    text = path.read_text()
    for label in ("my-dense, load 0.5", "my-diloco, load 0", "100 Mbit/s"):
        assert f"<!-- {label} -->" in text


def test_neither_ray_nor_the_models_code_is_needed(runs: Any, tmp_path: Path) -> None:
    """Where only the network matters nothing else is started or asked for."""
    folder = tmp_path / "r"
    shutil.copytree(runs("dense"), folder)
    file = folder / "experiment.yaml"
    file.write_text(file.read_text().replace("name: decoder", "name: nowhere.at_all:build"))
    assert "nowhere" in file.read_text()
    code = (
        "import sys; from islands.retime import retime; "
        f"print(retime([{str(folder)!r}]).rows[0]['emulated_s']); assert 'ray' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == Result.load(runs("dense")).summary["emulated_s"]
