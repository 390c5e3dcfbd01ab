"""Where bytes can go: islands, the links between them, every worker's LAN port, and the routes.

The emulated network is a set of numbered, one-directional FIFO resources. First come the WAN links,
two per wire; then an out-port and an in-port for each worker; last the coordinator's two ports. A
LAN is a non-blocking switch, so a port is all that limits a worker inside its island, and a route
that passes through an island on the way to another one touches none of its ports.

A path is what a transfer occupies from one port to another: out-port, the WAN links of the route,
in-port. Its hops carry the delays, because a LAN's delay belongs to the crossing and not to the
port: once in all inside an island, once at each end between two islands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from islands.errors import InputError, nearest

#: Stands for the coordinator where a worker's number is expected.
COORDINATOR = -1


@dataclass(frozen=True)
class Site:
    """An island: ``workers`` replicas behind one switch; its LAN's bandwidth may be infinite."""

    name: str
    workers: int
    lan_bytes_per_s: float
    lan_delay_s: float


@dataclass(frozen=True)
class Wire:
    """A connection of two islands: one link in each direction, both with the same numbers."""

    name: str
    between: tuple[str, str]
    bytes_per_s: float
    delay_s: float


@dataclass(frozen=True)
class Link:
    """One direction of a wire, named ``wire:from>to``."""

    name: str
    source: str
    target: str
    bytes_per_s: float
    delay_s: float


class Hop(NamedTuple):
    """One resource on a path: its number, its bandwidth, and the delay after it on this path."""

    resource: int
    bytes_per_s: float
    delay_s: float


class Charge(NamedTuple):
    """The ledger line (a WAN link or ``lan:x``) for a path's hops ``first`` … ``last``."""

    link: str
    first: int
    last: int


Path: TypeAlias = tuple[Hop, ...]


def lan_name(island: str) -> str:
    """The ledger's name for what stays inside one island."""
    return f"lan:{island}"


@dataclass(frozen=True)
class Topology:
    """A cluster's network, validated and with every route known. Build it with :meth:`build`."""

    sites: tuple[Site, ...]
    links: tuple[Link, ...]
    coordinator_island: int
    island_of: tuple[int, ...]
    routes: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def build(
        cls, sites: Sequence[Site], wires: Sequence[Wire], coordinator: str | None = None
    ) -> Topology:
        """Direct the wires, place the coordinator and find all routes.

        Errors: InputError when a wire or ``coordinator`` names an island that is not there, or when
        two islands have no route.
        """
        names = [site.name for site in sites]
        for wire in wires:
            for end in wire.between:
                if end not in names:
                    raise InputError(
                        f"links.{wire.name}.between: unknown island {end!r}{nearest(end, names)}"
                    )
        if coordinator is not None and coordinator not in names:
            raise InputError(
                f"coordinator: unknown island {coordinator!r}{nearest(coordinator, names)}"
            )
        links = tuple(
            Link(f"{wire.name}:{source}>{target}", source, target, wire.bytes_per_s, wire.delay_s)
            for wire in wires
            for source, target in (wire.between, wire.between[::-1])
        )
        return cls(
            sites=tuple(sites),
            links=links,
            coordinator_island=0 if coordinator is None else names.index(coordinator),
            island_of=tuple(i for i, site in enumerate(sites) for _ in range(site.workers)),
            routes=tuple(_routes_from(source, names, links) for source in names),
        )

    @property
    def workers(self) -> int:
        """Number of workers in the cluster, numbered island by island."""
        return len(self.island_of)

    @property
    def island_names(self) -> tuple[str, ...]:
        """The islands in the order of the cluster file."""
        return tuple(site.name for site in self.sites)

    @property
    def resources(self) -> int:
        """Number of FIFO resources: WAN links, two ports per worker, the coordinator's two."""
        return len(self.links) + 2 * self.workers + 2

    def route(self, source: int, target: int) -> tuple[str, ...]:
        """Names of the WAN links from island ``source`` to island ``target``, in order."""
        return tuple(self.links[link].name for link in self.routes[source][target])

    def path(self, source: int, target: int) -> Path:
        """The hops from one port to another; ``COORDINATOR`` is the coordinator's own port."""
        here, there = self._island(source), self._island(target)
        out_site, in_site = self.sites[here], self.sites[there]
        out_port, in_port = self._out_port(source), self._out_port(target) + 1
        wan = (self.links[link] for link in self.routes[here][there])
        return (
            Hop(out_port, out_site.lan_bytes_per_s, out_site.lan_delay_s),
            *(
                Hop(number, link.bytes_per_s, link.delay_s)
                for number, link in zip(self.routes[here][there], wan, strict=True)
            ),
            Hop(in_port, in_site.lan_bytes_per_s, 0.0 if here == there else in_site.lan_delay_s),
        )

    def charges(self, source: int, target: int) -> tuple[Charge, ...]:
        """Which ledger lines a transfer on :meth:`path` counts on.

        Inside an island that is its LAN, once for both ports. Between islands it is each WAN link
        of the route and no LAN, so that nothing is counted twice on a route of one link.
        """
        here, there = self._island(source), self._island(target)
        if here == there:
            return (Charge(lan_name(self.sites[here].name), 0, 1),)
        route = self.route(here, there)
        return tuple(Charge(name, hop, hop) for hop, name in enumerate(route, start=1))

    def _island(self, worker: int) -> int:
        return self.coordinator_island if worker == COORDINATOR else self.island_of[worker]

    def _out_port(self, worker: int) -> int:
        port = self.workers if worker == COORDINATOR else worker
        return len(self.links) + 2 * port


def _routes_from(
    source: str, names: Sequence[str], links: Iterable[Link]
) -> tuple[tuple[int, ...], ...]:
    """Best routes from one island: fewest hops, then least delay, then the links' names.

    Dijkstra's algorithm over the label (hops, delay, names); at an island all candidates of equal
    hops have names of equal length, so appending a link keeps their order.
    """
    leaving: dict[str, list[tuple[int, Link]]] = {name: [] for name in names}
    for number, link in enumerate(links):
        leaving[link.source].append((number, link))
    best: dict[str, tuple[int, ...]] = {}
    queue: list[tuple[int, float, tuple[str, ...], tuple[int, ...], str]] = [
        (0, 0.0, (), (), source)
    ]
    while queue:
        hops, delay, used, route, island = heappop(queue)
        if island in best:
            continue
        best[island] = route
        for number, link in leaving[island]:
            if link.target not in best:
                label = (hops + 1, delay + link.delay_s, (*used, link.name))
                heappush(queue, (*label, (*route, number), link.target))
    for name in names:
        if name not in best:
            raise InputError(f"links: no route from island {source!r} to island {name!r}")
    return tuple(best[name] for name in names)
