"""Whole runs under faults: what each worker's part in a round becomes, and what that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import islands
from islands.config import Experiment
from islands.errors import InputError
from islands.job import prepare
from islands.retime import retime
from tests.helpers import INSTANT, PLAIN, Run, assert_identical, cluster, experiment, train

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"name": "dense"},
    "topk": {"name": "topk", "ratio": 4.0},
    "demo": {"name": "demo"},
    "signsgd": {"name": "signsgd"},
    "sparta": {"name": "sparta"},
    "diloco": {"name": "diloco", "sync_every": 3},
    "local_sgd": {"name": "local_sgd", "sync_every": 2},
    "pruned": {"name": "diloco", "sync_every": 2, "prune": 0.5},
    "fragments": {"name": "tests.helpers:Fragments", "sync_every": 4},
    "streaming": {
        "name": "streaming_diloco",
        "sync_every": 4,
        "fragments": 2,
        "overlap": 1,
        "alpha": 0.5,
        "payload_dtype": "e3m0",
        "error_feedback": True,
    },
    "delayed": {"name": "delayed", "sync_every": 3, "outer": {"lr": 0.3, "momentum": 0.3}},
    "eager": {"name": "eager_diloco", "sync_every": 3, "outer": {"lr": 0.3, "momentum": 0.3}},
    "slowmo": {"name": "slowmo", "sync_every": 3},
    "co2": {"name": "co2", "sync_every": 3},
}
FATES = ("ok", "late", "dropped", "rejected", "absent")


def faulty(method: Mapping[str, Any] | str, *faults: Any, **parts: Any) -> Experiment:
    """Twelve steps of four workers on two islands."""
    chosen = METHODS[method] if isinstance(method, str) else method
    return experiment(method=chosen, faults=list(faults), **parts)


def must_add_up(run: Run, workers: int) -> None:
    """Laws 7 to 9 for one run."""
    rounds: dict[tuple[int, int], Counter[str]] = {}
    for fragment, version, status in run.rows("syncs", "fragment", "version", "status"):
        rounds.setdefault((fragment, version), Counter())[status] += 1
    for key, fates in rounds.items():
        assert sum(fates.values()) == workers, (key, fates)
        assert set(fates) <= set(FATES)
    total = sum(rounds.values(), Counter())
    assert {fate: total[fate] for fate in FATES} == run.summary["contributions"]
    by_link: Counter[str] = Counter()
    for link, size in run.rows("transfers", "link", "bytes"):
        by_link[link] += size
    for name, link in run.summary["links"].items():
        assert link["bytes"] == by_link[name]
    for clock in run.clocks:
        waits = clock.compute_s + clock.wait_s + clock.away_s
        assert waits == pytest.approx(clock.clock_s, rel=1e-9, abs=1e-12)
        assert sum(clock[3:8]) == pytest.approx(clock.wait_s, rel=1e-9, abs=1e-9)


# ------------------------------------------------------------------------------------------ drops


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("direction", ["both", "up", "down"])
def test_drops_add_up_for_every_method(method: str, direction: str) -> None:
    """Half of all contributions are lost; every round accounts for every worker."""
    drop = {"kind": "drop", "probability": 0.5, "direction": direction}
    run = train(faulty(method, drop))
    assert run.error is None
    must_add_up(run, 4)
    dropped = run.summary["dropped_syncs"]
    assert (dropped == 0) == (direction == "down")
    assert (run.summary["wasted_bytes"] > 0) == (direction != "down")
    assert run.summary["final_val_loss"] < 10


@pytest.mark.parametrize("method", ["dense", "topk", "demo", "signsgd"])
def test_replicas_of_per_step_methods_stay_equal_under_drops(method: str) -> None:
    """A dropped worker receives every update: only its contribution is missing."""
    run = train(faulty(method, {"kind": "drop", "probability": 0.5}))
    first, *others = (replica.flat.params for replica in run.replicas)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("method", ["diloco", "local_sgd", "dense", "topk", "fragments"])
def test_a_round_without_anything_changes_nothing(method: str) -> None:
    """With everything lost neither parameters nor outer momentum move."""
    one = faulty(method, {"kind": "drop", "probability": 1.0}, eval={"every": 0, "windows": 8})
    job = prepare(one)
    run = train(job)
    assert run.summary["contributions"]["ok"] == 0
    assert {row[3] for row in run.rows("syncs", "step", "worker", "version", "status")} == {
        "dropped"
    }
    none = train(faulty(method, {"kind": "drop", "probability": 1.0}, steps=3))
    assert run.summary["parameters_sha256"] == none.summary["parameters_sha256"]
    assert run.summary["unsynced_steps"] == 12


def test_drops_replay_and_do_not_depend_on_the_host() -> None:
    """The same seed gives the same run in any order of answers; another seed another one."""
    one = faulty("diloco", {"kind": "drop", "probability": 0.5})
    run = train(one)
    assert_identical(run, train(one, shuffle=7))
    other = train(one.model_copy(update={"seed": 1}))
    assert run.rows("syncs", "status") != other.rows("syncs", "status")


def test_a_dropped_worker_measures_from_the_current_value() -> None:
    """DiLoCo with outer SGD(1), two workers, a scalar's worth of algebra: with everything of
    worker 1 lost on the way down it keeps its own parameters, and its anchor is the shared value.
    """
    method = {"name": "local_sgd", "sync_every": 1, "payload_dtype": "fp64"}
    drop = {"kind": "drop", "probability": 1.0, "direction": "down", "worker": 1}
    parts = {
        "cluster": cluster((1, 1), **INSTANT),
        "model": "tests.helpers:build_float64",
        "optimizer": {"name": "sgd", "lr": 0.1, **PLAIN},
        "steps": 3,
        "method": method,
    }
    run = train(experiment(faults=[drop], **parts))
    kept, anchor = run.replicas[1].state.params, run.replicas[1].state.slots["anchor"]
    shared = run.replicas[0].state.params
    assert torch.equal(anchor, shared)
    assert not torch.equal(kept, shared)
    old = train(experiment(faults=[{**drop, "anchor": "last_received"}], **parts))
    start = train(experiment(**{**parts, "steps": 1}, faults=[]))
    assert not torch.equal(old.replicas[1].state.slots["anchor"], old.replicas[0].state.params)
    assert start.error is None


# ------------------------------------------------------------------------------- members by step


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize(
    "replicas", [[[0, 2], [6, 4]], [[0, 4], [4, 1]], [[0, 1], [3, 3], [7, 2], [9, 4]]]
)
def test_replica_schedules_add_up_for_every_method(method: str, replicas: list[list[int]]) -> None:
    """Workers come and go; steps, rounds, clocks and links all account for it."""
    run = train(faulty(method, replicas=replicas))
    assert run.error is None
    must_add_up(run, 4)
    alive = dict(replicas)
    expected = []
    count = 0
    for step in range(12):
        count = alive.get(step, count)
        expected += [(step + 1, worker) for worker in range(count)]
    assert run.rows("steps", "step", "worker") == expected
    assert run.summary["tokens"] == len(expected) * prepare(faulty(method)).tokens_per_step


@pytest.mark.parametrize("method", ["dense", "topk", "demo", "signsgd"])
def test_who_joins_becomes_equal(method: str) -> None:
    """Replicas that must stay equal are equal again at the end, optimizer included."""
    run = train(faulty(method, replicas=[[0, 2], [5, 4]]))
    first, *others = (replica.flat.params for replica in run.replicas)
    assert all(torch.equal(first, other) for other in others)


def test_a_joiner_starts_when_the_others_are_there() -> None:
    """Its first step begins when the last of them has done the step before."""
    run = train(faulty("diloco", {"kind": "join", "worker": 3, "step": 6}))
    rows = run.rows("steps", "worker", "step", "start_s", "end_s")
    ends = [end for worker, step, _, end in rows if step == 6 and worker != 3]
    start = next(start for worker, step, start, _ in rows if worker == 3 and step == 7)
    assert start >= max(ends)
    assert run.clocks[3].away_s == pytest.approx(start)


def test_leaving_and_coming_back() -> None:
    """An island leaves after step 3 and is back after step 8."""
    leave = {"kind": "leave", "island": "b", "step": 3}
    join = {"kind": "join", "island": "b", "step": 8}
    run = train(faulty("dense", leave, join))
    must_add_up(run, 4)
    steps = [step for worker, step in run.rows("steps", "worker", "step") if worker == 2]
    assert steps == [1, 2, 3, 9, 10, 11, 12]


def test_nobody_left_ends_the_run_with_its_results() -> None:
    """Everyone leaves: exit by RunError, complete up to there."""
    run = train(faulty("diloco", {"kind": "leave", "step": 6}))
    assert "nobody is left after step 6" in str(run.error)
    assert max(run.rows("steps", "step")) == 6
    must_add_up(run, 4)


# ------------------------------------------------------------------------------------ bad payloads


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("how", ["nan", "inf", "scale", "flip", "truncate", "bits"])
def test_bad_payloads_are_refused_or_passed_on(method: str, how: str) -> None:
    """A wrong checksum or a number that is none is refused; wrong but possible numbers pass."""
    run = train(faulty(method, {"kind": "corrupt", "how": how, "worker": 1}))
    assert run.error is None
    must_add_up(run, 4)
    refused = run.summary["rejected_payloads"]
    if how in ("nan", "inf", "truncate", "bits"):
        assert refused == run.summary["syncs"]
        assert {
            row[0] for row in run.rows("events", "kind", "subject") if row[1] == "worker 1"
        } == {"rejected"}
    else:
        assert refused == 0
    assert run.summary["final_val_loss"] is not None


def test_a_median_does_not_follow_one_bad_worker() -> None:
    """Scaled by a million, one of four: the mean is lost, the median and trimmed mean are not."""
    bad = {"kind": "corrupt", "how": "scale", "factor": 1e6, "worker": 1}
    losses = {}
    for policy in ({"mean": "mean"}, {"mean": "median"}, {"mean": "trimmed_mean", "trim": 0.25}):
        losses[policy["mean"]] = train(faulty("diloco", bad, policy=policy)).summary[
            "final_val_loss"
        ]
    good = train(faulty("diloco")).summary["final_val_loss"]
    assert losses["mean"] is None or losses["mean"] > 2 * good
    assert losses["median"] < 1.1 * good
    assert losses["trimmed_mean"] < 1.1 * good


# ------------------------------------------------------------------------------ quorum, deadline


SLOW = {"kind": "slow", "factor": 3.0, "worker": 3}


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize(
    "policy", [{"quorum": 3}, {"deadline": "50 ms"}, {"deadline": "1.5 x median"}]
)
def test_rounds_by_the_clock_add_up_for_every_method(method: str, policy: dict[str, Any]) -> None:
    """A slow worker is late; nothing hangs, and every round accounts for every worker."""
    run = train(faulty(method, SLOW, policy=policy))
    assert run.error is None
    must_add_up(run, 4)
    assert run.summary["contributions"]["late"] > 0


def test_late_results_follow_the_rule() -> None:
    """Dropped ones are wasted, others count in the next round, fully or discounted."""
    runs = {
        late: train(faulty("diloco", SLOW, policy={"quorum": 3, "late": late}))
        for late in ("drop", "apply_next", "discount")
    }
    for run in runs.values():
        assert run.error is None
        must_add_up(run, 4)
        assert run.summary["contributions"]["late"] > 0
    wasted = {late: run.summary["wasted_bytes"] for late, run in runs.items()}
    assert wasted["drop"] > wasted["apply_next"] == wasted["discount"]
    assert len({run.summary["parameters_sha256"] for run in runs.values()}) == 3


def test_a_quorum_of_everyone_is_the_policy_all() -> None:
    """Same losses; times but for a ring that begins when all are ready, not as they become so."""
    base = train(faulty("diloco"))
    run = train(faulty("diloco", policy={"quorum": 4}))
    assert run.rows("steps", "loss") == base.rows("steps", "loss")
    assert run.summary["emulated_s"] == pytest.approx(base.summary["emulated_s"], rel=1e-4)
    assert run.summary["parameters_sha256"] == base.summary["parameters_sha256"]


def test_below_the_quorum_nothing_is_committed() -> None:
    """Two halves that cannot reach each other: only the side with a quorum could commit; here
    neither can, and after healing there is one history."""
    cut = {"kind": "partition", "groups": [["a"], ["b"]], "from": "0 s", "to": "0.75 s"}
    run = train(faulty("diloco", cut, policy={"quorum": 3, "deadline": "100 ms"}))
    assert run.error is None
    must_add_up(run, 4)
    fates = [
        (version, status)
        for version, status in run.rows("syncs", "version", "status")
        if version <= 1
    ]
    assert "ok" not in {status for _, status in fates}
    assert run.summary["contributions"]["ok"] > 0


# -------------------------------------------------------------------------------------- crashes

WHERE = {
    "before sending": 0.15,
    "while gathering": 0.305,
    "half-way through sending": 0.34,
    "after sending": 0.45,
    "during recovery": 0.16,
}


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("where", list(WHERE))
@pytest.mark.parametrize("back", [True, False])
def test_a_death_anywhere_hangs_nothing(method: str, where: str, back: bool) -> None:
    """Whatever a worker was doing when it died, the others go on, and everything adds up."""
    crash: dict[str, Any] = {"kind": "crash", "worker": 2, "at": f"{WHERE[where]} s"}
    if back:
        crash["downtime"] = "300 ms"
    faults = [crash]
    if where == "during recovery" and back:
        faults.append({"kind": "crash", "worker": 2, "at": "0.47 s", "downtime": "100 ms"})
    run = train(faulty(method, *faults, detect="50 ms"))
    assert run.error is None
    must_add_up(run, 4)
    kinds = [kind for (kind,) in zip(run.rows("events", "kind"), strict=True)]
    assert "crash" in kinds
    assert ("rejoin" in kinds) == back


def test_a_rejoiner_knows_what_the_others_know() -> None:
    """Replicas that must stay equal are equal again after a death."""
    crash = {"kind": "crash", "worker": 2, "at": "250 ms", "downtime": "500 ms"}
    run = train(faulty("topk", crash, detect="50 ms"))
    first, second, third, fourth = (replica.flat.params for replica in run.replicas)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert torch.equal(first, fourth)


def test_everyone_dies() -> None:
    """The run ends with a clear message and complete results."""
    run = train(faulty("diloco", {"kind": "crash", "at": "600 ms"}))
    assert "nobody is left" in str(run.error)
    must_add_up(run, 4)
    assert run.rows("syncs", "status").count("ok") == 4


def test_a_mean_time_between_failures() -> None:
    """Workers die again and again and come back; the run ends."""
    crash = {"kind": "crash", "mtbf": "500 ms", "downtime": "100 ms"}
    run = train(faulty("diloco", crash, detect="10 ms", steps=30))
    assert run.error is None
    must_add_up(run, 4)
    assert run.rows("events", "kind").count("crash") > 3


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("downtime", ["0 s", "20 ms", "300 ms"])
def test_who_is_back_before_its_death_is_noticed(method: str, downtime: str) -> None:
    """Its return is the notice: what it broke off is run again at once."""
    crash = {"kind": "crash", "worker": 2, "at": "340 ms", "downtime": downtime}
    again = {"kind": "crash", "mtbf": "2 s", "downtime": downtime}
    for faults in ([crash], [crash, again]):
        run = train(faulty(method, *faults))  # detect: 1 s
        assert run.error is None
        must_add_up(run, 4)
        died = next(t for t, kind in run.rows("events", "emulated_s", "kind") if kind == "crash")
        for time_s, kind in run.rows("events", "emulated_s", "kind"):
            if kind == "aborted" and len(faults) == 1:
                assert died <= time_s <= died + 0.3 + 1e-9


@pytest.mark.parametrize("overlap", [1, 3, 5])
@pytest.mark.parametrize("collective", ["ring", "star"])
def test_who_is_behind_in_several_fragments(overlap: int, collective: str) -> None:
    """Its rounds and the others' end at different steps; nobody waits for what nobody sends."""
    method = {"name": "streaming_diloco", "sync_every": 5, "fragments": 3, "overlap": overlap}
    for worker in (0, 3):
        for at in (0.31, 0.55, 0.75, 1.02, 1.26):
            crash = {"kind": "crash", "worker": worker, "at": f"{at} s", "downtime": "400 ms"}
            parts = {"steps": 20, "detect": "50 ms", "collective": collective}
            run = train(faulty(method, crash, eval={"every": 0, "windows": 1}, **parts))
            assert run.error is None
            must_add_up(run, 4)
            assert max(step for w, step in run.rows("steps", "worker", "step") if w == worker) == 20


