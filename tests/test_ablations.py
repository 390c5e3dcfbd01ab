"""DiLoCo's ablations by hand: trimming, weights, similarity, warm starts, a single replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import PLAIN, PROSE, batch_of, cluster, experiment, initial, train
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from islands.compression import Payload, decode, encode, itemsize
from islands.compression.trim import RowTrim
from islands.config import Experiment, load_experiment
from islands.errors import InputError, RunError
from islands.job import prepare
from islands.layout import Layout, TensorSpec
from islands.methods import Arrival, Context, DiLoCo, LocalSGD, Shared, WorkerState
from islands.models import build_model

FORMATS = st.sampled_from(["bf16", "fp16", "fp32", "fp64"])


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    tensors: list[TensorSpec] = []
    offset = 0
    for n, shape in enumerate(shapes):
        tensors.append(TensorSpec(f"t{n}", shape, offset))
        offset += tensors[-1].numel
    return Layout(tuple(tensors), (slice(0, offset),))


def arrivals(*payloads: Payload) -> list[Arrival]:
    return [Arrival(worker, payload, 0, 1) for worker, payload in enumerate(payloads)]


def dense(*values: float, fmt: str = "fp32") -> Payload:
    return Payload(encode(torch.tensor(values, dtype=torch.float64), fmt), fmt)


# --- trimming


def kept_by_hand(values: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """Row by row: the values in order of (−magnitude, position), the last ⌊share · width⌋ are 0."""
    rows = values.reshape(len(values) if values.ndim else 1, -1).copy()
    for row in rows:
        order = sorted(range(len(row)), key=lambda at: (-abs(row[at]), at))
        drop = int(round(share * len(row), 6))
        row[order[len(row) - drop :]] = 0
    return rows.reshape(-1)


def test_half_of_each_row_by_hand() -> None:
    """Rows of a 2 x 4 tensor lose their two smallest magnitudes, ties the later one; a bias is sent
    whole. In fp32: four values and one byte of bits, then the bias."""
    layout = layout_of((2, 4), (2,))
    flat = torch.tensor([1.0, -3.0, 2.0, 0.5, 5.0, 5.0, -5.0, 5.0, 0.1, 0.0])
    trim = RowTrim(layout.tensors, 0.5, "fp32")
    payload = trim.write(flat)
    assert decode(payload.values, "fp32").tolist() == [
        -3.0, 2.0, 5.0, 5.0, pytest.approx(0.1), 0.0,
    ]  # fmt: skip
    assert payload.indices is not None
    assert payload.indices.tolist() == [0b0110_1100]
    assert payload.size == (24, 1, 0)
    assert trim.read(payload).tolist() == [0, -3, 2, 0, 5, 5, 0, 0, pytest.approx(0.1), 0]


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    shapes=SHAPES | st.just([(1, 300), (2, 70_000)]),
    share=st.sampled_from([0.25, 0.29, 0.5, 0.75, 0.9, 0.99]),
    fmt=FORMATS,
    seed=st.integers(0, 99),
)
def test_trimming_any_tensors(
    shapes: list[tuple[int, ...]], share: float, fmt: str, seed: int
) -> None:
    """What is read is the rounded input where it was kept and zero elsewhere; a tensor takes what
    its cheapest form takes, and never more than all of its values."""
    layout = layout_of(*shapes)
    draws = np.random.default_rng(seed)
    flat = torch.from_numpy(draws.integers(-9, 10, layout.numel).astype(np.float64))
    trim = RowTrim(layout.tensors, share, fmt)
    payload = trim.write(flat)
    expected, size = [], 0
    for spec in layout.tensors:
        values = flat[spec.slice].view(spec.shape).numpy()
        rows = spec.shape[0] if spec.shape else 1
        width = spec.numel // max(rows, 1)
        kept = rows * (width - int(round(share * width, 6)))
        position = 1 if width <= 256 else 2 if width <= 65_536 else 4
        whole = spec.numel * itemsize(fmt)
        trimmed = kept * itemsize(fmt) + min(-(-spec.numel // 8), kept * position)
        expected.append(kept_by_hand(values, share) if trimmed < whole else values.reshape(-1))
        size += min(whole, trimmed)
    assert trim.read(payload).double().tolist() == np.concatenate(expected).tolist()
    assert payload.nbytes == size <= layout.numel * itemsize(fmt)


def test_the_mean_of_trimmed_pseudo_gradients_by_hand() -> None:
    """What a worker did not send counts as zero; the mean itself is not rounded."""
    layout = layout_of((1, 4))
    method = LocalSGD(prune=0.5, payload_dtype="bf16")
    context = Context(layout, 2, lambda state, batch: 0.0, lambda state: None)
    payloads = []
    for moved in ([1.0, 2.0, 3.0, 4.0], [0.0, -1.0, -0.5, 256.0]):
        state = WorkerState(len(payloads), torch.zeros(4), torch.zeros(4))
        method.begin(state, context)
        state.params -= torch.tensor(moved)  # so that the pseudo-gradient is what moved
        payloads.append(method.send(state, 0, context))
    shared = Shared(layout, torch.zeros(4))
    method.combine(shared, 0, arrivals(*payloads))
    assert shared.params.tolist() == [0.0, 0.5, -1.5, -130.0]  # −(4 + 256)/2; bf16 steps by 1 here
    method.combine(shared, 0, arrivals(dense(0, 3, fmt="bf16"), payloads[1])[1:])
    assert shared.params.tolist() == [0.0, 1.5, -1.5, -386.0]


@pytest.mark.parametrize(
    ("prune", "payload"), [(0.0, 10_752), (0.25, 8_736), (0.5, 6_048), (0.75, 3_360)]
)
def test_bytes_of_a_trimmed_run(prune: float, payload: int) -> None:
    """The decoder's 5,376 values in bf16: all, or a share of them and a bit for each (672 bytes);
    nothing else. An all-gather puts p − 1 payloads on the wire, an all-reduce 2(p − 1)/p."""
    method = {"name": "diloco", "sync_every": 3, "prune": prune}
    run = train(experiment(method=method, data=PROSE, steps=6))
    assert payload == 10_752 * (1 - prune) + (672 if prune else 0)
    assert set(run.rows("syncs", "payload_bytes")) == {payload}
    assert set(run.rows("syncs", "index_bytes")) == {672 if prune else 0}
    wire = 3 * payload if prune else 2 * 3 / 4 * payload
    assert run.summary["wire_bytes_per_step"] == pytest.approx(wire / 3)


def test_what_carries_a_round_depends_on_the_setting() -> None:
    """Equal positions can be added on the way, different ones must be gathered."""
    assert DiLoCo().collective == "all_reduce"
    assert DiLoCo(prune=0.25).collective == "all_gather"


def test_trimming_nothing_by_a_tiny_share_changes_no_training() -> None:
    """A share that rounds to no value at all: everyone sends everything, so that only the mean's
    own rounding is left out."""
    common: dict[str, Any] = {"name": "diloco", "sync_every": 3, "payload_dtype": "fp32"}
    plain = train(experiment(method=common))
    trimmed = train(experiment(method={**common, "prune": 1e-3}))
    assert plain.summary["parameters_sha256"] == trimmed.summary["parameters_sha256"]


# --- weights


@pytest.mark.parametrize("prune", [0.0, 0.5])
@pytest.mark.parametrize(("weights", "expected"), [("uniform", [5.0, 3.0]), ("shard", [5.5, 4.5])])
def test_weights_by_hand(weights: Any, expected: list[float], prune: float) -> None:
    """Shards of 1, 3 and 4 tokens, of which the second worker is out of the round: means of 3 and
    6, and of 5 and 1 (a 2 x 1 tensor, of whose rows nothing can be trimmed)."""
    layout = layout_of((2, 1))
    method = LocalSGD(weights=weights, prune=prune, payload_dtype="fp32")
    values = [(3.0, -9.0), (100.0, 100.0), (7.0, 15.0)]
    if weights == "shard":
        values = [(3.5, 0.5), (100.0, 100.0), (6.0, 5.5)]
    taking_part = [a for a in arrivals(*(dense(*v) for v in values)) if a.worker != 1]
    shared = Shared(layout, torch.zeros(2), shard_sizes=(1, 3, 4))
    method.combine(shared, 0, taking_part)
    assert shared.params.tolist() == pytest.approx([-x for x in expected], rel=1e-6)


def test_equal_shards_weigh_exactly_the_same() -> None:
    """With i.i.d. shards the setting changes nothing, bit for bit; a run says what it used."""
    runs = {
        weights: train(experiment(method={"name": "diloco", "sync_every": 4, "weights": weights}))
        for weights in ("uniform", "shard")
    }
    for weights, run in runs.items():
        assert run.summary["weights"] == weights
    uniform, shard = (run.summary["parameters_sha256"] for run in runs.values())
    assert uniform == shard


def test_unequal_shards_weigh_differently() -> None:
    """With clusters of different sizes the weights reach the result: the first round's mean is the
    weighted one of what the workers sent."""
    data = {"name": PROSE, "shards": "clustered"}
    method = {"name": "local_sgd", "sync_every": 2, "payload_dtype": "fp64", "weights": "shard"}
    what = experiment(method=method, data=data, steps=2, cluster=cluster((1, 1)))
    run = train(what)
    alone = [train(single(what, worker)) for worker in range(2)]
    sizes = run.summary["shard_sizes"]
    assert sizes[0] != sizes[1]
    for name, value in run.parameters.items():
        a, b = (other.parameters[name].double() for other in alone)
        mean = (sizes[0] * a + sizes[1] * b) / sum(sizes)
        assert torch.allclose(value.double(), mean, atol=1e-6)


def single(what: Experiment, worker: int) -> Any:
    """The job of ``what`` in which everybody draws what the given worker draws."""
    job = prepare(what)
    replica = job.replica(worker)

    class Alone(type(job)):  # type: ignore[misc]
        def replica(self, number: int) -> Any:
            return replica

    return Alone(**vars(job))


# --- similarity


def test_cosines_by_hand() -> None:
    """Right angles, halves of them, opposites; a zero vector has no direction."""
    method = DiLoCo(payload_dtype="fp32")
    vectors = [(2, 0), (0, 3), (1, 1), (-4, 0), (0, 0)]
    shared = Shared(layout_of((2,)), torch.zeros(2))
    found = method.similarity(shared, 0, arrivals(*(dense(*v) for v in vectors)))
    assert found is not None
    half = 0.5**0.5
    expected = [[1, 0, half, -1], [0, 1, half, 0], [half, half, 1, -half], [-1, 0, -half, 1]]
    assert found[:4, :4].numpy() == pytest.approx(np.array(expected), abs=1e-12)
    assert found[4].isnan().all()
    assert found[:, 4].isnan().all()


def test_long_vectors_are_compared_whole() -> None:
    """However many coordinates there are: against NumPy's own product."""
    draws = np.random.default_rng(5).standard_normal((3, 600_000))
    shared = Shared(layout_of((600_000,)), torch.zeros(1))
    payloads = [Payload(encode(torch.from_numpy(row), "fp64"), "fp64") for row in draws]
    found = DiLoCo(payload_dtype="fp64").similarity(shared, 0, arrivals(*payloads))
    assert found is not None
    norms = np.linalg.norm(draws, axis=1)
    assert found.numpy() == pytest.approx(draws @ draws.T / np.outer(norms, norms), abs=1e-12)


