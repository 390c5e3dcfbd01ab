"""What becomes of a round: whose contribution counts, what is combined, what each worker is told.

The engine decides when a round closes and who is in it. Here faults and policy are applied to what
came: contributions that got lost, payloads that are bad, a quorum that is missed. If nothing can be
committed, neither parameters nor outer momentum move, and nobody adopts anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan
from typing import TYPE_CHECKING, NamedTuple

import torch

from islands.compression import CHECKSUM_BYTES, Payload, Update, decode
from islands.corruption import corrupt
from islands.faults import KEPT, Fate, Faults
from islands.methods.base import Arrival, Method, Shared, dense_update, weighted_mean
from islands.plan import Held
from islands.policy import Policy
from islands.protocols import Likeness, Part, Recorder
from islands.trace import Pass, RoundKey

if TYPE_CHECKING:
    from islands.compression import Statistics


class Outcome(NamedTuple):
    """What a round means for one worker.

    ``update``   what was committed; None: nothing that this worker gets
    ``version``  of the fragment after it
    ``adopt``    False: only measure from it from now on
    ``lost``     what the worker sent counts for nothing, and returns to its residual
    ``control_bytes``  reach the worker out of band
    ``donate``   hand over the parameters then, under this name, for others to start from
    """

    update: Update | None
    version: int
    adopt: bool = True
    lost: bool = False
    control_bytes: int = 0
    donate: Pass | None = None


class Contribution(NamedTuple):
    """A worker's part in a round, and the version that the worker itself counts it as."""

    version: int
    arrival: Arrival


class Latest(NamedTuple):
    """What a fragment's latest committed round made, its size in bytes, and after how many local
    steps its members sent."""

    update: Update | None
    nbytes: int
    step: int


class Admission(NamedTuple):
    """What workers start from that join after a step, and the fragments' versions in it."""

    update: Update
    nbytes: int
    versions: tuple[int, ...]


@dataclass
class Gathering:
    """The open round of one fragment, where rounds close by the clock."""

    opened_s: float = 0.0
    parts: list[Contribution] = field(default_factory=list)  # in the order in which they came
    late: list[Arrival] = field(default_factory=list)  # count in the next commit
    missing: dict[int, list[int]] = field(default_factory=dict)  # worker -> rounds it is late for
    flying: int | None = None  # the collective under way that is to be committed at its end
    parked: list[Contribution] = field(default_factory=list)  # are for the round after this one
    launched: int | None = None  # the latest collective, which an anchor has to wait for
    wakes_s: float = inf


def _with(part: Contribution, came: Mapping[int, Payload]) -> Contribution:
    """The contribution as it came."""
    return part._replace(arrival=replace(part.arrival, payload=came[part.arrival.worker]))


