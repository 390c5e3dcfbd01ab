"""Laws of the timeline over any cluster and program: exactness, ledger, causality, clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.network import COORDINATOR, Path, Site, Timeline, Timings, Topology, Wire
from islands.trace import Bytes, Compute, End, Mark, Op, Receive, Send

rates = st.sampled_from([inf, 7.0, 90.0, 1234.5])
delays = st.sampled_from([0.0, 0.001, 0.3, 1.7])


@st.composite
def clusters(draw: st.DrawFn, most: int = 4) -> Topology:
    """One to four islands joined as a line plus a few extra wires."""
    count = draw(st.integers(1, most))
    sites = [
        Site(f"i{k}", draw(st.integers(1, 3)), draw(rates), draw(delays)) for k in range(count)
    ]
    pairs = [(k, k + 1) for k in range(count - 1)]
    pairs += draw(st.lists(st.sampled_from(pairs), max_size=1)) if pairs else []
    if count > 2 and draw(st.booleans()):
        pairs.append((count - 1, 0))
    wires = [
        Wire(f"w{n}", (f"i{a}", f"i{b}"), draw(rates), draw(delays))
        for n, (a, b) in enumerate(pairs)
    ]
    return Topology.build(sites, wires, draw(st.sampled_from([None, f"i{count - 1}"])))


class Uneven:
    """Step times that differ by worker and step; some are zero, so that ties happen."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def seconds(self, worker: int, first: int, count: int) -> np.ndarray:
        steps = np.arange(first, first + count)
        return ((steps * 7 + worker * 5 + self.salt) % 4) * 0.3


@st.composite
def programs(draw: st.DrawFn, workers: int, same_size: bool) -> list[list[Op]]:
    """One list of operations per worker, with several fragments in flight at once."""
    lists: list[list[Op]] = [[] for _ in range(workers)]
    versions: dict[int, int] = defaultdict(int)
    flying: list[tuple[int, int]] = []
    steps = [0] * workers
    sizes = st.builds(Bytes, st.integers(0, 60), st.integers(0, 9), st.integers(0, 3))
    for _ in range(draw(st.integers(1, 6))):
        for worker, ops in enumerate(lists):
            count = draw(st.integers(0, 3))
            ops.append(Compute(steps[worker], count))
            steps[worker] += count
        if flying and draw(st.booleans()):
            key = flying.pop(draw(st.integers(0, len(flying) - 1)))
            for ops in lists:
                ops.append(Receive(*key))
        else:
            fragment = draw(st.integers(0, 2))
            versions[fragment] += 1
            key = (fragment, versions[fragment])
            common = draw(sizes)
            for worker, ops in enumerate(lists):
                size = common if same_size else draw(sizes)
                ops.append(Send(*key, steps[worker], size, 2))
            flying.append(key)
    for worker, ops in enumerate(lists):
        ops.append(Mark(9))
        ops += [Receive(*key) for key in flying]
        ops += [Compute(steps[worker], 1), Mark(10), End()]
    return lists


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, str, list[list[Op]], int]:
    topology = draw(clusters())
    collective = draw(st.sampled_from(["all_reduce", "all_gather", "star"]))
    lists = draw(programs(topology.workers, collective == "all_reduce"))
    return topology, collective, lists, draw(st.integers(0, 3))


def gather(parts: Sequence[Timings]) -> tuple[object, ...]:
    """What a sequence of takes says in all, in an order that does not depend on their number."""
    starts: dict[int, list[float]] = defaultdict(list)
    ends: dict[int, list[float]] = defaultdict(list)
    for part in parts:
        for worker, first, begin, end in part.steps:
            assert first == len(starts[worker])
            starts[worker] += begin.tolist()
            ends[worker] += end.tolist()
    return (
        dict(starts),
        dict(ends),
        sorted(sync for part in parts for sync in part.syncs),
        sorted(row for part in parts for row in part.transfers),
        sorted(mark for part in parts for mark in part.marks),
        parts[-1].clocks,
    )


def whole(
    topology: Topology, collective: str, lists: list[list[Op]], salt: int, **options: bool | None
) -> tuple[Timeline, Timings]:
    timeline = Timeline(topology, Uneven(salt), collective, **options)
    for worker, ops in enumerate(lists):
        timeline.extend((worker, op) for op in ops)
    assert timeline.advance() is None
    return timeline, timeline.take()


