"""Delayed, eager, CO2 and SlowMo: courses that can be followed by hand, and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import PLAIN, PROSE, Run, cluster, experiment, train
from overlapping import WORKERS, follow, halving, nesterov

from islands.errors import InputError

ONE = cluster((1,), (0.1,))
AVERAGING = {"name": "sgd", "lr": 1.0}


def course_of(run: Run) -> list[float]:
    """The common value of a, b and c after every step."""
    return [loss / 10_101 for loss in run.rows("evals", "val_loss")]


# --- delayed


@pytest.mark.parametrize("steps", [4, 9, 12, 14])
def test_delayed_is_streaming_with_a_whole_period(steps: int) -> None:
    """Result of round r after round r + 1; phases are measured from where they began."""
    run = halving("HalvingDelayed", steps, sync_every=4)
    course, ends = follow(
        first=4, period=4, overlap=4, alpha=0, steps=steps, move=nesterov(0.7, 0.9)
    )
    assert course_of(run) == pytest.approx(course, rel=1e-9)
    assert [r.state.params[0].item() for r in run.replicas] == pytest.approx(ends)


def test_delayed_by_hand() -> None:
    """x ← x/2 − d with d = 1, 2; outer SGD(1); H = 2.

    After 2: −1.5 and −3, mean 2.25; nothing has come yet. After 4: −1.875 and −3.75, measured from
    −1.5 and −3: mean 0.5625; then the first result, −2.25, is adopted. After 6: −2.0625 and
    −3.5625, measured from −2.25: mean 0.5625; then outer −2.8125. The end lands the rest: −3.375.
    """
    run = halving("HalvingDelayed", 6, sync_every=2, outer=AVERAGING)
    assert course_of(run) == pytest.approx([0, 0, 0, 0, -2.25, -2.25, -3.375])
    assert all(r.state.params[0].item() == pytest.approx(-3.375) for r in run.replicas)


# --- eager


def eager(
    period: int, steps: int, make: Callable[[], Callable[[float], float]], workers: int = WORKERS
) -> list[float]:
    """The mean outer value after each step: the paper's formula, worker by worker. A pseudo-
    gradient of one's own that was not counted when it was sent counts with the others'."""
    local, begun, outer = [0.0] * workers, [0.0] * workers, [0.0] * workers
    moves = [make() for _ in range(workers)]
    last: list[float] = []  # what was sent a round ago
    counted = [False] * workers
    course = [0.0]

    def result(fresh: list[float] | None) -> None:
        for m in range(workers):
            others = sum(last[j] for j in range(workers) if j != m)
            own = 0.0 if counted[m] else last[m]
            new = 0.0 if fresh is None else fresh[m]
            outer[m] += moves[m]((new + own + others) / workers)
            counted[m] = fresh is not None
            local[m] = begun[m] = outer[m]

    for step in range(1, steps + 1):
        local[:] = [x / 2 - (m + 1) for m, x in enumerate(local)]
        if step % period == 0:
            fresh = [begun[m] - local[m] for m in range(workers)]
            begun[:] = local
            if last:
                result(fresh)
            last = fresh
        if step == steps:
            assert step % period == 0
            result(None)
        course.append(sum(outer) / workers)
    return course


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9), (0.3, 0.5)])
def test_eager_by_the_papers_formula(lr: float, momentum: float) -> None:
    """Own term fresh, the others' of the round before; outer state per worker."""
    outer = {"name": "nesterov", "lr": lr, "momentum": momentum}
    run = halving("HalvingEager", 12, sync_every=3, outer=outer)
    course = eager(3, 12, lambda: nesterov(lr, momentum))
    assert course_of(run) == pytest.approx(course, rel=1e-9)
    assert course[3] == 0 != course[6]


def test_eager_workers_differ_and_their_state_is_their_own() -> None:
    """Outer parameters and momentum are in each worker's state; the model is the outers' mean."""
    run = halving("HalvingEager", 9, sync_every=3)
    slots = [r.state.slots for r in run.replicas]
    assert not torch.equal(slots[0]["outer"], slots[1]["outer"])
    assert not torch.equal(slots[0]["outer.buffer"], slots[1]["outer.buffer"])
    mean = (slots[0]["outer"] + slots[1]["outer"]) / 2
    assert run.parameters["a"].item() == pytest.approx(mean[0].item())


