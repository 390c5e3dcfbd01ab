"""The wall clock: deliveries are held back to absolute deadlines, and nothing else changes.

Almost everything runs on a clock that passes only while somebody sleeps, so that moments are exact;
its sleep ends late, as a real one does.
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
from helpers import INSTANT, EachArrival, Run, assert_identical, cluster, experiment, train
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.compression import Update
from islands.engine import HOLD_S, Interrupted
from islands.errors import InputError, RunError
from islands.job import Job, prepare
from islands.network import Arrival, Timeline, Timings, Topology
from islands.network.emulation import LocalNetwork
from islands.network.pace import Paced, measure_pace
from islands.network.topology import Site, Wire
from islands.plan import Answer, Apply, PlanOp
from islands.protocols import Workers
from islands.trace import Bytes, Compute, End, Op, Receive, Send

#: How late a sleep ends, and what a look at the clock takes, in seconds.
LATE_S, LOOK_S = 4e-4, 1e-5


class FakeClock:
    """Time that passes while somebody sleeps; a sleep of nothing still takes a moment."""

    def __init__(self) -> None:
        self.time_s = 100.0  # where a monotonic clock stands is of no meaning

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.time_s += seconds + LATE_S if seconds else LOOK_S

    @property
    def passed_s(self) -> float:
        return self.time_s - 100.0


class Diverged(EachArrival):
    """Rounds close by the clock, and an evaluation needs every worker's parameters."""

    shared_in: ClassVar[Any] = "diverged"


def paced(job: Job, scale: float, clock: FakeClock) -> LocalNetwork:
    """The job's network on a clock of the test's own."""
    timeline = job.emulation().timeline()
    return LocalNetwork(Paced(timeline, scale, now=clock.now, sleep=clock.sleep))


def pair(bytes_per_s: float = 1e6, delay_s: float = 0.0) -> Topology:
    """Two islands of one worker each, LANs that take no time."""
    sites = [Site(name, 1, inf, 0.0) for name in ("a", "b")]
    return Topology.build(sites, [Wire("link", ("a", "b"), bytes_per_s, delay_s)])


def gathering(topology: Topology, scale: float, clock: FakeClock) -> Paced:
    """All-gathers of workers that take 1 s for a step."""
    timeline = Timeline(topology, FixedSteps((1.0, 1.0)), "all_gather")
    return Paced(timeline, scale, now=clock.now, sleep=clock.sleep)


def rounds(count: int, size: int = 1_000_000, first: int = 1) -> list[tuple[int, Op]]:
    """For both workers: a round of ``size`` bytes and a step, so many times."""
    ops: list[tuple[int, Op]] = []
    for version in range(first, first + count):
        for worker in (0, 1):
            ops.append((worker, Send(0, version, version, Bytes(values=size), 1)))
            ops.append((worker, Receive(0, version)))
            ops.append((worker, Compute(version, 1)))
    return ops


STEP: list[tuple[int, Op]] = [(0, Compute(0, 1)), (1, Compute(0, 1))]
ENDS: list[tuple[int, Op]] = [(0, End()), (1, End())]


# --- deadlines


def test_deadlines_are_absolute() -> None:
    """1,000 transfers of 0.8 ms, each handed in when the last one is out, with sleeps that end
    0.4 ms late: not 1.2 s as sums of naps would give, but 0.8 s and one look at the clock."""
    clock = FakeClock()
    nominal_s, real_s = measure_pace(1000, 1000, 1.25e6, clock.now, clock.sleep)
    assert nominal_s == pytest.approx(0.8)
    assert 0.8 - 1e-9 <= real_s <= 0.8 + 2 * LOOK_S


def test_a_deadline_that_passes_between_two_looks_is_met() -> None:
    """Where looking at the clock takes time too, nothing is skipped or given up."""

    class Ticking(FakeClock):
        def now(self) -> float:
            self.time_s += 7 * LOOK_S
            return self.time_s

    clock = Ticking()
    nominal_s, real_s = measure_pace(300, 1000, 1.25e6, clock.now, clock.sleep)
    assert nominal_s <= real_s <= nominal_s + 2e-3


