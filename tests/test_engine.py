"""The loop over rounds: which results reach whom and when, whatever order the host answers in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import (
    INSTANT,
    PLAIN,
    Run,
    assert_identical,
    by_worker,
    cluster,
    experiment,
    train,
)

from islands.engine import Interrupted
from islands.errors import RunError
from islands.job import prepare
from islands.plan import Apply, PlanOp, SendOut, Steps
from islands.replica import Replica

ABC = "helpers:build_abc"
PAIR = cluster((1, 1), (0.1, 0.1))
EVERY_STEP = {"every": 1, "windows": 1}
AVERAGING = {"name": "sgd", "lr": 1.0}
#: Three islands whose workers need 1, 2.3 and 0.7 s per step.
UNEQUAL = cluster((2, 1, 1), (1.0, 2.3, 0.7), "10 Mbit/s", "40 ms")


def method(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": f"helpers:{name}", **settings}


def stop_after(turns: int) -> Any:
    """Asked once per turn; says stop when that many turns have passed."""
    asked = iter(range(turns + 1))
    return lambda: next(asked) == turns


# --- rounds that wait for everyone


def test_a_due_round_at_the_end_is_carried_out() -> None:
    """H = 5 and 12 steps: rounds after 5, 10 and 12, and no step is left unsynchronised."""
    run = train(experiment(ABC, method=method("Drift", sync_every=5, outer=AVERAGING)))
    assert sorted(set(run.rows("syncs", "version", "step"))) == [(1, 5), (2, 10), (3, 12)]
    assert (run.summary["syncs"], run.summary["unsynced_steps"]) == (3, 0)
    assert run.summary["status"] == "done"
    # Workers 0 to 3 drift by 1 to 4 a step, and meet at their mean: 2.5 a step.
    assert {n: v.item() for n, v in run.parameters.items()} == {"a": -30, "b": -30, "c": -30}
    assert all(torch.equal(r.state.params, torch.full((3,), -30.0)) for r in run.replicas)


def test_three_overlapping_fragments_by_hand() -> None:
    """Fragment a: first 2, period 4, overlap 1; b: 3, 6, 6; c: 5, 5, 0; two workers that drift by
    d = 1 and 2 a step, so by 1.5 in the mean; outer SGD(1); a result overwrites the local value.

    a: sent at 2 (mean −3), received at 3; sent at 6 at −3 − 3d: −7.5; at 10 at −7.5 − 3d: −12;
       received at 11; at 12: −13.5.
    b: sent at 3: −4.5, received at 9, after sending −9d as measured from 0, which makes −18 when it
       lands at the end; then nothing is left to send.
    c: sent and received at 5: −7.5; at 10: −15; at 12: −18.
    """
    run = train(
        experiment(
            ABC,
            method=method("DriftFragments", outer=AVERAGING),
            cluster=PAIR,
            eval=EVERY_STEP,
        )
    )
    a = [0, 0, 0, -3, -3, -3, -3, -7.5, -7.5, -7.5, -7.5, -12, -13.5]
    b = [0] * 9 + [-4.5] * 3 + [-18]
    c = [0] * 5 + [-7.5] * 5 + [-15, -15, -18]
    expected = [x + 100 * y + 10_000 * z for x, y, z in zip(a, b, c, strict=True)]
    assert run.rows("evals", "step", "val_loss") == list(enumerate(expected))
    assert run.summary["syncs"] == 4 + 3 + 3
    for replica in run.replicas:  # fragments in their order: a, b, c
        assert replica.state.params.tolist() == [-13.5, -18, -18]
        assert replica.state.slots["anchor"].tolist() == [-13.5, -18, -18]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(
    "parts",
    [
        {"method": method("Fragments"), "model": "decoder", "steps": 24},
        {"method": method("EachArrival", sync_every=3), "model": "decoder", "cluster": UNEQUAL},
        {"method": method("EachArrivalLate", sync_every=3), "cluster": UNEQUAL, "steps": 20},
        {"method": "dense", "model": "helpers:build_batchnorm"},
        {"method": {"name": "diloco", "sync_every": 5}, "model": "helpers:build_dropout"},
    ],
    ids=["fragments", "each", "each-late", "dense-batchnorm", "diloco-dropout"],
)
def test_the_order_of_the_hosts_answers_changes_nothing(parts: dict[str, Any], order: int) -> None:
    """Law 10: tables, summary and parameters are those of the run that nobody shuffled."""
    job = prepare(experiment(**{"model": "helpers:build_float64", "eval": EVERY_STEP, **parts}))
    plain, shuffled = train(job), train(job, shuffle=order)
    assert plain.error is None
    assert_identical(plain, shuffled)


# --- rounds that close at each arrival


def each(**parts: Any) -> Run:
    settings = {"sync_every": 2, **parts.pop("method", {})}
    defaults = {"cluster": cluster((1, 1), (1.0, 2.5), **INSTANT), "steps": 4, "eval": EVERY_STEP}
    run = train(experiment(ABC, method=method("DriftEach", **settings), **{**defaults, **parts}))
    assert run.error is None
    return run


def scalar(loss: float) -> float:
    """The common value of a = b = c in a loss of ``helpers.Abc``."""
    return loss / 10_101


def test_arrivals_close_rounds_in_emulated_time_by_hand() -> None:
    """Steps of 1 s and 2.5 s, no network, a round per two steps, weight 2^−staleness.

    2 s: worker 0 brings 2, fresh: −2. 4 s: again: −4. 5 s: worker 1 brings 4, but two commits have
    passed since it began: −4 − 4/4 = −5. 10 s: it has adopted −5 and brings 4, fresh: −9.
    """
    run = each()
    assert run.rows("syncs", "worker", "version", "step", "ready_s", "done_s", "wait_s") == [
        (0, 1, 2, 2.0, 2.0, 0.0),
        (0, 2, 4, 4.0, 4.0, 0.0),
        (1, 1, 2, 5.0, 5.0, 0.0),
        (1, 2, 4, 10.0, 10.0, 0.0),
    ]
    assert {v.item() for v in run.parameters.values()} == {-9.0}
    assert [r.state.params.tolist() for r in run.replicas] == [[-4.0] * 3, [-9.0] * 3]
    assert (run.summary["syncs"], run.summary["unsynced_steps"]) == (4, 0)


def test_an_evaluation_sees_the_parameters_of_its_moment() -> None:
    """An evaluation is made when the last worker passes its step: at 2.5, 5, 7.5 and 10 s, after
    the arrivals up to then and before those to come."""
    rows = each().rows("evals", "step", "emulated_s", "val_loss")
    assert [(step, at, scalar(loss)) for step, at, loss in rows] == [
        (0, 0.0, 0.0),
        (1, 2.5, -2.0),
        (2, 5.0, -5.0),
        (3, 7.5, -5.0),
        (4, 10.0, -9.0),
    ]


def test_equal_moments_are_ordered_by_worker() -> None:
    """Equal speeds. 2 s: worker 0 makes −2, worker 1 (one late) −4; 4 s: −4 − 2/2 − 4/2 = −7."""
    run = each(cluster=cluster((1, 1), (1.0, 1.0), **INSTANT))
    assert run.rows("syncs", "worker", "done_s") == [(0, 2.0), (1, 2.0), (0, 4.0), (1, 4.0)]
    assert {v.item() for v in run.parameters.values()} == {-7.0}


def test_arrivals_wait_for_the_network() -> None:
    """One way of 0.25 s for the far worker: it is answered half a second after it sent."""
    slow = cluster((1, 1), (1.0, 1.0), "unlimited", "250 ms", INSTANT["lan"])
    run = each(cluster=slow, steps=2)
    assert run.rows("syncs", "worker", "ready_s", "done_s", "wait_s") == [
        (0, 2.0, 2.0, 0.0),
        (1, 2.0, 2.5, 0.5),
    ]


def test_arrivals_follow_the_clock_not_the_workers() -> None:
    """Four workers of three speeds: rounds close in the order in which payloads get there."""
    run = train(
        experiment(method=method("EachArrival", sync_every=3), cluster=UNEQUAL, model="decoder")
    )
    assert run.error is None
    rows = run.rows("syncs", "worker", "ready_s", "done_s")
    arrived = [ready + (done - ready) / 2 for _, ready, done in rows]  # up and down take as long
    assert all(x <= y + 0.05 for x, y in pairwise(arrived))
    assert [worker for worker, *_ in rows] != sorted(worker for worker, *_ in rows)
    assert run.summary["syncs"] == 4 * 4


def test_a_refused_worker_keeps_its_base() -> None:
    """Worker 1's first payload is NaN: it goes on from its own parameters, still measured from
    version 0. At 10 s it brings 8 over four steps, two commits late: −4 − 8/4 = −6."""
    run = each(method={"poison": ((1, 2),)})
    assert run.rows("syncs", "worker", "status") == [
        (0, "ok"),
        (0, "ok"),
        (1, "rejected"),
        (1, "ok"),
    ]
    assert {v.item() for v in run.parameters.values()} == {-6.0}


# --- what must not reach the shared model


def test_a_nan_payload_takes_one_worker_out_of_one_round() -> None:
    """Rejected, with an event; everyone steps on the others' mean; next round it is back."""
    poison = ((1, 3),)
    run = train(
        experiment(
            "helpers:build_averages",
            method=method("PoisonedDense", payload_dtype="fp64", poison=poison),
            optimizer={"name": "sgd", "lr": 0.1, **PLAIN},
        )
    )
    status = {(v, w): s for v, w, s in run.rows("syncs", "version", "worker", "status")}
    assert {key for key, s in status.items() if s == "rejected"} == {(3, 1)}
    assert {s for key, s in status.items() if key != (3, 1)} == {"ok"}
    assert (run.summary["rejected_payloads"], run.summary["syncs"]) == (1, 12)
    ((kind, subject, at),) = run.rows("events", "kind", "subject", "emulated_s")
    assert (kind, subject) == ("rejected", "worker 1")
    done = {(v, w): t for v, w, t in run.rows("syncs", "version", "worker", "done_s")}
    assert at == done[3, 1]
    job_means = means_of_batches(run, 12)
    w = 0.0
    for step in range(12):
        fit = [m for n, m in enumerate(job_means[step]) if (n, step + 1) not in poison]
        w -= 0.1 * sum(w - m for m in fit) / len(fit)
    assert run.parameters["w"].item() == pytest.approx(w, rel=1e-12)
    assert {r.state.params.item() for r in run.replicas} == {run.parameters["w"].item()}