def test_eager_counts_every_pseudo_gradient_once() -> None:
    """Outer SGD(1), inner steps that do not depend on where a worker is: after the last landing the
    outer value is everyone's mean movement, 12 steps of −1.5."""
    method = {"name": "helpers:DriftEager", "sync_every": 3, "payload_dtype": "fp64"}
    run = train(
        experiment(
            "overlapping:build_abc64",
            method={**method, "outer": AVERAGING},
            cluster=cluster((1, 1)),
        )
    )
    assert run.error is None
    assert {r.state.slots["outer"][0].item() for r in run.replicas} == {-18.0}


def test_eager_leaves_out_who_was_refused() -> None:
    """Worker 1's second payload is NaN: its share of that round is nothing, and it goes on with
    finite parameters."""
    method = {"name": "helpers:PoisonedEager", "sync_every": 3, "poison": ((1, 6),)}
    run = train(experiment("helpers:build_averages", method=method))
    assert run.error is None
    assert run.summary["rejected_payloads"] == 1
    assert all(r.state.slots["outer"].isfinite().all() for r in run.replicas)


# --- slowmo


def slow(
    period: int, steps: int, beta: float, alpha: float, rate: Callable[[int], float]
) -> list[float]:
    """Wang et al.'s Algorithm 1 for one scalar: the value after each step."""
    x, u, local = 0.0, 0.0, [0.0] * WORKERS
    course = [0.0]
    for step in range(1, steps + 1):
        local = [v / 2 - (m + 1) for m, v in enumerate(local)]
        if step % period == 0:
            gamma = rate(step - 1)
            u = beta * u + (x - sum(local) / WORKERS) / gamma
            x -= alpha * gamma * u
            local = [x] * WORKERS
        course.append(x)
    return course


@pytest.mark.parametrize(("beta", "alpha"), [(0.0, 1.0), (0.7, 1.0), (0.5, 0.8)])
def test_slowmo_is_its_papers_algorithm(beta: float, alpha: float) -> None:
    """The momentum is one of gradients: the default schedule's rates (warm-up, then a cosine) enter
    with each round's own."""
    run = halving("HalvingSlowMo", 12, sync_every=3, slow_momentum=beta, slow_lr=alpha)
    rate = run.replicas[0].optimizer.rate
    assert len({rate.at(s) for s in (2, 5, 8, 11)}) == 4
    assert course_of(run) == pytest.approx(slow(3, 12, beta, alpha, rate.at), rel=1e-9)


def test_slowmo_without_momentum_is_local_sgd() -> None:
    """β = 0, α = 1: plain averaging, and the same bytes."""
    runs = [
        train(experiment("helpers:build_float64", method={**m, "sync_every": 4}))
        for m in ({"name": "slowmo", "slow_momentum": 0.0}, {"name": "local_sgd"})
    ]
    for name, value in runs[0].parameters.items():
        assert torch.allclose(value, runs[1].parameters[name], rtol=1e-12, atol=1e-14)
    assert runs[0].rows("syncs", "payload_bytes") == runs[1].rows("syncs", "payload_bytes")


# --- co2


def hidden(
    steps: int, period: int, beta: float, penalty: float | None, clip: float | None
) -> list[float]:
    """Three equal scalars under CO2: the value after each step of a run of whole periods."""
    x, u, moved, most = 0.0, 0.0, 0.0, 0.0
    local, begun = [0.0] * WORKERS, [0.0] * WORKERS
    flying: list[float] = []
    course = [0.0]

    def land() -> None:
        nonlocal x, u, moved, most
        gap = penalty or (1 + moved / most if most else 1.0)
        u = beta * u + flying.pop(0) / gap
        if clip is not None:
            u = max(-clip, min(clip, u))
        x -= u
        moved = abs(u)
        most = max(most, moved)
        local[:] = begun[:] = [x] * WORKERS

    for step in range(1, steps + 1):
        local[:] = [v / 2 - (m + 1) for m, v in enumerate(local)]
        if step % period == 0:
            flying.append(sum(begun[m] - local[m] for m in range(WORKERS)) / WORKERS)
            begun[:] = local
            if len(flying) > 1:
                land()
        if step == steps:
            land()
        course.append(x)
    return course


