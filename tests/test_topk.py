"""Top-k with error feedback: identities, conservation, settings, exact bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import experiment, train
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ZOO, Lab, draws

from islands.compression import decode
from islands.errors import InputError
from islands.methods import TopK


def topk(**parts: Any) -> TopK:
    return TopK.model_validate({"payload_dtype": "fp64", **parts})


# --- law 4


def test_sending_everything_is_plain_sgd() -> None:
    """k = all with factor masking: the momentum is forgotten at once, and the step is −lr·mean."""
    lab, gradients = Lab(topk(ratio=1), ((5,), (3, 4)), 3, lr=0.1), draws(0, 6, 3, 17)
    expected = torch.zeros(17, dtype=torch.float64)
    for gradient in gradients:
        lab.round(list(gradient))
        expected -= 0.1 * gradient.mean(0)
        assert torch.allclose(lab.params, expected, rtol=1e-13, atol=1e-15)


def test_sending_everything_without_masking_is_heavy_ball() -> None:
    """Law 4: u ← 0.9·u + mean gradient; x ← x − lr·u, with the rate of each step."""
    lab = Lab(topk(ratio=1, factor_masking=False), ((17,),), 3)
    x = u = torch.zeros(17, dtype=torch.float64)
    for n, gradient in enumerate(draws(1, 6, 3, 17)):
        lab.lr = 0.1 / (n + 1)
        lab.round(list(gradient))
        u = 0.9 * u + gradient.mean(0)
        x = x - lab.lr * u
        assert torch.allclose(lab.params, x, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("optimizer", [{"clip": None}, {"clip": None, "weight_decay": 0.2}])
def test_a_whole_run_of_everything_is_dense_sgd(optimizer: dict[str, Any]) -> None:
    """One worker, fp64: the run equals dense data parallelism with plain SGD. The decay is as
    decoupled as SGD's own, which has no momentum to hide it in."""
    common = {"name": "sgd", "lr": 0.3, "weight_decay": 0.0, **optimizer}
    runs = [
        train(experiment("helpers:build_float64", method=method, optimizer=common))
        for method in (
            {"name": "dense", "payload_dtype": "fp64"},
            {"name": "topk", "payload_dtype": "fp64", "ratio": 1},
        )
    ]
    for name, value in runs[0].parameters.items():
        assert torch.allclose(runs[1].parameters[name], value, rtol=1e-10, atol=1e-13), name


