"""`islands bench --fragments`: both methods do as many rounds, and no time is asserted."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from islands.bench_fragments import METHODS, SETTINGS, FragmentsBench, bench_fragments
from islands.cli import app
from islands.config import load_experiment
from islands.errors import InputError
from islands.layout import Layout
from islands.models import build_model

SMALL = ("steps=80", "data.window=8")


def test_both_methods_have_as_many_rounds() -> None:
    """And the fragments together are the whole model."""
    rounds, values = [], []
    for method in METHODS:
        one = load_experiment(None, SETTINGS, {"method": method})
        layout = Layout.of(build_model(one.model.name, one.model.settings))
        streams = one.method.streams(layout)
        rounds.append(sum(len(range(s.first, one.steps + 1, s.period)) for s in streams))
        values.append(sorted(name for stream in streams for name in stream.tensors))
    assert rounds[0] == rounds[1] > 10
    assert values[0] == values[1]


def test_everything_is_measured_as_often_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """After one round that warms up; the ratio is that of the medians."""
    said: list[str] = []
    found = bench_fragments(repeats=2, overrides=SMALL, in_process=True, say=said.append)
    assert len(found.streaming_s) == len(found.diloco_s) == 2
    assert min(*found.streaming_s, *found.diloco_s) > 0
    assert len(said) == 3
    json.dumps(found.as_dict())
    FragmentsBench([0.03, 0.01, 0.02], [0.04, 0.05, 0.01], ()).print()
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].split() == ["ratio", "0.500"]
    assert max(map(len, printed)) <= 80


def test_wrong_options_are_refused() -> None:
    """One line, and exit code 2."""
    with pytest.raises(InputError, match="repeats: 0"):
        bench_fragments(repeats=0, say=print)
    for options in (["--steps", "5"], ["--network"]):
        result = CliRunner().invoke(app, ["bench", "--fragments", *options])
        assert result.exit_code == 2
        assert "does not read" in result.stderr
