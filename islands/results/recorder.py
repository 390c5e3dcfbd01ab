"""Joins what was trained with when it happened, and writes it as tables.

Losses and payload sizes come from the engine, times from the network, in either order. Rows are
written in an order that depends on neither: steps by (step, worker), syncs in the order in which
rounds closed, the trace operation by operation of all workers, the rest by the emulated clock.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from islands.clock import ComputeModel
from islands.optim import LearningRate
from islands.results.tables import SCHEMAS, TableWriter
from islands.trace import Bytes, Compute, Mark, Op, Receive, Send

if TYPE_CHECKING:
    from islands.engine import Likeness, Part
    from islands.network import LinkTotals, SyncTiming, Timings

#: How the names of the networks inside islands begin.
LAN_PREFIX = "lan:"
#: Seconds of host time between two closed parts: what a killed run can lose.
FLUSH_EVERY_S = 5.0


class RunRecorder:
    """Keeps one run's tables, trace and totals. Steps in the tables count from 1."""

    def __init__(
        self,
        folder: Path,
        *,
        island_of: Sequence[str],
        steps: int,
        fragments: int,
        rate: LearningRate,
        compute: ComputeModel,
    ) -> None:
        self._tables = {name: TableWriter(folder, name) for name in [*SCHEMAS, "trace"]}
        self._islands = np.array(island_of, dtype=object)
        self._compute = compute
        self._rate = rate
        shape = (len(island_of), steps)
        self._loss, self._start, self._end = np.empty(shape), np.empty(shape), np.empty(shape)
        self._trained = [0] * len(island_of)  # steps with a loss, per worker
        self._timed = [0] * len(island_of)  # steps with times, per worker
        self._written = 0
        self._traces: list[deque[Op]] = [deque() for _ in island_of]  # not yet written
        self._sizes: dict[tuple[int, int, int], Bytes] = {}
        self._parts: deque[Part] = deque()  # of closed rounds, in the order of their closing
        self._passed: dict[tuple[int, int, int], SyncTiming] = {}  # timed, not yet written
        self._losses_at: dict[int, float] = {}
        self._times_at: dict[int, float] = {}
        self._last_flush = time.monotonic()
        self.rounds = 0
        self.status: Counter[str] = Counter()
        self.payload_bytes = 0
        self.payloads = 0
        self.sent: Counter[int] = Counter()  # payloads by fragment
        self.largest: Counter[int] = Counter()  # the largest of each fragment, in bytes
        self.synced_at = [0] * fragments  # steps that each fragment's last round covered
        self.evals: list[tuple[int, float, float]] = []  # step, emulated time, loss
        self.clocks: Sequence[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * len(island_of)
        self.links: dict[str, LinkTotals] = {}
        self.wire_bytes = 0

    # --- from the engine --------------------------------------------------------------------------
    def losses(self, worker: int, losses: Sequence[float]) -> None:
        at = self._trained[worker]
        self._loss[worker, at : at + len(losses)] = losses
        self._trained[worker] = at + len(losses)

    def closed(self, parts: Sequence[Part]) -> None:
        self.rounds += 1
        self._parts.extend(parts)

    def compared(self, pairs: Sequence[Likeness]) -> None:
        columns = zip(*pairs, strict=True)
        writer = self._tables["similarity"]
        writer.append(**dict(zip(writer.schema.names, columns, strict=True)))

    def evaluated(self, step: int, loss: float) -> None:
        self._losses_at[step] = loss
        self._write_evals()

    def traced(self, ops: Sequence[tuple[int, Op]]) -> None:
        for worker, op in ops:
            waiting = self._traces[worker]
            if isinstance(op, Send):
                self._sizes[worker, op.fragment, op.version] = op.size
                self.payload_bytes += op.size.total
                self.payloads += 1
                self.sent[op.fragment] += 1
                self.largest[op.fragment] = max(self.largest[op.fragment], op.size.total)
            # How computing was cut into plans is the host's affair and not in the trace.
            if waiting and isinstance(op, Compute) and isinstance(waiting[-1], Compute):
                waiting[-1] = Compute(waiting[-1].first, waiting[-1].count + op.count)
            else:
                waiting.append(op)
        while all(len(waiting) > 1 for waiting in self._traces):  # the last one may still grow
            self._write_trace([(w, waiting.popleft()) for w, waiting in enumerate(self._traces)])

    def _write_trace(self, ops: Sequence[tuple[int, Op]]) -> None:
        columns = zip(*(self._trace_row(worker, op) for worker, op in ops), strict=True)
        writer = self._tables["trace"]
        writer.append(**dict(zip(writer.schema.names, columns, strict=True)))

    def _trace_row(self, worker: int, op: Op) -> tuple[Any, ...]:
        name = type(op).__name__.lower()
        nothing = (None,) * 5
        if isinstance(op, Send):
            sizes = (*op.size, op.itemsize)
            return (worker, name, op.fragment, op.version, op.step, None, *sizes, None)
        if isinstance(op, Receive):
            return (worker, name, op.fragment, op.version, None, *nothing, None)
        if isinstance(op, Compute):
            seconds = self._compute.seconds(worker, op.first, op.count)
            return (worker, name, None, None, op.first, op.count, *nothing[:4], seconds)
        step = op.step if isinstance(op, Mark) else None
        return (worker, name, None, None, step, *nothing, None)

    # --- from the network -------------------------------------------------------------------------
    def timed(self, timings: Timings) -> None:
        for worker, first, starts, ends in timings.steps:
            self._start[worker, first : first + len(starts)] = starts
            self._end[worker, first : first + len(ends)] = ends
            self._timed[worker] = first + len(ends)
        self._write_steps()
        for sync in timings.syncs:
            self._passed[sync.worker, sync.fragment, sync.version] = sync
        self._write_syncs()
        if timings.transfers:
            columns = zip(*timings.transfers, strict=True)
            names = self._tables["transfers"].schema.names
            self._tables["transfers"].append(**dict(zip(names, columns, strict=True)))
        self._times_at.update(timings.marks)
        self._write_evals()
        self.clocks = timings.clocks
        self.links = timings.links
        if time.monotonic() - self._last_flush > FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Close what there is into readable parts."""
        for writer in self._tables.values():
            writer.flush()
        self._last_flush = time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        rest = [(worker, op) for worker, waiting in enumerate(self._traces) for op in waiting]
        if rest:
            self._write_trace(rest)
        for writer in self._tables.values():
            writer.close()

    @property
    def steps_done(self) -> int:
        """Local steps that every worker has taken and that have their times."""
        return self._written

    @property
    def wan_bytes(self) -> int:
        """Bytes over all links between islands so far; a route over two links counts twice."""
        return sum(t.bytes for name, t in self.links.items() if not name.startswith(LAN_PREFIX))

    @property
    def lan_bytes(self) -> int:
        """Bytes that stayed inside an island so far."""
        return sum(t.bytes for name, t in self.links.items() if name.startswith(LAN_PREFIX))

    @property
    def last_loss(self) -> float | None:
        """Mean training loss over the workers' latest steps."""
        latest = [self._loss[w, n - 1] for w, n in enumerate(self._trained) if n]
        return float(np.mean(latest)) if latest else None

    @property
    def unsynced_steps(self) -> int:
        """Local steps of a worker that are in no committed round; 0 at a run's regular end."""
        return max(0, self._written - min(self.synced_at))

    # --- rows -------------------------------------------------------------------------------------
    def _write_steps(self) -> None:
        first, last = self._written, min(*self._trained, *self._timed)
        if last <= first:
            return
        count, workers = last - first, len(self._trained)
        part = slice(first, last)
        self._tables["steps"].append(
            worker=np.tile(np.arange(workers), count),
            island=np.tile(self._islands, count),
            step=np.repeat(np.arange(first + 1, last + 1), workers),
            loss=self._loss[:, part].T.ravel(),
            lr=np.repeat([self._rate.at(step) for step in range(first, last)], workers),
            start_s=self._start[:, part].T.ravel(),
            end_s=self._end[:, part].T.ravel(),
        )
        self._written = last

    def _write_syncs(self) -> None:
        """Rows of closed rounds whose times are known, in the order of closing and of workers."""
        rows = []
        while self._parts and self._parts[0][:3] in self._passed:
            part = self._parts.popleft()
            sync = self._passed.pop(part[:3])
            size = self._sizes.pop(part[:3])
            key = (sync.fragment, sync.version, sync.step, sync.worker)
            times = (sync.ready_s, sync.done_s, sync.wait_s)
            rows.append((*key, size.total, *size, *times, part.status))
            self.status[part.status] += 1
            self.wire_bytes += sync.wire_bytes
            if part.status == "ok":
                self.synced_at[sync.fragment] = sync.step
            else:
                self._write_rejection(sync)
        if rows:
            names = self._tables["syncs"].schema.names
            self._tables["syncs"].append(**dict(zip(names, zip(*rows, strict=True), strict=True)))

    def event(self, emulated_s: float, kind: str, subject: str, detail: str) -> None:
        """One row of the events table."""
        self._tables["events"].append(
            emulated_s=[emulated_s], kind=[kind], subject=[subject], detail=[detail]
        )

    def _write_rejection(self, sync: SyncTiming) -> None:
        what = f"fragment {sync.fragment} version {sync.version}: NaN or infinite values"
        self.event(sync.done_s, "rejected", f"worker {sync.worker}", what)

    def _write_evals(self) -> None:
        for step in sorted(self._losses_at.keys() & self._times_at.keys()):
            row = (step, self._times_at.pop(step), self._losses_at.pop(step))
            self.evals.append(row)
            self._tables["evals"].append(
                step=[row[0]], emulated_s=[row[1]], val_loss=[row[2]], worker=[-1]
            )
