"""Laws that hold for every run: identities, conservation of bytes and time, determinism.

What is expected comes from a formula, or from a loop of plain torch that restates the algorithm.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    INSTANT,
    PLAIN,
    Run,
    assert_identical,
    batch_of,
    build_float64,
    cluster,
    experiment,
    initial,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from islands.errors import RunError
from islands.experiment import run_in_process
from islands.job import Job, prepare

FLOAT64 = "helpers:build_float64"
WIRE = {"payload_dtype": "fp64"}
AVERAGING = {"name": "sgd", "lr": 1.0}
ONE = cluster((1,), (0.1,))
SGD = {"name": "sgd", "lr": 0.5, **PLAIN}
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def one_process(job: Job) -> dict[str, torch.Tensor]:
    """The textbook: one process, all workers' windows in one batch, one torch optimizer."""
    settings = job.experiment.optimizer
    model = build_float64(**job.experiment.model.settings)
    with torch.no_grad():
        for name, value in initial(job).items():
            model.get_parameter(name).copy_(value)
    if settings.name == "adamw":
        decay = settings.weight_decay
        torch_optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=decay
        )
    else:
        torch_optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps, warm, per_step = job.experiment.steps, settings.warmup or 0, settings.accumulate
    for step in range(steps):
        draws = range(step * per_step, (step + 1) * per_step)
        tokens = torch.cat([batch_of(job, w, i) for w in range(job.workers) for i in draws])
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
        torch_optimizer.zero_grad()
        loss.backward()
        if settings.clip is not None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
            for g in gradients:
                g *= min(1.0, settings.clip / norm)
        lr = settings.lr or 0.0
        if step < warm:
            lr *= (step + 1) / warm
        elif settings.schedule == "cosine":
            lr *= 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))
        torch_optimizer.param_groups[0]["lr"] = lr
        torch_optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_close(run: Run, expected: dict[str, torch.Tensor], rel: float = 1e-12) -> None:
    assert run.error is None
    assert run.parameters.keys() == expected.keys()
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert (run.parameters[name] - value).abs().max().item() <= rel * scale, name


def moved(run: Run, job: Job) -> bool:
    return any(not torch.equal(run.parameters[n], v) for n, v in initial(job).items())


# --- law 1


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "lr": 0.5, **PLAIN},
        {"name": "adamw", "lr": 0.05, "warmup": 4, "weight_decay": 0.1, "clip": None},
        {"name": "adamw", "lr": 0.05, "clip": 0.05},
        {"name": "sgd", "lr": 0.5, **PLAIN, "clip": 0.02, "accumulate": 3},
    ],
    ids=["sgd", "adamw-warmup-cosine", "clip-after-averaging", "accumulate"],
)
def test_dense_is_one_process_with_the_whole_batch(optimizer: dict[str, Any]) -> None:
    """Law 1: p workers of batch b = one process with p·b (times the accumulation), to 1e-12."""
    job = prepare(experiment(FLOAT64, method={"name": "dense", **WIRE}, optimizer=optimizer))
    run = train(job)
    assert moved(run, job)
    assert_close(run, one_process(job))


def test_dense_replicas_stay_bit_identical() -> None:
    """In bf16 on the wire too: everyone steps on the same bytes. So do running statistics."""
    run = train(experiment("helpers:build_batchnorm", method="dense"))
    first = run.replicas[0].flat.model.state_dict()
    for name, value in run.parameters.items():
        for replica in run.replicas:
            assert torch.equal(replica.flat.model.state_dict()[name], first[name]), name
        assert torch.equal(value, first[name]), name


def test_dense_in_float32_is_close_to_float64() -> None:
    """Law 1 in float32 with bf16 payloads: the same course within the format's precision."""
    exact = one_process(prepare(experiment(FLOAT64, method="dense", optimizer=SGD)))
    assert_close(train(experiment(FLOAT64, method="dense", optimizer=SGD)), exact, 1e-2)


