"""Fluid max-min fair sharing: golden times, laws, other jobs, changing bandwidths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.network.background import Arrivals, Load
from islands.network.fair import FairShare, Finished
from islands.network.maxmin import Group, Pipe, fill
from islands.network.shared_pipe import EndedOn
from islands.network.steps import Steps, Window

MEGABIT = 125_000.0


class Begin(NamedTuple):
    """A flow of ours."""

    at_s: float
    route: tuple[int, ...]
    size: float


class Scripted:
    """Other jobs' arrivals at given moments."""

    def __init__(self, script: Sequence[tuple[float, float]]) -> None:
        self.left = sorted(script)

    @property
    def peek_s(self) -> float:
        return self.left[0][0] if self.left else inf

    def pop(self) -> tuple[float, float]:
        return self.left.pop(0)


class Recorded:
    """What a resource was told about its use: (start, finish, share)."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, float, float]] = []

    def add(self, start_s: float, finish_s: float, share: float = 1.0) -> None:
        self.parts.append((start_s, finish_s, share))


@dataclass
class Network:
    """Capacities, caps and other jobs' arrivals, by resource."""

    capacity: list[Steps | float]
    cap: list[float] = field(default_factory=list)
    others: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def share(self, usage: Mapping[int, Recorded] | None = None) -> FairShare:
        cap = self.cap or [inf] * len(self.capacity)
        arrivals = {number: Scripted(script) for number, script in self.others.items()}
        return FairShare(self.capacity, cap, arrivals, usage or {})  # type: ignore[arg-type]


def run(share: FairShare, begins: Sequence[Begin], until_s: float = inf) -> dict[int, Finished]:
    """Let all flows begin, numbered as given, and everything happen up to ``until_s``."""
    found: list[Finished] = []
    for number, flow in sorted(enumerate(begins), key=lambda item: item[1].at_s):
        while share.next_s <= flow.at_s:
            found += share.step()
        share.begin(flow.at_s, number, flow.route, flow.size, f"flow {number}")
    while share.next_s < until_s:
        found += share.step()
    assert [flow.finish_s for flow in found] == sorted(flow.finish_s for flow in found)
    return {flow.order: flow for flow in found}


def finishes(share: FairShare, begins: Sequence[Begin]) -> list[float]:
    """When each flow finishes; inf if it does not."""
    found = run(share, begins)
    return [found[n].finish_s if n in found else inf for n in range(len(begins))]


# --- an independent simulation, flow by flow ------------------------------------------------------


@dataclass
class Naive:
    """One flow of the naive simulation; ``number`` is None if it is another job's."""

    route: tuple[int, ...]
    left: float
    cap: float
    number: int | None
    began_s: float
    size: float
    lost_s: float = 0.0
    rate: float = 0.0


def naive_rates(flows: Sequence[Naive], limit: Sequence[float]) -> None:
    """Water filling by the book: raise all rates together until something is full."""
    growing = list(flows)
    left = list(limit)
    for flow in flows:
        flow.rate = 0.0
    while growing:
        crossing = [sum(f.route.count(n) for f in growing) for n in range(len(limit))]
        room = [left[n] / c for n, c in enumerate(crossing) if c]
        rise = min([*room, *[f.cap - f.rate for f in growing]])
        full = {n for n, c in enumerate(crossing) if c and left[n] / c <= rise * (1 + 1e-12)}
        for flow in growing:
            flow.rate += rise
        left = [
            0.0 if n in full else left[n] - rise * c if c else left[n]
            for n, c in enumerate(crossing)
        ]
        growing = [f for f in growing if not full & set(f.route) and f.rate < f.cap * (1 - 1e-12)]


