"""``islands compare``: several methods, each at the best of its learning rates, over several seeds.

The protocol: every method is trained with every learning rate of its grid and every seed. A method
stands at the rate with the lowest mean final validation loss; a rate at which any seed diverged
comes after all others. What is reported is the mean and the sample standard deviation over the
seeds.

A study is a folder with one run per method, rate and seed. What is finished there is never trained
again, and every number of the report is read back from the runs, so a study that was interrupted
and taken up again ends like one that was not.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from islands.config import Experiment
from islands.errors import InputError, RunError
from islands.experiment import Runner
from islands.job import as_begun, prepare, undecided
from islands.results.display import format_loss
from islands.results.folder import EXPERIMENT, WRITTEN, holds_run, new_folder, write_text
from islands.results.result import Result
from islands.study import Planned, Study
from islands.units import format_seconds

STUDY = "study.yaml"
RUNS = "study.parquet"

#: ``study.parquet``: one row per run. ``chosen`` is the best rate of its method; a loss of a run
#: that diverged is NaN; ``folder`` is relative to the study's. Bytes are per worker and step;
#: ``dropped_share`` is of the contributions of those who took part.
SCHEMA = pa.schema(
    {
        "method": pa.string(),
        "lr": pa.float64(),
        "seed": pa.int64(),
        "chosen": pa.bool_(),
        "diverged": pa.bool_(),
        "final_val_loss": pa.float64(),
        "best_val_loss": pa.float64(),
        "payload_bytes_per_step": pa.float64(),
        "wire_bytes_per_step": pa.float64(),
        "emulated_s": pa.float64(),
        "steps_to_target": pa.int64(),
        "time_to_target_s": pa.float64(),
        "rejected_payloads": pa.int64(),
        "dropped_share": pa.float64(),
        "folder": pa.string(),
    }
)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """A finished study. ``runs`` are the rows of ``study.parquet``, ``rows`` one per method."""

    folder: Path
    target: float | None
    runs: list[dict[str, Any]]
    rows: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "folder": str(self.folder),
            "target_loss": self.target,
            "rows": self.rows,
            "runs": self.runs,
        }


def compare(
    study: Study,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    address: str | None = None,
    in_process: bool = False,
    quiet: bool = True,
) -> Comparison:
    """Train whatever of the study is not finished yet, and say how the methods compare.

    Args:
        study: what to compare.
        out: the study's folder, new or one to go on with; a fresh ``runs/compare-<n>`` if None.
        overwrite: train everything anew.
        address, in_process: as for ``islands.run``.
        quiet: no line per run on stderr.

    Raises:
        InputError: the study cannot be run as asked, or ``out`` has finished runs of another one.
        RunError: a run failed; the runs that are finished stay.
        KeyboardInterrupt: likewise.
    """

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    planned = study.runs()
    begun = None if out is None or overwrite else _study_folder(out)
    finished = {p.place for p in planned if begun and _is_finished(begun / p.place, p)}
    missing = [p for p in planned if p.place not in finished]
    # Whatever is wrong with any of them shows before the first one.
    begun_as = {
        one.method: prepare(one.experiment).experiment
        for one in {p.method: p for p in missing}.values()
    }
    for one in planned:  # what is decided when a run begins is the same for all of a method
        if begun and one.place in finished and undecided(one.experiment):
            begun_as[one.method] = Experiment.load(begun / one.place / EXPERIMENT)
    missing = [replace(p, experiment=as_begun(p.experiment, begun_as[p.method])) for p in missing]
    with Runner(address, in_process, say) as runner:
        if missing:
            runner.connect()
        folder = new_folder(None, "compare", False) if out is None else _made(_study_folder(out))
        write_text(folder / STUDY, study.dump_yaml())
        if finished:
            say(f"{len(finished)} of {len(planned)} runs in {folder} are finished already")
        for number, one in enumerate(missing, start=1 + len(finished)):
            summary, took_s = _train(runner, one, folder, say)
            loss = format_loss(summary["final_val_loss"])
            say(f"{number}/{len(planned)} {one.title}: loss {loss}, {format_seconds(took_s)}")
    runs = [_outcome(folder, one, study.target) for one in planned]
    rows = summarize_runs(runs)
    chosen = {(row["method"], row["lr"]) for row in rows}
    for run in runs:
        run["chosen"] = (run["method"], run["lr"]) in chosen
    _write_runs(folder / RUNS, runs)
    return Comparison(folder, study.target, runs, rows)


def _train(
    runner: Runner, one: Planned, folder: Path, say: Callable[[str], None]
) -> tuple[dict[str, Any], float]:
    """One run's summary, and the seconds it took. If it does not end, says how to go on."""
    again = f"finished runs stay in {folder}; the same with --out {folder} goes on from there"
    began = time.monotonic()
    try:
        place = new_folder(folder / one.place, one.method, overwrite=True)
        return runner.run(prepare(one.experiment), place), time.monotonic() - began
    except RunError as error:
        raise RunError(f"{one.title}: {error}; {again}") from error
    except KeyboardInterrupt:
        say(again)
        raise


def _study_folder(out: str | Path) -> Path:
    """The folder that was asked for, there or not; a file or a single run is refused."""
    folder = Path(out).absolute()
    if holds_run(folder):
        raise InputError(f"out: {out} holds a single run; give a study another folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out: {out} is a file; name a folder")
    return folder


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out: cannot write to {folder}: {error.strerror}") from error
    return folder