class Rounds:
    """The rounds of one run: the shared fragments' versions, and what each round decided.

    ``versions`` counts the commits of each fragment, ``closed`` its rounds, committed or not.
    """

    def __init__(
        self,
        *,
        method: Method,
        shared: Shared,
        fragments: int,
        workers: int,
        recorder: Recorder,
        share: Callable[[Update], Update],
        merge_buffers: Callable[[Sequence[Statistics]], Statistics],
        faults: Faults,
        policy: Policy,
        may_lose: bool,
    ) -> None:
        self.versions = [0] * fragments
        self.closed = [0] * fragments
        self.latest: list[Latest | None] = [None] * fragments
        self.buffers: Statistics | None = None  # of the latest round that had some
        self._method = method
        self._shared = shared
        self._everyone = range(workers)
        self._recorder = recorder
        self._share = share
        self._merge_buffers = merge_buffers
        self._faults = faults
        self._policy = policy
        self._may_lose = may_lose
        self._outcomes: dict[RoundKey, dict[int, Outcome]] = {}

    @property
    def checksum_bytes(self) -> int:
        """What travels with every payload as control bytes."""
        return CHECKSUM_BYTES if self._faults.corrupts else 0

    def outcome(self, key: RoundKey, worker: int) -> Outcome | None:
        """What a round means for a worker, which counts it as ``key``; handed out once. None while
        it is open."""
        waiting = self._outcomes.get(key, {})
        found = waiting.pop(worker, None)
        if found is not None and not waiting:
            del self._outcomes[key]
        return found

    def forget(self, worker: int) -> None:
        """Nothing that was decided for the worker will be asked for."""
        for key in [key for key, waiting in self._outcomes.items() if worker in waiting]:
            self.outcome(key, worker)

    def tell(self, key: RoundKey, worker: int, outcome: Outcome) -> None:
        """Decide for one worker what its round ``key`` means."""
        self._outcomes.setdefault(key, {})[worker] = outcome

    def close(
        self,
        fragment: int,
        parts: Sequence[Contribution],
        onlookers: Sequence[tuple[int, int]] = (),
        late: Sequence[Arrival] = (),
        expected: Collection[int] = (),
        gone: Collection[int] = (),
        donate: tuple[int, Pass] | None = None,
    ) -> bool:
        """Combine what can be used of a round, and decide what it means for everyone in it.

        ``parts`` are the contributions in worker order; ``onlookers``, as (worker, version), adopt
        the result without having contributed; ``late`` are weighted contributions to earlier
        rounds, which count if this one is committed. Of the workers ``expected``, which have not
        come yet, nothing is recorded now; those who are ``gone`` do not go on with the result.
        ``donate`` names a worker that hands over what it then has, and the moment. Returns whether
        the round is committed.
        """
        self.closed[fragment] += 1
        number = self.closed[fragment]
        fates = {p.arrival.worker: self._fate(p.arrival.worker, fragment, number) for p in parts}
        came = {p.arrival.worker: self._as_it_came(p.arrival, fragment, number) for p in parts}
        status = {
            worker: "dropped" if fates[worker].up else "ok" if self._fit(payload) else "rejected"
            for worker, payload in came.items()
        }
        usable = [
            part if part.arrival.payload is came[part.arrival.worker] else _with(part, came)
            for part in parts
            if status[part.arrival.worker] == "ok"
        ]
        committed = bool(usable) and self._policy.commits(len(usable))
        update, size = self._commit(fragment, usable, late) if committed else (None, 0)
        if not committed:
            status = {w: "dropped" if fate == "ok" else fate for w, fate in status.items()}
        for version, arrival in parts:
            worker = arrival.worker
            lost = self._may_lose and status[worker] != "ok" and fates[worker].restore
            told = self._told(update, size, self.versions[fragment], fates[worker], lost)
            if donate is not None and donate[0] == worker:
                told = told._replace(donate=donate[1])
            self.tell((fragment, version), worker, told)
        for worker, version in onlookers:
            told = Outcome(update, self.versions[fragment], control_bytes=size)
            self.tell((fragment, version), worker, told)
        if committed:
            self.latest[fragment] = Latest(update, size, max(p.arrival.step for p in parts))
        unheard = {
            w for w, fate in fates.items() if fate.down and not fate.up and update is not None
        }
        self._record(fragment, number, parts, status, expected, gone, unheard)
        return committed

    def admission(self, found: Sequence[Held]) -> Admission:
        """What a worker starts from that joins now. ``found`` are the replicas that hold the
        shared parameters; none: the coordinator does."""
        params = self._shared.params
        if found:
            fmt = "fp64" if params.dtype == torch.float64 else "fp32"
            held = [decode(replica.params, fmt) for replica in found]
            params = weighted_mean(held, torch.float64, [1.0] * len(held)).to(params.dtype)
        update = replace(
            dense_update(params),
            buffers=self.statistics(found),
            optimizer=found[0].optimizer if found else None,
        )
        return Admission(self._share(update), update.nbytes, tuple(self.versions))

    def statistics(self, found: Sequence[Held]) -> Statistics | None:
        """The running statistics of the shared model: of those who hold it, or of the latest
        round."""
        packed = [replica.buffers for replica in found if replica.buffers is not None]
        return self._merge_buffers(packed) if packed else self.buffers

    def _fate(self, worker: int, fragment: int, number: int) -> Fate:
        return self._faults.dropped(worker, fragment, number) if self._faults.drops else KEPT

    def _as_it_came(self, arrival: Arrival, fragment: int, number: int) -> Payload:
        if self._faults.corrupts:
            bad = self._faults.corruption(arrival.worker, fragment, number)
            if bad is not None:
                return corrupt(arrival.payload, bad.how, bad.factor, bad.seed)
        return arrival.payload

    def _fit(self, payload: Payload) -> bool:
        if self._policy.invalid == "accept":
            return True
        return payload.is_finite() and payload.is_intact()

    def _told(
        self, update: Update | None, size: int, version: int, fate: Fate, lost: bool
    ) -> Outcome:
        if update is None or not fate.down:
            return Outcome(update, version, lost=lost)
        if not fate.reanchor:
            return Outcome(None, version, lost=lost)
        # Replicas that must stay equal adopt it all the same, as part of the round.
        apart = self._method.anchored
        return Outcome(update, version, False, lost, size if apart else 0)

    def _commit(
        self, fragment: int, parts: Sequence[Contribution], late: Sequence[Arrival]
    ) -> tuple[Update, int]:
        """The update, ready to be handed out, and its size in bytes."""
        self.versions[fragment] += 1
        self._compare(fragment, parts)
        fit = sorted([*(p.arrival for p in parts), *late], key=lambda a: (a.worker, a.step))
        update = self._method.combine(self._shared, fragment, fit)
        if not isinstance(update, Update):
            raise TypeError(f"combine must return an Update, not {type(update).__name__}")
        packed = [a.payload.buffers for a in fit if a.payload.buffers is not None]
        if packed:
            self.buffers = self._merge_buffers(packed)
            update = replace(update, buffers=self.buffers)
        return self._share(update), update.nbytes

    def _compare(self, fragment: int, parts: Sequence[Contribution]) -> None:
        """Record how alike the workers' contributions are, for methods that say."""
        if len(parts) < 2:
            return
        found = self._method.similarity(self._shared, fragment, [p.arrival for p in parts])
        if found is None:
            return
        cosine = found.tolist()
        self._recorder.compared(
            [
                Likeness(
                    fragment,
                    version,
                    one.step,
                    one.worker,
                    other.worker,
                    None if isnan(cosine[i][j]) else cosine[i][j],
                )
                for i, (version, one) in enumerate(parts)
                for j, (_, other) in enumerate(parts)
                if i < j
            ]
        )

    def _record(
        self,
        fragment: int,
        number: int,
        parts: Sequence[Contribution],
        status: dict[int, str],
        expected: Collection[int],
        gone: Collection[int],
        unheard: Collection[int],
    ) -> None:
        versions = {arrival.worker: version for version, arrival in parts}
        # Where a method closes rounds as it likes, nobody is missing from them.
        all_ = sorted(versions) if self._method.timed else self._everyone
        self._recorder.closed(
            [
                Part(
                    w,
                    fragment,
                    versions.get(w, number),
                    status.get(w, "absent"),
                    versions[w] if self._method.timed else number,
                    passes=w not in gone,
                    unheard=w in unheard and self._method.anchored,
                )
                for w in all_
                if w not in expected
            ]
        )
