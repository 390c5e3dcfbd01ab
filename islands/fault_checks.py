"""Whether faults, policy and replica schedule fit a cluster and a method.

Each part is sound by itself once it is read. What is wrong between them shows here, before a run
starts, as one line with the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from islands.errors import InputError, nearest
from islands.fault_kinds import Aimed, Corrupt, Crash, Drop, Fault, Join, Leave
from islands.faults import Faults
from islands.outages import Edge
from islands.policy import Policy
from islands.settings import FieldError, shown
from islands.units import format_time

if TYPE_CHECKING:
    from islands.methods import Method


# ---------------------------------------------------------------------------------------- replicas


def read_replicas(value: object) -> tuple[tuple[int, int], ...]:
    """``[[0, 4], [1000, 8]]``: from a local step on, so many workers take part. Empty: all.

    Raises FieldError with the entry.
    """
    if not isinstance(value, list | tuple):
        raise InputError(f"{shown(value)} is not a list such as [[0, 4], [1000, 8]]")
    found: list[tuple[int, int]] = []
    for n, entry in enumerate(value):
        if (
            not isinstance(entry, list | tuple)
            or len(entry) != 2
            or not all(type(number) is int for number in entry)
        ):
            raise FieldError(f"{n}", f"{shown(entry)} is not a step and a number of workers")
        step, count = entry
        if not found and step:
            raise FieldError(f"{n}", f"the first entry is of step 0, not of step {step}")
        if found and step <= found[-1][0]:
            raise FieldError(f"{n}", f"step {step} does not come after step {found[-1][0]}")
        if count < 1:
            raise FieldError(f"{n}", f"{count} is too few workers; it must be at least 1")
        found.append((step, count))
    return tuple(found)


ReplicasField = Annotated[tuple[tuple[int, int], ...], BeforeValidator(read_replicas)]


# ----------------------------------------------------------------------------------------- cluster


def check_faults(
    faults: Sequence[Fault],
    policy: Policy,
    replicas: Sequence[tuple[int, int]],
    island_of: Sequence[str],
    edges: Sequence[Edge],
) -> None:
    """Raise FieldError for the first thing that does not fit the cluster or something else here.

    ``island_of``: each worker's island; ``edges``: the links of the topology.
    """
    workers = len(island_of)
    islands = list(dict.fromkeys(island_of))
    for number, fault in enumerate(faults):
        if isinstance(fault, Aimed):
            _somebody(f"faults.{number}", fault, workers, islands)
    for n, (_, count) in enumerate(replicas):
        if count > workers:
            raise FieldError(f"replicas.{n}", f"{count} is more than the {workers} workers")
    Faults(faults, 0, island_of).windows(edges)
    for worker, island in enumerate(island_of):
        own = [
            (n, f) for n, f in enumerate(faults) if isinstance(f, Aimed) and f.hits(worker, island)
        ]
        _moves_alternate(worker, [(n, f) for n, f in own if isinstance(f, Leave | Join)])
        _dies_alive(worker, [(n, f) for n, f in own if isinstance(f, Crash)])
    _policy_fits(policy, replicas, workers)


def _somebody(where: str, fault: Aimed, workers: int, islands: Sequence[str]) -> None:
    for worker in fault.worker or ():
        if worker >= workers:
            raise FieldError(
                f"{where}.worker", f"no worker {worker}; there are {workers}, counted from 0"
            )
    for island in fault.island or ():
        if island not in islands:
            raise FieldError(f"{where}.island", f"no island {island!r}{nearest(island, islands)}")


def _moves_alternate(worker: int, moves: Sequence[tuple[int, Leave | Join]]) -> None:
    """Who has left must join before leaving again, and the other way round."""
    ordered = sorted(moves, key=lambda move: (move[1].step, move[0]))
    for (n, before), (m, after) in pairwise(ordered):
        if before.step == after.step:
            problem = f"worker {worker} has two moves at step {after.step}"
        elif before.kind == after.kind:
            what = "leaves twice" if after.kind == "leave" else "joins twice"
            problem = f"worker {worker} {what}, at steps {before.step} and {after.step}"
        else:
            continue
        raise FieldError(f"faults.{max(n, m)}.step", f"{problem}; see faults.{min(n, m)}")


def _dies_alive(worker: int, crashes: Sequence[tuple[int, Crash]]) -> None:
    """A death at a given moment must find the worker alive."""
    fixed = sorted((f.at, n, f.downtime_s) for n, f in crashes if f.at is not None)
    for (at_s, n, away_s), (next_s, m, _) in pairwise(fixed):
        if next_s <= at_s + away_s:
            back = "never comes" if away_s == inf else f"at {format_time(at_s + away_s)} is"
            raise FieldError(
                f"faults.{m}.at",
                f"worker {worker} cannot die at {format_time(next_s)}: by faults.{n} it died at "
                f"{format_time(at_s)} and {back} back",
            )


def _policy_fits(policy: Policy, replicas: Sequence[tuple[int, int]], workers: int) -> None:
    if policy.quorum is not None:
        if policy.quorum > workers:
            raise FieldError(
                "policy.quorum", f"{policy.quorum} is too large; there are {workers} workers"
            )
        for step, count in replicas:
            if policy.quorum > count:
                raise FieldError(
                    "policy.quorum",
                    f"{policy.quorum} is too large; from step {step} on there are {count} workers",
                )
    if policy.mean == "trimmed_mean" and policy.trim * workers < 1 - 1e-9:
        raise FieldError(
            "policy.trim",
            f"{policy.trim:g} of {workers} workers is nobody; "
            + (
                f"{1 / workers:.3g} leaves out one at each end"
                if workers > 2
                else "a trimmed mean needs three"
            ),
        )


# ------------------------------------------------------------------------------------------ method


def check_method(faults: Sequence[Fault], policy: Policy, method: Method) -> None:
    """Raise FieldError for what the method cannot do."""
    for number, fault in enumerate(faults):
        if isinstance(fault, Drop) and fault.anchor != "current" and not method.anchored:
            raise FieldError(
                f"faults.{number}.anchor",
                f"{method.name} measures from no anchor that a worker could keep; leave it at "
                "'current'",
            )
        if isinstance(fault, Drop) and fault.anchor != "current" and not method.measures_anew:
            raise FieldError(
                f"faults.{number}.anchor",
                f"{method.name} with a whole period of overlap measures from where a phase began, "
                "whatever it received; leave it at 'current'",
            )
    returned = any(
        isinstance(fault, Corrupt | Crash)
        or (isinstance(fault, Drop) and fault.direction != "down" and fault.on_drop == "restore")
        for fault in faults
    )
    if (returned or policy.timed) and not method.restores:
        raise FieldError(
            "method.error_feedback",
            f"{method.name} sends again before it can know of a loss, so what is lost cannot "
            "return to the residual; choose error_feedback: false, or an overlap of less than "
            "sync_every",
        )
    if policy.mean not in method.means:
        raise FieldError(
            "policy.mean",
            f"{method.name} cannot form a {policy.mean} of its payloads"
            f"{nearest(policy.mean, method.means)}",
        )
    if policy.late != "drop" and not method.takes_late:
        raise FieldError(
            "policy.late",
            f"{method.name} has no use for {policy.late}: what is late belongs to another round; "
            "leave it at 'drop'",
        )
