"""A star whose coordinator answers by time: arrivals one by one, nothing later decided before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.network import Arrival, Site, Topology, Wire
from islands.network.timed import Reply
from islands.network.timed_timeline import TimedTimeline
from islands.trace import Bytes, Compute, End, Op, Receive, Send


def pair() -> Topology:
    """Worker 0 beside the coordinator at no cost, worker 1 over 100 B/s and one second."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]
    return Topology.build(sites, [Wire("w", ("a", "b"), 100.0, 1.0)], None)


def turn(number: int, size: int = 50) -> list[Op]:
    """One step, one contribution, and its answer."""
    return [
        Compute(number, 1),
        Send(0, number + 1, number + 1, Bytes(size), 1),
        Receive(0, number + 1),
    ]


def start(topology: Topology, *step_s: float, turns: int = 1) -> TimedTimeline:
    timeline = TimedTimeline(topology, FixedSteps(step_s), "star")
    for worker in range(topology.workers):
        for number in range(turns):
            timeline.extend((worker, op) for op in turn(number))
        timeline.extend([(worker, End())])
    return timeline


def test_each_is_answered_at_its_own_time() -> None:
    """Two workers of different speed and distance; answers of 100 bytes leave at once."""
    timeline = start(pair(), 1.0, 2.5)
    assert timeline.advance() == Arrival(1.0, 0, 0, 1)
    timeline.act([Reply(0, 0, 1, 100, 1)])
    # 50 bytes: sent 2.5 … 3, there at 4; the answer is sent 4 … 5, there at 6.
    assert timeline.advance() == Arrival(4.0, 1, 0, 1)
    timeline.act([Reply(1, 0, 1, 100, 1)])
    assert timeline.advance() is None
    found = timeline.take()
    assert [(s.worker, s.ready_s, s.done_s, s.wait_s, s.wire_bytes) for s in found.syncs] == [
        (0, 1.0, 1.0, 0.0, 150),
        (1, 2.5, 6.0, 3.5, 150),
    ]
    assert timeline.wire_bytes == 300
    assert {row.link: row.bytes for row in found.transfers if row.link != "lan:a"} == {
        "w:b>a": 50,
        "w:a>b": 100,
    }
    assert timeline.links["lan:a"].bytes == 150


def test_an_answer_may_come_at_a_later_arrival() -> None:
    """The first waits until the second has arrived, and both are answered then."""
    timeline = start(pair(), 1.0, 2.5)
    timeline.advance()
    assert timeline.advance() == Arrival(4.0, 1, 0, 1)
    timeline.act([Reply(0, 0, 1, 0, 1)])
    timeline.act([Reply(1, 0, 1, 0, 1)])
    assert timeline.advance() is None
    assert [(s.worker, s.done_s) for s in timeline.take().syncs] == [(0, 4.0), (1, 5.0)]


def test_the_fast_worker_comes_more_often() -> None:
    """Answered at once, worker 0 contributes every second; versions are its own count."""
    timeline = start(pair(), 1.0, 2.5, turns=3)
    seen = []
    while (arrival := timeline.advance()) is not None:
        seen.append(tuple(arrival))
        timeline.act([Reply(arrival.worker, arrival.fragment, arrival.version, 0, 1)])
    # Worker 1: done at 5 (empty answer, one second), 5 + 2.5 + 1.5 = 9, done 10, and 14.
    assert seen == [
        (1.0, 0, 0, 1),
        (2.0, 0, 0, 2),
        (3.0, 0, 0, 3),
        (4.0, 1, 0, 1),
        (9.0, 1, 0, 2),
        (14.0, 1, 0, 3),
    ]


def test_arrivals_at_one_moment_come_by_worker_before_anything_starts() -> None:
    """Both arrive at 1 s; the answer to the first does not hide the second."""
    sites = [Site("a", 2, inf, 0.0)]
    timeline = start(Topology.build(sites, [], None), 1.0, 1.0)
    assert timeline.advance() == Arrival(1.0, 0, 0, 1)
    timeline.act([Reply(0, 0, 1, 10, 1)])
    assert timeline.advance() == Arrival(1.0, 1, 0, 1)