def naive(
    network: Network, begins: Sequence[Begin], end_s: float
) -> tuple[dict[int, tuple[float, float]], dict[int, int], list[float]]:
    """(finish, seconds lost) of our flows; other jobs' ended flows and bytes carried, by resource.

    Everything on every resource is simulated all the time, up to ``end_s``.
    """
    width = len(network.capacity)
    cap = network.cap or [inf] * width
    coming = [(at_s, route, size, number) for number, (at_s, route, size) in enumerate(begins)] + [
        (at_s, (resource,), size, None)
        for resource, script in network.others.items()
        for at_s, size in script
    ]
    coming.sort(key=lambda flow: flow[0])
    now, flows = 0.0, list[Naive]()
    found: dict[int, tuple[float, float]] = {}
    ended = dict.fromkeys(network.others, 0)
    carried = [0.0] * width
    while True:
        limit, changes = [], [end_s]
        for steps in network.capacity:
            value, until_s = steps.piece(now) if isinstance(steps, Steps) else (steps, inf)
            limit.append(value)
            changes.append(until_s)
        naive_rates(flows, limit)
        ends = [now + f.left / f.rate if f.rate else inf for f in flows]
        event = min([*ends, *changes, *[flow[0] for flow in coming[:1]]])
        for flow in flows:
            alone = min(flow.cap, *[limit[n] for n in flow.route])
            if alone:
                flow.lost_s += (event - now) * (1 - flow.rate / alone)
            flow.left -= flow.rate * (event - now)
            for resource in flow.route:
                carried[resource] += flow.rate * (event - now)
        now = event
        if now >= end_s:
            return found, ended, carried
        for flow in [f for f in flows if f.left <= 1e-9 * f.size]:
            flows.remove(flow)
            if flow.number is None:
                ended[flow.route[0]] += 1
            else:
                found[flow.number] = now, flow.lost_s
        while coming and coming[0][0] <= now:
            at_s, route, size, number = coming.pop(0)
            most = min(cap[n] for n in route)
            flows.append(Naive(route, size, most, number, at_s, size))


# --- any network, any flows -----------------------------------------------------------------------

MOMENTS = st.integers(0, 40).map(lambda n: n / 4)
SIZES = st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0, 10.0])
RATES = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])


@st.composite
def changing(draw: st.DrawFn) -> Steps | float:
    """A bandwidth: mostly constant, else in two steps, repeating or not, cut for a while or not."""
    kind = draw(st.integers(0, 5))
    if kind < 3:
        return draw(RATES)
    times = (0.0, draw(st.sampled_from([0.5, 1.25, 4.0])))
    values = (draw(RATES), draw(RATES))
    windows = (Window(3.0, 4.5, None, 0.0),) if kind == 5 else ()
    return Steps(times, values, period_s=6.0 if kind > 3 else None, windows=windows)


@st.composite
def networks(draw: st.DrawFn) -> tuple[Network, list[Begin]]:
    """Up to four resources with caps and other jobs, and up to eight flows of ours."""
    width = draw(st.integers(1, 4))
    capacity = [draw(changing()) for _ in range(width)]
    cap = [draw(st.sampled_from([inf, inf, 1.5, 4.0])) for _ in range(width)]
    script = st.lists(st.tuples(MOMENTS, SIZES), max_size=5)
    others = {n: draw(script) for n in range(width) if draw(st.booleans())}
    route = st.permutations(range(width)).flatmap(
        lambda order: st.integers(1, width).map(lambda hops: tuple(order[:hops]))
    )
    flows = st.lists(st.builds(Begin, MOMENTS, route, SIZES), min_size=1, max_size=8)
    return Network(capacity, cap, others), draw(flows)


