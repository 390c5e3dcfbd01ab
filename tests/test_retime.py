"""Timing a recorded run again: on its own network it gives the run's own times, on another one what
training there would have given, and all of it without training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers import cluster, experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import islands.retime
from islands.cli import app
from islands.experiment import run
from islands.methods import DiLoCo
from islands.results.result import Result
from islands.retime import LOWEST, NEEDS_ROUNDS, Search, retime
from islands.units import format_bandwidth, parse_bandwidth


class Starred(DiLoCo):
    """Payloads go to the coordinator, and every round waits for all of them."""

    collective: ClassVar[Any] = "star"
    sync_every: int = 3


DILOCO = {"name": "diloco", "sync_every": 3}
UNEQUAL = cluster((2, 1, 1), (0.1, 0.23, 0.07), "1 Mbit/s", "40 ms")
#: The same number of workers, another shape, and nothing in common with the one above.
OTHER = cluster((1, 3), (0.05, 0.11), "200 kbit/s", "15 ms")


def changed(base: Mapping[str, Any], **link: Any) -> dict[str, Any]:
    """A cluster with other settings on all of its links."""
    return {**base, "links": [{**old, **link} for old in base["links"]]}


def trained(folder: Path, method: Any, where: Any, **parts: Any) -> Result:
    """A run of 12 steps in ``folder``."""
    return run(experiment(method=method, cluster=where, **parts), out=folder, in_process=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of runs, each trained once, by method and cluster."""
    base = tmp_path_factory.mktemp("runs")

    @cache
    def folder(method: str, where: str) -> Path:
        settings = {"diloco": DILOCO}.get(method, method)
        place = base / f"{method.replace(':', '-')}-{where}"
        trained(place, settings, {"unequal": UNEQUAL, "other": OTHER}.get(where, where))
        return place

    return lambda method, where="unequal": folder(method, where)


def write_cluster(path: Path, where: Mapping[str, Any]) -> str:
    """A cluster file."""
    path.write_text(json.dumps(where))  # JSON is YAML
    return str(path)


def assert_times(row: Mapping[str, Any], result: Result) -> None:
    """The row has the run's own times, to the last bit."""
    for key in ("emulated_s", "compute_utilization"):
        assert row[key] == result.summary[key], key


# ---------------------------------------------------------------------------------- its own network

METHODS = (
    "dense",
    "diloco",
    "demo",
    "topk",
    "sparta",
    "helpers:Fragments",
    "test_retime:Starred",
)


@pytest.mark.parametrize("where", ["unequal", "two_islands", "laptop"])
@pytest.mark.parametrize("method", METHODS)
def test_its_own_network_gives_the_runs_own_times(method: str, where: str, runs: Any) -> None:
    """Emulated time and utilisation of the summary, and the moment of every evaluation, exactly;
    overlapping fragments, gathered payloads and stars included."""
    folder = runs(method, where)
    result = Result.load(folder)
    (row,) = retime([folder]).rows
    assert_times(row, result)
    assert row["method"] == method
    evals = result.table("evals").to_pylist()
    assert len(evals) > 2
    for n, row in enumerate(evals):
        before = min((other["val_loss"] for other in evals[:n]), default=inf)
        if row["val_loss"] < before:
            (again,) = retime([folder], target_loss=row["val_loss"]).rows
            assert again["time_to_target_s"] == row["emulated_s"]


NETWORKS: dict[str, dict[str, Any]] = {
    "fair": {"queue": "fair"},
    "jitter": {"jitter": "3 ms"},
    "capped": {"max_rate_per_flow": "300 kbit/s"},
    "load": {"background": {"load": 0.4, "size": "5 kB"}},
    "fair and loaded": {"queue": "fair", "background": {"load": 0.4, "size": "5 kB"}},
    "bursts": {"background": {"load": 0.2, "size": "2 kB", "bursts": {"on": "1 s", "off": "2 s"}}},
    "windows": {"windows": [{"from": "1 s", "to": "2 s", "every": "4 s", "bandwidth": "cut"}]},
    "trace": {
        "bandwidth": {"points": [["0 s", "1 Mbit/s"], ["1 s", "100 kbit/s"]], "repeat": True},
        "delay": {"points": [["0 s", "10 ms"], ["2 s", "80 ms"]], "repeat": True},
    },
}