# --- law 2


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("sync_every", [1, 5])
def test_diloco_of_one_worker_is_plain_training(name: str, sync_every: int) -> None:
    """Law 2: outer SGD with rate 1 gives back what the inner optimizer made."""
    method = {"name": "diloco", "sync_every": sync_every, "outer": AVERAGING, **WIRE}
    optimizer = {**PLAIN, "name": name, "lr": 0.05}
    job = prepare(experiment(FLOAT64, method=method, cluster=ONE, optimizer=optimizer))
    run = train(job)
    assert moved(run, job)
    assert_close(run, one_process(job))


@pytest.mark.parametrize("name", ["diloco", "local_sgd"])
def test_one_sgd_step_per_round_is_dense_sgd(name: str) -> None:
    """Law 2: H = 1, inner SGD, outer SGD(1) (or plain averaging) = dense SGD."""
    outer = {"outer": AVERAGING} if name == "diloco" else {}
    method = {"name": name, "sync_every": 1, **outer, **WIRE}
    optimizer = {"name": "sgd", "lr": 0.5, "weight_decay": 0.0, "clip": None, "warmup": 3}
    job = prepare(experiment(FLOAT64, method=method, optimizer=optimizer))
    assert_close(train(job), one_process(job))


@pytest.mark.parametrize("name", ["dense", "diloco", "local_sgd", "helpers:Fragments"])
def test_one_worker_encodes_and_sends_nothing(name: str) -> None:
    """The payload is encoded and the outer step taken, but there is nobody on the wire."""
    run = train(experiment(method=name, cluster=ONE))
    assert run.error is None
    summary = run.summary
    assert summary["payload_bytes_per_sync"] > 0
    assert (summary["wire_bytes_total"], summary["wan_bytes"], summary["lan_bytes"]) == (0, 0, 0)
    assert run.tables["transfers"].num_rows == 0
    assert summary["wait_s"] == 0
    assert summary["emulated_s"] == pytest.approx(1.2)


# --- law 5


@pytest.mark.parametrize("name", ["dense", "diloco", "helpers:Fragments"])
def test_an_ideal_network_is_no_network(name: str) -> None:
    """Law 5: no waiting, and 12 steps of 0.1 s take 1.2 s; a slow network changes only times."""
    ideal = train(experiment(FLOAT64, method=name, cluster=cluster(**INSTANT)))
    slow = train(experiment(FLOAT64, method=name, cluster=cluster(bandwidth="100 kbit/s")))
    assert ideal.summary["wait_s"] == 0
    assert ideal.summary["emulated_s"] == pytest.approx(1.2, rel=1e-12)
    assert set(ideal.rows("syncs", "wait_s")) == {0.0}
    assert slow.summary["emulated_s"] > ideal.summary["emulated_s"]
    assert slow.summary["parameters_sha256"] == ideal.summary["parameters_sha256"]
    assert slow.rows("steps", "worker", "step", "loss") == ideal.rows(
        "steps", "worker", "step", "loss"
    )
    assert slow.summary["wire_bytes_total"] == ideal.summary["wire_bytes_total"]


def test_the_public_way_gives_the_same_run(tmp_path: Path) -> None:
    """``run_in_process`` is the loop that these tests use."""
    job = prepare(experiment(FLOAT64, method="dense"))
    summary = run_in_process(job, tmp_path)
    assert summary["parameters_sha256"] == train(job).summary["parameters_sha256"]


# --- exact bytes


def test_dense_decoder_bytes() -> None:
    """5,376 values of 2 bytes; a ring of 4 sends 2·3/4 of them per worker."""
    summary = train(experiment(method="dense")).summary
    assert summary["parameters"] == 5376
    assert summary["payload_bytes_per_sync"] == summary["payload_bytes_per_step"] == 10_752
    assert summary["wire_bytes_per_step"] == 16_128


