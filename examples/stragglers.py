"""What waiting for the slowest costs: synchronised steps under 10 % exponential jitter.

    python examples/stragglers.py

The first table takes the network's own clocks over 10,000 steps of eight workers on a network that
costs nothing; the workers compute nothing, they only take their time. Beside it stand the exact
expectations. The second table is what jitter adds to two runs that do train.
"""

import tempfile
from collections.abc import Iterator
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import islands
from islands import Experiment
from islands.clock import FixedSteps
from islands.fault_kinds import parse_fault
from islands.faults import Faults
from islands.network import Site, Timeline, Timings, Topology
from islands.trace import Bytes, Compute, End, Op, Receive, Send

WORKERS = 8
STEPS = 10_000
MEAN = 0.1
JITTER = f"straggler:jitter=exponential,mean={MEAN}"


def _program(sync_every: int | None) -> Iterator[Op]:
    """Compute and exchange nothing, again and again; None: compute only."""
    every = sync_every or STEPS
    for version, first in enumerate(range(0, STEPS, every), start=1):
        yield Compute(first, every)
        if sync_every:
            yield Send(0, version, first + every, Bytes(), 1)
            yield Receive(0, version)
    yield End()


def _timings(sync_every: int | None, seed: int) -> Timings:
    """What the network's clocks say about the workers under jitter, links being free."""
    faults = Faults([parse_fault(JITTER)], seed, ["a"] * WORKERS)
    compute = faults.compute(FixedSteps((1.0,) * WORKERS))
    timeline = Timeline(Topology.build([Site("a", WORKERS, inf, 0.0)], [], None), compute, "star")
    for worker in range(WORKERS):
        timeline.extend((worker, op) for op in _program(sync_every))
    timeline.advance()
    return timeline.take()


def round_times(sync_every: int, seed: int = 0) -> NDArray[np.float64]:
    """How long each round takes the workers per step, in nominal steps; (STEPS / sync_every,)."""
    syncs = _timings(sync_every, seed).syncs
    ends = np.array([sync.done_s for sync in syncs if sync.worker == 0])
    return np.diff(ends, prepend=0.0) / sync_every


def lone_steps(seed: int = 0) -> NDArray[np.float64]:
    """The steps of workers that never wait, in nominal steps; (WORKERS × STEPS,)."""
    return np.concatenate([ends - starts for _, _, starts, ends in _timings(None, seed).steps])


def expected_time(sync_every: int) -> float:
    """1 + E[max of the workers' jitter over a round] / steps, in nominal steps.

    The jitter of n steps together is Gamma(n), so the maximum's expectation is the integral of
    1 − F(x)^workers with F(x) = 1 − Σ_{k<n} e^−x x^k / k!.
    """
    x = np.linspace(0.0, 5.0 * sync_every + 50.0, 400_001)
    term = np.exp(-x)
    tail = term.copy()
    for k in range(1, sync_every):
        term = term * x / k
        tail += term
    late = 1.0 - (1.0 - tail) ** WORKERS
    return 1.0 + MEAN * float((late[:-1] + late[1:]).sum() / 2 * (x[1] - x[0])) / sync_every


def main() -> None:
    """Print both tables."""
    print(f"{'sync every':<14}{'time per step':>14}{'expected':>10}")
    print(f"{'never':<14}{lone_steps().mean():>14.3f}{1 + MEAN:>10.4f}")
    for sync_every in (1, 10, 50):
        measured = round_times(sync_every).mean()
        print(f"{sync_every:<14}{measured:>14.3f}{expected_time(sync_every):>10.4f}")

    print(f"\n{'method':<10}{'emulated s':>12}{'with jitter':>13}{'lost to it':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for method in ({"name": "dense"}, {"name": "diloco", "sync_every": 10}):
            seconds = []
            for faults in ((), (JITTER,)):
                experiment = Experiment(method=method, steps=100, faults=faults)
                out = Path(folder) / f"{method['name']}{len(seconds)}"
                summary = islands.run(experiment, in_process=True, out=out).summary
                seconds.append(summary["emulated_s"])
            lost_s = summary["lost_s"]["straggler"]
            print(f"{method['name']:<10}{seconds[0]:>12.2f}{seconds[1]:>13.2f}{lost_s:>12.2f}")


if __name__ == "__main__":
    main()