def means_of_batches(run: Run, steps: int) -> list[list[float]]:
    """Mean token of every worker's batch, step by step."""
    return [[r.batch(s)[0].double().mean().item() for r in run.replicas] for s in range(steps)]


def drift(poison: tuple[tuple[int, int], ...]) -> Run:
    """Two workers drifting by 1 and 2 a step, rounds at 5, 10 and 12, Nesterov 0.7 / 0.9."""
    settings = method("PoisonedDrift", sync_every=5, payload_dtype="fp32", poison=poison)
    return train(experiment(ABC, method=settings, cluster=PAIR, eval={"every": 5, "windows": 1}))


def test_a_round_without_any_payload_moves_nothing() -> None:
    """All rejected at 10: parameters and outer momentum stay, and the next round goes on from both.

    Round 1: mean 7.5, x = −0.7 · 1.9 · 7.5. Round 3 measures seven steps from the same anchor:
    10.5, momentum 0.9 · 7.5 + 10.5.
    """
    run = drift(((0, 10), (1, 10)))
    x = -0.7 * 1.9 * 7.5
    last = x - 0.7 * (10.5 + 0.9 * (0.9 * 7.5 + 10.5))
    losses = [scalar(loss) for loss in run.rows("evals", "val_loss")]
    assert losses == pytest.approx([0, x, x, last], rel=1e-6)
    assert (run.summary["rejected_payloads"], run.summary["syncs"]) == (2, 3)
    assert run.summary["unsynced_steps"] == 0
    assert run.tables["events"].num_rows == 2


