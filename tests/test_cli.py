"""The command line: its surface is frozen, mistakes end with one message, results go where
asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from islands.cli import app

ISLANDS = [sys.executable, "-m", "islands.cli"]
QUICK = ["--in-process", "--steps", "6", "--set", "eval.windows=4"]

#: Every command and its options. Scripts depend on them: they grow only on purpose.
SURFACE = {
    "run": "--cluster --method --model --data --steps --seed --set --fault --config --out "
    "--overwrite "
    "--address --in-process --transfers --clock --time-scale --quiet --json",
    "compare": "--method --lr --seeds --target-loss --study --cluster --model --data --steps --set "
    "--fault --config --out --overwrite --address --in-process --figure --quiet --json",
    "scale": "--workers --method --bytes-only --cluster --model --data --steps --set --config "
    "--out --overwrite --address --in-process --figure --quiet --json",
    "retime": "--cluster --bandwidth --load --step-time --delay --target-loss --figure --json",
    "links": "--cluster --load --size --seed --json",
    "check": "--model --set --json",
    "bench": "--model --workers --method --sync-every --steps --repeats --set --network "
    "--fragments --json",
}


def invoke(*arguments: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(app, list(arguments))


def commands() -> dict[str, Any]:
    import typer.main

    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_commands_and_options_are_frozen() -> None:
    """What scripts may rely on changes only on purpose."""
    found = {
        name: {o for p in command.params for o in p.opts if o.startswith("--")} - {"--help"}
        for name, command in commands().items()
    }
    assert found == {name: set(options.split()) for name, options in SURFACE.items()}


@pytest.mark.parametrize("command", SURFACE)
def test_help_has_an_example(command: str) -> None:
    """`--help` of every command shows how to call it."""
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: islands {command}" in result.output


def test_run_prints_what_it_cost_and_where_it_is(tmp_path: Path) -> None:
    """The final table fits 80 columns and ends with the folder and what to try next."""
    result = invoke("run", *QUICK, "--out", str(tmp_path / "r"))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("results "))]
    assert max(map(len, table)) <= 80
    assert str(tmp_path / "r") in result.stdout
    assert "try next" in result.stdout


def test_json_is_alone_on_stdout(tmp_path: Path) -> None:
    """`--json`: the summary and nothing else, with progress still on stderr."""
    command = [*ISLANDS, "run", *QUICK, "--json", "--out", str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    summary = json.loads(done.stdout)
    assert summary["workers"] == 4
    assert summary["folder"] == str(tmp_path / "r")
    assert "training" in done.stderr


def test_the_written_experiment_reproduces_the_run(tmp_path: Path) -> None:
    """`--config` with a run's own experiment.yaml gives the same parameters and losses."""
    first = json.loads(
        invoke("run", *QUICK, "--seed", "3", "--json", "--out", str(tmp_path / "a")).stdout
    )
    config = str(tmp_path / "a" / "experiment.yaml")
    again = ["run", "--in-process", "--config", config, "--json", "--out", str(tmp_path / "b")]
    second = json.loads(invoke(*again).stdout)
    for key in ("parameters_sha256", "final_val_loss", "emulated_s", "wire_bytes_total"):
        assert first[key] == second[key]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--cluster", "two_ilands"], ["cluster", "'two_ilands'", "'two_islands'"]),
        (["--cluster", "missing.yaml"], ["missing.yaml"]),
        (["--method", "dilocco"], ["method", "'dilocco'", "'diloco'"]),
        (["--method", "nowhere:Method"], ["method", "nowhere"]),
        (["--model", "decodr"], ["model", "'decodr'", "'decoder'"]),
        (["--model", "nowhere:build"], ["model", "nowhere"]),
        (["--data", "no/such/*.txt"], ["data", "no/such/*.txt"]),
        (["--steps", "0"], ["steps", "0", "at least 1"]),
        (["--set", "method.sync_every=0"], ["method.sync_every", "0"]),
        (["--set", "method.sync_evry=5"], ["'sync_evry'", "'sync_every'"]),
        (["--set", "stepz=5"], ["'stepz'", "'steps'"]),
        (["--set", "data.batch=-1"], ["data.batch", "-1"]),
        (["--set", "cluster.links.atlantic.bandwidth=10"], ["bandwidth", "10", "unit"]),
        (["--set", "cluster.links.atlantic.bandwidth=0 Mbit/s"], ["bandwidth", "0 Mbit/s"]),
        (["--set", "cluster.links.atlantic.delay=-1 ms"], ["delay", "-1 ms"]),
        (["--set", "cluster.islands.0.step_time=0 s"], ["step_time", "0 s"]),
        (["--set", "cluster.islands.0.workers=0"], ["workers", "0"]),
        (["--set", "cluster.links.0.between=[dublin, mars]"], ["'mars'"]),
        (["--set", "cluster.links=[]"], ["dublin", "oregon", "route"]),
        (["--set", "data.window=400000", "--set", "model.context=400000"], ["window"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--set", "device=tpu"], ["device", "'tpu'"]),
        (["--set", "optimizer.name=adam"], ["optimizer.name", "'adam'", "'adamw'"]),
        (["--set", "method.payload_dtype=bf17"], ["payload_dtype", "'bf17'"]),
        (["--set", "method.outer.name=nesterof"], ["'nesterof'", "'nesterov'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_wrong_input_is_one_message(
    arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, one line that names the field and the value, no traceback, nothing written."""
    monkeypatch.chdir(tmp_path)
    result = invoke("run", "--in-process", *arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_is_refused() -> None:
    """A typo in an option's name is never swallowed."""
    result = invoke("run", "--stepz", "5")
    assert result.exit_code == 2
    assert "--stepz" in result.stderr


def test_a_folder_with_a_run_is_refused_unless_overwritten(tmp_path: Path) -> None:
    """A second run into the same folder needs `--overwrite`; the first stays whole without it."""
    folder = str(tmp_path / "r")
    assert invoke("run", *QUICK, "--out", folder).exit_code == 0
    before = (tmp_path / "r" / "summary.json").read_text()
    refused = invoke("run", *QUICK, "--seed", "1", "--out", folder)
    assert refused.exit_code == 2
    assert "--overwrite" in refused.stderr
    assert (tmp_path / "r" / "summary.json").read_text() == before
    assert invoke("run", *QUICK, "--seed", "1", "--out", folder, "--overwrite").exit_code == 0
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["seed"] == 1


def test_a_failed_run_exits_with_1_and_says_where_the_results_are(tmp_path: Path) -> None:
    """The worker, its island, the step and the cause in one line; results so far readable."""
    method = ["--method", "helpers:Failing", "--steps", "20"]
    result = invoke("run", *QUICK, *method, "--quiet", "--out", str(tmp_path / "r"))
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    for part in ("worker 2 (oregon)", "step 8", "ArithmeticError: out of numbers", str(tmp_path)):
        assert part in line
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:99999999"])
def test_a_ray_address_without_a_cluster_is_refused(address: str, tmp_path: Path) -> None:
    """Bounded, exit code 2, and nothing is written."""
    result = invoke("run", "--steps", "5", "--address", address, "--out", str(tmp_path / "r"))
    assert result.exit_code == 2
    assert address in result.stderr
    assert not (tmp_path / "r").exists()


def test_check_tells_what_was_understood() -> None:
    """Islands, links, routes, bandwidth-delay product and the time of a dense synchronisation."""
    found = json.loads(invoke("check", "two_islands", "--json").stdout)
    assert [island["workers"] for island in found["islands"]] == [2, 2]
    (link,) = found["links"]
    assert link["bandwidth_delay_bytes"] == pytest.approx(125e6 * 0.065)
    assert found["routes"][0] == {
        "from": "dublin",
        "to": "oregon",
        "queue": "fifo",
        "delay_s": 0.065,
        "links": ["atlantic:dublin>oregon"],
    }
    assert found["dense_sync_bytes"] == 10_752
    # Of the ring's 6 phases 3 cross the Atlantic, one after the other.
    assert found["dense_sync_s"] == pytest.approx(3 * 0.065, rel=0.01)
    printed = invoke("check", "four_continents", "--model", "gpt-15m")
    assert printed.exit_code == 0
    assert max(map(len, printed.stdout.splitlines())) <= 80
    assert "15,826,944" in printed.stdout


def test_check_reads_an_experiment_file_too(tmp_path: Path) -> None:
    """A file without islands is an experiment; a mistake in either is exit code 2."""
    file = tmp_path / "e.yaml"
    file.write_text("cluster: laptop\nmethod: dense\n")
    found = json.loads(invoke("check", str(file), "--json").stdout)
    assert (found["cluster"], found["method"]) == ("laptop", "dense")
    file.write_text("cluster: laptop\nmethd: dense\n")
    assert invoke("check", str(file)).exit_code == 2


@pytest.mark.ray
def test_interrupt_leaves_results_and_no_process(tmp_path: Path) -> None:
    """Ctrl-C: exit code 130, complete results so far, every actor gone."""
    folder = tmp_path / "r"
    command = [*ISLANDS, "run", "--steps", "1000000", "--out", str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    family = psutil.Process(process.pid)
    wait_for(lambda: list(folder.glob("tables/steps/part-*.parquet")), "a first part")
    children = family.children(recursive=True)
    assert len(children) > 6
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=90)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert pq.read_table(folder / "tables" / "steps").num_rows == 4 * summary["steps"] > 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def wait_for(condition: Any, what: str, bound_s: float = 120.0) -> None:
    """Poll until the condition holds; fails after the bound."""
    end = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not appear in {bound_s:.0f} s"
        time.sleep(0.1)
