"""Workers inside one process: the same loop and the same results, without Ray.

For tests, which then take milliseconds, and for a breakpoint inside a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from random import Random

from islands.compression import Update
from islands.plan import Answer, PlanOp
from islands.replica import Replica


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

    def answers(self, everyone: bool, within_s: float = inf) -> Iterable[tuple[int, Answer]]:
        order = sorted(self._waiting)
        if self._shuffle is not None:
            self._shuffle.shuffle(order)
        for worker in order if everyone else order[:1]:
            plan, updates = self._waiting.pop(worker)
            yield worker, self._replicas[worker].run(plan, updates)
