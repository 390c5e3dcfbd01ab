"""Outages and partitions as windows on the links of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from islands.errors import nearest
from islands.fault_kinds import Fault, Outage, Partition
from islands.settings import FieldError
from islands.units import format_bandwidth

if TYPE_CHECKING:
    from islands.network.steps import Window
    from islands.network.topology import Topology


class Edge(Protocol):
    """One direction of a link, as a topology has it. An access line has an end that is no
    island."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...


def windows(
    faults: Sequence[Fault], edges: Sequence[Edge], islands: Sequence[str]
) -> dict[str, list[Window]]:
    """By the names of the links that a fault touches: when they have which bandwidth (0.0: none).

    Raises FieldError (``faults.0.link``) for a name that is not there, groups that are none, and
    faults that give one link two bandwidths at a time.
    """
    from islands.network.steps import Window, overlapping

    found: dict[str, list[tuple[int, Window]]] = {}
    for number, fault in enumerate(faults):
        if not isinstance(fault, Outage | Partition):
            continue
        every_s, value = None, 0.0
        if isinstance(fault, Outage):
            every_s, value = fault.every, fault.bytes_per_s
            names = _of_outage(number, fault, edges, islands)
        else:
            names = _of_partition(number, fault, edges, islands)
        window = Window(fault.from_, fault.to_s, every_s, value)
        for name in names:
            for other, earlier in found.setdefault(name, []):
                if earlier.value != value and overlapping([earlier, window]):
                    raise FieldError(
                        f"faults.{number}",
                        f"link {name!r} would be {_state(value)} and, by faults.{other}, "
                        f"{_state(earlier.value)} at the same time",
                    )
            found[name].append((number, window))
    return {name: [window for _, window in those] for name, those in found.items()}


def _state(bytes_per_s: float) -> str:
    return f"at {format_bandwidth(bytes_per_s)}" if bytes_per_s else "cut"


def _of_outage(
    number: int, fault: Outage, edges: Sequence[Edge], islands: Sequence[str]
) -> list[str]:
    if fault.island is not None:
        for name in fault.island:
            _must_be(f"faults.{number}.island", "island", name, islands)
        touching = [e.name for e in edges if {e.source, e.target} & set(fault.island)]
        if not touching:
            raise FieldError(f"faults.{number}.island", "has no link that could fail")
        return touching
    assert fault.link is not None
    directions: dict[str, list[str]] = {}
    for edge in edges:
        directions.setdefault(edge.name.partition(":")[0], []).append(edge.name)
        directions[edge.name] = [edge.name]
    for name in fault.link:
        _must_be(f"faults.{number}.link", "link", name, directions)
    chosen = {edge for name in fault.link for edge in directions[name]}
    return [edge.name for edge in edges if edge.name in chosen]


def _of_partition(
    number: int, fault: Partition, edges: Sequence[Edge], islands: Sequence[str]
) -> list[str]:
    """What must be cut so that nothing passes between the groups, and all else still does.

    Access lines and a backbone meet in a core that tells nobody apart: a group of one island is
    cut off by its own lines, and at most one larger group can go on using the core.
    """
    field = f"faults.{number}.{'islands' if fault.groups is None else 'groups'}"
    groups = fault.sides(tuple(islands))
    side = _sides(field, groups, islands)
    cut = [e for e in edges if len({side[i] for i in _ends(e, side)}) == 2]
    core = [e for e in edges if len(set(_ends(e, side))) < 2]
    if any(not _ends(e, side) for e in core):  # a backbone: everyone is at the core
        at_core = set(islands)
    else:
        at_core = {end for e in core for end in _ends(e, side)}
    members = [at_core & set(group) for group in groups]
    if sum(map(bool, members)) > 1:
        if all(len(those) < 2 for those in members):
            cut += core  # no two islands of a group need it
            members = []
        for those in members:
            lines = [e for e in core if set(_ends(e, side)) & those]
            if len(those) == 1 and len(lines) == 2:
                cut += lines
                those.clear()
        if sum(map(bool, members)) > 1:
            raise FieldError(
                field,
                "these islands meet in the network's core, where they cannot be told apart; only "
                "single islands with an uplink and a downlink can be cut off from it",
            )
    names = {edge.name for edge in cut}
    return [edge.name for edge in edges if edge.name in names]


def _ends(edge: Edge, islands: Mapping[str, int]) -> list[str]:
    return [end for end in (edge.source, edge.target) if end in islands]


def _sides(field: str, groups: Sequence[Sequence[str]], islands: Sequence[str]) -> dict[str, int]:
    """Each island's group. Raises FieldError unless the groups partition the islands."""
    side: dict[str, int] = {}
    for number, name in _numbered(groups):
        _must_be(field, "island", name, islands)
        if name in side:
            raise FieldError(field, f"{name!r} is named twice; name each island once")
        side[name] = number
    missing = [name for name in islands if name not in side]
    if missing:
        raise FieldError(field, f"{missing[0]!r} is missing; name each island once")
    if not all(groups):
        raise FieldError(field, "names every island; there is nobody to be cut off from")
    return side


def _numbered(groups: Sequence[Sequence[str]]) -> Iterator[tuple[int, str]]:
    return ((number, name) for number, group in enumerate(groups) for name in group)


def _must_be(field: str, what: str, name: str, known: Sequence[str] | Mapping[str, object]) -> None:
    if name not in known:
        raise FieldError(field, f"no {what} {name!r}{nearest(name, known)}")


def with_outages(topology: Topology, faults: Sequence[Fault]) -> Topology:
    """The network with the outages and partitions among the faults; an outage comes before
    whatever else is scheduled for a link."""
    from islands.network.steps import Steps

    found = windows(faults, topology.links, topology.island_names)
    links = []
    for link in topology.links:
        if own := found.get(link.name):
            steps = link.bandwidth or Steps.constant(link.bytes_per_s)
            steps = replace(steps, windows=(*own, *steps.windows))
            link = replace(link, bandwidth=steps)
        links.append(link)
    return replace(topology, links=tuple(links)) if found else topology
