"""Why a collective took so long, the same as arrays, and which scheme would be the quickest."""

from __future__ import annotations

from collections import defaultdict
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.network import Link, Site, Topology, Wire
from islands.network.background import Load
from islands.network.choose import scheme_seconds, schemes_seconds, steady
from islands.network.collectives import Rings
from islands.network.fabric import Fabric
from islands.network.schemes import SCHEMES
from islands.network.star import Contributions
from islands.network.steps import Steps
from islands.network.vectorised import RingArrays
from islands.trace import Bytes, Send
from tests.test_collectives import factory, play, plays, two_and_two

# --- why it took so long --------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(plays(), st.sampled_from(SCHEMES))
def test_a_chain_accounts_for_all_the_time_since_its_root(
    case: tuple[Topology, str, list[str], list[float], list[Bytes]], scheme: str
) -> None:
    """Root + queueing + propagation + transmission = done; the root is someone's ready time, and
    no chain begins before a member that had to be waited for was ready."""
    topology, operation, order, ready, sizes = case
    found = play(factory(topology, operation, scheme, order), topology, ready, sizes)
    for done_s, (root_s, own_s, background_s, propagation_s, others_s) in zip(
        found.done_s, found.why, strict=True
    ):
        assert root_s in ready
        assert min(own_s, propagation_s) >= 0.0
        assert (background_s, others_s) == (0.0, 0.0)
        assert done_s - root_s - own_s - propagation_s >= -1e-9
    if scheme == "star" and topology.workers > 1:
        assert len({why[0] for why in found.why}) == 1  # one arrival closes it for everybody


def test_transmission_is_what_remains() -> None:
    """One byte each round a ring of four: only delays; without delays: only bytes over rate."""
    sites = [Site(name, 1, inf, 0.0) for name in "abcd"]
    for rate, delay_s in ((inf, 0.25), (4.0, 0.0)):
        wires = [Wire(a + b, (a, b), rate, delay_s) for a, b in ("ab", "bc", "cd", "da")]
        topology = Topology.build(sites, wires, None)
        found = play(factory(topology, "all_reduce", "ring"), topology, [1.0] * 4, [Bytes(4)] * 4)
        assert found.done_s == [1.0 + 6 * 0.25] * 4
        assert found.why == [(1.0, 0.0, 0.0, 6 * delay_s, 0.0)] * 4


def test_a_ring_blames_who_came_last() -> None:
    """Everyone waits for the third member, whose chain begins when it is ready."""
    sites = [Site(name, 1, inf, 0.0) for name in "abcd"]
    wires = [Wire(a + b, (a, b), 1.0, 0.25) for a, b in ("ab", "bc", "cd", "da")]
    topology = Topology.build(sites, wires, None)
    ready = [0.0, 1.0, 50.0, 2.0]
    found = play(factory(topology, "all_reduce", "ring"), topology, ready, [Bytes(4)] * 4)
    assert [why[0] for why in found.why] == [50.0] * 4
    # Member 2 sent its first pieces at once, all in its port one after the other: they queue.
    assert max(why[1] for why in found.why) > 0.0


def test_a_star_blames_the_arrival_that_closes_it() -> None:
    """The coordinator's port serves three at 10 B/s; the last of them waited for two others."""
    topology = Topology.build([Site("a", 3, 10.0, 0.5)], [], None)
    found = play(
        factory(topology, "all_reduce", "star"), topology, [0.0, 0.0, 1.0], [Bytes(10)] * 3
    )
    # Up: in by 1.5, 2.5, 3.5; the third was ready for the port at 1.5 and waited a second.
    # Down at 3.5: 1 s + 0.5 s each, after 0, 1 and 2 s in the coordinator's port.
    assert found.done_s == [5.0, 6.0, 7.0]
    assert found.why == [(1.0, 1.0 + n, 0.0, 1.0, 0.0) for n in range(3)]


