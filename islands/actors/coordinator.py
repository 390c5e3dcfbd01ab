"""The CoordinatorActor, and how it reaches the other two kinds of actors."""

from __future__ import annotations

import gc
import pickle
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from math import inf
from operator import is_
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from islands.actors.worker import INLINE_BYTES, pack
from islands.compression import Update
from islands.coordinator import Coordinator
from islands.engine import Interrupted
from islands.errors import RunError
from islands.job import Job
from islands.network import Event, Timings
from islands.network.timed import Abort, Action, Kill, Result
from islands.plan import Answer, PlanOp
from islands.plugins import look_also_in
from islands.results.display import Progress
from islands.trace import Op

#: An operation of a plan with its class.
Kind: TypeAlias = tuple[type[PlanOp], PlanOp]

#: Batches of operations that the link actor may have before the engine waits for it.
BATCHES_UNDER_WAY = 4


class RayWorkers:
    """Worker actors: one call per plan, answers as they come."""

    def __init__(self, handles: Sequence[ActorHandle[Any]], island_of: Sequence[str]) -> None:
        self._calls = [handle.run for handle in handles]
        self._island_of = island_of
        self._under_way: dict[ray.ObjectRef[bytes | Answer], int] = {}
        self._last: tuple[list[Kind], list[Update | None], bytes] | None = None

    def share(self, update: Update) -> Update:
        if update.nbytes <= INLINE_BYTES:
            return update
        reference: Update = ray.put(update)  # Ray resolves it when it is passed to a call
        return reference

    def start(self, worker: int, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> None:
        large = [update for update in updates if isinstance(update, ray.ObjectRef)]
        reference = self._calls[worker].remote(self._packed(plan, updates), *large)
        self._under_way[reference] = worker

    def _packed(self, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> bytes:
        """The plan as bytes; those of the last worker if this one's is the same."""
        kinds = [(type(op), op) for op in plan]  # as tuples SendOut(0) and Lost(0) are equal
        if self._last is not None:
            last_kinds, last_updates, packed = self._last
            same = len(last_updates) == len(updates) and all(map(is_, last_updates, updates))
            if same and last_kinds == kinds:
                return packed
        numbers = count()
        small = [next(numbers) if isinstance(u, ray.ObjectRef) else u for u in updates]
        packed = pack(plan, small)
        self._last = (kinds, list(updates), packed)
        return packed

    def answers(self, everyone: bool, within_s: float = inf) -> Iterable[tuple[int, Answer]]:
        # A worker that dies makes its call fail, so these waits end with the plan or its worker.
        waiting = list(self._under_way)
        timeout = None if within_s == inf else within_s
        ready = waiting if everyone else ray.wait(waiting, num_returns=1, timeout=timeout)[0]
        try:
            answers = ray.get(ready)
        except (RayActorError, RayTaskError) as error:
            raise self._blame(ready, error) from error
        for reference, answer in zip(ready, answers, strict=True):
            worker = self._under_way.pop(reference)
            yield worker, pickle.loads(answer) if isinstance(answer, bytes) else answer

    def _blame(self, references: Sequence[ray.ObjectRef[Any]], error: Exception) -> RunError:
        """The error with the name of the worker whose call failed."""
        for reference in references:
            try:
                ray.get(reference, timeout=0)
            except GetTimeoutError:
                continue
            except (RayActorError, RayTaskError) as failure:
                worker = self._under_way[reference]
                where = f"worker {worker} ({self._island_of[worker]})"
                return RunError(f"{where} died: {str(failure).splitlines()[0]}")
        return RunError(f"a worker died: {str(error).splitlines()[0]}")


class RayNetwork:
    """The link actor, off the critical path: batches go out, times come back when they are ready.

    ``asked``: it simulates only when asked to ``decide``, as for rounds that close by the clock.
    """

    def __init__(self, link: ActorHandle[Any], asked: bool) -> None:
        self._link = link
        self._asked = asked
        self._under_way: deque[ray.ObjectRef[Timings]] = deque()

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        if self._asked:
            self._link.extend.remote(ops)
        else:
            self._under_way.append(self._link.time.remote(ops))

    def results(self, wait: bool) -> Iterable[Timings]:
        while self._under_way:
            full = len(self._under_way) > BATCHES_UNDER_WAY
            if not (wait or full or ray.wait([self._under_way[0]], timeout=0)[0]):
                return
            yield ray.get(self._under_way.popleft())

    def decide(self, hold_s: float) -> tuple[Timings, Event | None, float]:
        decided: tuple[Timings, Event | None, float] = ray.get(self._link.decide.remote(hold_s))
        return decided

    def act(self, actions: Sequence[Action]) -> Sequence[Result]:
        reference = self._link.act.remote(actions)
        if not any(isinstance(action, Abort | Kill) for action in actions):
            return [None] * len(actions)  # no need to wait for that
        results: Sequence[Result] = ray.get(reference)
        return results

    def end(self) -> Timings:
        totals: Timings = ray.get(self._link.end.remote())
        return totals


class CoordinatorActor:
    """Runs one run after another. Two threads: one trains, one answers ``progress`` and
    ``stop``."""

    def __init__(self, paths: Sequence[str]) -> None:
        """``paths``: where the driver's imports come from."""
        look_also_in(paths)
        torch.set_num_threads(1)
        gc.freeze()  # as in the workers
        pa.array([0.0])  # where pandas is installed this imports it: now, not while training
        self._stop = threading.Event()
        self._coordinator: Coordinator | None = None

    def run(
        self, job: Job, folder: str, handles: Sequence[ActorHandle[Any]], link: ActorHandle[Any]
    ) -> tuple[str, dict[str, Any] | str]:
        """Train; returns ('done', summary), or what ended the run: ('failed' | 'interrupted',
        why)."""
        self._coordinator = Coordinator(job, Path(folder))
        workers = RayWorkers(handles, job.island_of)
        try:
            network = RayNetwork(link, job.timed or job.on_wall_clock)
            return "done", self._coordinator.run(workers, network, self._stop.is_set)
        except RunError as error:
            return "failed", str(error)
        except Interrupted:
            return "interrupted", ""
        finally:
            self._stop.clear()  # for the next run; a stop that comes before this one begins counts

    def progress(self) -> Progress | None:
        """Where the run is; None before it has begun."""
        return None if self._coordinator is None else self._coordinator.progress()

    def stop(self) -> None:
        """End the run at the next turn of its loop, with everything so far written."""
        self._stop.set()
