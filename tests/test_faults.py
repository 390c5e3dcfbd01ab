"""What faults draw: closed forms, shares and runs, and that nobody's order of asking matters."""

from __future__ import annotations

from itertools import groupby, islice, pairwise
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.errors import InputError
from islands.fault_kinds import Fault, parse_fault
from islands.faults import KEPT, Fate, Faults

ISLAND_OF = ("a", "a", "b", "b", "b", "c", "c", "c")


def faults(*texts: str, seed: int = 0, replicas: Any = (), workers: int = 8) -> Faults:
    given: list[Fault] = [parse_fault(text) for text in texts]
    return Faults(given, seed, ISLAND_OF[:workers], replicas)


# --- compute times


@pytest.mark.parametrize(
    ("every", "expected"), [(None, 1.1), (1, 1.27179), (10, 1.14918), (50, 1.12102)]
)
def test_stragglers_cost_what_the_closed_forms_say(every: int | None, expected: float) -> None:
    """8 workers, exponential 10 %, 10,000 steps: the mean step is 1.1, and with a barrier every H
    steps the mean over the largest of 8 sums: 1 + 0.1·H₈ for H = 1, and the expected largest of 8
    Gamma(H) sums. Within three standard errors of the sample."""
    compute = faults("straggler:jitter=exponential,mean=0.1").compute(FixedSteps((1.0,) * 8))
    steps = np.stack([compute.seconds(worker, 0, 10_000) for worker in range(8)])
    found = steps if every is None else steps.reshape(8, -1, every).sum(2).max(0) / every
    assert abs(found.mean() - expected) < 3 * found.std(ddof=1) / sqrt(found.size)
    assert found.std() > 0


@pytest.mark.parametrize("jitter", ["exponential", "lognormal", "gamma", "normal"])
@pytest.mark.parametrize(("mean", "std"), [(0.1, None), (0.3, 0.05), (0.3, 0.9)])
def test_jitter_has_the_mean_and_deviation_that_were_asked_for(
    jitter: str, mean: float, std: float | None
) -> None:
    """Of 80,000 draws; the normal one is cut where a step would take less than no time."""
    exponential = jitter == "exponential"
    given = f"straggler:jitter={jitter},mean={mean}"
    compute = faults(given + ("" if std is None or exponential else f",std={std}")).compute(
        FixedSteps((2.0,) * 8)
    )
    drawn = np.concatenate([compute.seconds(worker, 0, 10_000) for worker in range(8)]) / 2 - 1
    std = mean if std is None or exponential else std
    assert drawn.min() >= -1
    if jitter == "normal" and std > 0.5:
        assert (drawn == -1).any()
        return
    assert abs(drawn.mean() - mean) < 4 * std / sqrt(drawn.size)
    assert abs(drawn.std() / std - 1) < 0.1
    assert drawn.min() >= (-1 if jitter == "normal" else 0)


def test_jitter_without_deviation_is_a_constant() -> None:
    """std 0: every step takes 1 + mean of its time."""
    for jitter in ("lognormal", "gamma", "normal"):
        compute = faults(f"straggler:jitter={jitter},mean=0.5,std=0").compute(
            FixedSteps((2.0,) * 8)
        )
        assert compute.seconds(0, 0, 3).tolist() == [3.0] * 3


def test_slow_workers_and_islands_are_slow_and_no_others() -> None:
    """By number, by island; factors of several faults multiply."""
    slow = faults("slow:factor=2,worker=[0,3]", "slow:factor=3,island=b").compute(
        FixedSteps((1.0,) * 8)
    )
    found = [slow.seconds(worker, 5, 2).tolist() for worker in range(8)]
    assert found == [[f, f] for f in (2.0, 1.0, 3.0, 6.0, 3.0, 1.0, 1.0, 1.0)]


def test_a_pause_comes_every_so_often_of_nominal_computing() -> None:
    """Every 4 s, lasting 3 s: 1,000 pauses in 4,000 steps of 1 s, four steps apart, whatever else
    makes the steps longer; workers pause at different moments."""
    compute = faults("pause:every=4 s,lasting=3 s", "slow:factor=2").compute(FixedSteps((1.0,) * 8))
    starts = set()
    for worker in range(8):
        seconds = compute.seconds(worker, 0, 4000)
        paused = np.flatnonzero(seconds == 5.0)
        assert (seconds[np.setdiff1d(np.arange(4000), paused)] == 2.0).all()
        assert len(paused) == 1000
        assert (np.diff(paused) == 4).all()
        starts.add(int(paused[0]))
    assert len(starts) > 1