def test_the_table_has_each_pair_once_in_order() -> None:
    """Three workers that move in the same direction, two rounds: three pairs each, cosine one."""
    method = {"name": "helpers:Drift", "sync_every": 2}
    run = train(experiment("helpers:build_abc", method=method, steps=4, cluster=cluster((2, 1))))
    keys = run.rows("similarity", "fragment", "version", "step", "worker", "other")
    pairs = [(0, 1), (0, 2), (1, 2)]
    assert keys == [(0, v, step, *pair) for v, step in ((1, 2), (2, 4)) for pair in pairs]
    assert run.rows("similarity", "cosine") == pytest.approx([1.0] * 6, abs=1e-6)


def test_similarity_of_what_was_trained() -> None:
    """The pseudo-gradients of the first round, made again one by one: same cosine."""
    method = {"name": "local_sgd", "sync_every": 3, "payload_dtype": "fp64"}
    what = experiment(
        method=method,
        steps=3,
        data={"name": PROSE, "shards": "contiguous"},
        cluster=cluster((1, 1)),
    )
    start = {k: torch.from_numpy(v.view(np.float32)) for k, v in prepare(what).initial.items()}
    moved = [
        torch.cat([(start[k] - p.reshape(-1)) for k, p in sorted(run.parameters.items())])
        for run in (train(single(what, worker)) for worker in range(2))
    ]
    (cosine,) = train(what).rows("similarity", "cosine")
    assert cosine == pytest.approx(
        torch.cosine_similarity(moved[0].double(), moved[1].double(), dim=0).item(), abs=1e-6
    )


