"""What the documentation shows is run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from islands.config import Cluster, Experiment

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker: str) -> str:
    """The code block after an HTML comment."""
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None, marker
    return found[1]


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's example, as written, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block("python-example"), "README.md", "exec"), {})
    assert (tmp_path / "runs" / "diloco-1" / "summary.json").exists()


def test_the_files_are_valid(tmp_path: Path) -> None:
    """The README's YAML blocks are a cluster file and an experiment file."""
    files = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    for text in files:
        name = "experiment" if "\nmethod:" in text else "cluster"
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    assert len(files) == 2
    assert Cluster.load(tmp_path / "cluster.yaml").workers == 10
    experiment = Experiment.load(tmp_path / "experiment.yaml")
    assert experiment.cluster.workers == 4
    assert experiment.resolved().optimizer.lr == 3e-3


def test_the_faults_are_valid(tmp_path: Path) -> None:
    """The README's faults, policy and all, in a file."""
    (tmp_path / "faults.yaml").write_text(block("faults-example"), encoding="utf-8")
    experiment = Experiment.load(tmp_path / "faults.yaml")
    assert len(experiment.faults) == 4
    assert experiment.policy.quorum == 3


def test_both_commands_are_one_line() -> None:
    """One line installs and runs the main job, one installs and runs the tests."""
    assert block("run-command").count("\n") == block("test-command").count("\n") == 1


def output_of(example: str, *options: str) -> tuple[str, str]:
    """What an example script prints, and what is committed as its output."""
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout, (ROOT / "examples" / "expected" / f"{example}.txt").read_text()


@pytest.mark.parametrize("example", ["quickstart", "stragglers", "dropped_syncs", "elastic"])
def test_examples_print_what_is_committed(example: str) -> None:
    """Each example script's output is the committed one."""
    printed, expected = output_of(example)
    assert printed == expected


def test_the_streaming_study_prints_what_is_committed(tmp_path: Path) -> None:
    """A tenth of its steps; a loss may differ in its last digit on another kind of processor."""
    figure = tmp_path / "streaming.png"
    printed, expected = output_of(
        "streaming_study", "--steps", "40", "--in-process", "--figure", str(figure)
    )
    number = re.compile(r"(?<=\s)\d\.\d\d(?=\s)")  # a loss
    losses = [[float(loss) for loss in number.findall(text)] for text in (printed, expected)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert number.sub("", printed) == number.sub("", expected)
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("method", "model"),
    [("examples.my_method:HalfWay", "decoder"), ("dense", "examples.my_model:build")],
)
def test_user_code_in_the_examples_trains(
    method: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example method and the example model run as the README says."""
    import islands

    monkeypatch.syspath_prepend(str(ROOT))
    experiment = Experiment(method=method, model=model, steps=3, eval={"windows": 4})
    result = islands.run(experiment, in_process=True, out=tmp_path / "run")
    assert result.summary["status"] == "done"


def test_links_in_the_readme_lead_somewhere() -> None:
    """Every relative link is a file or folder of the repository."""
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []
