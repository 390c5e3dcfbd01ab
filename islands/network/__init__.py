"""The emulated network: when things happen and how many bytes they cost. NumPy only."""

from islands.network.choose import collective_seconds
from islands.network.collectives import COLLECTIVES
from islands.network.ledger import KINDS, LinkTotals, TransferRow
from islands.network.timeline import Timeline
from islands.network.timings import (
    Arrival,
    Closed,
    Event,
    Spent,
    SyncTiming,
    Timings,
    Wake,
    WorkerClock,
)
from islands.network.topology import COORDINATOR, CORE, Hop, Link, Path, Site, Topology, Wire

__all__ = [
    "COLLECTIVES",
    "COORDINATOR",
    "CORE",
    "KINDS",
    "Arrival",
    "Closed",
    "Event",
    "Hop",
    "Link",
    "LinkTotals",
    "Path",
    "Site",
    "Spent",
    "SyncTiming",
    "Timeline",
    "Timings",
    "Topology",
    "TransferRow",
    "Wake",
    "Wire",
    "WorkerClock",
    "collective_seconds",
]