def test_who_was_refused_is_not_compared() -> None:
    """A worker whose payload held a NaN has no direction; one worker, or dense, has no pairs."""
    poisoned = {"name": "helpers:PoisonedDrift", "sync_every": 2, "poison": ((1, 2),)}
    run = train(experiment("helpers:build_abc", method=poisoned, steps=2, cluster=cluster((2, 1))))
    assert run.rows("similarity", "worker", "other") == [(0, 2)]
    alone = cluster((1,), (0.1,))
    assert train(experiment(cluster=alone, steps=2)).rows("similarity", "worker") == []
    assert train(experiment(method="dense", steps=2)).rows("similarity", "worker") == []


# --- warm starts


def dense_run(what: Experiment, steps: int) -> Experiment:
    """The dense run that a warm start of so many steps stands for."""
    dense = Experiment(method={"name": "dense", "payload_dtype": "fp64"}).method
    return what.resolved().model_copy(update={"method": dense, "steps": steps, "warm_start": 0})


@pytest.mark.parametrize(
    "model", ["decoder", *(f"helpers:build_{m}" for m in ("tied", "dropout", "bf16", "frozen"))]
)
@pytest.mark.parametrize("method", ["diloco", "helpers:Fragments"])
def test_a_warm_start_is_a_dense_run_first(model: str, method: str, tmp_path: Path) -> None:
    """So many steps, or the model that they leave: the same start, and the same run from it."""
    what = experiment(model, method=method, optimizer={"warmup": 2})
    first = train(dense_run(what, 5))
    path = tmp_path / "model.safetensors"
    save_file(first.parameters, path)
    by_steps, by_path = (what.model_copy(update={"warm_start": w}) for w in (5, str(path)))
    starts = [prepare(e).initial for e in (by_steps, by_path)]
    assert starts[0].keys() == starts[1].keys() == prepare(what).initial.keys()
    for name, value in first.parameters.items():
        flat = value.reshape(-1).view(torch.uint8).numpy()
        assert all(np.array_equal(start[name], flat) for start in starts)
    one, other = train(by_steps), train(by_path)
    for key in ("parameters_sha256", "initial_sha256", "final_val_loss"):
        assert one.summary[key] == other.summary[key]
    cold = train(what)
    assert cold.summary["initial_sha256"] != one.summary["initial_sha256"]
    for key in ("emulated_s", "wire_bytes_total", "wan_bytes", "tokens", "links"):
        assert cold.summary[key] == one.summary[key]
    assert (one.summary["warm_start"], other.summary["warm_start"]) == (5, str(path))


