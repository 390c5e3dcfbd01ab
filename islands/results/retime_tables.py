"""What ``islands retime`` prints: tables of at most 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from islands.results.display import WIDTH
from islands.units import format_bandwidth, format_seconds

if TYPE_CHECKING:
    from islands.retime import Retiming

_Row = Mapping[str, Any]

#: What networks differ in: key of a row, heading.
SWEPT = (
    ("cluster", "cluster"),
    ("bandwidth", "bandwidth"),
    ("load", "load"),
    ("step_time", "step"),
    ("delay", "delay"),
)


def print_retiming(found: Retiming, console: Console | None = None) -> None:
    """Times on every network, the runs side by side, then the bandwidths that they need."""
    console = console or Console()
    console.print(_times(found.rows), width=WIDTH)
    for why in dict.fromkeys(row["stalled"] for row in found.rows if row["stalled"]):
        console.print(Padding(Text(f"stalls: {why}", style="yellow"), (0, 0, 0, 2)), width=WIDTH)
    if found.needs:
        console.print()
        _print_needs(found.needs, console)


def labels(rows: Sequence[_Row]) -> dict[str, str]:
    """A short name for each folder: its last part, or all of it where two would be the same."""
    folders = dict.fromkeys(row["folder"] for row in rows)
    short = {folder: Path(folder).absolute().name for folder in folders}
    names = list(short.values())
    return {f: f if names.count(name) > 1 else name for f, name in short.items()}


def network_text(row: _Row, keys: Sequence[str]) -> str:
    """``two_islands, load 0.3, delay 10 ms``: those of ``keys`` that the row has, in words."""
    parts = []
    for key, heading in SWEPT:
        if key in keys and row[key] is not None:
            value = f"{row[key]:g}" if key == "load" else row[key]
            parts.append(value if key in ("cluster", "bandwidth") else f"{heading} {value}")
    return ", ".join(parts)


def differing(rows: Sequence[_Row]) -> list[str]:
    """Keys of what was swept: given at all, or more than one cluster."""
    clusters = {row["cluster"] for row in rows}
    given = {key for key, _ in SWEPT[1:] if any(row[key] is not None for row in rows)}
    return [key for key, _ in SWEPT if key in given or (key == "cluster" and len(clusters) > 1)]


def _by_network(rows: Sequence[_Row], keys: Sequence[str]) -> list[list[_Row]]:
    """The runs of each network together, in the order in which networks first appear."""
    groups: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def _times(rows: Sequence[_Row]) -> Table:
    keys, short = differing(rows), labels(rows)
    headings = dict(SWEPT)
    target = any(row["target_loss"] is not None for row in rows)
    method = [] if all(row["method"] in short[row["folder"]] for row in rows) else ["method"]
    table = _table(*(headings[key] for key in keys), "run", *method, "emulated", "computing")
    if target:
        table.add_column("to target", justify="right")
    for group in _by_network(rows, keys):
        for n, row in enumerate(group):
            where = [network_text(row, [key]).removeprefix(f"{headings[key]} ") for key in keys]
            table.add_row(
                *(Text("" if n else text) for text in where),
                Text(short[row["folder"]]),
                *(Text(row[key]) for key in method),
                *_measured(row, target),
            )
    return table


def _measured(row: _Row, target: bool) -> list[str]:
    if row["stalled"]:
        found = ["stalls", "–"]
    else:
        share = f"{100 * row['compute_utilization']:.1f} %"
        found = [format_seconds(row["emulated_s"]), share]
    if target:
        reached = row["time_to_target_s"]
        unmet = "–" if row["target_loss"] is None else "not reached"
        found.append(unmet if reached is None else format_seconds(reached))
    return found


def _print_needs(needs: Sequence[_Row], console: Console) -> None:
    from islands.retime import LOWEST

    short, keys = labels(needs), [key for key in differing(needs) if key != "bandwidth"]
    shares = list(dict.fromkeys(row["utilization"] for row in needs))
    least = f"≤ {format_bandwidth(LOWEST)}"
    for group in _by_network(needs, keys):
        where = network_text(group[0], keys)
        title = "bandwidth needed to compute this share of the time"
        console.print(Text(f"{title}{': ' if where else ''}{where}", style="bold"), width=WIDTH)
        table = _table("run", *(f"{100 * share:g} %" for share in shares))
        for first in range(0, len(group), len(shares)):
            own = group[first : first + len(shares)]
            cells = [
                "never"
                if row["bytes_per_s"] is None
                else least
                if row["bytes_per_s"] <= LOWEST
                else row["bandwidth"]
                for row in own
            ]
            table.add_row(Text(short[own[0]["folder"]]), *cells)
        console.print(table, width=WIDTH)
    rounds = max(row["rounds"] for row in needs)
    note = f"of every link between islands; to 1 %, from the first {rounds:,} rounds at most"
    if any(row["bytes_per_s"] is None for row in needs):
        note += "; never: at any bandwidth the rest (delays, the slowest worker) takes too long"
    console.print(Padding(Text(note, style="dim"), (0, 0, 0, 2)), width=WIDTH)


def _table(*columns: str) -> Table:
    gap = 2 if len(columns) < 6 else 1
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold cyan")
    for name in columns:
        left = name in ("cluster", "run", "method")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table
