"""The shipped clusters, and what makes a cluster file wrong."""

from __future__ import annotations

from math import asin, cos, inf, radians, sin, sqrt
from pathlib import Path

import pytest

from islands.config import Cluster, Island, Lan, Link, cluster_names
from islands.errors import InputError
from islands.settings import parse_yaml, read_yaml

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
    "antwerp": (51.22, 4.40),
    "athens": (37.98, 23.73),
    "barcelona": (41.39, 2.17),
    "belgrade": (44.79, 20.45),
    "berlin": (52.52, 13.40),
    "bordeaux": (44.84, -0.58),
    "bratislava": (48.15, 17.11),
    "brno": (49.20, 16.61),
    "bucharest": (44.43, 26.10),
    "budapest": (47.50, 19.04),
    "copenhagen": (55.68, 12.57),
    "edinburgh": (55.95, -3.19),
    "gdansk": (54.35, 18.65),
    "geneva": (46.20, 6.14),
    "hamburg": (53.55, 9.99),
    "helsinki": (60.17, 24.94),
    "krakow": (50.06, 19.94),
    "ljubljana": (46.06, 14.51),
    "lyon": (45.76, 4.84),
    "manchester": (53.48, -2.24),
    "munich": (48.14, 11.58),
    "naples": (40.85, 14.27),
    "oslo": (59.91, 10.75),
    "riga": (56.95, 24.11),
    "sofia": (42.70, 23.32),
    "turin": (45.07, 7.69),
    "vienna": (48.21, 16.37),
    "zagreb": (45.81, 15.98),
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
    """The nine clusters, each a file that carries its own name."""
    assert cluster_names() == [
        "eight_small_sites",
        "four_continents",
        "hub_and_spoke",
        "internet_volunteers",
        "laptop",
        "shared_access",
        "traced_cross_country",
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
        "hub_and_spoke": (6, 9, 5),
        "internet_volunteers": (32, 32, 0),
        "laptop": (1, 4, 0),
        "shared_access": (4, 16, 0),
        "traced_cross_country": (2, 8, 1),
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


def test_hub_and_spoke_sends_everything_through_the_hub() -> None:
    """Branches reach the hub over one link and each other over two."""
    topology = Cluster.load("hub_and_spoke").topology()
    lengths = [[len(route) for route in row] for row in topology.routes]
    assert lengths[0] == [0, 1, 1, 1, 1, 1]
    assert lengths[1] == [1, 0, 2, 2, 2, 2]
    assert all(link.fair for link in topology.links)


def test_shared_access_shares_lines_and_a_backbone_with_others() -> None:
    """Up, backbone, down; only the backbone has other users."""
    topology = Cluster.load("shared_access").topology()
    assert topology.route(0, 2) == ("uplink:amsterdam", "backbone", "downlink:milan")
    assert [link.name for link in topology.links if link.background] == ["backbone"]


def test_volunteers_are_thin_and_asymmetric() -> None:
    """Every site sends slower than it receives, over lines of its own."""
    islands = Cluster.load("internet_volunteers").islands
    for island in islands:
        assert island.uplink is not None
        assert island.downlink is not None
        assert island.uplink.bandwidth < island.downlink.bandwidth <= 500e6 / 8
        assert island.uplink.background is not None
    assert len({island.downlink for island in islands}) > 20


@pytest.mark.parametrize("name", ["shared_access", "internet_volunteers"])
def test_access_delays_are_light_in_fibre_to_the_core(name: str) -> None:
    """To Frankfurt with the stated detour, and 5 ms for a volunteer's last mile, to 0.1 ms."""
    last_mile_s = 5e-3 if name == "internet_volunteers" else 0.0
    for island in Cluster.load(name).islands:
        expected = fibre_s(island.name, "frankfurt") * 1.4 + last_mile_s
        for line in (island.uplink, island.downlink):
            assert line is not None
            assert line.delay == pytest.approx(expected, abs=0.051e-3), island.name


DELAYS_TO = {"eight_small_sites": 0.1e-3, "hub_and_spoke": 0.1e-3}  # every other file: 1 ms


@pytest.mark.parametrize(
    "name", ["transatlantic", "four_continents", "traced_cross_country", *DELAYS_TO]
)
def test_delays_are_light_in_fibre_with_a_detour(name: str) -> None:
    """Each one-way delay is the great circle's time times its stated detour, to its last digit."""
    for link in Cluster.load(name).links:
        expected = fibre_s(*link.between) * DETOURS.get(link.name, 1.4)
        digit = DELAYS_TO.get(name, 1e-3)
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
        ({"backbone": {"delay": "1 s"}}, "cluster.backbone.bandwidth: is missing"),
        ({"backbone": {"bandwidth": 1}}, "cluster.backbone.bandwidth: 1 needs a unit"),
        ({"backbon": 1}, "cluster.backbon: unknown key 'backbon'; did you mean 'backbone'?"),
        (
            {"backbone": {"bandwidth": "1 B/s"}, "default_link": {"bandwidth": "1 B/s"}},
            "cluster.default_link: is given beside a backbone",
        ),
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
        ("name", "lan", "cluster.links.0.name: 'lan' is the name of what is inside an island"),
        ("queue", "fare", "cluster.links.0.queue: 'fare' is not one of fifo, fair"),
        ("jitter", "6 ms", "cluster.links.0.jitter: 6 ms is larger than the delay of 5 ms"),
        ("reverse", 3, "cluster.links.0.reverse: 3 is not a mapping"),
        ("reverse", {"delai": "1 s"}, "cluster.links.0.reverse.delai: unknown key 'delai'; did"),
        ("reverse", {"delay": 1}, "cluster.links.0.reverse.delay: 1 needs a unit"),
        (
            "reverse",
            {"jitter": "6 ms"},
            "cluster.links.0.reverse.jitter: 6 ms is larger than the delay of 5 ms",
        ),
        (
            "reverse",
            {"bandwidth": "unlimited", "background": {"load": 0.5, "size": "1 B"}},
            "cluster.links.0.reverse.background: there is no load of an unlimited",
        ),
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
        ("uplink", {"delay": "1 s"}, "cluster.islands.0.uplink.bandwidth: is missing"),
        ("uplink", {"bandwidth": "1"}, "cluster.islands.0.uplink.bandwidth: '1' needs a unit"),
        ("downlink", "1 Mbit/s", "cluster.islands.0.downlink: '1 Mbit/s' is not a mapping"),
        (
            "uplink",
            {"bandwidth": "1 B/s", "queue": "fair"},
            "cluster.links: the route from 'a' to 'b' has both disciplines: 'ab:a>b' is fifo, "
            "'uplink:a' is fair; give all of its links the same queue",
        ),
    ],
)
def test_wrong_islands_are_refused(field: str, value: object, message: str) -> None:
    """An island has workers, a positive speed, a LAN of known keys and a name of its own."""
    island = {"name": "a", "workers": 1, field: value}
    text = problem(two_sites(islands=[island, {"name": "b", "workers": 1}]))
    assert text.startswith(message)