def test_long_transfers_are_slept_through() -> None:
    """20 transfers of 0.8 s: as exact, and no more than a millisecond each awake."""
    clock = FakeClock()
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        clock.sleep(seconds)

    nominal_s, real_s = measure_pace(20, 1_000_000, 1.25e6, clock.now, sleep)
    assert (nominal_s, real_s) == (16.0, pytest.approx(16.0, abs=2 * LOOK_S))
    assert looks.count(0.0) * LOOK_S <= 20 * 1e-3


@settings(deadline=None)
@given(
    scale=st.floats(1e-3, 1e3),
    sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=6),
    hold=st.floats(0.05, 5.0),
)
def test_nothing_is_let_out_early_or_late(scale: float, sizes: list[int], hold: float) -> None:
    """Any scale and sizes: each delivery comes at start + moment × scale, in their order, whatever
    the slices in which somebody waits for it."""
    clock, hold_s = FakeClock(), hold * scale
    network = gathering(pair(), scale, clock)
    ops = [op for n, size in enumerate(sizes) for op in rounds(1, size, first=n + 1)]
    network.extend([*STEP, *ops, *ENDS])
    moments: list[float] = []
    while True:
        before_s = clock.passed_s
        timings, _, due_s = network.turn(hold_s)
        assert clock.passed_s <= before_s + hold_s + LATE_S + 2 * LOOK_S  # a wait is bounded
        for sync in timings.syncs:
            assert -1e-9 <= clock.passed_s - sync.passed_s * scale <= LATE_S + 2 * LOOK_S
            moments.append(sync.passed_s)
        if due_s == inf:
            break
    assert moments == sorted(moments)
    assert len(moments) == 2 * len(sizes)
    assert clock.passed_s >= max(moments) * scale - 1e-9


def test_a_wait_is_bounded_and_goes_on_to_the_same_deadline() -> None:
    """Due at 2 s: three waits of 0.9 s at the most end at 0.9, 1.8 and 2 s."""
    clock = FakeClock()
    network = gathering(pair(), 1.0, clock)
    network.extend([*STEP, *rounds(1)])
    ends, counts = [], []
    for _ in range(3):
        timings, _, due_s = network.turn(0.9)
        ends.append(clock.passed_s)
        counts.append((len(timings.syncs), due_s))
    assert ends == pytest.approx([0.9, 1.8, 2.0], abs=2e-3)
    assert [n for n, _ in counts] == [0, 0, 2]
    assert [due for _, due in counts] == pytest.approx([1.1, 0.2, inf], abs=2e-3)


def test_who_does_not_wait_is_told_when_it_is_due() -> None:
    """Waiting for something else takes until then: 0.25 s after a turn without a wait, 1.75 s."""
    clock = FakeClock()
    network = gathering(pair(), 1.0, clock)
    network.extend([*STEP, *rounds(1)])
    assert network.turn(0.0)[2] == pytest.approx(2.0, abs=1e-4)
    clock.time_s += 0.25
    timings, arrival, due_s = network.turn(0.0)
    assert (timings.syncs, arrival) == ([], None)
    assert due_s == pytest.approx(1.75, abs=1e-4)


def test_an_arrival_is_held_back_and_time_stands_still_behind_it() -> None:
    """Rounds that close by the clock: 1 MB from the far worker is there at 2.25 s, not before, and
    nothing later is simulated until it is answered."""
    clock = FakeClock()
    timeline = Timeline(pair(delay_s=0.25), FixedSteps((5.0, 1.0)), "star", timed=True)
    network = Paced(timeline, 2.0, now=clock.now, sleep=clock.sleep)
    for worker in (0, 1):
        send = Send(0, 1, 1, Bytes(values=1_000_000), 1)
        network.extend([(worker, op) for op in (Compute(0, 1), send, Receive(0, 1))])
    assert network.turn(4.0)[1] is None
    timings, arrival, _ = network.turn(4.0)
    assert arrival is not None
    assert (arrival.time_s, arrival.worker, timings.syncs) == (2.25, 1, [])
    assert clock.passed_s == pytest.approx(4.5, abs=2 * LOOK_S)
    network.reply(1, 0, 1, 1_000_000, 1)
    (sync,) = network.turn(inf)[0].syncs
    assert (sync.worker, sync.done_s) == (1, 3.5)
    assert clock.passed_s == pytest.approx(7.0, abs=2 * LOOK_S)


