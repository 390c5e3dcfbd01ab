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

from islands.clock import ComputeModel
from islands.network import WorkerClock
from islands.optim import LearningRate
from islands.results.step_log import StepLog
from islands.results.tables import SCHEMAS, TRACE, TableWriter
from islands.trace import (
    Bytes,
    Compute,
    Control,
    Idle,
    Join,
    Mark,
    Members,
    Op,
    Pass,
    Receive,
    Send,
)

if TYPE_CHECKING:
    from islands.network import LinkTotals, SyncTiming, Timings
    from islands.network.pace import Pace
    from islands.protocols import Likeness, Part

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
        mortal: bool = False,
    ) -> None:
        """``mortal``: workers may die, so that the trace is written at the end."""
        self._tables = {name: TableWriter(folder, name) for name in [*SCHEMAS, "trace"]}
        self._compute = compute
        self._mortal = mortal
        self._steps = StepLog(island_of, steps, rate)
        self._traces: list[deque[Op]] = [deque() for _ in island_of]  # not yet written
        self._sizes: dict[tuple[int, int, int], Bytes] = {}
        self._parts: deque[Part] = deque()  # of closed rounds, in the order of their closing
        self._passed: dict[tuple[int, int, int], SyncTiming] = {}  # timed, not yet written
        self._losses_at: dict[int, float] = {}
        self._times_at: dict[int, float] = {}
        self._last_flush = time.monotonic()
        self.rounds = 0  # that have rows
        self.unheard = 0  # results that were lost on their way to a worker
        self.status: Counter[str] = Counter()
        self.payload_bytes = 0
        self.payloads = 0
        self.sent: Counter[int] = Counter()  # payloads by fragment
        self.largest: Counter[int] = Counter()  # of each fragment in closed rounds, in bytes
        self.synced_at = [0] * fragments  # steps that each fragment's last round covered
        self.evals: list[tuple[int, float, float]] = []  # step, emulated time, loss
        self.clocks: Sequence[WorkerClock] = [WorkerClock()] * len(island_of)
        self.links: dict[str, LinkTotals] = {}
        self.pace: Pace | None = None  # of the wall clock, in the end
        self.wire_bytes = 0
        self.wasted_bytes = 0  # payloads that were not combined, and collectives that were aborted
        self.lost_s: dict[str, float] = {}  # by kind of fault, summed over the workers

    # --- from the engine --------------------------------------------------------------------------
    def losses(self, worker: int, losses: Sequence[float]) -> None:
        self._steps.losses(worker, losses)

    def absent(self, worker: int, first: int, last: int) -> None:
        self._steps.absent(worker, first, last)

    def closed(self, parts: Sequence[Part]) -> None:
        self._parts.append(parts[0]._replace(first=True))
        self._parts.extend(parts[1:])

    def missed(self, parts: Sequence[Part]) -> None:
        """More is known of rounds that closed before."""
        self._parts.extend(parts)
        self._write_syncs()

    def stopped(self, worker: int, step: int) -> None:
        """The worker died after ``step`` local steps: it goes on with nothing that it was told of,
        and what it did in advance it has not done."""
        kept: deque[Op] = deque()
        ops = iter(self._traces[worker])
        for op in ops:
            if isinstance(op, Compute) and op.first + op.count > step:
                if op.first < step:
                    kept.append(Compute(op.first, step - op.first))
                break
            kept.append(op)
        for op in ops:
            if isinstance(op, Send):
                self.payload_bytes -= self._sizes.pop((worker, op.fragment, op.version)).total
                self.sent[op.fragment] -= 1
                self.payloads -= 1
        self._traces[worker] = kept
        for n, part in enumerate(self._parts):
            if part.worker == worker and part[:3] not in self._passed:
                self._parts[n] = part._replace(passes=False)
        self._write_syncs()

    def spent(self, wire_bytes: int) -> None:
        """Wire bytes of collectives that were aborted, or of workers that died in one."""
        self.wire_bytes += wire_bytes
        self.wasted_bytes += wire_bytes

    def unused(self, nbytes: int) -> None:
        """Payloads that were to count in a later round, which never came."""
        self.wasted_bytes += nbytes

    def lost(self, kind: str, worker: int, seconds: float) -> None:
        """Emulated time that a kind of fault cost a worker."""
        self.lost_s[kind] = self.lost_s.get(kind, 0.0) + seconds

    def compared(self, pairs: Sequence[Likeness]) -> None:
        columns = zip(*pairs, strict=True)
        writer = self._tables["similarity"]
        writer.append(**dict(zip(writer.schema.names, columns, strict=True)))

    def evaluated(self, step: int, loss: float, time_s: float | None = None) -> None:
        """``time_s``: the moment, unless the network will tell it."""
        self._losses_at[step] = loss
        if time_s is not None:
            self._times_at[step] = time_s
        self._write_evals()

    def traced(self, ops: Sequence[tuple[int, Op]]) -> None:
        for worker, op in ops:
            waiting = self._traces[worker]
            if isinstance(op, Send):
                self._sizes[worker, op.fragment, op.version] = op.size
                self.payload_bytes += op.size.total
                self.payloads += 1
                self.sent[op.fragment] += 1
            last = waiting[-1] if waiting else None
            # How computing was cut into plans is the host's affair and not in the trace.
            if (
                isinstance(op, Compute)
                and isinstance(last, Compute)
                and last.first + last.count == op.first
            ):
                waiting[-1] = Compute(last.first, last.count + op.count)
            else:
                waiting.append(op)
        if self._mortal:  # who dies takes back what it did in advance
            return
        while all(len(waiting) > 1 for waiting in self._traces):  # the last one may still grow
            self._write_trace([(w, waiting.popleft()) for w, waiting in enumerate(self._traces)])

    def _write_trace(self, ops: Sequence[tuple[int, Op]]) -> None:
        columns = zip(*(self._trace_row(worker, op) for worker, op in ops), strict=True)
        writer = self._tables["trace"]
        writer.append(**dict(zip(writer.schema.names, columns, strict=True)))

    def _trace_row(self, worker: int, op: Op) -> tuple[Any, ...]:
        row: dict[str, Any] = dict.fromkeys(TRACE.names)
        row.update(worker=worker, op=type(op).__name__.lower())
        match op:
            case Send(fragment, version, step, size, itemsize):
                row.update(fragment=fragment, version=version, step=step, itemsize=itemsize)
                row.update(zip(("value_bytes", "index_bytes", "scale_bytes"), size, strict=True))
            case Receive(fragment, version):
                row.update(fragment=fragment, version=version)
            case Compute(first, count):
                seconds = self._compute.seconds(worker, first, count)
                row.update(step=first, count=count, seconds=seconds)
            case Members(fragment, version, workers):
                row.update(fragment=fragment, version=version, members=workers)
            case Mark(step) | Pass(step) | Join(step):
                row.update(step=step)
            case Control(nbytes):
                row.update(value_bytes=nbytes)
            case Idle(until_s):
                row.update(seconds=(until_s,))
        return tuple(row.values())

    # --- from the network -------------------------------------------------------------------------
    def timed(self, timings: Timings) -> None:
        for worker, first, starts, ends in timings.steps:
            self._steps.times(worker, first, starts, ends)
        rows = self._steps.rows()
        if rows is not None:
            self._tables["steps"].append(**rows)
        for sync in timings.syncs:
            if sync.step:  # not of one who only looked on
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
        self.pace = timings.pace
        self.lost_s.update(timings.lost_s)
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
        """Local steps that every worker has taken, or takes no part in, and that have their times;
        none after the last one that anybody took."""
        return self._steps.done

    @property
    def steps_taken(self) -> int:
        """Local steps of all workers together, as far as :attr:`steps_done`."""
        return self._steps.taken

    @property
    def wan_bytes(self) -> int:
        """Bytes of this run over all links between islands so far; a route over two links counts
        twice, other jobs' transfers not at all."""
        wan = (t for name, t in self.links.items() if not name.startswith(LAN_PREFIX))
        return sum(t.bytes - t.background_bytes for t in wan)

    @property
    def lan_bytes(self) -> int:
        """Bytes that stayed inside an island so far."""
        return sum(t.bytes for name, t in self.links.items() if name.startswith(LAN_PREFIX))

    @property
    def last_loss(self) -> float | None:
        """Mean training loss over the workers' latest steps."""
        return self._steps.last_loss

    @property
    def unsynced_steps(self) -> int:
        """Local steps of a worker that are in no committed round; 0 at a run's regular end."""
        return max(0, self.steps_done - min(self.synced_at))

    # --- rows -------------------------------------------------------------------------------------
    def _write_syncs(self) -> None:
        """Rows of closed rounds whose times are known, in the order of closing and of workers."""
        rows: list[tuple[Any, ...]] = []
        while self._parts:
            part = self._parts[0]
            passes = part.status != "absent" and part.passes
            if passes and part[:3] not in self._passed:
                break
            self._parts.popleft()
            self.status[part.status] += 1
            self.rounds += part.first
            # Who was absent has made no payload for this round; its own count may be the same.
            size = Bytes() if part.status == "absent" else self._sizes.pop(part[:3])
            self.largest[part.fragment] = max(self.largest[part.fragment], size.total)
            if not passes:
                self.wasted_bytes += size.total if part.status != "ok" else 0
                nothing = (size.total, *size, None, None, None)
                rows.append((part.fragment, part.number, None, part.worker, *nothing, part.status))
                continue
            sync = self._passed.pop(part[:3])
            key = (sync.fragment, part.number, sync.step, sync.worker)
            times = (sync.ready_s, sync.done_s, sync.wait_s)
            rows.append((*key, size.total, *size, *times, part.status))
            self.wire_bytes += sync.wire_bytes
            if part.unheard:
                self.unheard += 1
                what = f"fragment {part.fragment} version {part.number}: the result"
                self.event(sync.done_s, "dropped", f"worker {sync.worker}", what)
            if part.status == "ok":
                self.synced_at[sync.fragment] = sync.step
            else:
                self.wasted_bytes += 0 if part.used else size.total
                self._write_fate(sync, part)
        if rows:
            names = self._tables["syncs"].schema.names
            self._tables["syncs"].append(**dict(zip(names, zip(*rows, strict=True), strict=True)))

    def event(self, emulated_s: float, kind: str, subject: str, detail: str) -> None:
        """One row of the events table."""
        self._tables["events"].append(
            emulated_s=[emulated_s], kind=[kind], subject=[subject], detail=[detail]
        )

    def _write_fate(self, sync: SyncTiming, part: Part) -> None:
        what = f"fragment {part.fragment} version {part.number}"
        if part.status == "rejected":
            what += ": NaN or infinite values, or a wrong checksum"
        self.event(sync.done_s, part.status, f"worker {sync.worker}", what)

    def _write_evals(self) -> None:
        for step in sorted(self._losses_at.keys() & self._times_at.keys()):
            row = (step, self._times_at.pop(step), self._losses_at.pop(step))
            self.evals.append(row)
            self._tables["evals"].append(
                step=[row[0]], emulated_s=[row[1]], val_loss=[row[2]], worker=[-1]
            )
