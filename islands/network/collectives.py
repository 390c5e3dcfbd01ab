"""What a collective puts on the wire, and why each member had to wait; the ring is here.

In a ring of p members, member i sends to member i + 1 in phases; in phase k it sends piece
(i − k) mod p and may do so once it has what arrived in phase k − 1. An all-gather has p − 1 phases
and piece j is the whole payload of member j. An all-reduce has 2(p − 1) phases and the pieces are p
nearly equal cuts of the payload at whole values: p − 1 phases of reduce-scatter, then p − 1 that
pass the sums round (Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms").

A collective may be one of some workers only. Members are *positions*: a scheme's ``order`` says
which worker stands where, and its ``open`` gives the collective of one round. The other schemes are
:mod:`islands.network.star` and :mod:`islands.network.hierarchical`;
:func:`islands.network.schemes.plan_for` builds any of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from islands.network.fabric import Chain, Transfer
from islands.network.ledger import Amounts, Lanes, Times, TransferRow
from islands.network.topology import Topology
from islands.trace import Bytes, Send

COLLECTIVES = ("all_reduce", "all_gather", "star")

#: A chain that is finished: (root_s, own_s, background_s, propagation_s, others_s).
Why: TypeAlias = tuple[float, float, float, float, float]

#: Ids order ties by how many rounds the member entered before, then phase, then member. So a
#: member's later round never overtakes its earlier one, not even when both are ready at one moment.
TURN_BITS = 44


def cut(size: Bytes, itemsize: int, parts: int) -> tuple[Bytes, ...]:
    """Cut a payload into ``parts`` pieces at whole values, the first ones longer by one value.

    The payload is the buffer of values, then indices, then scales; a piece is a range of it. The
    last value may be short when the total is no multiple of ``itemsize``.
    """
    items = -(-size.total // itemsize)
    share, longer = divmod(items, parts)
    bounds = [min(size.total, itemsize * (c * share + min(c, longer))) for c in range(parts + 1)]
    pieces = []
    for low, high in pairwise(bounds):
        sizes, begin = [], 0
        for part in size:
            end = begin + part
            sizes.append(max(0, min(high, end) - max(low, begin)))
            begin = end
        pieces.append(Bytes(*sizes))
    return tuple(pieces)


def ring_loads(pieces: Sequence[Bytes], turns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What each node of a ring sends in ``turns`` turns: bytes and transfers, (nodes, kinds)."""
    kinds = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    # Node i misses the last `turns` of turns·p phases: the pieces i + 1 … i + turns.
    sizes, counts = (
        turns * part.sum(0) - sum(np.roll(part, -j, axis=0) for j in range(1, turns + 1))
        for part in (kinds, (kinds > 0).astype(np.int64))
    )
    return sizes, counts


class Listener(Protocol):
    """Who is told that a member is done with a collective."""

    def __call__(self, collective: Collective, member: int) -> None: ...


class Carrier(Protocol):
    """What takes a collective's transfers: the fabric, or what stands before it."""

    def send(self, time_s: float, order: int, transfer: Transfer) -> None:
        """As :meth:`Fabric.send`."""
        ...

    def announce(self, time_s: float, kind: int, order: int, what: object) -> None:
        """As :meth:`Fabric.announce`."""
        ...


class Standing:
    """Who takes part, and who stands where.

    ``members`` is their number; ``order[position]`` is the worker that stands at a position, and
    ``position[worker]`` the reverse. Ids go by the ``places`` that the members would have among all
    ``width`` workers, because two collectives at one time may be of different workers.
    """

    def __init__(self, everyone: Sequence[int], members: Collection[int] | None) -> None:
        """``everyone`` is the order of all workers; ``members`` None: all of them."""
        there = set(everyone if members is None else members)
        self.order = tuple(worker for worker in everyone if worker in there)
        self.members = len(self.order)
        self.position = {worker: n for n, worker in enumerate(self.order)}
        self.places = [n for n, worker in enumerate(everyone) if worker in there]
        self.width = len(everyone)


class Scheme(Standing):
    """How some workers carry out one operation: opens one collective per round."""

    lanes: Lanes
    per_transfer: bool

    def open(self, key: tuple[int, int], fabric: Carrier, tell: Listener) -> Collective:
        """The collective of round ``key``; ``tell(collective, position)`` at each member's end."""
        raise NotImplementedError


