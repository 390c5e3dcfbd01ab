"""The byte ledger: what crossed which link, in whole bytes, and when.

Rows are the only source of the totals, so the rows of a run always sum to them. A row stands for
one collective on one link and one kind of content, or for a single transfer when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from islands.network.topology import Path, Topology, lan_name
from islands.trace import Bytes

if TYPE_CHECKING:
    from islands.network.fabric import Fabric

#: The kinds of content of a payload, in the order of :class:`islands.trace.Bytes`.
KINDS = ("values", "indices", "scales")


class TransferRow(NamedTuple):
    """Transfers of one round on one link that carried one kind of content.

    ``count`` is how many carried it. The times are those of all the round's transfers on that link:
    when the first began, when the last had arrived at the link's far end (on a LAN: at the
    receiver), and how long they queued there in sum. ``fragment`` −1 is what belongs to no round.
    """

    fragment: int
    version: int
    link: str
    kind: str
    bytes: int
    count: int  # type: ignore[assignment]  # the column's name wins over tuple.count
    first_start_s: float
    last_delivered_s: float
    queued_s: float


class LinkTotals(NamedTuple):
    """Everything that crossed a link, and for how long it was sending (control takes no time).

    ``bytes`` includes the ``background_bytes`` of other jobs, which are known at the end of a run,
    like ``peak`` and ``p95``: the largest and the 95th percentile of the shares of each second that
    the link was busy. A LAN has as many ports as workers: its busy time is the mean over them, and
    its seconds are not looked at.
    """

    bytes: int
    busy_s: float
    background_bytes: int = 0
    peak: float | None = None
    p95: float | None = None


#: Per ledger line of some lanes: (kind, bytes, number of transfers) of each kind that was there.
Amounts: TypeAlias = tuple[tuple[tuple[str, int, int], ...], ...]


class Lanes:
    """The fixed paths that a kind of collective uses, and which ledger lines their hops count on.

    ``ends`` are the two workers of each lane; COORDINATOR is the coordinator's own port.
    Every hop of every lane has a slot in the lists of a :class:`Times`. ``lines`` maps a link to
    its (lane, first slot, last slot) triples, in lane order.
    """

    def __init__(self, topology: Topology, ends: Sequence[tuple[int, int]]) -> None:
        self.ends = tuple(ends)
        self.paths: tuple[Path, ...] = tuple(topology.path(*pair) for pair in ends)
        self.slots: list[int] = []
        self.width = 0
        self.lines: dict[str, list[tuple[int, int, int]]] = {}
        self._by_lane: list[list[tuple[str, int, int]]] = []
        for lane, (pair, path) in enumerate(zip(ends, self.paths, strict=True)):
            self.slots.append(self.width)
            charged = [
                (link, self.width + first, self.width + last)
                for link, first, last in topology.charges(*pair)
            ]
            self._by_lane.append(charged)
            for link, first, last in charged:
                self.lines.setdefault(link, []).append((lane, first, last))
            self.width += len(path)

    def amounts(self, sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> Amounts:
        """Bytes and transfers per ledger line, from those per lane; both (lanes, kinds)."""
        found = []
        for parts in self.lines.values():
            lanes = [lane for lane, _, _ in parts]
            totals = zip(
                KINDS, sizes[lanes].sum(0).tolist(), counts[lanes].sum(0).tolist(), strict=True
            )
            found.append(tuple(total for total in totals if total[1]))
        return tuple(found)

    def rows(self, key: tuple[int, int], times: Times, amounts: Amounts) -> list[TransferRow]:
        """One row per link and kind of a finished collective."""
        rows = []
        for (link, parts), kinds in zip(self.lines.items(), amounts, strict=True):
            if not kinds:
                continue
            first_s, last_s, queued_s = inf, -inf, 0.0
            for _, first, last in parts:
                first_s = min(first_s, times.first_s[first])
                last_s = max(last_s, times.last_s[last])
                queued_s += times.queued(first, last)
            for kind, size, count in kinds:
                rows.append(TransferRow(*key, link, kind, size, count, first_s, last_s, queued_s))
        return rows

    def rows_each(
        self, key: tuple[int, int], times: Times, transfers: Iterable[tuple[int, int, Bytes]]
    ) -> list[TransferRow]:
        """One row per transfer, link and kind; a transfer is (phase, lane, size)."""
        rows = []
        for phase, lane, size in transfers:
            for link, first, last in self._by_lane[lane]:
                begin, end = phase * self.width + first, phase * self.width + last
                moments = (times.first_s[begin], times.last_s[end], times.queued(begin, end))
                for kind, part in zip(KINDS, size, strict=True):
                    if part:
                        rows.append(TransferRow(*key, link, kind, part, 1, *moments))
        return rows


class Times:
    """When the hops of a collective's transfers were served, one slot per lane and hop.

    Transfers of one lane pass each hop in the order of their phases, so sums over them do not
    depend on what else is in flight.
    """

    def __init__(self, slots: int) -> None:
        self.first_s = [inf] * slots
        self.last_s = [0.0] * slots
        self.queued_s = [0.0] * slots

    def queued(self, first: int, last: int) -> float:
        """Seconds of waiting at the hops ``first`` … ``last`` together."""
        return sum(self.queued_s[first : last + 1])


class Ledger:
    """Adds rows up, per link and in all, and hands the new ones out."""

    def __init__(self, topology: Topology, fabric: Fabric, *, per_transfer: bool) -> None:
        self._topology = topology
        self._fabric = fabric
        self._per_transfer = per_transfer
        self._bytes = {link.name: 0 for link in topology.links}
        self._bytes.update({lan_name(site.name): 0 for site in topology.sites})
        self._control = dict.fromkeys(self._bytes, 0)
        self._rows: list[TransferRow] = []
        self._handed_out: dict[str, TransferRow] = {}
        self._charged: dict[str, TransferRow] = {}
        self._final: dict[str, LinkTotals] | None = None

    def add(self, rows: Iterable[TransferRow]) -> None:
        """Count finished transfers."""
        for row in rows:
            if self._charged:
                self._tell_charged()
            self._bytes[row.link] += row.bytes
            self._rows.append(row)

    def control(self, source: int, target: int, size: int, time_s: float) -> None:
        """Count ``size`` bytes from worker to worker that take no emulated time.

        One row per link stands for all of them between two :meth:`take`.
        """
        self._count_control(self._handed_out, source, target, size, time_s)

    def charge(self, source: int, target: int, size: int, time_s: float) -> None:
        """The same in the midst of a run, in the order of time.

        One row per link stands for all of them up to the next rows of a round, so that the rows do
        not depend on when they are taken.
        """
        self._count_control(self._charged, source, target, size, time_s)

    def _tell_charged(self) -> None:
        self._rows += self._charged.values()
        self._charged = {}

    def _count_control(
        self, rows: dict[str, TransferRow], source: int, target: int, size: int, time_s: float
    ) -> None:
        for link, _, _ in self._topology.charges(source, target):
            self._bytes[link] += size
            self._control[link] += size
            row = TransferRow(-1, 0, link, "control", size, 1, time_s, time_s, 0.0)
            old = rows.get(link)
            if self._per_transfer:
                self._rows.append(row)
            elif old is None:
                rows[link] = row
            else:
                rows[link] = row._replace(
                    bytes=old.bytes + size,
                    count=old.count + 1,
                    first_start_s=min(old.first_start_s, time_s),
                    last_delivered_s=max(old.last_delivered_s, time_s),
                )

    def take(self) -> list[TransferRow]:
        """The rows since the last call."""
        rows = [*self._handed_out.values(), *self._rows]
        self._handed_out, self._rows = {}, []
        return rows

    @property
    def links(self) -> dict[str, LinkTotals]:
        """Totals so far of every WAN link, then of every LAN."""
        if self._final is not None:
            return self._final
        rates = {link.name: link.bytes_per_s for link in self._topology.links}
        for site in self._topology.sites:
            rates[lan_name(site.name)] = site.lan_bytes_per_s * site.workers
        return {
            name: LinkTotals(size, (size - self._control[name]) / rates[name])
            for name, size in self._bytes.items()
        }

    def end(self, end_s: float) -> None:
        """Close the books at ``end_s``: other jobs' transfers, and how busy the links were."""
        self._tell_charged()
        self._fabric.settle(end_s)
        totals = dict(self.links)
        for resource, link in enumerate(self._topology.links):
            line = self._fabric.lines[resource]
            assert line is not None
            used = line.usage.summary(end_s)
            mine = totals[link.name]
            # A constant link that carries nobody else is busy for exactly its bytes over its rate.
            busy_s = mine.busy_s if line.plain else used.busy_s
            others = self._fabric.others(resource)
            size = 0
            if others is not None:
                size = others.bytes
                moments = (others.first_start_s, others.last_s + link.delay_s, others.queued_s)
                self._rows.append(
                    TransferRow(-1, 0, link.name, "background", size, others.count, *moments)
                )
            totals[link.name] = LinkTotals(mine.bytes + size, busy_s, size, used.peak, used.p95)
        self._final = totals

    @property
    def wan_bytes(self) -> int:
        """Bytes of this run over all WAN links; a route of two links counts twice."""
        return sum(self._bytes[link.name] for link in self._topology.links)

    @property
    def lan_bytes(self) -> int:
        """Bytes that stayed inside an island."""
        return sum(self._bytes[lan_name(site.name)] for site in self._topology.sites)

    @property
    def control_bytes(self) -> int:
        """Control bytes over all links, included in the totals above."""
        return sum(self._control.values())
