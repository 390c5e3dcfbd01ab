"""``islands links``: is the emulated network right? Its own code beside the textbook, untrained.

Two comparisons. How long a newcomer waits in a link's queue at a given load, measured on the code
that runs use, beside the Pollaczek–Khinchine mean: in transfer times ρ/(2(1 − ρ)) for transfers of
one size (M/D/1), ρ/(1 − ρ) for exponential sizes (M/M/1). And how long each collective takes on a
cluster, simulated hop by hop, beside :mod:`islands.network.alpha_beta`, which knows no hops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from islands.cluster import Cluster
from islands.errors import InputError
from islands.network import Topology
from islands.network.alpha_beta import hierarchical_seconds, ring_seconds, star_seconds
from islands.network.choose import scheme_seconds, steady
from islands.network.waits import queue_waits
from islands.results.display import WIDTH
from islands.trace import Bytes
from islands.units import format_bytes, format_seconds, parse_size

LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: Beyond these an estimate to half a per cent would need more than 1e8 arrivals.
LEAST_LOAD, MOST_LOAD = 0.01, 0.99
#: Arrivals are drawn until the standard error is below this part of the theoretical value.
RELATIVE_ERROR = 0.005


class WaitRow(NamedTuple):
    """Mean wait of a newcomer in mean transfer times; ``sizes``: ``fixed`` or ``exponential``."""

    load: float
    sizes: str
    measured: float
    stderr: float
    theory: float


class CollectiveRow(NamedTuple):
    """One collective of ``bytes`` per worker, from everyone ready until the last one is done."""

    name: str
    workers: int
    bytes: int
    simulated_s: float
    formula_s: float


@dataclass(frozen=True)
class LinkCheck:
    """Both comparisons on one cluster."""

    cluster: str
    waits: tuple[WaitRow, ...]
    collectives: tuple[CollectiveRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: rows as mappings."""
        return {
            "cluster": self.cluster,
            "waits": [row._asdict() for row in self.waits],
            "collectives": [row._asdict() for row in self.collectives],
        }


def read_loads(text: str | None) -> list[float] | None:
    """``0.1,0.3,…,0.9`` as a list; ``…`` goes on by the difference of the two values before it.

    Raises InputError that names the field.
    """
    if text is None:
        return None
    found: list[Decimal] = []
    open_end = False
    for word in (part.strip() for part in text.split(",")):
        if word in ("…", "..."):
            if len(found) < 2 or found[-1] <= found[-2]:
                raise InputError(f"load: {word!r} needs two growing values before it")
            open_end = True
            continue
        try:
            value = Decimal(word)
        except InvalidOperation:
            raise InputError(f"load: {word!r} is not a number; write for example 0.3,0.9") from None
        step = found[-1] - found[-2] if open_end else Decimal(0)
        while open_end and found[-1] + step < value:
            found.append(found[-1] + step)
        open_end = False
        found.append(value)
    if open_end:
        raise InputError("load: nothing follows the ellipsis; say where it ends")
    return [float(value) for value in found]


def check_links(
    cluster: Cluster | str | None = None,
    loads: Sequence[float] | None = None,
    size: str | int = "10 MB",
    seed: int = 0,
) -> LinkCheck:
    """Measure waits at ``loads`` and time collectives of ``size`` per worker on ``cluster``.

    ``cluster`` may be a file or a name (default ``two_islands``); its links are taken as idle and
    constant. ``loads`` default to ``LOADS``; a bare ``size`` is in bytes. Raises InputError for a
    load outside [0, 1), an unknown cluster, a size that is none or a negative seed.
    """
    if not isinstance(cluster, Cluster):
        cluster = Cluster.load(cluster or "two_islands")
    loads = LOADS if loads is None else loads
    if not loads:
        raise InputError("load: no load is given; write for example 0.3,0.9")
    for load in loads:
        if isinstance(load, bool) or not isinstance(load, int | float) or not 0 <= load < 1:
            raise InputError(
                f"load: {load!r} is no share from 0 to below 1; at 1 a queue grows for ever"
            )
        if load and not LEAST_LOAD <= load <= MOST_LOAD:
            raise InputError(
                f"load: {load!r} would take too many arrivals to settle; "
                f"choose from {LEAST_LOAD} to {MOST_LOAD}"
            )
    if seed < 0:
        raise InputError(f"seed: {seed} is negative; write for example 0")
    try:
        size_bytes = size if isinstance(size, int) else parse_size(size)
    except InputError as error:
        raise InputError(f"size: {error}") from None
    topology = steady(cluster.topology())
    return LinkCheck(
        cluster.name, tuple(_waits(loads, seed)), tuple(collective_rows(topology, size_bytes))
    )