class Collective(Times):
    """One round of one fragment: who has entered it, and who is done since when.

    Times are emulated seconds, one entry per member (position); NaN until known. ``why`` has for
    each member the chain of transfers that decided its ``done_s``: done_s − root_s is the sum of
    the other four and of transmission, which is what remains. It is known when ``done_s`` is, and
    so is ``wire``: the bytes that each member sent.
    """

    final_phase = -1

    def __init__(
        self,
        standing: Standing,
        key: tuple[int, int],
        slots: int,
        fabric: Carrier,
        tell: Listener,
    ) -> None:
        super().__init__(slots)
        self.key = key
        members = self.members = standing.members
        self.order = standing.order
        self.position = standing.position
        self.step = [0] * members
        self.ready_s = [np.nan] * members
        self.done_s = [np.nan] * members
        self.why: list[Why] = [(np.nan, 0.0, 0.0, 0.0, 0.0)] * members
        self.wire: Sequence[int] = ()
        self.entered = 0
        self.finished = 0
        self.received = 0
        self._fabric = fabric
        self._tell = tell
        self._places = standing.places
        self._width = standing.width
        #: The id of each member's first transfer; in every later phase it is ``_width`` more.
        self._first = [0] * members

    def enter(self, member: int, turn: int, ready_s: float, op: Send) -> None:
        """A member hands over its payload, in its own ``turn``-th send; twice is a ValueError."""
        if self.ready_s[member] == self.ready_s[member]:
            raise ValueError(f"member {member} sends twice to round {self.key}")
        self.step[member] = op.step
        self._first[member] = (turn << TURN_BITS) + self._places[member]
        self.ready_s[member] = ready_s
        self.entered += 1
        self._entered(member, op.size, op.itemsize)

    def finish(self, member: int, done_s: float, chain: Chain) -> None:
        """Everything that this member sends has left and everything for it has arrived.

        ``chain`` is that of the last of these things to happen.
        """
        root_s, own_s, background_s, propagation_s, others_s = chain
        self.why[member] = (root_s, own_s, background_s, propagation_s, others_s)
        self.done_s[member] = done_s
        self.finished += 1
        self._tell(self, member)

    def _alone(self) -> None:
        """The only member has nobody to wait for."""
        self.wire = (0,)
        self.finish(0, self.ready_s[0], self._own(0))

    def _own(self, member: int) -> Chain:
        """The chain of what a member sends because of its own readiness."""
        return [self.ready_s[member], 0.0, 0.0, 0.0, 0.0]

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        raise NotImplementedError

    def left(self, lane: int, finish_s: float, chain: Chain) -> None:
        """A transfer of the final phase has left its sender's port.

        ``chain`` is as of then, with the queueing at that port and without the delay after it, and
        goes on changing: copy what is kept. Only collectives whose members may be done before
        their data has arrived care.
        """

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        """A transfer's last byte arrives at ``time_s``; its ``chain`` is finished and now ours."""
        raise NotImplementedError

    def rows(self) -> list[TransferRow]:
        """The ledger rows of this collective, once all members are done."""
        raise NotImplementedError

    def transfers(self) -> Iterator[tuple[int, int, Bytes]]:
        """All that a collective whose members have all entered sends, as (phase, lane, size)."""
        raise NotImplementedError

    def last_end(self) -> tuple[float, Why]:
        """When the last member was done, and its chain: at one moment, the lowest worker's."""
        done_s = max(self.done_s)
        last = (n for n, moment in enumerate(self.done_s) if moment == done_s)
        return done_s, self.why[min(last, key=self.order.__getitem__)]


def check_reduced(
    key: tuple[int, int], member: int, mine: tuple[Bytes, int], others: tuple[Bytes, int]
) -> None:
    """An all-reduce needs the same payload and item size from everyone; else a ValueError."""
    if mine != others:
        raise ValueError(f"member {member} sends {mine} to all-reduce {key}, others {others}")


