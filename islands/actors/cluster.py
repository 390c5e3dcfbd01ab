"""Ray for one or many runs: connecting or starting it, placing the actors, ending them.

Only this module decides what runs where. Emulated workers ask for no CPU: there may be more of them
than cores, and an actor that waits for a free core waits silently for ever.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from islands.actors.coordinator import CoordinatorActor
from islands.actors.link import LinkActor
from islands.actors.worker import WorkerActor
from islands.errors import InputError, RunError, TooManyWorkers
from islands.job import Job, gpus_per_worker
from islands.plugins import one_line
from islands.units import format_bytes

#: What one worker's process takes before it has a model: memory of its own, and time to start.
PROCESS_BYTES, PROCESS_S = 190e6, 1.5
#: More workers than this are announced before they start.
MANY = 8
#: Seconds that an address has to accept a connection.
CONNECT_S = 10.0
#: Seconds that all actors have to come up: 100 of them import torch, on two cores, well within it.
START_S = 600.0


def connect(address: str | None, say: Callable[[str], None]) -> bool:
    """Use the Ray that this process is connected to, or the one at ``address`` (or RAY_ADDRESS), or
    start a private one. Says which. Returns whether it was started or joined here, and must be
    left.

    Raises InputError if nobody answers at the address.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    source = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address in (None, "local"):
        say(f"starting a local Ray on {os.cpu_count()} cores")
        # Ray would run its workers at the lowest priority, below anything else on this machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_enable_metrics_collection", "0")  # nobody would look at them
        ray.init(address="local", include_dashboard=False, **quiet)
        return True
    assert address is not None
    say(f"connecting to the Ray cluster at {address} ({source})")
    _must_answer(address, source)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{source}: cannot join the cluster at {address!r}: {reason}") from error
    return True


def _must_answer(address: str, source: str) -> None:
    """A bounded test that a Ray cluster answers, since ``ray.init`` itself tries for minutes.

    First whether anybody listens, then Ray's own health check in a process that can be ended.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"{source}: {address!r} is no address; write host:port, auto or local")
    hint = "is the cluster up? Leave the address out to start a local Ray"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"{source}: nobody answers at {address!r} ({error}); {hint}") from error
    if address.startswith("ray://"):
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        subprocess.run(command, timeout=CONNECT_S, check=True, capture_output=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise InputError(f"{source}: no Ray cluster answers at {address!r}; {hint}") from error


def gpus() -> float:
    """GPUs of the whole Ray cluster."""
    return float(ray.cluster_resources().get("GPU", 0.0))


class Actors:
    """The actors of a run: one coordinator, one link actor, one worker actor per worker."""

    def __init__(self, job: Job, say: Callable[[str], None] = lambda text: None) -> None:
        """Begin to create them. Raises TooManyWorkers if the cluster has not the memory for all."""
        _must_fit(job, say)
        home = str(ray.get_runtime_context().get_node_id())
        pinned = NodeAffinitySchedulingStrategy(home, soft=False)
        share = gpus_per_worker(job.experiment, gpus()) if job.device == "cuda" else 0.0
        nodes = _nodes(job.workers, home)
        placed = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        worker = ray.remote(WorkerActor)
        self.workers: list[ActorHandle[Any]] = [
            worker.options(
                num_cpus=0, num_gpus=share, scheduling_strategy=where, enable_task_events=False
            ).remote(sys.path)
            for where in (["SPREAD"] * job.workers if share else placed)
        ]
        self.link = ray.remote(LinkActor).options(num_cpus=0, scheduling_strategy=pinned).remote()
        # Beside the driver, since it writes the results.
        self.coordinator = (
            ray.remote(CoordinatorActor)
            .options(num_cpus=0, max_concurrency=2, scheduling_strategy=pinned)
            .remote(sys.path)
        )

    def set_up(self, job: Job) -> list[str]:
        """Prepare all actors for a run; returns the node of each worker.

        Raises RunError with the worker and the cause if one cannot be made.
        """
        # One copy per node, shared by its workers.
        initial, tokens = ray.put(job.initial), ray.put(job.corpus.train)
        ready = [
            actor.set_up.remote(replace(job.replica(worker), initial={}), initial, tokens)
            for worker, actor in enumerate(self.workers)
        ]
        ready.append(self.link.set_up.remote(job.emulation()))
        _, late = ray.wait(ready, num_returns=len(ready), timeout=START_S)
        if late:
            raise RunError(
                f"{len(late)} of {len(ready)} actors were not ready after {START_S:.0f} s"
            )
        nodes = []
        for worker, reference in enumerate(ready):
            try:
                nodes.append(ray.get(reference))
            except RayError as error:
                cause = one_line(getattr(error, "cause", None) or error)
                where = (
                    f"worker {worker} ({job.island_of[worker]})" if worker < job.workers else "link"
                )
                raise RunError(f"{where} could not start: {cause}") from error
        return nodes[:-1]

    def end(self) -> None:
        """Kill all actors."""
        for actor in [*self.workers, self.link, self.coordinator]:
            ray.kill(actor)


def _must_fit(job: Job, say: Callable[[str], None]) -> None:
    """Refuse more workers than the cluster's memory holds; announce many, since they take time."""
    # The masters, their gradient, the optimizer's two moments and a method's anchor or momentum.
    need = job.workers * (PROCESS_BYTES + 5 * 4 * job.parameters)
    have = sum(node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"])
    what = f"{job.workers} worker processes need about {format_bytes(need)} of memory"
    if need > have:
        raise TooManyWorkers(
            f"workers: {what}, but the Ray cluster has {format_bytes(have)}; "
            "take fewer workers, more nodes, or --in-process"
        )
    if job.workers > MANY:
        say(f"{what} and about {job.workers * PROCESS_S:.0f} s of one core to start")


def _nodes(workers: int, home: str) -> list[str]:
    """A node for each worker: neighbours together, in proportion to the nodes' CPUs, home first."""
    alive = [n for n in ray.nodes() if n["Alive"]]
    alive.sort(key=lambda n: (n["NodeID"] != home, n["NodeID"]))
    cpus = [max(1.0, n["Resources"].get("CPU", 0.0)) for n in alive]
    bounds = [sum(cpus[: i + 1]) / sum(cpus) for i in range(len(cpus))]
    places = [(worker + 0.5) / workers for worker in range(workers)]
    return [
        next(n["NodeID"] for n, bound in zip(alive, bounds, strict=True) if place <= bound)
        for place in places
    ]
