"""`islands bench --network`: what is measured is the same work, and no time is asserted."""

from __future__ import annotations

import json
import sys
from io import StringIO
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from islands import bench_network as module
from islands.bench_network import (
    DELAY_S,
    ITEMSIZE,
    PAYLOAD,
    RATE,
    NetworkBench,
    all_reduce,
    bench_network,
    over_fabric,
    over_simpy,
)
from islands.cli import app
from islands.clock import FixedSteps
from islands.errors import InputError, RunError
from islands.network import Timeline

SMALL: dict[str, Any] = {"transfers": 50, "workers": 8, "islands": 4, "flows": 30, "links": 5}


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.02), st.integers(1, 2_000_000)), min_size=1, max_size=30))
def test_both_links_deliver_the_same_transfers_at_the_same_moments(
    transfers: list[tuple[float, int]],
) -> None:
    """The event loop and the simpy program, for any transfers; also how long they queued."""
    ready = np.cumsum([gap for gap, _ in transfers]).tolist()
    sizes = [size for _, size in transfers]
    delivered_s, queued_s = over_fabric(ready, sizes)
    expected_s, waited_s = over_simpy(simpy, ready, sizes)
    assert delivered_s == pytest.approx(expected_s, rel=1e-9)
    assert queued_s == pytest.approx(waited_s, rel=1e-9, abs=1e-9)
    assert delivered_s[0] == pytest.approx(ready[0] + sizes[0] / RATE + DELAY_S)


def test_the_ring_takes_the_path_with_arrays_and_the_time_of_the_event_loop() -> None:
    """No event for the one, the same emulated seconds for both, no less than its bytes need."""
    topology = module._ring_topology(16, 4)
    compute = FixedSteps((0.0,) * 16)
    arrays, events = (
        Timeline(topology, compute, "all_reduce", vectorise=wanted) for wanted in (True, False)
    )
    assert all_reduce(arrays) == all_reduce(events) > 2 * 15 / 16 * PAYLOAD / RATE
    assert arrays.hops == 0 < events.hops
    assert arrays.wire_bytes == 2 * 15 * PAYLOAD
    assert PAYLOAD % ITEMSIZE == 0


def test_all_flows_are_carried_to_the_end() -> None:
    """The links between them need at least the time of the fullest one."""
    shared = module._Shared(30, 5)
    load = [0.0] * 5
    for route, size in zip(shared.routes, shared.sizes, strict=True):
        for link in route:
            load[link] += size
    least_s = max(size / rate for size, rate in zip(load, shared.capacity, strict=True))
    assert least_s * (1 - 1e-9) <= shared.run() < 10 * least_s


def test_everything_is_measured_as_often_as_asked() -> None:
    """And said, and in the report and in the JSON with its medians."""
    said: list[str] = []
    result = bench_network(**SMALL, repeats=3, say=said.append)
    assert {name: len(values) for name, values in result.repeats.items()} == dict.fromkeys(
        ("islands_s", "simpy_s", "ring_s", "fair_s"), 3
    )
    assert len(said) == 3 * 5
    found = result.as_dict()
    for name, values in result.repeats.items():
        assert found[name] == sorted(values)[1]
    for name, value in SMALL.items():
        assert found[name] == value
    assert 1 <= found["routes"] <= 30
    assert found["simpy"] == simpy.__version__
    json.dumps(found)


def test_the_report_has_the_ratio_and_fits_a_terminal() -> None:
    """Rates are transfers over seconds; the ratio is the event loop's over simpy's."""
    result = NetworkBench(
        transfers=50_000,
        islands_s=0.05,
        simpy_s=0.8,
        workers=1024,
        islands=8,
        ring_s=0.02,
        flows=1000,
        links=20,
        routes=705,
        fair_s=0.25,
        simpy="4.1.2",
        repeats={"islands_s": [0.05]},
    )
    assert result.to_simpy == pytest.approx(16.0)
    assert result.as_dict()["islands_transfers_per_s"] == pytest.approx(1e6)
    text = StringIO()
    result.print(Console(file=text, width=80))
    assert max(map(len, text.getvalue().splitlines())) <= 80
    for part in ("1,000,000 transfers/s", "16.0 x simpy", "20.0 ms", "250.0 ms", "705 routes"):
        assert part in text.getvalue()


def test_links_that_disagree_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A yardstick that does other work is a failure, not a ratio."""
    monkeypatch.setattr(module, "over_simpy", lambda _, ready, sizes: ([0.0] * len(ready), 0.0))
    with pytest.raises(RunError, match="deliver the same transfers at other moments"):
        bench_network(**SMALL, repeats=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats: 0 is too small"),
        ({"workers": 9}, "workers: 9 do not fit evenly on 4 islands"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, int], message: str) -> None:
    """With the field and its value."""
    with pytest.raises(InputError, match=message):
        bench_network(**{**SMALL, **options})


def test_without_simpy_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is measured."""
    monkeypatch.setitem(sys.modules, "simpy", None)
    result = CliRunner().invoke(app, ["bench", "--network"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "pip install simpy" in result.stderr


def test_the_command_prints_json_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report likewise, without --json; ``--repeats`` counts."""
    asked: list[int] = []

    def small(*, repeats: int, say: Any) -> NetworkBench:
        asked.append(repeats)
        return bench_network(**SMALL, repeats=repeats, say=say)

    monkeypatch.setattr(module, "bench_network", small)
    result = CliRunner().invoke(app, ["bench", "--network", "--json", "--repeats", "2"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["workers"] == 8
    assert "repeat 2 of 2" in result.stderr
    result = CliRunner().invoke(app, ["bench", "--network"])
    assert "x simpy" in result.stdout
    assert asked == [2, 3]


def test_options_of_the_other_bench_are_refused() -> None:
    """What trains nothing does not silently take settings of training."""
    result = CliRunner().invoke(app, ["bench", "--network", "--steps", "5"])
    assert result.exit_code == 2
    assert result.stderr == "error: network: it does not read --steps; leave that out\n"
