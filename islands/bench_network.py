"""What the emulated network itself costs on this machine, without training anything.

* one FIFO link: the event loop that every run uses, beside the same link written with simpy, a
  general discrete-event simulator; both get the same transfers and must deliver them at the same
  moments;
* one ring all-reduce over many workers that is alone on its links: the path that works with arrays;
* many flows that share some links max-min fairly, to the last completion.

All take turns, so that a machine that slows down slows all of them, and medians are shown. Seconds
are of this process's own computing: what else the machine does meanwhile does not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from math import inf
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from islands.clock import FixedSteps
from islands.errors import InputError, RunError
from islands.network import Site, Timeline, Topology, Wire
from islands.network.fabric import Chain, Fabric, Transfer
from islands.network.fair import FairShare
from islands.network.topology import Hop
from islands.rng import generator
from islands.trace import Bytes, End, Receive, Send

WIDTH = 80
#: The one link: 1 Gbit/s and 65 ms, taken by transfers of 1 MB on average for this share of time.
RATE, DELAY_S, SIZE, LOAD = 125e6, 0.065, 1e6, 0.9
#: The ring: 100 MB of two-byte values per worker.
PAYLOAD, ITEMSIZE = 100_000_000, 2
#: When each transfer over the one link is delivered, and how long all of them queued; seconds.
Served: TypeAlias = tuple[list[float], float]
#: No flow crosses more links than this.
MOST_HOPS = 4


@dataclass(frozen=True)
class NetworkBench:
    """Medians over the repeats.

    ``islands_s`` and ``simpy_s`` are for ``transfers`` over one link; ``ring_s`` is for one
    all-reduce over ``workers`` on ``islands`` islands; ``fair_s`` is for ``flows`` over ``links``
    links on ``routes`` different routes. ``repeats`` has what the medians are of.
    """

    transfers: int
    islands_s: float
    simpy_s: float
    workers: int
    islands: int
    ring_s: float
    flows: int
    links: int
    routes: int
    fair_s: float
    simpy: str
    repeats: Mapping[str, Sequence[float]]

    @property
    def to_simpy(self) -> float:
        """How many times as many transfers per second the event loop carries."""
        return self.simpy_s / self.islands_s

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        derived = {
            "islands_transfers_per_s": self.transfers / self.islands_s,
            "simpy_transfers_per_s": self.transfers / self.simpy_s,
            "islands_to_simpy": self.to_simpy,
        }
        return {**asdict(self), **derived}

    def print(self, console: Console | None = None) -> None:
        """The report, at most 80 columns wide."""
        console = console or Console()
        count = len(next(iter(self.repeats.values())))
        console.print(
            f"[bold]The emulated network alone[/]; medians of {count}", highlight=False, width=WIDTH
        )
        console.print()
        console.print(self._table(), width=WIDTH)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        table.add_row(
            "one FIFO link, event loop",
            f"{self.transfers / self.islands_s:,.0f} transfers/s",
            f"{self.to_simpy:.1f} x simpy",
        )
        table.add_row(
            f"the same, simpy {self.simpy}",
            f"{self.transfers / self.simpy_s:,.0f} transfers/s",
            f"{self.transfers:,} transfers",
        )
        table.add_row(
            "one ring all-reduce",
            f"{self.ring_s * 1e3:,.1f} ms",
            f"{self.workers:,} workers, {self.islands} islands",
        )
        table.add_row(
            "max-min sharing to the end",
            f"{self.fair_s * 1e3:,.1f} ms",
            f"{self.flows:,} flows on {self.routes:,} routes, {self.links} links",
        )
        return table


def bench_network(
    *,
    transfers: int = 50_000,
    workers: int = 1024,
    islands: int = 8,
    flows: int = 1000,
    links: int = 20,
    repeats: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> NetworkBench:
    """Measure the network's own speed on this machine.

    Args:
        transfers: over the one link, in the event loop and in simpy.
        workers, islands: of the ring, the workers evenly on the islands.
        flows, links: of the fair sharing; all flows begin at once.
        repeats: how often everything runs.
        say: told what was measured, a line at a time.

    Raises:
        InputError: ``repeats`` is not positive, or simpy is not installed.
        RunError: the event loop and simpy disagree.
    """
    if repeats < 1:
        raise InputError(f"repeats: {repeats} is too small; it must be at least 1")
    simpy = _simpy()
    ready, sizes = _transfers(transfers)
    ring = _ring_topology(workers, islands)
    shared = _Shared(flows, links)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        gc.collect()  # nobody pays for what another one left behind
        began = time.process_time()
        result = run()
        seconds.setdefault(name, []).append(time.process_time() - began)
        say(f"{name.removesuffix('_s')}: {seconds[name][-1]:.4f} s")
        return result

    for repeat in range(repeats):
        say(f"repeat {repeat + 1} of {repeats}")
        ours = timed("islands_s", partial(over_fabric, ready, sizes))
        theirs = timed("simpy_s", partial(over_simpy, simpy, ready, sizes))
        if not all(
            np.allclose(a, b, rtol=1e-9, atol=0.0) for a, b in zip(ours, theirs, strict=True)
        ):
            raise RunError("the event loop and simpy deliver the same transfers at other moments")
        timeline = Timeline(ring, FixedSteps((0.0,) * workers), "all_reduce", vectorise=True)
        timed("ring_s", partial(all_reduce, timeline))
        timed("fair_s", shared.run)
    return NetworkBench(
        transfers=transfers,
        workers=workers,
        islands=islands,
        flows=flows,
        links=links,
        routes=len(set(shared.routes)),
        simpy=simpy.__version__,
        repeats=seconds,
        **{name: statistics.median(values) for name, values in seconds.items()},
    )


def _simpy() -> ModuleType:
    """simpy, which only this comparison needs."""
    try:
        return import_module("simpy")
    except ImportError:
        raise InputError(
            "network: simpy, which the event loop is compared with, is not installed; "
            "pip install simpy"
        ) from None


def _transfers(count: int) -> tuple[list[float], list[int]]:
    """Ready times and sizes of transfers that keep a link busy and often have to wait."""
    draws = generator(0, "bench-link")
    ready = np.cumsum(draws.exponential(SIZE / RATE / LOAD, count))
    return ready.tolist(), draws.integers(1, int(2 * SIZE), count).tolist()


# --- the link, twice ------------------------------------------------------------------------------


class _Feed:
    """Owns all transfers of one link: sends each as the one before has had its turn, and remembers
    when it arrives. So the event loop holds one event at a time, as a run does per member."""

    final_phase = -1  # nobody waits for a sender's port

    def __init__(
        self,
        send: Callable[[float, int, Transfer], None],
        ready: Sequence[float],
        sizes: Sequence[int],
    ) -> None:
        self.first_s = [inf]
        self.last_s = [0.0]
        self.queued_s = [0.0]
        self.delivered_s = [0.0] * len(ready)
        self._send = send
        self._transfers = enumerate(zip(ready, sizes, strict=True))
        self._path = (Hop(0, RATE, DELAY_S),)

    def left(self, lane: int, finish_s: float, chain: Chain) -> None:
        """Never called: no phase is the final one."""

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        """Called at the transfer's ready time, when everything about it is decided."""
        self.delivered_s[lane] = time_s
        self.send()

    def send(self) -> None:
        """Hand the next transfer over, if there is one."""
        for number, (ready_s, size) in self._transfers:
            chain = [ready_s, 0.0, 0.0, 0.0, 0.0]
            self._send(ready_s, number, (self._path, size, self, 0, number, 0, chain))
            return


