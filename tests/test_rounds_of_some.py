"""Rounds that are not everyone's: members, onlookers, leaving and joining, control in mid-run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.network import Site, Timeline, Timings, Topology, Wire
from islands.network.schemes import SCHEMES
from islands.trace import (
    Bytes,
    Compute,
    Control,
    End,
    Join,
    Leave,
    Mark,
    Members,
    Op,
    Pass,
    Receive,
    Send,
)
from tests.test_timeline_laws import Uneven, clusters


def line(workers: tuple[int, ...] = (2, 2), rate: float = 10.0, delay_s: float = 1.0) -> Topology:
    """Islands in a row with free LANs, joined by links of so many bytes per second."""
    sites = [Site(chr(97 + n), count, inf, 0.0) for n, count in enumerate(workers)]
    wires = [Wire(f"{a.name}{b.name}", (a.name, b.name), rate, delay_s) for a, b in pairwise(sites)]
    return Topology.build(sites, wires)


def sync(version: int, size: int = 40, step: int = 1) -> list[Op]:
    return [Send(0, version, step, Bytes(size), 1), Receive(0, version)]


def play(
    topology: Topology,
    lists: dict[int, list[Op]],
    *,
    operation: str = "all_reduce",
    scheme: str = "ring",
    step_s: tuple[float, ...] | None = None,
) -> tuple[Timeline, Timings]:
    """Everything handed in at once, worker by worker; every list ends."""
    steps = FixedSteps(step_s or (1.0,) * topology.workers)
    timeline = Timeline(topology, steps, operation, scheme=scheme)
    for worker in range(topology.workers):
        timeline.extend((worker, op) for op in [*lists.get(worker, []), End()])
    assert timeline.advance() is None
    return timeline, timeline.end()


def test_a_ring_of_two_out_of_four() -> None:
    """Workers 1 and 2, one in each island, reduce 40 bytes: two phases of 20 over 10 B/s and 1 s.

    Worker 0 looks on from 2 s and goes on when the last member is done; worker 3 asks long after.
    """
    members = Members(0, 1, (2, 1))
    timeline, found = play(
        line(),
        {
            0: [members, Compute(0, 2), Receive(0, 1)],
            1: [Compute(0, 1), *sync(1)],
            2: [Compute(0, 3), *sync(1)],
            3: [Compute(0, 60), Receive(0, 1)],
        },
    )
    # Phase 0 of worker 1 is there at 4 s, of worker 2 (ready at 3 s) at 6 s. Phase 1 of worker 2
    # queues until 5 s and is there at 8 s, of worker 1 at 9 s.
    rows = [(s.worker, s.step, s.ready_s, s.done_s, s.wait_s, s.wire_bytes) for s in found.syncs]
    assert sorted(rows) == [
        (0, 0, 2.0, 9.0, 7.0, 0),
        (1, 1, 1.0, 8.0, 7.0, 40),
        (2, 1, 3.0, 9.0, 6.0, 40),
        (3, 0, 60.0, 9.0, 0.0, 0),
    ]
    assert {row.link: (row.bytes, row.count) for row in found.transfers} == {
        "ab:a>b": (40, 2),
        "ab:b>a": (40, 2),
    }
    clock = found.clocks[0]
    # It began to wait 1 s before the chain began, which worker 2 held up.
    assert (clock.others_s, clock.transmission_s, clock.propagation_s) == (1.0, 4.0, 2.0)
    assert timeline.wire_bytes == 80


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_member_is_done_at_once(scheme: str) -> None:
    """No bytes; whoever looks on goes on at the same moment."""
    timeline, found = play(
        line(),
        {
            0: [Members(0, 1, (3,)), Receive(0, 1)],
            3: [Compute(0, 2), *sync(1)],
        },
        scheme=scheme,
    )
    rows = [(s.worker, s.done_s, s.wait_s, s.wire_bytes) for s in found.syncs]
    assert sorted(rows) == [(0, 2.0, 2.0, 0), (3, 2.0, 0.0, 0)]
    assert (timeline.wire_bytes, found.transfers) == (0, [])
    assert found.clocks[0].others_s == 2.0


def test_the_first_present_worker_of_an_island_leads() -> None:
    """Islands of 2, 2 and 1; workers 1, 2 and 3 reduce 40 bytes: 3 sends to 2 (free), the leaders 1
    and 2 exchange halves, 2 hands out. Island c takes no part."""
    _, found = play(
        line((2, 2, 1)),
        {
            1: [Members(0, 1, (1, 2, 3)), *sync(1)],
            2: sync(1),
            3: sync(1),
        },
        scheme="hierarchical",
    )
    assert {s.worker: s.wire_bytes for s in found.syncs} == {1: 40, 2: 80, 3: 40}
    assert {row.link: row.bytes for row in found.transfers} == {
        "ab:a>b": 40,
        "ab:b>a": 40,
        "lan:b": 80,
    }
    assert {s.worker: s.done_s for s in found.syncs} == {1: 6.0, 2: 6.0, 3: 6.0}


def test_a_star_of_some() -> None:
    """Workers 2 and 3 over the link to the coordinator: up 4 + 4 s and 1 s, down the same."""
    _, found = play(line(), {2: [Members(0, 1, (2, 3)), *sync(1)], 3: sync(1)}, scheme="star")
    assert sorted((s.worker, s.done_s, s.wire_bytes) for s in found.syncs) == [
        (2, 14.0, 80),
        (3, 18.0, 80),
    ]


def test_leaving_and_joining() -> None:
    """Worker 1 leaves after 1 s, worker 2 joins when the three others have passed step 2 (worker 3
    at 8 s), gets 70 bytes out of band and goes on. Only the present are asked to pass the marks."""
    timeline, found = play(
        line(),
        {
            0: [
                Members(-1, 2, (0, 3)),
                Members(-1, 1, (0, 1, 3)),
                Members(-1, 3, (3, 2, 0)),
                Compute(0, 1),
                Mark(1),
                Compute(1, 1),
                Mark(2),
                Pass(2),
                Compute(2, 1),
                Mark(3),
            ],
            1: [Compute(0, 1), Mark(1), Leave()],
            2: [Join(2), Control(70), Compute(2, 1), Mark(3)],
            3: [Compute(0, 1), Mark(1), Compute(1, 1), Mark(2), Pass(2), Compute(2, 1), Mark(3)],
        },
        step_s=(1.0, 1.0, 1.0, 4.0),
    )
    assert sorted(found.marks) == [(1, 4.0), (2, 8.0), (3, 12.0)]
    assert [(c.compute_s, c.away_s, c.clock_s) for c in found.clocks] == [
        (3.0, 0.0, 3.0),
        (1.0, 0.0, 1.0),
        (1.0, 8.0, 9.0),
        (12.0, 0.0, 12.0),
    ]
    (row,) = found.transfers
    assert (row.link, row.kind, row.bytes, row.first_start_s) == ("ab:a>b", "control", 70, 8.0)
    assert (timeline.control_bytes, timeline.wire_bytes) == (70, 0)


def test_joining_late_costs_no_time_away() -> None:
    """A worker that left later than the others passed goes on at its own clock."""
    _, found = play(
        line(),
        {
            0: [Members(-1, 5, (0,)), Compute(0, 1), Pass(5)],
            3: [Compute(0, 2), Leave(), Join(5), Compute(5, 1)],
        },
    )
    assert (found.clocks[3].away_s, found.clocks[3].clock_s) == (0.0, 3.0)


def test_control_comes_from_the_coordinators_first_worker() -> None:
    """Which gets nothing itself; nor is nothing a row."""
    ops = [Compute(0, 1), Control(10), Control(0)]
    _, found = play(line(), {worker: list(ops) for worker in range(4)})
    assert {(r.link, r.bytes, r.count) for r in found.transfers} == {
        ("lan:a", 10, 1),
        ("ab:a>b", 20, 2),
    }


def test_what_does_not_fit_is_refused() -> None:
    """Nobody, strangers, other words than before, too late, and sends of those who look on."""
    topology = line()
    timeline = Timeline(topology, FixedSteps((1.0,) * 4), "all_reduce")
    for wrong in ((), (4,), (-1, 0)):
        with pytest.raises(ValueError, match="workers 0 … 3"):
            timeline.extend([(0, Members(0, 1, wrong))])
    timeline.extend([(0, Members(0, 1, (0, 1))), (3, Members(0, 1, (1, 0)))])
    with pytest.raises(ValueError, match="members"):
        timeline.extend([(0, Members(0, 1, (0, 2)))])
    timeline.extend([(0, Members(-1, 1, (0, 1)))])
    with pytest.raises(ValueError, match="passed by"):
        timeline.extend([(0, Members(-1, 1, (0,)))])
    timeline.extend([(1, op) for op in sync(2)])
    timeline.advance()
    with pytest.raises(ValueError, match="too late"):
        timeline.extend([(0, Members(0, 2, (0, 1)))])
    timeline.extend([(2, Send(0, 1, 0, Bytes(1), 1))])
    with pytest.raises(ValueError, match="no member"):
        timeline.advance()


def test_members_may_vary_only_if_known_before_rings_are_computed_as_arrays() -> None:
    """Arrays take for given that whole rings follow each other."""
    timeline = Timeline(line(), FixedSteps((1.0,) * 4), "all_reduce", vectorise=True)
    timeline.extend((worker, op) for worker in range(4) for op in sync(1))
    timeline.advance()
    assert (timeline.hops, len(timeline.take().syncs)) == (0, 4)
    with pytest.raises(ValueError, match="too late"):
        timeline.extend([(0, Members(0, 2, (0, 1)))])


def test_who_waits_for_ever_is_named() -> None:
    """A join that nobody opens, a round that nobody joins."""
    for lists, words in (
        ({0: [Join(3)]}, "worker 0 waits to join at step 3, which 0 workers have passed"),
        ({0: [Members(0, 1, (1,)), Receive(0, 1)]}, r"waits for round \(0, 1\), which nobody"),
    ):
        with pytest.raises(ValueError, match=words):
            play(line(), lists)


# --- laws -----------------------------------------------------------------------------------------


@dataclass
class Case:
    """A cluster, a scheme, and lists of operations in which who takes part changes."""

    topology: Topology
    operation: str
    scheme: str
    lists: list[list[Op]]
    declared: list[Members]
    rounds: dict[tuple[int, int], dict[int, int]]  # payload bytes by member


@st.composite
def varying(draw: st.DrawFn) -> Case:
    """Boundaries at which fragments are sent by some and received by all who are there, and after
    which workers leave, join, are handed control and pass marks."""
    topology = draw(clusters())
    workers = range(topology.workers)
    operation = draw(st.sampled_from(["all_reduce", "all_gather", "star"]))
    scheme = draw(st.sampled_from(SCHEMES))
    lists: list[list[Op]] = [[] for _ in workers]
    declared: list[Members] = []
    rounds: dict[tuple[int, int], dict[int, int]] = {}
    some = st.sets(st.sampled_from(list(workers)), min_size=1)
    present = draw(some)
    flying: list[tuple[int, int]] = []
    step = 0
    for boundary in range(1, draw(st.integers(2, 6))):
        count = draw(st.integers(1, 2))
        for worker in sorted(present):
            lists[worker].append(Compute(step, count))
        step += count
        key = (draw(st.integers(0, 1)), boundary)
        members = sorted(draw(some) & present) or sorted(present)
        if len(members) < len(workers):
            declared.append(Members(*key, tuple(members)))
        common = draw(st.integers(0, 40))
        rounds[key] = {}
        for worker in members:
            size = common if operation == "all_reduce" else draw(st.integers(0, 40))
            rounds[key][worker] = size
            lists[worker].append(Send(*key, step, Bytes(size), 2))
        flying.append(key)
        landing = flying if draw(st.booleans()) else []
        for worker in sorted(present):
            lists[worker] += [Receive(*k) for k in landing]
            lists[worker] += [Control(draw(st.integers(0, 9)))] if draw(st.booleans()) else []
            lists[worker] += [Mark(step), Pass(step)]
        declared.append(Members(-1, step, tuple(sorted(present))))
        flying = [k for k in flying if k not in landing]
        if not flying:
            coming = draw(some)
            for worker in sorted(present - coming):
                lists[worker].append(Leave())
            for worker in sorted(coming - present):
                lists[worker].append(Join(step))
            present = coming
    for worker in sorted(present):
        lists[worker] += [Receive(*key) for key in flying]
    return Case(topology, operation, scheme, [[*ops, End()] for ops in lists], declared, rounds)


def started(case: Case, **options: bool) -> Timeline:
    return Timeline(case.topology, Uneven(1), case.operation, scheme=case.scheme, seed=3, **options)


def whole(case: Case, **options: bool) -> tuple[Timeline, Timings]:
    timeline = started(case, **options)
    timeline.extend((0, members) for members in case.declared)
    timeline.extend((worker, op) for worker, ops in enumerate(case.lists) for op in ops)
    assert timeline.advance() is None
    return timeline, timeline.end()


def told(parts: list[Timings]) -> tuple[object, ...]:
    """All that is said of steps, syncs, marks and clocks, however many parts it came in."""
    steps = [
        (worker, first + n, *moments)
        for part in parts
        for worker, first, starts, ends in part.steps
        for n, moments in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
    ]
    syncs = sorted(sync for part in parts for sync in part.syncs)
    marks = sorted(mark for part in parts for mark in part.marks)
    return sorted(steps), syncs, marks, parts[-1].clocks, parts[-1].links


def in_order(parts: list[Timings]) -> list[object]:
    """The ledger's rows as they came."""
    return [row for part in parts for row in part.transfers]


