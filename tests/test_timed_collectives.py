"""Collectives that are launched by decision: barriers, releases, deaths, aborts, revivals."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.network import Arrival, Closed, Event, Site, Spent, Timings, Topology, Wake, Wire
from islands.network.schemes import SCHEMES
from islands.network.timed import (
    Abort,
    Action,
    Kill,
    Launch,
    Release,
    Reply,
    Result,
    Revive,
    WakeAt,
)
from islands.network.timed_timeline import TimedTimeline
from islands.trace import (
    Bytes,
    Compute,
    Control,
    End,
    Idle,
    Join,
    Mark,
    Members,
    Op,
    Pass,
    Receive,
    Send,
)
from tests.test_rounds_of_some import in_order, told
from tests.test_timeline_laws import clusters


def triangle(workers: int = 1, fair: bool = False) -> Topology:
    """Three islands with free LANs, each joined to the others by 10 B/s and one second."""
    sites = [Site(name, workers, inf, 0.0) for name in "abc"]
    pairs = [("a", "b"), ("b", "c"), ("a", "c")]
    return Topology.build(sites, [Wire(x + y, (x, y), 10.0, 1.0, fair) for x, y in pairs])


def start(
    topology: Topology,
    *step_s: float,
    operation: str = "all_gather",
    scheme: str = "ring",
    size: int = 20,
    turns: int = 1,
    **options: bool,
) -> TimedTimeline:
    """Every worker takes a step, sends, receives, and so on; all of it known at once."""
    timeline = TimedTimeline(topology, FixedSteps(step_s), operation, scheme=scheme, **options)
    for worker in range(topology.workers):
        for n in range(turns):
            ops = [Compute(n, 1), Send(0, n + 1, n + 1, Bytes(size), 1), Receive(0, n + 1)]
            timeline.extend((worker, op) for op in ops)
        timeline.extend([(worker, End())])
    return timeline


def parts(*workers: int, version: int = 1) -> tuple[tuple[int, int], ...]:
    return tuple((worker, version) for worker in workers)


def until(timeline: TimedTimeline, kind: type[Event]) -> Event:
    """The next event of a kind; others are let pass."""
    while not isinstance(event := timeline.advance(), kind):
        assert event is not None
    return event


def arrivals(timeline: TimedTimeline, count: int) -> None:
    for _ in range(count):
        assert isinstance(timeline.advance(), Arrival)


def by_link(found: Timings) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in found.transfers:
        sums[row.link] = sums.get(row.link, 0) + row.bytes
    return sums


# --- launching ------------------------------------------------------------------------------------


def test_a_barrier_holds_everyone_until_the_last_is_done() -> None:
    """Ready at 1, 2 and 3 s, launched at 3 s: pieces of 20 bytes arrive at 6 and 9 s."""
    timeline = start(triangle(), 1.0, 2.0, 3.0)
    for worker in range(3):
        assert timeline.advance() == Arrival(worker + 1.0, worker, 0, 1)
    assert timeline.act([Launch(parts(0, 1, 2), 0, 7, True)]) == [None]
    assert timeline.advance() == Closed(9.0, 7)
    assert timeline.take().syncs == []
    assert timeline.advance() is None
    found = timeline.take()
    assert [(s.worker, s.ready_s, s.done_s, s.wait_s, s.wire_bytes) for s in found.syncs] == [
        (0, 1.0, 9.0, 8.0, 40),
        (1, 2.0, 9.0, 7.0, 40),
        (2, 3.0, 9.0, 6.0, 40),
    ]
    clock = timeline.end().clocks[0]
    assert (clock.others_s, clock.transmission_s, clock.propagation_s) == (2.0, 4.0, 2.0)
    assert timeline.wire_bytes == 120


def test_without_a_barrier_each_goes_on_when_done() -> None:
    """A star in island a: worker 0 has its answer at once, and no event tells of the end."""
    timeline = start(triangle(), 1.0, 1.0, 1.0, scheme="star")
    arrivals(timeline, 3)
    timeline.act([Launch(parts(0, 1, 2), 0, 0, False)])
    # 20 bytes up until 4 s; 40 bytes down to 1 and 2 until 9 s.
    assert timeline.advance() is None
    found = timeline.end()
    assert sorted((s.worker, s.done_s, s.wire_bytes) for s in found.syncs) == [
        (0, 4.0, 60),
        (1, 9.0, 60),
        (2, 9.0, 60),
    ]


def test_a_late_part_and_versions_of_its_own() -> None:
    """Versions are the workers' own, rows have the first part's. Who is alone is done at once."""
    timeline = start(triangle(), 1.0, 1.0, 30.0, turns=2)
    arrivals(timeline, 2)
    timeline.act([Launch(parts(0), 0, 0, True)])
    assert timeline.advance() == Closed(1.0, 0)
    assert timeline.advance() == Arrival(2.0, 0, 0, 2)
    timeline.act([Launch(((0, 2), (1, 1)), 0, 1, True)])
    assert timeline.advance() == Closed(5.0, 1)
    assert timeline.advance() == Arrival(6.0, 1, 0, 2)
    found = timeline.take()
    assert [(s.worker, s.version, s.step, s.done_s) for s in found.syncs] == [
        (0, 1, 1, 1.0),
        (0, 2, 2, 5.0),
        (1, 1, 1, 5.0),
    ]
    assert {(row.fragment, row.version) for row in found.transfers} == {(0, 2)}


def test_a_release_now_and_after_a_collective() -> None:
    """Worker 1 goes on at once with 5 bytes of control, worker 2 when the others are done."""
    timeline = start(triangle(2), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    arrivals(timeline, 6)
    timeline.act(
        [
            Launch(parts(0, 4), 0, 3, True),
            Release(1, 0, 1, 5, 99),  # not under way: now
            Release(2, 0, 1, 6, 3),
            Release(3, 0, 1, 0),
            Release(5, 0, 1, 0),
        ]
    )
    assert timeline.advance() == Closed(4.0, 3)
    assert timeline.advance() is None
    found = timeline.end()
    assert sorted((s.worker, s.done_s, s.wire_bytes) for s in found.syncs) == [
        (0, 4.0, 20),
        (1, 1.0, 0),
        (2, 4.0, 0),
        (3, 1.0, 0),
        (4, 4.0, 20),
        (5, 1.0, 0),
    ]
    control = [row for row in found.transfers if row.kind == "control"]
    assert [(r.link, r.bytes, r.first_start_s) for r in control] == [
        ("lan:a", 5, 1.0),
        ("ab:a>b", 6, 4.0),
    ]
    assert found.clocks[1].others_s == 0.0
    assert found.clocks[2].transmission_s == 2.0


def test_who_has_sent_nothing_looks_on_until_it_is_released() -> None:
    """Before it asks, and after."""
    timeline = TimedTimeline(triangle(), FixedSteps((1.0, 2.0, 9.0)), "all_reduce")
    timeline.extend([(0, Compute(0, 1)), (0, Send(0, 1, 1, Bytes(1), 1)), (0, Receive(0, 1))])
    for worker in (1, 2):
        timeline.extend([(worker, op) for op in (Compute(0, 1), Receive(0, 4), End())])
    timeline.extend([(0, End())])
    assert timeline.advance() == Arrival(1.0, 0, 0, 1)
    timeline.act([WakeAt(3.0, 0), Release(2, 0, 4, 0), Release(0, 0, 1, 0)])
    assert timeline.advance() == Wake(3.0, 0)
    timeline.act([Release(1, 0, 4, 0)])
    assert timeline.advance() is None
    found = timeline.end()
    assert [(s.worker, s.step, s.ready_s, s.done_s, s.wait_s) for s in sorted(found.syncs)[1:]] == [
        (1, 0, 2.0, 3.0, 1.0),
        (2, 0, 9.0, 1.0, 0.0),
    ]


def test_moments_that_coincide_come_in_order() -> None:
    """Arrivals, then ends, then alarms by their tags; then only is something new served."""
    timeline = start(triangle(), 1.0, 1.0, 4.0)
    arrivals(timeline, 2)
    timeline.act([WakeAt(4.0, 5), WakeAt(4.0, 2), WakeAt(1.0, 0), Launch(parts(0, 1), 0, 0, True)])
    seen = [timeline.advance() for _ in range(5)]
    assert seen == [Wake(1.0, 0), Arrival(4.0, 2, 0, 1), Closed(4.0, 0), Wake(4.0, 2), Wake(4.0, 5)]
    timeline.act([Release(2, 0, 1, 0)])
    assert timeline.advance() is None


def test_no_event_passes_a_silent_worker() -> None:
    """Who ran out of operations at 2 s could still be first; who is dead could not."""
    timeline = TimedTimeline(triangle(), FixedSteps((1.0, 2.0, 9.0)), "all_reduce")
    timeline.extend([(0, Compute(0, 1)), (0, Send(0, 1, 1, Bytes(1), 1))])
    timeline.extend([(0, Receive(0, 1)), (1, Compute(0, 1)), (2, End())])
    assert timeline.advance() == Arrival(1.0, 0, 0, 1)
    timeline.act([WakeAt(2.0, 0)])
    assert timeline.advance() is None
    timeline.act([Kill(1)])
    assert timeline.advance() == Wake(2.0, 0)


# --- death ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fair", [False, True])
def test_a_ring_is_aborted_in_the_middle(fair: bool) -> None:
    """Everyone's own piece leaves at 0 s and is there at 3 s. Worker 2 dies at 2.5 s: it forwards
    nothing, the others do at 3 s. Aborted at 4.5 s, the survivors gather anew: worker 1 has its
    answer at once, worker 0's link is busy with what it forwarded until 5 s."""
    timeline = start(triangle(fair=fair), 0.0, 0.0, 0.0)
    arrivals(timeline, 3)
    timeline.act([Launch(parts(0, 1, 2), 0, 0, True), WakeAt(2.5, 0), WakeAt(4.5, 1)])
    assert timeline.advance() == Wake(2.5, 0)
    assert timeline.act([Kill(2)]) == [(0,)]
    assert timeline.advance() == Wake(4.5, 1)
    assert timeline.act([Abort(0)]) == [100]
    assert timeline.act([Launch(parts(0, 1), 0, 1, True)]) == [None]
    # On a fair link worker 0's new piece shares 5 B/s each until the old one ends at 5.5 s, when
    # it has 5 bytes: 15 more take until 7 s.
    assert timeline.advance() == Closed(8.0, 1)
    assert timeline.advance() is None
    found = timeline.end()
    assert [(s.worker, s.done_s, s.wait_s, s.wire_bytes) for s in found.syncs] == [
        (0, 8.0, 8.0, 20),
        (1, 8.0, 8.0, 20),
    ]
    assert found.spent == [
        Spent(4.5, 0, 0, 1, 40),
        Spent(4.5, 1, 0, 1, 40),
        Spent(4.5, 2, 0, 1, 20),
    ]
    assert by_link(found) == {"ab:a>b": 60, "bc:b>c": 40, "ac:c>a": 20, "ab:b>a": 20}
    assert timeline.wire_bytes == 140
    assert [clock.clock_s for clock in found.clocks] == [8.0, 8.0, 2.5]
    assert found.clocks[2].others_s == 2.5