def _waits(loads: Iterable[float], seed: int) -> Iterable[WaitRow]:
    for sizes in ("fixed", "exponential"):
        for load in loads:
            measured, stderr, theory, _ = queue_waits(
                load, sizes == "exponential", RELATIVE_ERROR, seed
            )
            yield WaitRow(float(load), sizes, measured, stderr, theory)


def collective_rows(topology: Topology, size_bytes: int) -> list[CollectiveRow]:
    """Collectives of ``size_bytes`` per worker on a constant, idle network, and their formulas."""
    workers = topology.workers
    order = topology.ring()
    whole, part = float(size_bytes), size_bytes / workers
    formulas = {
        ("ring all-reduce", "ring", "all_reduce"): _last(
            ring_seconds(topology, order, [part] * workers, 2)
        ),
        ("ring all-gather", "ring", "all_gather"): _last(
            ring_seconds(topology, order, [whole] * workers, 1)
        ),
        ("star", "star", "all_reduce"): star_seconds(
            topology, [whole] * workers, [whole] * workers
        ),
        ("hierarchical", "hierarchical", "all_reduce"): hierarchical_seconds(
            topology, order, whole
        ),
    }
    sizes = [Bytes(values=size_bytes)] * workers
    return [
        CollectiveRow(
            name,
            workers,
            size_bytes,
            scheme_seconds(topology, operation, scheme, sizes, itemsize=1),
            formula_s,
        )
        for (name, scheme, operation), formula_s in formulas.items()
    ]


def _last(seconds: NDArray[np.float64]) -> float:
    return float(seconds.max())


def print_links(found: LinkCheck, console: Console | None = None) -> None:
    """Both comparisons as tables of at most 80 columns, with their relative differences."""
    console = console or Console()
    table = _table("wait of a newcomer", "load", "measured", "theory", "difference")
    models = {"fixed": "M/D/1, one size", "exponential": "M/M/1, exponential sizes"}
    for wait in found.waits:
        table.add_row(
            models[wait.sizes],
            f"{wait.load:g}",
            f"{wait.measured:.4f} ± {wait.stderr:.4f}",
            f"{wait.theory:.4f}",
            _difference(wait.measured, wait.theory),
        )
    console.print(table, width=WIDTH)
    console.print(
        Text("  in mean transfer times; ± is one standard error", style="dim"), width=WIDTH
    )
    console.print()
    table = _table("collective", "workers", "per worker", "simulated", "alpha–beta", "difference")
    for row in found.collectives:
        table.add_row(
            row.name,
            str(row.workers),
            format_bytes(row.bytes),
            format_seconds(row.simulated_s),
            format_seconds(row.formula_s),
            _difference(row.simulated_s, row.formula_s),
        )
    console.print(table, width=WIDTH)
    console.print(
        Text(f"  on {found.cluster}, without other traffic, at its mean rates", style="dim"),
        width=WIDTH,
    )


def _difference(measured: float, expected: float) -> str:
    """Relative to what is expected, in percent."""
    if expected == 0.0:
        return "0 %" if measured == 0.0 else "–"
    percent = 100 * (measured / expected - 1)
    return f"{percent:+.2g} %" if abs(percent) >= 0.01 else "<0.01 %"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left")
    return table
