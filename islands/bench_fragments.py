"""What fragments cost the host: a run with P of them beside DiLoCo that synchronises P times as
often.

Both have as many rounds, and a fragment's payload is a P-th. They take turns, and medians of their
seconds per local step are compared: training, tables and trace, without the start of processes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from islands.config import load_experiment
from islands.errors import InputError
from islands.experiment import Runner
from islands.job import prepare

FRAGMENTS, SYNC_EVERY = 8, 80
#: So little to compute per step that rounds show; half of the default cluster.
SETTINGS = (
    "model=gpt-1m",
    "steps=400",
    "data.batch=1",
    "data.window=16",
    "eval.every=0",
    "eval.windows=1",
    "device=cpu",
    "cluster.islands.0.workers=1",
    "cluster.islands.1.workers=1",
)
METHODS: tuple[Mapping[str, Any], Mapping[str, Any]] = (
    {"name": "streaming_diloco", "fragments": FRAGMENTS, "sync_every": SYNC_EVERY},
    {"name": "diloco", "sync_every": SYNC_EVERY // FRAGMENTS},
)


@dataclass(frozen=True)
class FragmentsBench:
    """Host seconds per local step, an entry per repeat: with fragments, and without them but as
    many rounds. ``settings`` are those of the experiment that differ from the defaults."""

    streaming_s: Sequence[float]
    diloco_s: Sequence[float]
    settings: Sequence[str]

    @property
    def ratio(self) -> float:
        """Of the medians: with fragments to without."""
        return statistics.median(self.streaming_s) / statistics.median(self.diloco_s)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**asdict(self), "ratio": self.ratio}

    def print(self) -> None:
        """A line per method, then the ratio."""
        console = Console(highlight=False, soft_wrap=True)
        labels = (f"{FRAGMENTS} fragments, H={SYNC_EVERY}", f"diloco, H={SYNC_EVERY // FRAGMENTS}")
        for label, found in zip(labels, (self.streaming_s, self.diloco_s), strict=True):
            each = ", ".join(f"{1e3 * s:.2f}" for s in found)
            console.print(f"{label:<20}{1e3 * statistics.median(found):8.2f} ms per step ({each})")
        console.print(f"{'ratio':<20}{self.ratio:8.3f}")


def bench_fragments(
    *,
    repeats: int,
    overrides: Sequence[str] = (),
    in_process: bool = False,
    say: Callable[[str], None],
) -> FragmentsBench:
    """Time both methods ``repeats`` times on Ray, after one round that warms up.

    ``overrides`` are settings of the experiment as in ``--set``. Raises InputError for wrong ones.
    """
    if repeats < 1:
        raise InputError(f"repeats: {repeats} is too small; it must be at least 1")
    settings = [*SETTINGS, *overrides]
    jobs = [prepare(load_experiment(None, settings, {"method": method})) for method in METHODS]
    seconds: tuple[list[float], list[float]] = ([], [])
    with Runner(None, in_process) as runner:
        for repeat in range(repeats + 1):
            say(f"repeat {repeat} of {repeats}" if repeat else "warming up")
            for job, found in zip(jobs, seconds, strict=True):
                with tempfile.TemporaryDirectory(prefix="islands-bench-") as folder:
                    summary = runner.run(job, Path(folder))
                if repeat:
                    found.append(summary["wall_s"] / summary["steps"])
    return FragmentsBench(*seconds, settings=settings)