@pytest.mark.parametrize("penalty", [None, 1.0, 1.5])
@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_co2_by_hand(penalty: float | None, clip: float | None, beta: float) -> None:
    """A momentum of averages that come one round late, each over the staleness gap, clipped."""
    run = halving("HalvingCO2", 12, sync_every=3, penalty=penalty, clip=clip, slow_momentum=beta)
    assert course_of(run) == pytest.approx(hidden(12, 3, beta, penalty, clip), rel=1e-9)


def test_penalty_and_clip_matter() -> None:
    """They change the course, so neither setting is one that nobody reads."""
    courses = [hidden(12, 3, 0.5, penalty, clip) for penalty in (None, 1.0) for clip in (None, 0.8)]
    assert len({tuple(c) for c in courses}) == 4


@pytest.mark.parametrize(("setting", "value"), [("penalty", 0.5), ("clip", 0.0), ("clip", -1.0)])
def test_co2_refuses_what_makes_no_sense(setting: str, value: float) -> None:
    """A penalty below 1 would be a reward."""
    with pytest.raises(InputError, match=rf"^method.{setting}: "):
        experiment(method={"name": "co2", setting: value})


# --- all of them


@pytest.mark.parametrize("name", ["delayed", "eager_diloco", "co2", "slowmo"])
def test_bytes_are_those_of_local_sgd(name: str) -> None:
    """The same payloads in the same rounds and the same bytes on the wire, and, over a link that
    one round is enough for, no waiting where a round is overlapped but for the last one."""
    own, plain = (
        train(experiment(method={"name": n, "sync_every": 5}, steps=20, cluster=PAIR))
        for n in (name, "local_sgd")
    )
    assert own.error is None
    for column in ("payload_bytes", "step"):
        assert sorted(own.rows("syncs", column)) == sorted(plain.rows("syncs", column))
    assert own.summary["wire_bytes_total"] == plain.summary["wire_bytes_total"]
    waits = [w for v, w in own.rows("syncs", "version", "wait_s") if v < 4]
    assert (max(waits) == 0) == (name != "slowmo")


PAIR = cluster((1, 1), (0.1, 0.1))


@pytest.mark.parametrize("name", ["delayed", "eager_diloco"])
@pytest.mark.parametrize("sync_every", [1, 4])
def test_one_worker_is_plain_training(name: str, sync_every: int) -> None:
    """Law 2 with a round of overlap: alone, with outer SGD(1), the last landing brings the outer
    value to where the inner steps alone lead. (They do not depend on where the worker stands: a
    result that is one round old takes it back by a round.)"""
    method = {"sync_every": sync_every, "outer": AVERAGING, "payload_dtype": "fp64"}
    run = train(
        experiment(
            "overlapping:build_abc64",
            method={"name": f"helpers:Drift{name.split('_')[0].title()}", **method},
            cluster=ONE,
            optimizer=PLAIN,
        )
    )
    assert run.error is None
    assert run.parameters["b"].item() == -12.0


@pytest.mark.parametrize("name", ["delayed", "eager_diloco", "co2", "slowmo"])
@pytest.mark.parametrize("settings", [{}, {"prune": 0.5}, {"weights": "shard"}])
def test_they_train(name: str, settings: dict[str, Any]) -> None:
    """With gentle outer steps the decoder's loss falls, with everything that they inherit."""
    gentle = {"outer": {"lr": 0.3, "momentum": 0.3}} if "outer" in outer_settings(name) else {}
    run = train(
        experiment(
            method={"name": name, "sync_every": 4, **gentle, **settings},
            steps=80,
            optimizer={"lr": 0.01},
            data={"name": PROSE, "shards": "contiguous"},
        )
    )
    assert run.error is None
    losses = run.rows("evals", "val_loss")
    assert losses[-1] < losses[0] - 0.5


def outer_settings(name: str) -> set[str]:
    from islands.methods import METHODS

    return set(METHODS[name].model_fields)