@settings(max_examples=150, deadline=None)
@given(cases(), st.data(), st.sampled_from([None, True, False]))
def test_results_do_not_depend_on_how_operations_arrive(
    case: tuple[Topology, str, list[list[Op]], int], data: st.DataObject, vectorise: bool | None
) -> None:
    """Any cutting of the lists and computes, any interleaving of workers: the same bits."""
    topology, collective, lists, salt = case
    _, found = whole(*case, vectorise=False)
    rest = [list(ops) for ops in lists]
    timeline = Timeline(topology, Uneven(salt), collective, vectorise=vectorise)
    parts = []
    while any(rest):
        worker = data.draw(st.sampled_from([w for w, ops in enumerate(rest) if ops]))
        ops = rest[worker]
        for _ in range(data.draw(st.integers(1, 6))):
            if not ops:
                break
            op = ops.pop(0)
            if isinstance(op, Compute) and op.count > 1 and data.draw(st.booleans()):
                ops.insert(0, Compute(op.first + 1, op.count - 1))
                op = Compute(op.first, 1)
            timeline.extend([(worker, op)])
        if data.draw(st.booleans()):
            assert timeline.advance() is None
            parts.append(timeline.take())
    timeline.advance()
    parts.append(timeline.take())
    assert gather(parts) == gather([found])


@settings(max_examples=150, deadline=None)
@given(cases())
def test_ledger_and_clocks_add_up(case: tuple[Topology, str, list[list[Op]], int]) -> None:
    """Rows sum to link totals, wire bytes follow their formulas, compute + wait = elapsed."""
    topology, collective, lists, _ = case
    members = topology.workers
    timeline, found = whole(*case)
    for name, total in timeline.links.items():
        assert total.bytes == sum(row.bytes for row in found.transfers if row.link == name)
    assert timeline.wire_bytes == sum(sync.wire_bytes for sync in found.syncs)
    assert timeline.wan_bytes + timeline.lan_bytes == sum(t.bytes for t in timeline.links.values())
    payloads: dict[tuple[int, int], list[int]] = defaultdict(list)
    for ops in lists:
        for op in ops:
            if isinstance(op, Send):
                payloads[op.fragment, op.version].append(op.size.total)
    for key, sizes in payloads.items():
        wires = [sync.wire_bytes for sync in found.syncs if sync[:2] == key]
        assert len(wires) == members
        if members == 1:
            assert wires == [0]
        elif collective == "all_reduce":
            assert sum(wires) == 2 * (members - 1) * sizes[0]
        elif collective == "all_gather":
            assert sum(wires) == (members - 1) * sum(sizes)
        else:
            assert sum(wires) == sum(sizes) + members * sizes[0]
    for clock in found.clocks:
        assert clock.compute_s + clock.wait_s == pytest.approx(clock.clock_s, rel=1e-9)
        assert sum(clock[3:]) == pytest.approx(clock.wait_s, rel=1e-9, abs=1e-12)
        assert min(clock) > -1e-9
    if all(len(topology.route(a, b)) < 2 for a in range(len(topology.sites)) for b in range(a)):
        assert timeline.wan_bytes + timeline.lan_bytes == timeline.wire_bytes


@settings(max_examples=80, deadline=None)
@given(cases())
def test_single_transfers_sum_to_the_rounds_rows(
    case: tuple[Topology, str, list[list[Op]], int],
) -> None:
    """One row per transfer says the same as one per round: bytes, counts and outermost times."""
    _, rounds = whole(*case)
    timeline, each = whole(*case, per_transfer=True)
    singles = defaultdict(list)
    for row in each.transfers:
        assert row.count == 1
        singles[row[:4]].append(row)
    assert len(rounds.transfers) == len(singles)
    for row in rounds.transfers:
        rows = singles[row[:4]]
        assert row.bytes == sum(single.bytes for single in rows)
        assert row.count == len(rows)
        # A round's times are those of all its transfers there, empty messages included.
        assert row.first_start_s <= min(single.first_start_s for single in rows)
        assert row.last_delivered_s >= max(single.last_delivered_s for single in rows)
    assert gather([rounds])[2] == gather([each])[2]
    assert sum(total.bytes for total in timeline.links.values()) == sum(
        row.bytes for row in each.transfers
    )


def serve(paths: Sequence[Path], sizes: Sequence[int], ready: Sequence[float], free: dict) -> tuple:
    """One transfer on each of some disjoint paths, straight from the formulas of cut-through."""
    left, arrived = [], []
    for path, size, moment in zip(paths, sizes, ready, strict=True):
        start = finish = before = 0.0
        for number, (resource, rate, delay, _) in enumerate(path):
            if number:
                moment = max(start + before, finish + before - size / rate)
            start = max(moment, free.get(resource, 0.0))
            finish = free[resource] = start + size / rate
            if number == 0:
                left.append(finish)
            before = delay
        arrived.append(finish + before)
    return left, arrived


