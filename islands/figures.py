"""Pictures of studies, drawn with matplotlib, which is not needed for anything else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from islands.errors import InputError
from islands.results.result import Result
from islands.results.retime_tables import differing, labels, network_text
from islands.units import format_bandwidth

if TYPE_CHECKING:
    from islands.comparison import Comparison
    from islands.retime import Retiming
    from islands.scale import Scaling

_Array = NDArray[np.float64]

#: Okabe and Ito's palette: tells methods apart for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
DASHES = ("-", "--", ":", "-.")
SUFFIXES = (".png", ".pdf", ".svg")


def check_figure(path: Path | None) -> None:
    """Refuse, before anything is trained, a figure that could not be drawn in the end.

    Raises InputError if matplotlib is missing, or the file's name or folder will not do.
    """
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"figure: {str(path)!r} must end in {', '.join(SUFFIXES)}")
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise InputError(f"figure: cannot write to {path}")
    _figure_class()


def _figure_class() -> Any:
    """matplotlib's Figure; without pyplot nothing looks for a screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "figure: drawing needs matplotlib; pip install 'islands[figures]'"
        ) from None
    return Figure


class Curve(NamedTuple):
    """One method at its best rate: per evaluation the step, the wire bytes that a worker had sent,
    the emulated time, and the loss's mean and standard deviation over the seeds."""

    method: str
    steps: _Array
    sent_bytes: _Array
    emulated_s: _Array
    loss: _Array
    spread: _Array


def curves(found: Comparison) -> list[Curve]:
    """The methods' curves, read from their runs. Seeds that diverged are left out, unless all
    did."""
    drawn = []
    for row in found.rows:
        runs = [r for r in found.runs if r["method"] == row["method"] and r["chosen"]]
        fine = [r for r in runs if not r["diverged"]] or runs
        parts = np.array([_course(Result(found.folder / r["folder"], {}), r) for r in fine])
        steps, sent, seconds, loss = np.moveaxis(parts, 1, 0)
        spread = loss.std(axis=0, ddof=1) if len(fine) > 1 else np.zeros(loss.shape[1])
        label = row["method"] if len(fine) == len(runs) else f"{row['method']} (some diverged)"
        drawn.append(Curve(label, steps[0], sent.mean(0), seconds.mean(0), loss.mean(0), spread))
    return drawn


def _course(result: Result, run: Any) -> _Array:
    """(4, evaluations): step, wire bytes sent per worker, emulated seconds, validation loss."""
    evals, syncs = result.table("evals"), result.table("syncs")
    steps, seconds, losses = (
        evals.column(name).to_numpy() for name in ("step", "emulated_s", "val_loss")
    )
    at, payload = (syncs.column(name).to_numpy() for name in ("step", "payload_bytes"))
    so_far = np.array([payload[at <= step].sum() for step in steps], dtype=np.float64)
    # Every collective sends a fixed multiple of its payloads, so shares of one are shares of both.
    whole = run["wire_bytes_per_step"] * steps[-1]
    share = so_far / payload.sum() if payload.sum() else so_far
    return np.array([steps, whole * share, seconds, losses], dtype=np.float64)


