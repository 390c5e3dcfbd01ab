"""Topology: links, ports, routes and what is refused."""

from __future__ import annotations

import pickle
from math import inf

import pytest

from islands.errors import InputError
from islands.network import COORDINATOR, CORE, Link, Site, Topology, Wire


def sites(*names: str) -> list[Site]:
    return [Site(name, 1, inf, 0.0) for name in names]


def test_a_wire_is_two_links() -> None:
    """Each direction of a wire is a link of its own, named after both ends."""
    topology = Topology.build(sites("a", "b"), [Wire("sea", ("a", "b"), 5.0, 0.1)], None)
    assert [(link.name, link.bytes_per_s, link.delay_s) for link in topology.links] == [
        ("sea:a>b", 5.0, 0.1),
        ("sea:b>a", 5.0, 0.1),
    ]
    assert topology.route(0, 1) == ("sea:a>b",)
    assert topology.route(1, 0) == ("sea:b>a",)
    assert topology.route(0, 0) == ()


def test_fewest_hops_win_over_least_delay() -> None:
    """One slow hop is preferred to two fast ones."""
    wires = [
        Wire("slow", ("a", "c"), 1.0, 9.0),
        Wire("x", ("a", "b"), 1.0, 0.1),
        Wire("y", ("b", "c"), 1.0, 0.1),
    ]
    topology = Topology.build(sites("a", "b", "c"), wires, None)
    assert topology.route(0, 2) == ("slow:a>c",)


def test_least_delay_wins_among_equal_hops() -> None:
    """Of two routes with two hops the one with the smaller total delay is taken."""
    wires = [
        Wire("a1", ("a", "b"), 1.0, 1.0),
        Wire("a2", ("b", "d"), 1.0, 1.0),
        Wire("z1", ("a", "c"), 1.0, 0.5),
        Wire("z2", ("c", "d"), 1.0, 1.4),
    ]
    topology = Topology.build(sites("a", "b", "c", "d"), wires, None)
    assert topology.route(0, 3) == ("z1:a>c", "z2:c>d")


def test_names_decide_among_equals() -> None:
    """Parallel wires with the same delay: the first name, whatever the order in the file."""
    wires = [Wire("two", ("a", "b"), 1.0, 1.0), Wire("one", ("a", "b"), 9.0, 1.0)]
    for order in (wires, wires[::-1]):
        assert Topology.build(sites("a", "b"), order, None).route(0, 1) == ("one:a>b",)


def test_paths_charge_a_lan_once_per_crossing() -> None:
    """Inside an island one delay in all; between islands one at each end, none in the middle."""
    island = [Site("a", 2, 10.0, 0.1), Site("m", 1, 20.0, 0.2), Site("b", 1, 30.0, 0.4)]
    wires = [Wire("x", ("a", "m"), 5.0, 1.0), Wire("y", ("m", "b"), 6.0, 2.0)]
    topology = Topology.build(island, wires, "b")
    assert [hop[1:3] for hop in topology.path(0, 1)] == [(10.0, 0.1), (10.0, 0.0)]
    assert [hop[1:3] for hop in topology.path(1, 3)] == [
        (10.0, 0.1),
        (5.0, 1.0),
        (6.0, 2.0),
        (30.0, 0.4),
    ]
    assert topology.path(3, COORDINATOR)[0].resource == topology.path(3, 0)[0].resource
    assert topology.path(3, COORDINATOR)[1].resource != topology.path(0, 3)[-1].resource


def test_every_port_and_link_is_its_own_resource() -> None:
    """Out-ports, in-ports and links never share a number, and all numbers are in range."""
    topology = Topology.build(
        [Site("a", 2, 1.0, 0.0), Site("b", 2, 1.0, 0.0)], [Wire("w", ("a", "b"), 1.0, 0.0)], None
    )
    ends = [*range(4), COORDINATOR]
    out = {end: topology.path(end, 0 if end else 1)[0].resource for end in ends}
    into = {end: topology.path(0 if end else 1, end)[-1].resource for end in ends}
    numbers = [*out.values(), *into.values(), 0, 1]
    assert sorted(numbers) == list(range(topology.resources))