def test_steps_of_a_refused_last_round_are_unsynced() -> None:
    """All rejected at 12: two steps are in no committed round, and the summary says so."""
    run = drift(((0, 12), (1, 12)))
    assert (run.summary["status"], run.summary["unsynced_steps"]) == ("done", 2)


# --- runs that end early


def failing(**settings: Any) -> Run:
    return train(experiment(method=method("Failing", sync_every=5, **settings)))


def test_a_worker_that_raises_ends_the_run_with_its_name() -> None:
    """One message: worker, island, step (counted from 1, as in the tables) and cause."""
    run = failing()
    assert isinstance(run.error, RunError)
    message = str(run.error)
    assert message == "worker 2 (b) failed at step 8: ArithmeticError: out of numbers"


def test_a_failed_run_leaves_what_it_had() -> None:
    """Worker 2 raised in its 8th step: the first round and the steps before it are readable."""
    run = failing()
    assert run.summary["status"] == "failed"
    assert run.rows("syncs", "worker", "step", "status") == [(w, 5, "ok") for w in range(4)]
    assert run.rows("steps", "worker", "step")[:20] == [
        (w, s) for s in range(1, 6) for w in range(4)
    ]
    assert run.rows("evals", "step")[:2] == [0, 4]
    assert run.summary["steps"] == 5
    assert len(run.summary["parameters_sha256"]) == 64


def test_an_interrupted_run_leaves_what_it_had() -> None:
    """Asked to stop after two turns of H = 5: ten steps and two rounds are there, nothing else."""
    run = train(
        experiment(method={"name": "diloco", "sync_every": 5}, steps=40), stop=stop_after(2)
    )
    assert isinstance(run.error, Interrupted)
    assert (run.summary["status"], run.summary["steps"]) == ("interrupted", 10)
    assert set(run.rows("syncs", "step")) == {5, 10}
    assert run.summary["unsynced_steps"] == 0


