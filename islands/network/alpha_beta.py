"""The alpha–beta model of collectives: what a sheet of paper says that they take.

A way from worker to worker is one pipe: latency alpha, the sum of the delays on it, and bandwidth
beta, the narrowest one (Hockney 1994; Thakur et al. 2005, "Optimization of collective communication
operations in MPICH"). A message of n bytes takes alpha + n / beta; the pipe is free for the next
one after n / beta. What several pipes share (an access line, the coordinator's port) takes at least
all of their bytes over its bandwidth. Nothing here knows of hops, queues or events, so that the
simulated network can be held against it. Links are taken as constant and idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from islands.network.topology import COORDINATOR, Hop, Path, Topology


class Message(NamedTuple):
    """Bytes from a worker to a worker; the coordinator is ``COORDINATOR``."""

    source: int
    target: int
    bytes: float


def ring_seconds(
    topology: Topology,
    workers: Sequence[int],
    pieces: Sequence[float],
    turns: int,
    ready_s: Sequence[float] | None = None,
) -> NDArray[np.float64]:
    """When each of the ``workers``, in ring order, has received everything; seconds, (workers,).

    Worker i sends piece (i − k) mod p in phase k, and may do so once it is ready, has sent that of
    phase k − 1 and has received that of its neighbour's phase k − 1. ``pieces`` are bytes, one per
    worker; a ring of p workers has ``turns``·(p − 1) phases. A single worker has what it needs when
    it is ready.
    """
    members = len(workers)
    ready = np.zeros(members) if ready_s is None else np.array(ready_s, dtype=np.float64)
    if members == 1:
        return ready
    paths = [topology.path(w, workers[(i + 1) % members]) for i, w in enumerate(workers)]
    alpha = np.array([_alpha(path) for path in paths])
    beta = np.array(_betas(topology, paths))
    sizes = np.array(pieces, dtype=np.float64)
    arrived = sent = ready
    carried = np.zeros(members)
    for phase in range(turns * (members - 1)):
        now = np.roll(sizes, phase)
        carried += now
        sent = np.maximum(np.maximum(arrived, sent), ready) + now / beta
        arrived = np.roll(sent + alpha, 1)
    shared_s = ready.min() + _shared_s(topology, paths, carried.tolist())
    done: NDArray[np.float64] = np.maximum(np.maximum(arrived, ready), shared_s)
    return done


def star_seconds(topology: Topology, up: Sequence[float], down: Sequence[float]) -> float:
    """Everyone's bytes to the coordinator; when the last are in, its answers; nothing if alone."""
    if topology.workers == 1:
        return 0.0
    return spread_seconds(
        topology, [Message(worker, COORDINATOR, size) for worker, size in enumerate(up)]
    ) + spread_seconds(
        topology, [Message(COORDINATOR, worker, size) for worker, size in enumerate(down)]
    )


def hierarchical_seconds(topology: Topology, workers: Sequence[int], size: float) -> float:
    """An all-reduce of ``size`` bytes: inside the islands, between them, inside them again.

    ``workers`` are in ring order; the first of an island leads it.
    """
    islands: dict[int, list[int]] = {}
    for worker in workers:
        islands.setdefault(topology.island_of[worker], []).append(worker)
    groups = list(islands.values())
    leaders = [group[0] for group in groups]
    ready_s, after_s = [], []
    for leader, *inner in groups:
        ready_s.append(spread_seconds(topology, [Message(w, leader, size) for w in inner]))
        after_s.append(spread_seconds(topology, [Message(leader, w, size) for w in inner]))
    pieces = [size / len(groups)] * len(groups)
    have_s = ring_seconds(topology, leaders, pieces, 2, ready_s)
    return float(np.max(have_s + np.array(after_s)))


def spread_seconds(topology: Topology, messages: Sequence[Message]) -> float:
    """Until the last of some messages has arrived that all start at once; 0 for none."""
    paths = [topology.path(message.source, message.target) for message in messages]
    sizes = [message.bytes for message in messages]
    alone = [
        _alpha(path) + size / min(hop.bytes_per_s for hop in path)
        for path, size in zip(paths, sizes, strict=True)
    ]
    return max([*alone, _shared_s(topology, paths, sizes)], default=0.0)


def _alpha(path: Path) -> float:
    return sum(hop.delay_s for hop in path)


def _betas(topology: Topology, paths: Sequence[Path]) -> list[float]:
    """Bandwidth of each pipe; flows that go side by side through a fair link have a part of it."""
    users: dict[int, int] = defaultdict(int)
    for path in paths:
        for hop in path:
            users[hop.resource] += 1
    return [
        min(
            min(hop.bytes_per_s, _whole(topology, hop) / users[hop.resource])
            if hop.fair
            else hop.bytes_per_s
            for hop in path
        )
        for path in paths
    ]


def _shared_s(topology: Topology, paths: Sequence[Path], sizes: Sequence[float]) -> float:
    """Until the busiest shared resource has passed on all its bytes, and they have arrived."""
    busy_s: dict[int, float] = defaultdict(float)
    latency_s: dict[int, float] = defaultdict(float)
    users: dict[int, int] = defaultdict(int)
    for path, size in zip(paths, sizes, strict=True):
        alpha = _alpha(path)
        for hop in path:
            number = hop.resource
            # One after the other, each transfer has what it can get; side by side, all of the link.
            rate = _whole(topology, hop) if hop.fair else hop.bytes_per_s
            busy_s[number] += size / rate
            latency_s[number] = max(latency_s[number], alpha)
            users[number] += 1
    shared = (number for number, count in users.items() if count > 1)
    return max((busy_s[number] + latency_s[number] for number in shared), default=0.0)


def _whole(topology: Topology, hop: Hop) -> float:
    """Bandwidth of a resource for all flows together; a port's is that of one flow."""
    link = hop.resource < len(topology.links)
    return topology.links[hop.resource].bytes_per_s if link else hop.bytes_per_s
