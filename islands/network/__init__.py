"""The emulated network: when things happen and how many bytes they cost. NumPy only."""

from islands.network.collectives import COLLECTIVES
from islands.network.ledger import KINDS, LinkTotals, TransferRow
from islands.network.timeline import (
    Arrival,
    SyncTiming,
    Timeline,
    Timings,
    WorkerClock,
    collective_seconds,
)
from islands.network.topology import COORDINATOR, Hop, Link, Path, Site, Topology, Wire

__all__ = [
    "COLLECTIVES",
    "COORDINATOR",
    "KINDS",
    "Arrival",
    "Hop",
    "Link",
    "LinkTotals",
    "Path",
    "Site",
    "SyncTiming",
    "Timeline",
    "Timings",
    "Topology",
    "TransferRow",
    "Wire",
    "WorkerClock",
    "collective_seconds",
]