@settings(deadline=None, max_examples=200)
@given(networks())
def test_any_flows_finish_when_a_naive_simulation_says(case: tuple[Network, list[Begin]]) -> None:
    """Also what each lost to others, what other jobs sent, and what each resource carried."""
    network, begins = case
    end_s = 1000.0
    usage = {n: Recorded() for n in range(len(network.capacity))}
    share = network.share(usage)
    found = run(share, begins)
    share.catch_up(end_s)

    expected, ended, carried = naive(network, begins, end_s)
    assert found.keys() == expected.keys()
    for number, flow in found.items():
        finish_s, lost_s = expected[number]
        assert flow.finish_s == pytest.approx(finish_s, rel=1e-9)
        assert flow.own_s + flow.background_s == pytest.approx(lost_s, rel=1e-9, abs=1e-9)
        assert min(flow.own_s, flow.background_s) >= -1e-12
        assert flow.what == f"flow {number}"
    assert {n: totals.count for n, totals in share.background.items()} == ended
    for n, recorded in usage.items():
        through = 0.0
        before = 0.0
        for start_s, finish_s, part in recorded.parts:
            assert before <= start_s < finish_s
            assert 0 < part <= 1 + 1e-12  # never above its capacity
            before = finish_s
            while start_s < finish_s:
                steps = network.capacity[n]
                value, until_s = steps.piece(start_s) if isinstance(steps, Steps) else (steps, inf)
                through += part * value * (min(until_s, finish_s) - start_s)
                start_s = until_s
        assert through == pytest.approx(carried[n], rel=1e-9)


@settings(deadline=None)
@given(networks(), st.randoms(use_true_random=False))
def test_the_order_in_which_flows_of_one_moment_begin_does_not_matter(
    case: tuple[Network, list[Begin]], random: object
) -> None:
    """Not in a single bit, nor for what was lost to whom."""
    network, begins = case
    numbered = [(n, flow._replace(at_s=round(flow.at_s / 5))) for n, flow in enumerate(begins)]

    def run_numbered(numbered: Sequence[tuple[int, Begin]]) -> list[Finished]:
        found = run(network.share(), [flow for _, flow in numbered])
        return sorted(
            flow._replace(order=numbered[flow.order][0], what=None) for flow in found.values()
        )

    shuffled = list(numbered)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert run_numbered(shuffled) == run_numbered(numbered)


@settings(deadline=None)
@given(networks(), st.lists(st.builds(Begin, MOMENTS, st.just((0,)), SIZES), min_size=1))
def test_later_flows_change_nothing_that_was_answered(
    case: tuple[Network, list[Begin]], more: list[Begin]
) -> None:
    """What has finished before the first additional flow begins is the same without it."""
    network, begins = case
    from_s = max(flow.at_s for flow in begins)
    later = [flow._replace(at_s=flow.at_s + from_s) for flow in more]
    first_s = min(flow.at_s for flow in later)
    alone, together = run(network.share(), begins), run(network.share(), [*begins, *later])
    for number, flow in alone.items():
        if flow.finish_s <= first_s:
            assert together[number] == flow


@given(
    st.lists(
        st.tuples(
            st.frozensets(st.integers(0, 4), min_size=1),
            st.integers(1, 4),
            st.sampled_from([0.3, 1.0, 2.0, 5.0, inf]),
        ),
        min_size=1,
        max_size=10,
    ),
    st.lists(st.sampled_from([0.0, 0.7, 1.0, 3.0, 10.0, inf]), min_size=5, max_size=5),
)
def test_any_rates_are_max_min_fair(
    wanted: list[tuple[frozenset[int], int, float]], capacity: list[float]
) -> None:
    """No pipe is above its capacity, and each flow is at its cap or on a full pipe on which no
    flow has more: it could not get more without taking from one that has no more than it."""
    pipes = [Pipe(n, bytes_per_s, inf) for n, bytes_per_s in enumerate(capacity)]
    groups = []
    for route, count, cap in wanted:
        crossed = [pipes[n] for n in sorted(route)]
        groups.append(Group(tuple(sorted(route)), crossed, cap, False))
        groups[-1].flows = [(1.0, n, n, 0.0, 0.0, None) for n in range(count)]
        for pipe in crossed:
            pipe.groups.append(groups[-1])
            pipe.own += count
    fill(pipes, groups)

    def load(pipe: Pipe) -> float:
        return sum(group.level * len(group.flows) for group in pipe.groups)

    for pipe in pipes:
        assert load(pipe) <= pipe.bytes_per_s * (1 + 1e-12)
        assert pipe.left == inf or pipe.left == pytest.approx(
            pipe.bytes_per_s - load(pipe), abs=1e-9
        )
    for group in groups:
        assert 0 <= group.level <= group.cap_per_s
        held = group.level == group.cap_per_s or any(
            load(pipe) >= pipe.bytes_per_s * (1 - 1e-12)
            and group.level >= max(other.level for other in pipe.groups) * (1 - 1e-12)
            for pipe in group.pipes
        )
        assert held