def test_an_arrival_waits_for_the_silent() -> None:
    """A worker that ran out of operations at 0.5 s could still be first."""
    timeline = TimedTimeline(pair(), FixedSteps((1.0, 0.5)), "star")
    timeline.extend((0, op) for op in turn(0))
    timeline.extend([(1, Compute(0, 1))])
    assert timeline.advance() is None
    timeline.extend([(1, End())])
    assert timeline.advance() == Arrival(1.0, 0, 0, 1)


def test_one_worker_is_its_own_coordinator() -> None:
    """It arrives when ready, is done when answered, and sends nothing over any wire."""
    topology = Topology.build([Site("a", 1, 1.0, 1.0)], [], None)
    timeline = start(topology, 2.0)
    assert timeline.advance() == Arrival(2.0, 0, 0, 1)
    timeline.act([Reply(0, 0, 1, 99, 1)])
    assert timeline.advance() is None
    found = timeline.take()
    assert (found.syncs[0].done_s, found.syncs[0].wire_bytes, found.transfers) == (2.0, 0, [])


def test_wrong_answers_are_refused() -> None:
    """To nobody, to one who has not arrived, twice; and answers exist in stars only."""
    timeline = start(pair(), 1.0, 2.5)
    timeline.advance()
    with pytest.raises(ValueError, match="has arrived"):
        timeline.act([Reply(1, 0, 1, 1, 1)])
    timeline.act([Reply(0, 0, 1, 1, 1)])
    with pytest.raises(ValueError, match="decided before"):
        timeline.act([Reply(0, 0, 1, 1, 1)])
    ready = TimedTimeline(pair(), FixedSteps((0.0, 0.0)), "all_reduce")
    ready.extend([(0, Send(0, 1, 0, Bytes(1), 1)), (0, End()), (1, End())])
    ready.advance()
    with pytest.raises(ValueError, match="only a star"):
        ready.act([Reply(0, 0, 1, 1, 1)])


@st.composite
def clusters(draw: st.DrawFn) -> Topology:
    rate, delay = st.sampled_from([inf, 40.0, 333.0]), st.sampled_from([0.0, 0.2, 1.0])
    sites = [
        Site(name, draw(st.integers(1, 3)), draw(rate), draw(delay))
        for name in "abc"[: draw(st.integers(1, 3))]
    ]
    wires = [
        Wire(f"w{n}", (a.name, b.name), draw(rate), draw(delay))
        for n, (a, b) in enumerate(pairwise(sites))
    ]
    return Topology.build(sites, wires, None)


@settings(max_examples=100, deadline=None)
@given(clusters(), st.lists(st.sampled_from([0.0, 0.5, 0.8]), min_size=9, max_size=9), st.data())
def test_arrivals_do_not_depend_on_when_operations_become_known(
    topology: Topology, step_s: list[float], data: st.DataObject
) -> None:
    """Everything known at once, or piece by piece whenever the timeline asks: the same bits."""
    members = topology.workers

    def program(worker: int) -> Iterator[Op]:
        for number in range(3):
            yield from turn(number, 10 + worker)
        yield End()

    def follow(piecewise: bool) -> tuple[list[Arrival], list[tuple[float, ...]]]:
        timeline = TimedTimeline(topology, FixedSteps(tuple(step_s)), "star")
        rest = [list(program(worker)) for worker in range(members)]
        arrivals: list[Arrival] = []
        if not piecewise:
            timeline.extend((worker, op) for worker, ops in enumerate(rest) for op in ops)
            rest = []
        while True:
            arrival = timeline.advance()
            if arrival is not None:
                arrivals.append(arrival)
                timeline.act([Reply(arrival.worker, arrival.fragment, arrival.version, 20, 1)])
            elif any(rest):
                worker = data.draw(st.sampled_from([w for w, ops in enumerate(rest) if ops]))
                count = data.draw(st.integers(1, 4))
                timeline.extend((worker, op) for op in rest[worker][:count])
                del rest[worker][:count]
            else:
                break
        found = timeline.take()
        assert sum(row.bytes for row in found.transfers) == sum(
            total.bytes for total in timeline.links.values()
        )
        sent = sum(10 + worker + 20 for worker in range(members)) * 3
        assert timeline.wire_bytes == (sent if members > 1 else 0)
        return arrivals, sorted(found.syncs)

    arrivals, syncs = follow(piecewise=False)
    assert [arrival.time_s for arrival in arrivals] == sorted(a.time_s for a in arrivals)
    assert len(arrivals) == 3 * members
    assert follow(piecewise=True) == (arrivals, syncs)
