"""Workers and network inside one process: the same loop and the same results, without Ray.

For tests, which then take milliseconds, and for a breakpoint inside a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from islands.compression import Update
from islands.network import Arrival, Timeline, Timings
from islands.plan import Answer, PlanOp
from islands.replica import Replica
from islands.trace import Op


class LocalWorkers:
    """Replicas that run their plans when an answer is asked for.

    ``shuffle`` draws the order in which answers come, as a busy host would: results must not care.
    """

    def __init__(self, replicas: Sequence[Replica], shuffle: Random | None = None) -> None:
        self._replicas = replicas
        self._shuffle = shuffle
        self._waiting: dict[int, tuple[Sequence[PlanOp], Sequence[Update | None]]] = {}

    def share(self, update: Update) -> Update:
        return update

    def start(self, worker: int, plan: Sequence[PlanOp], updates: Sequence[Update | None]) -> None:
        self._waiting[worker] = (plan, updates)

    def answers(self, everyone: bool) -> Iterable[tuple[int, Answer]]:
        order = sorted(self._waiting)
        if self._shuffle is not None:
            self._shuffle.shuffle(order)
        for worker in order if everyone else order[:1]:
            plan, updates = self._waiting.pop(worker)
            yield worker, self._replicas[worker].run(plan, updates)


class LocalNetwork:
    """A timeline called directly."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def extend(self, ops: Sequence[tuple[int, Op]]) -> None:
        self._timeline.extend(ops)

    def results(self, wait: bool) -> Iterable[Timings]:
        self._timeline.advance()
        return [self._timeline.take()]

    def decide(self) -> tuple[Timings, Arrival | None]:
        arrival = self._timeline.advance()
        return self._timeline.take(), arrival

    def reply(self, worker: int, fragment: int, version: int, nbytes: int, itemsize: int) -> None:
        self._timeline.reply(worker, fragment, version, nbytes, itemsize)
