"""DeMo: the published optimizer step by step, merge rules, conservation, exact bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cluster, experiment, train
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ZOO, Lab, draws
from torch import Tensor

from islands.compression import decode
from islands.errors import InputError
from islands.methods import DeMo


def demo(**parts: Any) -> DeMo:
    return DeMo.model_validate({"payload_dtype": "fp64", **parts})


def cosines(size: int, dtype: torch.dtype) -> Tensor:
    """cos(π f (2j + 1) / 2n) with rows scaled to norm one."""
    table = [
        [math.cos(math.pi * f * (2 * j + 1) / (2 * size)) for j in range(size)] for f in range(size)
    ]
    rows = torch.tensor(table, dtype=torch.float64)
    return (rows / rows.norm(dim=1, keepdim=True)).to(dtype)


# --- the published optimizer


class Published:
    """What the authors' optimizer does to one tensor, in float32 torch.

    Per dimension the largest divisor up to the chunk, separable cosines on tiles (one dimension for
    vectors), k per tile, a momentum that accumulates lr·g, and a mean over those that sent.
    """

    def __init__(self, shape: tuple[int, ...], workers: int, k: int, lr: float) -> None:
        self.sides = [max(d for d in range(1, 65) if n % d == 0) for n in shape]
        self.shape, self.k, self.lr = shape, k, lr
        self.delta = [torch.zeros(shape) for _ in range(workers)]
        self.param = torch.zeros(shape)

    def tiles(self, x: Tensor) -> Tensor:
        """(tiles, h·w) coefficients; h is 1 for vectors."""
        if x.dim() == 1:
            return x.view(-1, self.sides[0]) @ cosines(self.sides[0], x.dtype).T
        h, w = self.sides
        grid = x.view(x.shape[0] // h, h, x.shape[1] // w, w).transpose(1, 2)
        return (cosines(h, x.dtype) @ grid @ cosines(w, x.dtype).T).reshape(-1, h * w)

    def untiled(self, c: Tensor) -> Tensor:
        """Coefficients back to the tensor."""
        if len(self.shape) == 1:
            return (c @ cosines(self.sides[0], c.dtype)).reshape(self.shape)
        h, w = self.sides
        grid = c.view(self.shape[0] // h, self.shape[1] // w, h, w)
        back = cosines(h, c.dtype).T @ grid @ cosines(w, c.dtype)
        return back.transpose(1, 2).reshape(self.shape)

    def step(self, gradients: list[Tensor]) -> Tensor:
        """One update of everyone; returns what the sign is taken of."""
        indices, values = [], []
        for delta, gradient in zip(self.delta, gradients, strict=True):
            delta.mul_(0.999).add_(gradient, alpha=self.lr)
            c = self.tiles(delta)
            index = c.abs().topk(min(self.k, c.shape[1]), dim=1).indices
            value = c.gather(1, index)
            delta -= self.untiled(torch.zeros_like(c).scatter(1, index, value))
            indices.append(index)
            values.append(value)
        merged = torch.zeros_like(c).scatter_reduce(
            1, torch.cat(indices, 1), torch.cat(values, 1), "mean", include_self=False
        )
        direction = self.untiled(merged)
        self.param -= self.lr * direction.sign()
        return direction


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("k", [1, 4, 32])
def test_tiles_and_senders_are_the_published_optimizer(workers: int, k: int) -> None:
    """fp32, constant learning rate, tensor by tensor over several steps: the same direction, and
    the same sign wherever the direction is above 1e-5 of the tensor's largest. Below that, two
    float32 sums of another order may differ in sign."""
    shapes = ((128, 192), (65, 4), (48,), (130,), (13, 7), (1, 64), (97, 6))
    method = DeMo(k=k, transform="tiles", merge="senders", payload_dtype="fp32")
    lab = Lab(method, shapes, workers, lr=0.01, dtype=torch.float32)
    published = [Published(shape, workers, k, 0.01) for shape in shapes]
    for gradient in draws(5, 6, workers, lab.layout.numel).float():
        before = lab.params.clone()
        lab.round(list(gradient))
        assert lab.update is not None
        ours = decode(lab.update.values, lab.update.fmt)
        for tensor, reference in zip(lab.layout.tensors, published, strict=True):
            parts = [g[tensor.slice].view(tensor.shape) for g in gradient]
            theirs = reference.step(parts).flatten()
            scale = theirs.abs().max()
            assert (0.01 * ours[tensor.slice] - theirs).abs().max() <= 1e-5 * scale
            clear = theirs.abs() > 1e-5 * scale
            moved = (before - lab.params)[tensor.slice] / 0.01
            assert torch.allclose(moved[clear], theirs.sign()[clear], atol=1e-4)
            assert clear.float().mean() > 0.8  # a lone cosine is zero somewhere


# --- the algorithm


@pytest.mark.parametrize("merge", ["workers", "senders"])
@pytest.mark.parametrize("apply", ["sign", "identity"])
@pytest.mark.parametrize("alpha", [1.0, 0.2])
def test_the_algorithm_is_decoupled_momentum(merge: str, apply: str, alpha: float) -> None:
    """Against NumPy in float64, flat chunks of 8 with a shorter last one, three workers."""
    sizes, k, workers, lr, decay = (20, 7), 2, 3, 0.1, 0.3
    method = demo(chunk=8, k=k, merge=merge, apply=apply, alpha=alpha, decay=0.9)
    lab = Lab(method, [(n,) for n in sizes], workers, lr=lr, weight_decay=decay, start=1.0)
    chunks = [(0, 8), (8, 16), (16, 20), (20, 27)]
    x = np.ones(27)
    m = np.zeros((workers, 27))
    for gradient in draws(6, 10, workers, 27):
        lab.round(list(gradient))
        m = 0.9 * m + gradient.numpy()
        direction = np.zeros(27)
        for start, stop in chunks:
            table = cosines(stop - start, torch.float64).numpy()
            total, senders = np.zeros((2, stop - start))
            for w in range(workers):
                c = table @ m[w, start:stop]
                best = np.argsort(-np.abs(c))[:k]
                q = np.zeros_like(c)
                q[best] = c[best]
                m[w, start:stop] -= alpha * table.T @ q
                total += q
                senders[best] += 1
            count = np.maximum(senders, 1) if merge == "senders" else workers
            direction[start:stop] = table.T @ (total / count)
        step = np.sign(direction) if apply == "sign" else direction
        x = (1 - lr * decay) * x - lr * step
        np.testing.assert_allclose(lab.params.numpy(), x, rtol=0, atol=1e-12)
        for w, state in enumerate(lab.states):
            np.testing.assert_allclose(state.slots["momentum"], m[w], rtol=0, atol=1e-12)
            assert torch.equal(state.params, lab.params)


@pytest.mark.parametrize(("merge", "divisor"), [("workers", 4), ("senders", 1)])
def test_a_coefficient_of_one_worker_is_divided_by_all_or_by_its_senders(
    merge: str, divisor: int
) -> None:
    """Four workers send one coefficient each of a chunk of 4, and each another one: worker w's is
    w + 1, so the merged coefficients are (1, 2, 3, 4) over the divisor."""
    lab = Lab(demo(chunk=4, k=1, merge=merge, apply="identity"), ((4,),), 4, lr=1.0)
    table = cosines(4, torch.float64)
    lab.round([(w + 1) * table[w] for w in range(4)])
    expected = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64) / divisor
    assert torch.allclose(table @ -lab.params, expected, atol=1e-14)


# --- law 6


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=5)
    | st.just(list(ZOO)),
    st.integers(1, 70),
    st.integers(1, 9),
    st.sampled_from(["flat", "tiles"]),
    st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
    st.integers(0, 1000),
)
def test_sent_and_kept_are_what_was_accumulated(
    sizes: list[tuple[int, ...]], chunk: int, k: int, transform: str, fmt: str, seed: int
) -> None:
    """Law 6: without decay, Σ sent + momentum = Σ gradients, rounding to the format included; and
    no payload is larger than dense."""
    method = demo(
        chunk=chunk, k=k, transform=transform, payload_dtype=fmt, decay=1.0, apply="identity"
    )
    lab = Lab(method, sizes, lr=1.0)
    size = lab.layout.numel
    gradients = draws(seed, 5, 1, size)
    for gradient in gradients:
        (payload,) = lab.round(list(gradient))
        assert payload.nbytes <= size * {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[fmt]
    kept = lab.states[0].slot("momentum")
    # What was sent is decoded in float32, and transformed in it, unless the format is fp64.
    accuracy = 1e-12 if fmt == "fp64" else 1e-5
    assert torch.allclose(kept - lab.params, gradients.sum((0, 1)), rtol=0, atol=accuracy)


def test_everything_sent_is_the_sign_of_the_mean() -> None:
    """k = chunk: no momentum stays, and the step is that of signSGD on the mean gradient."""
    lab = Lab(demo(k=64), ((100,),), 3, lr=0.1)
    for gradient in draws(7, 3, 3, 100):
        before = lab.params.clone()
        lab.round(list(gradient))
        assert torch.allclose(before - lab.params, 0.1 * gradient.mean(0).sign(), atol=1e-15)
    assert lab.states[0].slots["momentum"].abs().max() < 1e-13


def test_nothing_moves_where_nothing_is() -> None:
    """All-zero gradients: the sign of zero is zero."""
    lab = Lab(demo(), ((100,), (3, 3)), 2, start=1.0)
    lab.round([torch.zeros(109, dtype=torch.float64)] * 2)
    assert torch.equal(lab.params, torch.ones(109, dtype=torch.float64))


# --- settings and runs


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k", 0),
        ("chunk", 0),
        ("decay", -0.1),
        ("alpha", 2),
        ("transform", "tile"),
        ("merge", "worker"),
        ("apply", "signs"),
        ("payload_dtype", "fp8"),
    ],
)
def test_impossible_settings_are_refused_by_name(key: str, value: Any) -> None:
    """One line that names the field."""
    with pytest.raises(InputError, match=rf"^method\.{key}: ") as refused:
        experiment(method={"name": "demo", key: value})
    assert "\n" not in str(refused.value)


def test_the_default_rate_is_the_models_own() -> None:
    """A sign moves a weight as far as Adam does; weight decay is off, as in the authors' code."""
    optimizer = experiment(method="demo").resolved().optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (0.01, 0.0)


