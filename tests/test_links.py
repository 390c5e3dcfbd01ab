"""``islands links``: the emulated network beside the textbook, and what it refuses."""

from __future__ import annotations

import io
import json
from math import inf

import pytest
from rich.console import Console
from typer.testing import CliRunner

from islands.cli import app
from islands.cluster import Cluster, cluster_names
from islands.errors import InputError
from islands.links import LinkCheck, WaitRow, check_links, collective_rows, print_links, read_loads
from islands.network import Site, Topology, Wire
from islands.network.alpha_beta import (
    Message,
    hierarchical_seconds,
    ring_seconds,
    spread_seconds,
    star_seconds,
)
from islands.network.choose import steady
from islands.network.topology import COORDINATOR

runner = CliRunner()


def circle(islands: int, rate: float, delay_s: float, fair: bool = False) -> Topology:
    """One worker per island, LANs that cost nothing, equal wires between neighbours."""
    sites = [Site(f"i{k}", 1, inf, 0.0) for k in range(islands)]
    pairs = [(k, (k + 1) % islands) for k in range(islands if islands > 2 else 1)]
    wires = [Wire(f"w{a}", (f"i{a}", f"i{b}"), rate, delay_s, fair) for a, b in pairs]
    return Topology.build(sites, wires)


# --- the formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("members", [2, 3, 4, 7])
def test_uniform_clusters_take_the_textbook_time(members: int, fair: bool) -> None:
    """Ring all-reduce 2(p − 1)(alpha + n/(p·beta)), all-gather (p − 1)(alpha + n/beta), in the
    formula and in the simulation."""
    size, rate, delay_s = 1000 * members, 500.0, 0.25
    rows = {row.name: row for row in collective_rows(circle(members, rate, delay_s, fair), size)}
    reduce = 2 * (members - 1) * (delay_s + size / members / rate)
    gather = (members - 1) * (delay_s + size / rate)
    for name, textbook in (
        ("ring all-reduce", reduce),
        ("ring all-gather", gather),
        ("hierarchical", reduce),
    ):
        assert rows[name].formula_s == pytest.approx(textbook, rel=1e-12)
        assert rows[name].simulated_s == pytest.approx(textbook, rel=1e-9)
    assert {(row.workers, row.bytes) for row in rows.values()} == {(members, size)}


def test_a_pipe_has_the_narrowest_bandwidth_and_all_the_delay() -> None:
    """40 bytes over 100, 8 and 10 B/s with 0.5, 1 and 0.25 s: 5 s + 2 s."""
    sites = [Site("a", 1, 100.0, 0.5), Site("b", 1, inf, 0.0), Site("c", 1, inf, 0.25)]
    wires = [Wire("x", ("a", "b"), 8.0, 1.0), Wire("y", ("b", "c"), 10.0, 0.25)]
    topology = Topology.build(sites, wires)
    assert spread_seconds(topology, [Message(0, 2, 40)]) == 7.0
    assert spread_seconds(topology, []) == 0.0


def test_a_shared_line_takes_all_bytes_over_its_bandwidth() -> None:
    """Three workers of one island send 20 bytes over one wire of 10 B/s and a second."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 3, inf, 0.0)]
    for fair in (False, True):
        topology = Topology.build(sites, [Wire("w", ("a", "b"), 10.0, 1.0, fair)])
        up = [Message(worker, COORDINATOR, 20) for worker in range(4)]
        assert spread_seconds(topology, up) == 6.0 + 1.0
        assert star_seconds(topology, [20] * 4, [5] * 4) == 7.0 + 1.5 + 1.0
        rows = {row.name: row for row in collective_rows(topology, 20)}
        assert rows["star"].simulated_s == pytest.approx(14.0)
        assert rows["star"].formula_s == 14.0


def test_a_late_worker_holds_the_ring_up() -> None:
    """Nobody has the third worker's piece before it is ready; it had all the others' by then."""
    found = ring_seconds(circle(3, 10.0, 1.0), [0, 1, 2], [10, 10, 10], 1, [0.0, 0.0, 50.0])
    assert found.tolist() == [53.0, 54.0, 50.0]


def test_leaders_work_for_their_islands() -> None:
    """Two of two, 10 B/s inside, 5 B/s and 1 s between: 2 s, twice 10 bytes across, 2 s."""
    sites = [Site("a", 2, 10.0, 0.0), Site("b", 2, 10.0, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("a", "b"), 5.0, 1.0)])
    assert hierarchical_seconds(topology, topology.ring(), 20) == 10.0
    rows = {row.name: row for row in collective_rows(topology, 20)}
    assert rows["hierarchical"].simulated_s == 10.0


def test_one_worker_needs_no_time() -> None:
    """Neither in the formulas nor in the simulation."""
    topology = Topology.build([Site("a", 1, 10.0, 0.5)], [])
    for row in collective_rows(topology, 100):
        assert (row.simulated_s, row.formula_s) == (0.0, 0.0)


@pytest.mark.parametrize("name", cluster_names())
def test_simulation_and_formula_agree_on_every_shipped_cluster(name: str) -> None:
    """To 3 %: the formula knows nothing of pieces that queue behind each other on shared links."""
    for row in collective_rows(steady(Cluster.load(name).topology()), 10**6):
        assert row.simulated_s == pytest.approx(row.formula_s, rel=0.03), row.name


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> LinkCheck:
    return check_links("shared_access", [0.0, 0.3, 0.5], "1 MB")


def test_waits_are_measured_within_their_errors(found: LinkCheck) -> None:
    """Pollaczek–Khinchine: 0.2143 and 0.5 for one size, twice that for exponential sizes."""
    theory = {(row.sizes, row.load): row.theory for row in found.waits}
    assert theory == pytest.approx(
        {
            ("fixed", 0.0): 0.0,
            ("fixed", 0.3): 0.3 / 1.4,
            ("fixed", 0.5): 0.5,
            ("exponential", 0.0): 0.0,
            ("exponential", 0.3): 0.3 / 0.7,
            ("exponential", 0.5): 1.0,
        }
    )
    for row in found.waits:
        assert abs(row.measured - row.theory) <= 3 * row.stderr
        assert row.stderr <= 0.005 * row.measured
        assert (row.stderr > 0) == (row.load > 0)


@pytest.fixture
def rough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few arrivals, for tests that do not care how exact a wait is."""
    monkeypatch.setattr("islands.links.RELATIVE_ERROR", 0.05)


