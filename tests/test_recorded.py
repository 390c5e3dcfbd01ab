"""Recorded trajectories: whole runs of overlapping fragments and of asynchronous arrivals.

Laws say what must hold; these say that nothing moved. Everything is float64 on a text and a
network of the tests' own, so that another machine gives the same numbers to many digits. After a
change that is meant to move them: ``pytest tests/test_recorded.py --rewrite``, and read the
difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import Run, cluster, experiment, train

DATA = Path(__file__).parent / "data"
UNEQUAL = cluster((2, 1, 1), (0.1, 0.23, 0.07), "1 Mbit/s", "40 ms")
SMALL = {"optimizer": {"name": "adamw", "lr": 0.02}, "eval": {"every": 5, "windows": 16}}
TRAJECTORIES: dict[str, dict[str, Any]] = {
    "fragments": {"method": {"name": "helpers:Fragments"}},
    "each_arrival": {"method": {"name": "helpers:EachArrival", "sync_every": 4}},
    "each_arrival_late": {"method": {"name": "helpers:EachArrivalLate", "sync_every": 4}},
}


def trajectory(run: Run) -> dict[str, Any]:
    """What is recorded: losses, evaluations, rounds with their times, bytes, final parameters."""
    rounds = ("fragment", "version", "step", "worker", "payload_bytes", "ready_s", "done_s")
    totals = ("syncs", "wire_bytes_total", "wan_bytes", "lan_bytes", "emulated_s")
    return {
        "losses": [list(row) for row in run.rows("steps", "worker", "step", "loss")],
        "evals": [list(row) for row in run.rows("evals", "step", "emulated_s", "val_loss")],
        "rounds": [list(row) for row in run.rows("syncs", *rounds)],
        "totals": {key: run.summary[key] for key in totals},
        "parameters": {n: v.flatten().tolist() for n, v in sorted(run.parameters.items())},
    }


def assert_same(found: Any, recorded: Any, where: str) -> None:
    """Structure and whole numbers exactly, other numbers to nine digits."""
    assert type(found) is type(recorded), where
    if isinstance(found, dict):
        assert found.keys() == recorded.keys(), where
        for key, value in found.items():
            assert_same(value, recorded[key], f"{where}.{key}")
    elif isinstance(found, list):
        assert len(found) == len(recorded), where
        for n, value in enumerate(found):
            assert_same(value, recorded[n], f"{where}[{n}]")
    elif isinstance(found, float):
        assert found == pytest.approx(recorded, rel=1e-9, abs=1e-12), where
    else:
        assert found == recorded, where


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_trajectory_is_the_recorded_one(name: str, rewrite: bool) -> None:
    """A run of 21 steps on three islands of unequal speed, number by number."""
    parts = TRAJECTORIES[name]
    method = {**parts["method"], "payload_dtype": "fp64"}
    model = {"name": "helpers:build_float64", "width": 3}
    run = train(experiment(model, cluster=UNEQUAL, steps=21, **SMALL, method=method))
    assert run.error is None
    path = DATA / f"{name}.json"
    found = trajectory(run)
    if rewrite:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert_same(found, json.loads(path.read_text(encoding="utf-8")), name)
