"""Steps that take longer than they should: jitter, slow workers, pauses.

A step's nominal time is stretched by every factor that is about its worker, and then by the pauses
that fall into it. Times are all that changes; what is trained does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from islands.clock import ComputeModel
from islands.fault_kinds import Pause, Slow, Straggler
from islands.rng import generator

#: Steps whose jitter is drawn together.
_BLOCK = 1024


class Stretched:
    """A compute model under faults; itself a compute model."""

    def __init__(
        self,
        base: ComputeModel,
        seed: int,
        faults: Sequence[Sequence[tuple[int, Straggler | Slow | Pause]]],
    ) -> None:
        """``faults``: each worker's own, with their places in the experiment's list, pauses
        last."""
        self._base = base
        self._seed = seed
        self._faults = faults
        self._drawn: dict[tuple[int, int], tuple[int, NDArray[np.float64]]] = {}
        self._begun = [[0.0] for _ in faults]  # nominal time at the beginning of each block
        self._offsets: dict[tuple[int, int], float] = {}  # when a worker's first pause comes

    def seconds(self, worker: int, first: int, count: int) -> NDArray[np.float64]:
        """Durations of steps ``first`` … ``first + count − 1`` of one worker, in seconds;
        (count,)."""
        stretched = [seconds for _, seconds in self._stretch(worker, first, count)]
        return stretched[-1] if stretched else self._base.seconds(worker, first, count)

    def without(self, kind: str) -> ComputeModel:
        """The same without the faults of a kind; what the others draw stays as it is."""
        faults = [[(n, fault) for n, fault in own if fault.kind != kind] for own in self._faults]
        return Stretched(self._base, self._seed, faults) if any(faults) else self._base

    def lost_s(self, worker: int, first: int, count: int) -> dict[str, float]:
        """What each kind of fault added to these steps, in seconds, in the order in which they
        stretch them; less than 0 where jitter made them shorter."""
        found: dict[str, float] = {}
        before = self._base.seconds(worker, first, count)
        for kind, after in self._stretch(worker, first, count):
            found[kind] = found.get(kind, 0.0) + float((after - before).sum())
            before = after
        return found

    def _stretch(
        self, worker: int, first: int, count: int
    ) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """The durations after each fault."""
        seconds = self._base.seconds(worker, first, count)
        for number, fault in self._faults[worker]:
            if isinstance(fault, Slow):
                seconds = seconds * fault.factor
            elif isinstance(fault, Straggler):
                seconds = seconds * self._jitter(number, fault, worker, first, count)
            else:
                seconds = seconds + fault.lasting * self._pauses(
                    number, fault, worker, first, count
                )
            yield fault.kind, seconds

    def _jitter(
        self, number: int, fault: Straggler, worker: int, first: int, count: int
    ) -> NDArray[np.float64]:
        """Factors of some steps, block by block."""
        parts = []
        for block in range(first // _BLOCK, (first + count - 1) // _BLOCK + 1):
            start = block * _BLOCK
            factors = self._block(number, fault, worker, block)
            parts.append(factors[max(0, first - start) : first + count - start])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0), *parts])

    def _block(self, number: int, fault: Straggler, worker: int, block: int) -> NDArray[np.float64]:
        key = (number, worker)
        kept = self._drawn.get(key)
        if kept is None or kept[0] != block:
            draw = generator(self._seed, "straggler", number, worker, block)
            kept = (block, np.maximum(1.0 + _jitter(fault, draw), 0.0))
            self._drawn[key] = kept
        return kept[1]

    def _pauses(
        self, number: int, fault: Pause, worker: int, first: int, count: int
    ) -> NDArray[np.float64]:
        """How many pauses fall into each of some steps."""
        offset_s = self._offsets.get((number, worker))
        if offset_s is None:
            offset_s = generator(self._seed, "pause", number, worker).uniform(0.0, fault.every)
            self._offsets[number, worker] = offset_s
        elapsed_s = self._elapsed(worker, first, count)
        begun = np.maximum(np.floor((elapsed_s - offset_s) / fault.every) + 1.0, 0.0)
        return np.diff(begun)

    def _elapsed(self, worker: int, first: int, count: int) -> NDArray[np.float64]:
        """Nominal computing time up to each of the steps and the one after them; (count + 1,).

        Summed block by block, so that it does not depend on which steps are asked for together.
        """
        begun = self._begun[worker]
        parts = []
        for block in range(first // _BLOCK, (first + count) // _BLOCK + 1):
            while len(begun) <= block:
                whole = self._base.seconds(worker, (len(begun) - 1) * _BLOCK, _BLOCK)
                begun.append(begun[-1] + float(np.cumsum(whole)[-1]))
            start = block * _BLOCK
            upto = min(first + count - start, _BLOCK - 1)
            sums = np.cumsum(self._base.seconds(worker, start, upto)) if upto else np.empty(0)
            parts.append(begun[block] + np.concatenate([[0.0], sums])[max(0, first - start) :])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _jitter(fault: Straggler, draw: np.random.Generator) -> NDArray[np.float64]:
    """A block of X with the fault's mean and standard deviation."""
    mean, std = fault.mean, fault.spread
    match fault.jitter:
        case "exponential":
            return draw.exponential(mean, _BLOCK)
        case "normal":
            return draw.normal(mean, std, _BLOCK)
        case _ if not std:
            return np.full(_BLOCK, mean)
        case "gamma":
            return draw.gamma((mean / std) ** 2, std * std / mean, _BLOCK)
        case _:
            variance = log1p((std / mean) ** 2)
            return draw.lognormal(np.log(mean) - variance / 2, sqrt(variance), _BLOCK)