@pytest.mark.usefixtures("rough")
def test_other_seeds_measure_other_arrivals() -> None:
    """A seed decides the waits, and only them."""
    one, same, other = (check_links("laptop", [0.5], "1 kB", seed) for seed in (0, 0, 1))
    assert one == same
    assert one.collectives == other.collectives
    assert {row.measured for row in one.waits}.isdisjoint(row.measured for row in other.waits)


@pytest.mark.usefixtures("rough")
def test_json_has_what_was_measured() -> None:
    """The rows of the library, under the names that users may rely on."""
    result = runner.invoke(
        app,
        ["links", "--cluster", "shared_access", "--load", "0,0.3", "--size", "1MB", "--json"],
    )
    assert result.exit_code == 0, result.output
    read = json.loads(result.stdout)
    assert read == check_links("shared_access", [0, 0.3], "1 MB").as_dict()
    assert set(read) == {"cluster", "waits", "collectives"}
    assert set(read["waits"][0]) == {"load", "sizes", "measured", "stderr", "theory"}
    assert [row["name"] for row in read["collectives"]] == [
        "ring all-reduce",
        "ring all-gather",
        "star",
        "hierarchical",
    ]
    for row in read["collectives"]:
        assert set(row) == {"name", "workers", "bytes", "simulated_s", "formula_s"}
        assert (row["workers"], row["bytes"]) == (16, 1_000_000)


def test_the_tables_fit_into_80_columns(found: LinkCheck) -> None:
    """Both, with relative differences; a large one shows its size."""
    long = (*found.waits, WaitRow(0.999999, "exponential", 1234567.8, 12345.6, 999999.0))
    out = io.StringIO()
    print_links(LinkCheck("c", long, found.collectives), Console(file=out, width=200))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "+23 %" in text
    for word in ("M/D/1", "M/M/1", "0.5000", "ring all-gather", "hierarchical", "1 MB"):
        assert word in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--load", "1"], ["load", "1", "below 1"]),
        (["--load", "0.3,-0.1"], ["load", "-0.1"]),
        (["--load", "much"], ["load", "'much'"]),
        (["--load", ".nan"], ["load", "nan"]),
        (["--load", ""], ["load", "0.3,0.9"]),
        (["--size", "10"], ["size", "'10'", "unit"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--cluster", "two_iland"], ["cluster", "two_islands"]),
    ],
)
def test_wrong_input_is_one_line(options: list[str], words: list[str]) -> None:
    """Exit code 2 and the field, the value, and what to write instead; nothing is measured."""
    result = runner.invoke(app, ["links", *options])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line
    assert not result.stdout


def test_a_boolean_is_no_load() -> None:
    """YAML reads `yes` as one; it must not pass as a number."""
    with pytest.raises(InputError, match="load: True"):
        check_links(loads=[True])


def test_loads_may_go_on_by_an_ellipsis() -> None:
    """``0.1,0.3,…,0.9`` counts up; what is no list of numbers is refused in one line."""
    assert read_loads("0.1,0.3,…,0.9") == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert read_loads(None) is None
    for text in ("0.3,,0.4", "abc", "0.1,…,0.9", "0.1,0.3,…"):
        with pytest.raises(InputError, match="load: "):
            read_loads(text)
    with pytest.raises(InputError, match="choose from"):
        check_links(loads=[0.999])