# --- golden cases ---------------------------------------------------------------------------------


def test_three_flows_of_a_megabyte() -> None:
    """Two flows of 1 MB on 8 Mbit/s, and a third from 0.5 s: 2.75, 2.75 and 3 seconds."""
    begins = [Begin(0, (0,), 1e6), Begin(0, (0,), 1e6), Begin(0.5, (0,), 1e6)]
    found = run(Network([8 * MEGABIT]).share(), begins)
    assert [found[n].finish_s for n in range(3)] == pytest.approx([2.75, 2.75, 3.0], abs=1e-9)
    assert [found[n].own_s for n in range(3)] == pytest.approx([1.75, 1.75, 1.5], abs=1e-9)
    assert {found[n].background_s for n in range(3)} == {0.0}


def test_a_long_route_gets_what_its_fullest_resource_leaves() -> None:
    """The parking lot: the flow over both gets the smaller share, the others what is left."""
    begins = [Begin(0, (0, 1), 3.0), Begin(0, (0,), 9.0), Begin(0, (1,), 9.0)]
    # Rates: 3 on the first (6 / 2), then 10 − 3 = 7 on the second.
    found = run(Network([6.0, 10.0]).share(), begins)
    assert found[0].finish_s == 1.0
    assert found[1].finish_s == 1.0 + 6.0 / 6.0
    assert found[2].finish_s == pytest.approx(1.0 + 2.0 / 10.0)
    assert found[0].own_s == 0.5  # alone it gets 6
    assert found[2].own_s == pytest.approx(0.3)  # it had 7 of 10


def test_a_flow_alone_loses_nothing() -> None:
    """Nor does one whose bottleneck is its own, whoever crosses its other resources."""
    network = Network([10.0, 1.0], others={0: [(0.0, 3.0), (0.5, 1.0)]})
    found = run(network.share(), [Begin(0.1, (0, 1), 1.0)])
    assert found[0][:1] + found[0][3:] == (1.1, 0.0, 0.0)


def test_a_cap_holds_one_flow_and_leaves_the_rest_to_others() -> None:
    """A flow gets no more than the least cap of its route, alone or not; the time that this costs
    is not lost to anyone. Unlimited resources have caps too."""
    network = Network([8.0, inf], cap=[inf, 2.0])
    found = run(network.share(), [Begin(0, (0, 1), 4.0), Begin(0, (0,), 12.0), Begin(9, (1,), 4.0)])
    assert [found[n].finish_s for n in range(3)] == [2.0, 2.0, 11.0]
    assert found[0].own_s == 0.0
    assert found[1].own_s == pytest.approx(0.5)


def test_what_nothing_limits_ends_at_once() -> None:
    """A flow over unlimited resources, and one of no bytes wherever it goes, also over a cut."""
    network = Network([inf, 5.0, 0.0])
    share = network.share()
    begins = [Begin(1, (0,), 1e12), Begin(2, (0, 1), 0.0), Begin(3, (2,), 0.0), Begin(3, (1,), 5.0)]
    assert finishes(share, begins) == [1.0, 2.0, 3.0, 4.0]
    assert share.stuck() is None