@pytest.mark.parametrize(("sync_every", "wire"), [(10, 1612.8), (50, 322.56)])
def test_diloco_decoder_bytes(sync_every: int, wire: float) -> None:
    """16,128 wire bytes per round and worker, over 1,000 steps; drifting stands for training."""
    method = {"name": "helpers:Drift", "sync_every": sync_every}
    summary = train(experiment(method=method, steps=1000, eval={"every": 0, "windows": 1})).summary
    assert summary["payload_bytes_per_sync"] == 10_752
    assert summary["wire_bytes_per_step"] == pytest.approx(wire, rel=1e-15)
    assert summary["syncs"] == 1000 / sync_every


def test_control_bytes_are_the_initial_model_once_each() -> None:
    """A tied model of 84 fp32 parameters to three of four workers: two of them over the link."""
    run = train(experiment("helpers:build_tied", method="dense"))
    assert run.summary["parameters"] == 84
    control = Counter()
    for link, kind, count in run.rows("transfers", "link", "kind", "bytes"):
        control[link] += count if kind == "control" else 0
    assert +control == {"lan:a": 84 * 4, "ab:a>b": 2 * 84 * 4}


def test_frozen_and_tied_weights_are_no_payload() -> None:
    """fp32: 148 − 64 trainable values of the frozen model, 84 distinct ones of the tied model."""
    for build, values in (("build_frozen", 84), ("build_tied", 84), ("build_float64", 148)):
        method = {"name": "dense", "payload_dtype": "fp32"}
        summary = train(experiment(f"helpers:{build}", method=method, steps=2)).summary
        assert summary["payload_bytes_per_sync"] == 4 * values, build


def test_frozen_parameters_stay_and_are_saved() -> None:
    """The embedding ends as it began, in the saved model and in every replica."""
    job = prepare(experiment("helpers:build_frozen", method={"name": "diloco", "sync_every": 5}))
    run = train(job)
    begun = torch.from_numpy(job.initial["emb.weight"].copy()).view(torch.float32).view(16, 4)
    assert torch.equal(run.parameters["emb.weight"], begun)
    for replica in run.replicas:
        assert torch.equal(replica.flat.model.emb.weight, begun)


def test_running_statistics_are_sent_and_shared() -> None:
    """BatchNorm: 8 fp32 and one int64 more per payload, and everyone ends with the saved ones."""
    run = train(
        experiment("helpers:build_batchnorm", method={"name": "local_sgd", "sync_every": 5})
    )
    assert run.summary["payload_bytes_per_sync"] == 2 * (64 + 8 + 80) + 8 * 4 + 8
    for replica in run.replicas:
        state = replica.flat.model.state_dict()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(run.parameters[f"norm.{name}"], state[f"norm.{name}"])
    assert run.parameters["norm.num_batches_tracked"].item() == 12


# --- laws 7, 8 and 9


def ring(payload: int, workers: int) -> int:
    """Wire bytes of one ring all-reduce, all workers together."""
    return 2 * (workers - 1) * payload


def assert_books_balance(run: Run, routes_of_one_link: bool = True) -> None:
    """Laws 7, 8 and 9 on one run's tables, links and clocks."""
    summary = run.summary
    sums: Counter[str] = Counter()
    control = 0
    for link, kind, count in run.rows("transfers", "link", "kind", "bytes"):
        sums[link] += count
        control += count if kind == "control" else 0
    assert +sums == +Counter({name: link["bytes"] for name, link in summary["links"].items()})
    wan = sum(count for link, count in sums.items() if not link.startswith("lan:"))
    assert (summary["wan_bytes"], summary["lan_bytes"]) == (wan, sums.total() - wan)
    if routes_of_one_link:
        assert summary["wire_bytes_total"] + control == sums.total()
    workers, steps = summary["workers"], summary["steps"]
    assert summary["wire_bytes_per_step"] == summary["wire_bytes_total"] / (workers * steps)
    payloads = run.rows("syncs", "payload_bytes")
    assert summary["payload_bytes_per_sync"] == sum(payloads) / len(payloads)
    for worker, (compute_s, wait_s, clock_s, *parts) in enumerate(run.clocks):
        assert sum(parts) == pytest.approx(wait_s, rel=1e-9, abs=1e-12)
        own = [row for row in run.rows("steps", "worker", "start_s", "end_s") if row[0] == worker]
        waits = [row for row in run.rows("syncs", "worker", "wait_s", "done_s") if row[0] == worker]
        assert compute_s + wait_s == pytest.approx(clock_s, rel=1e-9)
        assert sum(end - start for _, start, end in own) == pytest.approx(compute_s, rel=1e-9)
        assert sum(wait for _, wait, _ in waits) == pytest.approx(wait_s, rel=1e-9, abs=1e-12)
        last = max([end for *_, end in own] + [done for *_, done in waits])
        assert last == pytest.approx(clock_s, rel=1e-9)
    assert summary["emulated_s"] == max(clock.clock_s for clock in run.clocks)


