"""The algebra of the methods, followed by hand on plain tensors: no run, no network, no clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from islands.compression import Payload, decode, encode
from islands.errors import InputError
from islands.layout import Layout, TensorSpec
from islands.methods import (
    METHODS,
    Arrival,
    Context,
    Dense,
    DiLoCo,
    LocalSGD,
    Method,
    Shared,
    WorkerState,
    mean_of,
    method_class,
)

LAYOUT = Layout((TensorSpec("w", (2,), 0),), (slice(0, 2),))


def context(workers: int = 2, optimized: list[list[float]] | None = None) -> Context:
    """A context whose inner optimizer is w ← w − grad, and whose gradient is the batch."""

    def gradient(state: WorkerState, batch: Any) -> float:
        state.grad.copy_(torch.tensor(batch))
        return float(sum(batch))

    def optimize(state: WorkerState) -> None:
        if optimized is not None:
            optimized.append(state.grad.tolist())
        state.params -= state.grad

    return Context(LAYOUT, workers, gradient, optimize)


def worker(method: Method, number: int = 0, start: tuple[float, ...] = (0.0, 0.0)) -> WorkerState:
    params = torch.tensor(start)
    state = WorkerState(number, params, torch.zeros_like(params))
    method.begin(state, context())
    return state


def shared(method: Method, start: tuple[float, ...] = (0.0, 0.0)) -> Shared:
    common = Shared(LAYOUT, torch.tensor(start))
    method.begin_shared(common)
    return common


def arrivals(*values: tuple[float, ...], fmt: str = "fp32") -> list[Arrival]:
    payloads = [Payload(encode(torch.tensor(v), fmt), fmt) for v in values]
    return [Arrival(n, payload, 0, 1) for n, payload in enumerate(payloads)]


def diloco(name: str, lr: float = 0.7, momentum: float = 0.9, fmt: str = "fp32") -> DiLoCo:
    outer = {"name": name, "lr": lr} | ({} if name == "sgd" else {"momentum": momentum})
    return DiLoCo.model_validate({"payload_dtype": fmt, "outer": outer})


# --- the outer step


def test_first_nesterov_step_on_a_tenth_moves_by_0_133() -> None:
    """Law 3. lr 0.7, momentum 0.9, pseudo-gradient 0.1: 0.7 · (0.1 + 0.9 · 0.1) = 0.133, towards
    the local parameters."""
    method = DiLoCo(payload_dtype="fp32")
    state = worker(method, start=(1.0, 1.0))
    state.params -= 0.1  # the local parameters are below the anchor
    payload = method.send(state, 0, context())
    assert decode(payload.values, "fp32").tolist() == pytest.approx([0.1, 0.1], rel=1e-6)
    common = shared(method, (1.0, 1.0))
    update = method.combine(common, 0, [Arrival(0, payload, 0, 1)])
    assert common.params.tolist() == pytest.approx([1 - 0.133] * 2, rel=1e-6)
    method.receive(state, 0, update, context())
    assert torch.equal(state.params, common.params)


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam"])
def test_outer_optimizers_follow_their_formulas(name: str) -> None:
    """Three outer steps on pseudo-gradients 1, −0.5, 2, in plain arithmetic."""
    lr, beta = 0.5, 0.9
    method = diloco(name, lr, beta)
    common = shared(method)
    x = m = v = 0.0
    for t, g in enumerate((1.0, -0.5, 2.0), start=1):
        if name == "adam":
            m, v = beta * m + (1 - beta) * g, 0.999 * v + 0.001 * g * g
            x -= lr * (m / (1 - beta**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 0.1)
        else:
            m = (0.0 if name == "sgd" else beta) * m + g
            x -= lr * (g + beta * m if name == "nesterov" else m)
        method.combine(common, 0, arrivals((g, -g)))
        assert common.params.tolist() == pytest.approx([x, -x], rel=1e-5)


def test_plain_sgd_with_momentum_is_refused() -> None:
    """``sgd`` means no momentum; asking for both is a contradiction."""
    with pytest.raises(ValidationError, match="no momentum"):
        DiLoCo.model_validate({"outer": {"name": "sgd", "momentum": 0.9}})
    assert diloco("sgd").outer.momentum == 0.0


def test_fragments_have_outer_momenta_of_their_own() -> None:
    """A round of one fragment moves neither the parameters nor the momentum of the other."""
    layout = Layout(
        (TensorSpec("a", (1,), 0), TensorSpec("b", (1,), 1)), (slice(0, 1), slice(1, 2))
    )
    method = diloco("momentum", 1.0, 0.5)
    common = Shared(layout, torch.zeros(2))
    method.begin_shared(common)
    method.combine(common, 0, arrivals((1.0,)))
    method.combine(common, 0, arrivals((1.0,)))
    assert common.params.tolist() == [-2.5, 0.0]
    method.combine(common, 1, arrivals((1.0,)))
    assert common.params.tolist() == [-2.5, -1.0]


# --- DiLoCo and local SGD on a worker


@pytest.mark.parametrize("method", [diloco("sgd", 1.0), LocalSGD(payload_dtype="fp32")])
def test_averaging_ends_at_the_mean_of_the_workers(method: DiLoCo | LocalSGD) -> None:
    """Outer SGD(1), or local SGD: everyone continues from the mean of the local parameters."""
    states = [worker(method, n, (1.0, 2.0)) for n in range(2)]
    common = shared(method, (1.0, 2.0))
    for state, batch in zip(states, ([1.0, 0.0], [2.0, 4.0]), strict=True):
        assert method.local_step(state, batch, context()) == sum(batch)
    assert [s.params.tolist() for s in states] == [[0.0, 2.0], [-1.0, -2.0]]
    payloads = [method.send(s, 0, context()) for s in states]
    update = method.combine(common, 0, [Arrival(n, p, 0, 1) for n, p in enumerate(payloads)])
    for state in states:
        method.receive(state, 0, update, context())
        assert state.params.tolist() == [-0.5, 0.0]
        assert state.slots["anchor"].tolist() == [-0.5, 0.0]


def test_a_low_precision_wire_never_rounds_the_masters() -> None:
    """bf16 has 8 bits: 1000.25 would become 1000, but its change of 0.25 travels exactly."""
    method = LocalSGD(payload_dtype="bf16")
    state, common = worker(method, 0, (1000.0, 0.0)), shared(method, (1000.0, 0.0))
    state.params += torch.tensor([0.25, 0.0])
    update = method.combine(common, 0, [Arrival(0, method.send(state, 0, context()), 0, 1)])
    method.receive(state, 0, update, context())
    assert common.params.tolist() == [1000.25, 0.0]
    assert state.params.tolist() == [1000.25, 0.0]


def test_sending_changes_nothing_on_the_worker() -> None:
    """Until the result arrives, a worker goes on from where it is, with the same anchor."""
    method = DiLoCo(payload_dtype="bf16")
    state = worker(method)
    state.params += 1.0
    for _ in range(2):
        payload = method.send(state, 0, context())
        assert decode(payload.values, "bf16").tolist() == [-1.0, -1.0]
    assert state.params.tolist() == [1.0, 1.0]
    state.params += 1.0  # what was encoded is a copy
    assert decode(payload.values, "bf16").tolist() == [-1.0, -1.0]


def test_a_payload_is_as_long_as_its_format_says() -> None:
    """Two values: 4, 4, 8 and 16 bytes."""
    for fmt, size in {"bf16": 4, "fp16": 4, "fp32": 8, "fp64": 16}.items():
        method = DiLoCo.model_validate({"payload_dtype": fmt})
        assert method.send(worker(method), 0, context()).size.total == size


# --- dense


def test_dense_steps_only_on_the_average() -> None:
    """The local step keeps the gradient; the optimizer sees the mean of the gradients."""
    method = Dense(payload_dtype="fp32")
    optimized: list[list[float]] = []
    ctx = context(2, optimized)
    states = [worker(method, n) for n in range(2)]
    for state, batch in zip(states, ([1.0, 2.0], [3.0, -2.0]), strict=True):
        method.local_step(state, batch, ctx)
    assert not optimized
    payloads = [method.send(s, 0, ctx) for s in states]
    common = shared(method)
    update = method.combine(common, 0, [Arrival(n, p, 0, 1) for n, p in enumerate(payloads)])
    for state in states:
        method.receive(state, 0, update, ctx)
    assert optimized == [[2.0, 0.0]] * 2
    assert [s.params.tolist() for s in states] == [[-2.0, 0.0]] * 2


def test_dense_gets_the_mean_as_the_wire_delivers_it() -> None:
    """bf16: gradients 1 and 1 + 1/128 have the mean 1 + 1/256, which rounds to 1."""
    method = Dense(payload_dtype="bf16")
    update = method.combine(shared(method), 0, arrivals((1.0,), (1.0078125,), fmt="bf16"))
    assert decode(update.values, update.fmt).tolist() == [1.0]


# --- the mean


def test_the_mean_is_rounded_once() -> None:
    """Sums are kept in fp32: 256 + 1 + 1 in bf16 steps would stay 256."""
    assert mean_of(arrivals((256.0,), (1.0,), (1.0,), fmt="bf16"), "bf16").tolist() == [86.0]


def test_the_sum_runs_in_worker_order() -> None:
    """fp32: ((1 + 2^24) − 2^24) is 0, any other order would give 1; a third of it is 0."""
    values = [(1.0,), (2.0**24,), (-(2.0**24),)]
    expected = (np.float32(1.0) + np.float32(2.0**24)) - np.float32(2.0**24)
    assert mean_of(arrivals(*values), "fp32").tolist() == [expected / 3]


def test_fp64_payloads_are_summed_in_fp64() -> None:
    """The mean of 1 and 1 + 2^−40 keeps its last bit."""
    payloads = [
        Arrival(n, Payload(encode(torch.tensor([v], dtype=torch.float64), "fp64"), "fp64"), 0, 1)
        for n, v in enumerate((1.0, 1.0 + 2.0**-40))
    ]
    assert mean_of(payloads, "fp64").tolist() == [1.0 + 2.0**-41]


def test_one_payload_is_its_own_mean() -> None:
    """And the mean does not share memory with the payload."""
    (only,) = arrivals((1.5, -2.0))
    mean = mean_of([only], "fp32")
    mean += 1
    assert decode(only.payload.values, "fp32").tolist() == [1.5, -2.0]


# --- names and settings


def test_the_defaults_are_the_papers() -> None:
    """H = 50, Nesterov 0.7 / 0.9, bf16 on the wire; dense exchanges after every step."""
    method = DiLoCo()
    assert (method.sync_every, method.payload_dtype) == (50, "bf16")
    assert (method.outer.name, method.outer.lr, method.outer.momentum) == ("nesterov", 0.7, 0.9)
    (stream,) = method.streams(LAYOUT)
    assert (stream.first, stream.period, stream.overlap) == (50, 50, 0)
    (stream,) = Dense().streams(LAYOUT)
    assert (stream.first, stream.period, stream.overlap) == (1, 1, 0)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_found_by_name(name: str) -> None:
    """A method's own name is the one it is found by."""
    assert method_class(name)().name == name


def test_a_misspelt_method_is_refused_with_the_nearest_name() -> None:
    """One line, no traceback of imports."""
    with pytest.raises(InputError, match=r"unknown method 'dilco'; did you mean 'diloco'\?"):
        method_class("dilco")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Method", "nowhere"),
        ("helpers:Missing", "Missing"),
        ("helpers:Bigram", "is not a subclass"),
        ("helpers:PROSE", "is not a subclass"),
    ],
)
def test_a_users_method_that_is_none_is_refused(name: str, message: str) -> None:
    """A module or class that is not there, or that is no method."""
    with pytest.raises(InputError, match=message):
        method_class(name)


@pytest.mark.parametrize(
    "wrong",
    [{"sync_every": 0}, {"sync_evry": 5}, {"payload_dtype": "int3"}, {"outer": {"lr": 0}}],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    """H = 0, an unknown key, an unknown format, an outer rate of zero."""
    with pytest.raises(ValidationError):
        DiLoCo.model_validate(wrong)
