"""The CoordinatorActor, and how it reaches the other two kinds of actors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from islands.compression import Update
from islands.coordinator import Coordinator
from islands.engine import Interrupted
from islands.errors import RunError
from islands.job import Job
from islands.network import Arrival, Timings
from islands.plan import Answer, PlanOp
from islands.plugins import look_also_in
from islands.results.display import Progress
from islands.trace import Op

#: Updates of more bytes go through the object store once; smaller ones travel inside each call.
INLINE_BYTES = 100_000
#: Batches of operations that the link actor may have before the engine waits for it.
BATCHES_UNDER_WAY = 4


class RayWorkers:
    """Worker actors: one call per plan, answers as they come."""

    def __init__(self, handles: Sequence[ActorHandle[Any]], island_of: Sequence[str]) -> None:
        self._handles = handles
        self._island_of = island_of
        self._under_way: dict[ray.ObjectRef[Answer], int] = {}

    def share(self, update: Update) -> Update:
        if update.nbytes <= INLINE_BYTES:
            return update
        reference: Update = ray.put(update)  # Ray resolves it when it is passed to a call
        return reference

    def start(self, worker: int, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> None:
        reference = self._handles[worker].run.remote(plan, *updates)
        self._under_way[reference] = worker

    def answers(self, everyone: bool) -> Iterable[tuple[int, Answer]]:
        waiting = list(self._under_way)
        # A worker that dies makes its call fail, so this wait ends with the plan or its worker.
        count = len(waiting) if everyone else 1
        ready, _ = ray.wait(waiting, num_returns=count)
        for reference in ready:
            worker = self._under_way.pop(reference)
            try:
                yield worker, ray.get(reference)
            except (RayActorError, RayTaskError) as error:
                where = f"worker {worker} ({self._island_of[worker]})"
                raise RunError(f"{where} died: {str(error).splitlines()[0]}") from error


class RayNetwork:
    """The link actor, off the critical path: batches go out, times come back when they are
    ready."""

    def __init__(self, link: ActorHandle[Any], timed: bool) -> None:
        self._link = link
        self._timed = timed
        self._under_way: deque[ray.ObjectRef[Timings]] = deque()

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        if self._timed:  # simulated only as far as the next decision: see `decide`
            self._link.extend.remote(ops)
        else:
            self._under_way.append(self._link.time.remote(ops))

    def results(self, wait: bool) -> Iterable[Timings]:
        while self._under_way:
            full = len(self._under_way) > BATCHES_UNDER_WAY
            if not (wait or full or ray.wait([self._under_way[0]], timeout=0)[0]):
                return
            yield ray.get(self._under_way.popleft())

    def decide(self) -> tuple[Timings, Arrival | None]:
        decided: tuple[Timings, Arrival | None] = ray.get(self._link.decide.remote())
        return decided

    def reply(self, worker: int, fragment: int, version: int, nbytes: int, itemsize: int) -> None:
        self._link.reply.remote(worker, fragment, version, nbytes, itemsize)


class CoordinatorActor:
    """Runs one run after another. Two threads: one trains, one answers ``progress`` and
    ``stop``."""

    def __init__(self, paths: Sequence[str]) -> None:
        """``paths``: where the driver's imports come from."""
        look_also_in(paths)
        torch.set_num_threads(1)
        self._stop = threading.Event()
        self._coordinator: Coordinator | None = None

    def run(
        self, job: Job, folder: str, handles: Sequence[ActorHandle[Any]], link: ActorHandle[Any]
    ) -> tuple[str, dict[str, Any] | str]:
        """Train; returns ('done', summary), or what ended the run: ('failed' | 'interrupted',
        why)."""
        self._stop.clear()
        self._coordinator = Coordinator(job, Path(folder))
        workers = RayWorkers(handles, job.island_of)
        try:
            network = RayNetwork(link, job.experiment.method.timed)
            return "done", self._coordinator.run(workers, network, self._stop.is_set)
        except RunError as error:
            return "failed", str(error)
        except Interrupted:
            return "interrupted", ""

    def progress(self) -> Progress | None:
        """Where the run is; None before it has begun."""
        return None if self._coordinator is None else self._coordinator.progress()

    def stop(self) -> None:
        """End the run at the next turn of its loop, with everything so far written."""
        self._stop.set()