@pytest.mark.parametrize("collective", ["ring", "star", "hierarchical", "auto"])
@pytest.mark.parametrize("what", NETWORKS)
def test_all_that_a_link_can_do_is_timed_again(what: str, collective: str, tmp_path: Path) -> None:
    """Queues, random delays and other jobs' transfers come out the same under every collective:
    their draws belong to the run's seed."""
    where = changed(UNEQUAL, **NETWORKS[what])
    result = trained(tmp_path / "r", DILOCO, where, seed=5, collective=collective)
    (row,) = retime([tmp_path / "r"]).rows
    assert_times(row, result)


def test_a_forced_ring_is_timed_again(tmp_path: Path) -> None:
    """`ring_order` is the run's; on a cluster with other islands it has no meaning."""
    result = trained(tmp_path / "r", "dense", UNEQUAL, ring_order=["a", "c", "b"])
    chosen = trained(tmp_path / "s", "dense", UNEQUAL)
    assert result.summary["emulated_s"] != chosen.summary["emulated_s"]
    assert_times(retime([tmp_path / "r"]).rows[0], result)
    assert retime([tmp_path / "r"], ["two_islands"]).rows[0]["emulated_s"]


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_how_the_trace_is_handed_over_changes_nothing(
    batch: int, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces bound the memory, and no more."""
    monkeypatch.setattr(islands.retime, "BATCH", batch)
    for method in ("dense", "helpers:Fragments"):
        (row,) = retime([runs(method)]).rows
        assert_times(row, Result.load(runs(method)))


# ---------------------------------------------------------------------------------- other networks


@pytest.mark.parametrize("method", ["dense", "diloco", "topk", "helpers:Fragments"])
def test_another_cluster_is_as_training_there(method: str, runs: Any, tmp_path: Path) -> None:
    """Same number of workers, other islands: with its step times it is the run that was trained
    there; the other way round too."""
    here, there = runs(method), runs(method, "other")
    file = write_cluster(tmp_path / "other.yaml", OTHER)
    (row,) = retime([here], [file]).rows
    (back,) = retime([there], [file]).rows
    assert back["emulated_s"] == Result.load(there).summary["emulated_s"]
    even = {**OTHER, "islands": [{**i, "step_time": "100 ms"} for i in OTHER["islands"]]}
    trained(tmp_path / "even", runs_method(method), even)
    (swept,) = retime([here], [file], step_time="100ms").rows
    assert swept["emulated_s"] == Result.load(tmp_path / "even").summary["emulated_s"]
    # Compute times are the trace's: 230 ms of worker 2 instead of 110 ms.
    assert row["emulated_s"] > swept["emulated_s"]
    assert row["cluster"] == "test"


def runs_method(method: str) -> Any:
    return DILOCO if method == "diloco" else method


@pytest.mark.parametrize(
    ("sweep", "link"),
    [
        ({"bandwidth": "3Mbit/s"}, {"bandwidth": "3 Mbit/s"}),
        ({"delay": "7 ms"}, {"delay": "7 ms"}),
        ({"load": "0.6"}, {"background": {"load": 0.6, "size": "4 kB"}}),
        ({"load": "0"}, {"background": None}),
        (
            {"bandwidth": "500 kbit/s", "delay": "0s", "load": "0.2"},
            {
                "bandwidth": "500 kbit/s",
                "delay": "0 s",
                "background": {"load": 0.2, "size": "4 kB"},
            },
        ),
    ],
    ids=lambda value: ",".join(value),
)
@pytest.mark.parametrize("queue", ["fifo", "fair"])
def test_what_is_swept_is_as_if_the_cluster_file_said_so(
    sweep: dict[str, str], link: dict[str, Any], queue: str, tmp_path: Path
) -> None:
    """Bandwidth, delay and load of every link, one by one and together; a link that carries other
    jobs already keeps the size of their transfers."""
    own = changed(UNEQUAL, queue=queue, background={"load": 0.5, "size": "4 kB"})
    trained(tmp_path / "a", DILOCO, own, seed=2)
    result = trained(tmp_path / "b", DILOCO, changed(own, **link), seed=2)
    (row,) = retime([tmp_path / "a"], **sweep).rows  # type: ignore[arg-type]
    assert_times(row, result)


def test_load_on_a_link_of_its_own_is_of_like_sized_transfers(runs: Any, tmp_path: Path) -> None:
    """Where the cluster has no background, the others' transfers have the run's mean payload."""
    folder = runs("diloco")
    size = Result.load(folder).summary["payload_bytes_per_sync"]
    loaded = changed(UNEQUAL, background={"load": 0.7, "size": f"{size:g} B"})
    result = trained(tmp_path / "r", DILOCO, loaded)
    (row,) = retime([folder], load="0.7").rows
    assert_times(row, result)
    assert row["load"] == 0.7


def test_access_lines_and_backbone_are_swept_too(tmp_path: Path) -> None:
    """What a cluster has instead of links between pairs is changed in the same way."""
    line = {"bandwidth": "1 Mbit/s", "delay": "5 ms"}
    shared = {
        "name": "shared",
        "islands": [
            {"name": n, "workers": 2, "step_time": "100 ms", "uplink": line, "downlink": line}
            for n in "ab"
        ],
        "backbone": {"bandwidth": "4 Mbit/s", "delay": "10 ms"},
    }
    fast = {"bandwidth": "50 Mbit/s", "delay": "1 ms"}
    faster = {
        **shared,
        "islands": [{**i, "uplink": fast, "downlink": fast} for i in shared["islands"]],
        "backbone": fast,
    }
    trained(tmp_path / "a", "dense", shared)
    result = trained(tmp_path / "b", "dense", faster)
    (row,) = retime([tmp_path / "a"], bandwidth="50Mbit/s", delay="1ms").rows
    assert_times(row, result)


def test_a_swept_value_is_constant(tmp_path: Path) -> None:
    """Windows and traces of what is swept are gone; those of what is not stay."""
    windows = [{"from": "1 s", "to": "3 s", "bandwidth": "cut", "delay": "1 s"}]
    trained(tmp_path / "both", "dense", changed(UNEQUAL, windows=windows))
    for field, value, kept in (("bandwidth", "1Mbit/s", "delay"), ("delay", "40ms", "bandwidth")):
        still = changed(UNEQUAL, windows=[{k: windows[0][k] for k in ("from", "to", kept)}])
        result = trained(tmp_path / kept, "dense", still)
        (row,) = retime([tmp_path / "both"], **{field: value}).rows  # type: ignore[arg-type]
        assert_times(row, result)
    (row,) = retime([tmp_path / "both"], bandwidth="1Mbit/s", delay="40ms").rows
    assert_times(row, trained(tmp_path / "plain", "dense", UNEQUAL))


def test_a_network_on_which_the_run_never_ends(runs: Any, tmp_path: Path) -> None:
    """No time and no utilisation, but why; what does not need the cut link's bandwidth does."""
    dead = changed(UNEQUAL, windows=[{"from": "1 s", "bandwidth": "cut"}])
    file = write_cluster(tmp_path / "dead.yaml", dead)
    (row,) = retime([runs("dense")], [file]).rows
    assert row["emulated_s"] is None
    assert row["compute_utilization"] is None
    assert "cut for good" in row["stalled"]
    shown = CliRunner().invoke(app, ["retime", str(runs("dense")), "--cluster", file])
    assert "stalls" in shown.stdout
    assert "cut for good" in shown.stdout
    (alive,) = retime([runs("dense")], [file], bandwidth="1Mbit/s").rows
    assert_times(alive, Result.load(runs("dense")))


def test_all_combinations_in_the_order_given(runs: Any) -> None:
    """folder × cluster × bandwidth × load × step time × delay, the last one running fastest."""
    found = retime(
        [runs("dense"), runs("diloco")],
        ["two_islands", "laptop"],
        step_time="10ms,20ms",
    )
    keys = [(r["method"], r["cluster"], r["step_time"]) for r in found.rows]
    assert keys == [
        (m, c, s)
        for m in ("dense", "diloco")
        for c in ("two_islands", "laptop")
        for s in ("10ms", "20ms")
    ]
    found = retime([runs("dense")], bandwidth="1Mbit/s,1Gbit/s", load="0,0.3", delay="0s,1ms,2ms")
    assert [(r["bandwidth"], r["load"], r["delay"]) for r in found.rows] == [
        (b, load, d)
        for b in ("1Mbit/s", "1Gbit/s")
        for load in (0.0, 0.3)
        for d in ("0s", "1ms", "2ms")
    ]
    assert len(found.needs) == 5 * 2 * 3


def test_several_processes_give_the_same(runs: Any, monkeypatch: Any) -> None:
    """Rows and needs, in the same order."""
    folders, sweeps = [runs("dense"), runs("diloco")], {"bandwidth": "1Mbit/s,3Mbit/s,9Mbit/s"}
    alone = retime(folders, **sweeps)  # type: ignore[arg-type]
    monkeypatch.setattr(islands.retime, "MUCH", 0)
    assert retime(folders, **sweeps) == alone  # type: ignore[arg-type]


def test_the_same_folder_twice(runs: Any) -> None:
    """Is timed twice, and gives the same."""
    one, two = retime([runs("dense"), runs("dense")]).rows
    assert one == two


def test_time_to_a_target(runs: Any) -> None:
    """None without a target or when it was not reached."""
    (row,) = retime([runs("dense")]).rows
    assert row["target_loss"] is None
    assert row["time_to_target_s"] is None
    (row,) = retime([runs("dense")], target_loss=1e-3).rows
    assert row["time_to_target_s"] is None
    (row,) = retime([runs("dense")], target_loss=100.0).rows
    assert 0 <= row["time_to_target_s"] < row["emulated_s"]


# ------------------------------------------------------------------------------- bandwidths needed


@settings(max_examples=60, deadline=None)
@given(
    fixed=st.floats(0, 3),
    per_byte=st.floats(1e-3, 1e12),
    hidden=st.floats(0, 5),
    target=st.floats(0.02, 0.999),
)
def test_search_brackets_the_crossing(
    fixed: float, per_byte: float, hidden: float, target: float
) -> None:
    """For any share of waiting that falls with the bandwidth, with or without overlap: enough, but
    1 % less is not; None exactly where even no limit is not enough."""

    def share(bytes_per_s: float) -> float:
        return 1 / (1 + max(0.0, fixed + per_byte / bytes_per_s - hidden))

    probes = []

    def measure(bytes_per_s: float) -> float:
        probes.append(bytes_per_s)
        return share(bytes_per_s)

    found = Search(measure).needed(target)
    if found is None:
        assert share(1e14) < target
    elif found == LOWEST:
        assert share(LOWEST) >= target
    else:
        assert share(found) >= target > share(found / 1.011)
    assert len(probes) == len(set(probes)) <= 40


def test_search_ends_where_the_share_jumps() -> None:
    """A step leaves nothing to interpolate, and noise no order to rely on."""
    assert Search(lambda rate: 0.6 if rate >= 1e6 else 0.1).needed(0.5) == pytest.approx(
        1e6, rel=0.011
    )
    noisy = Search(lambda rate: min(1.0, rate / 1e9) + (0.01 if rate % 2 < 1 else 0.0))
    assert noisy.needed(0.5) == pytest.approx(5e8, rel=0.05)
    assert Search(lambda rate: 0.0 if rate < inf else 1.0).needed(0.5) is None


@pytest.mark.parametrize("method", ["dense", "diloco", "helpers:Fragments"])
def test_the_needed_bandwidth_is_enough_and_little_more(method: str, runs: Any) -> None:
    """Timed on the whole run, which is no longer than what the search looks at."""
    folder = runs(method)
    needs = retime([folder], step_time="5s").needs
    assert [need["utilization"] for need in needs] == [0.5, 0.8, 0.9, 0.95, 0.99]
    met = [need for need in needs if need["bytes_per_s"] is not None]
    assert len(met) > 2
    for need in met:
        assert parse_bandwidth(need["bandwidth"]) == need["bytes_per_s"]
        less = format_bandwidth(need["bytes_per_s"] / 1.011)
        both = retime([folder], step_time="5s", bandwidth=f"{need['bandwidth']},{less}").rows
        enough, short = (row["compute_utilization"] for row in both)
        assert enough >= need["utilization"]
        assert need["bytes_per_s"] == LOWEST or short < need["utilization"]


def test_a_delay_that_no_bandwidth_makes_up_for(runs: Any) -> None:
    """Null, beside what a step long enough makes of the same delay."""
    bound, fine = (
        retime([runs("dense")], delay="10s", step_time=step).needs[0] for step in ("1s", "1000s")
    )
    assert bound["bandwidth"] is None
    assert bound["bytes_per_s"] is None
    assert fine["bytes_per_s"] > 0


def test_a_load_needs_more_bandwidth(runs: Any) -> None:
    """And the search goes by the loaded network."""
    needs = retime([runs("diloco")], load="0,0.8", delay="0s", step_time="1s").needs
    idle, loaded = ([n["bytes_per_s"] for n in needs if n["load"] == load] for load in (0, 0.8))
    assert all(a < b for a, b in zip(idle, loaded, strict=True))


def test_needs_are_found_on_the_first_rounds(tmp_path: Path, monkeypatch: Any) -> None:
    """A long run is not timed again and again as a whole; the rows are of all of it."""
    result = trained(tmp_path / "r", "dense", UNEQUAL)
    monkeypatch.setattr(islands.retime, "NEEDS_ROUNDS", 4)
    found = retime([tmp_path / "r"])
    assert {need["rounds"] for need in found.needs} == {4}
    assert_times(found.rows[0], result)
    assert NEEDS_ROUNDS == 200