def test_workers_are_numbered_island_by_island() -> None:
    """The first island has the first workers; the whole thing survives pickling."""
    topology = Topology.build(
        [Site("a", 2, 1.0, 0.0), Site("b", 1, 1.0, 0.0)], [Wire("w", ("a", "b"), 1.0, 0.0)], None
    )
    assert topology.island_of == (0, 0, 1)
    assert topology.workers == 3
    assert topology.island_names == ("a", "b")
    assert pickle.loads(pickle.dumps(topology)) == topology


def test_islands_without_a_route_are_refused() -> None:
    """The message names both islands."""
    with pytest.raises(InputError, match="no route from island 'a' to island 'c'"):
        Topology.build(sites("a", "b", "c"), [Wire("w", ("a", "b"), 1.0, 0.0)], None)


def test_unknown_islands_are_refused() -> None:
    """A wire or a coordinator in an island that is not there: the nearest name is suggested."""
    with pytest.raises(InputError, match=r"links\.w\.between: .*'oregno'.*'oregon'"):
        Topology.build(sites("dublin", "oregon"), [Wire("w", ("dublin", "oregno"), 1.0, 0.0)], None)
    with pytest.raises(InputError, match=r"coordinator: .*'dubln'.*'dublin'"):
        Topology.build(sites("dublin"), [], "dubln")


# ------------------------------------------------------------------------------- through the core


def access(name: str, up: float | None = 8.0, down: float | None = 9.0) -> list[Link]:
    """The access lines of an island: an uplink of delay 1 s, a downlink of 2 s."""
    lines = []
    if up is not None:
        lines.append(Link(f"uplink:{name}", name, CORE, up, 1.0))
    if down is not None:
        lines.append(Link(f"downlink:{name}", CORE, name, down, 2.0))
    return lines


def test_islands_with_access_lines_are_joined_through_the_core() -> None:
    """Up, then down, and over the backbone between them where there is one."""
    lines = [*access("a"), *access("b")]
    topology = Topology.build(sites("a", "b"), lines)
    assert topology.route(0, 1) == ("uplink:a", "downlink:b")
    assert [hop[1:3] for hop in topology.path(0, 1)[1:-1]] == [(8.0, 1.0), (9.0, 2.0)]
    backbone = Link("backbone", CORE, CORE, 5.0, 4.0)
    joined = Topology.build(sites("a", "b"), [*lines, backbone])
    assert joined.route(1, 0) == ("uplink:b", "backbone", "downlink:a")
    assert joined.resources == len(lines) + 1 + 2 * 2 + 2


def test_a_backbone_joins_islands_without_access_lines() -> None:
    """It is one resource for every pair and both directions."""
    backbone = Link("backbone", CORE, CORE, 5.0, 4.0)
    topology = Topology.build(sites("a", "b", "c"), [backbone])
    assert {topology.routes[i][j] for i in range(3) for j in range(3) if i != j} == {(0,)}


def test_a_link_of_their_own_takes_a_pair_out_of_the_core_but_not_off_its_access_lines() -> None:
    """A site's access lines are crossed by all that leaves it or comes in."""
    links = [*access("a"), *access("b"), *access("c"), *Wire("w", ("a", "b"), 1.0, 99.0).links()]
    topology = Topology.build(sites("a", "b", "c"), links)
    assert topology.route(0, 1) == ("uplink:a", "w:a>b", "downlink:b")
    assert topology.route(0, 2) == ("uplink:a", "downlink:c")


def test_transit_crosses_both_access_lines_of_the_island_in_the_middle() -> None:
    """What passes through a site comes down its line and goes up again."""
    wires = [Wire("x", ("a", "m"), 1.0, 0.0), Wire("y", ("m", "b"), 1.0, 0.0)]
    topology = Topology.build(sites("a", "m", "b"), [*wires, *access("m")])
    assert topology.route(0, 2) == ("x:a>m", "downlink:m", "uplink:m", "y:m>b")