def test_arrivals_at_one_moment_blame_the_lowest_member() -> None:
    """Two arrive together, one of which was ready before: the chain of member 0 goes on."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("a", "b"), inf, 2.0)], None)
    found = play(factory(topology, "all_reduce", "star"), topology, [2.0, 0.0], [Bytes(1)] * 2)
    assert [why[0] for why in found.why] == [2.0, 2.0]
    assert found.why[1] == (2.0, 0.0, 0.0, 2.0, 0.0)


def test_a_leader_waits_for_its_last_member() -> None:
    """The chain through a hierarchy begins with the worker that was ready last, in its island."""
    topology = two_and_two(lan=10.0, rate=5.0, delay_s=1.0)
    found = play(
        factory(topology, "all_reduce", "hierarchical"),
        topology,
        [0.0, 7.0, 1.0, 2.0],
        [Bytes(20)] * 4,
    )
    assert [why[0] for why in found.why] == [7.0] * 4
    # Island b began its exchange at 4: only what it hears from a came late, 9 … 11 and 11 … 13.
    assert found.done_s == [17.0, 17.0, 16.0, 16.0]
    assert [why[1] for why in found.why] == [0.0, 0.0, 2.0, 2.0]


def test_a_decision_takes_the_time_of_others() -> None:
    """An answer 3 s after the arrival: the chain goes on through it, as time of the others."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("a", "b"), 100.0, 1.0)], None)
    stars, fabric = Contributions(topology), Fabric(topology)
    found = stars.open_for(1, (0, 1), fabric, lambda collective, member: None)
    found.enter(0, 1, 2.0, Send(0, 1, 0, Bytes(50), 1))
    event = fabric.run()
    assert event is not None
    assert event[0] == 3.5
    found.answer(6.5, Bytes(100))
    assert fabric.run() is None
    assert found.done_s == [8.5]
    assert found.why == [(2.0, 0.0, 0.0, 2.0, 3.0)]
    assert list(found.wire) == [150]


# --- as arrays ------------------------------------------------------------------------------------


class Recorder:
    """Stands for a link's usage and keeps what it is told."""

    finish_s = -1.0  # nothing follows it without a gap, so that everything is told

    def __init__(self) -> None:
        self.served: list[tuple[float, float]] = []

    def add(self, start_s: float, finish_s: float, share: float = 1.0) -> None:
        self.served.append((start_s, finish_s))


@settings(max_examples=200, deadline=None)
@given(plays([False]), st.integers(1, 4), st.integers(1, 3))
def test_arrays_give_the_event_loops_bits(
    case: tuple[Topology, str, list[str], list[float], list[Bytes]], itemsize: int, rounds: int
) -> None:
    """Times of all hops, ends, chains, what links served and when they are free: all the same."""
    topology, operation, order, ready, sizes = case
    rings = factory(topology, operation, "ring", order)
    assert isinstance(rings, Rings)
    if not rings.disjoint or topology.workers == 1:
        return
    fabric, arrays = Fabric(topology), RingArrays(rings)
    recorders = [Recorder() for _ in topology.links]
    for line, recorder in zip(fabric.lines, recorders, strict=False):
        assert line is not None
        line.usage = recorder  # type: ignore[assignment]
    free_s = [0.0] * topology.resources
    served: list[list[tuple[float, float]]] = [[] for _ in topology.links]

    def note(resource: int, starts: np.ndarray, finishes: np.ndarray) -> None:
        served[resource] += zip(starts.tolist(), finishes.tolist(), strict=True)

    begin_s = 0.0
    for turn in range(1, rounds + 1):
        moments = [begin_s + moment for moment in ready]
        loop, whole = (rings.open((0, turn), fabric, lambda c, m: None) for _ in range(2))
        for ring in (loop, whole):
            for member, moment in enumerate(moments):
                ring.enter(member, turn, moment, Send(0, turn, 0, sizes[member], itemsize))
        loop.launch()
        assert fabric.run() is None
        arrays.run(whole, free_s, note)
        assert loop.done_s == whole.done_s
        assert loop.why == whole.why
        assert loop.first_s == whole.first_s
        assert loop.last_s == whole.last_s
        assert loop.queued_s == whole.queued_s
        assert list(loop.wire) == list(whole.wire)
        assert loop.rows() == whole.rows()
        begin_s = max(loop.done_s)
    assert free_s == fabric.free_s
    assert served == [recorder.served for recorder in recorders]


