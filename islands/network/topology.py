"""Where bytes can go: islands, the links between them, every worker's LAN port, and the routes.

The emulated network is a set of numbered, one-directional resources. First come the WAN links: two
per wire, and each island's access lines and the backbone where there are such; then an out-port and
an in-port for each worker; last the coordinator's two ports. A LAN is a non-blocking switch, so a
port is all that limits a worker inside its island, and a route that passes through an island on the
way to another one touches none of its ports.

A route is made of legs. A leg takes traffic from one island to the next: over the first one's
uplink, then a link of the pair or, where the pair has none, the core, then over the other one's
downlink. A path is what a transfer occupies from one port to another: out-port, the WAN links of
the route, in-port. Its hops carry the delays, because a LAN's delay belongs to the crossing and not
to the port: once in all inside an island, once at each end between two islands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import permutations
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from islands.errors import InputError, nearest
from islands.network.ring_order import island_order
from islands.units import Price

if TYPE_CHECKING:
    from islands.network.background import Load
    from islands.network.steps import Steps

#: Stands for the coordinator where a worker's number is expected.
COORDINATOR = -1
#: Stands for the network's core where an island's name is expected: an uplink ends there.
CORE = ""


@dataclass(frozen=True)
class Site:
    """An island: ``workers`` replicas behind one switch; its LAN's bandwidth may be infinite."""

    name: str
    workers: int
    lan_bytes_per_s: float
    lan_delay_s: float


@dataclass(frozen=True)
class Link:
    """One direction of one shared resource of the wide area.

    Between two islands it is named ``wire:from>to``. An uplink (``uplink:island``) ends in
    ``CORE``, a downlink begins there, and the backbone does both. ``bytes_per_s`` and ``delay_s``
    are the constants, or the means over time where ``bandwidth`` or ``delay`` says how they change.

    Args:
        fair: the transfers present share the link; else they take it one after the other.
        flow_bytes_per_s: no transfer gets more than this.
        background: other jobs' transfers.
        jitter_s: by how much a transfer's delay may deviate.
        price: of what leaves over the link.
    """

    name: str
    source: str
    target: str
    bytes_per_s: float
    delay_s: float
    fair: bool = False
    flow_bytes_per_s: float = inf
    background: Load | None = None
    jitter_s: float = 0.0
    bandwidth: Steps | None = None
    delay: Steps | None = None
    price: Price | None = None

    @property
    def of_a_pair(self) -> bool:
        """Whether it joins two islands by itself."""
        return self.source != CORE and self.target != CORE


@dataclass(frozen=True)
class Wire:
    """A connection of two islands with the same numbers in both directions: short for two links."""

    name: str
    between: tuple[str, str]
    bytes_per_s: float
    delay_s: float
    fair: bool = False

    def links(self) -> tuple[Link, Link]:
        """Its two directions."""
        a, b = self.between
        return (
            Link(f"{self.name}:{a}>{b}", a, b, self.bytes_per_s, self.delay_s, self.fair),
            Link(f"{self.name}:{b}>{a}", b, a, self.bytes_per_s, self.delay_s, self.fair),
        )


