"""The shipped clusters, and what makes a cluster file wrong."""

from __future__ import annotations

from math import asin, cos, inf, radians, sin, sqrt
from pathlib import Path

import pytest

from islands.config import Cluster, Island, Lan, Link, cluster_names
from islands.errors import InputError
from islands.settings import read_yaml

FIBRE_KM_PER_S = 299_792.458 / 1.468
PLACES = {  # degrees north and east
    "dublin": (53.35, -6.26),
    "oregon": (45.84, -119.70),
    "virginia": (39.04, -77.49),
    "frankfurt": (50.11, 8.68),
    "tokyo": (35.68, 139.69),
    "sao_paulo": (-23.55, -46.63),
    "lisbon": (38.72, -9.14),
    "madrid": (40.42, -3.70),
    "paris": (48.86, 2.35),
    "amsterdam": (52.37, 4.90),
    "stockholm": (59.33, 18.07),
    "warsaw": (52.23, 21.01),
    "milan": (45.46, 9.19),
}
DETOURS = {"eurasia": 2.0, "south_atlantic": 2.0}  # every other cable: 1.4


def fibre_s(a: str, b: str) -> float:
    """One-way time of light in fibre along the great circle (haversine), in seconds."""
    (lat_a, lon_a), (lat_b, lon_b) = (tuple(map(radians, PLACES[p])) for p in (a, b))
    half = sin((lat_b - lat_a) / 2) ** 2 + cos(lat_a) * cos(lat_b) * sin((lon_b - lon_a) / 2) ** 2
    return 2 * 6371 * asin(sqrt(half)) / FIBRE_KM_PER_S


def two_sites(**changes: object) -> dict[str, object]:
    """A small valid cluster as read from a file, with some keys replaced."""
    link = {"name": "ab", "between": ["a", "b"], "bandwidth": "1 Gbit/s", "delay": "5 ms"}
    islands = [{"name": "a", "workers": 1}, {"name": "b", "workers": 1}]
    return {"name": "pair", "islands": islands, "links": [link], **changes}


def problem(values: object) -> str:
    """The message with which these settings are refused."""
    with pytest.raises(InputError) as caught:
        Cluster.parse(values, "cluster")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_clusters_are_known_by_name() -> None:
    """The five clusters, each a file that carries its own name."""
    assert cluster_names() == [
        "eight_small_sites",
        "four_continents",
        "laptop",
        "transatlantic",
        "two_islands",
    ]
    for name in cluster_names():
        assert Cluster.load(name).name == Cluster.load(Path(name)).name == name


def test_two_islands_is_the_documented_default() -> None:
    """2 + 2 workers of 100 ms per step, a link of 1 Gbit/s and 65 ms, LANs of 100 Gbit/s."""
    lan = Lan(bandwidth="100 Gbit/s", delay="20 us")
    assert Cluster.load("two_islands") == Cluster(
        name="two_islands",
        islands=[
            Island(name="dublin", workers=2, step_time="100 ms", lan=lan),
            Island(name="oregon", workers=2, step_time="100 ms", lan=lan),
        ],
        links=[
            Link(
                name="atlantic",
                between=["dublin", "oregon"],
                bandwidth="1 Gbit/s",
                delay="65 ms",
            )
        ],
    )


def test_shapes_of_the_other_clusters() -> None:
    """Islands, workers and links as their names promise."""
    shapes = {
        name: (len(c.islands), c.workers, len(c.links))
        for name in cluster_names()
        for c in [Cluster.load(name)]
    }
    assert shapes == {
        "eight_small_sites": (8, 8, 8),
        "four_continents": (4, 8, 6),
        "laptop": (1, 4, 0),
        "transatlantic": (2, 8, 1),
        "two_islands": (2, 4, 1),
    }


def test_eight_small_sites_has_routes_over_several_links() -> None:
    """Lisbon reaches Madrid over one link and Stockholm over five: the fewest that lead there."""
    cluster = Cluster.load("eight_small_sites")
    names = [island.name for island in cluster.islands]
    route = cluster.topology().route
    hops = [len(route(names.index("lisbon"), names.index(to))) for to in ("madrid", "stockholm")]
    assert hops == [1, 5]


def test_four_continents_joins_every_pair_with_different_numbers() -> None:
    """Six pairs, six links; no two links share bandwidth or delay."""
    links = Cluster.load("four_continents").links
    assert len({frozenset(link.between) for link in links}) == 6
    assert len({link.bandwidth for link in links}) == len({link.delay for link in links}) == 6


@pytest.mark.parametrize("name", ["transatlantic", "four_continents", "eight_small_sites"])
def test_delays_are_light_in_fibre_with_a_detour(name: str) -> None:
    """Each one-way delay is the great circle's time times its stated detour, to its last digit."""
    for link in Cluster.load(name).links:
        expected = fibre_s(*link.between) * DETOURS.get(link.name, 1.4)
        digit = 0.1e-3 if name == "eight_small_sites" else 1e-3
        assert link.delay == pytest.approx(expected, abs=0.51 * digit), link.name


def test_the_default_delay_is_a_cable_with_a_longer_detour() -> None:
    """65 ms between Ireland and Oregon is 1.8 times the great circle's time."""
    assert 0.065 / fibre_s("dublin", "oregon") == pytest.approx(1.8, abs=0.05)


def test_a_cluster_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    """Any file works; what is written reads back as the same cluster."""
    for name in cluster_names():
        cluster = Cluster.load(name)
        path = tmp_path / f"{name}-copy.yaml"
        path.write_text(cluster.dump_yaml(), encoding="utf-8")
        assert Cluster.load(path) == Cluster.load(str(path)) == cluster


