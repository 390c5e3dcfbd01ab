"""What ``islands compare`` and ``islands scale`` print: tables of at most 80 columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from islands.results.display import WIDTH, exact_bytes, share_text
from islands.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from islands.comparison import Comparison
    from islands.scale import Scaling

_Row = Mapping[str, Any]


def print_comparison(found: Comparison, console: Console | None = None) -> None:
    """Losses and times to the target, then costs, then what every learning rate gave."""
    console = console or Console()
    rows, target = found.rows, found.target
    tables = [_losses(rows, target), _costs(rows), _rates(rows)]
    for table in tables if any(len(row["grid"]) > 1 for row in rows) else tables[:2]:
        console.print(table, width=WIDTH)
        console.print()
    for row in rows:
        if row["lr_at_edge"]:
            what = (
                f"{row['method']}: the best rate is at its grid's edge; a wider grid may do better"
            )
            console.print(Padding(Text(what, style="yellow"), (0, 0, 0, 2)), width=WIDTH)
    console.print(Text("results ", style="bold cyan") + Text(str(found.folder)), soft_wrap=True)


def loss_text(row: _Row) -> str:
    """``2.2770 ± 0.0900`` over seeds, or how many of them diverged."""
    if row["diverged"]:
        return f"diverged ({row['diverged']} of {row['seeds']})"
    spread = row["final_val_loss_std"]
    return f"{row['final_val_loss']:.4f}" + ("" if math.isnan(spread) else f" ± {spread:.4f}")


def _losses(rows: Sequence[_Row], target: float | None) -> Table:
    table = _table("method", "lr", "validation loss")
    if target is not None:
        table.add_column(f"steps to {target:g}", justify="right")
        table.add_column("emulated", justify="right")
    for row in rows:
        edge = "*" if row["lr_at_edge"] else ""
        reached = [] if target is None else _to_target(row)
        table.add_row(Text(row["method"]), f"{row['lr']:g}{edge}", loss_text(row), *reached)
    return table


def _to_target(row: _Row) -> list[str]:
    if row["steps_to_target"] is None:
        some = f" ({row['reached']} of {row['seeds']} did)" if row["reached"] else ""
        return [f"not reached{some}", "–"]
    return [f"{row['steps_to_target']:,.0f}", format_seconds(row["time_to_target_s"])]


def _costs(rows: Sequence[_Row]) -> Table:
    table = _table("per worker and step", "payload", "wire", "emulated in all")
    dropped = any(row["dropped_share"] for row in rows)
    if dropped:
        table.add_column("dropped", justify="right")
    for row in rows:
        table.add_row(
            Text(row["method"]),
            exact_bytes(row["payload_bytes_per_step"]),
            exact_bytes(row["wire_bytes_per_step"]),
            format_seconds(row["emulated_s"]),
            *([share_text(row["dropped_share"])] if dropped else []),
        )
    return table


def _rates(rows: Sequence[_Row]) -> Table:
    table = _table("learning rates", "validation loss at each of them")
    table.columns[1].justify = "left"
    for row in rows:
        cells = Text()
        for at in row["grid"]:
            style = "bold" if at["lr"] == row["lr"] else "dim"
            loss = f"{at['final_val_loss']:.4f}" if not at["diverged"] else loss_text(at)
            # No-break spaces keep a rate and its loss together.
            cell = f"{at['lr']:g}: {loss}".replace(" ", "\N{NO-BREAK SPACE}")
            cells.append(("  " if cells else "") + cell, style=style)
        table.add_row(Text(row["method"]), cells)
    return table


def print_scaling(found: Scaling, console: Console | None = None) -> None:
    """A table per method, under how its bytes grow; all numbers are per local step."""
    console = console or Console()
    carried = not any(row["trained"] for row in found.rows)
    how = "nothing was trained: every worker sends one real payload" if carried else "trained"
    console.print(Text(f"per local step; wire bytes are those sent; {how}"), width=WIDTH)
    for fitted in found.growth:
        rows = [row for row in found.rows if row["method"] == fitted["method"]]
        console.print()
        title = Text(fitted["method"], style="bold") + Text(f": {growth_text(fitted)}", "not bold")
        console.print(title, width=WIDTH)
        table = _table(
            "workers", "payload", "wire each", "wire in all", "WAN", "LAN", "emulated", ""
        )
        for row in rows:
            marks = [] if row["pays"] else ["≥ dense"]
            marks += [] if row["trained"] or carried else ["bytes only"]
            table.add_row(
                f"{row['workers']:,}",
                exact_bytes(row["payload_bytes"]),
                exact_bytes(row["wire_bytes_per_worker"]),
                *(format_bytes(row[key]) for key in ("wire_bytes_total", "wan_bytes", "lan_bytes")),
                format_seconds(row["emulated_s_per_step"]),
                Text(", ".join(marks), style="yellow"),
            )
        console.print(table, width=WIDTH)


def growth_text(fitted: _Row) -> str:
    """The fitted growth of a method's wire bytes in one sentence."""
    amount, payloads = exact_bytes(fitted["bytes"]), f"{fitted['payloads']:.3g} payload"
    payloads += "" if payloads == "1 payload" else "s"
    if fitted["operation"] == "all_reduce":
        return f"wire per worker saturates at {amount} ({payloads})"
    if fitted["operation"] == "star":
        return f"wire per worker stays at {amount} ({payloads})"
    limit = fitted["stops_paying_at"]
    until = "" if limit is None else f"; a dense ring sends no more from {limit:,} workers on"
    return f"wire per worker grows by {amount} ({payloads}) with each worker{until}"


def _table(*columns: str) -> Table:
    gap = 2 if len(columns) < 7 else 1
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold cyan")
    for n, name in enumerate(columns):
        table.add_column(name, justify="right" if n else "left", overflow="fold")
    return table
