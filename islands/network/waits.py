"""How long a newcomer waits behind background traffic: the real queue code beside the theory.

Poisson arrivals see what a newcomer sees (Wolff 1982, "Poisson arrivals see time averages"), so the
waits of the background's own transfers are the measurement.
"""

from __future__ import annotations

from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from islands.errors import InputError
from islands.network.background import Arrivals, FifoBackground, Load
from islands.network.usage import Usage

#: One transfer in bytes and the link's rate. Sizes are whole bytes: with so many of them in one,
#: the exponential's second moment is off by less than 1e-6 of it.
_SIZE, _RATE = 1e6, 1e12
#: Arrivals of the first look, and after which it ends whatever the error: seconds of work.
_PILOT, _LIMIT = 200_000, 100_000_000


class Cycles:
    """Sums over busy cycles, each begun by an arrival that finds nobody (the last one is left out).

    What happens in one cycle is independent of the others, so the mean wait is the ratio of two
    means of independent values and its standard error is that of a ratio (Crane and Iglehart 1975,
    "Simulating stable stochastic systems III: regenerative processes").
    """

    def __init__(self) -> None:
        self.cycles = 0
        self._open = (0.0, 0.0)  # waits and arrivals of the cycle that still goes on
        self._waits = self._arrivals = 0.0
        self._squares = np.zeros(3)  # waits², waits × arrivals, arrivals²

    def add(self, waits: NDArray[np.float64]) -> None:
        """The next waits in order, (transfers,)."""
        begins = np.flatnonzero(waits == 0)
        edges = np.concatenate(([0], begins, [len(waits)]))
        arrivals = np.diff(edges).astype(np.float64)
        running = np.concatenate(([0.0], np.cumsum(waits)))
        sums = np.diff(running[edges])
        sums[0] += self._open[0]
        arrivals[0] += self._open[1]
        self._open = float(sums[-1]), float(arrivals[-1])
        sums, arrivals = sums[:-1], arrivals[:-1]
        self.cycles += int((arrivals > 0).sum())
        self._waits += float(sums.sum())
        self._arrivals += float(arrivals.sum())
        pairs = ((sums, sums), (sums, arrivals), (arrivals, arrivals))
        self._squares += [float((one * other).sum()) for one, other in pairs]

    def mean(self) -> tuple[float, float]:
        """The mean wait and its standard error."""
        if self.cycles < 2:
            return 0.0, inf
        mean = self._waits / self._arrivals
        waits2, both, arrivals2 = self._squares.tolist()
        spread = max(waits2 - 2 * mean * both + mean * mean * arrivals2, 0.0)
        return mean, sqrt(spread * self.cycles / (self.cycles - 1)) / self._arrivals


def mean_wait(load: float, exponential: bool) -> float:
    """Pollaczek–Khinchine: the mean wait in mean transfer times, ρ/(1−ρ)·(1 + c²)/2.

    c² is the squared coefficient of variation of the sizes: 1 for exponential, 0 for equal ones.
    """
    return load / (1 - load) * (1.0 if exponential else 0.5)


def queue_waits(
    load: float, exponential: bool, relative_error: float, seed: int
) -> tuple[float, float, float, int]:
    """(measured, stderr, theory, arrivals): the mean wait of a newcomer, in mean transfer times.

    Runs until the standard error is below ``relative_error`` of the measured value, or until 1e8
    arrivals.
    """
    if not 0 <= load < 1:
        raise InputError(f"load: {load:g} is not in 0 … 1, 1 excluded; the nearest valid is 0.99")
    theory = mean_wait(load, exponential)
    if load == 0:
        return 0.0, 0.0, 0.0, 0
    cycles = Cycles()
    unit_s = _SIZE / _RATE
    arrivals = Arrivals(Load(load, _SIZE, exponential), _RATE, seed, f"waits:{load!r}")
    queue = FifoBackground(arrivals, _RATE, Usage(), cycles.add)
    free_s, wanted = 0.0, float(_PILOT)
    while True:
        free_s = queue.serve(wanted / load * unit_s, free_s)
        mean_s, error_s = cycles.mean()
        if error_s < relative_error * mean_s or wanted >= _LIMIT:
            return mean_s / unit_s, error_s / unit_s, theory, queue.count
        # Few looks: stopping at the first lucky one would favour small values.
        missing = min((error_s / (relative_error * mean_s)) ** 2, 8.0) if mean_s else 8.0
        wanted = min(wanted * missing * 1.2, _LIMIT)