def draw_comparison(found: Comparison, path: Path) -> None:
    """Validation loss against steps, bytes sent and emulated time: mean and spread over seeds."""
    figure = _figure_class()(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    drawn = curves(found)
    for n, curve in enumerate(drawn):
        colour = COLOURS[n % len(COLOURS)]
        row = found.rows[n]
        label = f"{curve.method}, lr {row['lr']:g}"
        for axis, x in zip(axes, (curve.steps, curve.sent_bytes, curve.emulated_s), strict=True):
            seen = x > 0 if axis is axes[1] else x >= 0
            axis.plot(x[seen], curve.loss[seen], color=colour, label=label, linewidth=1.6)
            low, high = curve.loss - curve.spread, curve.loss + curve.spread
            axis.fill_between(x[seen], low[seen], high[seen], color=colour, alpha=0.18, linewidth=0)
    if any((curve.sent_bytes > 0).any() for curve in drawn):
        axes[1].set_xscale("log")
    titles = ("local steps", "bytes sent per worker (wire)", "emulated seconds")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel(title)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if found.target is not None:
            axis.axhline(found.target, color="0.4", linestyle=":", linewidth=1)
    # The first tenth, where everything falls, would leave no room for what tells methods apart.
    top = max(curve.loss[len(curve.loss) // 10] for curve in drawn)
    bottom = min((curve.loss - curve.spread).min() for curve in drawn)
    if np.isfinite([top, bottom]).all() and top > bottom:
        room = 0.05 * (top - bottom)
        axes[0].set_ylim(bottom - room, top + room)
    axes[0].set_ylabel("validation loss (nats)")
    _save(figure, axes[0], path)


def _save(figure: Any, axis: Any, path: Path) -> None:
    """Write the picture with one legend, that of ``axis``, below it."""
    handles, labels = axis.get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 5 else 4
    room = figure.get_figwidth() / (0.09 * max(map(len, labels)) + 0.6)  # inches, at 10 points
    columns = max(1, min(columns, int(room)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"figure: cannot write to {path}: {error.strerror}") from error


def draw_scaling(found: Scaling, path: Path) -> None:
    """Wire bytes per worker and emulated time per step against the number of workers.

    A circle marks where gathering stops paying: a dense ring all-reduce would send no more.
    """
    figure = _figure_class()(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for n, fitted in enumerate(found.growth):
        colour, dash = COLOURS[n % len(COLOURS)], DASHES[n % len(DASHES)]
        rows = [row for row in found.rows if row["method"] == fitted["method"]]
        workers = [row["workers"] for row in rows]
        limit = fitted["stops_paying_at"]
        label = fitted["method"] if limit is None else f"{fitted['method']} (pays below {limit:,})"
        for axis, key in zip(axes, ("wire_bytes_per_worker", "emulated_s_per_step"), strict=True):
            values = [row[key] for row in rows]
            axis.plot(workers, values, color=colour, label=label, linestyle=dash, marker=".")
        if limit is not None and min(workers) <= limit <= max(workers):
            sent = fitted["bytes"] * (limit - 1)
            axes[0].plot([limit], [sent], color=colour, marker="o", markersize=9, fillstyle="none")
    axes[0].set_yscale("log")
    titles = ("wire bytes per worker and step", "emulated seconds per step")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xscale("log")
        axis.set_xlabel("workers")
        axis.set_ylabel(title)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, axes[0], path)


def draw_retiming(found: Retiming, path: Path) -> None:
    """Compute utilisation against the bandwidth of the links between islands: a colour per run, a
    dash per network. Raises InputError if no bandwidth was swept."""
    swept = [row for row in found.rows if row["bytes_per_s"] and np.isfinite(row["bytes_per_s"])]
    if not swept:
        raise InputError(
            "figure: it shows utilisation against bandwidth; give --bandwidth, "
            "for example 1Mbit/s,10Mbit/s,…,100Gbit/s"
        )
    figure = _figure_class()(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    short = labels(swept)
    keys = [key for key in differing(swept) if key != "bandwidth"]
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in swept:
        name, method = short[row["folder"]], row["method"]
        run = name if method in name else f"{name} ({method})"
        share = row["compute_utilization"] or 0.0  # a run that stalls gets nowhere
        points = lines.setdefault((run, network_text(row, keys)), [])
        points.append((8 * row["bytes_per_s"], 100 * share))
    known, networks = (list(dict.fromkeys(part)) for part in zip(*lines, strict=True))
    for (run, network), points in lines.items():
        colour = COLOURS[known.index(run) % len(COLOURS)]
        dash = DASHES[networks.index(network) % len(DASHES)]
        label = f"{run}, {network}" if network else run
        rates, shares = zip(*sorted(points), strict=True)
        axis.plot(rates, shares, color=colour, label=label, linestyle=dash, marker=".")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda bits, _: format_bandwidth(bits / 8))
    axis.set_ylim(0, 102)
    axis.set_xlabel("bandwidth of every link between islands")
    axis.set_ylabel("time spent computing (%)")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, axis, path)
