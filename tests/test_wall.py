"""Runs on the wall clock: nobody has a result before it is delivered, and nothing else changes.

The clock here passes only while somebody sleeps, so that moments are exact.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_clock import LATE_S, LOOK_S, FakeClock
from helpers import INSTANT, EachArrival, Run, assert_identical, cluster, experiment, train

from islands.compression import Update
from islands.engine import HOLD_S, Interrupted
from islands.errors import InputError, RunError
from islands.job import Job, prepare
from islands.network import Arrival, Timings
from islands.network.emulation import LocalNetwork
from islands.network.pace import Paced
from islands.plan import Answer, Apply, PlanOp
from islands.protocols import Workers


class Diverged(EachArrival):
    """Rounds close by the clock, and an evaluation needs every worker's parameters."""

    shared_in: ClassVar[Any] = "diverged"


def paced(job: Job, scale: float, clock: FakeClock) -> LocalNetwork:
    """The job's network on a clock of the test's own."""
    emulation = job.emulation()
    timeline = Paced(emulation.timeline(), scale, now=clock.now, sleep=clock.sleep)
    return LocalNetwork(timeline, emulation.without_faults())


# --- whole runs

UNEQUAL = cluster((2, 1, 1), (1.0, 2.3, 0.7), "10 Mbit/s", "40 ms")
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "topk": {"method": "topk"},
    "diloco": {"method": {"name": "diloco", "sync_every": 5}, "steps": 13},
    "fragments": {"method": "helpers:Fragments", "steps": 24},
    "each": {"method": {"name": "helpers:EachArrival", "sync_every": 3}, "cluster": UNEQUAL},
    "each-late": {
        "method": {"name": "helpers:EachArrivalLate", "sync_every": 3},
        "cluster": UNEQUAL,
        "steps": 20,
    },
    "diverged": {"method": {"name": "test_wall:Diverged", "sync_every": 2}, "cluster": UNEQUAL},
    "instant": {"method": "dense", "cluster": cluster(**INSTANT)},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scale", [0.1, 7.0])
def test_both_clocks_give_the_same_results(name: str, scale: float) -> None:
    """Law 5: tables, trace, bytes and parameters are those of the emulated clock, in any order of
    the host's answers, and the run lasts its emulated time × scale."""
    parts = {"model": "helpers:build_float64", "eval": {"every": 3, "windows": 1}, **METHODS[name]}
    job = prepare(experiment(**parts))
    emulated = train(job)
    assert emulated.error is None
    wall = replace(job, experiment=job.experiment.model_copy(update={"clock": "wall"}))
    for shuffle in (None, 1):
        clock = FakeClock()
        run = train(wall, shuffle=shuffle, network=paced(wall, scale, clock))
        assert run.error is None
        assert_identical(emulated, run)
        lasted_s = emulated.summary["emulated_s"] * scale
        assert clock.passed_s == pytest.approx(lasted_s, abs=LATE_S + 2 * LOOK_S)
        assert run.summary["pace"]["lag_max_s"] <= LATE_S + 2 * LOOK_S
    assert emulated.summary["pace"] is None