def test_a_hierarchy_is_aborted_in_the_middle() -> None:
    """Two workers per island. Worker 5 dies before it is launched; 1 and 3 have sent to their
    leaders (LANs are free), the leaders one piece each, when worker 2, who leads b, dies."""
    timeline = start(triangle(2), *(0.0,) * 6, scheme="hierarchical", operation="all_reduce")
    arrivals(timeline, 6)
    assert timeline.act([Kill(5), Launch(parts(0, 1, 2, 3, 4), 0, 0, True), WakeAt(1.0, 0)]) == [
        (),
        None,
        None,
    ]
    timeline.advance()
    assert timeline.act([Kill(2), Abort(0)]) == [(0,), 60]
    timeline.act([Launch(parts(0, 1, 3, 4), 0, 1, True)])
    # Worker 3 leads b now. Pieces of 7, 7 and 6 bytes; those of the aborted exchange still leave.
    assert isinstance(timeline.advance(), Closed)
    found = timeline.end()
    assert {spent.worker: spent.wire_bytes for spent in found.spent} == {
        0: 7,
        1: 20,
        2: 7,
        3: 20,
        4: 6,
    }
    assert {s.worker: s.wire_bytes for s in found.syncs} == {0: 47, 1: 20, 3: 27, 4: 26}
    assert sum(by_link(found).values()) == timeline.wire_bytes == 60 + 120


