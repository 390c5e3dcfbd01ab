"""The timeline of a run whose rounds close by the clock: it stops at every event for a decision.

Causality is as ever: nothing is processed that some living worker could still precede. Who is dead
holds up nothing. Members of a launched collective go on only when their moment has come, since
until then somebody may die and spoil it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf

from islands.clock import ComputeModel
from islands.network.collectives import TURN_BITS, Collective, Why
from islands.network.fabric import ARRIVED, PASSES, WAKES
from islands.network.membership import Gate, Marks, Mortals, check_members
from islands.network.rewind import Past, split
from islands.network.star import Contribution, Contributions
from islands.network.timed import (
    Abort,
    Action,
    Kill,
    Launch,
    Release,
    Reply,
    Result,
    Revive,
    WakeAt,
)
from islands.network.timeline import Timeline
from islands.network.timings import Arrival, Closed, Event, Spent, SyncTiming, Timings, Wake
from islands.network.topology import Topology
from islands.network.under_way import Launched, Offer, Passing, Tap, concerns
from islands.network.workers import Worker
from islands.trace import Bytes, Compute, Idle, Members, Op, Receive, Send


class TimedTimeline(Timeline):
    """A timeline that stops for decisions.

    Every send is a contribution of its own, and the caller decides at each event what becomes of
    it. A method that needs a ``star`` sends it to the coordinator, and the Arrival is when it is
    there; for all other methods the Arrival is when it is ready, and nothing moves before a Launch.
    A receive without a send looks on: it waits for a Release, which may come before it.

    Workers run ahead of the events, and one may be killed. So what it did is told only when that
    moment has come and it lived. With ``ahead`` syncs are told at once, to a caller who holds them
    back itself and takes back those of the dead.
    """

    def __init__(
        self,
        topology: Topology,
        compute: ComputeModel,
        collective: str,
        *,
        scheme: str = "ring",
        ring_order: Sequence[str] | None = None,
        seed: int = 0,
        per_transfer: bool = False,
    ) -> None:
        super().__init__(
            topology,
            compute,
            collective,
            scheme=scheme,
            ring_order=ring_order,
            seed=seed,
            per_transfer=per_transfer,
            vectorise=False,
        )
        self.now_s = 0.0  # of the latest event
        self._stars = Contributions(topology) if collective == "star" else None
        self.ahead = False
        self._offers: dict[tuple[int, int, int], Offer] = {}
        self._under_way: dict[int, Launched] = {}
        self._turns = [0] * topology.workers  # launches that each was in
        self._closed_taps: list[Tap] = []
        self._closed: list[tuple[Offer, int]] = []  # to go on, with control bytes on the way
        self._passers: Mortals = Mortals(topology.workers)
        self._died_s = self._passers.died_s
        self._past = [Past(worker) for worker in self._workers]
        self._told: list[SyncTiming] = []  # ahead of their moment
        self._marks = Marks(self._passers)
        self._all_told = False

    # What goes in

    def extend(self, ops: Iterable[tuple[int, Op]]) -> None:
        ops = list(ops)
        for number, op in ops:
            if number in self._died_s and type(op) is not Members:
                raise ValueError(f"worker {number} is dead and cannot {op}")
        super().extend(ops)

    def _declare(self, op: Members) -> None:
        if op.fragment >= 0:
            raise ValueError("who is in a round is decided at its Launch")
        super()._declare(op)

    def act(self, actions: Sequence[Action]) -> list[Result]:
        """Do all this, in order, at the moment of the latest event; what each gives back.

        Raises ValueError for what makes no sense at this moment, such as a reply to nobody.
        """
        return [self._do(action) for action in actions]

    def _do(self, action: Action) -> Result:
        match action:
            case Reply(worker, fragment, version, nbytes):
                self._reply(self._undecided(worker, fragment, version), nbytes)
            case Launch():
                self._launch(action)
            case Release():
                self._release_from(action)
            case WakeAt(time_s, tag):
                if time_s < self.now_s:
                    raise ValueError(f"{time_s!r} is past at {self.now_s!r}")
                self._fabric.announce(time_s, WAKES, tag, Wake(time_s, tag))
            case Kill(worker):
                return self._kill(self._workers[worker])
            case Abort(number):
                return self._abort(number)
            case Revive():
                self._revive(action)
        return None

    # The loop

    def advance(self) -> Event | None:
        """Simulate up to the next event, having processed nothing later, and return it.

        None means that more operations (or decisions still owed) are needed, or that all is done.
        """
        self._let_closed_on()
        event = super().advance()
        self._all_told = event is None and not self._starved
        return event

    def _nothing_can_happen(self) -> None:
        """The caller may yet decide something."""

    def _happens(self, time_s: float, what: object) -> Event | None:
        self.now_s = time_s
        match what:
            case Offer():
                return self._arrives(what)
            case Contribution():
                return self._arrives(self._offers[*what.key, what.worker])
            case Passing(launched=launched, member=member):
                self._goes_on(launched, member)
            case Launched():
                return self._close(what)
            case Gate():
                self._let_in(what)
            case Wake():
                return what
            case _:
                return super()._happens(time_s, what)
        return None

    def _arrives(self, offer: Offer) -> Arrival:
        offer.arrived = True
        if offer.contribution is not None and offer.tap is not None:
            offer.contribution.arrived = True
            offer.tap.counted.add(0)
            self._ledger.add(offer.contribution.rows())
        return Arrival(self.now_s, offer.worker, *offer.key)

    # What comes out

    def take(self) -> Timings:
        found = super().take()
        until_s = inf if self._all_told else self.now_s
        later = self._found
        steps, found.steps = found.steps, []
        for part in steps:
            before, after = split(part, until_s)
            found.steps += before
            later.steps += after
        if self.ahead:
            self._told = [sync for sync in (*self._told, *found.syncs) if sync.passed_s > until_s]
        else:
            later.syncs = [sync for sync in found.syncs if sync.passed_s > until_s]
            found.syncs = [sync for sync in found.syncs if sync.passed_s <= until_s]
        found.marks = self._marks.take(until_s)
        found.now_s = self.now_s
        return found

    def end(self) -> Timings:
        self._let_closed_on()
        self._all_told = True
        for tap in self._closed_taps:
            tap.settle()
        return super().end()

    # Steps that are passed

    def _mark(self, worker: Worker, step: int) -> None:
        self._marks.pass_by(step, worker.number, worker.clock_s)

    def _pass_step(self, worker: Worker, step: int) -> None:
        gate = self._gate(step)
        gate.pass_by(worker.number, worker.clock_s)
        self._look_at(gate)

    def _join(self, worker: Worker, step: int) -> bool:
        gate = self._gate(step)
        opens_s = self._passers.opens_s(gate)
        if opens_s is not None and opens_s <= worker.clock_s:
            return True
        gate.joiners.append(worker)
        self._wait(worker, gate)
        self._look_at(gate)
        return False

    def _look_at(self, gate: Gate[Worker]) -> None:
        """Have it opened at its moment, which is not the present one: a passer may yet die."""
        if gate.joiners and (opens_s := self._passers.opens_s(gate)) is not None:
            self._fabric.announce(max(opens_s, self.now_s), PASSES, -1 - gate.step, gate)

    def _let_in(self, gate: Gate[Worker]) -> None:
        opens_s = self._passers.opens_s(gate)
        if opens_s is None or opens_s > self.now_s:
            return
        joiners, gate.joiners = gate.joiners, []
        for worker in joiners:
            self._go_on(worker)
            self._past[worker.number].note(self.now_s)
            worker.away_until(opens_s)
            self._run(worker)

    # Contributions

    def _send(self, worker: Worker, op: Send) -> None:
        key = (op.fragment, op.version)
        if (*key, worker.number) in self._offers:
            raise ValueError(f"worker {worker.number} sends twice to round {key}")
        worker.sends += 1
        offer = self._offers[*key, worker.number] = Offer(key, worker.number, worker.clock_s, op)
        if self._stars is None:
            order = (worker.sends << TURN_BITS) + worker.number
            self._fabric.announce(worker.clock_s, ARRIVED, order, offer)
        else:
            answered = partial(self._answered, offer)
            offer.upload(self._stars, self._fabric, worker.sends, answered, self._ledger.add)

    def _receive(self, worker: Worker, op: Receive) -> bool:
        key = (op.fragment, op.version)
        offer = self._offers.get((*key, worker.number))
        if offer is None:
            offer = Offer(key, worker.number, worker.clock_s, None)
            self._offers[*key, worker.number] = offer
        elif offer.send is None:
            offer.ready_s = worker.clock_s
        if offer.end is None:
            self._wait(worker, offer)
            return False
        self._go_past(worker, offer)
        return True

    def _undecided(self, worker: int, fragment: int, version: int) -> Offer:
        offer = self._offers.get((fragment, version, worker))
        if offer is None or not offer.arrived:
            raise ValueError(f"nothing of worker {worker} for {(fragment, version)} has arrived")
        if not offer.undecided:
            raise ValueError(
                f"it was decided before about {(fragment, version)} of worker {worker}"
            )
        return offer

    def _settle(self, offer: Offer, done_s: float, why: Why, wire: int) -> None:
        """The worker of an offer may go on from ``done_s``."""
        offer.end = done_s, why
        offer.wire = wire
        self._wake_for(offer)

    def _wake_for(self, offer: Offer) -> None:
        worker = self._workers[offer.worker]
        if worker.waits_for is offer:
            self._go_on(worker)
            self._go_past(worker, offer)
            self._run(worker)

    def _go_past(self, worker: Worker, offer: Offer) -> None:
        assert offer.end is not None
        self._past[worker.number].note(self.now_s)
        wait_s = worker.wait_until(*offer.end)
        self._found.syncs.append(offer.timing(wait_s, worker.clock_s))
        del self._offers[*offer.key, worker.number]
        if offer.launched is not None:
            offer.launched.offers.pop(offer.launched.collective.position[worker.number], None)

    # A star of its own for each

    def _reply(self, offer: Offer, nbytes: int) -> None:
        if offer.contribution is None:
            raise ValueError("only a star can be answered")
        offer.contribution.answer(self.now_s, Bytes(values=nbytes))

    def _answered(self, offer: Offer, collective: Collective, member: int) -> None:
        self._ledger.add(collective.rows())
        self.wire_bytes += sum(collective.wire)
        self._settle(offer, collective.done_s[0], collective.why[0], collective.wire[0])

    # Collectives

    def _launch(self, action: Launch) -> None:
        parts, fragment, number, barrier = action
        if self._stars is not None:
            raise ValueError("where each has a star of its own there is nothing to launch")
        if number in self._under_way:
            raise ValueError(f"collective {number} is under way")
        offers = [self._undecided(worker, fragment, version) for worker, version in parts]
        if any(offer.send is None for offer in offers):
            raise ValueError(f"collective {number} is to have members that sent nothing")
        members = check_members([offer.worker for offer in offers], len(self._workers))
        if len(members) < len(offers):
            raise ValueError(f"collective {number} has the same worker twice")
        for worker in members:
            self._turns[worker] += 1
        turns = [self._turns[offer.worker] for offer in offers]
        launched = self._under_way[number] = Launched(
            number, barrier, self._subset(members), offers[0].key, self._fabric, self._ledger.add
        )
        launched.start(offers, turns, self.now_s)

    def _goes_on(self, launched: Launched, member: int) -> None:
        """A member is done; without a barrier it need not wait for the others."""
        if (offer := launched.offers.get(member)) is not None:
            done = launched.collective
            self._settle(offer, done.done_s[member], done.why[member], done.wire[member])

    def _close(self, launched: Launched) -> Closed | None:
        """The last member is done."""
        del self._under_way[launched.number]
        collective = launched.collective
        self._ledger.add(collective.rows())
        self.wire_bytes += sum(collective.wire)
        done_s, why = collective.last_end()
        for member, key in sorted(launched.fallen.items()):
            self._spend(collective.order[member], key, collective.wire[member])
        if launched.barrier:
            for member, offer in launched.offers.items():
                offer.end, offer.wire = (done_s, why), collective.wire[member]
                self._closed.append((offer, 0))
        for offer in launched.followers:
            offer.waits_in, offer.end = None, (done_s, why)
            self._closed.append((offer, offer.control_bytes))
        if launched.barrier:
            return Closed(done_s, launched.number)
        self._let_closed_on()
        return None

    def _let_closed_on(self) -> None:
        """Who waited for a collective that has ended goes on, unless it has just died: only now,
        so that the decision at its end is taken before anything that follows from it."""
        closed, self._closed = self._closed, []
        for offer, control_bytes in closed:
            if self._offers.get((*offer.key, offer.worker)) is offer:
                self._charge(self._workers[offer.worker], control_bytes, self.now_s)
                self._wake_for(offer)

    def _release_from(self, action: Release) -> None:
        worker, fragment, version, nbytes, after = action
        if worker in self._died_s:
            raise ValueError(f"worker {worker} is dead")
        if (fragment, version, worker) not in self._offers:  # it will look on
            offer = Offer((fragment, version), worker, self.now_s, None)
            self._offers[fragment, version, worker] = offer
        offer = self._undecided(worker, fragment, version)
        launched = None if after is None else self._under_way.get(after)
        if launched is None:
            self._let_go(offer, nbytes, self.now_s, (self.now_s, 0.0, 0.0, 0.0, 0.0))
        else:
            offer.waits_in, offer.control_bytes = launched, nbytes
            launched.followers.append(offer)

    def _let_go(self, offer: Offer, nbytes: int, done_s: float, why: Why) -> None:
        """The worker of an offer goes on without a result of its own."""
        self._charge(self._workers[offer.worker], nbytes, self.now_s)
        wire = 0
        if offer.tap is not None:
            wire = sum(offer.tap.spent().values())
            self.wire_bytes += wire
        self._settle(offer, done_s, why, wire)

    def _abort(self, number: int) -> int:
        launched = self._under_way.pop(number, None)
        if launched is None:
            raise ValueError(f"collective {number} is not under way")
        launched.abort()
        self._closed_taps.append(launched.tap)
        spent = launched.tap.spent()
        self.wire_bytes += sum(spent.values())
        gone = 0
        for member, worker in enumerate(launched.collective.order):
            offer = launched.offers.get(member)
            key = launched.fallen.get(member) if offer is None else offer.key
            if key is None:
                continue  # it has gone on
            if offer is not None:
                offer.launched = offer.end = None
            gone += spent.get(worker, 0)
            self._spend(worker, key, spent.get(worker, 0))
        for offer in launched.followers:
            offer.waits_in = None
        return gone

    def _spend(self, worker: int, key: tuple[int, int], wire: int) -> None:
        if wire:
            self._found.spent.append(Spent(self.now_s, worker, *key, wire))

    # Death

    def _kill(self, worker: Worker) -> tuple[int, ...]:
        number, now_s = worker.number, self.now_s
        if number in self._died_s:
            raise ValueError(f"worker {number} is dead already")
        self._died_s[number] = now_s
        worker.ops.clear()
        self._starved.discard(worker)
        if worker in self._runnable:
            self._runnable.remove(worker)
        if worker.waits_for is not None:
            if isinstance(worker.waits_for, Gate):
                worker.waits_for.joiners.remove(worker)
            self._go_on(worker)
        numbers = self._drop_offers(number)
        self._fabric.cancel(lambda what, told: told and concerns(what, number))
        self._undo(worker)
        return numbers

    def _drop_offers(self, worker: int) -> tuple[int, ...]:
        """Forget its contributions; the numbers of the collectives that fail for that."""
        numbers = []
        for key in sorted(key for key in self._offers if key[2] == worker):
            offer = self._offers.pop(key)
            if offer.send is not None and offer.ready_s > self.now_s:
                self._workers[worker].sends -= 1  # not sent after all
            launched = offer.launched
            if launched is not None and self._under_way.get(launched.number) is launched:
                if launched.bury(worker, self.now_s):
                    numbers.append(launched.number)
            elif offer.waits_in is not None:
                offer.waits_in.followers.remove(offer)
            elif offer.end is not None:
                self._spend(worker, offer.key, offer.wire)
            elif offer.tap is not None:
                offer.tap.close()
                self._closed_taps.append(offer.tap)
                wire = sum(offer.tap.spent().values())
                self.wire_bytes += wire
                self._spend(worker, offer.key, wire)
        return tuple(sorted(numbers))

    def _undo(self, worker: Worker) -> None:
        """What a worker that died did in advance of that moment has not happened."""
        number, now_s, found = worker.number, self.now_s, self._found
        self._past[number].rewind(now_s)
        steps, found.steps = found.steps, []
        for part in steps:
            found.steps += split(part, now_s)[0] if part[0] == number else [part]
        undone = [
            sync
            for sync in (*found.syncs, *self._told)
            if sync.worker == number and sync.passed_s > now_s
        ]
        for sync in undone:
            self._spend(number, (sync.fragment, sync.version), sync.wire_bytes)
        found.syncs = [sync for sync in found.syncs if sync not in undone]
        self._told = [sync for sync in self._told if sync not in undone]
        for gate in (*self._gates.values(), *self._marks.gates.values()):
            if gate.passed_s.get(number, now_s) > now_s:
                del gate.passed_s[number]
            self._look_at(gate)

    def _compute_steps(self, worker: Worker, op: Compute) -> None:
        self._past[worker.number].note(self.now_s)
        super()._compute_steps(worker, op)

    def _rarely(self, worker: Worker, op: Op) -> bool:
        if type(op) is Idle:
            self._past[worker.number].note(self.now_s)
        return super()._rarely(worker, op)

    def _revive(self, action: Revive) -> None:
        number, time_s, step = action
        if number not in self._died_s:
            raise ValueError(f"worker {number} is not dead")
        if time_s < self.now_s:
            raise ValueError(f"{time_s!r} is past at {self.now_s!r}")
        del self._died_s[number]
        self._passers.from_step[number] = step
        worker = self._workers[number]
        self._past[worker.number].note(self.now_s)
        worker.away_until(time_s)
        worker.ended = False
        self._starved.add(worker)
