"""The schemes by which a cluster can carry out an operation, by name."""

from __future__ import annotations

from collections.abc import Sequence

from islands.errors import InputError, nearest
from islands.network.collectives import Rings, Scheme
from islands.network.hierarchical import Hierarchies
from islands.network.star import Contributions, Stars
from islands.network.topology import Topology

SCHEMES = ("ring", "star", "hierarchical")


def plan_for(
    topology: Topology,
    operation: str,
    scheme: str = "ring",
    ring_order: Sequence[str] | None = None,
    *,
    timed: bool = False,
    per_transfer: bool = False,
) -> Scheme | Contributions:
    """What opens the collectives of ``operation`` (all_reduce, all_gather or star).

    ``ring_order`` names the islands in the order in which rings pass them; None leaves that to the
    topology. The operation ``star`` is one whatever the scheme; with ``timed`` each contribution
    to it is a collective of its own. An unknown ``scheme`` or island is an InputError.
    """
    if scheme not in SCHEMES:
        raise InputError(f"collective: unknown {scheme!r}{nearest(scheme, SCHEMES)}")
    if timed:
        return Contributions(topology)
    order = topology.ring(ring_order)  # a wrong island is refused, whatever the scheme
    if operation == "star" or scheme == "star":
        return Stars(topology, operation, per_transfer=per_transfer)
    if scheme == "hierarchical":
        return Hierarchies(topology, operation, order, per_transfer=per_transfer)
    return Rings(topology, operation, order, per_transfer=per_transfer)