def test_several_short_pauses_may_fall_into_one_step() -> None:
    """Steps of 10 s and a pause every 2 s: five a step."""
    compute = faults("pause:every=2 s,lasting=1 s").compute(FixedSteps((10.0,) * 8))
    assert compute.seconds(3, 0, 5).tolist() == [15.0] * 5


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=6), st.randoms())
def test_step_times_do_not_depend_on_who_asks_for_what_first(cuts: list[int], random: Any) -> None:
    """In pieces and in any order: the same bits as in one piece."""
    texts = ("straggler", "pause:every=7 s,lasting=1 s", "straggler:jitter=gamma,island=a")
    base = FixedSteps((0.3,) * 8)
    whole = faults(*texts).compute(base).seconds(1, 0, sum(cuts))
    pieces, first = [], 0
    for count in cuts:
        pieces.append((first, count))
        first += count
    random.shuffle(pieces)
    compute = faults(*texts).compute(base)
    for start, count in pieces:
        assert (compute.seconds(1, start, count) == whole[start : start + count]).all()
        compute.seconds(0, start, count)


def test_time_lost_is_told_by_kind() -> None:
    """Each kind's own share; together they are what was added."""
    texts = ("slow:factor=2,worker=0", "straggler", "pause:every=5 s,lasting=1 s")
    compute = faults(*texts).compute(FixedSteps((1.0,) * 8))
    lost = compute.lost_s(0, 10, 100)  # type: ignore[attr-defined]
    assert set(lost) == {"slow", "straggler", "pause"}
    assert lost["pause"] == 20.0
    assert sum(lost.values()) == pytest.approx(compute.seconds(0, 10, 100).sum() - 100, rel=1e-12)
    assert lost["straggler"] > 0


def test_without_stretching_faults_the_base_itself_is_used() -> None:
    """Nothing is paid for what cannot happen."""
    base = FixedSteps((1.0,) * 8)
    assert faults("drop:probability=1", "crash:at=1 s").compute(base) is base


def test_seeds_workers_and_places_in_the_list_draw_differently() -> None:
    """And the same ones draw the same."""
    base = FixedSteps((1.0,) * 8)

    def drawn(worker: int = 0, seed: int = 0, *before: str) -> list[float]:
        compute = faults(*before, "straggler", seed=seed).compute(base)
        return compute.seconds(worker, 0, 4).tolist()

    assert drawn() == drawn()
    different = [drawn(), drawn(1), drawn(0, 1), drawn(0, 0, "drop:probability=1")]
    assert len({tuple(d) for d in different}) == 4


# --- drops


def lossy(made: Faults, worker: int, rounds: int, fragment: int = 0) -> list[bool]:
    return [made.dropped(worker, fragment, version).up for version in range(1, rounds + 1)]


@pytest.mark.parametrize(("p", "burst", "run"), [(0.3, 1, 1 / 0.7), (0.3, 5, 5.0), (0.5, 20, 20)])
def test_drops_have_their_share_and_their_run_length(p: float, burst: float, run: float) -> None:
    """Over 4 workers × 20,000 rounds: the share within four standard errors of a chain of such
    runs, the mean length of a run of losses within 10 %."""
    made = faults(f"drop:probability={p},burst={burst}")
    lengths = []
    lost = 0
    for worker in range(4):
        found = lossy(made, worker, 20_000)
        lost += sum(found)
        lengths += [len(list(group)) for drop, group in groupby(found) if drop]
    correlated = max(1.0, 2 * burst)  # rounds that tell about as much as one alone
    assert abs(lost / 80_000 - p) < 4 * sqrt(p * (1 - p) * correlated / 80_000)
    assert np.mean(lengths) == pytest.approx(run, rel=0.1)


def test_a_first_round_is_lost_as_often_as_any() -> None:
    """Bursts begin in their steady state: 200 seeds, four standard errors."""
    share = np.mean(
        [lossy(faults("drop:probability=0.5,burst=9", seed=s), 0, 1) for s in range(200)]
    )
    assert abs(share - 0.5) < 4 * sqrt(0.25 / 200)


@pytest.mark.parametrize("burst", [1, 4])
def test_drops_do_not_depend_on_the_order_of_asking(burst: int) -> None:
    """The last round first; fragments and workers draw for themselves."""
    text = f"drop:probability=0.4,burst={burst}"
    made = faults(text)
    backwards = [made.dropped(2, 1, version).up for version in range(600, 0, -1)][::-1]
    assert backwards == lossy(faults(text), 2, 600, fragment=1)
    assert len({tuple(lossy(made, w, 100, f)) for w in range(3) for f in range(2)}) == 6


