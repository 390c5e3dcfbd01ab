"""``islands retime``: what a recorded run would have taken on other networks, without training.

A trace has no times in it: who computes how many steps, who sends how many bytes to whom, who waits
for what. So the same trace can be timed on another cluster, at another bandwidth, delay or load, or
with faster workers. The event loop is the run's own, and on the run's own network it gives the
run's own times to the last bit.

Losses do not change with the network as long as rounds wait for everyone, so the time to a target
loss is that of the recorded evaluation that reached it, timed again. A run whose rounds closed by
the clock would have trained something else elsewhere, and is refused.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from math import inf, isclose, isfinite, sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from islands.clock import ComputeModel, FixedSteps
from islands.config import Cluster, cluster_names
from islands.errors import InputError
from islands.network import Link, Topology
from islands.network.background import Load
from islands.network.emulation import Emulation
from islands.outages import with_outages
from islands.recording import Recording, read_recording
from islands.trace import Op
from islands.units import format_bandwidth, format_time, parse_bandwidth, parse_time

#: Compute utilisations for which the bandwidth that they need is looked for.
UTILIZATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
#: The needed bandwidth is looked for on so many rounds of a run, its first ones,
NEEDS_ROUNDS = 200
#: between these (1 kbit/s and 1 Pbit/s, in bytes per second), up to this factor.
LOWEST, HIGHEST, CLOSE = 1e3 / 8, 1e15 / 8, 1.01
#: Operations of each worker that are handed to the network at a time: bounds the memory.
BATCH = 2000
#: More operations than this are timed by several processes: about five seconds for one.
MUCH = 250_000
#: The most values that an ellipsis may stand for.
MOST_VALUES = 1000
ELLIPSES = ("…", "...")

Row = dict[str, Any]
Task = Callable[[], list[Row]]
Batches = Sequence[Sequence[tuple[int, Op]]]


class Setting(NamedTuple):
    """One value of something swept, and the text it was given as; None: what the cluster has."""

    text: str | None = None
    value: float | None = None


OWN = Setting()


#: A swept load's transfers take a link for at least so long, in seconds.
LEAST_BACKGROUND_S = 1e-3


@dataclass(frozen=True)
class Retiming:
    """``rows``: one per run and network. ``needs``: the bandwidth that a compute utilisation needs,
    one per run, network and utilisation; None where none is enough."""

    rows: list[Row]
    needs: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"rows": self.rows, "needs": self.needs}


def retime(
    folders: Sequence[str | Path],
    clusters: Sequence[str | Path] = (),
    *,
    bandwidth: str | None = None,
    load: str | None = None,
    step_time: str | None = None,
    delay: str | None = None,
    target_loss: float | None = None,
) -> Retiming:
    """Time the runs in ``folders`` again, on every combination of what is given.

    Args:
        folders: result folders; one may be there twice.
        clusters: files or names of clusters with as many workers; none: each run's own.
        bandwidth: for example ``1Mbit/s,10Mbit/s,…,100Gbit/s``, a constant for every WAN link,
            access line and backbone; None: the cluster's own.
        load: for example ``0,0.3,0.6``: the share of each of these links that other jobs take, in
            transfers of the link's own background size, else of the run's mean payload, but no
            smaller than what the link carries in a millisecond.
        step_time: for example ``10ms,100ms``, for every local step; None: as recorded.
        delay: for example ``1ms,10ms``, a constant for each of these links; None: its own.
        target_loss: the validation loss to be reached; None: the run's own ``eval.target_loss``.

    Raises:
        InputError: something cannot be timed as asked; nothing was.
    """
    if target_loss is not None and not (isfinite(target_loss) and target_loss > 0):
        raise InputError(f"target_loss: {target_loss} is not a loss; it must be more than zero")
    bandwidths = sweep("bandwidth", bandwidth, parse_bandwidth, format_bandwidth)
    others = (
        sweep("load", load, _parse_load, lambda value: f"{value:g}"),
        sweep("step_time", step_time, _parse_step_time, format_time),
        sweep("delay", delay, parse_time, format_time),
    )
    if any(b.value == inf for b in bandwidths) and any(share.value for share in others[0]):
        raise InputError(f"load: {load} of an unlimited bandwidth is no load; leave one out")
    changed = [n for n, v in (("bandwidth", bandwidth), ("load", load), ("delay", delay)) if v]
    known: dict[str, Recording] = {}
    trials = []
    for folder in map(str, folders):
        if folder not in known:
            known[folder] = read_recording(folder)
        run = known[folder]
        for cluster in [Cluster.load(c) for c in clusters] or [run.experiment.cluster]:
            trials.append(_Trial(run, cluster, target_loss))
            if changed and not trials[-1].topology.links:
                raise InputError(
                    f"{changed[0]}: cluster {cluster.name!r} has no link between islands to change"
                )
    networks = list(product(bandwidths, *others))
    whole = [partial(trial.row, *network) for trial in trials for network in networks]
    first = [partial(trial.needs, *rest) for trial in trials for rest in product(*others)]
    work = len(networks) * sum(trial.operations for trial in trials)
    found = _each([*whole, *first], in_parallel=work > MUCH)
    timed, needed = found[: len(whole)], found[len(whole) :]
    return Retiming([*chain.from_iterable(timed)], [*chain.from_iterable(needed)])


# --------------------------------------------------------------------------------- several at once


#: What the processes of :func:`_each` have to do; they are forks, so it need not be sent to them.
_tasks: Sequence[Task] = ()


def _each(tasks: Sequence[Task], in_parallel: bool) -> list[list[Row]]:
    """What each task gives, in order; ``in_parallel`` on all CPUs, where processes can fork."""
    global _tasks
    if not in_parallel or sys.platform != "linux":
        return [task() for task in tasks]
    cpus = len(os.sched_getaffinity(0))
    _tasks = tasks
    try:
        # Ctrl-C is this process's affair: it ends the others.
        deaf = (signal.SIGINT, signal.SIG_IGN)
        with get_context("fork").Pool(min(cpus, len(tasks)), signal.signal, deaf) as pool:
            return pool.map(_nth, range(len(tasks)), chunksize=1)
    finally:
        _tasks = ()


def _nth(number: int) -> list[Row]:
    return _tasks[number]()


# ------------------------------------------------------------------------------------ what is swept


def sweep(
    field: str,
    text: str | None,
    parse: Callable[[str], float],
    write: Callable[[float], str],
) -> list[Setting]:
    """The values of a list such as ``1Mbit/s,10Mbit/s,…,1Gbit/s``; no text: what the cluster has.

    ``…`` or ``...`` goes on by the factor between the two values before it, up to the one after.
    Raises InputError that names ``field``.
    """
    if text is None:
        return [OWN]
    found: list[Setting] = []
    open_end = False
    for word in (part.strip() for part in text.split(",")):
        if word in ELLIPSES:
            if len(found) < 2 or open_end:
                raise InputError(f"{field}: {word!r} needs two values before it, and one after")
            open_end = True
            continue
        try:
            value = Setting(word, parse(word))
        except InputError as error:
            raise InputError(f"{field}: {error}") from None
        if open_end:
            found += _between(field, found[-2], found[-1], value, write)
            open_end = False
        found.append(value)
    if open_end:
        raise InputError(f"{field}: nothing follows the ellipsis; say where it ends")
    return found


def _between(
    field: str, first: Setting, second: Setting, last: Setting, write: Callable[[float], str]
) -> list[Setting]:
    """What a geometric progression has between its second value and its last."""
    a, b, end = first.value, second.value, last.value
    assert a is not None
    assert b is not None
    assert end is not None
    factor = b / a if a and isfinite(a) and isfinite(b) else 1.0
    spaced = first.text is not None and " " in first.text
    found: list[Setting] = []
    value = b
    # One that runs away from its end, or never moves, is stopped by the number of its values.
    while 0 < value < inf and factor != 1 and len(found) < MOST_VALUES:
        value *= factor
        if isclose(value, end, rel_tol=1e-9):
            return found
        if (value > end) == (factor > 1):
            break
        written = write(value)
        found.append(Setting(written if spaced else written.replace(" ", ""), value))
    raise InputError(
        f"{field}: {first.text},{second.text},… never comes to {last.text}; "
        "each value is the one before times the same factor"
    )


def _parse_load(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a number; write for example 0.3") from None
    if not 0 <= value < 1:
        raise InputError(f"{text} must be at least 0 and less than 1: a full link never empties")
    return value


def _parse_step_time(text: str) -> float:
    value = parse_time(text)
    if not value:
        raise InputError(f"{text!r} is too small; it must be more than zero")
    return value


# ------------------------------------------------------------------------------------- one of them


class _Timed(NamedTuple):
    """A trace on one network: seconds in all and computing (a mean over workers), when the last
    worker passed each mark, how busy the busiest WAN link was; ``stalled`` says why it never
    ends."""

    emulated_s: float
    compute_s: float
    marks: Mapping[int, float]
    busy: float
    stalled: str | None

    @property
    def utilization(self) -> float:
        if self.stalled is not None:
            return 0.0
        return self.compute_s / self.emulated_s if self.emulated_s else 1.0


class _Trial:
    """One run on one cluster. Raises InputError if they do not fit."""

    def __init__(self, run: Recording, cluster: Cluster, target_loss: float | None) -> None:
        if cluster.workers != run.workers:
            fit = [n for n in cluster_names() if Cluster.load(n).workers == run.workers]
            hint = f"; choose from {', '.join(fit)}" if fit else ""
            raise InputError(
                f"cluster: {cluster.name!r} has {cluster.workers} workers, and the run in "
                f"{run.folder} needs {run.workers}{hint}"
            )
        self.topology = cluster.topology()
        if cluster is run.experiment.cluster:  # another one does not have the links that failed
            self.topology = with_outages(self.topology, run.experiment.faults)
        self._run = run
        self._cluster = cluster
        self._target = run.experiment.eval.target_loss if target_loss is None else target_loss
        self._batches = _batches(run.ops)
        self._opening = _batches(run.opening(NEEDS_ROUNDS))

    @property
    def operations(self) -> int:
        """How many there are to be timed, which is how long it takes."""
        return sum(map(len, self._run.ops))

    def row(
        self, bandwidth: Setting, load: Setting, step_time: Setting, delay: Setting
    ) -> list[Row]:
        """The whole run on one network: one row."""
        topology = self._network(bandwidth.value, load.value, delay.value)
        timed = self._time(self._batches, topology, step_time.value)
        whole = timed.stalled is None
        row = {
            **self._names(load, step_time, delay),
            "bandwidth": bandwidth.text,
            "bytes_per_s": bandwidth.value,
            "emulated_s": timed.emulated_s if whole else None,
            "compute_utilization": timed.utilization if whole else None,
            "target_loss": self._target,
            "time_to_target_s": self._reached(timed.marks),
            "wan_utilization": timed.busy if whole else None,
            "stalled": timed.stalled,
        }
        return [row]

    def needs(self, load: Setting, step_time: Setting, delay: Setting) -> list[Row]:
        """The bandwidth that each of ``UTILIZATIONS`` needs; nothing without a WAN link."""
        if not self.topology.links:
            return []

        def utilization(bytes_per_s: float) -> float:
            topology = self._network(bytes_per_s, load.value, delay.value)
            return self._time(self._opening, topology, step_time.value).utilization

        search = Search(utilization)
        found = [(target, search.needed(target)) for target in UTILIZATIONS]
        return [
            {
                **self._names(load, step_time, delay),
                "rounds": min(NEEDS_ROUNDS, self._run.rounds),
                "utilization": target,
                "bandwidth": None if rate is None else format_bandwidth(rate),
                "bytes_per_s": rate,
            }
            for target, rate in found
        ]

    def _names(self, load: Setting, step_time: Setting, delay: Setting) -> Row:
        return {
            "folder": self._run.folder,
            "method": self._run.experiment.method.name,
            "cluster": self._cluster.name,
            "load": load.value,
            "step_time": step_time.text,
            "delay": delay.text,
        }

    def _network(
        self, bytes_per_s: float | None, load: float | None, delay_s: float | None
    ) -> Topology:
        """The cluster's network, with what is given instead of its own."""

        def change(link: Link) -> Link:
            if bytes_per_s is not None:
                link = replace(link, bytes_per_s=bytes_per_s, bandwidth=None)
            if delay_s is not None:
                jitter_s = min(link.jitter_s, delay_s)  # nothing arrives before it was sent
                link = replace(link, delay_s=delay_s, delay=None, jitter_s=jitter_s)
            if load is not None:
                link = replace(link, background=self._background(link, load))
            return link if isfinite(link.bytes_per_s) else replace(link, background=None)

        own = self.topology
        coordinator = own.island_names[own.coordinator_island]
        # Built anew, because routes go by the delays.
        return Topology.build(own.sites, [change(link) for link in own.links], coordinator)

    def _background(self, link: Link, load: float) -> Load | None:
        if not load:
            return None
        if link.background is not None:
            return replace(link.background, load=load)
        # Other jobs' transfers are like ours, but none is so small that a run meets millions.
        size = max(self._run.payload_bytes, LEAST_BACKGROUND_S * link.bytes_per_s)
        return Load(load, size) if isfinite(size) else None

    def _time(self, batches: Batches, topology: Topology, step_s: float | None) -> _Timed:
        """A trace on a network. Raises InputError for a trace that does not fit together."""
        experiment = self._run.experiment
        compute: ComputeModel = self._run.compute
        if step_s is not None:
            compute = FixedSteps((step_s,) * topology.workers)
        order = experiment.ring_order
        if order is not None and set(order) != set(topology.island_names):
            order = None  # of other islands
        timeline = Emulation(
            topology,
            compute,
            experiment.policy.collective(experiment.method.collective),
            scheme=experiment.collective,
            ring_order=order,
            seed=experiment.seed,
        ).timeline()
        marks: dict[int, float] = {}
        found = timeline.take()
        for batch in batches:
            try:
                timeline.extend(batch)
                timeline.advance()
            except ValueError as error:
                text = f"folder: the trace in {self._run.folder} is not whole: {error}"
                raise InputError(text) from None
            found = timeline.take()
            marks.update(found.marks)
            if found.stalled is not None:
                break
        emulated_s = max(clock.clock_s for clock in found.clocks)
        compute_s = sum(clock.compute_s for clock in found.clocks) / len(found.clocks)
        busy_s = max((found.links[link.name].busy_s for link in topology.links), default=0.0)
        busy = busy_s / emulated_s if emulated_s else 0.0
        return _Timed(emulated_s, compute_s, marks, busy, found.stalled)

    def _reached(self, marks: Mapping[int, float]) -> float | None:
        """When the target loss was first measured; None without one, or if it never was."""
        if self._target is None:
            return None
        reached = (step for step, loss in self._run.evals if loss <= self._target)
        return marks.get(next(reached, -1))