def test_a_bandwidth_may_become_unlimited() -> None:
    """Whatever is on the way is through at that moment."""
    steps = Steps((0.0, 2.0), (1.0, inf))
    assert finishes(Network([steps]).share(), [Begin(0, (0,), 9), Begin(0, (0,), 1.0)]) == [2, 2]


def test_flows_in_flight_feel_another_bandwidth() -> None:
    """4 B/s up to 1 s, then 1 B/s: eight bytes of two flows need 1 + 4 seconds."""
    steps = Steps((0.0, 1.0), (4.0, 1.0))
    found = run(Network([steps]).share(), [Begin(0, (0,), 4.0), Begin(0, (0,), 4.0)])
    assert found[0].finish_s == found[1].finish_s == 5.0
    assert found[0].own_s == pytest.approx(2.5)  # half of the time, at either bandwidth


def test_what_is_lost_follows_what_a_flow_would_get_alone() -> None:
    """Half of 8 is 4 all the time, but alone it would be 6 and then, by another resource, 5."""
    network = Network([8.0, Steps((0.0, 1.0), (6.0, 5.0))])
    found = run(network.share(), [Begin(0, (0, 1), 8.0), Begin(0, (0,), 8.0)])
    assert found[0].finish_s == 2.0
    assert found[0].own_s == pytest.approx((1 - 4 / 6) + (1 - 4 / 5))


def test_a_flow_too_short_for_the_clock_ends() -> None:
    """Late enough, a moment plus a short time is that moment."""
    share = Network([1e8]).share()
    share.begin(1e9, 0, (0,), 1.0, None)
    assert [flow.finish_s for flow in share.step()] == [1e9]


def test_what_was_sent_before_costs_no_precision() -> None:
    """A byte after 1e17 others, on the same resource, takes its time."""
    steps = Steps((0.0, 2.0), (1e17, 1.0))
    network = Network([steps], others={0: [(0.0, 1e17), (3.0, 1.0)]})
    assert finishes(network.share(), [Begin(3, (0,), 1.0)]) == [5.0]
    share = network.share()
    assert finishes(share, [Begin(0, (0,), 1e17), Begin(6, (0,), 1.0)]) == [2.0, 7.0]
    assert share.background[0].last_s == 4.0


def test_a_cut_for_a_while_is_nobodys_queue() -> None:
    """The time in which nothing moves is neither lost to our own flows nor to other jobs."""
    steps = Steps((0.0,), (2.0,), windows=(Window(1.0, 11.0, None, 0.0),))
    found = run(Network([steps]).share(), [Begin(0, (0,), 2.0), Begin(0, (0,), 2.0)])
    assert found[0].finish_s == 12.0
    assert found[0].own_s == pytest.approx(1.0)


def test_a_cut_for_good_holds_its_flows_and_no_others() -> None:
    """Those elsewhere finish; then nothing happens any more and the resource is named."""
    cut = Steps((0.0,), (2.0,), windows=(Window(1.0, inf, None, 0.0),))
    network = Network([4.0, cut, 1.0], others={0: [(n / 2, 0.1) for n in range(40)]})
    share = network.share()
    begins = [
        Begin(0, (1, 0), 9.0),
        Begin(0, (1, 2), 9.0),
        Begin(0, (2,), 3.0),
        Begin(0, (1,), 0.5),
    ]
    found = run(share, begins, until_s=2.0)
    assert sorted(found) == [3]
    assert share.stuck() is None  # flow 2 still moves
    (last,) = share.step()
    assert (last.order, last.finish_s) == (2, pytest.approx(3.5))
    assert share.next_s == inf
    assert share.stuck() == 1
    share.catch_up(30.0)
    assert share.background[0].count == 40
    share.begin(31.0, 9, (0,), 4.0, None)
    assert share.stuck() is None
    assert share.next_s == 32.0
    share.step()
    share.begin(40.0, 10, (1,), 4.0, None)
    assert (share.next_s, share.stuck()) == (inf, 1)