def test_a_member_that_was_done_may_die_and_the_others_finish() -> None:
    """A star: worker 0 has its answer at 4 s and dies at 5 s; the answers of the others arrive."""
    timeline = start(triangle(), 1.0, 1.0, 1.0, scheme="star")
    arrivals(timeline, 3)
    timeline.act([Launch(parts(0, 1, 2), 0, 0, True), WakeAt(5.0, 0)])
    assert timeline.advance() == Wake(5.0, 0)
    assert timeline.act([Kill(0)]) == [()]
    assert timeline.advance() == Closed(9.0, 0)
    found = timeline.end()
    assert [(s.worker, s.wire_bytes) for s in found.syncs] == [(1, 60), (2, 60)]
    assert found.spent == [Spent(9.0, 0, 0, 1, 60)]
    assert timeline.wire_bytes == 180


def test_an_answer_on_its_way_is_not_yet_there() -> None:
    """The last piece of the last member is in the air until 9 s: who dies at 8.9 s was not done."""
    for moment, numbers in ((8.9, (0,)), (9.0, ())):
        timeline = start(triangle(), 1.0, 2.0, 3.0)
        arrivals(timeline, 3)
        timeline.act([Launch(parts(0, 1, 2), 0, 0, True), WakeAt(moment, 0)])
        assert isinstance(until(timeline, Wake), Wake)
        assert timeline.act([Kill(1)]) == [numbers]


