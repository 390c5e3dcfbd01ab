"""How evenly a method's bytes are spread over its steps, and what another collective would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from islands.compression import CODE_BITS
from islands.layout import Stream
from islands.methods import Method


def peak_payload_bytes(streams: Sequence[Stream], sizes: Mapping[int, int], steps: int) -> int:
    """The most payload bytes that a worker hands over after one and the same local step.

    It is the schedule's, so the send that ends a run is not in it. ``sizes``: the largest payload
    of each fragment, by its number; ``steps``: local steps of the run.
    """
    after = np.zeros(steps + 1, dtype=np.int64)
    for fragment, stream in enumerate(streams):
        after[stream.first :: stream.period] += sizes.get(fragment, 0)
    return int(after.max())


def ring_bytes(
    method: Method, workers: int, values: float, payload: float
) -> dict[str, float] | None:
    """What ring all-reduces would make a worker send instead of gathering codes; None for others.

    A ring passes partial sums on, and sums of codes are no codes: they travel in ``fp32``, or are
    ``requantised`` at each hop, which rounds them p − 1 times more and is another algorithm.
    ``values`` and ``payload``: numbers of values, and payload bytes, that a worker hands over.
    """
    if method.payload_dtype not in CODE_BITS:
        return None
    share = 2 * (workers - 1) / workers
    return {"fp32": share * 4 * values, "requantised": share * payload}