def test_long_service_records_are_handed_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is kept at a time: the same services in the same order."""
    sites = [Site(f"i{k}", 1, inf, 0.0) for k in range(7)]
    wires = [Wire(f"w{k}", (f"i{k}", f"i{(k + 1) % 7}"), 3.0, 0.1) for k in range(7)]
    topology = Topology.build(sites, wires, None)
    rings = factory(topology, "all_reduce", "ring")
    assert isinstance(rings, Rings)
    found = []
    calls = []
    for kept in (1 << 20, 40, 1):
        monkeypatch.setattr("islands.network.vectorised._KEPT", kept)
        ring = rings.open((0, 1), Fabric(topology), lambda c, m: None)
        for member in range(7):
            ring.enter(member, 1, 0.5 * member, Send(0, 1, 0, Bytes(70), 1))
        log: dict[int, list[tuple[float, float]]] = defaultdict(list)
        count = [0]

        def note(
            resource: int,
            starts: np.ndarray,
            finishes: np.ndarray,
            log: dict[int, list[tuple[float, float]]] = log,
            count: list[int] = count,
        ) -> None:
            log[resource] += zip(starts.tolist(), finishes.tolist(), strict=True)
            count[0] += 1

        RingArrays(rings).run(ring, [0.0] * topology.resources, note)
        found.append(dict(log))
        calls.append(count[0])
    assert found[0] == found[1] == found[2]
    assert calls == [7, 7 * 6, 7 * 12]


@pytest.mark.parametrize(
    "change",
    [
        {"fair": True},
        {"background": Load(0.1, 100.0)},
        {"jitter_s": 0.01},
        {"bandwidth": Steps.constant(5.0)},
        {"delay": Steps.constant(0.5)},
    ],
)
def test_only_constant_fifo_links_go_as_arrays(change: dict[str, object]) -> None:
    """Anything else on a link of the ring needs the event loop; an unused link does not matter."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]

    def disjoint(**extra: object) -> bool:
        links = [Link("x", "a", "b", 9.0, 0.1, **extra), Link("y", "b", "a", 9.0, 0.1, **extra)]
        rings = factory(Topology.build(sites, links), "all_reduce", "ring")
        assert isinstance(rings, Rings)
        return rings.disjoint

    assert disjoint()
    assert not disjoint(**change)


# --- which one ------------------------------------------------------------------------------------


def test_seconds_of_every_scheme() -> None:
    """On two islands of four, few bytes and a long wire: the fewest crossings in a row win."""
    sites = [Site("a", 4, 1e9, 0.0), Site("b", 4, 1e9, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("a", "b"), 1e9, 1.0)], None)
    found = schemes_seconds(topology, "all_reduce", [Bytes(80)] * 8, 4)
    # Star: up and down. Hierarchy: two phases of exchange. Ring: 14 phases, on the worst way
    # round two of every eight steps cross the wire.
    assert set(found) == set(SCHEMES)
    assert found["star"] == pytest.approx(2.0, rel=1e-3)
    assert found["hierarchical"] == pytest.approx(2.0, rel=1e-3)
    assert found["ring"] == pytest.approx(4.0, rel=1e-3)


def test_payloads_may_differ_in_size_when_choosing() -> None:
    """An all-gather of one large and many empty payloads is mostly that one's way."""
    topology = two_and_two(lan=1e3, rate=10.0)
    sizes = [Bytes(100), Bytes(), Bytes(), Bytes()]
    found = schemes_seconds(topology, "all_gather", sizes, 1)
    assert found["hierarchical"] == pytest.approx(10.0, rel=0.1)
    # The star's coordinator sends it over the wire once for each of the two workers there.
    assert found["star"] == pytest.approx(20.0, rel=0.1)


def test_a_choice_does_not_depend_on_the_moment() -> None:
    """Background, jitter and changes are left out: means decide."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]
    changing = Steps((0.0, 5.0), (1.0, 19.0), 10.0)
    links = [
        Link("x", "a", "b", 10.0, 0.5, background=Load(0.5, 30.0), bandwidth=changing),
        Link("y", "b", "a", 10.0, 0.5, jitter_s=0.2),
    ]
    topology = Topology.build(sites, links)
    plain = Topology.build(sites, [Wire("w", ("a", "b"), 10.0, 0.5)])
    sizes = [Bytes(40)] * 2
    assert schemes_seconds(topology, "all_gather", sizes, 1) == schemes_seconds(
        plain, "all_gather", sizes, 1
    )
    assert scheme_seconds(topology, "all_gather", "ring", sizes, 1) != scheme_seconds(
        steady(topology), "all_gather", "ring", sizes, 1
    )


def test_the_ring_order_is_taken_into_account() -> None:
    """On a line of islands a zigzag costs more than there and back."""
    sites = [Site(name, 1, inf, 0.0) for name in "abcd"]
    wires = [Wire(a + b, (a, b), 10.0, 1.0) for a, b in ("ab", "bc", "cd")]
    topology = Topology.build(sites, wires, None)
    straight, zigzag = (
        schemes_seconds(topology, "all_reduce", [Bytes(400)] * 4, 1, order)["ring"]
        for order in (list("abcd"), list("acbd"))
    )
    assert zigzag > straight