@settings(max_examples=150, deadline=None)
@given(varying(), st.data())
def test_results_do_not_depend_on_how_operations_arrive(case: Case, data: st.DataObject) -> None:
    """In any pieces, with each declaration anywhere before what needs it: the same bits, and the
    ledger's rows in the same order. (The first comes first, so that rings stay in the event loop.)
    """
    found = whole(case)[1]
    timeline = started(case)
    timeline.extend([(0, Members(-1, 99, (0,)))])
    rest = [list(ops) for ops in case.lists]
    rounds = {(m.fragment, m.version): m for m in case.declared}
    timeline.extend((0, m) for m in case.declared if m.fragment < 0)
    parts = []
    while any(rest):
        worker = data.draw(st.sampled_from([w for w, ops in enumerate(rest) if ops]))
        for _ in range(data.draw(st.integers(1, 6))):
            if not rest[worker]:
                break
            op = rest[worker].pop(0)
            if isinstance(op, Send | Receive) and (op.fragment, op.version) in rounds:
                timeline.extend([(worker, rounds[op.fragment, op.version])])
            timeline.extend([(worker, op)])
        if data.draw(st.booleans()):
            assert timeline.advance() is None
            parts.append(timeline.take())
    timeline.advance()
    parts.append(timeline.end())
    assert told(parts) == told([found])
    assert in_order(parts) == in_order([found])


