"""A run as its folder remembers it: what every worker did, how long it computed, what it reached.

Nothing of the model is needed to time a run again, so its code need not be importable here; the
method's must be, because it says which collective carries a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from islands.clock import RecordedSteps
from islands.config import Experiment, build_experiment
from islands.errors import InputError
from islands.results.folder import EXPERIMENT
from islands.results.tables import read_table
from islands.settings import read_yaml
from islands.trace import Bytes, Compute, End, Mark, Op, Receive, Send

#: Parts of an experiment that only training reads.
_TRAINED = ("model", "data", "optimizer", "warm_start")


@dataclass(frozen=True)
class Recording:
    """A finished run. ``folder`` is as it was given; ``ops`` has every worker's operations in its
    own order, ``compute`` what its steps took, ``evals`` (step, validation loss)."""

    folder: str
    experiment: Experiment
    ops: tuple[tuple[Op, ...], ...]
    compute: RecordedSteps
    evals: tuple[tuple[int, float], ...]

    @property
    def workers(self) -> int:
        return len(self.ops)

    @property
    def rounds(self) -> int:
        """Rounds that each worker received the result of."""
        return max(sum(isinstance(op, Receive) for op in ops) for ops in self.ops)

    @cached_property
    def payload_bytes(self) -> float:
        """Mean payload of one worker in one round."""
        sizes = [op.size.total for ops in self.ops for op in ops if isinstance(op, Send)]
        return sum(sizes) / max(1, len(sizes))


def read_recording(folder: str) -> Recording:
    """The run in a result folder.

    Raises InputError if there is none, it did not come to its end, or its rounds closed by the
    clock.
    """
    trace, evals = (read_table(Path(folder), name) for name in ("trace", "evals"))
    experiment = _experiment(Path(folder))
    method = experiment.method
    if method.timed:
        raise InputError(
            f"folder: in {folder} rounds closed by the clock ({method.name}), so on another "
            "network something else would have been trained; run it there instead"
        )
    workers = experiment.cluster.workers
    ops: list[list[Op]] = [[] for _ in range(workers)]
    for worker, op in _ops(trace, folder):
        ops[worker].append(op)
    unfinished = [w for w, own in enumerate(ops) if not (own and isinstance(own[-1], End))]
    if unfinished:
        raise InputError(
            f"folder: the run in {folder} did not come to its end (no end of worker "
            f"{unfinished[0]} in its trace); only whole runs can be timed again"
        )
    losses = zip(*(evals.column(n).to_pylist() for n in ("step", "val_loss")), strict=True)
    return Recording(
        folder,
        experiment,
        tuple(map(tuple, ops)),
        RecordedSteps(tuple(_seconds(trace, worker) for worker in range(workers))),
        tuple(sorted(losses)),
    )


def head(ops: Sequence[Op], rounds: int) -> tuple[Op, ...]:
    """A worker's operations up to the result of its round number ``rounds``, and an end."""
    seen = 0
    for n, op in enumerate(ops, start=1):
        seen += isinstance(op, Receive)
        if seen == rounds:
            return (*ops[:n], End())
    return tuple(ops)


def _experiment(folder: Path) -> Experiment:
    path = folder / EXPERIMENT
    found = {key: value for key, value in read_yaml(path).items() if key not in _TRAINED}
    try:
        return build_experiment(found, folder)
    except InputError as error:
        raise InputError(f"folder: {path}: {error}") from None


def _ops(trace: pa.Table, folder: str) -> Iterator[tuple[int, Op]]:
    """(worker, operation) of every row. Computing that was cut into pieces is whole again."""
    names = [name for name in trace.schema.names if name != "seconds"]
    for row in zip(*(trace.column(name).to_pylist() for name in names), strict=True):
        worker, name, fragment, version, step, count, values, indices, scales, itemsize = row
        op: Op
        match name:
            case "compute":
                op = Compute(step, count)
            case "send":
                op = Send(fragment, version, step, Bytes(values, indices, scales), itemsize)
            case "receive":
                op = Receive(fragment, version)
            case "mark":
                op = Mark(step)
            case "end":
                op = End()
            case _:
                raise InputError(f"folder: the trace in {folder} has an unknown operation {name!r}")
        yield worker, op


def _seconds(trace: pa.Table, worker: int) -> NDArray[np.float64]:
    """Durations of a worker's steps, in their order."""
    own = np.flatnonzero(trace.column("worker").to_numpy() == worker)
    seconds: pa.ListArray = trace.column("seconds").take(pa.array(own)).combine_chunks()
    found: NDArray[np.float64] = seconds.flatten().to_numpy(zero_copy_only=False)
    return found