@pytest.mark.parametrize("size", [3.0, 100.0])
def test_nothing_is_left_to_happen_where_the_last_flow_is_held(size: float) -> None:
    """Not its own end, nor those of other jobs that shared with it."""
    cut = Steps((0.0,), (2.0,), windows=(Window(1.0, inf, None, 0.0),))
    share = Network([4.0, cut], others={0: [(0.5, 8.0)]}).share()
    assert run(share, [Begin(0, (0, 1), size)], until_s=2.0) == {}
    assert (share.next_s, share.stuck()) == (inf, 1)
    share.catch_up(9.0)
    assert share.background[0].last_s == pytest.approx(2.75)  # it had 2, then all of 4


def test_a_trace_may_end_before_a_flow_does() -> None:
    """The resource and the moment are named; a flow that is through by then is not concerned."""
    share = Network([9.0, Steps((0.0,), (1.0,), ends_s=3.0)]).share()
    share.begin(0.0, 0, (0, 1), 3.0, None)
    assert [flow.finish_s for flow in share.step()] == [3.0]
    share.catch_up(10.0)
    share = Network([9.0, Steps((0.0,), (1.0,), ends_s=3.0)], others={1: [(1.0, 1.0)]}).share()
    share.begin(0.0, 0, (0, 1), 3.0, None)
    with pytest.raises(EndedOn) as ended:
        run(share, [])
    assert (ended.value.resource, ended.value.time_s) == (1, 3.0)


def test_time_goes_forward_only() -> None:
    """A flow cannot begin before what has happened, nor after what has not."""
    share = Network([1.0]).share()
    share.begin(5.0, 0, (0,), 1.0, None)
    with pytest.raises(ValueError, match="cannot begin at 4"):
        share.begin(4.0, 1, (0,), 1.0, None)
    with pytest.raises(ValueError, match="cannot begin at 7"):
        share.begin(7.0, 1, (0,), 1.0, None)
    assert share.next_s == 6.0
    share.step()
    assert share.step() == []


def test_finished_flows_come_in_their_order() -> None:
    """Those of one moment by ``order``, over all resources."""
    share = Network([1.0, 1.0]).share()
    for order, route in ((3, (0,)), (1, (1,)), (2, (0,)), (0, (1,))):
        share.begin(0.0, order, route, 1.0, None)
    share.begin(0.0, -1, (1,), 0.0, None)
    assert [flow.order for flow in share.step()] == [-1]
    assert [flow.order for flow in share.step()] == [0, 1, 2, 3]


def test_a_full_resource_is_used_up_exactly() -> None:
    """Whatever the number of flows, so that hours of full use are one stretch."""
    usage = {0: Recorded()}
    share = Network([0.1]).share(usage)
    finishes(share, [Begin(n / 8, (0,), 0.3) for n in range(24)])  # (0.1 / 19) * 19 is not 0.1
    assert {part for *_, part in usage[0].parts} == {1.0}


def test_events_that_no_longer_stand_do_not_pile_up() -> None:
    """A flow for a long time, while thousands of others come and go."""
    share = Network([1e3], others={0: [(n / 10, 1.0) for n in range(5000)]}).share()
    share.begin(0.0, 0, (0,), 1e6, None)
    most = 0
    while share.next_s < inf:
        share.step()
        most = max(most, len(share._events))
    assert most < 200


# --- other jobs -----------------------------------------------------------------------------------


def test_other_jobs_share_like_ours_and_the_loss_is_split_by_rate() -> None:
    """Two of ours and one of another job on one resource: each gets a third, and loses one third
    of its time to either of the two others."""
    network = Network([3.0], others={0: [(0.0, 30.0)]})
    found = run(network.share(), [Begin(0, (0,), 3.0), Begin(0, (0,), 3.0)])
    for flow in found.values():
        assert flow.finish_s == pytest.approx(3.0)
        assert flow.own_s == pytest.approx(1.0)
        assert flow.background_s == pytest.approx(1.0)