@settings(max_examples=200, deadline=None)
@given(varying())
def test_ledger_clocks_and_wire_bytes_of_some(case: Case) -> None:
    """Rows sum to totals, m members send what m workers would, compute + wait + away = clock."""
    timeline, found = whole(case)
    for name, total in timeline.links.items():
        assert total.bytes == sum(row.bytes for row in found.transfers if row.link == name)
    assert timeline.wire_bytes == sum(sync.wire_bytes for sync in found.syncs)
    wires: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in found.syncs:
        if row.worker in case.rounds[row.fragment, row.version]:
            wires[row.fragment, row.version].append(row.wire_bytes)
        else:
            assert (row.wire_bytes, row.step) == (0, 0)
    for key, sizes in case.rounds.items():
        m, total, first = len(sizes), sum(sizes.values()), sizes[min(sizes)]
        assert len(wires[key]) == m
        if m == 1:
            assert wires[key] == [0]
        elif case.operation == "star":
            assert sum(wires[key]) == total + m * first
        elif case.scheme == "star":
            down = m * first if case.operation == "all_reduce" else (m - 1) * total
            assert sum(wires[key]) == total + down
        elif case.operation == "all_reduce":
            assert sum(wires[key]) == 2 * (m - 1) * first
        else:
            assert sum(wires[key]) == (m - 1) * total
    for clock in found.clocks:
        spent_s = clock.compute_s + clock.wait_s + clock.away_s
        assert spent_s == pytest.approx(clock.clock_s, rel=1e-9)
        assert sum(clock[3:8]) == pytest.approx(clock.wait_s, rel=1e-9, abs=1e-12)
        assert min(clock) > -1e-9