def test_members_that_went_on_keep_their_result() -> None:
    """Without a barrier worker 0 goes on at 4 s. The star is aborted at 5 s: what 0 sent is in its
    sync, what the others did is spent: up, and the answers that have begun."""
    timeline = start(triangle(), 1.0, 1.0, 1.0, scheme="star")
    arrivals(timeline, 3)
    timeline.act([Launch(parts(0, 1, 2), 0, 0, False), WakeAt(5.0, 0)])
    assert timeline.advance() == Wake(5.0, 0)
    assert timeline.act([Abort(0), Launch(parts(1, 2), 0, 1, False)]) == [120, None]
    assert timeline.advance() is None
    found = timeline.end()
    assert {s.worker: s.wire_bytes for s in found.syncs} == {0: 60, 1: 40, 2: 40}
    assert [s.wire_bytes for s in found.spent] == [60, 60]
    assert timeline.wire_bytes == 260


def test_followers_of_what_is_aborted_wait_again() -> None:
    """And get their control bytes only when they go on."""
    timeline = start(triangle(), 1.0, 1.0, 1.0)
    arrivals(timeline, 3)
    timeline.act([Launch(parts(0, 1), 0, 0, True), Release(2, 0, 1, 9, 0), WakeAt(2.0, 0)])
    timeline.advance()
    assert timeline.act([Abort(0)]) == [40]
    timeline.act([Launch(parts(0, 1, 2), 0, 1, True)])
    assert isinstance(timeline.advance(), Closed)
    timeline.end()
    assert timeline.control_bytes == 0