def _batches(ops: Sequence[Sequence[Op]]) -> Batches:
    """Everyone's operations in pieces of ``BATCH`` per worker."""
    longest = max(map(len, ops))
    return [
        [(worker, op) for worker, own in enumerate(ops) for op in own[first : first + BATCH]]
        for first in range(0, longest, BATCH)
    ]


# ---------------------------------------------------------------------------- the bandwidth needed


class Search:
    """Looks for the smallest bandwidth with a given utilisation, which grows with the bandwidth.

    ``measure`` gives the utilisation (0 … 1) at so many bytes per second; infinity must do.
    """

    def __init__(self, measure: Callable[[float], float]) -> None:
        self._measure = measure
        self._seen: dict[float, float] = {}

    def at(self, bytes_per_s: float) -> float:
        """The utilisation there, measured once."""
        if bytes_per_s not in self._seen:
            self._seen[bytes_per_s] = self._measure(bytes_per_s)
        return self._seen[bytes_per_s]

    def needed(self, target: float) -> float | None:
        """Enough for ``target``, and not more than 1 % above what is not enough; bytes per second.

        None if no bandwidth is enough, ``LOWEST`` if that already is.
        """
        if self.at(inf) < target:
            return None
        if self.at(LOWEST) >= target:
            return LOWEST
        high = min(rate for rate, found in self._seen.items() if found >= target)
        low = max(r for r, found in self._seen.items() if found < target and r < high)
        tries = 0
        while high > low * CLOSE:
            if low * CLOSE >= HIGHEST:
                return None
            rate = self._guess(low, high, target, tries)
            if self.at(rate) >= target:
                high = rate
            else:
                low = rate
            tries += 1
        return high

    def _guess(self, low: float, high: float, target: float, tries: int) -> float:
        """Where to look next, well inside the bracket.

        Seconds waited per second computed grow linearly with the seconds per byte as long as
        nothing overlaps, so that is how the bracket is interpolated: a little above and below in
        turn, to close it from both sides. Every third time it is halved, which needs no such luck.
        """
        if tries % 3 == 2:
            return round_rate(sqrt(low * min(high, HIGHEST)))
        waits = [1 / max(share, 1e-300) - 1 for share in (self.at(low), self.at(high), target)]
        share = (waits[2] - waits[1]) / (waits[0] - waits[1])
        per_byte = 1 / high + share * (1 / low - 1 / high)
        middle = 1 / per_byte if per_byte else HIGHEST
        middle *= 1.003 if tries % 3 == 0 else 1 / 1.003
        return round_rate(min(max(middle, low * 1.003), high / 1.003, HIGHEST))


def round_rate(bytes_per_s: float) -> float:
    """Four significant digits in bits per second, which people read."""
    return float(f"{8 * bytes_per_s:.4g}") / 8
