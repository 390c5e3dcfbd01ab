"""Runs that end early, are slow, or run into a user's mistakes: nothing hangs, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_identical, experiment, train

import islands
from islands import engine
from islands.errors import InputError
from islands.experiment import run_in_process
from islands.job import prepare
from islands.results import read_table
from islands.results.display import Progress


@pytest.mark.parametrize("method", ["helpers:Fragments", "diloco", "dense"])
def test_how_a_run_is_cut_into_plans_changes_nothing(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step per plan, a hand-over each turn, answers shuffled: tables and trace are the same."""
    run = experiment(method={"name": method}, steps=21)
    whole = train(run)
    monkeypatch.setattr(engine, "PLAN_S", 0.0)
    monkeypatch.setattr(engine, "FIRST_STEPS", 1)
    monkeypatch.setattr(engine, "BATCH_S", 0.0)
    assert_identical(whole, train(run, shuffle=5))


def test_progress_and_parts_do_not_wait_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of few operations shows its steps, and has readable rows, long before its end."""
    monkeypatch.setattr(engine, "BATCH_S", 0.0)
    monkeypatch.setattr("islands.results.recorder.FLUSH_EVERY_S", 0.0)
    seen: list[int] = []

    def show(progress: Progress) -> None:
        seen.append(progress.step)
        if read_table(tmp_path, "steps").num_rows >= 8:
            raise KeyboardInterrupt

    job = prepare(experiment(method="dense", steps=1000))
    with pytest.raises(KeyboardInterrupt):
        run_in_process(job, tmp_path, show)
    assert len(seen) < 50
    assert seen[-1] > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_with_its_results(
    number: int, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT and SIGTERM end a run between two turns; everything so far is written."""
    monkeypatch.setenv("ISLANDS_TEST_SIGNAL", str(int(number)))
    end = KeyboardInterrupt if code is None else SystemExit
    with pytest.raises(end) as info:
        islands.run(
            experiment(method={"name": "helpers:Signalled"}, steps=40),
            out=tmp_path / "r",
            in_process=True,
        )
    assert getattr(info.value, "code", None) == code
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["steps"] < 40
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert os.environ["ISLANDS_TEST_SIGNAL"] == str(int(number))


@pytest.mark.parametrize("place", ["begin_shared", "combine", "no_update"])
def test_a_method_that_fails_on_the_coordinator_is_one_message(place: str, tmp_path: Path) -> None:
    """The method's name and the cause; tables and summary are written."""
    run = experiment(method={"name": "helpers:Broken", "place": place}, steps=10)
    with pytest.raises(islands.RunError, match=r"helpers:Broken failed on the coordinator"):
        islands.run(run, out=tmp_path / "r", in_process=True)
    assert islands.Result.load(tmp_path / "r").summary["status"] == "failed"


def test_a_network_that_is_gone_does_not_take_the_results_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be timed any more is an event; tables and summary are written all the same."""

    def gone(self: engine.Engine) -> None:
        raise ConnectionError("the link actor died")

    monkeypatch.setattr(engine.Engine, "settle", gone)
    run = train(experiment(method={"name": "helpers:Failing"}, steps=20))
    assert run.summary["status"] == "failed"
    detail = "ConnectionError: the link actor died"
    assert ("untimed", "network", detail) in run.rows("events", "kind", "subject", "detail")


@pytest.mark.parametrize("place", ["begin", "send", "receive", "no_payload"])
def test_a_method_that_fails_on_a_worker_names_what_it_did(place: str, tmp_path: Path) -> None:
    """Worker, island and phase."""
    run = experiment(method={"name": "helpers:Broken", "place": place}, steps=10)
    with pytest.raises(islands.RunError, match=r"worker 0 \(\w+\)"):
        islands.run(run, out=tmp_path / "r", in_process=True)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ({"name": "helpers:Broken", "place": "streams"}, "no valid streams"),
        ({"name": "helpers:Impatient"}, "timed = True"),
    ],
)
def test_a_method_that_cannot_run_is_refused(method: dict[str, Any], part: str) -> None:
    """Wrong streams, or rounds that close early without the clock, are found before the run."""
    with pytest.raises(InputError, match=part):
        train(experiment(method=method))


def test_what_would_not_fit_into_memory_is_refused() -> None:
    """Steps and batches beyond any memory are a message, not a MemoryError."""
    with pytest.raises(InputError, match="steps"):
        train(experiment(steps=10**12))
    with pytest.raises(InputError, match=r"data\.batch"):
        train(experiment(data={"batch": 10**12}))


def test_a_refused_run_leaves_the_old_one(tmp_path: Path) -> None:
    """`overwrite` clears the folder only when the new run begins."""
    run = experiment(method="dense", steps=3)
    islands.run(run, out=tmp_path / "r", in_process=True)
    before = (tmp_path / "r" / "summary.json").read_text()
    with pytest.raises(InputError):
        islands.run(
            experiment(data={"name": "no/such.txt"}),
            out=tmp_path / "r",
            overwrite=True,
            in_process=True,
        )
    assert (tmp_path / "r" / "summary.json").read_text() == before


@pytest.mark.parametrize(
    "arguments",
    [{"transfers": "all"}, {"in_process": True, "address": "here:1"}, {"experiment": {"steps": 3}}],
)
def test_misuse_from_python_is_an_input_error(arguments: dict[str, Any]) -> None:
    """What the command line cannot express is refused in Python too."""
    with pytest.raises(InputError):
        islands.run(**arguments)


def test_one_bad_gradient_is_not_kept_for_ever() -> None:
    """A NaN gradient is not stepped with: no payload is refused, and the shared model is finite."""
    run = train(experiment(method={"name": "helpers:NaNGradient"}, steps=8))
    assert run.summary["rejected_payloads"] == 0
    assert all(torch.isfinite(value).all() for value in run.parameters.values())
