"""``islands check``: what it says about lines, routes and the ring of a cluster."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from islands.check import describe, load_target, print_description
from islands.config import cluster_names


def described(target: str, *overrides: str) -> dict[str, Any]:
    """The description as JSON has it."""
    found = describe(load_target(target, None, overrides))
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def printed(found: dict[str, Any]) -> str:
    """The tables as text."""
    console = Console(width=80, file=io.StringIO())
    print_description(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def one(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The line of that name."""
    (line,) = (line for line in found["links"] if line["name"] == name)
    return line  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", cluster_names())
def test_every_shipped_cluster_fits_a_terminal(name: str) -> None:
    """80 columns, and the time of a dense synchronisation at the end."""
    text = printed(described(name))
    assert max(map(len, text.splitlines())) <= 80
    assert "payload per worker" in text


def test_access_lines_and_backbone_are_shown() -> None:
    """Rates and delays of each, the others' load, and each route's links."""
    found = described("shared_access")
    assert one(found, "uplink:milan")["bytes_per_s"] == 62.5e6
    assert one(found, "uplink:milan")["between"] == ["milan"]
    load = {"load": 0.3, "size_bytes": 500e6, "exponential": True, "on_s": None, "off_s": None}
    assert one(found, "backbone")["background"] == load
    (route,) = (r for r in found["routes"] if (r["from"], r["to"]) == ("milan", "paris"))
    assert route["links"] == ["uplink:milan", "backbone", "downlink:paris"]
    assert (route["queue"], route["delay_s"]) == ("fair", pytest.approx(6.9e-3))
    text = " ".join(printed(found).split())
    assert "milan 500 Mbit/s 3.6 ms 1 Gbit/s 3.6 ms fair" in text
    assert "backbone all islands 10 Gbit/s 0 s 0 B fair" in text
    assert "background of 0.3 in transfers of 500 MB on average (exponential)" in text
    assert "milan > paris uplink:milan backbone downlink:paris" in text


def test_what_changes_is_shown() -> None:
    """The trace's range and period, windows, jitter and price; rates are means and marked so."""
    found = described("traced_cross_country")
    line = one(found, "continent")
    assert line["changes"] == [
        "bandwidth 273 Mbit/s to 4.727 Gbit/s (120 values, repeats every 2 min 00 s)",
        "cut from 600 s to 602 s, every 600 s",
    ]
    assert (line["jitter_s"], line["egress_price"]) == (0.001, "0.02 USD/GB")
    text = " ".join(printed(found).split())
    assert "~ 2.5 Gbit/s" in text
    assert "jitter of ± 1 ms" in text
    assert "egress at 0.02 USD/GB" in text
    assert "at their means" in text
    assert "~" not in printed(described("two_islands"))


def test_directions_that_differ_are_two_lines() -> None:
    """Each with its own numbers; equal ones are one line."""
    back = ["cluster.links.0.reverse.bandwidth=10 Mbit/s", "cluster.links.0.reverse.delay=1 s"]
    found = described("two_islands", *back)
    rates = {line["name"]: line["bytes_per_s"] for line in found["links"]}
    assert rates == {"atlantic:dublin>oregon": 125e6, "atlantic:oregon>dublin": 1.25e6}
    text = " ".join(printed(found).split())
    assert "atlantic dublin > oregon 1 Gbit/s 65 ms" in text
    assert "atlantic oregon > dublin 10 Mbit/s 1 s" in text
    assert [line["name"] for line in described("two_islands")["links"]] == ["atlantic"]


def test_windows_and_caps_are_spelt_out() -> None:
    """For good or until when, once or every so often; and what one transfer gets."""
    windows = "[{from: 1 h, bandwidth: cut}, {from: 1 s, to: 2 s, every: 1 min, delay: 2 s}]"
    found = described(
        "two_islands",
        f"cluster.links.0.windows={windows}",
        "cluster.links.0.queue=fair",
        "cluster.links.0.max_rate_per_flow=10 Mbit/s",
        "cluster.links.0.background={load: 0.5, size: 1 MB, bursts: {on: 2 s, off: 90 s}}",
    )
    line = one(found, "atlantic")
    assert line["changes"] == ["cut from 3600 s for good", "delay 2 s from 1 s to 2 s, every 60 s"]
    assert line["flow_bytes_per_s"] == 1.25e6
    text = " ".join(printed(found).split())
    assert "at most 10 Mbit/s per transfer" in text
    assert "background of 0.5 in transfers of 1 MB, in bursts of 2 s with pauses of 1" in text


def test_a_default_link_and_a_trace_that_ends(tmp_path: Path) -> None:
    """The default link is one line; many routes of one kind are one row."""
    trace = "{points: [[0 s, 1 kB/s], [1 h, 3 kB/s]]}"
    islands = ", ".join(f"{{name: i{n}, workers: 1}}" for n in range(5))
    file = tmp_path / "c.yaml"
    file.write_text(f"name: c\nislands: [{islands}]\ndefault_link: {{bandwidth: {trace}}}\n")
    found = described(str(file))
    assert one(found, "default")["bytes_per_s"] == 2000.0
    assert one(found, "default")["changes"][0].endswith("(2 values, ends after 2 h 00 min)")
    assert len(found["routes"]) == 20
    text = " ".join(printed(found).split())
    assert "default all other pairs ~ 16 kbit/s" in text
    assert "FROM > TO, every pair default:FROM>TO" in text
    assert "i0 > i1" not in text.partition("ring order")[0]


def test_the_ring_order_is_shown_and_can_be_forced() -> None:
    """The one that a run would take; it decides the time of a synchronisation."""
    chosen = described("four_continents")
    assert chosen["ring_order"] == ["virginia", "tokyo", "frankfurt", "sao_paulo"]
    order = "ring_order=[virginia, frankfurt, tokyo, sao_paulo]"
    forced = described("four_continents", order)
    assert forced["ring_order"] == ["virginia", "frankfurt", "tokyo", "sao_paulo"]
    assert chosen["dense_sync_s"] < forced["dense_sync_s"]
    assert "ring order virginia > tokyo > frankfurt > sao_paulo" in printed(chosen)
    assert "ring order" not in printed(described("laptop"))


def test_a_synchronisation_is_timed_without_the_others() -> None:
    """On idle links at their means: other jobs, cuts and jitter do not count."""
    extra = [
        "cluster.links.0.background={load: 0.9, size: 13.5 GB}",
        "cluster.links.0.windows=[{from: 0 s, bandwidth: cut}]",
        "cluster.links.0.jitter=60 ms",
    ]
    plain, busy = described("two_islands"), described("two_islands", *extra)
    assert plain["dense_sync_s"] == busy["dense_sync_s"]