@pytest.mark.parametrize(
    "faults",
    [
        [{"kind": "drop", "probability": 0.5}],
        [{"kind": "corrupt", "how": "nan", "rounds": [1, 2]}],
        [{"kind": "drop", "probability": 0.5, "anchor": "last_received"}],
    ],
)
def test_error_feedback_counts_nothing_twice(faults: list[dict[str, Any]]) -> None:
    """What is lost while a worker keeps its parameters is in its next pseudo-gradient, and not in
    the residual too: where nothing is rounded, error feedback changes nothing."""
    method = {
        "name": "streaming_diloco",
        "sync_every": 3,
        "fragments": 2,
        "payload_dtype": "fp32",
    }
    parts = {"model": "tests.helpers:build_float64", "eval": {"every": 0, "windows": 1}}
    plain, fed = (
        train(faulty({**method, "error_feedback": feedback}, *faults, **parts))
        for feedback in (False, True)
    )
    assert plain.error is fed.error is None
    losses = [run.rows("steps", "loss") for run in (plain, fed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_error_feedback_gives_back_what_is_adopted_over() -> None:
    """Lost on the way up, and the result adopted: the pseudo-gradient is in the residual now."""
    method = {
        "name": "streaming_diloco",
        "sync_every": 12,
        "payload_dtype": "int4",
        "error_feedback": True,
        "outer": {"name": "sgd", "lr": 1.0},
    }
    drop = {"kind": "drop", "probability": 1.0, "direction": "up", "worker": 3}
    run = train(faulty(method, drop, model="tests.helpers:build_float64"))
    state = run.replicas[3].state
    assert torch.equal(state.params, run.replicas[0].state.params)
    assert float(state.slot("residual").abs().max()) > 1e-3
    assert "pseudo-gradient lost of 0" not in state.slots


def test_who_is_ready_during_the_last_collective_is_late_for_it() -> None:
    """It does not make a round of its own of its last payload."""
    slow = {"kind": "slow", "factor": 1.2, "worker": 3}
    never = {"kind": "crash", "worker": 2, "at": "1 h"}
    one = faulty("diloco", slow, never, policy={"quorum": 3})
    run = train(one)
    assert run.error is None
    must_add_up(run, 4)
    assert run.summary["syncs"] == 4
    assert run.summary["contributions"] == {
        "ok": 12, "late": 4, "dropped": 0, "rejected": 0, "absent": 0
    }  # fmt: skip


def test_all_come_back_together() -> None:
    """Policy all waits for everyone alive, also if everyone has just come back."""
    run = train(faulty("diloco", {"kind": "crash", "at": "340 ms", "downtime": "200 ms"}))
    assert run.error is None
    must_add_up(run, 4)
    assert run.summary["contributions"]["late"] == 0
    assert ("nobody survived it" in str(run.rows("events", "detail"))) == (
        "aborted" in run.rows("events", "kind")
    )


def test_a_rejoiner_waits_for_its_link() -> None:
    """What it starts from does not pass a link that is cut."""
    crash = {"kind": "crash", "worker": 2, "at": "250 ms", "downtime": "100 ms"}
    cut = {"kind": "partition", "islands": ["b"], "from": "200 ms", "to": "900 ms"}
    run = train(faulty("diloco", crash, cut, detect="10 ms"))
    assert run.error is None
    back = [t for t, kind in run.rows("events", "emulated_s", "kind") if kind == "rejoin"]
    assert back == pytest.approx([0.9])


@pytest.mark.parametrize("method", ["dense", "diloco", "fragments"])
def test_who_is_cut_off_for_good_is_gone(method: str) -> None:
    """With a quorum on the coordinator's side that goes on to the end; the others are absent."""
    cut = {"kind": "partition", "islands": ["a"], "from": "250 ms"}
    run = train(faulty(method, cut, policy={"quorum": 2}))
    if run.error is None:
        must_add_up(run, 4)
        assert run.rows("events", "kind").count("cut off") == 2
        assert {w for w, step in run.rows("steps", "worker", "step") if step == 12} == {0, 1}
    else:  # the cut came upon a collective under way
        assert "cut for good" in str(run.error)


def test_workers_that_die_faster_than_they_get_on() -> None:
    """The run ends and says why."""
    run = train(faulty("diloco", {"kind": "crash", "mtbf": "5 ms", "downtime": "0 s"}))
    assert "died 1,000 times" in str(run.error)


@pytest.mark.parametrize("fault", [{"kind": "leave", "step": 0}, {"kind": "join", "step": 5}])
@pytest.mark.parametrize("method", ["dense", "diloco"])
def test_nobody_at_the_beginning(method: str, fault: dict[str, Any]) -> None:
    """A clear message, and an empty summary."""
    run = train(faulty(method, fault))
    assert "nobody is there at the beginning" in str(run.error)
    assert run.summary["steps"] == run.summary["syncs"] == 0


def test_a_failed_run_counts_what_there_was() -> None:
    """Steps, rounds and the last loss are those in the tables, bytes on the way are wasted."""
    run = train(
        faulty("diloco", {"kind": "crash", "at": "800 ms"}, eval={"every": 0, "windows": 1})
    )
    last = max(run.rows("steps", "step"))
    assert run.summary["steps"] == last < 12
    assert run.summary["syncs"] == len(set(run.rows("syncs", "version")))
    assert run.rows("evals", "step")[-1] == max(run.rows("syncs", "step"))
    aborted = train(faulty("diloco", {"kind": "crash", "at": "340 ms"}))
    assert aborted.summary["wasted_bytes"] == aborted.summary["wire_bytes_total"] > 0
    assert "values" in aborted.rows("transfers", "kind")


def test_a_result_that_is_lost_on_its_way_is_told() -> None:
    """Everyone's contribution counts, and events say who did not hear of it."""
    drop = {"kind": "drop", "probability": 0.5, "direction": "down"}
    run = train(faulty("diloco", drop))
    told = [d for kind, d in run.rows("events", "kind", "detail") if kind == "dropped"]
    assert len(told) == run.summary["dropped_results"] > 0
    assert all(detail.endswith(": the result") for detail in told)
    assert train(faulty("dense", drop)).summary["dropped_results"] == 0


def test_what_came_too_late_for_any_round_is_wasted() -> None:
    """A late payload that was to count in the next round, which never came."""
    slow = {"kind": "slow", "factor": 2.0, "worker": 3}
    late = {"deadline": "50 ms", "late": "apply_next"}
    run = train(faulty("diloco", slow, policy=late))
    payload = run.summary["payload_bytes_per_sync"]
    assert run.summary["wasted_bytes"] in (payload, 0.0)
    last = [row for row in run.rows("syncs", "version", "status") if row[1] == "late"]
    assert (run.summary["wasted_bytes"] > 0) == (last[-1][0] == run.summary["syncs"])


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "straggler", "mean": 0.5},
        {"kind": "slow", "factor": 2.0, "worker": 1},
        {"kind": "pause", "every": "300 ms", "lasting": "200 ms"},
    ],
)
def test_what_a_slow_worker_costs_is_everybodys_time(fault: dict[str, Any]) -> None:
    """Those who wait for it lose as much."""
    whole, run = train(faulty("dense")), train(faulty("dense", fault))
    ends = [[t["elapsed_s"] for t in r.summary["time_by_worker"]] for r in (run, whole)]
    lost = (sum(ends[0]) - sum(ends[1])) / 4
    assert run.summary["lost_s"] == pytest.approx({fault["kind"]: lost})
    assert lost > 0.1


