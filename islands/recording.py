"""A run as its folder remembers it: what every worker did, how long it computed, what it reached.

Nothing of the model is needed to time a run again, so its code need not be importable here; the
method's must be, because it says which collective carries a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from islands.clock import RecordedSteps
from islands.config import Experiment, build_experiment
from islands.errors import InputError
from islands.results.folder import EXPERIMENT
from islands.results.tables import read_table
from islands.settings import read_yaml
from islands.trace import (
    Bytes,
    Compute,
    Control,
    End,
    Join,
    Leave,
    Mark,
    Members,
    Op,
    Pass,
    Receive,
    Send,
)

#: Parts of an experiment that only training reads.
_TRAINED = ("model", "data", "optimizer", "warm_start")


@dataclass(frozen=True)
class Recording:
    """A finished run. ``folder`` is as it was given; ``ops`` has every worker's operations in its
    own order, ``compute`` what its steps took, ``evals`` (step, validation loss).

    Operations that depend on who takes part stand right behind its declaration, in every list, so
    that the lists can be handed on in any pieces.
    """

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

    def opening(self, rounds: int) -> tuple[tuple[Op, ...], ...]:
        """The operations up to the result of round number ``rounds``, and an end."""
        if not any(isinstance(op, Members) for ops in self.ops for op in ops):
            return tuple(head(ops, rounds) for ops in self.ops)
        # Where not all do the same, the cut is at one local step: all that precedes it is there.
        most = max(self.ops, key=lambda ops: sum(isinstance(op, Receive) for op in ops))
        taken = [op.first + op.count for op in head(most, rounds) if isinstance(op, Compute)]
        return tuple(_up_to(ops, max(taken, default=0)) for ops in self.ops)

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
    clocked = method.timed or experiment.policy.timed
    if (
        clocked
        or any(fault.kind == "crash" for fault in experiment.faults)
        or "idle" in trace.column("op").unique().to_pylist()
    ):
        raise InputError(
            f"folder: in {folder} rounds closed by the clock ({method.name}), so on another "
            "network something else would have been trained; run it there instead"
        )
    workers = experiment.cluster.workers
    ops: list[list[Op]] = [[] for _ in range(workers)]
    declared: dict[tuple[int, int], Members] = {}
    for worker, op in _ops(trace, folder):
        if isinstance(op, Members):
            declared[op.fragment, op.version] = op
        else:
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
        _declaring(ops, declared),
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


def _up_to(ops: Sequence[Op], step: int) -> tuple[Op, ...]:
    """A worker's operations before it takes more than ``step`` local steps, and an end."""
    for n, op in enumerate(ops):
        if isinstance(op, Join) and op.step > step:
            return (*ops[:n], End())
        if isinstance(op, Compute) and op.first + op.count > step:
            rest = (Compute(op.first, step - op.first),) if op.first < step else ()
            return (*ops[:n], *rest, End())
    return tuple(ops)


def _declaring(
    ops: Sequence[Sequence[Op]], declared: Mapping[tuple[int, int], Members]
) -> tuple[tuple[Op, ...], ...]:
    """Everyone's operations, each right behind the declaration that it depends on.

    Some declaration comes before everything: from then on a timeline knows that members vary.
    """
    found: list[tuple[Op, ...]] = []
    for own in ops:
        behind: list[Op] = [*list(declared.values())[:1]]
        for op in own:
            match op:
                case Send(fragment, version) | Receive(fragment, version):
                    members = declared.get((fragment, version))
                case Mark(step) | Pass(step) | Join(step):
                    members = declared.get((-1, step))
                case _:
                    members = None
            if members is not None:
                behind.append(members)
            behind.append(op)
        found.append(tuple(behind))
    return tuple(found)


def _experiment(folder: Path) -> Experiment:
    path = folder / EXPERIMENT
    found = {key: value for key, value in read_yaml(path).items() if key not in _TRAINED}
    try:
        return build_experiment(found, folder)
    except InputError as error:
        raise InputError(f"folder: {path}: {error}") from None


def _ops(trace: pa.Table, folder: str) -> Iterator[tuple[int, Op]]:
    """(worker, operation) of every row. Computing that was cut into pieces is whole again."""
    for row in trace.drop_columns(["seconds"]).to_pylist():
        key = row["fragment"], row["version"]
        step = row["step"]
        op: Op
        match row["op"]:
            case "compute":
                op = Compute(step, row["count"])
            case "send":
                size = Bytes(row["value_bytes"], row["index_bytes"], row["scale_bytes"])
                op = Send(*key, step, size, row["itemsize"])
            case "receive":
                op = Receive(*key)
            case "mark":
                op = Mark(step)
            case "end":
                op = End()
            case "members":
                op = Members(*key, tuple(row["members"]))
            case "pass":
                op = Pass(step)
            case "join":
                op = Join(step)
            case "leave":
                op = Leave()
            case "control":
                op = Control(row["value_bytes"])
            case name:
                raise InputError(f"folder: the trace in {folder} has an unknown operation {name!r}")
        yield row["worker"], op


def _seconds(trace: pa.Table, worker: int) -> NDArray[np.float64]:
    """Durations of a worker's steps by their number; zero where it took none."""
    steps = trace.filter(
        pc.and_(pc.equal(trace["worker"], worker), pc.equal(trace["op"], "compute"))
    )
    first, count = (steps.column(name).to_numpy() for name in ("step", "count"))
    seconds: pa.ListArray = steps.column("seconds").combine_chunks()
    taken: NDArray[np.float64] = seconds.flatten().to_numpy(zero_copy_only=False)
    found = np.zeros(int((first + count).max(initial=0)))
    begins = np.cumsum(count) - count
    found[np.repeat(first - begins, count) + np.arange(len(taken))] = taken
    return found