class Watched:
    """Workers of which it is noted when they begin a plan with a result in it."""

    def __init__(self, workers: Workers, clock: FakeClock) -> None:
        self._workers = workers
        self._clock = clock
        self.applied: list[tuple[int, float]] = []

    def share(self, update: Update) -> Update:
        return self._workers.share(update)

    def start(self, worker: int, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> None:
        if any(isinstance(op, Apply) for op in plan):
            self.applied.append((worker, self._clock.passed_s))
        self._workers.start(worker, plan, updates)

    def answers(self, everyone: bool, within_s: float = inf) -> Iterable[tuple[int, Answer]]:
        return self._workers.answers(everyone, within_s)


class Slow(Watched):
    """Workers that answer the clock's seconds ``take_s`` after they began, one value each."""

    def __init__(self, workers: Workers, clock: FakeClock, take_s: Sequence[float]) -> None:
        super().__init__(workers, clock)
        self._take_s = take_s
        self._done: list[tuple[float, int, Answer]] = []

    def start(self, worker: int, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> None:
        super().start(worker, plan, updates)
        ((_, answer),) = self._workers.answers(False)
        self._done.append((self._clock.now() + self._take_s[worker], worker, answer))

    def answers(self, everyone: bool, within_s: float = inf) -> Iterable[tuple[int, Answer]]:
        self._done.sort(key=lambda done: done[:2])
        at_s, worker, answer = self._done[0]
        left_s = max(0.0, at_s - self._clock.now())
        self._clock.time_s += min(left_s, within_s)
        if left_s > within_s:
            return []
        del self._done[0]
        return [(worker, answer)]


def watched(job: Job, scale: float, *take_s: float) -> tuple[Run, Watched]:
    """A run on the wall clock, and when its results were handed out."""
    clock = FakeClock()
    found: list[Watched] = []

    def spy(workers: Workers) -> Workers:
        found.append(Slow(workers, clock, take_s) if take_s else Watched(workers, clock))
        return found[0]

    wall = replace(job, experiment=job.experiment.model_copy(update={"clock": "wall"}))
    run = train(wall, network=paced(wall, scale, clock), spy=spy)
    assert run.error is None
    return run, found[0]


FAULTS: dict[str, dict[str, Any]] = {
    "drop": {"faults": [{"kind": "drop", "probability": 0.4}]},
    "drop-down": {"faults": [{"kind": "drop", "probability": 0.4, "direction": "down"}]},
    "slow-quorum": {
        "faults": [{"kind": "slow", "factor": 3.0, "worker": 3}],
        "policy": {"quorum": 2},
    },
    "late": {
        "faults": [{"kind": "straggler", "mean": 0.5}],
        "policy": {"deadline": "60 ms", "late": "apply_next"},
    },
    "crash": {
        "faults": [{"kind": "crash", "worker": 2, "at": "340 ms", "downtime": "300 ms"}],
        "detect": "50 ms",
    },
    "crash-seen-late": {
        "faults": [{"kind": "crash", "worker": 2, "at": "340 ms", "downtime": "20 ms"}],
        "detect": "1 s",
    },
    "mtbf": {"faults": [{"kind": "crash", "mtbf": "700 ms", "downtime": "100 ms"}]},
    "members": {"replicas": [[0, 2], [5, 4], [9, 3]]},
    "outage": {"faults": [{"kind": "outage", "link": "ab", "from": "300 ms", "to": "700 ms"}]},
}


@pytest.mark.parametrize("method", ["dense", "diloco", "local_sgd", "helpers:Fragments"])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_the_same_on_both_clocks(name: str, method: str) -> None:
    """Law 5 where something goes wrong: who is late, dropped or dead is decided in emulated time,
    and control bytes cross the links at the same moments."""
    chosen: dict[str, Any] = {"name": method}
    if method != "dense":
        chosen["sync_every"] = 3
    job = prepare(experiment(method=chosen, **FAULTS[name]))
    emulated = train(job)
    assert emulated.error is None
    wall = replace(job, experiment=job.experiment.model_copy(update={"clock": "wall"}))
    for shuffle in (None, 1):
        run = train(wall, shuffle=shuffle, network=paced(wall, 0.1, FakeClock()))
        assert run.error is None
        assert_identical(emulated, run)


@pytest.mark.parametrize("name", ["dense", "diloco", "each"])
def test_no_worker_gets_a_result_before_it_is_delivered(name: str) -> None:
    """Each plan with a result in it begins at the moment of its delivery, for every worker."""
    run, workers = watched(prepare(experiment(**METHODS[name])), 3.0)
    due = sorted((w, 3.0 * t) for w, t in run.rows("syncs", "worker", "done_s"))
    assert [w for w, _ in due] == [w for w, _ in sorted(workers.applied)]
    late = [at - t for (_, t), (_, at) in zip(due, sorted(workers.applied), strict=True)]
    assert all(-1e-9 <= seconds <= LATE_S + 2 * LOOK_S for seconds in late)


def each_slowly(*take_s: float) -> tuple[Run, Watched]:
    """Steps of 1 s and 2.5 s, no network, a round per two steps, at 1 wall second per second."""
    parts = {"cluster": cluster((1, 1), (1.0, 2.5), **INSTANT), "steps": 4, "eval": {"every": 0}}
    method = {"name": "helpers:DriftEach", "sync_every": 2}
    return watched(prepare(experiment("helpers:build_abc", method=method, **parts)), 1.0, *take_s)


def test_a_delivery_does_not_wait_for_a_worker_that_computes() -> None:
    """Worker 1 takes 4 s for its two steps of 2.5 s: worker 0 has its results at 2 and 4 s, while
    the other one computes, which itself is early enough for 5 and 10 s."""
    run, workers = each_slowly(0.1, 4.0)
    assert sorted(workers.applied) == [
        (0, pytest.approx(2.0, abs=1e-3)),
        (0, pytest.approx(4.0, abs=1e-3)),
        (1, pytest.approx(5.0, abs=1e-3)),
        (1, pytest.approx(10.0, abs=1e-3)),
    ]
    assert run.summary["pace"]["lag_max_s"] <= 1e-3


def test_computing_that_is_too_slow_shows_as_lag() -> None:
    """Worker 1 takes 7 s: what should have been at 5 s is at 7 s, then 14 s instead of 10 s. The
    emulated times are those of the fast host."""
    run, workers = each_slowly(0.1, 7.0)
    assert sorted(workers.applied) == [
        (0, pytest.approx(2.0, abs=1e-3)),
        (0, pytest.approx(4.0, abs=1e-3)),
        (1, pytest.approx(7.0, abs=1e-3)),
        (1, pytest.approx(14.0, abs=1e-3)),
    ]
    assert run.summary["pace"]["lag_max_s"] == pytest.approx(4.0, abs=1e-3)
    assert run.rows("syncs", "worker", "done_s") == [(0, 2.0), (0, 4.0), (1, 5.0), (1, 10.0)]


def test_results_of_one_moment_are_let_out_together() -> None:
    """Four workers that are alike, no network, a round per step: who is first to go on does not
    make the network wait for what it does next."""
    job, clock = (
        prepare(experiment(cluster=cluster(**INSTANT), method="dense", steps=5)),
        FakeClock(),
    )
    wall = replace(job, experiment=job.experiment.model_copy(update={"clock": "wall"}))
    together: list[int] = []

    class Counted(LocalNetwork):
        def decide(self, hold_s: float = 0.0) -> tuple[Timings, Arrival | None, float]:
            found = super().decide(hold_s)
            together.append(len(found[0].syncs))
            return found

    timeline = Paced(job.emulation().timeline(), 1.0, now=clock.now, sleep=clock.sleep)
    assert train(wall, network=Counted(timeline)).error is None
    assert [count for count in together if count] == [4] * 5


# --- runs that end early


def slow_link(**parts: Any) -> Job:
    """Rounds that take 20 s on a wire that is as slow as that."""
    slow = cluster((1, 1), delay="20 s")
    found = prepare(experiment(cluster=slow, method={"name": "diloco", "sync_every": 4}, **parts))
    return replace(found, experiment=found.experiment.model_copy(update={"clock": "wall"}))


def test_an_interrupt_is_answered_while_everybody_waits() -> None:
    """Whether to stop is asked at least every half second of a wait of 20 s, and the run that was
    stopped has what was trained and sent so far."""
    job, clock = slow_link(), FakeClock()
    asked: list[float] = []

    def stop() -> bool:
        asked.append(clock.passed_s)
        return clock.passed_s > 10.0

    run = train(job, stop=stop, network=paced(job, 1.0, clock))
    assert isinstance(run.error, Interrupted)
    assert max(y - x for x, y in pairwise(asked)) <= HOLD_S + LATE_S + LOOK_S
    assert clock.passed_s <= 10.0 + HOLD_S + LATE_S + LOOK_S
    assert (run.summary["status"], run.summary["steps"]) == ("interrupted", 4)
    assert run.rows("syncs", "worker", "step") == [(0, 4), (1, 4)]


@pytest.mark.parametrize("method", ["dense", "helpers:EachArrival"])
@pytest.mark.parametrize("clock", ["emulated", "wall"])
def test_a_link_cut_for_good_ends_the_run(clock: str, method: str) -> None:
    """Exit code 1, the link's name and the moment in the message, and the results up to there."""
    cut = cluster((1, 1))
    cut["links"][0]["windows"] = [{"from": "1 s", "bandwidth": "cut"}]
    cut["links"][0]["background"] = {"load": 0.3, "size": "1 MB"}
    on_clock = {"clock": clock} | ({"time_scale": 1e-6} if clock == "wall" else {})
    how = {"name": method} | ({"sync_every": 3} if method != "dense" else {})
    run = train(experiment(cluster=cut, method=how, steps=40, **on_clock))
    assert isinstance(run.error, RunError)
    assert "cut for good" in str(run.error)
    assert "ab:" in str(run.error)
    assert run.summary["status"] == "failed"
    assert 0 < run.summary["steps"] < 40
    assert run.tables["syncs"].num_rows > 0
    assert run.tables["events"].num_rows == 0
    for link, totals in run.summary["links"].items():  # counted once, other jobs' bytes too
        rows = run.rows("transfers", "link", "bytes")
        assert totals["bytes"] == sum(size for name, size in rows if name == link)
    assert run.summary["links"]["ab:a>b"]["background_bytes"] > 0
    kinds = run.rows("transfers", "link", "kind")
    assert kinds.count(("ab:a>b", "background")) == 1


# --- settings


def test_the_emulation_arrives_whole() -> None:
    """What the link actor is sent is what the experiment says, of which nothing needs torch."""
    changes = {"collective": "hierarchical", "ring_order": ["b", "a"], "seed": 3, "clock": "wall"}
    job = prepare(experiment(**changes, time_scale=0.25), per_transfer=True)
    found = pickle.loads(pickle.dumps(job.emulation()))
    assert found == job.emulation()
    assert (found.scheme, found.ring_order, found.seed) == ("hierarchical", ("b", "a"), 3)
    assert (found.time_scale, found.per_transfer, found.timed) == (0.25, True, False)
    assert prepare(experiment()).emulation().time_scale is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clock": "wall", "time_scale": 0.0}, "time_scale: 0.0 is too small"),
        ({"clock": "wall", "time_scale": -1.0}, "time_scale: -1.0 is too small"),
        ({"clock": "wall", "time_scale": inf}, "time_scale: inf"),
        ({"time_scale": 0.5}, "time_scale: 0.5 is read by nobody on the emulated clock"),
        ({"clock": "wal"}, "clock: 'wal' is not one of emulated, wall; did you mean 'wall'"),
    ],
)
def test_wrong_clocks_are_refused(changes: dict[str, Any], message: str) -> None:
    """One message with the field, the value and what is valid."""
    with pytest.raises(InputError) as info:
        experiment(**changes)
    assert message in str(info.value)


def test_the_written_experiment_has_the_clock(tmp_path: Path) -> None:
    """A scale that was left out is written as the 1 that it is; without a wall clock there is
    none."""
    for clock, scale in (("wall", 1.0), ("emulated", None)):
        path = tmp_path / f"{clock}.yaml"
        path.write_text(experiment(clock=clock).resolved().dump_yaml(), encoding="utf-8")
        again = type(experiment()).load(path)
        assert (again.clock, again.time_scale) == (clock, scale)
