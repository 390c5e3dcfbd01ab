"""Streaming DiLoCo: which settings are refused, and what a run says about its fragments."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import PLAIN, experiment
from test_streaming import SMALL, STREAMING, run_of, streaming

from islands.config import Experiment
from islands.errors import InputError
from islands.job import prepare


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"overlap": 51},
            "method.overlap: 51 is too large; it must be at most a fragment's period, "
            "sync_every 50",
        ),
        ({"overlap": -1}, "method.overlap: -1 is too small; it must be at least 0"),
        ({"alpha": 1.5}, "method.alpha: 1.5 is too large; it must be at most 1"),
        ({"alpha": -0.1}, "method.alpha: -0.1 is too small; it must be at least 0"),
        ({"fragments": 0}, "method.fragments: 0 is too small; it must be at least 1"),
        (
            {"payload_dtype": "e3m1"},
            "method.payload_dtype: 'e3m1' is not one of bf16, fp16, fp32, fp64, int8, int4, e2m1, "
            "e3m0; did you mean 'e3m0'?",
        ),
        (
            {"scale_block": 64},
            "method.scale_block: 64 has no use with payload_dtype 'bf16'; leave it out or choose "
            "int8, int4, e2m1, e3m0",
        ),
        (
            {"prune": 0.5, "payload_dtype": "e3m0"},
            "method.prune: 0.5 cannot be combined with payload_dtype 'e3m0'; use 0",
        ),
        (
            {"prune": 0.5, "error_feedback": True},
            "method.prune: 0.5 cannot be combined with error_feedback; use 0",
        ),
        ({"pattern": "striped"}, "method.pattern: 'striped' is not one of strided, sequential"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    """One line with the field, the value and what would be right."""
    with pytest.raises(InputError) as caught:
        Experiment.parse({"method": streaming(**settings)})
    assert str(caught.value).startswith(message)


def test_more_fragments_than_tensors_are_refused() -> None:
    """Before anything runs."""
    with pytest.raises(InputError, match=r"^method.fragments: 8 is too large; the model has 7 ten"):
        prepare(experiment(method=streaming(fragments=8)))


def test_a_period_that_the_fragments_do_not_divide_is_accepted_and_shown() -> None:
    """Offsets are rounded down; the run's events and summary say which they are."""
    run = run_of(
        model={"name": "gpt", "layers": 2, **SMALL}, method=streaming(sync_every=10, fragments=3)
    )
    note = "sync_every 10 is no multiple of 3 fragments: they are first sent after steps 3, 6, 10"
    assert run.summary["notes"] == [note]
    assert run.rows("events", "kind", "subject", "detail", "emulated_s") == [
        ("note", STREAMING, note, 0.0)
    ]
    firsts = {f: s for f, v, s in run.rows("syncs", "fragment", "version", "step") if v == 1}
    assert firsts == {0: 3, 1: 6, 2: 10}


def test_balancing_by_size_is_said() -> None:
    """Not where whole blocks could be dealt out."""
    run = run_of(method=streaming(sync_every=6, fragments=3))
    (note,) = run.summary["notes"]
    assert note.startswith("the model has 1 block, too few for 2 fragments")
    assert run.rows("events", "detail") == [note]
    assert run_of(method=streaming(sync_every=6, fragments=2)).summary["notes"] == []


def test_plain_settings_have_no_notes() -> None:
    """No other method has anything to say."""
    assert run_of(method="diloco", optimizer=PLAIN).summary["notes"] == []
