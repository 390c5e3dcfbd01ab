"""Running an experiment: the driver's side.

The driver starts the actors, shows progress and passes on an interrupt; the coordinator does the
rest and writes the results, so that the numbers depend on nothing here.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import ray
import torch
from ray.exceptions import RayError

from islands.actors.cluster import Actors, connect, gpus
from islands.config import Experiment
from islands.coordinator import Coordinator
from islands.engine import Interrupted
from islands.errors import InputError, RunError
from islands.fields import MEASURED
from islands.job import Job, pick_device, prepare
from islands.local import LocalWorkers
from islands.plugins import one_line
from islands.replica import Replica
from islands.results.display import LiveDisplay, Progress
from islands.results.folder import new_folder, refuse_used
from islands.results.result import Result
from islands.units import format_time

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
        KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came; the results so far are complete.
    """
    experiment = Experiment() if experiment is None else experiment
    if not isinstance(experiment, Experiment):
        raise InputError(f"experiment: {type(experiment).__name__} is not an islands.Experiment")
    if transfers not in ("links", "each"):
        raise InputError(f"transfers: {transfers!r}; choose 'links' or 'each'")
    if in_process and address:
        raise InputError(f"address: {address!r} is of no use without Ray; leave in_process out")
    out = None if out is None else Path(out)
    refuse_used(out, overwrite)
    folder: Path | None = None

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    def begin() -> Path:
        """The result folder, made or cleared at the last moment: a run that is refused costs
        nothing."""
        nonlocal folder
        folder = new_folder(out, experiment.method.name, overwrite)
        return folder

    if isinstance(experiment.warm_start, int) and experiment.warm_start:
        say(f"warm start: {experiment.warm_start:,} dense steps in this process first")
    try:
        if in_process:
            device = pick_device(experiment, float(torch.cuda.device_count()))
            job = prepare(experiment, per_transfer=transfers == "each", device=device)
            _say_what_was_decided(experiment, job, say)
            with LiveDisplay(quiet) as display:
                summary = run_in_process(job, begin(), display.update)
        else:
            prepared = prepare(experiment, per_transfer=transfers == "each")
            _say_what_was_decided(experiment, prepared, say)
            with session(address, say):
                job = prepared.on(pick_device(experiment, gpus()))
                summary = _run_on_ray(job, begin, quiet, say)
    except RunError as error:
        where = f"; the results so far are in {folder}" if folder else ""
        raise RunError(f"{error}{where}") from error
    except (KeyboardInterrupt, SystemExit):
        if folder:
            say(f"the results so far are in {folder}")
        raise
    assert folder is not None
    return Result(folder, summary)


def _say_what_was_decided(wanted: Experiment, job: Job, say: Callable[[str], None]) -> None:
    """What the written experiment has in place of what was asked for, and why."""
    measured = {
        format_time(float(after.step_time))
        for before, after in zip(
            wanted.cluster.islands, job.experiment.cluster.islands, strict=True
        )
        if before.step_time == MEASURED and after.step_time is not None
    }
    for text in measured:
        say(f"step_time: measured {text} for a local step on this host")
    if job.chosen_collective:
        say(job.chosen_collective)
    for note in job.notes:
        say(f"note: {note}")


@contextmanager
def session(address: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """A connection to Ray that is left afterwards if it was made here."""
    made = connect(address, say)
    try:
        yield
    finally:
        if made:
            ray.shutdown()


def _run_on_ray(
    job: Job, begin: Callable[[], Path], quiet: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    actors = Actors(job, say)
    with LiveDisplay(quiet) as display:
        display.update(_starting(job))
        try:
            actors.set_up(job)
            return drive(actors, job, begin(), display.update)
        finally:
            actors.end()


def _starting(job: Job) -> Progress:
    return Progress(
        0, job.experiment.steps, job.workers, 0, None, None, 0.0, 0, 0, 0.0, "starting actors"
    )


@contextmanager
def stop_signal() -> Iterator[Callable[[], int | None]]:
    """Within the block SIGINT and SIGTERM are only noted; what is yielded tells which one came.

    A KeyboardInterrupt could come in the middle of anything; a run ends between two turns instead.
    A second SIGINT interrupts as usual. Outside the main thread signals are left alone.
    """
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int | None) -> NoReturn:
    """What an interrupted run ends with: like the signal itself, but after the results are
    written."""
    if number == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    raise KeyboardInterrupt


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
    with stop_signal() as stopped:
        try:
            while not (stopped() or ray.wait([running], timeout=LOOK_S)[0]):
                progress = ray.get(coordinator.progress.remote())
                if progress is not None:
                    show(progress)
            if stopped():
                coordinator.stop.remote()
                ray.wait([running], timeout=STOP_S)
                _leave(stopped())
            outcome, content = ray.get(running)
        except RayError as error:
            raise RunError(f"the coordinator failed: {one_line(error)}") from error
    if outcome == "failed":
        raise RunError(str(content))
    assert isinstance(content, dict)
    return content


class Runner:
    """Trains one job after another, in this process or on actors that are kept from run to run.

    Ray and the actors start with the first job, and are left when the block ends; a job with
    another number of workers, or on another device, gets new actors.
    """

    def __init__(
        self, address: str | None, in_process: bool, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._address = address
        self._in_process = in_process
        self._say = say
        self._session = ExitStack()
        self._connected = False
        self._actors: tuple[int, str, Actors] | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_actors()
        self._session.close()

    def connect(self) -> None:
        """Start or join Ray, if it is needed and not done yet. Raises InputError if it is not
        there."""
        if not self._in_process and not self._connected:
            self._session.enter_context(session(self._address, self._say))
            self._connected = True

    def run(self, job: Job, folder: Path) -> dict[str, Any]:
        """Train ``job`` into ``folder``, which is there and empty; returns the summary.

        Raises RunError, or TooManyWorkers, an InputError.
        """
        if self._in_process:
            device = pick_device(job.experiment, float(torch.cuda.device_count()))
            return run_in_process(job.on(device), folder)
        self.connect()
        job = job.on(pick_device(job.experiment, gpus()))
        actors = self._actors_for(job)
        actors.set_up(job)
        return drive(actors, job, folder, lambda progress: None)

    def _actors_for(self, job: Job) -> Actors:
        if self._actors is None or self._actors[:2] != (job.workers, job.device):
            self._end_actors()
            self._actors = (job.workers, job.device, Actors(job, self._say))
        return self._actors[2]

    def _end_actors(self) -> None:
        if self._actors is not None:
            self._actors[2].end()
            self._actors = None


def _replica(job: Job, worker: int) -> Replica:
    try:
        return Replica(job.replica(worker), job.corpus.train)
    except Exception as error:  # the method's own code
        where = f"worker {worker} ({job.island_of[worker]})"
        raise RunError(f"{where} could not start: {one_line(error)}") from error


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
            replicas = [_replica(job, worker) for worker in range(job.workers)]
            network = job.emulation().network()
            coordinator = Coordinator(job, folder)
            workers = LocalWorkers(replicas, shuffle)
            with stop_signal() as stopped:

                def look() -> bool:
                    show(coordinator.progress())
                    return stopped() is not None

                try:
                    return coordinator.run(workers, network, look)
                except Interrupted:
                    _leave(stopped())
    finally:
        torch.set_num_threads(threads)