def test_directions_may_differ() -> None:
    """``reverse`` says what is different from the second island to the first; null is none."""
    link = two_sites()["links"][0]  # type: ignore[index]
    load = {"load": 0.5, "size": "1 MB"}
    reverse = {"bandwidth": "1 Mbit/s", "background": None, "egress_price": "1 EUR/GB"}
    cluster = Cluster.parse(two_sites(links=[{**link, "background": load, "reverse": reverse}]))
    there, back = cluster.topology().links
    assert (there.name, there.bytes_per_s, there.delay_s) == ("ab:a>b", 125e6, 0.005)
    assert (back.name, back.bytes_per_s, back.delay_s) == ("ab:b>a", 125e3, 0.005)
    assert (there.background is not None, back.background) == (True, None)
    assert (there.price, back.price) == (None, (1e-9, "EUR"))
    again = Cluster.parse(parse_yaml(cluster.dump_yaml(), "cluster"))
    assert again.topology() == cluster.topology()
    assert "reverse:\n    bandwidth: 1 Mbit/s\n    background: null\n" in cluster.dump_yaml()
    same = Cluster.parse(two_sites(links=[{**link, "background": load, "reverse": {}}]))
    assert same.topology().links[1].background == there.background


def test_a_default_link_joins_all_pairs_without_one_of_their_own() -> None:
    """One link each way per pair, all with the same numbers, and access lines still count."""
    islands = [{"name": name, "workers": 1} for name in "abc"]
    islands[2]["downlink"] = {"bandwidth": "7 B/s"}
    default = {"bandwidth": "1 kB/s", "delay": "3 s"}
    topology = Cluster.parse(two_sites(islands=islands, default_link=default)).topology()
    assert topology.route(0, 1) == ("ab:a>b",)
    assert topology.route(0, 2) == ("default:a>c", "downlink:c")
    assert topology.route(2, 1) == ("default:c>b",)
    defaults = [link for link in topology.links if link.name.startswith("default:")]
    assert {(link.bytes_per_s, link.delay_s) for link in defaults} == {(1000.0, 3.0)}
    assert len(defaults) == 4


def test_traces_that_end_are_listed_by_field() -> None:
    """Wherever they are, each direction's own, and when they end."""
    once = {"points": [["0 s", "1 B/s"], ["5 s", "2 B/s"]]}
    late = {"points": [["0 s", "1 s"], ["1 h", "2 s"]]}
    link = {"name": "ab", "between": ["a", "b"], "bandwidth": once, "delay": "0 s"}
    uplink = {"bandwidth": {**once, "repeat": True}, "delay": late}
    islands = [{"name": "a", "workers": 1, "uplink": uplink}, {"name": "b", "workers": 1}]
    found = Cluster.parse(
        two_sites(islands=islands, links=[{**link, "reverse": {"delay": late}}])
    ).trace_ends()
    assert found == [
        ("cluster.links.0.bandwidth", 10.0),
        ("cluster.links.0.reverse.bandwidth", 10.0),
        ("cluster.links.0.reverse.delay", 7200.0),
        ("cluster.islands.0.uplink.delay", 7200.0),
    ]
    assert Cluster.load("traced_cross_country").trace_ends() == []


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