def test_a_leg_through_the_core_counts_like_a_link() -> None:
    """Fewest legs: through the core at once, although two links would be quicker and are fewer
    resources than up, backbone and down."""
    links = [
        *access("a"),
        *access("b"),
        Link("backbone", CORE, CORE, 1.0, 50.0),
        *Wire("x", ("a", "m"), 1.0, 0.0).links(),
        *Wire("y", ("m", "b"), 1.0, 0.0).links(),
    ]
    topology = Topology.build(sites("a", "m", "b"), links)
    assert topology.route(0, 2) == ("uplink:a", "backbone", "downlink:b")


def test_one_access_line_each_is_enough_and_none_is_refused() -> None:
    """Uplinks alone join islands; where a route would cross nothing at all there is a message."""
    only_up = [*access("a", down=None), *access("b", down=None)]
    assert Topology.build(sites("a", "b"), only_up).route(0, 1) == ("uplink:a",)
    mixed = [*access("a", down=None), *access("b", up=None)]
    with pytest.raises(InputError, match="nothing is between island 'b' and island 'a'; give 'b'"):
        Topology.build(sites("a", "b"), mixed)
    with pytest.raises(InputError, match="no route from island 'a' to island 'c'"):
        Topology.build(sites("a", "b", "c"), [*access("a"), *access("b")])


# ------------------------------------------------------------------------------------- disciplines


def test_a_path_has_one_discipline_ports_included() -> None:
    """Every hop says the discipline of the route; inside an island it is that of all links."""
    wires = [Wire("x", ("a", "b"), 1.0, 0.0, fair=True), Wire("y", ("c", "d"), 1.0, 0.0, fair=True)]
    bridge = Wire("z", ("b", "c"), 1.0, 0.0, fair=True)
    pair = [Site(name, 2, inf, 0.0) for name in "abcd"]
    fair = Topology.build(pair, [*wires, bridge])
    assert {hop.fair for path in [fair.path(0, 1), fair.path(0, 2)] for hop in path} == {True}
    mixed = Topology.build(sites("a", "b"), [Wire("x", ("a", "b"), 1.0, 0.0)])
    assert {hop.fair for hop in mixed.path(0, 1)} == {False}
    assert not Topology.build([Site("a", 2, inf, 0.0)], []).fair
    assert (fair.discipline(0, 1), mixed.discipline(0, 1)) == ("fair", "fifo")


def test_islands_of_mixed_clusters_are_fifo_inside() -> None:
    """Links of both kinds may be in one cluster as long as no route has both."""
    links = [
        Wire("x", ("a", "b"), 1.0, 0.0, fair=True),
        Wire("y", ("b", "c"), 1.0, 0.0, fair=False),
        Wire("z", ("a", "c"), 1.0, 0.0, fair=True),
    ]
    topology = Topology.build([Site(name, 2, inf, 0.0) for name in "abc"], links)
    assert not topology.path(0, 1)[0].fair
    assert all(hop.fair for hop in topology.path(0, 2))
    with pytest.raises(InputError, match=r"from 'a' to 'c' has both .*'y:b>c' is fifo, 'x:a>b' is"):
        Topology.build(sites("a", "b", "c"), links[:2])


def test_a_hop_carries_no_more_than_one_transfer_can_get() -> None:
    """The cap per flow is below the link's rate, or has no effect."""
    links = [
        Link("w:a>b", "a", "b", 10.0, 0.0, flow_bytes_per_s=4.0),
        Link("w:b>a", "b", "a", 10.0, 0.0, flow_bytes_per_s=40.0),
    ]
    topology = Topology.build(sites("a", "b"), links)
    assert (topology.path(0, 1)[1].bytes_per_s, topology.path(1, 0)[1].bytes_per_s) == (4.0, 10.0)
