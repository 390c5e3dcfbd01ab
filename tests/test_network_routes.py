"""Topology: links, ports, routes and what is refused."""

from __future__ import annotations

import pickle
from math import inf

import pytest

from islands.errors import InputError
from islands.network import COORDINATOR, Site, Topology, Wire


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
    assert [hop[1:] for hop in topology.path(0, 1)] == [(10.0, 0.1), (10.0, 0.0)]
    assert [hop[1:] for hop in topology.path(1, 3)] == [
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