def test_other_jobs_are_capped_like_ours() -> None:
    """One of them at 1 of 4 leaves 3 to a flow whose own cap is elsewhere."""
    network = Network([4.0, 9.0], cap=[1.0, inf], others={0: [(0.0, 2.0), (0.5, 1.0)]})
    usage = {0: Recorded()}
    share = network.share(usage)
    share.catch_up(9.0)
    assert usage[0].parts == [(0.0, 0.5, 0.25), (0.5, 1.5, 0.5), (1.5, 2.0, 0.25)]
    totals = share.background[0]
    assert (totals.bytes, totals.count, totals.queued_s) == (3, 2, 0.0)
    assert (totals.first_start_s, totals.last_s) == (0.0, 2.0)


def test_how_much_longer_other_jobs_took_is_summed() -> None:
    """Two that share lose half of their time, whatever the bandwidth; one alone nothing."""
    steps = Steps((0.0, 2.0), (4.0, 1.0))
    share = Network([steps], others={0: [(0.0, 6.0), (0.0, 6.0), (20.0, 3.0)]}).share()
    share.catch_up(30.0)
    totals = share.background[0]
    assert (totals.count, totals.last_s) == (3, 23.0)
    assert totals.queued_s == pytest.approx(6.0)
    assert share.next_s == inf


def test_a_resource_costs_nothing_until_it_is_used() -> None:
    """Other jobs' arrivals there are drawn when a flow of ours comes, and only up to then."""
    network = Network([1.0, 1.0], others={n: [(m / 2, 0.4) for m in range(100)] for n in (0, 1)})
    arrivals = {n: Scripted(script) for n, script in network.others.items()}
    share = FairShare([1.0, 1.0], [inf, inf], arrivals, {})  # type: ignore[arg-type]
    share.begin(10.2, 0, (0,), 0.05, None)
    assert [flow.finish_s for flow in share.step()] == [pytest.approx(10.3)]
    assert share.next_s == inf  # though another job's flow is there
    assert len(arrivals[0].left) == 100 - 21
    assert len(arrivals[1].left) == 100
    share.catch_up(60.0)
    assert not arrivals[0].left
    assert not arrivals[1].left


@pytest.mark.parametrize("exponential", [False, True], ids=["M/D/1", "M/M/1"])
def test_processor_sharing_stretches_every_flow_by_one_over_one_minus_load(
    exponential: bool,
) -> None:
    """In processor sharing with Poisson arrivals a flow of x seconds takes x / (1 − load) on
    average, whatever the sizes of the others (Kleinrock 1976, *Queueing Systems* 2, 4.4): measured
    with flows of ours so seldom that they do not meet, within three standard errors.
    """
    load, each_s, apart_s = 0.5, 1.5, 60.0
    spec = Load(load, 1e6, exponential=exponential)
    share = FairShare([1e6], [inf], {0: Arrivals(spec, 1e6, 0, "link")}, {})
    took = []
    for number in range(2000):
        at_s = number * apart_s
        share.begin(at_s, number, (0,), each_s * 1e6, None)
        (flow,) = (flow for _ in iter(lambda: share.next_s < inf, False) for flow in share.step())
        assert flow.own_s == 0.0
        assert each_s + flow.background_s == pytest.approx(flow.finish_s - at_s, rel=1e-9)
        took.append(flow.finish_s - at_s)
    error = np.std(took) / len(took) ** 0.5
    assert error < 0.02 * np.mean(took)
    assert abs(np.mean(took) - each_s / (1 - load)) < 3 * error

    # And among themselves: on average they take their own time over (1 − load).
    totals = share.background[0]
    assert totals.count > 50_000
    mean = 1.0 + totals.queued_s / totals.count
    assert mean == pytest.approx(1 / (1 - load - each_s / apart_s), rel=0.05)