def over_fabric(ready: Sequence[float], sizes: Sequence[int]) -> Served:
    """Transfers that all cross one FIFO link, in the event loop."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]
    fabric = Fabric(Topology.build(sites, [Wire("link", ("a", "b"), RATE, DELAY_S)]))
    feed = _Feed(fabric.send, ready, sizes)
    feed.send()
    fabric.run()
    return feed.delivered_s, feed.queued_s[0]


def over_simpy(simpy: Any, ready: Sequence[float], sizes: Sequence[int]) -> Served:
    """The same as its users write it: a source, a process per transfer, a resource for the link."""
    environment = simpy.Environment()
    link = simpy.Resource(environment, capacity=1)
    delivered_s = [0.0] * len(ready)
    queued_s = 0.0

    def source() -> Any:
        for number, (time_s, size) in enumerate(zip(ready, sizes, strict=True)):
            yield environment.timeout(time_s - environment.now)
            environment.process(transfer(number, size))

    def transfer(number: int, size: int) -> Any:
        nonlocal queued_s
        ready_s = environment.now
        with link.request() as turn:
            yield turn
            queued_s += environment.now - ready_s
            yield environment.timeout(size / RATE)
        yield environment.timeout(DELAY_S)
        delivered_s[number] = environment.now

    environment.process(source())
    environment.run()
    return delivered_s, queued_s


# --- the ring and the shared links ----------------------------------------------------------------


def _ring_topology(workers: int, islands: int) -> Topology:
    """Workers evenly on islands, which are joined in a circle."""
    if islands < 1 or workers % islands:
        raise InputError(f"workers: {workers} do not fit evenly on {islands} islands")
    sites = [Site(f"i{n}", workers // islands, 12.5e9, 20e-6) for n in range(islands)]
    pairs = {tuple(sorted((n, (n + 1) % islands))) for n in range(islands)}
    wires = [Wire(f"w{a}", (f"i{a}", f"i{b}"), RATE, DELAY_S) for a, b in sorted(pairs) if a != b]
    return Topology.build(sites, wires)


def all_reduce(timeline: Timeline) -> float:
    """One all-reduce of everyone, who are all ready at 0; its emulated seconds."""
    send = Send(0, 1, 0, Bytes(values=PAYLOAD), ITEMSIZE)
    for worker in range(timeline.topology.workers):
        timeline.extend((worker, op) for op in (send, Receive(0, 1), End()))
    timeline.advance()
    return max(clock.clock_s for clock in timeline.take().clocks)


class _Shared:
    """Flows of random sizes over random links, all of which begin at once."""

    def __init__(self, flows: int, links: int) -> None:
        draws = generator(0, "bench-fair")
        self.capacity = draws.uniform(0.1 * RATE, RATE, links).tolist()
        self.sizes = draws.uniform(0.1 * SIZE, SIZE, flows).tolist()
        hops = draws.integers(1, min(links, MOST_HOPS), flows, endpoint=True)
        self.routes = [tuple(draws.permutation(links)[:count].tolist()) for count in hops]

    def run(self) -> float:
        """When the last flow has finished; emulated seconds."""
        share = FairShare(self.capacity, [inf] * len(self.capacity), {}, {})
        for number, (route, size) in enumerate(zip(self.routes, self.sizes, strict=True)):
            share.begin(0.0, number, route, size, None)
        left, last_s = len(self.sizes), 0.0
        while left:
            last_s = share.next_s
            left -= len(share.step())
        return last_s
