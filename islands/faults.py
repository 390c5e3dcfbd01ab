"""What goes wrong, and when: every fault as a draw that does not depend on who asks first.

A draw is keyed by (seed, kind, the fault's place in the list, worker, block of steps or rounds), so
a run that is cut into other pieces, or timed again, meets the same faults. Nothing here knows a
model or a network.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from islands.clock import ComputeModel
from islands.fault_kinds import Corrupt, Crash, Drop, Fault, Join, Leave, Pause, Slow, Straggler
from islands.outages import Edge, windows
from islands.rng import generator, seed_for
from islands.stragglers import Stretched

if TYPE_CHECKING:
    from islands.network.steps import Window

_Kind = TypeVar("_Kind", bound=Fault)

#: Rounds whose losses are drawn together.
_BLOCK = 256


class Fate(NamedTuple):
    """What becomes of one worker's part in one round.

    ``up``        its contribution is lost
    ``down``      the result does not reach it to be adopted
    ``restore``   a lost contribution returns to the worker's residual
    ``reanchor``  a lost result still reaches it as the new anchor
    """

    up: bool = False
    down: bool = False
    restore: bool = True
    reanchor: bool = True


#: The fate of a part that nothing happens to.
KEPT = Fate()


class Corruption(NamedTuple):
    """How one payload is bad; :func:`islands.corruption.corrupt` makes it so."""

    how: str
    factor: float
    seed: int


class Faults:
    """The faults of one run."""

    def __init__(
        self,
        faults: Sequence[Fault],
        seed: int,
        island_of: Sequence[str],
        replicas: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``island_of``: each worker's island. ``replicas``: from local step s on the workers 0 …
        n − 1 take part, as pairs (s, n); empty: all of them."""
        self._faults = tuple(faults)
        self._seed = seed
        self._island_of = tuple(island_of)
        self._replicas = tuple(replicas)
        self._bursts: dict[tuple[int, int, int], list[bool]] = {}
        self._drops = [self._of(Drop, worker) for worker in range(len(island_of))]
        self._corrupts = [self._of(Corrupt, worker) for worker in range(len(island_of))]

    def _of(self, kind: type[_Kind], worker: int) -> list[tuple[int, _Kind]]:
        """The faults of a kind that are about a worker, with their places in the list."""
        island = self._island_of[worker]
        return [
            (number, fault)
            for number, fault in enumerate(self._faults)
            if isinstance(fault, kind) and fault.hits(worker, island)  # type: ignore[union-attr]
        ]

    # --- what a run must be prepared for ----------------------------------------------------------
    @property
    def drops(self) -> bool:
        """Whether a part in a round may be lost."""
        return any(self._drops)

    @property
    def corrupts(self) -> bool:
        """Whether a payload may be bad, so that payloads carry checksums."""
        return any(self._corrupts)

    @property
    def crashes_happen(self) -> bool:
        """Whether a worker may die, so that the clock decides what is trained."""
        return any(isinstance(fault, Crash) for fault in self._faults)

    @property
    def elastic(self) -> bool:
        """Whether some worker does not take part in every step."""
        return bool(self._replicas) or any(isinstance(f, Leave | Join) for f in self._faults)

    # --- draws ------------------------------------------------------------------------------------
    def compute(self, base: ComputeModel) -> ComputeModel:
        """Step durations with what stretches them; ``base`` itself if nothing does."""
        own: list[list[tuple[int, Straggler | Slow | Pause]]] = [
            [*self._of(Straggler, worker), *self._of(Slow, worker), *self._of(Pause, worker)]
            for worker in range(len(self._island_of))
        ]
        return Stretched(base, self._seed, own) if any(own) else base

    def dropped(self, worker: int, fragment: int, version: int) -> Fate:
        """What becomes of a worker's part in the round (fragment, version); versions from 1."""
        fate = KEPT
        for number, drop in self._drops[worker]:
            if self._loses(number, drop, worker, fragment, version):
                up, down = drop.direction != "down", drop.direction != "up"
                fate = Fate(
                    fate.up or up,
                    fate.down or down,
                    fate.restore and not (up and drop.on_drop == "lose"),
                    fate.reanchor and not (down and drop.anchor == "last_received"),
                )
        return fate

    def _loses(self, number: int, drop: Drop, worker: int, fragment: int, version: int) -> bool:
        """One fault's draw for one round: independent, or the state of a two-state chain.

        The chain's lossy runs have the mean length ``burst``, and its share of lossy rounds is
        ``probability``, from the first round on.
        """
        lost = self._bursts.setdefault((number, worker, fragment), [])
        while len(lost) < version:
            ids = (number, worker, fragment, len(lost) // _BLOCK)
            uniform = generator(self._seed, "drop", *ids).random(_BLOCK)
            p = drop.probability
            if drop.burst == 1:
                lost += (uniform < p).tolist()
                continue
            stays = 1 - 1 / drop.burst
            begins = p / (drop.burst * (1 - p))
            for draw in uniform.tolist():
                chance = p if not lost else stays if lost[-1] else begins
                lost.append(draw < chance)
        return lost[version - 1]

    def corruption(self, worker: int, fragment: int, version: int) -> Corruption | None:
        """How a worker's payload of the round is bad, or None. The first fault that strikes
        counts."""
        for number, fault in self._corrupts[worker]:
            first, last = fault.rounds or (1, version)
            if not first <= version <= last:
                continue
            ids = (number, worker, fragment, version)
            if generator(self._seed, "corrupt", *ids).random() < fault.probability:
                seed = seed_for(self._seed, "corrupted bits", *ids)
                return Corruption(fault.how, fault.factor, seed)
        return None

    def crashes(self, worker: int) -> Iterator[tuple[float, float]]:
        """Moments at which a worker dies, and for how long it is away (infinite: for good).

        Endless if it has a mean time between failures. A worker that is away cannot die again.
        """
        back_s = 0.0
        deaths = [self._deaths(number, crash, worker) for number, crash in self._of(Crash, worker)]
        for time_s, away_s in heapq.merge(*deaths):
            if time_s >= back_s:
                yield time_s, away_s
                back_s = time_s + away_s
                if back_s == inf:
                    return

    def _deaths(self, number: int, crash: Crash, worker: int) -> Iterator[tuple[float, float]]:
        if crash.at is not None:
            yield crash.at, crash.downtime_s
            return
        assert crash.mtbf is not None
        draw = generator(self._seed, "crash", number, worker)
        time_s = 0.0
        while time_s < inf:
            time_s += float(draw.exponential(crash.mtbf))
            yield time_s, crash.downtime_s
            time_s += crash.downtime_s

    # --- set by step, or by the clock alone -------------------------------------------------------
    def spans(self, worker: int, steps: int) -> tuple[tuple[int, int], ...]:
        """When a worker takes part in a run of ``steps``: (first, last) for the local steps first …
        last − 1, counted from 0, in order, none next to another."""
        moves = sorted(
            [
                *((f.step, n, False) for n, f in self._of(Leave, worker)),
                *((f.step, n, True) for n, f in self._of(Join, worker)),
            ]
        )
        edges = {0, steps, *(step for step, _, _ in moves), *(step for step, _ in self._replicas)}
        found: list[tuple[int, int]] = []
        for first, last in pairwise(sorted(edge for edge in edges if edge <= steps)):
            there = not (moves and moves[0][2])
            for step, _, joins in moves:
                there = joins if step <= first else there
            counts = [count for step, count in self._replicas if step <= first]
            there = there and (not counts or worker < counts[-1])
            if there and found and found[-1][1] == first:
                found[-1] = (found[-1][0], last)
            elif there:
                found.append((first, last))
        return tuple(found)

    def windows(self, edges: Sequence[Edge]) -> dict[str, list[Window]]:
        """Outages and partitions by the links of a topology, see
        :func:`islands.outages.windows`."""
        return windows(self._faults, edges, list(dict.fromkeys(self._island_of)))
