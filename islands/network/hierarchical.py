"""The hierarchical collective: gather inside each island, exchange between them, hand out inside.

The members in an island send their payloads to the first of them, the leader. The leaders exchange
in a ring, island by island: a ring all-reduce of the payload, or a ring all-gather of what their
islands gathered. Then each leader sends its members what they lack: the result, or everything but
their own. A WAN link so carries each thing once, whatever the number of workers behind it.

With one member per island this is the plain ring; with one island there is no exchange. An island
without members takes no part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from islands.network.collectives import (
    Carrier,
    Listener,
    Relay,
    Scheme,
    check_reduced,
    cut,
    ring_loads,
)
from islands.network.fabric import Chain
from islands.network.ledger import Amounts, Lanes, TransferRow
from islands.network.star import others_of
from islands.network.topology import Topology
from islands.trace import Bytes


@dataclass(frozen=True)
class HierarchyPlan:
    """All that follows from the payloads' sizes: what every lane carries and every member sends."""

    pieces: tuple[Bytes, ...]
    down: tuple[Bytes, ...]
    wire: tuple[int, ...]
    amounts: Amounts


class Hierarchies(Scheme):
    """The islands of some workers in a given order of all, their leaders, and the lanes between.

    Lanes come as: leader to next leader (none with a single island), then inner members up to
    their leaders, then down to the inner members. ``groups`` holds the positions of each island's
    members, the leader first; ``inner`` those of all who do not lead.
    """

    def __init__(
        self,
        topology: Topology,
        operation: str,
        everyone: Sequence[int],
        members: Collection[int] | None = None,
        *,
        per_transfer: bool,
    ) -> None:
        super().__init__(everyone, members)
        self.per_transfer = per_transfer
        groups: dict[int, list[int]] = {}
        for position, worker in enumerate(self.order):
            groups.setdefault(topology.island_of[worker], []).append(position)
        self.groups = tuple(tuple(group) for group in groups.values())
        self.leaders = tuple(group[0] for group in self.groups)
        self.inner = tuple(position for group in self.groups for position in group[1:])
        self.turns = 2 if operation == "all_reduce" else 1
        self.exchanges = len(self.groups) if len(self.groups) > 1 else 0
        self.phases = self.turns * (len(self.groups) - 1)
        heads = [self.order[leader] for leader in self.leaders]
        ring = list(zip(heads, heads[1:] + heads[:1], strict=True)) if self.exchanges else []
        up = [
            (self.order[position], self.order[group[0]])
            for group in self.groups
            for position in group[1:]
        ]
        self.lanes = Lanes(topology, [*ring, *up, *((there, here) for here, there in up)])
        self.place = {position: number for number, position in enumerate(self.inner)}
        self.group_of = {p: number for number, group in enumerate(self.groups) for p in group}
        self._plans: dict[tuple[Bytes | int, ...], HierarchyPlan] = {}

    def open(self, key: tuple[int, int], fabric: Carrier, tell: Listener) -> Hierarchical:
        """The collective of one round."""
        return Hierarchical(self, key, fabric, tell)

    def plan(self, sizes: Sequence[Bytes], itemsize: int) -> HierarchyPlan:
        """The plan for payloads of these sizes, one per member."""
        key = (sizes[0], itemsize) if self.turns == 2 else tuple(sizes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= 64:  # sizes that vary from round to round are not worth keeping
                self._plans.clear()
            plan = self._plans[key] = self._make(sizes, itemsize)
        return plan

    def _make(self, sizes: Sequence[Bytes], itemsize: int) -> HierarchyPlan:
        if self.turns == 2:
            pieces = cut(sizes[0], itemsize, len(self.groups))
            down = [sizes[0]] * len(self.inner)
        else:
            pieces = tuple(bundle([sizes[member] for member in group]) for group in self.groups)
            lacking = others_of(sizes)
            down = [lacking[member] for member in self.inner]
        up = [sizes[member] for member in self.inner]
        exchanged, times = ring_loads(pieces, self.turns)
        inner = np.array([*up, *down], dtype=np.int64).reshape(-1, 3)
        carried = np.concatenate([exchanged[: self.exchanges], inner])
        counts = np.concatenate([times[: self.exchanges], (inner > 0).astype(np.int64)])
        wire = [0] * self.members
        for leader, sent in zip(self.leaders, exchanged.sum(1).tolist(), strict=True):
            wire[leader] = sent
        for member, own, answer in zip(self.inner, up, down, strict=True):
            wire[member] = own.total
            wire[self.leaders[self.group_of[member]]] += answer.total
        return HierarchyPlan(pieces, tuple(down), tuple(wire), self.lanes.amounts(carried, counts))


def bundle(sizes: Sequence[Bytes]) -> Bytes:
    """Several payloads as one, kind by kind."""
    return Bytes(*map(sum, zip(*sizes, strict=True)))


class Hierarchical(Relay):
    """One hierarchical collective.

    A leader joins the exchange when its own payload and all of its island's are there. It hands out
    when it has everything, and is done when the last that it passes on or hands out has left.
    """

    def __init__(
        self, scheme: Hierarchies, key: tuple[int, int], fabric: Carrier, tell: Listener
    ) -> None:
        super().__init__(scheme, key, fabric, tell, nodes=len(scheme.groups), phases=scheme.phases)
        self._scheme = scheme
        self._sizes = [Bytes()] * scheme.members
        self._reduced: tuple[Bytes, int] | None = None
        exchange = 1 if scheme.exchanges else 0
        #: Per island: its payloads; then (its own and) what the exchange brought; then what is yet
        #: to leave its leader.
        self._collects = [_Latest(len(group)) for group in scheme.groups]
        self._has = [_Latest(1 + exchange) for _ in scheme.groups]
        self._ends = [_Latest(exchange + len(group)) for group in scheme.groups]

    @property
    def plan(self) -> HierarchyPlan:
        """Sizes on all lanes; known when all members have entered, or one of an all-reduce."""
        if self._reduced is None:
            return self._scheme.plan(self._sizes, 1)
        size, itemsize = self._reduced
        return self._scheme.plan([size] * self.members, itemsize)

    def _entered(self, member: int, size: Bytes, itemsize: int) -> None:
        self._sizes[member] = size
        scheme = self._scheme
        if scheme.turns == 2:
            if self._reduced is None:
                self._reduced = (size, itemsize)
                self._pieces = [piece.total for piece in self.plan.pieces]
            check_reduced(self.key, member, (size, itemsize), self._reduced)
        if self.members == 1:
            self._alone()
            return
        place = scheme.place.get(member)
        if place is None:
            group = scheme.group_of[member]
            self._collected(group, self.ready_s[member], member, self._own(member))
        else:
            # Not of the final phase: that it has left is no news once it has arrived.
            lane = scheme.exchanges + place
            self._move(lane, -1, self.ready_s[member], member, size, self._own(member))

    def _move(
        self, lane: int, phase: int, time_s: float, member: int, size: Bytes, chain: Chain
    ) -> None:
        """A transfer up or down; at one moment those up come before the exchange, those down after
        it."""
        lanes = self._lanes
        stage = 0 if phase < 0 else 1 + self._scheme.phases
        number = self._first[member] + stage * self._width
        transfer = (lanes.paths[lane], size.total, self, lanes.slots[lane], lane, phase, chain)
        self._fabric.send(time_s, number, transfer)

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        scheme = self._scheme
        place = lane - scheme.exchanges
        if place < 0:
            super().delivered(lane, phase, time_s, chain)
        elif phase < 0:
            member = scheme.inner[place]
            self._collected(scheme.group_of[member], time_s, member, chain)
        else:
            self.finish(scheme.inner[place - len(scheme.inner)], time_s, chain)

    def _collected(self, group: int, time_s: float, member: int, chain: Chain) -> None:
        collects, scheme = self._collects[group], self._scheme
        if not collects.complete(time_s, -member, chain):
            return
        if scheme.turns == 1:
            own = bundle([self._sizes[position] for position in scheme.groups[group]])
            self._pieces[group] = own.total
        if scheme.exchanges:
            number = self._first[scheme.leaders[group]] + self._width
            self._join(group, number, collects.time_s, collects.chain)
        # A gathering never waits for this island's own: the rest may have been here before it.
        if self._has[group].complete(collects.time_s, 1, collects.chain):
            self._hand_out(group)

    def _gathered(self, node: int, time_s: float, chain: Chain) -> None:
        if self._has[node].complete(time_s, 0, chain):
            self._hand_out(node)

    def _hand_out(self, group: int) -> None:
        """A leader has everything, and so everyone has entered."""
        plan, scheme, has = self.plan, self._scheme, self._has[group]
        self.wire = plan.wire
        for member in scheme.groups[group][1:]:
            place = scheme.place[member]
            lane = scheme.exchanges + len(scheme.inner) + place
            size = plan.down[place]
            self._move(lane, self.final_phase, has.time_s, member, size, has.chain.copy())
        self._settle(group, has.time_s, 0, has.chain)

    def left(self, lane: int, finish_s: float, chain: Chain) -> None:
        scheme = self._scheme
        place = lane - scheme.exchanges - len(scheme.inner)
        if place < 0:
            super().left(lane, finish_s, chain)
        else:
            group = scheme.group_of[scheme.inner[place]]
            self._settle(group, finish_s, len(self._lanes.paths) - lane, chain.copy())

    def _departed(self, lane: int, finish_s: float, chain: Chain) -> None:
        self._settle(lane, finish_s, len(self._lanes.paths) - lane, chain.copy())

    def _settle(self, group: int, time_s: float, rank: int, chain: Chain) -> None:
        ends = self._ends[group]
        if ends.complete(time_s, rank, chain):
            self.finish(self._scheme.leaders[group], ends.time_s, ends.chain)

    def rows(self) -> list[TransferRow]:
        lanes, plan = self._lanes, self.plan
        if self._scheme.per_transfer:
            return lanes.rows_each(self.key, self, self.transfers())
        return lanes.rows(self.key, self, plan.amounts)

    def transfers(self) -> Iterator[tuple[int, int, Bytes]]:
        plan, scheme = self.plan, self._scheme
        up = [self._sizes[member] for member in scheme.inner]
        for lane, size in enumerate([*up, *plan.down], start=scheme.exchanges):
            yield 0, lane, size
        for phase in range(scheme.phases):
            for lane in range(scheme.exchanges):
                yield phase, lane, plan.pieces[(lane - phase) % scheme.exchanges]


class _Latest:
    """Waits for so many things and remembers the last of them: at one moment, the highest rank."""

    __slots__ = ("_missing", "_rank", "chain", "time_s")

    def __init__(self, things: int) -> None:
        self._missing = things
        self._rank = 0
        self.time_s = -inf
        self.chain: Chain = []

    def complete(self, time_s: float, rank: int, chain: Chain) -> bool:
        """Whether this was the last one to wait for."""
        if (time_s, rank) > (self.time_s, self._rank):
            self.time_s, self._rank, self.chain = time_s, rank, chain
        self._missing -= 1
        return not self._missing