def test_running_statistics_are_part_of_a_warm_start() -> None:
    """Five dense steps leave their averaged statistics, not those of a fresh model."""
    what = experiment("helpers:build_batchnorm", warm_start=5)
    start = prepare(what).initial
    expected = train(dense_run(what, 5)).parameters
    for name, value in expected.items():
        assert np.array_equal(start[name], value.reshape(-1).view(torch.uint8).numpy()), name
    assert start["norm.num_batches_tracked"].view(np.int64).tolist() == [5]


def test_the_written_experiment_starts_warm_again(tmp_path: Path) -> None:
    """Resolving keeps the steps, and makes a path independent of the current folder."""
    what = experiment(warm_start=3)
    config = tmp_path / "experiment.yaml"
    config.write_text(what.resolved().dump_yaml(), encoding="utf-8")
    again = load_experiment(config)
    assert again.warm_start == 3
    assert train(again).summary["parameters_sha256"] == train(what).summary["parameters_sha256"]
    resolved = experiment(warm_start="some.safetensors").resolved()
    assert resolved.warm_start == str(Path.cwd() / "some.safetensors")
    assert Experiment(warm_start=Path("x")).warm_start == "x"


def test_a_warm_start_that_diverges_says_so() -> None:
    """No run is begun from a model of NaNs."""
    optimizer = {**PLAIN, "name": "sgd", "lr": 1e30}
    with pytest.raises(RunError, match=r"warm_start: the loss of dense step \d is not finite"):
        prepare(experiment(warm_start=5, optimizer=optimizer))


def _saved(folder: Path, **change: Tensor | None) -> str:
    with torch.random.fork_rng(devices=[]):
        tensors = dict(build_model("decoder", {}).state_dict()) | change
    path = folder / "model.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items() if t is not None}, path)
    return str(path)


