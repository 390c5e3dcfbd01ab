"""What holds for every method that sends less than everything, whatever it sends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import Run, assert_identical, cluster, experiment, train
from lab import ZOO, Lab, draws

from islands.job import prepare
from islands.methods import METHODS, Arrival, Method, Shared
from islands.replica import Replica

GATHERED: list[dict[str, Any]] = [
    {"name": "topk"},
    {"name": "topk", "density_warmup": 5, "dense_vectors": True, "payload_dtype": "fp32"},
    {"name": "demo"},
    {"name": "demo", "transform": "tiles", "merge": "senders", "k": 2},
    {"name": "signsgd"},
]
ALL = [*GATHERED, {"name": "sparta", "fraction": 0.05}]


def ids(method: dict[str, Any]) -> str:
    return "-".join(str(value) for value in method.values())


def build(method: dict[str, Any]) -> Method:
    return METHODS[method["name"]].model_validate(method)


@pytest.mark.parametrize("method", GATHERED, ids=ids)
@pytest.mark.parametrize("model", ["decoder", "lab:build_zoo", "helpers:build_batchnorm"])
def test_replicas_stay_bit_identical(method: dict[str, Any], model: str) -> None:
    """Everyone steps on the same bytes; prime, empty, scalar, four-dimensional and unused tensors,
    and running statistics, included."""
    run = train(experiment(model, method=method))
    assert run.error is None
    first = run.replicas[0].state.params
    for replica in run.replicas:
        assert torch.equal(replica.state.params, first)
    assert run.summary["payload_bytes_per_sync"] < 2 * len(first) + 50
    before, *_, last = run.rows("evals", "val_loss")
    assert last != before


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_the_same_experiment_gives_the_same_run(method: dict[str, Any]) -> None:
    """Law 10, whatever the order in which workers answer."""
    parts: dict[str, Any] = {"method": method, "cluster": cluster((2, 1))}
    one, other = (train(experiment(**parts), shuffle=n) for n in (1, 2))
    assert one.error is None
    assert_identical(one, other)


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_a_model_without_gradients_stays(method: dict[str, Any]) -> None:
    """All-zero gradients: finite payloads, and nothing moves."""
    lab = Lab(build(method), ZOO, 2, start=0.5)
    for _ in range(2):
        payloads = lab.round([torch.zeros(lab.layout.numel, dtype=torch.float64)] * 2)
        assert all(payload.is_finite() for payload in payloads)
    assert torch.equal(lab.params, torch.full_like(lab.params, 0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 50, -1])
@pytest.mark.parametrize("method", GATHERED, ids=ids)
def test_a_gradient_that_is_no_number_costs_one_round(
    method: dict[str, Any], bad: float, at: int
) -> None:
    """The payload is not finite, so it is refused; the worker's state is as if that gradient had
    never been, and it takes part again in the next round."""
    lab = Lab(build(method), ZOO, 2)
    gradients = draws(11, 3, 2, lab.layout.numel)
    lab.round(list(gradients[0]))
    kept = {name: slot.clone() for name, slot in lab.states[1].slots.items()}
    gradients[1, 1, at] = bad
    payloads = lab.round(list(gradients[1]))
    assert [payload.is_finite() for payload in payloads] == [True, False]
    for name, slot in kept.items():
        assert torch.equal(lab.states[1].slots[name], slot)
    payloads = lab.round(list(gradients[2]))
    assert all(payload.is_finite() for payload in payloads)
    assert torch.equal(lab.states[0].params, lab.states[1].params)
    assert lab.params.isfinite().all()


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_a_restored_replica_goes_on_as_if_nothing_had_been(method: dict[str, Any]) -> None:
    """All state is in what a replica saves: a fresh one that loads it sends the same bytes."""
    job = prepare(experiment(method=method))
    own = job.experiment.method

    def fresh() -> Replica:
        return Replica(job.replica(0), job.corpus.train)

    def rounds(replica: Replica, shared: Shared, count: int) -> list[bytes]:
        sent = []
        for _ in range(count):
            replica.local_step()
            payload = replica.send(0)
            sent.append(
                b"".join(
                    bytes(part)
                    for part in (payload.values, payload.indices, payload.scales)
                    if part is not None
                )
            )
            arrival = Arrival(0, payload, 0, replica.state.step)
            replica.receive(0, own.combine(shared, 0, [arrival]))
        return sent

    shared = Shared(job.layout, torch.zeros(job.layout.numel))
    own.begin_shared(shared)
    replica, other = fresh(), fresh()
    rounds(replica, shared, 3)
    other.load_state_dict(replica.state_dict())
    same = copy.deepcopy(shared)  # the coordinator's state goes on with the rounds, too
    assert rounds(replica, shared, 3) == rounds(other, same, 3)
    assert torch.equal(replica.state.params, other.state.params)


@pytest.mark.parametrize("method", ALL, ids=ids)
def test_one_worker_has_nobody_to_send_to(method: dict[str, Any]) -> None:
    """The payload is still encoded; nothing goes over the wire."""
    run = train(experiment(method=method, cluster=cluster((1,), (0.1,)), steps=4))
    assert run.error is None
    assert run.summary["payload_bytes_per_sync"] > 0
    assert run.summary["wire_bytes_total"] == 0


def wire(run: Run, collective: str) -> int:
    """Wire bytes of all rounds by the collective's formula."""
    total = 0
    for payload in run.rows("syncs", "payload_bytes"):
        workers = run.summary["workers"]
        share = workers - 1 if collective == "all_gather" else 2 * (workers - 1) / workers
        total += payload * share
    return round(total)


@pytest.mark.parametrize("method", ALL, ids=ids)
@pytest.mark.parametrize("workers", [(2,), (2, 2), (3, 2)])
def test_wire_bytes_follow_the_collective(method: dict[str, Any], workers: tuple[int, ...]) -> None:
    """Law 7: (p − 1)·payload for an all-gather, 2(p − 1)/p·payload for the ring of sparta."""
    parts = {"cluster": cluster(workers, [0.1] * len(workers)), "steps": 6}
    run = train(experiment("lab:build_zoo", method=method, **parts))
    assert run.error is None
    assert run.summary["wire_bytes_total"] == wire(run, build(method).collective)
