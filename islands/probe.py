"""What is found out before a run by trying one of its workers: its payloads and its speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from islands.replica import Replica
from islands.trace import Bytes

if TYPE_CHECKING:
    from islands.job import Job

#: Steps that are not timed, since the first ones allocate and compile; and those that are.
WARM_UP_STEPS, TIMED_STEPS = 3, 10


@dataclass(frozen=True)
class Payloads:
    """What one worker sends: per fragment its payload's size and the bytes of one value."""

    sizes: tuple[Bytes, ...]
    itemsizes: tuple[int, ...]

    @classmethod
    def of(cls, job: Job) -> Payloads:
        """Train worker 0 alone until each fragment is due for the first time, and encode it.

        It starts at a step from which payloads have their final size. What the others sent would
        only change the payload's values.
        """
        method = job.experiment.method
        streams = method.streams(job.layout)
        sizes, itemsizes = [Bytes()] * len(streams), [1] * len(streams)
        with _trial(job, job.device) as replica:
            settled = replica.state.step = method.settled_after
            for fragment in sorted(range(len(streams)), key=lambda f: streams[f].first):
                while replica.state.step < settled + streams[fragment].first:
                    replica.local_step()
                payload = replica.send(fragment)
                sizes[fragment], itemsizes[fragment] = payload.size, payload.itemsize
        return cls(tuple(sizes), tuple(itemsizes))


def step_seconds(job: Job, device: str) -> float:
    """Seconds that a local step of one worker takes on this host, to three significant digits.

    The median of some, on one thread as in a run, after a few that are not counted.
    """
    times = []
    with _trial(job, device) as replica:
        for _ in range(WARM_UP_STEPS + TIMED_STEPS):
            began = time.perf_counter()
            replica.local_step()  # returns the loss, for which a GPU is waited for
            times.append(time.perf_counter() - began)
    return float(f"{statistics.median(times[WARM_UP_STEPS:]):.3g}")


@contextmanager
def _trial(job: Job, device: str) -> Iterator[Replica]:
    """Worker 0 of the run, which leaves no trace in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            yield Replica(job.on(device).replica(0), job.corpus.train)
    finally:
        torch.set_num_threads(threads)