def test_an_unknown_cluster_names_the_nearest_shipped_one() -> None:
    """A misspelt name is answered with the right one."""
    with pytest.raises(InputError, match="'two_ilands'; did you mean 'two_islands'"):
        Cluster.load("two_ilands")


def test_a_shipped_name_wins_over_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a name means does not depend on the folder; any other bare name may be a file."""
    monkeypatch.chdir(tmp_path)
    Path("laptop").write_text("name: other\nislands: [{name: a, workers: 1}]\n", encoding="utf-8")
    Path("mine").write_text("name: mine\nislands: [{name: a, workers: 1}]\n", encoding="utf-8")
    assert Cluster.load("laptop").name == "laptop"
    assert Cluster.load("mine").name == "mine"


def test_speeds_default_and_exclude_each_other() -> None:
    """An island takes 100 ms per step, or a step time, or a compute rate, never two of them."""
    assert Island(name="a", workers=1).step_time == 0.1
    fast = Island(name="a", workers=1, flops_per_second="10 TFLOP/s")
    assert (fast.step_time, fast.flops_per_second) == (None, 1e13)
    assert Island(name="a", workers=1, flops_per_second=2e12).flops_per_second == 2e12
    with pytest.raises(InputError, match=r"flops_per_second: 1 TFLOP/s .* step_time 5 ms"):
        Island(name="a", workers=1, step_time="5 ms", flops_per_second="1 TFLOP/s")


def test_no_network_can_be_written() -> None:
    """Unlimited bandwidth and zero delay are legal, for LANs and links."""
    link = Link(name="ab", between=["a", "b"], bandwidth="unlimited", delay="0 s")
    assert (link.bandwidth, link.delay) == (inf, 0.0)
    assert Link.parse(link.model_dump()) == link


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"islands": []}, "cluster.islands: [] is too short"),
        ({"name": "a b"}, "cluster.name: 'a b' is not a name"),
        ({"coordinator": "c"}, "cluster.coordinator: no island 'c'"),
        ({"island": 1}, "cluster.island: unknown key 'island'; did you mean 'islands'?"),
        ({"links": [3]}, "cluster.links.0: 3 is not a mapping"),
        ({"links": None}, "cluster.links: null is not a list"),
        ({"links": []}, "cluster.links: no route"),
    ],
)
def test_wrong_clusters_are_refused(changes: dict[str, object], message: str) -> None:
    """The message starts with the field's path and says what is wrong."""
    assert problem(two_sites(**changes)).startswith(message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("between", ["a", "c"], "cluster.links.0.between: no island 'c'"),
        ("between", ["a", "a"], "cluster.links.0.between: link 'ab' joins 'a' to itself"),
        ("between", ["a"], "cluster.links.0.between: ['a'] must name two islands"),
        ("between", "ab", "cluster.links.0.between: 'ab' must name two islands"),
        ("bandwidth", "0 bit/s", "cluster.links.0.bandwidth: '0 bit/s' must be more than zero"),
        ("bandwidth", 5, "cluster.links.0.bandwidth: 5 needs a unit"),
        ("delay", "-1 ms", "cluster.links.0.delay: '-1 ms' must not be negative"),
        ("delay", 0, "cluster.links.0.delay: 0 needs a unit"),
        ("queue", "fair", "cluster.links.0.queue: 'fair' is not one of fifo"),
    ],
)
def test_wrong_links_are_refused(field: str, value: object, message: str) -> None:
    """A link names two different islands of the cluster and has legal numbers with units."""
    links = two_sites()["links"]
    assert isinstance(links, list)
    assert problem(two_sites(links=[{**links[0], field: value}])).startswith(message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("workers", 0, "cluster.islands.0.workers: 0 is too small; it must be at least 1"),
        ("workers", 1.5, "cluster.islands.0.workers: 1.5 is not a whole number"),
        ("workers", True, "cluster.islands.0.workers: True is not a whole number"),
        ("step_time", "0 s", "cluster.islands.0.step_time: '0 s' is too small"),
        ("flops_per_second", 0, "cluster.islands.0.flops_per_second: '0 FLOP/s' must be more"),
        ("flops_per_second", -1, "cluster.islands.0.flops_per_second: '-1 FLOP/s' must not be"),
        ("lan", {"delai": "1 ms"}, "cluster.islands.0.lan.delai: unknown key 'delai'; did you"),
        ("name", "b", "cluster.islands.1.name: 'b' is already taken"),
    ],
)
def test_wrong_islands_are_refused(field: str, value: object, message: str) -> None:
    """An island has workers, a positive speed, a LAN of known keys and a name of its own."""
    island = {"name": "a", "workers": 1, field: value}
    text = problem(two_sites(islands=[island, {"name": "b", "workers": 1}]))
    assert text.startswith(message)


def test_islands_without_a_route_are_refused() -> None:
    """Both islands that cannot reach each other are named."""
    message = problem(two_sites(links=[]))
    assert message.startswith("cluster")
    assert "'a'" in message
    assert "'b'" in message


def test_files_say_where_their_numbers_come_from() -> None:
    """Every shipped file begins with a comment."""
    folder = Path(__file__).parent.parent / "cluster_configs"
    for path in folder.glob("*.yaml"):
        assert path.read_text(encoding="utf-8").startswith("# "), path
        assert read_yaml(path)["name"] == path.stem