class Hop(NamedTuple):
    """One resource on a path: its number, its bandwidth, and the delay after it on this path.

    ``fair`` is the discipline of the whole path: all of its hops have the same.
    """

    resource: int
    bytes_per_s: float
    delay_s: float
    fair: bool = False


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
        cls,
        sites: Sequence[Site],
        links: Sequence[Wire | Link],
        coordinator: str | None = None,
    ) -> Topology:
        """Number the links, place the coordinator and find all routes.

        Errors: InputError when a link or ``coordinator`` names an island that is not there, when
        two islands have no route, or when a route's links differ in their discipline.
        """
        names = [site.name for site in sites]
        directed: list[Link] = []
        for given in links:
            ends = given.between if isinstance(given, Wire) else (given.source, given.target)
            for end in ends:
                if end not in names and (isinstance(given, Wire) or end != CORE):
                    raise InputError(
                        f"links.{given.name}.between: unknown island {end!r}{nearest(end, names)}"
                    )
            directed += given.links() if isinstance(given, Wire) else (given,)
        if coordinator is not None and coordinator not in names:
            raise InputError(
                f"coordinator: unknown island {coordinator!r}{nearest(coordinator, names)}"
            )
        legs = _legs(names, directed)
        routes = tuple(_routes_from(source, names, legs) for source in names)
        topology = cls(
            sites=tuple(sites),
            links=tuple(directed),
            coordinator_island=0 if coordinator is None else names.index(coordinator),
            island_of=tuple(i for i, site in enumerate(sites) for _ in range(site.workers)),
            routes=routes,
        )
        topology._one_discipline_per_route()
        return topology

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
        """Number of resources: WAN links, two ports per worker, the coordinator's two."""
        return len(self.links) + 2 * self.workers + 2

    def route(self, source: int, target: int) -> tuple[str, ...]:
        """Names of the WAN links from island ``source`` to island ``target``, in order."""
        return tuple(self.links[link].name for link in self.routes[source][target])

    def path(self, source: int, target: int) -> Path:
        """The hops from one port to another; ``COORDINATOR`` is the coordinator's own port.

        A hop's rate is what one transfer can get there, so never more than the link's cap per flow.
        """
        here, there = self._island(source), self._island(target)
        out_site, in_site = self.sites[here], self.sites[there]
        out_port, in_port = self._out_port(source), self._out_port(target) + 1
        route = self.routes[here][there]
        fair = self.links[route[0]].fair if route else self.fair
        wan = ((number, self.links[number]) for number in route)
        return (
            Hop(out_port, out_site.lan_bytes_per_s, out_site.lan_delay_s, fair),
            *(
                Hop(number, min(link.bytes_per_s, link.flow_bytes_per_s), link.delay_s, fair)
                for number, link in wan
            ),
            Hop(
                in_port,
                in_site.lan_bytes_per_s,
                0.0 if here == there else in_site.lan_delay_s,
                fair,
            ),
        )

    @cached_property
    def fair(self) -> bool:
        """The discipline inside the islands: that of the links if they are all fair, else FIFO."""
        return bool(self.links) and all(link.fair for link in self.links)

    def discipline(self, source: int, target: int) -> str:
        """``fifo`` or ``fair``, of the route between two islands."""
        route = self.routes[source][target]
        return "fair" if (self.links[route[0]].fair if route else self.fair) else "fifo"

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

    def ring(self, order: Sequence[str] | None = None) -> tuple[int, ...]:
        """Workers in the order of a ring, island by island.

        ``order`` forces the islands' order by their names. None takes the one that crosses WAN
        links as few times as possible (:func:`islands.network.ring_order.island_order`). Raises
        InputError if ``order`` does not name each island once.
        """
        members: list[list[int]] = [[] for _ in self.sites]
        for worker, island in enumerate(self.island_of):
            members[island].append(worker)
        return tuple(worker for island in self.ring_islands(order) for worker in members[island])

    def ring_islands(self, order: Sequence[str] | None = None) -> tuple[int, ...]:
        """The islands in the order in which :meth:`ring` visits them."""
        if order is None:
            return island_order(self.routes, [link.delay_s for link in self.links])
        must_name_each_island_once(order, self.island_names)
        return tuple(self.island_names.index(name) for name in order)

    def _one_discipline_per_route(self) -> None:
        if len({link.fair for link in self.links}) < 2:
            return
        for source, site in enumerate(self.sites):
            for target, other in enumerate(self.sites):
                route = [self.links[link] for link in self.routes[source][target]]
                if len({link.fair for link in route}) > 1:
                    fifo, fair = (
                        next(link.name for link in route if link.fair is kind)
                        for kind in (False, True)
                    )
                    raise InputError(
                        f"links: the route from {site.name!r} to {other.name!r} has both "
                        f"disciplines: {fifo!r} is fifo, {fair!r} is fair; give all of its links "
                        "the same queue"
                    )

    def _island(self, worker: int) -> int:
        return self.coordinator_island if worker == COORDINATOR else self.island_of[worker]

    def _out_port(self, worker: int) -> int:
        port = self.workers if worker == COORDINATOR else worker
        return len(self.links) + 2 * port