@st.composite
def any_run(draw: st.DrawFn) -> dict[str, Any]:
    islands = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    name = draw(st.sampled_from(["dense", "diloco", "local_sgd", "helpers:DriftFragments"]))
    method = {"name": name, "payload_dtype": draw(st.sampled_from(sorted(SIZES)))}
    if name != "dense":
        method["sync_every"] = draw(st.integers(1, 9))
    speeds = draw(st.lists(st.sampled_from([0.1, 0.25, 1.3]), min_size=3, max_size=3))
    network = draw(st.sampled_from(["1 Gbit/s", "56 kbit/s", "unlimited"]))
    return {
        "cluster": cluster(islands, speeds[: len(islands)], network, "30 ms"),
        "method": method,
        "steps": draw(st.integers(1, 14)),
        "eval": {"every": draw(st.integers(0, 5)), "windows": 1},
        "seed": draw(st.integers(0, 3)),
    }


@settings(deadline=None, max_examples=25)
@given(any_run(), st.booleans())
def test_the_books_of_any_run_balance(parts: dict[str, Any], per_transfer: bool) -> None:
    """Laws 7, 8, 9: bytes add up from transfers to summary and follow the ring's formula, time is
    compute plus waiting, and each round accounts for every worker."""
    run = train(prepare(experiment("helpers:build_abc", **parts), per_transfer=per_transfer))
    assert run.error is None
    assert_books_balance(run, routes_of_one_link=len(parts["cluster"]["islands"]) < 3)
    workers = run.summary["workers"]
    rounds = run.rows("syncs", "fragment", "version", "payload_bytes")
    payload = {(fragment, version): size for fragment, version, size in rounds}
    assert set(Counter(row[:2] for row in rounds).values()) == {workers}
    assert run.summary["wire_bytes_total"] == sum(ring(n, workers) for n in payload.values())
    assert set(payload.values()) <= {SIZES[parts["method"]["payload_dtype"]] * n for n in (1, 3)}
    assert run.summary["unsynced_steps"] == 0


def test_the_books_of_a_timed_star_balance() -> None:
    """Each contribution costs its way up and the answer's way down, as large again."""
    run = train(
        experiment(
            method={"name": "helpers:EachArrival", "sync_every": 4},
            cluster=cluster((2, 1), (0.3, 0.1)),
        )
    )
    assert run.error is None
    assert_books_balance(run)
    assert run.summary["wire_bytes_total"] == 3 * 3 * (10_752 + 10_752)


def test_rejected_workers_are_accounted_for() -> None:
    """Law 9: 4 workers in each of 12 rounds; 3 contributions rejected, the others took part."""
    method = {"name": "helpers:PoisonedDense", "poison": ((0, 1), (3, 1), (2, 12))}
    run = train(experiment("helpers:build_tied", method=method))
    assert set(Counter(run.rows("syncs", "version")).values()) == {4}
    assert Counter(run.rows("syncs", "status")) == {"ok": 45, "rejected": 3}
    assert run.summary["rejected_payloads"] == run.tables["events"].num_rows == 3
    assert_books_balance(run)


