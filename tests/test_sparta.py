"""A random sliver of the parameters is averaged each step: which one, how precisely, and what the
shared model is when the replicas differ."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import INSTANT, EachArrival, assert_identical, cluster, experiment, train
from lab import Lab, draws

from islands.compression import decode
from islands.errors import InputError
from islands.methods import Sparta


def sparta(**parts: Any) -> Sparta:
    return Sparta.model_validate({"payload_dtype": "fp64", **parts})


def test_the_algorithm_is_sgd_and_a_mean_of_a_few_coordinates() -> None:
    """Against NumPy in float64. Which coordinates were averaged shows in where workers agree."""
    workers, size, count = 3, 40, 4
    lab = Lab(sparta(fraction=0.1), ((size,),), workers, lr=0.1)
    x = np.zeros((workers, size))
    seen: set[int] = set()
    for gradient in draws(9, 20, workers, size):
        lab.round(list(gradient))
        x -= 0.1 * gradient.numpy()
        now = torch.stack([state.params for state in lab.states]).numpy()
        agreed = np.flatnonzero((now == now[0]).all(0))
        assert len(agreed) == count
        x[:, agreed] = x[:, agreed].mean(0)
        np.testing.assert_allclose(now, x, rtol=0, atol=1e-13)
        seen |= set(agreed.tolist())
    assert len(seen) > 25  # 80 draws of 40 leave about five untouched


def test_averaging_everything_is_local_sgd_every_step() -> None:
    """fraction 1: after each step everyone has the mean."""
    lab = Lab(sparta(fraction=1.0), ((7,),), 2, lr=0.1)
    gradients = draws(10, 5, 2, 7)
    for gradient in gradients:
        lab.round(list(gradient))
    expected = -0.1 * gradients.mean(1).sum(0)
    for state in lab.states:
        assert torch.allclose(state.params, expected, rtol=0, atol=1e-14)


def test_a_coarse_wire_rounds_steps_and_not_parameters() -> None:
    """bf16 steps by 2⁻⁷ around 1.5. Averaging steps of 2⁻¹³ away from there loses nothing, since
    they are exact themselves."""
    lab = Lab(sparta(fraction=1.0, payload_dtype="bf16"), ((3,),), 2, lr=1.0, start=1.5)
    for n in range(1, 4):
        payloads = lab.round([torch.full((3,), 2.0**-13, dtype=torch.float64)] * 2)
        assert decode(payloads[0].values, "bf16").tolist() == [-(2.0**-13)] * 3
        assert lab.params.tolist() == [1.5 - n * 2.0**-13] * 3


def test_seeds_and_steps_draw_other_coordinates_and_workers_the_same() -> None:
    """The mask needs no bytes: it is a function of seed and step."""
    method = {"name": "sparta", "fraction": 0.01, "payload_dtype": "fp32"}
    runs = [train(experiment(method=method, seed=seed, steps=2)) for seed in (0, 0, 1)]
    digests = [run.summary["parameters_sha256"] for run in runs]
    assert digests[0] == digests[1] != digests[2]


def test_the_shared_model_is_the_mean_of_the_replicas() -> None:
    """In the saved model, its digest and its evaluations; the replicas themselves differ."""
    run = train(experiment("helpers:build_float64", method="sparta", steps=9))
    stacked = torch.stack([replica.state.params for replica in run.replicas])
    assert len({tuple(row) for row in stacked.tolist()}) == 4
    layout = run.replicas[0].context.layout
    digest = hashlib.sha256()
    for tensor in sorted(layout.tensors, key=lambda t: t.name):
        mean = stacked[:, tensor.slice].mean(0)
        assert torch.allclose(run.parameters[tensor.name].flatten(), mean, rtol=1e-14, atol=1e-16)
        digest.update(run.parameters[tensor.name].float().numpy().tobytes())
    assert run.summary["parameters_sha256"] == digest.hexdigest()


class ClockedMeans(EachArrival):
    """Rounds by the clock, and replicas that hold the shared model."""

    shared_in: ClassVar[Any] = "diverged"


def test_the_mean_is_taken_in_clocked_runs_too() -> None:
    """There the clock may pass an evaluation before the host has every replica's parameters."""
    method = {"name": "test_sparta:ClockedMeans", "sync_every": 4}
    runs = [train(experiment("helpers:build_float64", method=method), shuffle=n) for n in (None, 1)]
    for run in runs:
        assert run.error is None
        mean = torch.stack([replica.state.params for replica in run.replicas]).mean(0)
        found = [run.parameters[t.name].flatten() for t in run.replicas[0].context.layout.tensors]
        assert torch.allclose(torch.cat(found), mean, rtol=1e-12, atol=1e-15)
    assert_identical(*runs)


def test_running_statistics_of_differing_replicas_are_merged() -> None:
    """Floats averaged over the replicas, integers from the first: as for any payload."""
    run = train(experiment("helpers:build_batchnorm", method="sparta", steps=5))
    assert run.error is None
    assert run.parameters["norm.num_batches_tracked"].item() == 5


def test_a_sparta_of_one_worker_is_plain_training() -> None:
    """Nobody to average with: the inner optimizer's own course."""
    one = cluster((1,), (0.1,), **INSTANT)
    common: dict[str, Any] = {"cluster": one, "optimizer": {"name": "sgd", "lr": 0.5}}
    runs = [
        train(experiment("helpers:build_float64", method=method, **common))
        for method in (
            {"name": "sparta", "payload_dtype": "fp64"},
            {"name": "dense", "payload_dtype": "fp64"},
        )
    ]
    for name, value in runs[1].parameters.items():
        assert torch.allclose(runs[0].parameters[name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("fraction", [0, 1.5, "nan"])
def test_impossible_fractions_are_refused_by_name(fraction: Any) -> None:
    """One line that names the field."""
    with pytest.raises(InputError, match=r"^method\.fraction: "):
        experiment(method={"name": "sparta", "fraction": fraction})


def test_decoder_bytes() -> None:
    """27 of 5,376 values at 2 bytes, no positions; a ring of four sends 6 × 54 in total."""
    run = train(experiment(method="sparta", steps=3))
    rows = run.rows("syncs", "payload_bytes", "value_bytes", "index_bytes", "scale_bytes")
    assert set(rows) == {(54, 54, 0, 0)}
    assert run.summary["wire_bytes_per_step"] == 6 * 54 / 4
