"""The schemes by which a cluster can carry out an operation, by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from islands.errors import InputError, nearest
from islands.network.collectives import Rings, Scheme
from islands.network.hierarchical import Hierarchies
from islands.network.star import Stars
from islands.network.topology import Topology

SCHEMES = ("ring", "star", "hierarchical")


def plan_for(
    topology: Topology,
    operation: str,
    scheme: str,
    everyone: Sequence[int],
    *,
    members: Collection[int] | None = None,
    per_transfer: bool = False,
) -> Scheme:
    """What opens the collectives of ``operation`` (all_reduce, all_gather or star).

    ``everyone`` is the order in which rings pass all workers, as of :meth:`Topology.ring`, and
    ``members`` who takes part; None: all of them. The operation ``star`` is one whatever the
    scheme. An unknown ``scheme`` is an InputError, no members at all a ValueError.
    """
    if scheme not in SCHEMES:
        raise InputError(f"collective: unknown {scheme!r}{nearest(scheme, SCHEMES)}")
    if members is not None and not members:
        raise ValueError("a collective needs a member")
    if operation == "star" or scheme == "star":
        return Stars(topology, operation, members, per_transfer=per_transfer)
    kind = Hierarchies if scheme == "hierarchical" else Rings
    return kind(topology, operation, everyone, members, per_transfer=per_transfer)
