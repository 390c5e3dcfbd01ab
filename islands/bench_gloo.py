"""The yardstick of `islands bench`: the same training as a plain ``torch.distributed`` program.

One process per worker and one collective per synchronisation, over one flat buffer, as anybody
would write it by hand. Batches, gradients and optimizer steps are those of
:class:`islands.replica.Replica`, so that only the way in which workers meet differs from a run of
islands. Nothing is encoded: the buffer is reduced as it is.

Run as ``python -m islands.bench_gloo FOLDER RANK``: the folder holds the job, rank 0 prints the
seconds.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from islands.job import Job
from islands.methods import Dense, DiLoCo, LocalSGD
from islands.replica import Replica

#: The methods that are written here a second time, without islands.
METHODS = (Dense, DiLoCo, LocalSGD)
#: The job's file in the program's folder.
JOB = "job.pickle"
#: Seconds that one collective may take before the program gives up.
COLLECTIVE_S = 120.0


def train(replica: Replica, steps: int, average: Callable[[Tensor], object]) -> None:
    """Train one worker's replica; ``average`` replaces a tensor by its mean over the workers."""
    method = replica.method
    if isinstance(method, Dense):
        _train_dense(replica, steps, average)
    elif isinstance(method, DiLoCo):
        _train_diloco(replica, steps, average, method)
    elif isinstance(method, LocalSGD):
        for step in range(1, steps + 1):
            replica.local_step()
            if step % method.sync_every == 0 or step == steps:
                average(replica.state.params)


def _train_dense(replica: Replica, steps: int, average: Callable[[Tensor], object]) -> None:
    for _ in range(steps):
        replica.local_step()  # only the gradient
        average(replica.state.grad)
        replica.context.optimize(replica.state)


def _train_diloco(
    replica: Replica, steps: int, average: Callable[[Tensor], object], method: DiLoCo
) -> None:
    params = replica.state.params
    anchor = params.clone()
    pseudo_gradient = torch.empty_like(params)
    outer = method.outer.build(anchor)  # every process takes the same outer step
    for step in range(1, steps + 1):
        replica.local_step()
        if step % method.sync_every == 0 or step == steps:
            torch.sub(anchor, params, out=pseudo_gradient)
            average(pseudo_gradient)
            outer.step(pseudo_gradient, method.outer.lr)
            params.copy_(anchor)


def main(folder: Path, rank: int) -> None:
    """One process of the program."""
    torch.set_num_threads(1)
    with (folder / JOB).open("rb") as file:
        job: Job = pickle.load(file)
    workers = job.workers
    # Else gloo looks up this machine's name, which need not resolve, or uses a real network card.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )

    def average(tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor.div_(workers)

    replica = Replica(job.replica(rank), job.corpus.train)
    dist.barrier()
    began = time.perf_counter()
    train(replica, job.experiment.steps, average)
    dist.barrier()
    seconds = time.perf_counter() - began
    dist.destroy_process_group()
    if rank == 0:
        print(seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