def test_local_gradients_are_clipped() -> None:
    """``optimizer.clip`` bounds what is folded into each worker's momentum: (3, 4) to norm 1."""
    lab = Lab(demo(k=64, apply="identity"), ((2,),), 2, lr=1.0, clip=1.0)
    lab.round([torch.tensor([3.0, 4.0], dtype=torch.float64)] * 2)
    assert lab.params.tolist() == pytest.approx([-0.6, -0.8], rel=1e-12)


@pytest.mark.parametrize(("workers", "wire"), [((2, 2), 3024), ((4, 4), 7056)])
def test_decoder_bytes(workers: tuple[int, int], wire: int) -> None:
    """84 chunks of 64, four coefficients each, 2 bytes and a position of 1; all-gathered."""
    run = train(experiment(method="demo", steps=3, cluster=cluster(workers)))
    rows = run.rows("syncs", "payload_bytes", "value_bytes", "index_bytes", "scale_bytes")
    assert set(rows) == {(1008, 84 * 4 * 2, 84 * 4, 0)}
    assert run.summary["wire_bytes_per_step"] == wire


def test_it_learns() -> None:
    """150 steps on the prose bring the loss down by more than a fifth of a nat."""
    run = train(experiment(method="demo", steps=150, eval={"every": 150, "windows": 8}))
    first, last = run.rows("evals", "val_loss")
    assert last < first - 0.2