@pytest.mark.parametrize(
    ("moment", "wire", "links"),
    [
        (2.0, 0, {}),  # it has not sent
        (2.5, 0, {}),  # it is about to
        (2.75, 50, {"w:b>a": 50}),  # half of it has left
        (3.5, 50, {"w:b>a": 50}),  # all has left, nothing has arrived
        (4.0, 50, {"w:b>a": 50}),  # it has arrived
        (4.5, 150, {"w:b>a": 50, "w:a>b": 100}),  # the answer is on its way
        (5.9, 150, {"w:b>a": 50, "w:a>b": 100}),  # the answer is almost there
    ],
)
def test_a_contributor_to_a_star_dies(moment: float, wire: int, links: dict[str, int]) -> None:
    """Worker 1 sends 50 bytes over 100 B/s and 1 s from 2.5 to 3 s, is answered with 100 bytes from
    4 to 5 s and has them at 6 s."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("a", "b"), 100.0, 1.0)])
    timeline = start(topology, 1.0, 2.5, operation="star", size=50, turns=2)
    timeline.advance()
    timeline.act([Kill(0), WakeAt(moment, 0)])
    came = []
    while (event := timeline.advance()) is not None:
        came.append(event)
        if isinstance(event, Wake):
            assert timeline.act([Kill(1)]) == [()]
        elif moment > 4.0:
            timeline.act([Reply(1, 0, 1, 100, 1)])
    assert [type(event) for event in came] == ([Arrival, Wake] if moment >= 4.0 else [Wake])
    found = timeline.end()
    assert [spent.wire_bytes for spent in found.spent if spent.worker == 1] == [wire][: wire > 0]
    assert {link: n for link, n in by_link(found).items() if link != "lan:a"} == links
    assert found.syncs == []
    assert timeline.wire_bytes == wire + 50  # what worker 0 had sent
    assert found.clocks[1].clock_s == moment


def test_what_was_done_ahead_of_death_is_undone() -> None:
    """Three steps of 2 s, half-way in the second: one is told, the clock stands at the death, and
    neither the mark nor the control bytes after them have happened."""
    timeline = TimedTimeline(triangle(), FixedSteps((2.0, 1.0, 1.0)), "all_reduce")
    timeline.extend(
        [(0, Compute(0, 3)), (0, Control(9)), (0, Mark(3)), (0, Idle(50.0)), (0, End())]
    )
    for worker in (1, 2):
        timeline.extend([(worker, op) for op in (Compute(0, 3), Control(9), Mark(3), End())])
    timeline.act([WakeAt(3.0, 0)])
    assert timeline.advance() == Wake(3.0, 0)
    found = timeline.take()
    assert sorted((w, first, ends.tolist()) for w, first, _, ends in found.steps) == [
        (0, 0, [2.0]),
        (1, 0, [1.0, 2.0, 3.0]),
        (2, 0, [1.0, 2.0, 3.0]),
    ]
    assert found.marks == []
    timeline.act([Kill(0)])
    assert timeline.advance() is None
    found = timeline.end()
    assert (found.steps, found.marks) == ([], [(3, 3.0)])
    assert found.clocks[0][:3] == (3.0, 0.0, 3.0)
    assert timeline.control_bytes == 18


def test_a_sync_that_the_dead_had_ahead_is_spent() -> None:
    """With overlap it would have gone on at 10 s with what was there at 4 s; it dies at 5 s."""
    timeline = TimedTimeline(triangle(), FixedSteps((1.0,) * 3), "all_gather")
    for worker in (0, 1):
        send = Send(0, 1, 1, Bytes(20), 1)
        ops = [Compute(0, 1), send, Compute(1, 9), Receive(0, 1), Compute(10, 1), End()]
        timeline.extend((worker, op) for op in ops)
    timeline.extend([(2, End())])
    arrivals(timeline, 2)
    timeline.act([Launch(parts(0, 1), 0, 0, True), WakeAt(5.0, 0)])
    assert timeline.advance() == Closed(4.0, 0)
    assert timeline.advance() == Wake(5.0, 0)
    assert timeline.take().syncs == []
    timeline.act([Kill(0)])
    timeline.advance()
    found = timeline.end()
    assert [(s.worker, s.passed_s) for s in found.syncs] == [(1, 10.0)]
    assert found.spent == [Spent(5.0, 0, 0, 1, 20)]
    assert found.clocks[0][:3] == (5.0, 0.0, 5.0)


def test_a_worker_comes_back() -> None:
    """Dead from 2 to 7 s, it stands at step 3 and takes one more; marks before are not its own."""
    timeline = TimedTimeline(triangle(), FixedSteps((1.0, 1.0, 1.0)), "all_reduce")
    for worker in range(3):
        ops: list[Op] = [Compute(0, 3), Mark(3), Compute(3, 7), Mark(10), End()]
        timeline.extend((worker, op) for op in ops)
    timeline.act([WakeAt(2.0, 0), WakeAt(5.0, 1)])
    timeline.advance()
    timeline.act([Kill(0)])
    with pytest.raises(ValueError, match="dead"):
        timeline.extend([(0, Compute(3, 1))])
    assert timeline.advance() == Wake(5.0, 1)
    assert timeline.take().marks == [(3, 3.0)]
    timeline.act([Revive(0, 7.0, 9), WakeAt(8.0, 2)])
    assert timeline.advance() is None  # it may yet send at 7 s
    timeline.extend([(0, op) for op in (Compute(9, 1), Mark(10), End())])
    assert timeline.advance() == Wake(8.0, 2)
    assert timeline.advance() is None
    found = timeline.end()
    assert found.marks == [(10, 10.0)]
    clock = found.clocks[0]
    assert (clock.compute_s, clock.wait_s, clock.away_s, clock.clock_s) == (3.0, 0.0, 5.0, 8.0)


def test_joining_waits_for_those_who_live() -> None:
    """Worker 2 joins when 0 and 1 have passed step 1, at 1 and 6 s; worker 1 dies at 4 s."""
    timeline = TimedTimeline(triangle(), FixedSteps((1.0, 6.0, 1.0)), "all_reduce")
    timeline.extend([(0, Members(-1, 1, (0, 1))), (2, Join(1)), (2, Compute(1, 1)), (2, End())])
    for worker in (0, 1):
        timeline.extend([(worker, op) for op in (Compute(0, 1), Pass(1), End())])
    timeline.act([WakeAt(4.0, 0)])
    timeline.advance()
    timeline.act([Kill(1)])
    assert timeline.advance() is None
    clock = timeline.end().clocks[2]
    assert (clock.away_s, clock.clock_s) == (4.0, 5.0)


def test_what_makes_no_sense_is_refused() -> None:
    """Each with its reason; nothing has happened then."""
    timeline = start(triangle(), 1.0, 1.0, 5.0)
    arrivals(timeline, 2)
    timeline.act([Launch(parts(0), 0, 0, False)])
    for action, words in (
        (Launch(parts(1, 2), 0, 1, True), "has arrived"),
        (Launch(parts(0), 0, 1, True), "decided before"),
        (Launch(parts(1, 1), 0, 1, True), "twice"),
        (Launch(parts(1), 0, 0, True), "under way"),
        (Release(0, 0, 1, 1), "decided before"),
        (WakeAt(0.5, 0), "past"),
        (Abort(5), "not under way"),
        (Revive(0, 9.0, 1), "not dead"),
        (Reply(1, 0, 1, 1, 1), "only a star"),
    ):
        with pytest.raises(ValueError, match=words):
            timeline.act([action])
    timeline.act([Kill(1)])
    for action, words in (
        (Kill(1), "dead already"),
        (Release(1, 0, 1, 1), "dead"),
        (Revive(1, 0.5, 1), "past"),
        (Launch(parts(1), 0, 1, True), "has arrived"),
    ):
        with pytest.raises(ValueError, match=words):
            timeline.act([action])
    star = start(triangle(), 1.0, 1.0, 1.0, operation="star")
    until(star, Arrival)
    with pytest.raises(ValueError, match="nothing to launch"):
        star.act([Launch(parts(0), 0, 0, True)])
    with pytest.raises(ValueError, match="decided at its Launch"):
        star.extend([(0, Members(0, 1, (0,)))])


# --- laws -----------------------------------------------------------------------------------------


class Chaos:
    """Decides at every event by a seed: who is launched, let go, killed, revived; and notes all.

    With barriers workers die; without, each goes on when it is done.
    """

    def __init__(self, timeline: TimedTimeline, star: bool, seed: int) -> None:
        self.timeline = timeline
        self.workers = timeline.topology.workers
        self.star = star
        self.draw = Random(seed)
        self.deadly = star or seed % 3 > 0
        self.events: list[Event] = []
        self.results: list[list[Result]] = []
        self.arrived: dict[int, int] = {}  # worker -> version, one at a time
        self.under_way: dict[int, dict[int, int]] = {}  # number -> arrived, followers too
        self.launched = 0
        self.dead: set[int] = set()
        self.doomed: set[int] = set()

    def ops(self, worker: int, first: int) -> Iterator[Op]:
        """Three rounds; every other one overlaps with a step. Versions have gaps."""
        for n in range(first, first + 6, 2):
            yield Compute(n, 1)
            yield Control(worker)
            yield Send(0, n + 1, n + 1, Bytes(30), 2)
            if n % 4:
                yield Compute(n + 1, 1)
            yield Receive(0, n + 1)
            yield Mark(n + 1)
        yield End()

    def react(self, event: Event) -> None:
        self.events.append(event)
        actions: list[Action] = []
        if isinstance(event, Arrival):
            if self.star:
                part = event[1:]
                actions.append(self.draw.choice([Reply(*part, 20, 2), Release(*part, 3)]))
            else:
                self.arrived[event.worker] = event.version
            if self.deadly and self.draw.random() < 0.3:
                actions.append(WakeAt(event.time_s + self.draw.choice([0.0, 0.4, 2.0]), 1))
        elif isinstance(event, Closed):
            del self.under_way[event.number]
        elif event.tag == 1:
            actions += self.strike(event)
        elif event.tag >= 100:
            actions += self.recover(event.tag - 100)
        if not self.star:
            actions += self.decide()
        found = self.timeline.act(actions)
        self.results.append(found)
        doomed = sorted(
            {number for result in found if isinstance(result, tuple) for number in result}
        )
        self.doomed.update(doomed)
        self.timeline.act([WakeAt(event.time_s + 0.7, 100 + number) for number in doomed])

    def strike(self, event: Event) -> list[Action]:
        alive = [worker for worker in range(self.workers) if worker not in self.dead]
        if len(alive) < 2:
            return []
        worker = self.draw.choice(alive)
        for members in (self.arrived, *self.under_way.values()):
            members.pop(worker, None)
        self.dead.add(worker)
        return [Kill(worker), WakeAt(event.time_s + self.draw.choice([0.0, 3.0]), 2)]

    def recover(self, number: int) -> list[Action]:
        if number not in self.doomed:
            return []
        self.doomed.discard(number)
        self.arrived.update(self.under_way.pop(number))
        return [Abort(number)]

    def decide(self) -> list[Action]:
        busy = {worker for members in self.under_way.values() for worker in members}
        most = self.workers - len(self.dead | busy)
        if not self.arrived or len(self.arrived) < min(2, most):
            return []
        chosen = sorted(self.arrived.items())
        self.arrived = {}
        number, self.launched = self.launched, self.launched + 1
        if self.deadly:
            self.under_way[number] = dict(chosen)
        last = chosen.pop() if len(chosen) > 1 and self.draw.random() < 0.3 else None
        actions: list[Action] = [Launch(tuple(chosen), 0, number, self.deadly)]
        if last is not None:
            actions.append(Release(last[0], 0, last[1], 4, number))
        return actions


def play(
    topology: Topology,
    operation: str,
    scheme: str,
    step_s: tuple[float, ...],
    seed: int,
    data: st.DataObject | None,
    per_transfer: bool = False,
) -> tuple[TimedTimeline, Chaos, list[Timings]]:
    """A run under chaos, all operations known at once or (``data``) piece by piece."""
    timeline = TimedTimeline(
        topology, FixedSteps(step_s), operation, scheme=scheme, seed=1, per_transfer=per_transfer
    )
    chaos = Chaos(timeline, operation == "star", seed)
    rest = [list(chaos.ops(worker, 0)) for worker in range(topology.workers)]
    found: list[Timings] = []
    if data is None:
        timeline.extend((worker, op) for worker, ops in enumerate(rest) for op in ops)
        rest = [[] for _ in rest]
    while True:
        event = timeline.advance()
        if event is not None:
            found.append(timeline.take())
            chaos.react(event)
            if isinstance(event, Wake) and event.tag == 2 and chaos.dead:
                worker = min(chaos.dead)
                chaos.dead.discard(worker)
                first = 10 * len(chaos.events)
                timeline.act([Revive(worker, event.time_s + 0.5, first)])
                rest[worker] = list(chaos.ops(worker, first))
                if data is None:
                    timeline.extend((worker, op) for op in rest[worker])
                    rest[worker] = []
            for worker in chaos.dead:
                rest[worker] = []
        elif any(rest):
            assert data is not None
            worker = data.draw(st.sampled_from([w for w, ops in enumerate(rest) if ops]))
            count = data.draw(st.integers(1, 5))
            timeline.extend((worker, op) for op in rest[worker][:count])
            del rest[worker][:count]
        else:
            break
    found.append(timeline.end())
    return timeline, chaos, found


cases = st.tuples(
    clusters(),
    st.sampled_from(["all_reduce", "all_gather", "star"]),
    st.sampled_from(SCHEMES),
    st.tuples(*[st.sampled_from([0.0, 0.4, 1.1])] * 12),
    st.integers(0, 10**6),
)


@settings(max_examples=120, deadline=None)
@given(cases, st.data())
def test_decisions_and_results_do_not_depend_on_how_operations_arrive(
    case: tuple[Topology, str, str, tuple[float, ...], int], data: st.DataObject
) -> None:
    """With launches, releases, deaths, aborts and revivals: the same events, the same bits, the
    ledger's rows in the same order, and the same told before each event."""
    _, chaos, found = play(*case, data=None)
    _, again, pieces = play(*case, data=data)
    assert again.events == chaos.events
    assert again.results == chaos.results
    assert told(pieces) == told(found)
    assert in_order(pieces) == in_order(found)
    for one, other in zip(found, pieces, strict=True):
        assert (told([one])[:3], one.spent) == (told([other])[:3], other.spent)


