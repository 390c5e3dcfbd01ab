"""What a run says about its method, and what it refuses: nothing is lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import experiment, train
from torch import Tensor, nn

import islands
from islands.compression import BlockCode
from islands.errors import InputError
from islands.job import prepare
from islands.retime import retime


class Vectors(nn.Module):
    """An embedding of logits and a vector: no matrix between them."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, vocab_size)
        self.scale = nn.Parameter(torch.ones(vocab_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, window) -> (batch, window, vocab_size)."""
        logits: Tensor = self.embedding(tokens) * self.scale
        return logits


def build_vectors(vocab_size: int = 64) -> nn.Module:
    return Vectors(vocab_size)


@pytest.mark.parametrize("method", ["delayed", "eager_diloco", "co2"])
@pytest.mark.parametrize(("steps", "lost"), [(12, None), (14, 2), (3, None)])
def test_a_run_that_ends_between_boundaries_says_so(
    method: str, steps: int, lost: int | None
) -> None:
    """With a whole period of overlap what lands at the end overwrites what was not sent."""
    job = prepare(experiment(method={"name": method, "sync_every": 4}, steps=steps))
    if lost is None:
        assert job.notes == ()
    else:
        assert f"up to {lost} local steps" in job.notes[0]


def test_muon_without_matrices_says_so() -> None:
    """Then everything is AdamW's."""
    one = experiment(
        model="test_overlap_notes:build_vectors", optimizer={"name": "muon", "lr": 0.01}
    )
    hidden = prepare(one).notes
    two = experiment(optimizer={"name": "muon", "lr": 0.01})
    assert prepare(two).notes == ()
    assert [note for note in hidden if "muon is adamw" in note]


@pytest.mark.parametrize(
    "method",
    [
        {"name": "delayed", "sync_every": 4},
        {"name": "co2", "sync_every": 4},
        {"name": "streaming_diloco", "sync_every": 4, "overlap": 4},
    ],
)
def test_an_anchor_that_nobody_reads_is_refused(method: dict[str, Any]) -> None:
    """A phase is measured from where it began, whatever was received."""
    drop = {"kind": "drop", "probability": 0.5, "anchor": "last_received"}
    with pytest.raises(InputError, match=r"faults\.0\.anchor: .* whole period of overlap"):
        experiment(method=method, faults=[drop])


@pytest.mark.parametrize("mean", ["median", "trimmed_mean"])
def test_a_run_with_a_robust_mean_is_given_its_own_times(mean: str, tmp_path: Path) -> None:
    """Every value is gathered then, also when the run is timed again."""
    trim = {"trim": 0.25} if mean == "trimmed_mean" else {}
    one = experiment(method={"name": "diloco", "sync_every": 4}, policy={"mean": mean, **trim})
    run = islands.run(one, in_process=True, out=tmp_path / "run", quiet=True)
    (row,) = retime([tmp_path / "run"]).rows
    assert row["emulated_s"] == run.summary["emulated_s"]


def test_a_scale_below_the_normal_numbers_keeps_the_signs() -> None:
    """fp32 rounds such a scale by up to a half of it."""
    values = torch.tensor([2e-45, -1e-45, 0.0], dtype=torch.float64)
    code = BlockCode((3,), "int8")
    payload = code.write(values)
    codes = payload.values.view(np.int8)
    assert codes[0] > 0 > codes[1]
    assert codes[2] == 0


def test_runs_under_plain_names_have_no_notes() -> None:
    """Nothing to say about the default."""
    assert train(experiment()).summary["notes"] == []