@settings(max_examples=150, deadline=None)
@given(clusters(), st.booleans(), st.integers(0, 90), st.integers(1, 4), st.data())
def test_a_ring_alone_follows_its_formulas_bit_for_bit(
    topology: Topology, reduce: bool, size: int, itemsize: int, data: st.DataObject
) -> None:
    """Event loop and arrays give exactly what a phase-by-phase restatement gives."""
    members = topology.workers
    count = [data.draw(st.integers(0, 3)) for _ in range(members)]
    order = topology.ring()
    lanes = zip(order, (*order[1:], order[0]), strict=True) if members > 1 else ()
    paths = [topology.path(*lane) for lane in lanes]
    if len({hop.resource for path in paths for hop in path}) < sum(len(path) for path in paths):
        return  # two neighbours of the ring share a link
    if reduce:
        values = size  # of itemsize bytes each
        chunks = [values // members + (c < values % members) for c in range(members)]
        pieces = [itemsize * chunk for chunk in chunks]
        sizes = [itemsize * values] * members
    else:
        pieces = sizes = [size + 3 * worker for worker in range(members)]
    ready = []
    for worker in range(members):
        clock = 0.0
        for duration in Uneven(0).seconds(worker, 0, count[worker]):
            clock += float(duration)
        ready.append(clock)
    # From here on by place in the ring, not by worker.
    if not reduce:
        pieces = [sizes[worker] for worker in order]
    own = [ready[worker] for worker in order]
    free: dict[int, float] = {}
    now, left = list(own), list(own)
    for phase in range((2 if reduce else 1) * (members - 1)):
        sent = [pieces[(place - phase) % members] for place in range(members)]
        left, arrived = serve(paths, sent, now, free)
        now = [max(mine, arrived[place - 1]) for place, mine in enumerate(own)]
        received = [arrived[place - 1] for place in range(members)]
    done = [max(a, b) for a, b in zip(received, left, strict=True)] if members > 1 else own
    lists: list[list[Op]] = [
        [
            Compute(0, count[worker]),
            Send(0, 1, count[worker], Bytes(sizes[worker]), itemsize),
            Receive(0, 1),
            End(),
        ]
        for worker in range(members)
    ]
    for vectorise in (True, False):
        timeline, found = whole(
            topology, "all_reduce" if reduce else "all_gather", lists, 0, vectorise=vectorise
        )
        by_worker = {sync.worker: sync.done_s for sync in found.syncs}
        assert [by_worker[worker] for worker in order] == done
        assert (timeline.hops == 0) == (vectorise or members == 1)


@settings(max_examples=60, deadline=None)
@given(clusters(), st.integers(0, 90), st.data())
def test_all_gather_after_all_gather_reuses_links_exactly(
    topology: Topology, size: int, data: st.DataObject
) -> None:
    """Many rounds in a row, uneven workers: arrays and event loop agree in every bit."""
    rounds = data.draw(st.integers(2, 5))
    lists: list[list[Op]] = []
    for worker in range(topology.workers):
        ops: list[Op] = []
        for number in range(rounds):
            bytes_ = Bytes(size, number * worker, 1)
            ops += [Compute(number, 1), Send(0, number + 1, number + 1, bytes_, 2)]
            ops += [Receive(0, number + 1)]
        lists.append([*ops, End()])
    results = [whole(topology, "all_gather", lists, 1, vectorise=way)[1] for way in (True, False)]
    assert gather([results[0]]) == gather([results[1]])


@given(clusters())
@settings(max_examples=30, deadline=None)
def test_control_bytes_are_counted_apart(topology: Topology) -> None:
    """The initial model crosses every link to its worker, takes no time and is no wire bytes."""
    timeline = Timeline(topology, Uneven(0), "all_reduce")
    home = topology.island_of.index(topology.coordinator_island)
    expected: dict[str, int] = defaultdict(int)
    for worker in range(topology.workers):
        timeline.control(worker, 100)
        if worker != home:
            for charge in topology.charges(home, worker):
                expected[charge.link] += 100
    found = timeline.take()
    assert {row.link: row.bytes for row in found.transfers} == expected
    assert {(*row[:2], row.kind) for row in found.transfers} <= {(-1, 0, "control")}
    assert {n: t.bytes for n, t in timeline.links.items() if t.bytes} == expected
    assert all(total.busy_s == 0.0 for total in timeline.links.values())
    assert (timeline.wire_bytes, timeline.control_bytes) == (0, sum(expected.values()))
    assert timeline.take().transfers == []
    assert topology.path(home, COORDINATOR)[1].resource == topology.resources - 1