# --- lag and rates


def test_a_late_host_moves_no_emulated_time_and_no_other_deadline() -> None:
    """Payloads that are there at 5 s instead of 1 s make one round 3 s late, and not the next."""
    on_time, late = FakeClock(), FakeClock()
    found = []
    for clock, delay_s in ((on_time, 0.0), (late, 5.0)):
        network = gathering(pair(), 1.0, clock)
        network.extend(STEP)
        clock.time_s += delay_s
        network.extend(rounds(1))
        syncs = network.turn(inf)[0].syncs
        network.extend([(w, Compute(2, 2)) for w in (0, 1)])
        network.extend(rounds(1, first=2))
        syncs += network.turn(inf)[0].syncs
        found.append((syncs, clock.passed_s, network.end().pace))
    (syncs, end_s, pace), (same, late_end_s, late_pace) = found
    assert syncs == same
    assert [sync.done_s for sync in syncs] == [2.0, 2.0, 6.0, 6.0]
    assert end_s == pytest.approx(late_end_s, abs=1e-4)
    assert pace is not None
    assert late_pace is not None
    assert pace.lag_max_s <= 2 * LOOK_S
    assert late_pace.lag_max_s == pytest.approx(3.0, abs=1e-4)
    assert late_pace.lag_mean_s == pytest.approx(1.5, abs=1e-4)


def test_achieved_rates_by_hand() -> None:
    """1 MB on 8 Mbit/s, on time and then 1 s late: asked for 1 MB/s, achieved 2 MB in 1 + 2 s. The
    scale is no part of it."""
    clock = FakeClock()
    network = gathering(pair(), 2.0, clock)
    network.extend([*STEP, *rounds(1)])
    network.turn(inf)
    clock.time_s += 6.0  # due at 8 s, and it is 10 s
    network.extend(rounds(1, first=2))
    network.turn(inf)
    pace = network.end().pace
    assert pace is not None
    assert set(pace.links) == {"link:a>b", "link:b>a"}
    for asked, achieved in pace.links.values():
        assert asked == pytest.approx(1e6)
        assert achieved == pytest.approx(2e6 / 3, rel=1e-4)
    assert pace.wall_s == pytest.approx(10.0, abs=1e-4)


def test_rates_are_those_of_payloads_between_islands() -> None:
    """Neither what stays in an island nor the initial model, which takes no time, counts."""
    sites = [Site("a", 2, 1e6, 0.0), Site("b", 1, inf, 0.0)]
    topology = Topology.build(sites, [Wire("link", ("a", "b"), 1e6, 0.0)])
    clock = FakeClock()
    timeline = Timeline(topology, FixedSteps((1.0,) * 3), "all_gather")
    timeline.control(2, 50_000_000)
    network = Paced(timeline, 1.0, now=clock.now, sleep=clock.sleep)
    send = Send(0, 1, 0, Bytes(values=1_000_000), 1)
    network.extend(
        [(w, op) for w in range(3) for op in (send, Receive(0, 1), Compute(0, 1), End())]
    )
    while network.turn(inf)[2] < inf:
        pass
    pace = network.end().pace
    assert pace is not None
    # Three payloads go round, each over the link once in a direction: two in two seconds.
    assert pace.links == {
        name: (pytest.approx(1e6, rel=1e-3), pytest.approx(1e6, rel=1e-3))
        for name in ("link:a>b", "link:b>a")
    }


def test_the_end_gives_out_what_was_held_back() -> None:
    """An interrupted run keeps the times of what was sent; nobody waits for them any more."""
    clock = FakeClock()
    network = gathering(pair(), 1.0, clock)
    network.extend([*STEP, *rounds(1)])
    network.turn(0.0)
    assert [sync.done_s for sync in network.end().syncs] == [2.0, 2.0]
    assert clock.passed_s == 0.0


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
