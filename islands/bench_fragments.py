"""What fragments cost the host: a run with P of them beside DiLoCo that synchronises P times as
often.

Both have as many rounds; a fragment's payload is a P-th. Both take turns, and medians of their
seconds per step are compared: training, tables and trace, without the start of processes.

Run as ``python -m islands.bench_fragments [--in-process] [key.path=value …]``, where a setting is
one of the experiment (``model=gpt-15m``, ``steps=500``).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from islands.config import load_experiment
from islands.errors import InputError, RunError
from islands.experiment import Runner
from islands.job import prepare

FRAGMENTS, SYNC_EVERY, REPEATS = 8, 80, 5
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
METHODS = {
    f"streaming, {FRAGMENTS} fragments": {
        "name": "streaming_diloco",
        "fragments": FRAGMENTS,
        "sync_every": SYNC_EVERY,
    },
    f"diloco, H/{FRAGMENTS}": {"name": "diloco", "sync_every": SYNC_EVERY // FRAGMENTS},
}


def measure(overrides: Sequence[str], in_process: bool) -> dict[str, list[float]]:
    """Host seconds per local step of each method, one entry per repeat."""
    jobs = {}
    for name, method in METHODS.items():
        experiment = load_experiment(None, [*SETTINGS, *overrides], {"method": method})
        jobs[name] = prepare(experiment)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    with Runner(None, in_process) as runner:
        for repeat in range(-1, REPEATS):
            for name, job in jobs.items():
                with tempfile.TemporaryDirectory(prefix="islands-bench-") as folder:
                    summary = runner.run(job, Path(folder))
                if repeat >= 0:  # the first round warms up
                    seconds[name].append(summary["wall_s"] / summary["steps"])
    return seconds


def main(arguments: Sequence[str]) -> None:
    """Measure and print a line per method, then the ratio."""
    overrides = [text for text in arguments if text != "--in-process"]
    seconds = measure(overrides, "--in-process" in arguments)
    medians = [statistics.median(found) for found in seconds.values()]
    for name, found in seconds.items():
        each = ", ".join(f"{1e3 * s:.3f}" for s in found)
        print(f"{name}: {1e3 * statistics.median(found):.3f} ms per step ({each})")
    print(f"ratio: {medians[0] / medians[1]:.3f}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (InputError, RunError) as error:
        sys.exit(f"error: {error}")
