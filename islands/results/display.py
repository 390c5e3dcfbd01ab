"""What the terminal shows: progress while a run goes on, and in the end what it cost.

Progress goes to stderr, so that stdout carries nothing but the result. On a terminal it is one
block that is redrawn; anywhere else (a log, a pipe, CI) plain lines at a pace that fills no log.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from islands.results.folder import EXPERIMENT
from islands.results.pace_rows import pace_rows
from islands.units import format_bytes, format_seconds

WIDTH = 80
PLAIN_PACE_S = (
    10.0  # without a terminal: a line at each tenth of the steps, and at least this often
)
MOST_LINKS = 12

Summary: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[str, str, str, RenderableType]  # section, label, value, note


@dataclass(frozen=True)
class Progress:
    """Where a run is. Bytes are totals so far; a loss is None until there is one."""

    step: int
    steps: int
    workers: int
    rounds: int
    train_loss: float | None
    val_loss: float | None
    emulated_s: float
    wire_bytes: int
    wan_bytes: int
    wall_s: float
    phase: str


# --- numbers for people ---------------------------------------------------------------------------


def exact_bytes(count: float) -> str:
    """What a formula can be checked against: ``322.56 B``, ``16,128 B``; rounded from 100 kB on."""
    return f"{count:,.2f}".removesuffix(".00") + " B" if count < 1e5 else format_bytes(count)


def format_loss(loss: float | None) -> str:
    """Four decimals. JSON has no NaN: the loss of a run that diverged may also arrive as None."""
    return "nan (diverged)" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"


def share_text(part: float) -> str:
    """``12.5 %``."""
    return "<0.1 %" if 0 < part < 1e-3 else f"{100 * part:.1f} %"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# --- while it runs --------------------------------------------------------------------------------


def remaining_s(begin: Progress, now: Progress) -> float | None:
    """Wall seconds left at the pace since ``begin`` (when training began: start-up is no pace)."""
    done = now.step - begin.step
    return (now.wall_s - begin.wall_s) / done * (now.steps - now.step) if done > 0 else None


class LiveDisplay:
    """Shows the latest Progress while the block is open; nothing with ``quiet``."""

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._quiet = quiet
        self._live: Live | None = None
        self._begin: Progress | None = None
        self._now: Progress | None = None
        self._printed: Progress | None = None

    def __enter__(self) -> LiveDisplay:
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        if terminal and not self._quiet:
            self._live = Live(
                console=self._console,
                get_renderable=self._block,
                # A redirected stdout belongs to its reader; only a shared screen is kept in order.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
        return self

    def update(self, progress: Progress) -> None:
        """Take note of where the run is; cheap, since a terminal is redrawn at its own pace."""
        if self._begin is None or progress.step == 0:
            self._begin = progress
        self._now = progress
        if self._live is None and not self._quiet and self._due(progress):
            line = plain_line(progress, remaining_s(self._begin, progress))
            print(line, file=self._console.file, flush=True)
            self._printed = progress

    def _block(self) -> RenderableType:
        if self._begin is None or self._now is None:
            return ""
        return live_block(self._now, remaining_s(self._begin, self._now))

    def _due(self, progress: Progress) -> bool:
        last = self._printed
        return (
            last is None
            or progress.phase != last.phase
            or 10 * progress.step // progress.steps > 10 * last.step // last.steps
            or progress.wall_s - last.wall_s >= PLAIN_PACE_S
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.transient = error is None  # where a failed run stood stays on the screen
            self._live.stop()
            self._live = None


def plain_line(progress: Progress, left_s: float | None) -> str:
    """One line for a log; before the first step only the phase and how long it has taken."""
    wall = f"wall {format_seconds(progress.wall_s)}"
    if progress.step == 0:
        return f"{progress.phase}, {wall}"
    parts = [
        f"{progress.phase}: step {progress.step:,}/{progress.steps:,}",
        _plural(progress.rounds, "round"),
    ]
    for name, loss in (("train", progress.train_loss), ("val", progress.val_loss)):
        if loss is not None:
            parts.append(f"{name} {format_loss(loss)}")
    parts += [
        f"emulated {format_seconds(progress.emulated_s)}",
        f"wire {format_bytes(progress.wire_bytes)}",
        f"WAN {format_bytes(progress.wan_bytes)}",
        wall,
    ]
    if left_s is not None and progress.step < progress.steps:
        parts.append(f"left {format_seconds(left_s)}")
    return ", ".join(parts)


def live_block(progress: Progress, left_s: float | None) -> RenderableType:
    """Three lines: the bar with the time left, and the numbers under their names."""
    left = "" if left_s is None else f"{format_seconds(left_s)} left"
    bar = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None, None):
        bar.add_column(ratio=ratio, no_wrap=True)
    bar.add_row(
        Text(progress.phase, style="bold"),
        ProgressBar(total=progress.steps, completed=progress.step, pulse=progress.step == 0),
        Text(f"{progress.step:,}/{progress.steps:,} steps"),
        Text(left, style="dim"),
    )
    numbers = {
        "rounds": f"{progress.rounds:,}",
        "train loss": _loss_so_far(progress.train_loss),
        "val loss": _loss_so_far(progress.val_loss),
        "emulated": format_seconds(progress.emulated_s),
        "wire": format_bytes(progress.wire_bytes),
        "WAN": format_bytes(progress.wan_bytes),
    }
    table = Table.grid(padding=(0, 1))
    for width in (9, 14, 14, 12, 10, 10):  # fixed, so that nothing moves when a number grows
        table.add_column(no_wrap=True, width=width)
    table.add_row(*numbers, style="dim")
    table.add_row(*numbers.values())
    return Constrain(Group(bar, table), WIDTH)


def _loss_so_far(loss: float | None) -> str:
    return "-" if loss is None else format_loss(loss)


# --- in the end -----------------------------------------------------------------------------------


def print_final(summary: Summary, folder: Path, console: Console | None = None) -> None:
    """Print what a run cost, where its results are, and what to try next.

    The tables keep to 80 columns; paths and commands stay on one line however long they are,
    because a line that was broken cannot be copied.
    """
    console = console or Console()
    where = _from_here(folder)
    console.print(final_table(summary))
    console.print()
    console.print(Text("results ", style="bold cyan") + Text(str(where)), soft_wrap=True)
    console.print(Text("try next", style="bold cyan"))
    for why, command in next_commands(summary, where):
        console.print(Text(f"  # {why}", style="dim"), soft_wrap=True)
        console.print(Text(f"  {command}"), soft_wrap=True)


def final_table(summary: Summary) -> RenderableType:
    """The cost of a run as a block of at most 80 columns; ``summary`` as in ``summary.json``."""
    title = Text(str(summary["method"]), style="bold")
    workers, islands, steps = (
        _plural(summary[noun], noun.removesuffix("s")) for noun in ("workers", "islands", "steps")
    )
    title.append(f" with {workers} on {islands}, {steps}, seed {summary['seed']}", "not bold")
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(style="bold cyan", no_wrap=True)
    numbers.add_column(no_wrap=True)
    numbers.add_column(justify="right", no_wrap=True)
    numbers.add_column(style="dim", overflow="fold")
    for rows in (_quality_rows, _time_rows, pace_rows, _byte_rows, _trouble_rows):
        for row in rows(summary):
            numbers.add_row(*row)
    parts: list[RenderableType] = [title, "", numbers]
    for note in summary.get("notes", ()):
        parts += ["", Text(f"note: {note}", style="yellow")]
    if summary["links"]:
        parts += ["", _link_table(summary["links"])]
    return Constrain(Group(*parts), WIDTH)


def _quality_rows(summary: Summary) -> Iterator[Row]:
    yield "model", "parameters", f"{summary['parameters']:,}", ""
    yield "", "tokens", f"{summary['tokens']:,}", ""
    if summary.get("warm_start"):  # a path may be long: it folds in the last column
        start = summary["warm_start"]
        steps = isinstance(start, int)
        note = "dense, before the emulated run" if steps else start
        yield "", "warm start", _plural(start, "step") if steps else "a model", note
    if summary.get("shards") == "clustered":
        sizes = summary["shard_sizes"]
        note = f"to {max(sizes):,} tokens, in {_plural(len(sizes), 'cluster')}"
        yield "", "shards", f"{min(sizes):,}", note
    perplexity = summary["final_perplexity"]
    finite = perplexity is not None and math.isfinite(perplexity)
    note = f"perplexity {perplexity:,.2f}" if finite and perplexity < 1e6 else ""
    yield "loss", "validation", format_loss(summary["final_val_loss"]), note
    yield "", "best", format_loss(summary["best_val_loss"]), ""


#: What the parts of a wait are called.
WAITS = {
    "background_s": "queueing behind other jobs",
    "queue_s": "queueing behind our own transfers",
    "transmission_s": "transmission",
    "propagation_s": "propagation",
    "others_s": "waiting for other workers",
    "away_s": "away",
}


def _time_rows(summary: Summary) -> Iterator[Row]:
    elapsed, wait = summary["emulated_s"], summary["wait_s"]
    busy = share_text(summary["compute_utilization"])
    yield "time", "emulated", format_seconds(elapsed), "when the last worker ends"
    yield "", "computing", format_seconds(summary["compute_s"]), f"{busy} compute utilization"
    yield "", "waiting", format_seconds(wait), "for synchronisations, mean over workers"
    spent = summary["time"]
    whole = sum(spent.values())
    for name, what in WAITS.items():
        if spent[name] > 5e-4 * whole:
            share = share_text(spent[name] / whole)
            yield "", "", format_seconds(spent[name]), f"{share} {what}"
    yield "", "on this host", format_seconds(summary["wall_s"]), "wall"


def _byte_rows(summary: Summary) -> Iterator[Row]:
    if summary.get("chosen_collective"):
        why = summary["chosen_collective"].split(": ", 2)[-1]
        yield "bytes", "collective", summary["collective"], f"the quickest: {why}"
    rounds = _plural(summary["syncs"], "round")
    payload = exact_bytes(summary["payload_bytes_per_sync"])
    section = "" if summary.get("chosen_collective") else "bytes"
    yield section, "payload per sync", payload, f"from each worker in each of {rounds}"
    peak = summary.get("peak_payload_bytes_per_step")
    note = ""
    if peak and peak != summary["payload_bytes_per_sync"]:  # fragments: not all at once
        note = f"at most {exact_bytes(peak)} after one step"
    yield "", "payload per step", exact_bytes(summary["payload_bytes_per_step"]), note
    if summary["workers"] == 1:
        yield "", "wire per step", exact_bytes(0), "nobody to synchronise with"
        return
    wire = summary["wire_bytes_per_step"]
    yield "", "wire per step", exact_bytes(wire), _beside_dense(wire, summary)
    ring = summary.get("ring_wire_bytes_per_step")
    if ring is not None:
        note = f"partial sums in fp32; {exact_bytes(ring['requantised'])} requantised"
        yield "", "a ring instead", exact_bytes(ring["fp32"]), note
    yield "", "wire in all", format_bytes(summary["wire_bytes_total"]), "sent by all workers"
    yield "", "over the WAN", format_bytes(summary["wan_bytes"]), "on all links between islands"
    yield "", "inside LANs", format_bytes(summary["lan_bytes"]), ""
    for currency, cost in summary["egress_cost"].items():
        yield "cost", "egress", f"{cost:,.4g} {currency}", "at the links' prices"


def _trouble_rows(summary: Summary) -> Iterator[Row]:
    for label, key, what in (
        ("dropped", "dropped_syncs", "contributions"),
        ("unheard", "dropped_results", "results lost on their way to a worker"),
        ("rejected", "rejected_payloads", "payloads"),
        ("unsynced", "unsynced_steps", "local steps"),
    ):
        if summary[key]:
            yield "", label, f"{summary[key]:,}", Text(what, style="yellow")
    fates = summary["contributions"]
    for label, what in (("late", "contributions"), ("absent", "worker × round")):
        if fates[label]:
            yield "", label, f"{fates[label]:,}", Text(what, style="yellow")
    if summary["wasted_bytes"]:
        wasted = format_bytes(summary["wasted_bytes"])
        yield "", "wasted", wasted, Text("payloads not combined, rounds run again", style="yellow")
    for kind, seconds in summary["lost_s"].items():
        if seconds is None:
            what, lost = f"lost to {kind}: a run without it would tell", "?"
        else:
            what, lost = f"lost to {kind}, mean over workers", format_seconds(seconds)
        yield "", "", lost, Text(what, style="yellow")


def _beside_dense(wire: float, summary: Summary) -> str:
    """Wire bytes against averaging all gradients in bf16 after every step with a ring all-reduce,
    which sends 2(p−1)/p · 2N bytes per worker and step."""
    p = summary["workers"]
    dense = 2 * (p - 1) / p * 2 * summary["parameters"]
    against = f"dense in bf16: {exact_bytes(dense)}"
    if wire <= 0:
        return f"nothing; {against}"
    if math.isclose(wire, dense, rel_tol=5e-3):
        return f"the same as {against}"
    fewer = wire < dense
    ratio = dense / wire if fewer else wire / dense
    return f"{ratio:,.1f} x {'less' if fewer else 'more'} than {against}"


def _link_table(links: Mapping[str, Mapping[str, float]]) -> RenderableType:
    busiest = sorted(links.items(), key=lambda item: -item[1]["utilization"])
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold cyan")
    table.add_column("link", overflow="fold")
    shared = any(link["background_bytes"] for link in links.values())
    columns = ("ours" if shared else "bytes", "others'", "busy", "utilization", "95 %", "peak")
    for name in columns if shared else (columns[0], *columns[2:]):
        table.add_column(name, justify="right", no_wrap=True)
    for name, link in busiest[:MOST_LINKS]:
        others = [format_bytes(link["background_bytes"])] if shared else []
        seconds = [link["p95_utilization"], link["peak_utilization"]]
        table.add_row(
            Text(name),
            format_bytes(link["bytes"] - link["background_bytes"]),
            *others,
            format_seconds(link["busy_s"]),
            share_text(link["utilization"]),
            *("" if share is None else share_text(share) for share in seconds),
        )
    if len(busiest) > MOST_LINKS:
        table.add_row(Text(f"and {len(busiest) - MOST_LINKS} less busy ones", style="dim"))
    return table


def next_commands(summary: Summary, folder: Path) -> list[tuple[str, str]]:
    """Two (reason, command) pairs: the same run with another method, and on another network."""
    if summary["method"] == "dense":
        method = ("the same, synchronising seldom", ["--method", "diloco"])
    else:
        method = ("the same, synchronising after every step", ["--method", "dense"])
    wan = {name: link for name, link in summary["links"].items() if not name.startswith("lan:")}
    if wan:
        busiest = max(wan, key=lambda name: wan[name]["utilization"])
        setting = f"cluster.{_path_of(busiest)}.bandwidth=10 Mbit/s"
        network = ("the same over a slow link", ["--set", setting])
    else:
        network = ("the same on two islands", ["--cluster", "two_islands"])
    again = shlex.join(["islands", "run", "--config", str(folder / EXPERIMENT)])
    return [(why, _in_width(again, shlex.join(change))) for why, change in (method, network)]


def _path_of(link: str) -> str:
    """Where a cluster file describes the link."""
    wire, _, rest = link.rpartition(":")
    if wire in ("uplink", "downlink"):
        return f"islands.{rest}.{wire}"
    return {"": "backbone", "default": "default_link"}.get(wire, f"links.{wire}")


def _in_width(command: str, option: str) -> str:
    """A command on one line if it fits, else continued on a second one as a shell reads it."""
    fits = len(command) + len(option) + 3 <= WIDTH
    return f"{command} {option}" if fits else f"{command} \\\n    {option}"


def _from_here(folder: Path) -> Path:
    """The path relative to the current folder if it lies inside: shorter to read and to type."""
    absolute, here = folder.absolute(), Path.cwd()
    return absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