@pytest.mark.parametrize("name", ["dense", "diloco", "helpers:Fragments", "helpers:EachArrival"])
def test_a_row_per_transfer_changes_no_total(name: str) -> None:
    """Whether transfers are listed one by one or by round and link: same totals, same times."""
    exp = experiment(method=name, eval={"every": 0, "windows": 1})
    brief, each = (train(prepare(exp, per_transfer=each)) for each in (False, True))
    assert set(each.rows("transfers", "count")) == {1}
    totals = []
    for run in (brief, each):
        total: Counter[tuple[Any, ...]] = Counter()
        for *key, size, count in run.rows(
            "transfers", "fragment", "version", "link", "kind", "bytes", "count"
        ):
            total[(*key, "bytes")] += size
            total[(*key, "count")] += count
        totals.append(total)
    assert totals[0] == totals[1]
    assert brief.tables["syncs"].equals(each.tables["syncs"])
    assert brief.summary["wan_bytes"] == each.summary["wan_bytes"]


# --- law 10

KINDS: list[dict[str, Any]] = [
    {"method": "dense"},
    {"method": {"name": "diloco", "sync_every": 5}, "model": "helpers:build_dropout"},
    {"method": "helpers:Fragments", "model": FLOAT64},
    {"method": {"name": "helpers:EachArrivalLate", "sync_every": 3}, "cluster": cluster((1, 2))},
    {"method": "dense", "model": "helpers:build_bf16"},
]


@pytest.mark.parametrize("parts", KINDS, ids=lambda parts: str(parts["method"]))
def test_the_same_experiment_gives_the_same_run(parts: dict[str, Any]) -> None:
    """Law 10, and torch's own random state plays no part in it."""
    torch.manual_seed(1)
    one = train(experiment(**parts))
    torch.manual_seed(2)
    other = train(experiment(**parts))
    assert one.error is None
    assert_identical(one, other)


def test_seeds_differ_and_zero_is_one() -> None:
    """Seeds 0, 1 and 2 give three models; 0 is the default and not a sign for chance."""
    digests = [train(experiment(seed=seed)).summary["parameters_sha256"] for seed in (0, 1, 2)]
    assert len(set(digests)) == 3
    assert train(experiment()).summary["parameters_sha256"] == digests[0]


@pytest.mark.parametrize("parts", KINDS, ids=lambda parts: str(parts["method"]))
def test_looking_does_not_change_training(parts: dict[str, Any]) -> None:
    """Evaluating at every step, at some, or only at the end: the same losses, times and model."""
    runs = [train(experiment(**parts, eval={"every": n, "windows": 2})) for n in (0, 1, 5)]
    for run in runs:
        assert run.error is None
        assert run.summary["parameters_sha256"] == runs[0].summary["parameters_sha256"]
        for table in ("steps", "syncs", "transfers"):
            assert run.tables[table].equals(runs[0].tables[table]), table
    evaluated = [dict(run.rows("evals", "step", "val_loss")) for run in runs]
    assert [sorted(e) for e in evaluated] == [[12], list(range(13)), [0, 5, 10, 12]]
    for some in evaluated:
        assert all(some[step] == evaluated[1][step] for step in some)


def test_the_learning_rate_counts_local_steps() -> None:
    """Warm-up of 4 to 0.1, then constant, whatever H and the accumulation: one counter."""
    optimizer = {**PLAIN, "lr": 0.1, "warmup": 4, "accumulate": 2}
    run = train(experiment(method={"name": "diloco", "sync_every": 3}, optimizer=optimizer))
    expected = [0.1 * min(step, 4) / 4 for step in range(1, 13) for _ in range(4)]
    assert run.rows("steps", "lr") == pytest.approx(expected, rel=1e-15)
    assert run.summary["tokens"] == 12 * 4 * 4 * 16 * 2


def test_losses_of_a_model_with_its_own() -> None:
    """½ (w − mean token)² from w = 0: the first losses are known from the batches."""
    job = prepare(experiment("helpers:build_averages", method="dense"))
    first = [0.5 * batch_of(job, w, 0).double().mean().item() ** 2 for w in range(4)]
    run = train(job)
    assert not isinstance(run.error, RunError)
    assert run.rows("steps", "loss")[:4] == pytest.approx(first, rel=1e-12)
