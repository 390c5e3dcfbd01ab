"""How long each scheme would take for a payload on a network: what ``collective: auto`` goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from islands.clock import FixedSteps
from islands.network.schemes import SCHEMES
from islands.network.timeline import Timeline
from islands.network.topology import Topology
from islands.trace import Bytes, End, Receive, Send


def steady(topology: Topology) -> Topology:
    """The same network without other jobs' traffic, jitter and changes: means stay for ever."""
    links = (
        replace(link, background=None, jitter_s=0.0, bandwidth=None, delay=None)
        for link in topology.links
    )
    return replace(topology, links=tuple(links))


def scheme_seconds(
    topology: Topology,
    operation: str,
    scheme: str,
    sizes: Sequence[Bytes],
    itemsize: int,
    ring_order: Sequence[str] | None = None,
) -> float:
    """Seconds until the last worker is done with one collective, alone, with everyone ready at 0.

    ``sizes`` has the payload of every worker; the network is taken as it is.
    """
    idle = FixedSteps((0.0,) * topology.workers)
    timeline = Timeline(topology, idle, operation, scheme=scheme, ring_order=ring_order)
    for worker, size in enumerate(sizes):
        ops = (Send(0, 1, 0, size, itemsize), Receive(0, 1), End())
        timeline.extend((worker, op) for op in ops)
    timeline.advance()
    return max(clock.clock_s for clock in timeline.take().clocks)


def collective_seconds(
    topology: Topology,
    operation: str,
    nbytes: int,
    itemsize: int,
    ring_order: Sequence[str] | None = None,
) -> float:
    """:func:`scheme_seconds` of a ring (a star for what needs one), ``nbytes`` from everyone."""
    sizes = [Bytes(nbytes)] * topology.workers
    return scheme_seconds(topology, operation, "ring", sizes, itemsize, ring_order)


def schemes_seconds(
    topology: Topology,
    operation: str,
    sizes: Sequence[Bytes],
    itemsize: int,
    ring_order: Sequence[str] | None = None,
) -> dict[str, float]:
    """:func:`scheme_seconds` of every scheme for ``all_reduce`` or ``all_gather``.

    On the :func:`steady` network: a choice for a whole run must not hang on how busy a link is at
    its start.
    """
    network = steady(topology)
    return {
        scheme: scheme_seconds(network, operation, scheme, sizes, itemsize, ring_order)
        for scheme in SCHEMES
    }
