"""``islands check``: what was understood of a cluster or an experiment, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from islands.compression import bits_of, itemsize
from islands.config import Experiment, load_experiment
from islands.data import load_corpus
from islands.errors import InputError
from islands.job import compute_model
from islands.models import build_model, must_have_shapes
from islands.network import collective_seconds
from islands.settings import read_yaml
from islands.units import format_bandwidth, format_bytes, format_seconds


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
        "links": [
            {
                "name": link.name,
                "between": list(link.between),
                "bytes_per_s": link.bandwidth,
                "delay_s": link.delay,
                "queue": link.queue,
                "bandwidth_delay_bytes": link.bandwidth * link.delay if link.delay else 0.0,
            }
            for link in cluster.links
        ],
        "routes": [
            {"from": a, "to": b, "links": list(topology.route(i, j))}
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i != j
        ],
        "dense_sync_bytes": dense_bytes,
        "payload_dtype": dtype,
        "dense_sync_s": collective_seconds(topology, "all_reduce", dense_bytes, itemsize(dtype)),
    }


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
            format_seconds(island["step_s"]),
            format_bandwidth(island["lan_bytes_per_s"]),
            format_seconds(island["lan_delay_s"]),
        )
    console.print(table)
    if found["links"]:
        table = _table("link", "between", "bandwidth", "delay, one way", "in flight")
        for link in found["links"]:
            table.add_row(
                link["name"],
                " – ".join(link["between"]),
                format_bandwidth(link["bytes_per_s"]),
                format_seconds(link["delay_s"]),
                format_bytes(link["bandwidth_delay_bytes"]),
            )
        console.print(table)
        table = _table("route", "over")
        for route in found["routes"]:
            table.add_row(f"{route['from']} > {route['to']}", "  ".join(route["links"]))
        console.print(table)
    console.print(
        Text("one dense synchronisation ", style=bold)
        + Text(
            f"of {found['model']} ({found['parameters']:,} parameters, "
            f"{found['payload_dtype']}, ring all-reduce):\n"
            f"  {format_bytes(found['dense_sync_bytes'])} payload per worker, "
            f"{format_seconds(found['dense_sync_s'])} on idle links"
        )
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for n, column in enumerate(columns):
        numeric = column in ("workers", "step", "LAN", "LAN delay", "bandwidth", "in flight")
        numeric = numeric or column.startswith("delay")
        table.add_column(
            column, justify="right" if numeric else "left", overflow="fold", no_wrap=n == 0
        )
    return table