class Relay(Collective):
    """A collective some of whose members are the nodes of a ring: node i sends to node i + 1.

    A node may send from the moment at which :meth:`_join` is called for it. Lane i of ``lanes`` is
    its way to the next node; more lanes may follow for other purposes.

    What a node sends to the next one goes through one connection, piece after piece. FIFO ports see
    to that by themselves. On a fair lane the pieces would share the bandwidth with each other, all
    arrive late together and leave the next node idle; so there each waits until the one before it
    has left, which counts as queueing at the port.
    """

    def __init__(
        self,
        scheme: Scheme,
        key: tuple[int, int],
        fabric: Carrier,
        tell: Listener,
        *,
        nodes: int,
        phases: int,
    ) -> None:
        lanes, each = scheme.lanes, scheme.per_transfer
        super().__init__(scheme, key, lanes.width * (max(phases, 1) if each else 1), fabric, tell)
        self.final_phase = max(phases, 1) - 1
        self._lanes = lanes
        self._nodes = nodes
        self._stride = lanes.width if each else 0
        #: What each node puts into the ring: bytes of piece j. Known before anyone sends it.
        self._pieces = [0] * nodes
        self._from_s = [np.nan] * nodes
        self._roots: list[Chain] = [[]] * nodes
        self._ids = [0] * nodes
        self._inbox: list[list[tuple[float, Chain]]] = [[] for _ in range(nodes)]
        #: The connections over fair lanes, by node.
        self._streams = {
            node: _Stream() for node in range(nodes if phases else 0) if lanes.paths[node][0].fair
        }

    def _join(self, node: int, number: int, from_s: float, chain: Chain) -> None:
        """Node ``node`` sends from ``from_s`` on; ``number`` is the id of its first transfer."""
        self._from_s[node] = from_s
        self._roots[node] = chain
        self._ids[node] = number
        self._pass(node, 0, from_s, chain.copy())
        # Neighbours may have been ready long before: what they sent need not wait any more.
        for phase, (arrived_s, arrived) in enumerate(self._inbox[node], start=1):
            if arrived_s > from_s:
                self._pass(node, phase, arrived_s, arrived)
            else:
                self._pass(node, phase, from_s, chain.copy())

    def _pass(self, node: int, phase: int, time_s: float, chain: Chain) -> None:
        """Send what is due in ``phase``, for which the node has been ready since ``time_s``."""
        tag = phase
        if self._streams and (stream := self._streams.get(node)) is not None:
            if stream.busy:
                stream.waiting.append((phase, time_s, chain))
                return
            stream.busy = True
            tag = self.final_phase  # of each of these we want to hear when it has left
        lanes = self._lanes
        size = self._pieces[(node - phase) % self._nodes]
        slot = lanes.slots[node] + phase * self._stride
        number = self._ids[node] + phase * self._width
        self._fabric.send(time_s, number, (lanes.paths[node], size, self, slot, node, tag, chain))

    def left(self, lane: int, finish_s: float, chain: Chain) -> None:
        stream = self._streams.get(lane)
        if stream is not None:
            stream.left += 1
            stream.busy = False
            if stream.waiting:
                phase, ready_s, following = stream.waiting.popleft()
                if finish_s > ready_s:
                    following[1] += finish_s - ready_s
                    self.queued_s[self._lanes.slots[lane] + phase * self._stride] += (
                        finish_s - ready_s
                    )
                self._pass(lane, phase, max(ready_s, finish_s), following)
            if stream.left <= self.final_phase:
                return
        self._departed(lane, finish_s, chain)

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        node = lane + 1 if lane + 1 < self._nodes else 0
        if self._streams and (stream := self._streams.get(lane)) is not None:
            phase = stream.delivered
            stream.delivered += 1
        if phase == self.final_phase:
            self._gathered(node, time_s, chain)
            return
        from_s = self._from_s[node]
        if time_s > from_s:
            self._pass(node, phase + 1, time_s, chain)
        elif from_s == from_s:
            self._pass(node, phase + 1, from_s, self._roots[node].copy())
        else:
            self._inbox[node].append((time_s, chain))

    def _gathered(self, node: int, time_s: float, chain: Chain) -> None:
        """A node has received everything that goes round."""
        raise NotImplementedError

    def _departed(self, lane: int, finish_s: float, chain: Chain) -> None:
        """The last that a node passes on has left its port; ``chain`` as of then, to be copied."""
        raise NotImplementedError