# ------------------------------------------------------------------------------- any schedule


def schedule(seed: int) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """A random method with random faults and a random policy."""
    draw = Random(seed)
    method = draw.choice(list(METHODS))
    kinds: list[dict[str, Any]] = [
        {
            "kind": "straggler",
            "jitter": draw.choice(["exponential", "gamma", "lognormal", "normal"]),
        },
        {"kind": "slow", "factor": draw.choice([1.5, 4.0]), "worker": draw.randrange(4)},
        {"kind": "pause", "every": "300 ms", "lasting": "200 ms", "island": draw.choice("ab")},
        {
            "kind": "drop",
            "probability": draw.choice([0.1, 0.5, 1.0]),
            "direction": draw.choice(["both", "up", "down"]),
        },
        {
            "kind": "corrupt",
            "how": draw.choice(["nan", "scale", "flip", "truncate", "bits"]),
            "probability": 0.3,
        },
        {"kind": "outage", "link": "ab", "from": "200 ms", "to": f"{draw.randint(201, 900)} ms"},
        {"kind": "partition", "groups": [["a"], ["b"]], "from": "100 ms", "to": "500 ms"},
        {
            "kind": "crash",
            "worker": draw.randrange(4),
            "at": f"{draw.randint(0, 900)} ms",
            "downtime": f"{draw.randint(1, 600)} ms",
        },
        {"kind": "crash", "mtbf": "800 ms", "downtime": "150 ms"},
    ]
    faults = draw.sample(kinds, draw.randint(1, 4))
    parts: dict[str, Any] = {}
    if any(fault["kind"] == "crash" for fault in faults):
        parts["detect"] = draw.choice(["1 ms", "100 ms"])
    policy = draw.choice(
        [None, None, {"quorum": 2}, {"quorum": 3, "deadline": "80 ms"}, {"deadline": "2 x median"}]
    )
    timed = policy is not None or "detect" in parts
    if policy is not None:
        parts["policy"] = policy
    elif draw.random() < 0.4 and not timed:
        parts["replicas"] = draw.choice([[[0, 2], [5, 4]], [[0, 4], [7, 2]]])
    parts["collective"] = draw.choice(["ring", "star", "hierarchical"])
    return method, faults, parts