@pytest.mark.parametrize(
    ("text", "fate"),
    [
        ("drop:probability=1", Fate(True, True, True, True)),
        ("drop:probability=1,direction=up", Fate(True, False, True, True)),
        ("drop:probability=1,direction=down", Fate(False, True, True, True)),
        ("drop:probability=1,on_drop=lose", Fate(True, True, False, True)),
        ("drop:probability=1,anchor=last_received", Fate(True, True, True, False)),
        ("drop:probability=0,on_drop=lose", KEPT),
        ("drop:probability=1,island=b", KEPT),
    ],
)
def test_a_fate_says_what_is_lost_and_what_comes_of_it(text: str, fate: Fate) -> None:
    """Worker 0 is in island a."""
    assert faults(text).dropped(0, 0, 1) == fate


def test_one_draw_decides_both_directions() -> None:
    """direction: both loses both or neither; up and down as two faults lose them separately."""
    both = faults("drop:probability=0.5")
    apart = faults("drop:probability=0.5,direction=up", "drop:probability=0.5,direction=down")
    pairs = [
        {(fate.up, fate.down) for fate in (made.dropped(0, 0, v) for v in range(1, 200))}
        for made in (both, apart)
    ]
    assert pairs[0] == {(True, True), (False, False)}
    assert len(pairs[1]) == 4


# --- corruption


def test_payloads_are_corrupted_where_and_when_it_was_said() -> None:
    """Rounds 3 to 5 of island b, and always one worker; the first fault that strikes counts."""
    made = faults("corrupt:how=scale,factor=3,rounds=[3,5],island=b", "corrupt:how=flip,worker=2")
    found = [made.corruption(2, 0, version) for version in range(1, 8)]
    assert [c.how for c in found if c] == ["flip", "flip", *["scale"] * 3, "flip", "flip"]
    assert [c.factor for c in found if c][2:5] == [3.0] * 3
    assert len({c.seed for c in found if c}) == 7
    assert made.corruption(0, 0, 3) is None
    assert made.corruption(2, 0, 3) == found[2]
    assert made.corrupts


def test_a_probability_of_corruption_is_its_share() -> None:
    """4,000 rounds, four standard errors."""
    made = faults("corrupt:how=nan,probability=0.2")
    share = np.mean([made.corruption(1, 0, v) is not None for v in range(1, 4001)])
    assert abs(share - 0.2) < 4 * sqrt(0.16 / 4000)


# --- crashes


def test_crashes_at_given_moments_and_for_good() -> None:
    """In the order of time; the last one ends it."""
    made = faults("crash:at=9 s,worker=0", "crash:at=2 s,downtime=3 s,island=a")
    assert list(made.crashes(0)) == [(2.0, 3.0), (9.0, inf)]
    assert list(made.crashes(1)) == [(2.0, 3.0)]
    assert list(made.crashes(2)) == []
    assert made.crashes_happen


def test_failures_have_their_mean_time_between_them() -> None:
    """Of living, not of being away: 4,000 failures, four standard errors."""
    times = list(islice(faults("crash:mtbf=10 s,downtime=5 s").crashes(0), 4000))
    begun = [0.0, *(time_s + away_s for time_s, away_s in times[:-1])]
    lived = np.array([time_s for time_s, _ in times]) - begun
    assert abs(lived.mean() - 10) < 4 * 10 / sqrt(4000)
    assert times == list(islice(faults("crash:mtbf=10 s,downtime=5 s").crashes(0), 4000))
    other = list(islice(faults("crash:mtbf=10 s,downtime=5 s").crashes(1), 3))
    assert times[:3] != other


def test_who_is_away_cannot_die() -> None:
    """A failure that is drawn into another's downtime does not happen."""
    made = faults("crash:at=0 s,downtime=50 s", "crash:mtbf=10 s,downtime=1 s")
    first, *rest = islice(made.crashes(0), 20)
    assert first == (0.0, 50.0)
    assert rest[0][0] >= 50
    assert all(b >= a + away for (a, away), (b, _) in pairwise(rest))


# --- membership


