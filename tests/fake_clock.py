"""A host's clock for tests of the wall clock: exact, and as imperfect as a real one."""

from __future__ import annotations

#: How late a sleep ends, and what a look at the clock takes, in seconds.
LATE_S, LOOK_S = 4e-4, 1e-5


class FakeClock:
    """Time that passes while somebody sleeps; a sleep of nothing still takes a moment."""

    def __init__(self) -> None:
        self.time_s = 100.0  # where a monotonic clock stands is of no meaning

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.time_s += seconds + LATE_S if seconds else LOOK_S

    @property
    def passed_s(self) -> float:
        return self.time_s - 100.0
