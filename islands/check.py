"""``islands check``: what was understood of a cluster or an experiment, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isinf, isnan
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from islands.cluster import BACKBONE, DEFAULT, DOWNLINK, UPLINK, Cluster
from islands.compression import bits_of, itemsize
from islands.config import Experiment, load_experiment
from islands.data import load_corpus
from islands.errors import InputError
from islands.fields import MEASURED
from islands.job import compute_model
from islands.lines import CUT, Line, Trace, Window
from islands.models import build_model, must_have_shapes
from islands.network import collective_seconds
from islands.network.choose import steady
from islands.settings import read_yaml
from islands.units import (
    format_bandwidth,
    format_bytes,
    format_price,
    format_seconds,
    format_time,
)


def load_target(target: str, model: str | None, overrides: Sequence[str]) -> Experiment:
    """The experiment that ``target`` stands for: an experiment file, or a cluster with all
    defaults."""
    path = Path(target)
    is_experiment = path.is_file() and "islands" not in read_yaml(path)
    if is_experiment:
        return load_experiment(path, overrides, {"model": model})
    return load_experiment(None, overrides, {"cluster": target, "model": model})


def describe(experiment: Experiment) -> dict[str, Any]:
    """Islands, links, routes, bandwidth-delay products and the time of one dense
    synchronisation."""
    experiment = experiment.resolved()
    cluster, topology = experiment.cluster, experiment.cluster.topology()
    order = experiment.ring_order
    model = _shapes_of(experiment)
    _read_corpus(experiment)
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    dtype = experiment.method.payload_dtype
    dense_bytes = -(-trainable * bits_of(dtype) // 8)
    compute = compute_model(experiment, parameters)
    first = [topology.island_of.index(n) for n in range(len(cluster.islands))]
    names = topology.island_names
    return {
        "cluster": cluster.name,
        "method": experiment.method.name,
        "model": experiment.model.name,
        "parameters": parameters,
        "workers": topology.workers,
        "coordinator": names[topology.coordinator_island],
        "islands": [
            {
                "name": island.name,
                "workers": island.workers,
                "step_s": float(compute.seconds(worker, 0, 1)[0]),
                "lan_bytes_per_s": island.lan.bandwidth,
                "lan_delay_s": island.lan.delay,
            }
            for island, worker in zip(cluster.islands, first, strict=True)
        ],
        "links": [_described(*line) for line in _lines_of(cluster)],
        "routes": [
            {
                "from": a,
                "to": b,
                "queue": topology.discipline(i, j),
                "delay_s": sum(topology.links[n].delay_s for n in topology.routes[i][j]),
                "links": list(topology.route(i, j)),
            }
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i != j
        ],
        "ring_order": [names[island] for island in topology.ring_islands(order)],
        "dense_sync_bytes": dense_bytes,
        "payload_dtype": dtype,
        "dense_sync_s": collective_seconds(
            steady(topology), "all_reduce", dense_bytes, itemsize(dtype), ring_order=order
        ),
    }


def _lines_of(cluster: Cluster) -> Iterator[tuple[str, Sequence[str], Line]]:
    """Every line that the file describes: its name, the islands at its ends, its settings.

    A link is one line unless its directions differ.
    """
    for link in cluster.links:
        if link.reverse is None:
            yield link.name, link.between, link
        else:
            ends = (link.between, link.between[::-1])
            for line, (a, b) in zip(link.directions(), ends, strict=True):
                yield f"{link.name}:{a}>{b}", (a, b), line
    if cluster.default_link is not None:
        yield DEFAULT, (), cluster.default_link
    if cluster.backbone is not None:
        yield BACKBONE, (), cluster.backbone
    for island in cluster.islands:
        if island.uplink is not None:
            yield f"{UPLINK}:{island.name}", (island.name,), island.uplink
        if island.downlink is not None:
            yield f"{DOWNLINK}:{island.name}", (island.name,), island.downlink


def _described(name: str, between: Sequence[str], line: Line) -> dict[str, Any]:
    """One line; what is not there is None or empty. Rates and delays that change are means."""
    link = line.directed(name, "", "")
    return {
        "name": name,
        "between": list(between),
        "bytes_per_s": link.bytes_per_s,
        "delay_s": link.delay_s,
        "queue": line.queue,
        "bandwidth_delay_bytes": link.bytes_per_s * link.delay_s if link.delay_s else 0.0,
        "flow_bytes_per_s": None if isinf(link.flow_bytes_per_s) else link.flow_bytes_per_s,
        "background": None if link.background is None else asdict(link.background),
        "jitter_s": link.jitter_s,
        "changes": [*_traces(line), *map(_window, line.windows)],
        "egress_price": None if line.egress_price is None else format_price(line.egress_price),
    }


def _traces(line: Line) -> Iterator[str]:
    for field, trace, form in (
        ("bandwidth", line.bandwidth, format_bandwidth),
        ("delay", line.delay, format_time),
    ):
        if not isinstance(trace, Trace):
            continue
        least, most = form(min(trace.values)), form(max(trace.values))
        ends = "repeats every" if trace.repeat else "ends after"
        period = "" if trace.period_s is None else f", {ends} {format_seconds(trace.period_s)}"
        yield f"{field} {least} to {most} ({len(trace.points)} values{period})"


def _window(window: Window) -> str:
    values = []
    if window.bandwidth is not None:
        values.append(format_bandwidth(window.bandwidth) if window.bandwidth else CUT)
    if window.delay is not None:
        values.append(f"delay {format_time(window.delay)}")
    text = f"{' and '.join(values)} from {format_time(window.from_)}"
    text += " for good" if window.to is None else f" to {format_time(window.to)}"
    return text + ("" if window.every is None else f", every {format_time(window.every)}")


def _shapes_of(experiment: Experiment) -> nn.Module:
    """The model without its memory, where its own code allows that."""
    name, settings = experiment.model.name, experiment.model.settings
    try:
        with torch.device("meta"):
            model = build_model(name, settings)
    except InputError:
        model = build_model(name, settings)
    must_have_shapes(model)
    return model


def _read_corpus(experiment: Experiment) -> None:
    """Raise the InputError that a run would for missing or too little text."""
    data = experiment.data
    assert data.tokenizer is not None
    assert data.vocab_size is not None
    assert data.window is not None
    load_corpus(data.name, data.tokenizer, data.vocab_size, data.window)


def print_description(found: dict[str, Any], console: Console | None = None) -> None:
    """The description as tables of at most 80 columns."""
    console = console or Console(width=80)
    bold = "bold cyan"
    console.print(
        f"[{bold}]{found['cluster']}[/]: {len(found['islands'])} islands, "
        f"{found['workers']} workers, coordinator in {found['coordinator']}"
    )
    table = _table("island", "workers", "step", "LAN", "LAN delay")
    for island in found["islands"]:
        table.add_row(
            island["name"],
            str(island["workers"]),
            MEASURED if isnan(island["step_s"]) else format_seconds(island["step_s"]),
            format_bandwidth(island["lan_bytes_per_s"]),
            format_seconds(island["lan_delay_s"]),
        )
    console.print(table)
    _print_links(found["links"], console)
    if found["routes"]:
        table = _table("route", "over")
        for pair, over in _routes(found["routes"]):
            table.add_row(pair, over)
        console.print(table)
        console.print(Text("ring order ", style="bold") + Text(" > ".join(found["ring_order"])))
    console.print(
        Text("one dense synchronisation ", style=bold)
        + Text(
            f"of {found['model']} ({found['parameters']:,} parameters, "
            f"{found['payload_dtype']}, ring all-reduce):\n"
            f"  {format_bytes(found['dense_sync_bytes'])} payload per worker, "
            f"{format_seconds(found['dense_sync_s'])} on idle links"
            + (" at their means" if any(link["changes"] for link in found["links"]) else "")
        )
    )


def _print_links(links: Sequence[dict[str, Any]], console: Console) -> None:
    """Links and backbone, then access lines by island, then what else some of them have."""
    table = _table("link", "between", "bandwidth", "delay", "in flight", "queue")
    access: dict[str, dict[str, dict[str, Any]]] = {}
    for link in links:
        if len(link["between"]) == 1:
            access.setdefault(link["between"][0], {})[link["name"].partition(":")[0]] = link
            continue
        name, one_way, _ = link["name"].partition(":")
        others = "all islands" if name == BACKBONE else "all other pairs"
        table.add_row(
            name,
            (" > " if one_way else " – ").join(link["between"]) or others,
            *_rate_and_delay(link),
            format_bytes(link["bandwidth_delay_bytes"]),
            link["queue"],
        )
    if table.row_count:
        console.print(table)
    if access:
        table = _table("access line", UPLINK, "delay up", DOWNLINK, "delay down", "queue")
        for island, lines in access.items():
            up, down = (lines.get(kind) for kind in (UPLINK, DOWNLINK))
            queues = {line["queue"] for line in lines.values()}
            table.add_row(
                island, *_rate_and_delay(up), *_rate_and_delay(down), " / ".join(sorted(queues))
            )
        console.print(table)
    besides: dict[str, list[str]] = {}
    for link in links:
        if text := "\n".join(_besides(link)):
            besides.setdefault(text, []).append(link["name"])
    if besides:
        table = _table("line", "has")
        for text, names in besides.items():
            kinds = sorted({name.partition(":")[0] for name in names})
            few = len(names) <= 3
            table.add_row("\n".join(names if few else [f"{len(names)} × {k}" for k in kinds]), text)
        console.print(table)


def _rate_and_delay(link: dict[str, Any] | None) -> tuple[str, str]:
    """Means to four digits, marked as such."""
    if link is None:
        return "–", "–"
    rate = format_bandwidth(float(f"{link['bytes_per_s']:.4g}"))
    return ("~ " if link["changes"] else "") + rate, format_seconds(link["delay_s"])


def _besides(link: dict[str, Any]) -> Iterator[str]:
    load = link["background"]
    if load is not None:
        size = format_bytes(load["size_bytes"])
        kind = " on average (exponential)" if load["exponential"] else ""
        bursts = ""
        if load["on_s"] is not None:
            on, off = format_seconds(load["on_s"]), format_seconds(load["off_s"])
            bursts = f", in bursts of {on} with pauses of {off}"
        yield f"background of {load['load']:.4g} in transfers of {size}{kind}{bursts}"
    if link["flow_bytes_per_s"] is not None:
        yield f"at most {format_bandwidth(link['flow_bytes_per_s'])} per transfer"
    if link["jitter_s"]:
        yield f"jitter of ± {format_seconds(link['jitter_s'])}"
    yield from link["changes"]
    if link["egress_price"] is not None:
        yield f"egress at {link['egress_price']}"


#: More pairs than this whose routes look alike are shown as one.
_ALIKE = 12


def _routes(routes: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Pairs and the links between them; routes that differ in their ends' names only are one."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for route in routes:
        ends = {
            f"{UPLINK}:{route['from']}": f"{UPLINK}:FROM",
            f"{DOWNLINK}:{route['to']}": f"{DOWNLINK}:TO",
            f"{DEFAULT}:{route['from']}>{route['to']}": f"{DEFAULT}:FROM>TO",
        }
        shape = "  ".join(ends.get(link, link) for link in route["links"])
        alike.setdefault(shape, []).append(route)
    for shape, those in alike.items():
        if len(those) > _ALIKE:
            everyone = len(those) == len(routes)
            yield ("FROM > TO, every pair" if everyone else f"FROM > TO, {len(those)} pairs"), shape
        else:
            for route in those:
                yield f"{route['from']} > {route['to']}", "  ".join(route["links"])


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for n, column in enumerate(columns):
        numeric = column in ("workers", "step", "LAN", "LAN delay", "bandwidth", "in flight")
        numeric = numeric or column.startswith("delay") or column in (UPLINK, DOWNLINK)
        table.add_column(
            column, justify="right" if numeric else "left", overflow="fold", no_wrap=n == 0
        )
    return table