def test_a_model_file_must_fit(tmp_path: Path) -> None:
    """The first tensor that is absent, of another shape or type, or of no use is named."""
    names = list(load_file(_saved(tmp_path)))
    prepare(experiment(warm_start=_saved(tmp_path)))
    first = next(iter(build_model("decoder", {}).state_dict()))
    assert first in names
    _refused(_saved(tmp_path, **{first: None}), ["another model", "no tensor", repr(first)])
    for change, parts in (
        ({first: torch.zeros(3, 5)}, [repr(first), "3 x 5 of float32", "64 x 16 of float32"]),
        ({first: torch.zeros(64, 16).half()}, [repr(first), "64 x 16 of float16"]),
        ({"extra": torch.zeros(())}, ["'extra'", "no tensor of this one"]),
    ):
        _refused(_saved(tmp_path, **change), ["another model", *parts])
    (tmp_path / "text.safetensors").write_text("no tensors")
    _refused(str(tmp_path / "text.safetensors"), ["no safetensors file"])
    _refused(str(tmp_path / "none"), ["no file"])
    _refused(str(tmp_path), ["a folder", "model.safetensors in it"])


def _refused(path: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        prepare(experiment(warm_start=path))
    message = str(error.value)
    assert message.startswith("warm_start: ")
    assert "\n" not in message
    assert all(part in message for part in parts), message


# --- one replica


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam"])
def test_one_replica_takes_outer_steps(name: str) -> None:
    """One worker, inner SGD, three rounds of two steps, in plain float64; nothing on the wire."""
    outer = {"name": name, "lr": 0.5} | ({} if name == "sgd" else {"momentum": 0.8})
    what = experiment(
        "helpers:build_float64",
        method={"name": "diloco", "sync_every": 2, "payload_dtype": "fp64", "outer": outer},
        cluster=cluster((1,), (0.1,)),
        optimizer={**PLAIN, "name": "sgd", "lr": 0.3},
        steps=6,
    )
    job = prepare(what)
    model = build_model(job.experiment.model.name, {})
    x = initial(job)
    m = {k: torch.zeros_like(p) for k, p in x.items()}
    v = {k: torch.zeros_like(p) for k, p in x.items()}
    for t in (1, 2, 3):
        local = {k: p.clone().requires_grad_() for k, p in x.items()}
        for step in (2 * t - 2, 2 * t - 1):
            tokens = batch_of(job, 0, step)
            logits = torch.func.functional_call(model, local, (tokens[:, :-1],))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            grads = torch.autograd.grad(loss, list(local.values()))
            local = {
                k: (p - 0.3 * g).detach().requires_grad_()
                for (k, p), g in zip(local.items(), grads, strict=True)
            }
        for k in x:
            g = (x[k] - local[k]).detach()
            if name == "adam":
                m[k] = 0.8 * m[k] + 0.2 * g
                v[k] = 0.999 * v[k] + 0.001 * g * g
                x[k] -= 0.5 * (m[k] / (1 - 0.8**t)) / ((v[k] / (1 - 0.999**t)).sqrt() + 0.1)
            else:
                m[k] = (0.0 if name == "sgd" else 0.8) * m[k] + g
                x[k] -= 0.5 * (g + 0.8 * m[k] if name == "nesterov" else m[k])
    run = train(job)
    for k, value in run.parameters.items():
        assert torch.allclose(value, x[k], rtol=1e-9, atol=1e-12), k
    assert run.summary["wire_bytes_total"] == 0
    assert run.summary["payload_bytes_per_sync"] == 8 * job.layout.numel


# --- bad input


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("method.weights=shards", "method.weights: 'shards' is not one of uniform, shard"),
        ("method.prune=1", "method.prune: 1 is too large; it must be less than 1"),
        ("method.prune=-0.1", "method.prune: -0.1 is too small; it must be at least 0"),
        ("method.prune=.nan", "method.prune: nan is not a finite number"),
        ("data.shards=cluster", "data.shards: 'cluster' is not one of iid, contiguous, clustered"),
        ("warm_start=-1", "warm_start: -1 is neither a number of dense steps (0: none) nor"),
        ("warm_start=1.5", "warm_start: 1.5 is neither a number of dense steps (0: none) nor"),
        ("warm_start=true", "warm_start: True is neither a number of dense steps (0: none) nor"),
        ("warm_start=null", "warm_start: null is neither a number of dense steps (0: none) nor"),
    ],
)
def test_wrong_ablations_are_refused(setting: str, message: str) -> None:
    """One line with the field, the value and what would do."""
    with pytest.raises(InputError) as error:
        load_experiment(overrides=[setting])
    assert str(error.value).startswith(message), str(error.value)