@pytest.mark.parametrize(
    ("texts", "replicas", "expected"),
    [
        ((), (), ((0, 100),)),
        (("leave:worker=3,step=40",), (), ((0, 40),)),
        (("join:island=b,step=40",), (), ((40, 100),)),
        (("leave:worker=3,step=0",), (), ()),
        (("leave:worker=3,step=20", "join:step=60,worker=3"), (), ((0, 20), (60, 100))),
        (("join:worker=3,step=20", "leave:island=b,step=60"), (), ((20, 60),)),
        (("leave:worker=3,step=100",), (), ((0, 100),)),
        (("leave:worker=3,step=500",), (), ((0, 100),)),
        (("leave:worker=0,step=10",), (), ((0, 100),)),
        ((), ((0, 4),), ((0, 100),)),
        ((), ((0, 3),), ()),
        ((), ((0, 1), (30, 4), (50, 8), (80, 3)), ((30, 80),)),
        (("leave:worker=3,step=40",), ((0, 1), (30, 4)), ((30, 40),)),
    ],
)
def test_when_a_worker_takes_part(texts: Any, replicas: Any, expected: Any) -> None:
    """Worker 3, of island b, in a run of 100 steps."""
    made = faults(*texts, replicas=replicas)
    assert made.spans(3, 100) == expected
    assert made.elastic == bool(texts or replicas)


# --- windows


class Edge(NamedTuple):
    name: str
    source: str
    target: str


def pair(name: str, a: str, b: str) -> list[Edge]:
    return [Edge(f"{name}:{a}>{b}", a, b), Edge(f"{name}:{b}>{a}", b, a)]


CHAIN = [*pair("ab", "a", "b"), *pair("bc", "b", "c")]
STAR = [
    Edge(name, *ends)
    for island in "abc"
    for name, ends in ((f"uplink:{island}", (island, "")), (f"downlink:{island}", ("", island)))
]
BACKBONE = [Edge("backbone", "", "")]


@pytest.mark.parametrize(
    ("text", "edges", "cut"),
    [
        ("outage:link=ab", CHAIN, "ab:a>b ab:b>a"),
        ("outage:link=ab:b>a", CHAIN, "ab:b>a"),
        ("outage:link=[bc, 'ab:b>a']", CHAIN, "ab:b>a bc:b>c bc:c>b"),
        ("outage:island=a", CHAIN, "ab:a>b ab:b>a"),
        ("outage:island=[a, b]", CHAIN, "ab:a>b ab:b>a bc:b>c bc:c>b"),
        ("outage:link=backbone", BACKBONE, "backbone"),
        ("outage:link=uplink:b", STAR, "uplink:b"),
        ("outage:island=b", STAR, "uplink:b downlink:b"),
        ("partition:islands=a", CHAIN, "ab:a>b ab:b>a"),
        ("partition:islands=b", CHAIN, "ab:a>b ab:b>a bc:b>c bc:c>b"),
        ("partition:groups=[[a,b],[c]]", CHAIN, "bc:b>c bc:c>b"),
        ("partition:islands=a", STAR, "uplink:a downlink:a"),
        ("partition:groups=[[a],[b,c]]", [*STAR, *BACKBONE], "uplink:a downlink:a"),
        ("partition:groups=[[a],[b],[c]]", BACKBONE, "backbone"),
        ("partition:groups=[[a,b],[c]]", [*CHAIN, *STAR[:2]], "bc:b>c bc:c>b"),
    ],
)
def test_which_links_an_outage_touches(text: str, edges: list[Edge], cut: str) -> None:
    """Both directions of a link, all of an island, all between groups; through a core an island is
    cut off by its own lines."""
    found = faults(text).windows(edges)
    assert sorted(found) == sorted(cut.split(" "))
    for windows in found.values():
        assert [(w.from_s, w.to_s, w.every_s, w.value) for w in windows] == [(0.0, inf, None, 0.0)]


@pytest.mark.parametrize("edges", [BACKBONE, [*STAR[:4], *BACKBONE], STAR[::2]])
def test_a_core_that_tells_nobody_apart_is_no_place_for_a_partition(edges: list[Edge]) -> None:
    """Two islands of a group still need the core, and the third has no lines of its own to cut."""
    with pytest.raises(InputError, match=r"faults\.0\.groups: these islands meet in the network's"):
        faults("partition:groups=[[a,b],[c]]").windows(edges)


def test_windows_say_when_and_how_much_is_left() -> None:
    """1 Mbit/s is 125,000 bytes per second; a link's windows come in the order of the faults."""
    found = faults(
        "outage:link=ab,from=1 s,to=2 s,every=10 s,bandwidth=1 Mbit/s",
        "outage:link=ab:a>b,from=3 s,to=4 s",
    ).windows(CHAIN)
    plain = {
        name: [(w.from_s, w.to_s, w.every_s, w.value) for w in windows]
        for name, windows in found.items()
    }
    degraded, cut = (1.0, 2.0, 10.0, 125_000.0), (3.0, 4.0, None, 0.0)
    assert plain == {"ab:a>b": [degraded, cut], "ab:b>a": [degraded]}