class _Stream:
    """The pieces that one node sends to the next over a fair lane, one at a time and in order."""

    __slots__ = ("busy", "delivered", "left", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.left = self.delivered = 0
        self.waiting: deque[tuple[int, float, Chain]] = deque()


class RingPlan:
    """All that follows from the sizes of a ring's pieces; computed once per distinct sizes."""

    def __init__(self, lanes: Lanes, pieces: Sequence[Bytes], turns: int) -> None:
        self.pieces = tuple(pieces)
        self.totals = [piece.total for piece in pieces]
        sizes, counts = ring_loads(pieces, turns)
        self.wire: list[int] = sizes.sum(1).tolist()
        self.amounts: Amounts = lanes.amounts(sizes, counts)


class Rings(Scheme):
    """The ring over some workers in a given order of all, and plans for payloads seen before.

    Lane i goes from position i to position i + 1.
    """

    def __init__(
        self,
        topology: Topology,
        collective: str,
        everyone: Sequence[int],
        members: Collection[int] | None = None,
        *,
        per_transfer: bool,
    ) -> None:
        super().__init__(everyone, members)
        self.turns = 2 if collective == "all_reduce" else 1
        self.phases = self.turns * (self.members - 1)
        self.per_transfer = per_transfer
        self.wan_links = len(topology.links)  # the first resources are WAN links
        ends = list(zip(self.order, self.order[1:] + self.order[:1], strict=True))
        self.lanes = Lanes(topology, ends if self.members > 1 else [])
        #: No two lanes share a resource, so lanes meet only where one hands over to the next, and
        #: every hop serves in order at one constant rate: what the vectorised path takes for given.
        self.disjoint = _disjoint(topology, self.lanes)
        self._plans: dict[tuple[Bytes | int, ...], RingPlan] = {}

    def open(self, key: tuple[int, int], fabric: Carrier, tell: Listener) -> Ring:
        """The ring of one round; it is still to be launched, or to be computed as arrays."""
        return Ring(self, key, fabric, tell)

    def plan(self, sizes: Sequence[Bytes], itemsize: int) -> RingPlan:
        """The plan for payloads of these sizes: one per member, or just one for an all-reduce."""
        reduce = self.turns == 2
        key = (sizes[0], itemsize) if reduce else tuple(sizes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= 64:  # sizes that vary from round to round are not worth keeping
                self._plans.clear()
            pieces = cut(sizes[0], itemsize, self.members) if reduce else sizes
            plan = self._plans[key] = RingPlan(self.lanes, pieces, self.turns)
        return plan


def _disjoint(topology: Topology, lanes: Lanes) -> bool:
    hops = [hop for path in lanes.paths for hop in path]
    resources = {hop.resource for hop in hops}
    links = [topology.links[number] for number in resources if number < len(topology.links)]
    return (
        len(resources) == len(hops)
        and not any(hop.fair for hop in hops)
        and all(
            link.background is None
            and not link.jitter_s
            and link.bandwidth is None
            and link.delay is None
            for link in links
        )
    )


class Ring(Relay):
    """One ring collective. It waits for :meth:`launch` before it uses the event loop."""

    def __init__(self, rings: Rings, key: tuple[int, int], fabric: Carrier, tell: Listener) -> None:
        members = rings.members
        super().__init__(rings, key, fabric, tell, nodes=members, phases=rings.phases)
        self.rings = rings
        self.launched = False
        self._sizes: list[Bytes | None] = [None] * members
        self._reduced = (Bytes(), 0)
        self._left: list[tuple[float, Chain] | None] = [None] * members
        self._arrived: list[tuple[float, Chain] | None] = [None] * members

    @property
    def plan(self) -> RingPlan:
        """Sizes of all pieces; known when all members have entered."""
        if self.rings.turns == 2:
            return self.rings.plan([self._reduced[0]], self._reduced[1])
        return self.rings.plan([size for size in self._sizes if size is not None], 1)

    def launch(self) -> None:
        """Start the sends of those who have entered; later ones start as they enter."""
        self.launched = True
        if self.members > 1:
            for member, size in enumerate(self._sizes):
                if size is not None:
                    self._start(member)

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        self._sizes[member] = size
        if self.rings.turns == 1:
            self._pieces[member] = size.total
        elif self.entered == 1:
            self._reduced = (size, itemsize)
            self._pieces = self.plan.totals
        else:
            check_reduced(self.key, member, (size, itemsize), self._reduced)
        if self.members == 1:
            self._alone()
        elif self.launched:
            self._start(member)

    def _start(self, member: int) -> None:
        self._join(member, self._first[member], self.ready_s[member], self._own(member))

    def _departed(self, lane: int, finish_s: float, chain: Chain) -> None:
        self._left[lane] = (finish_s, chain.copy())
        self._maybe_finish(lane)

    def _gathered(self, node: int, time_s: float, chain: Chain) -> None:
        self._arrived[node] = (time_s, chain)
        self._maybe_finish(node)

    def _maybe_finish(self, member: int) -> None:
        arrived, left = self._arrived[member], self._left[member]
        if arrived is not None and left is not None:
            self.wire = self.wire or self.plan.wire
            self.finish(member, *(arrived if arrived[0] > left[0] else left))

    def rows(self) -> list[TransferRow]:
        lanes, plan = self.rings.lanes, self.plan
        if self.rings.per_transfer:
            return lanes.rows_each(self.key, self, self.transfers())
        return lanes.rows(self.key, self, plan.amounts)

    def transfers(self) -> Iterator[tuple[int, int, Bytes]]:
        pieces = self.plan.pieces
        for phase in range(self.rings.phases):
            for lane in range(self.members):
                yield phase, lane, pieces[(lane - phase) % self.members]