@settings(max_examples=200, deadline=None)
@given(cases, st.booleans())
def test_books_balance_whatever_happens(
    case: tuple[Topology, str, str, tuple[float, ...], int], per_transfer: bool
) -> None:
    """Rows sum to totals; wire bytes are those of syncs and of what was spent; nothing is told that
    is still to come; compute + wait + away = clock, the parts of waiting sum to it."""
    timeline, chaos, found = play(*case, data=None, per_transfer=per_transfer)
    rows = in_order(found)
    for name, total in timeline.links.items():
        assert total.bytes == sum(row.bytes for row in rows if row.link == name)
    syncs = [sync for part in found for sync in part.syncs]
    spent = [spent for part in found for spent in part.spent]
    given = sum(sync.wire_bytes for sync in syncs) + sum(part.wire_bytes for part in spent)
    assert timeline.wire_bytes == given
    topology = case[0]
    if all(len(topology.route(a, b)) < 2 for a in range(len(topology.sites)) for b in range(a)):
        counted = timeline.wan_bytes + timeline.lan_bytes - timeline.control_bytes
        assert counted == timeline.wire_bytes
    for event, part in zip(chaos.events, found, strict=False):
        assert all(ends[-1] <= event.time_s for _, _, _, ends in part.steps)
        assert all(sync.passed_s <= event.time_s for sync in part.syncs)
        assert all(moment <= event.time_s for _, moment in part.marks)
    moments = [event.time_s for event in chaos.events]
    assert moments == sorted(moments)
    for clock in found[-1].clocks:
        sums = clock.compute_s + clock.wait_s + clock.away_s
        assert sums == pytest.approx(clock.clock_s, rel=1e-9, abs=1e-12)
        assert sum(clock[3:8]) == pytest.approx(clock.wait_s, rel=1e-9, abs=1e-9)
        assert min(clock) > -1e-9