# --- the algorithm


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("feedback", [True, False])
def test_the_algorithm_is_deep_gradient_compression(
    momentum: float, masking: bool, feedback: bool
) -> None:
    """Against NumPy in float64: u ← mu+g, v ← v+u, the largest of v leave v (and u), plain SGD."""
    sizes, ratio, workers, lr, decay = (40, 12, 1), 4, 3, 0.2, 0.5
    method = topk(ratio=ratio, momentum=momentum, factor_masking=masking, error_feedback=feedback)
    lab = Lab(method, [(n,) for n in sizes], workers, lr=lr, weight_decay=decay, start=1.0)
    x = np.ones(sum(sizes))
    u, v = np.zeros((2, workers, len(x)))
    for gradient in draws(2, 12, workers, len(x)):
        lab.round(list(gradient))
        total = np.zeros_like(x)
        for w in range(workers):
            u[w] = momentum * u[w] + gradient[w].numpy()
            v[w] = v[w] + u[w]
            mask, start = np.zeros(len(x), bool), 0
            for n in sizes:
                k = max(1, n // ratio)
                mask[start + np.argsort(-np.abs(v[w, start : start + n]))[:k]] = True
                start += n
            total += v[w] * mask
            v[w] = np.where(mask, 0, v[w]) * feedback
            u[w] = np.where(mask & masking, 0, u[w])
        x = x * (1 - lr * decay) - lr * total / workers
        np.testing.assert_allclose(lab.params.numpy(), x, rtol=1e-12, atol=1e-13)
        for w, state in enumerate(lab.states):
            if feedback:
                np.testing.assert_allclose(state.slots["residual"], v[w], rtol=1e-12, atol=1e-15)
            np.testing.assert_allclose(state.slots["momentum"], u[w], rtol=1e-12, atol=1e-15)
            assert torch.equal(state.params, lab.params)


# --- law 6


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=5)
    | st.just(list(ZOO)),
    st.sampled_from([1, 1.5, 3, 16, 1000]),
    st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_sent_and_kept_are_what_was_accumulated(
    sizes: list[tuple[int, ...]], ratio: float, fmt: str, vectors: bool, seed: int
) -> None:
    """Law 6: over many rounds, Σ sent + residual = Σ accumulated, rounding to the format included,
    to the accuracy of the float64 sums; and no payload is larger than dense."""
    method = topk(ratio=ratio, payload_dtype=fmt, momentum=0.0, dense_vectors=vectors)
    lab = Lab(method, sizes)
    size = lab.layout.numel
    gradients = draws(seed, 5, 1, size)
    sent = torch.zeros(size, dtype=torch.float64)
    for gradient in gradients:
        before = lab.params.clone()
        (payload,) = lab.round(list(gradient))
        assert payload.nbytes <= size * {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[fmt]
        sent += (before - lab.params) / lab.lr
    kept = lab.states[0].slot("residual")
    assert torch.allclose(sent + kept, gradients.sum((0, 1)), rtol=0, atol=1e-12)


def test_what_rounding_took_is_sent_later() -> None:
    """1 + 2⁻¹⁰ is 1 in bf16: the rest stays behind, where zeroing would lose it for ever."""
    lab = Lab(topk(ratio=1, payload_dtype="bf16", momentum=0.0), ((1,),))
    lab.round([torch.tensor([1 + 2.0**-10], dtype=torch.float64)])
    assert lab.states[0].slot("residual").tolist() == [2.0**-10]
    (payload,) = lab.round([torch.zeros(1, dtype=torch.float64)])
    assert decode(payload.values, "bf16").tolist() == [2.0**-10]


# --- settings


def test_vectors_may_go_dense() -> None:
    """A vector and a scalar in full, without residual; of the matrix one in 16."""
    lab = Lab(topk(dense_vectors=True), ((32,), (), (4, 8)))
    (payload,) = lab.round([draws(3, 1, 1, 65)[0, 0]])
    assert tuple(payload.size) == (8 * (32 + 1 + 2), 2 * 2, 0)
    assert not lab.states[0].slot("residual")[:33].any()


@pytest.mark.parametrize("ratio", range(1, 200))
def test_one_in_ratio_is_meant_in_decimals(ratio: int) -> None:
    """Of 2·ratio values two are sent, whatever 1/ratio is in binary."""
    lab = Lab(topk(ratio=ratio), ((2 * ratio,),))
    (payload,) = lab.send([draws(3, 1, 1, 2 * ratio)[0, 0]])
    assert payload.size.values == 8 * (2 if ratio > 1 else 2 * ratio)


def test_the_density_falls_geometrically() -> None:
    """25 %, then a constant factor per step down to 1/ratio; without warm-up at once."""
    method = topk(ratio=64, density_warmup=4)
    expected = [1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 64]
    assert [method.density(step) for step in range(1, 7)] == pytest.approx(expected)
    assert topk(ratio=64).density(1) == 1 / 64
    assert topk(ratio=2, density_warmup=4).density(1) == 1 / 2
    lab, sizes = Lab(method, ((1024,),), 2), []
    for gradient in draws(4, 6, 2, 1024):
        payloads = lab.round(list(gradient))
        sizes.append(payloads[0].nbytes)
    assert sizes == [(8 + 2) * int(1024 * density) for density in expected]


@pytest.mark.parametrize(
    ("parts", "clip", "bound"), [({"clip_norm": 1.0}, 7.0, 0.5), ({}, 0.25, 0.25), ({}, None, 5.0)]
)
def test_each_worker_clips_its_own_gradient(
    parts: dict[str, float], clip: float | None, bound: float
) -> None:
    """θ·p^(−1/2) for DGC's rule with four workers, else ``optimizer.clip`` as it is; (3, 4) has
    norm 5."""
    lab = Lab(topk(ratio=1, momentum=0.0, **parts), ((2,),), 4, lr=1.0, clip=clip)
    lab.round([torch.tensor([3.0, 4.0], dtype=torch.float64)] * 4)
    assert lab.params.tolist() == pytest.approx([-0.6 * bound, -0.8 * bound], rel=1e-12)


@pytest.mark.parametrize(
    ("key", "value"),
    [("ratio", 0), ("ratio", "nan"), ("momentum", 1), ("clip_norm", 0), ("density_warmup", -1)],
)
def test_impossible_settings_are_refused_by_name(key: str, value: Any) -> None:
    """One line that names the field."""
    with pytest.raises(InputError, match=rf"^method\.{key}: ") as refused:
        experiment(method={"name": "topk", key: value})
    assert "\n" not in str(refused.value)


def test_a_setting_of_another_method_is_refused() -> None:
    """With the nearest of its own."""
    with pytest.raises(InputError, match=r"method\.ratios: unknown key.*ratio"):
        experiment(method={"name": "topk", "ratios": 3})


# --- runs


def test_decoder_bytes() -> None:
    """One in 16 of 5,376 values at 2 bytes, with positions of 2; an all-gather among four."""
    run = train(experiment(method="topk", steps=3))
    rows = run.rows("syncs", "payload_bytes", "value_bytes", "index_bytes", "scale_bytes")
    assert set(rows) == {(1344, 672, 672, 0)}
    assert run.summary["wire_bytes_per_step"] == 4032


def test_its_own_rate_and_decay_are_the_defaults() -> None:
    """A plain SGD step wants another rate than Adam's; both can be set."""
    optimizer = experiment(method="topk").resolved().optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1.0, 0.0)
    given_ = {"lr": 0.5, "weight_decay": 0.1}
    optimizer = experiment(method="topk", optimizer=given_).resolved().optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (0.5, 0.1)


def test_it_learns() -> None:
    """150 steps on the prose bring the loss down by more than a fifth of a nat."""
    run = train(experiment(method="topk", steps=150, eval={"every": 150, "windows": 8}))
    first, last = run.rows("evals", "val_loss")
    assert last < first - 0.2
