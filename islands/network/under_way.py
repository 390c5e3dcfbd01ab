"""Contributions that wait for a decision, and collectives that can be stopped in the middle.

Only runs whose rounds close by the clock have these (:mod:`islands.network.timed_timeline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from islands.network.collectives import Collective, Listener, Ring, Scheme, Why
from islands.network.fabric import CLOSED, PASSES, Chain, Fabric, Transfer
from islands.network.ledger import Lanes, TransferRow
from islands.network.membership import Charge
from islands.network.star import Contribution, Contributions
from islands.network.timings import SyncTiming
from islands.network.topology import COORDINATOR
from islands.trace import Bytes, Send


class Tap:
    """Stands between a collective and the fabric, counts what begins, and can be closed.

    It is the owner of the collective's transfers as far as the fabric can see. From a worker in
    ``dead`` nothing more begins. When all is over that was on its way when the tap was closed,
    ``tell`` gets the ledger rows of everything that had begun and is not on a lane in ``counted``.
    """

    def __init__(
        self, fabric: Fabric, lanes: Lanes | None, tell: Callable[[list[TransferRow]], None]
    ) -> None:
        self.dead: set[int] = set()
        self.counted: set[int] = set()
        self._fabric = fabric
        self._lanes = lanes
        self._tell = tell
        self._over = False
        self._begun = [0] * (len(lanes.ends) if lanes else 0)
        self._flying = 0

    def attach(self, collective: Collective, per_transfer: bool) -> None:
        """What is behind the tap. ``per_transfer``: a ledger row for each transfer."""
        self._collective = collective
        self._each = per_transfer
        self.first_s, self.last_s = collective.first_s, collective.last_s
        self.queued_s, self.final_phase = collective.queued_s, collective.final_phase

    # As the carrier of a collective

    def send(self, time_s: float, order: int, transfer: Transfer) -> None:
        assert self._lanes is not None
        path, size, _, slot, lane, phase, chain = transfer
        if self._over or self._lanes.ends[lane][0] in self.dead:
            return
        self._begun[lane] += 1
        self._flying += 1
        self._fabric.send(time_s, order, (path, size, self, slot, lane, phase, chain))

    def announce(self, time_s: float, kind: int, order: int, what: object) -> None:
        if not self._over:
            self._fabric.announce(time_s, kind, order, what)

    # As the owner of transfers

    def left(self, lane: int, finish_s: float, chain: Chain) -> None:
        if not self._over:
            self._collective.left(lane, finish_s, chain)

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        self._flying -= 1
        if not self._over:
            self._collective.delivered(lane, phase, time_s, chain)
        elif not self._flying:
            self._tell(self.rows())

    # Closing

    def bury(self, worker: int) -> None:
        """A worker dies: what it has not begun never begins."""
        self.dead.add(worker)
        self._cancel(worker)

    def close(self) -> None:
        """What has not begun never begins."""
        self._over = True
        self._cancel(None)
        if not self._flying:
            self._tell(self.rows())

    def settle(self) -> None:
        """The run is over: what is still on its way counts as it is."""
        if self._over and self._flying:
            self._flying = 0
            self._tell(self.rows())

    def _cancel(self, worker: int | None) -> None:
        lanes = self._lanes

        def is_ours(what: Transfer, announced: bool) -> bool:
            if announced or what[2] is not self:
                return False
            return worker is None or (lanes is not None and lanes.ends[what[4]][0] == worker)

        for _, _, _, _, lane, _, _ in self._fabric.cancel(is_ours):
            self._begun[lane] -= 1
            self._flying -= 1

    # What has begun

    def _sent(self) -> list[tuple[int, int, Bytes]]:
        """(phase, lane, size) of all that has begun: on each lane the first phases."""
        sent = self._collective.transfers()
        return [part for part in sent if part[0] < self._begun[part[1]]]

    def spent(self) -> dict[int, int]:
        """The wire bytes of all that has begun, by the worker that they are charged to."""
        found: dict[int, int] = defaultdict(int)
        for _, lane, size in self._sent() if self._lanes else ():
            source, target = self._lanes.ends[lane]  # type: ignore[union-attr]
            found[target if source == COORDINATOR else source] += size.total
        return found

    def rows(self) -> list[TransferRow]:
        """The ledger rows of all that has begun and is not counted yet."""
        lanes, key = self._lanes, self._collective.key
        if lanes is None:
            return []
        sent = [part for part in self._sent() if part[1] not in self.counted]
        if self._each:
            return lanes.rows_each(key, self._collective, sent)
        sizes = np.zeros((len(lanes.ends), 3), dtype=np.int64)
        counts = np.zeros_like(sizes)
        for _, lane, size in sent:
            sizes[lane] += size
            counts[lane] += np.array(size) > 0
        return lanes.rows(key, self._collective, lanes.amounts(sizes, counts))


class Offer:
    """One worker's part in a round, from its being sent to its being passed.

    ``send`` None: the worker sent nothing and only looks on. ``end`` is when the worker may go on,
    with the chain that decided it; ``wire`` what it sent for that.
    """

    __slots__ = (
        "arrived",
        "contribution",
        "control_bytes",
        "end",
        "key",
        "launched",
        "ready_s",
        "send",
        "tap",
        "waits_in",
        "wire",
        "worker",
    )

    def __init__(
        self, key: tuple[int, int], worker: int, ready_s: float, send: Send | None
    ) -> None:
        self.key = key
        self.worker = worker
        self.ready_s = ready_s
        self.send = send
        self.arrived = send is None
        self.launched: Launched | None = None  # the collective that it is in
        self.waits_in: Launched | None = None  # the collective whose end it waits for
        self.control_bytes = 0  # to be handed over then
        self.end: tuple[float, Why] | None = None
        self.wire = 0
        self.contribution: Contribution | None = None  # where every worker has a star of its own
        self.tap: Tap | None = None

    @property
    def undecided(self) -> bool:
        """Whether it has arrived and nothing was decided about it."""
        if self.contribution is not None and self.contribution.answered:
            return False
        return self.arrived and self.end is None and not (self.launched or self.waits_in)

    def timing(self, wait_s: float, passed_s: float) -> SyncTiming:
        """The worker goes on at ``passed_s``, having waited so long."""
        assert self.end is not None
        step = 0 if self.send is None else self.send.step
        who = (*self.key, self.worker, step)
        return SyncTiming(*who, self.ready_s, self.end[0], wait_s, self.wire, passed_s)

    def upload(
        self,
        stars: Contributions,
        fabric: Fabric,
        turn: int,
        tell: Listener,
        rows: Callable[[list[TransferRow]], None],
    ) -> None:
        """It goes to the coordinator."""
        assert self.send is not None
        lanes = stars.pairs[self.worker] if stars.pairs else None
        tap = self.tap = Tap(fabric, lanes, rows)
        star = self.contribution = stars.open_for(self.worker, self.key, tap, tell)
        tap.attach(star, True)
        star.enter(0, turn, self.ready_s, self.send)

    def __str__(self) -> str:
        return f"contribution {self.key} of worker {self.worker}"


class Passing:
    """A member of a launched collective is done, and goes on without the others."""

    __slots__ = ("launched", "member")

    def __init__(self, launched: Launched, member: int) -> None:
        self.launched = launched
        self.member = member


class Launched:
    """A collective of some offers, on its way.

    ``offers`` are those of its members by position, without those who have gone on or died.
    ``doomed``: a member died in it, so that it has no result and can only be aborted.
    """

    def __init__(
        self,
        number: int,
        barrier: bool,
        scheme: Scheme,
        key: tuple[int, int],
        fabric: Fabric,
        rows: Callable[[list[TransferRow]], None],
    ) -> None:
        self.number = number
        self.barrier = barrier
        self.doomed = False
        self.followers: list[Offer] = []
        self.offers: dict[int, Offer] = {}
        #: The rounds of members that have died, by position.
        self.fallen: dict[int, tuple[int, int]] = {}
        self.tap = Tap(fabric, scheme.lanes, rows)
        self.collective = scheme.open(key, self.tap, self._done)
        self.tap.attach(self.collective, scheme.per_transfer)
        self._fabric = fabric
        self._width = scheme.width
        if isinstance(self.collective, Ring):
            self.collective.launch()

    def start(self, offers: Sequence[Offer], turns: Sequence[int], now_s: float) -> None:
        """Everyone hands over its payload at ``now_s``, in its own ``turns``-th send."""
        position = self.collective.position
        for offer in offers:
            offer.launched = self
            self.offers[position[offer.worker]] = offer
        for offer, turn in zip(offers, turns, strict=True):
            assert offer.send is not None
            self.collective.enter(position[offer.worker], turn, now_s, offer.send)

    def _done(self, collective: Collective, member: int) -> None:
        """A member is done, or will be: nobody hears of it before that moment has come."""
        if not self.barrier:
            order = self.number * self._width + collective.order[member]
            passing = Passing(self, member)
            self._fabric.announce(collective.done_s[member], PASSES, order, passing)
        if collective.finished == collective.members and not self.doomed:
            end_s, _ = collective.last_end()
            self._fabric.announce(end_s, CLOSED, self.number, self)

    def bury(self, worker: int, now_s: float) -> bool:
        """A member dies; whether that dooms the collective."""
        member = self.collective.position[worker]
        offer = self.offers.pop(member)
        self.fallen[member] = offer.key
        if self.collective.done_s[member] <= now_s:
            return False
        self.doomed = True
        self.tap.bury(worker)
        self._fabric.cancel(lambda what, announced: announced and what is self)
        return True

    def abort(self) -> None:
        """End it without a result."""
        self.tap.close()
        self._fabric.cancel(
            lambda what, announced: (
                announced
                and (what is self or (isinstance(what, Passing) and what.launched is self))
            )
        )


def concerns(what: object, worker: int) -> bool:
    """Whether an announcement is about something that a worker has yet to do or to get."""
    match what:
        case Offer() | Contribution() | Charge():
            return what.worker == worker
        case Passing(launched=launched, member=member):
            return launched.collective.order[member] == worker
    return False