def test_fragments_that_were_never_synchronised_are_unsynced() -> None:
    """Stopped after three steps, when fragment a was synchronised at 2 and b and c not at all:
    three steps are not in every part of the model."""
    run = train(
        experiment(ABC, method=method("DriftFragments", outer=AVERAGING), cluster=PAIR),
        stop=stop_after(5),
    )
    assert isinstance(run.error, Interrupted)
    assert set(run.rows("syncs", "fragment", "step")) == {(0, 2)}
    assert run.summary["steps"] == 3
    assert run.summary["unsynced_steps"] == 3


def test_control_c_in_this_process_leaves_what_it_had() -> None:
    """A KeyboardInterrupt in the middle of a step goes on to the caller, after the results."""
    run = failing(interrupt=True)
    assert isinstance(run.error, KeyboardInterrupt)
    assert run.summary["status"] == "interrupted"
    assert run.rows("syncs", "worker", "step") == [(w, 5) for w in range(4)]


def test_an_interrupted_timed_run_leaves_what_it_had() -> None:
    """The same where rounds close by the clock."""
    run = train(
        experiment(method=method("EachArrival", sync_every=2), cluster=UNEQUAL, steps=40),
        stop=stop_after(30),
    )
    assert isinstance(run.error, Interrupted)
    assert run.summary["status"] == "interrupted"
    assert run.tables["syncs"].num_rows > 0
    assert 0 < run.summary["steps"] < 40


# --- replicas


def pieces(job: Any, plans: list[list[PlanOp]]) -> Replica:
    """Worker 1 after these plans, while worker 0 of the same process takes steps in between."""
    other, replica = (Replica(job.replica(w), job.corpus.train) for w in (0, 1))
    for plan in plans:
        assert replica.run(plan, []).failure is None
        assert other.run([Steps(1)], []).failure is None
    return replica


def test_cutting_a_plan_changes_nothing() -> None:
    """Dropout draws by (seed, worker, step): ten steps at once or one by one, beside others."""
    job = prepare(experiment("helpers:build_dropout"))
    whole = pieces(job, [[Steps(10)]])
    cut = pieces(job, [[Steps(3)], [Steps(1), SendOut(0), Steps(1)], *[[Steps(1)]] * 5])
    assert torch.equal(whole.state.params, cut.state.params)


@pytest.mark.parametrize("name", ["dense", "diloco", "local_sgd"])
@pytest.mark.parametrize("flying", [False, True], ids=["between rounds", "result in flight"])
def test_a_replica_is_saved_and_restored_whole(name: str, flying: bool) -> None:
    """A fresh replica that loads the state goes on exactly like the one that it was taken from,
    also if a result is still to come: moments, anchor, warm-up, data and buffers are all there."""
    job = prepare(
        experiment(
            "helpers:build_batchnorm",
            method={"name": name},
            optimizer={"warmup": 8, "lr": 0.05},
        )
    )
    first, second = (Replica(job.replica(1), job.corpus.train) for _ in range(2))
    shared = job.experiment.method
    payload = first.run([Steps(1), SendOut(0)], []).payloads[0]
    update = update_of(shared, job, payload)
    before: list[PlanOp] = [Apply(0, 0), Steps(3), *([SendOut(0)] if flying else [])]
    assert first.run(before, [update]).failure is None
    second.load_state_dict(first.state_dict())
    rest: list[PlanOp] = [*([Apply(0, 0)] if flying else []), Steps(2), Apply(0, 0), Steps(2)]
    one, two = first.run(rest, [update]), second.run(rest, [update])
    assert one.failure is None
    assert one.losses == two.losses
    assert torch.equal(first.state.params, second.state.params)
    for key, value in first.flat.model.state_dict().items():
        assert torch.equal(second.flat.model.state_dict()[key], value), key


def update_of(shared_method: Any, job: Any, payload: Any) -> Any:
    """What a round with this one payload hands back."""
    from islands.methods import Arrival, Shared

    shared = Shared(job.layout, torch.zeros(job.layout.numel))
    shared_method.begin_shared(shared)
    return shared_method.combine(shared, 0, [Arrival(1, payload, 0, 1)])


def test_the_trace_of_a_worker_is_its_program() -> None:
    """Compute, send, receive, evaluation and end, in this order, in the trace table."""
    run = train(experiment(ABC, method=method("Drift", sync_every=5), eval={"every": 0}))
    ops = [(row["op"], row["step"], row["count"]) for row in by_worker(run) if row["worker"] == 1]
    assert ops == [
        ("compute", 0, 5),
        ("send", 5, None),
        ("receive", None, None),
        ("compute", 5, 5),
        ("send", 10, None),
        ("receive", None, None),
        ("compute", 10, 2),
        ("send", 12, None),
        ("receive", None, None),
        ("mark", 12, None),
        ("end", None, None),
    ]
