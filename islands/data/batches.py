"""Windows of tokens: the batches of one worker, and the fixed windows of an evaluation.

A batch is a pure function of (seed, worker, index), so a worker that starts again at any step, or
that another process replaces, sees the same text as if nothing had happened.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from islands import rng
from islands.errors import InputError, nearest

#: Batches whose starts are drawn together: one generator per block costs far less than one each.
_BLOCK = 256
_SHARDS = ("iid", "contiguous")


class Batches:
    """The endless sequence of one worker's batches, drawn with replacement from its shard."""

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger],
        *,
        worker: int,
        workers: int,
        batch: int,
        window: int,
        shards: str,
        seed: int,
    ) -> None:
        """Look at ``tokens``; nothing is copied, so a read-only view of shared memory will do.

        Args:
            tokens: (n,) the training split.
            batch: windows per batch.
            window: tokens per window, not counting the last target.
            shards: ``iid`` (windows anywhere) or ``contiguous`` (anywhere in the worker-th of
                ``workers`` equal parts).

        Raises:
            InputError: an unknown kind of shard, or a shard shorter than one window.
        """
        if shards not in _SHARDS:
            raise InputError(f"data.shards: unknown kind {shards!r}{nearest(shards, _SHARDS)}")
        if shards == "contiguous":
            n = len(tokens)
            tokens = tokens[worker * n // workers : (worker + 1) * n // workers]
        if len(tokens) < window + 1:
            raise InputError(
                f"data.shards: {shards} gives worker {worker} {len(tokens)} tokens, but a window "
                f"of {window} needs {window + 1}; give more text, fewer workers or a smaller window"
            )
        #: Number of places in the shard where a window can start.
        self.size = len(tokens) - window
        self._tokens: NDArray[np.unsignedinteger] = tokens
        self._offsets = np.arange(window + 1)
        self._shape = (_BLOCK, batch, 1)
        self._key = (seed, "data", worker)
        self._block = -1
        self._starts = np.empty(self._shape, np.int64)

    def draw(self, index: int) -> NDArray[np.int64]:
        """Batch number ``index`` (from 0): (batch, window + 1), a new array."""
        block, row = divmod(index, _BLOCK)
        if block != self._block:
            self._starts = rng.generator(*self._key, block).integers(0, self.size, self._shape)
            self._block = block
        windows: NDArray[np.int64] = self._tokens.take(self._starts[row] + self._offsets).astype(
            np.int64
        )
        return windows


def validation_windows(
    tokens: NDArray[np.unsignedinteger], window: int, count: int
) -> NDArray[np.int64]:
    """Evenly spaced windows from the first token to the last: (windows, window + 1).

    ``count`` of them, or as many as fit without predicting a token twice.
    """
    fit = min(count, (len(tokens) - 1) // window)
    starts = np.arange(fit) * (len(tokens) - window - 1) // max(fit - 1, 1)
    windows: NDArray[np.unsignedinteger] = tokens[starts[:, None] + np.arange(window + 1)]
    return windows.astype(np.int64)