@settings(max_examples=80, deadline=None)
@given(varying())
def test_onlookers_go_on_when_the_last_member_is_done(case: Case) -> None:
    """Not before and not after; who asks later finds it ended."""
    _, found = whole(case)
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for row in found.syncs:
        if row.worker in case.rounds[row.fragment, row.version]:
            ends[row[:2]] = max(ends[row[:2]], row.done_s)
    for row in found.syncs:
        if row.worker not in case.rounds[row.fragment, row.version]:
            assert row.done_s == ends[row[:2]]
            assert row.passed_s == max(row.ready_s, row.done_s)


@settings(max_examples=60, deadline=None)
@given(varying())
def test_single_transfers_say_the_same(case: Case) -> None:
    """A row per transfer sums to the rows per round."""
    _, rounds = whole(case)
    _, each = whole(case, per_transfer=True)
    sums: dict[tuple[object, ...], int] = defaultdict(int)
    for row in each.transfers:
        sums[row[:4]] += row.bytes
    expected: dict[tuple[object, ...], int] = defaultdict(int)
    for row in rounds.transfers:
        expected[row[:4]] += row.bytes
    assert sums == expected
    assert told([rounds])[1] == told([each])[1]


@settings(max_examples=60, deadline=None)
@given(clusters(), st.integers(0, 40), st.data())
def test_control_between_whole_rings_is_told_in_order(
    topology: Topology, size: int, data: st.DataObject
) -> None:
    """Also where rings are computed as arrays, and however the operations are handed in."""
    lists: list[list[Op]] = []
    for _ in range(topology.workers):
        ops: list[Op] = []
        for number in range(3):
            ops += [Compute(number, 1), Control(data.draw(st.integers(0, 5)))]
            ops += [Send(0, number + 1, number + 1, Bytes(size), 2)]
            ops += [Control(data.draw(st.integers(0, 5))), Receive(0, number + 1)]
        lists.append([*ops, End()])

    def run(vectorise: bool, pieces: bool) -> list[Timings]:
        timeline = Timeline(topology, Uneven(2), "all_reduce", vectorise=vectorise)
        rest = [list(ops) for ops in lists]
        parts = []
        while any(rest):
            worker = data.draw(st.sampled_from([w for w, ops in enumerate(rest) if ops]))
            count = data.draw(st.integers(1, 6)) if pieces else len(rest[worker])
            timeline.extend((worker, op) for op in rest[worker][:count])
            del rest[worker][:count]
            if pieces and data.draw(st.booleans()):
                assert timeline.advance() is None
                parts.append(timeline.take())
        timeline.advance()
        return [*parts, timeline.end()]

    for vectorise in (True, False):
        whole, cut = run(vectorise, False), run(vectorise, True)
        assert told(cut) == told(whole)
        assert in_order(cut) == in_order(whole)
