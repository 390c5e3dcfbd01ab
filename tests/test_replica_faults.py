"""What a replica does with the operations that only faults cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import experiment

from islands.compression import Update
from islands.job import Job, prepare
from islands.methods import METHODS, Arrival, Shared
from islands.plan import Answer, Apply, Lost, PlanOp, Reset, SendOut, Snapshot, Steps
from islands.replica import Replica, master_bytes


def job_of(method: Any, model: str = "helpers:build_float64", **parts: Any) -> Job:
    common: dict[str, Any] = {"optimizer": {"name": "adamw", "lr": 0.02}, "steps": 40}
    return prepare(experiment(model, method=method, **{**common, **parts}))


def replica_of(job: Job, worker: int = 0) -> Replica:
    return Replica(replace(job.replica(worker), may_lose=True), job.corpus.train)


def do(replica: Replica, *plan: PlanOp, updates: tuple[Update | None, ...] = ()) -> Answer:
    answer = replica.run(plan, updates)
    assert answer.failure is None
    return answer


def update_of(job: Job, replica: Replica, answer: Answer) -> Update:
    """What a round makes of this payload alone."""
    shared = Shared(job.layout, replica.state.params.clone(), seed=job.experiment.seed)
    method = job.experiment.method
    method.begin_shared(shared)
    step = replica.state.step
    update = method.combine(shared, 0, [Arrival(0, answer.payloads[0], 0, step)])
    return replace(update, buffers=answer.payloads[0].buffers)


def flat(saved: Any, path: str = "") -> dict[str, Any]:
    """A saved state as leaves that can be compared."""
    if isinstance(saved, dict):
        return {k: v for key, part in saved.items() for k, v in flat(part, f"{path}.{key}").items()}
    if isinstance(saved, torch.Tensor):
        return {path: saved.tolist()}
    if saved is None or isinstance(saved, int):
        return {path: saved}
    return {path: (saved.floats.tolist(), saved.integers.tolist())}


@pytest.mark.parametrize("name", ["diloco", "local_sgd"])
def test_only_measuring_anew_keeps_the_parameters(name: str) -> None:
    """The anchor becomes the update; parameters, optimizer and running statistics stay."""
    job = job_of(name, "helpers:build_batchnorm")
    one, other = replica_of(job), replica_of(job, 1)
    update = update_of(job, other, do(other, Steps(3), SendOut(0)))
    do(one, Steps(3), SendOut(0))
    before = flat(one.state_dict())
    do(one, Apply(0, 0, adopt=False), updates=(update,))
    after = flat(one.state_dict())
    assert after.pop(".slots.anchor") != before.pop(".slots.anchor")
    assert after == before
    do(one, Apply(0, 0), updates=(update,))
    assert torch.equal(one.state.params, one.state.slots["anchor"])
    assert flat(one.state_dict())[".buffers"] == flat(other.state_dict())[".buffers"]


@pytest.mark.parametrize("name", ["dense", "topk", "demo", "signsgd"])
def test_replicas_that_must_stay_equal_adopt_all_the_same(name: str) -> None:
    """Parameters and running statistics: a dropped worker of a per-step method stays in step."""
    job = job_of(name, "helpers:build_batchnorm")
    adopting, measuring, other = replica_of(job), replica_of(job), replica_of(job, 1)
    update = update_of(job, other, do(other, Steps(1), SendOut(0)))
    for replica, adopt in ((adopting, True), (measuring, False)):
        do(replica, Steps(1), SendOut(0), Apply(0, 0, adopt), updates=(update,))
    assert flat(adopting.state_dict()) == flat(measuring.state_dict())
    assert flat(measuring.state_dict())[".buffers"] == flat(other.state_dict())[".buffers"]


@pytest.mark.parametrize("adopt", [True, False])
def test_a_round_that_committed_nothing_changes_nothing(adopt: bool) -> None:
    """Neither parameters nor anchor."""
    replica = replica_of(job_of("diloco"))
    do(replica, Steps(2), SendOut(0))
    before = flat(replica.state_dict())
    do(replica, Apply(0, 0, adopt), updates=(None,))
    assert flat(replica.state_dict()) == before


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_lost_payload_changes_nothing_but_the_residual(name: str) -> None:
    """Sent and lost is not sent, for what counts in the next step; with a whole period of overlap
    the next phase has begun all the same."""
    job = job_of(name)
    sent, kept = replica_of(job), replica_of(job)
    do(sent, Steps(1), SendOut(0), Lost(0))
    do(kept, Steps(1))
    method = job.experiment.method
    found, expected = flat(sent.state_dict()), flat(kept.state_dict())
    uses = getattr(method, "error_feedback", True)
    folded = {f".slots.{slot}" for slot in method.feedback if uses}
    if getattr(method, "lag", 0):
        assert found.pop(".slots.anchor") == kept.state.params.tolist()
        del expected[".slots.anchor"]
        found.pop(".slots.fresh", None)
    assert set(found) == set(expected) | folded
    assert {key: found[key] for key in expected if key not in folded} == expected
    for slot in folded:  # from zero, whatever was folded in is the gradient
        assert found[slot] == sent.state.grad.tolist()


@pytest.mark.parametrize("model", ["helpers:build_float64", "helpers:build_batchnorm"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_worker_comes_back_fresh(name: str, model: str) -> None:
    """After a reset it is a new replica with the parameters that it was given, at the step it was
    told: no momentum, no residual, no optimizer state; and it goes on as that one does."""
    job = job_of(name, model)
    old, giver, new = replica_of(job), replica_of(job, 1), replica_of(job)
    answer = do(old, Steps(3), SendOut(0), Steps(2))
    do(old, Apply(0, 0), updates=(update_of(job, old, answer),))
    parameters, buffers, _ = do(giver, Steps(4), Snapshot()).snapshots[0]
    fmt = "fp64" if giver.state.params.dtype == torch.float64 else "fp32"
    do(old, Reset(0, 7), updates=(Update(parameters, fmt, buffers),))
    assert master_bytes(old.state.params).tobytes() == parameters.tobytes()

    new.state.params.copy_(giver.method.shared_params(giver.state))
    if buffers is not None:
        new.buffers.unpack(buffers)
    new.state.step, new._step = 7, 6
    new.method.begin(new.state, new.context)
    assert flat(old.state_dict()) == flat(new.state_dict())
    answers = [do(replica, Steps(3), SendOut(0)) for replica in (old, new)]
    assert answers[0].losses == answers[1].losses
    assert flat(old.state_dict()) == flat(new.state_dict())


def test_statistics_that_nobody_sent_are_the_first_ones() -> None:
    """A worker that comes back before any round has closed."""
    job = job_of("diloco", "helpers:build_batchnorm")
    replica, new = replica_of(job), replica_of(job)
    do(replica, Steps(3))
    first = flat(new.state_dict())
    assert flat(replica.state_dict())[".buffers"] != first[".buffers"]
    parameters = Update(master_bytes(new.state.params), "fp32")
    do(replica, Reset(0, 0), updates=(parameters,))
    assert flat(replica.state_dict()) == first


def test_a_method_that_fails_over_a_loss_or_a_return_says_so() -> None:
    """The failure names what was done."""
    job = job_of("diloco")
    replica = replica_of(job)
    object.__setattr__(replica, "method", None)
    assert "loss of fragment 2 after step 0" in str(replica.run([Lost(2)], []).failure)
    assert "return after step 5" in str(replica.run([Reset(0, 5)], [None]).failure)