def _is_finished(folder: Path, planned: Planned) -> bool:
    """Whether this run was trained to its end and all of its results are still there.

    Raises InputError if the folder has a finished run with other settings.
    """
    if not all((folder / name).exists() for name in WRITTEN):
        return False
    try:
        result = Result.load(folder)
        evals = result.table("evals").num_rows
        steps = result.table("steps").num_rows
        text = (folder / EXPERIMENT).read_text(encoding="utf-8")
    except (InputError, OSError, UnicodeDecodeError):
        return False
    summary = result.summary
    if summary.get("status") != "done" or not evals:
        return False
    wanted = planned.experiment
    if undecided(wanted):
        wanted = _as_written(wanted, folder / EXPERIMENT)
    if text != wanted.dump_yaml():
        raise InputError(
            f"out: {folder} holds a finished run with other settings; "
            "give another folder, or --overwrite to train everything anew"
        )
    data, optimizer = wanted.data, wanted.optimizer
    tokens = data.batch * (data.window or 0) * optimizer.accumulate
    return bool(steps * tokens == summary.get("tokens"))  # not every worker takes every step


def _as_written(planned: Experiment, path: Path) -> Experiment:
    """With what was decided when the run began; unchanged if that was on another cluster."""
    written = Experiment.load(path)
    same = len(written.cluster.islands) == len(planned.cluster.islands)
    return as_begun(planned, written) if same else planned


def _outcome(folder: Path, planned: Planned, target: float | None) -> dict[str, Any]:
    """A run's row, read back from its folder; ``chosen`` is still open."""
    result = Result.load(folder / planned.place)
    summary = result.summary
    evals = result.table("evals")
    columns = (evals.column(name).to_pylist() for name in ("step", "emulated_s", "val_loss"))
    reached = [(s, t) for s, t, loss in zip(*columns, strict=True) if target and loss <= target]
    first = min(reached, default=(None, None))
    final = _number(summary["final_val_loss"])
    return {
        "method": planned.method,
        "lr": planned.lr,
        "seed": planned.seed,
        "chosen": False,
        "diverged": not math.isfinite(final),
        "final_val_loss": final,
        "best_val_loss": _number(summary["best_val_loss"]),
        "payload_bytes_per_step": summary["payload_bytes_per_step"],
        "wire_bytes_per_step": summary["wire_bytes_per_step"],
        "emulated_s": summary["emulated_s"],
        "steps_to_target": first[0],
        "time_to_target_s": first[1],
        "rejected_payloads": summary["rejected_payloads"],
        "dropped_share": _dropped_share(summary["contributions"]),
        "folder": planned.place,
    }


def _number(value: float | None) -> float:
    """JSON has no NaN: a loss that was none is null there."""
    return math.nan if value is None else value


def _dropped_share(contributions: Mapping[str, int]) -> float:
    made = sum(count for fate, count in contributions.items() if fate != "absent")
    return contributions["dropped"] / made if made else 0.0


def _write_runs(path: Path, runs: Sequence[Row]) -> None:
    unfinished = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_pylist([dict(run) for run in runs], schema=SCHEMA), unfinished)
    unfinished.replace(path)


# ------------------------------------------------------------------------------------- judging it


def summarize_runs(runs: Sequence[Row]) -> list[dict[str, Any]]:
    """One row per method, at the best of its learning rates.

    ``final_val_loss`` and its ``_std`` (sample, n − 1; NaN for one seed) are over all seeds, NaN if
    any diverged. ``steps_to_target`` is the mean over the seeds if all of them ``reached`` it, else
    None. ``lr_at_edge``: a better rate may lie beyond the grid. ``grid`` has every rate's own.
    """
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        rates = list(dict.fromkeys(run["lr"] for run in own))
        grid = [_at_rate(lr, [run for run in own if run["lr"] == lr]) for lr in rates]
        best = min(grid, key=lambda at: (_worst_last(at["final_val_loss"]), at["lr"]))
        seeds = [run for run in own if run["lr"] == best["lr"]]
        everyone = best["reached"] == len(seeds)
        rows.append(
            {
                "method": method,
                **best,
                "lr_at_edge": len(rates) > 1 and best["lr"] in (min(rates), max(rates)),
                "best_val_loss": _mean(seeds, "best_val_loss"),
                "payload_bytes_per_step": _mean(seeds, "payload_bytes_per_step"),
                "wire_bytes_per_step": _mean(seeds, "wire_bytes_per_step"),
                "emulated_s": _mean(seeds, "emulated_s"),
                "dropped_share": _mean(seeds, "dropped_share"),
                "steps_to_target": _mean(seeds, "steps_to_target") if everyone else None,
                "time_to_target_s": _mean(seeds, "time_to_target_s") if everyone else None,
                "grid": grid,
            }
        )
    return rows


def _at_rate(lr: float, seeds: Sequence[Row]) -> dict[str, Any]:
    losses = [run["final_val_loss"] for run in seeds]
    fine = not any(run["diverged"] for run in seeds)
    return {
        "lr": lr,
        "seeds": len(seeds),
        "diverged": sum(run["diverged"] for run in seeds),
        "reached": sum(run["steps_to_target"] is not None for run in seeds),
        "final_val_loss": statistics.fmean(losses) if fine else math.nan,
        "final_val_loss_std": statistics.stdev(losses) if fine and len(losses) > 1 else math.nan,
    }


def _worst_last(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _mean(runs: Sequence[Row], key: str) -> float:
    return statistics.fmean(run[key] for run in runs)