def must_name_each_island_once(order: Sequence[str], islands: Sequence[str]) -> None:
    """Raise InputError, naming ``ring_order``, if ``order`` is not an order of the islands."""
    for n, name in enumerate(order):
        if name not in islands:
            raise InputError(f"ring_order: no island {name!r}{nearest(name, islands)}")
        if name in order[:n]:
            raise InputError(f"ring_order: {name!r} is named twice; name each island once")
    missing = [name for name in islands if name not in order]
    if missing:
        raise InputError(f"ring_order: {missing[0]!r} is missing; name each island once")


class _Leg(NamedTuple):
    """A way from one island directly to another."""

    delay_s: float
    names: tuple[str, ...]
    links: tuple[int, ...]


#: From an island to those that one leg leads to.
_Legs: TypeAlias = Mapping[str, Mapping[str, Sequence[_Leg]]]


def _legs(names: Sequence[str], links: Sequence[Link]) -> _Legs:
    """Every way to go from one island directly to another.

    Two islands without a link of their own are joined through the core if there is a backbone, or
    if both have an access line.
    """
    up = {link.source: (n,) for n, link in enumerate(links) if _is_uplink(link)}
    down = {link.target: (n,) for n, link in enumerate(links) if _is_downlink(link)}
    backbone = tuple(n for n, link in enumerate(links) if link.source == link.target == CORE)
    between: dict[str, dict[str, list[tuple[int, ...]]]] = {name: {} for name in names}
    for number, link in enumerate(links):
        if link.of_a_pair:
            between[link.source].setdefault(link.target, []).append((number,))
    in_core = [name for name in names if backbone or name in up or name in down]
    for source, target in permutations(in_core, 2):
        if target in between[source]:
            continue
        if not backbone and source not in up and target not in down:
            raise InputError(
                f"links: nothing is between island {source!r} and island {target!r}; give "
                f"{source!r} an uplink, {target!r} a downlink, or the cluster a backbone"
            )
        between[source][target] = [backbone]

    def leg(numbers: tuple[int, ...]) -> _Leg:
        used = [links[number] for number in numbers]
        return _Leg(sum(x.delay_s for x in used), tuple(x.name for x in used), numbers)

    return {
        source: {
            target: [leg((*up.get(source, ()), *way, *down.get(target, ()))) for way in ways]
            for target, ways in targets.items()
        }
        for source, targets in between.items()
    }


def _is_uplink(link: Link) -> bool:
    return link.source != CORE and link.target == CORE


def _is_downlink(link: Link) -> bool:
    return link.source == CORE and link.target != CORE


def _routes_from(source: str, names: Sequence[str], legs: _Legs) -> tuple[tuple[int, ...], ...]:
    """Best routes from one island: fewest legs, then least delay, then the links' names.

    Dijkstra's algorithm over the label (legs, delay, names of each leg); at an island all
    candidates of equal legs have as many entries of names, so appending a leg keeps their order.
    """
    best: dict[str, tuple[int, ...]] = {}
    fewest = {source: 0}
    queue: list[tuple[int, float, tuple[tuple[str, ...], ...], tuple[int, ...], str]] = [
        (0, 0.0, (), (), source)
    ]
    while queue:
        count, delay_s, used, route, island = heappop(queue)
        if island in best:
            continue
        best[island] = route
        for target, ways in legs[island].items():
            if fewest.setdefault(target, count + 1) <= count:
                continue  # fewer legs lead there already
            for leg in ways:
                label = (count + 1, delay_s + leg.delay_s, (*used, leg.names))
                heappush(queue, (*label, (*route, *leg.links), target))
    for name in names:
        if name not in best:
            raise InputError(f"links: no route from island {source!r} to island {name!r}")
    return tuple(best[name] for name in names)
