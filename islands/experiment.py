"""Running an experiment: the driver's side.

The driver starts the actors, shows progress and passes on an interrupt; the coordinator does the
rest and writes the results, so that the numbers depend on nothing here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from islands.actors.cluster import Actors, connect, gpus
from islands.config import Experiment
from islands.coordinator import Coordinator
from islands.errors import RunError
from islands.job import Job, pick_device, prepare
from islands.local import LocalNetwork, LocalWorkers
from islands.network import Timeline
from islands.replica import Replica
from islands.results.display import LiveDisplay, Progress
from islands.results.folder import new_folder
from islands.results.result import Result

#: Seconds between two looks at the coordinator's progress.
LOOK_S = 0.25
#: Seconds that an interrupted run has to write what it has.
STOP_S = 60.0


def run(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    address: str | None = None,
    in_process: bool = False,
    transfers: str = "links",
    quiet: bool = True,
) -> Result:
    """Train and return the results.

    Args:
        experiment: what to run; the default is the main job.
        out: result folder; a fresh ``runs/<method>-<n>`` if None.
        overwrite: replace a run that ``out`` holds.
        address: a Ray cluster to join (``host:port``); None: RAY_ADDRESS, or a local one.
        in_process: no Ray: replicas and network inside this process, same results.
        transfers: ``links`` (a row per round and link) or ``each`` (a row per transfer).
        quiet: no progress display.

    Raises:
        InputError: the experiment cannot be run as asked; nothing was begun.
        RunError: it failed while it ran; the message says where the results so far are.
        KeyboardInterrupt: it was interrupted; the results so far are complete.
    """
    experiment = Experiment() if experiment is None else experiment
    folder: Path | None = None

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    try:
        if in_process:
            device = pick_device(experiment, float(torch.cuda.device_count()))
            job = prepare(experiment, per_transfer=transfers == "each", device=device)
            folder = new_folder(_path(out), experiment.method.name, overwrite)
            with LiveDisplay(quiet) as display:
                summary = run_in_process(job, folder, display.update)
        else:
            prepared = prepare(experiment, per_transfer=transfers == "each")
            with session(address, say):
                job = prepared.on(pick_device(experiment, gpus()))
                folder = new_folder(_path(out), experiment.method.name, overwrite)
                summary = _run_on_ray(job, folder, quiet, say)
    except RunError as error:
        where = f"; the results so far are in {folder}" if folder else ""
        raise RunError(f"{error}{where}") from error
    except KeyboardInterrupt:
        if folder:
            say(f"the results so far are in {folder}")
        raise
    return Result(folder, summary)


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)


@contextmanager
def session(address: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """A connection to Ray that is left afterwards if it was made here."""
    made = connect(address, say)
    try:
        yield
    finally:
        if made:
            ray.shutdown()


def _run_on_ray(job: Job, folder: Path, quiet: bool, say: Callable[[str], None]) -> dict[str, Any]:
    actors = Actors(job, say)
    with LiveDisplay(quiet) as display:
        display.update(_starting(job))
        try:
            actors.set_up(job)
            return drive(actors, job, folder, display.update)
        finally:
            actors.end()


def _starting(job: Job) -> Progress:
    return Progress(
        0, job.experiment.steps, job.workers, 0, None, None, 0.0, 0, 0, 0.0, "starting actors"
    )


def drive(
    actors: Actors, job: Job, folder: Path, show: Callable[[Progress], None]
) -> dict[str, Any]:
    """Let the coordinator train, and show its progress until it is done.

    On an interrupt the coordinator is asked to stop and given time to write what there is.
    """
    coordinator = actors.coordinator
    # The training tokens are with the workers; the coordinator evaluates on the others.
    lean = replace(job, corpus=replace(job.corpus, train=job.corpus.train[:0]))
    running = coordinator.run.remote(lean, str(folder), actors.workers, actors.link)
    try:
        while not ray.wait([running], timeout=LOOK_S)[0]:
            progress = ray.get(coordinator.progress.remote())
            if progress is not None:
                show(progress)
        outcome, content = ray.get(running)
    except KeyboardInterrupt:
        coordinator.stop.remote()
        ray.wait([running], timeout=STOP_S)
        raise
    except RayError as error:
        raise RunError(f"the coordinator failed: {error}") from error
    if outcome == "failed":
        raise RunError(str(content))
    assert isinstance(content, dict)
    return content


def run_in_process(
    job: Job,
    folder: Path,
    show: Callable[[Progress], None] = lambda progress: None,
    shuffle: Random | None = None,
) -> dict[str, Any]:
    """The same run without Ray, in this process. ``shuffle`` draws the order of the answers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the actors: the number of threads changes the rounding
    try:
        with torch.random.fork_rng():
            replicas = [Replica(job.replica(w), job.corpus.train) for w in range(job.workers)]
            timeline = Timeline(
                job.topology,
                job.compute,
                job.experiment.method.collective,
                timed=job.experiment.method.timed,
                per_transfer=job.per_transfer,
            )
            for worker in range(job.workers):
                timeline.control(worker, job.initial_bytes)
            coordinator = Coordinator(job, folder)

            def look() -> bool:
                show(coordinator.progress())
                return False

            workers = LocalWorkers(replicas, shuffle)
            return coordinator.run(workers, LocalNetwork(timeline), look)
    finally:
        torch.set_num_threads(threads)
