"""A timeline on the wall clock: absolute deadlines, and the lag and the rates that it reports.

The clock here passes only while somebody sleeps, so that moments are exact; its sleep ends late, as
a real one does.
"""

from __future__ import annotations

from math import inf

import pytest
from fake_clock import LATE_S, LOOK_S, FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.network import Timeline, Topology
from islands.network.pace import Paced, measure_pace
from islands.network.timed import Reply
from islands.network.timed_timeline import TimedTimeline
from islands.network.topology import Site, Wire
from islands.trace import Bytes, Compute, End, Op, Receive, Send


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
    timeline = TimedTimeline(pair(delay_s=0.25), FixedSteps((5.0, 1.0)), "star")
    network = Paced(timeline, 2.0, now=clock.now, sleep=clock.sleep)
    for worker in (0, 1):
        send = Send(0, 1, 1, Bytes(values=1_000_000), 1)
        network.extend([(worker, op) for op in (Compute(0, 1), send, Receive(0, 1))])
    assert network.turn(4.0)[1] is None
    timings, arrival, _ = network.turn(4.0)
    assert arrival is not None
    assert (arrival.time_s, arrival.worker, timings.syncs) == (2.25, 1, [])
    assert clock.passed_s == pytest.approx(4.5, abs=2 * LOOK_S)
    network.act([Reply(1, 0, 1, 1_000_000, 1)])
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