def without_clashes(faults: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """An outage beside a partition may say two things of one link: keep one of them."""
    kinds = {fault["kind"] for fault in faults}
    return [f for f in faults if not (f["kind"] == "outage" and "partition" in kinds)]


@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_of_faults(seed: int) -> None:
    """No hang, no traceback, laws 7 to 9, and the same again in another order of answers."""
    method, faults, parts = schedule(seed)
    one = faulty(method, *without_clashes(faults), seed=seed, **parts)
    run = train(one)
    if run.error is not None:
        assert "nobody is left" in str(run.error)
    must_add_up(run, 4)
    if seed % 10 == 0:
        assert_identical(run, train(one, shuffle=seed))


@pytest.mark.parametrize(
    "faults",
    [
        [{"kind": "straggler"}, {"kind": "drop", "probability": 0.3}],
        [{"kind": "outage", "link": "ab", "from": "300 ms", "to": "900 ms"}],
        [{"kind": "leave", "worker": 1, "step": 4}, {"kind": "join", "worker": 1, "step": 8}],
    ],
)
def test_untimed_faults_can_be_timed_again(faults: list[dict[str, Any]], tmp_path: Path) -> None:
    """On its own network, outages included, a run is given its own times back."""
    result = islands.run(faulty("diloco", *faults), in_process=True, out=tmp_path / "run")
    (row,) = retime([tmp_path / "run"]).rows
    assert row["emulated_s"] == result.summary["emulated_s"]


def test_outages_cost_time_and_bytes_only() -> None:
    """Under policy all an outage changes when, and nothing else."""
    cut = {"kind": "outage", "link": "ab", "from": "300 ms", "to": "900 ms"}
    whole, late = train(faulty("diloco")), train(faulty("diloco", cut))
    assert late.rows("steps", "loss") == whole.rows("steps", "loss")
    assert late.summary["emulated_s"] > whole.summary["emulated_s"] + 0.3


def test_what_outages_cost_is_told_apart() -> None:
    """The time lost to each kind of fault is what the run takes longer for it, worker by worker;
    where rounds close by the clock, only another run tells."""
    cut = {"kind": "outage", "link": "ab", "from": "300 ms", "to": "900 ms"}
    split = {"kind": "partition", "groups": [["a"], ["b"]], "from": "1 s", "to": "1500 ms"}

    def clocks(run: Any) -> float:
        return float(sum(t["elapsed_s"] for t in run.summary["time_by_worker"])) / 4

    whole, one, both = (train(faulty("diloco", *f)) for f in ((), (split,), (cut, split)))
    assert whole.summary["lost_s"] == {}
    assert one.summary["lost_s"] == pytest.approx({"partition": clocks(one) - clocks(whole)})
    lost = both.summary["lost_s"]
    assert lost == pytest.approx(
        {"outage": clocks(both) - clocks(one), "partition": clocks(one) - clocks(whole)}
    )
    assert min(lost.values()) > 0.1
    clocked = train(faulty("diloco", cut, policy={"quorum": 2}))
    assert clocked.summary["lost_s"] == {"outage": None}


def test_what_cannot_be_combined_is_refused() -> None:
    """Members by step need rounds that wait for everyone."""
    with pytest.raises(InputError, match="replicas"):
        faulty("diloco", replicas=[[0, 2], [4, 4]], policy={"quorum": 2})
    with pytest.raises(InputError, match=r"faults\.0"):
        faulty("diloco", {"kind": "leave", "step": 4, "worker": 1}, {"kind": "crash", "at": "1 s"})
    with pytest.raises(InputError, match="detect"):
        faulty("diloco", detect="1 s")
