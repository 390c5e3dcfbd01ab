"""In which order a ring visits the islands: as few crossings of every link as can be."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import fsum, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.config import Cluster, cluster_names
from islands.errors import InputError
from islands.network import Site, Topology, Wire
from islands.network.ring_order import island_order

Cost = tuple[int, int, float]


def cost(topology: Topology, order: tuple[int, ...]) -> Cost:
    """Crossings of the busiest link, crossings in all, delay in seconds, over the closed ring."""
    edges = list(zip(order, [*order[1:], order[0]], strict=True))
    crossed = Counter(link for a, b in edges for link in topology.routes[a][b])
    delay_s = fsum(fsum(topology.links[n].delay_s for n in topology.routes[a][b]) for a, b in edges)
    return max(crossed.values()), crossed.total(), delay_s


@st.composite
def trees_and_more(draw: st.DrawFn, most: int = 6) -> Topology:
    """Islands joined by a random tree and some further links, delays from a few values."""
    count = draw(st.integers(2, most))
    pairs = {(draw(st.integers(0, b - 1)), b) for b in range(1, count)}
    every = [(a, b) for a in range(count) for b in range(a + 1, count)]
    pairs |= set(draw(st.lists(st.sampled_from(every), max_size=4)))
    delays = st.sampled_from([0.0, 0.1, 0.2, 0.7])
    wires = [Wire(f"w{a}_{b}", (f"i{a}", f"i{b}"), 1.0, draw(delays)) for a, b in sorted(pairs)]
    return Topology.build([Site(f"i{n}", 1, inf, 0.0) for n in range(count)], wires)


@given(trees_and_more())
@settings(max_examples=60, deadline=None)
def test_no_other_order_is_better(topology: Topology) -> None:
    """Against all orders: fewest crossings of one link, in all, delay, then the file's order."""
    count = len(topology.sites)
    every = [(0, *rest) for rest in permutations(range(1, count))]
    assert topology.ring_islands() == min(every, key=lambda order: (*cost(topology, order), order))


@given(st.integers(9, 14), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_many_islands_never_do_worse_than_in_the_files_order(count: int, random: object) -> None:
    """Beyond eight islands: every island once, the first one first, the same answer every time."""
    draw = random.random  # type: ignore[attr-defined]
    places = [(draw(), draw()) for _ in range(count)]
    wires = [
        Wire(f"w{a}_{b}", (f"i{a}", f"i{b}"), 1.0, abs(places[a][0] - places[b][0]))
        for a in range(count)
        for b in range(a + 1, count)
        if b == a + 1 or draw() < 0.6
    ]
    topology = Topology.build([Site(f"i{n}", 1, inf, 0.0) for n in range(count)], wires)
    found = topology.ring_islands()
    assert sorted(found) == list(range(count))
    assert found[0] == 0
    assert cost(topology, found) <= cost(topology, tuple(range(count)))
    assert topology.ring_islands() == found


def test_a_scrambled_circle_is_untangled() -> None:
    """Twelve islands on a circle, named in a mixed order: each link is crossed once."""
    circle = [0, 5, 3, 9, 1, 11, 7, 2, 10, 4, 8, 6]
    wires = [
        Wire(f"w{n}", (f"i{a}", f"i{b}"), 1.0, 1.0)
        for n, (a, b) in enumerate(zip(circle, [*circle[1:], 0], strict=True))
    ]
    topology = Topology.build([Site(f"i{n}", 1, inf, 0.0) for n in range(12)], wires)
    found = topology.ring_islands()
    assert cost(topology, found) == (1, 12, 12.0)
    assert found in (tuple(circle), (0, *circle[:0:-1]))
    assert cost(topology, tuple(range(12)))[0] > 1


def test_the_order_of_continents_avoids_the_long_way() -> None:
    """Each of the shipped four has a link to each other; the antipodes are not neighbours."""
    topology = Cluster.load("four_continents").topology()
    names = [topology.island_names[i] for i in topology.ring_islands()]
    assert names == ["virginia", "tokyo", "frankfurt", "sao_paulo"]
    # Workers come island by island, each island's in their own order.
    assert topology.ring() == (0, 1, 4, 5, 2, 3, 6, 7)


@pytest.mark.parametrize("name", cluster_names())
def test_shipped_clusters_have_an_order_of_all_workers(name: str) -> None:
    """One ring over everybody, starting in the first island."""
    topology = Cluster.load(name).topology()
    ring = topology.ring()
    assert sorted(ring) == list(range(topology.workers))
    assert topology.island_of[ring[0]] == 0


def test_an_order_can_be_forced() -> None:
    """By the islands' names, from any of them."""
    topology = Cluster.load("four_continents").topology()
    order = ("tokyo", "virginia", "sao_paulo", "frankfurt")
    assert topology.ring(order) == (4, 5, 0, 1, 6, 7, 2, 3)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["virginia", "tokio"], "ring_order: no island 'tokio'; did you mean 'tokyo'?"),
        (["tokyo", "tokyo"], "ring_order: 'tokyo' is named twice; name each island once"),
        (["tokyo"], "ring_order: 'virginia' is missing; name each island once"),
        ([], "ring_order: 'virginia' is missing; name each island once"),
    ],
)
def test_a_wrong_order_is_refused(order: list[str], message: str) -> None:
    """Each island once, and no other."""
    with pytest.raises(InputError) as caught:
        Cluster.load("four_continents").topology().ring(order)
    assert str(caught.value) == message


@pytest.mark.parametrize("count", [1, 2])
def test_few_islands_have_one_order(count: int) -> None:
    """Nothing to choose, and nothing to cross on one island."""
    routes = [[(1,) if a != b else () for a in range(count)] for b in range(count)]
    assert island_order(routes, [1.0, 1.0]) == tuple(range(count))
