"""Signs with a scale and error feedback: the algorithm, conservation, exact bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import experiment, train
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ZOO, Lab, draws

from islands.errors import InputError
from islands.methods import SignSGD


def signsgd(**parts: Any) -> SignSGD:
    return SignSGD.model_validate({"payload_dtype": "fp64", **parts})


@pytest.mark.parametrize("feedback", [True, False])
def test_the_algorithm_is_error_feedback_signsgd(feedback: bool) -> None:
    """Against NumPy in float64: a = e + g; s = (‖a‖₁/d)·sign(a) per tensor; e = a − s; SGD."""
    parts, workers, lr, decay = (slice(0, 20), slice(20, 27), slice(27, 28)), 3, 0.1, 0.3
    method = signsgd(error_feedback=feedback)
    lab = Lab(method, ((20,), (7,), ()), workers, lr=lr, weight_decay=decay, start=1.0)
    x = np.ones(28)
    e = np.zeros((workers, 28))
    for gradient in draws(8, 10, workers, 28):
        lab.round(list(gradient))
        a = e + gradient.numpy()
        s = np.zeros_like(a)
        for part in parts:
            s[:, part] = np.abs(a[:, part]).mean(1, keepdims=True) * np.sign(a[:, part])
        e = (a - s) * feedback
        x = (1 - lr * decay) * x - lr * s.mean(0)
        np.testing.assert_allclose(lab.params.numpy(), x, rtol=0, atol=1e-12)
        for w, state in enumerate(lab.states):
            if feedback:
                np.testing.assert_allclose(state.slots["residual"], e[w], rtol=0, atol=1e-12)
            assert torch.equal(state.params, lab.params)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=5)
    | st.just(list(ZOO)),
    st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
    st.integers(0, 1000),
)
def test_sent_and_kept_are_what_was_accumulated(
    sizes: list[tuple[int, ...]], fmt: str, seed: int
) -> None:
    """Law 6: Σ sent + residual = Σ gradients, rounding of the scales included."""
    lab = Lab(signsgd(payload_dtype=fmt), sizes, lr=1.0)
    gradients = draws(seed, 5, 1, lab.layout.numel)
    for gradient in gradients:
        lab.round(list(gradient))
    kept = lab.states[0].slot("residual")
    assert torch.allclose(kept - lab.params, gradients.sum((0, 1)), rtol=0, atol=1e-12)


def test_decoder_bytes() -> None:
    """5,376 bits and seven bf16 scales; an all-gather among four sends that three times."""
    run = train(experiment(method="signsgd", steps=3))
    rows = run.rows("syncs", "payload_bytes", "value_bytes", "index_bytes", "scale_bytes")
    assert set(rows) == {(5376 // 8 + 14, 5376 // 8, 0, 14)}
    assert run.summary["wire_bytes_per_step"] == 3 * (5376 // 8 + 14)


def test_scales_have_links_of_their_own_kind() -> None:
    """The ledger splits values from scales: 686 bytes, each sent three times by four workers, for
    three steps; every one of them crosses the link or a LAN."""
    run = train(experiment(method="signsgd", steps=3))
    sums = {"values": 0, "scales": 0, "indices": 0}
    for kind, count in run.rows("transfers", "kind", "bytes"):
        if kind in sums:
            sums[kind] += count
    assert sums == {"values": 672 * 3 * 4 * 3, "scales": 14 * 3 * 4 * 3, "indices": 0}


def test_local_gradients_are_clipped() -> None:
    """``optimizer.clip`` bounds each worker's own gradient: (4, 4, 4, 4) to norm 1."""
    lab = Lab(signsgd(), ((4,),), 2, lr=1.0, clip=1.0)
    lab.round([torch.full((4,), 4.0, dtype=torch.float64)] * 2)
    assert lab.params.tolist() == pytest.approx([-0.5] * 4, rel=1e-12)


def test_a_setting_of_another_method_is_refused() -> None:
    """Signs have no k."""
    with pytest.raises(InputError, match=r"^method\.k: unknown key"):
        experiment(method={"name": "signsgd", "k": 3})


def test_it_learns() -> None:
    """150 steps on the prose bring the loss down by more than a fifth of a nat."""
    run = train(experiment(method="signsgd", steps=150, eval={"every": 150, "windows": 8}))
    first, last = run.rows("evals", "val_loss")
    assert last < first - 0.2
