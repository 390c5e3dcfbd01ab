"""Windows of tokens: the batches of one worker, and the fixed windows of an evaluation.

A batch is a pure function of (seed, worker, index), so a worker that starts again at any step, or
that another process replaces, sees the same text as if nothing had happened.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from islands import rng
from islands.data.shards import Shard

#: Batches whose starts are drawn together: one generator per block costs far less than one each.
_BLOCK = 256


class Batches:
    """The endless sequence of one worker's batches, drawn with replacement from its shard."""

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger],
        shard: Shard,
        *,
        worker: int,
        batch: int,
        seed: int,
    ) -> None:
        """Look at ``tokens``; nothing is copied, so a read-only view of shared memory will do.

        Args:
            tokens: (n,) the training split.
            shard: where in it this worker's windows may start, and how long they are.
            batch: windows per batch.
        """
        self._tokens: NDArray[np.unsignedinteger] = tokens
        self._shard = shard
        self._offsets = np.arange(shard.window + 1)
        self._shape = (_BLOCK, batch, 1)
        self._key = (seed, "data", worker)
        self._block = -1
        self._starts = np.empty(self._shape, np.int64)

    def draw(self, index: int) -> NDArray[np.int64]:
        """Batch number ``index`` (from 0): (batch, window + 1), a new array."""
        block, row = divmod(index, _BLOCK)
        if block != self._block:
            drawn = rng.generator(*self._key, block).integers(0, self._shard.size, self._shape)
            self._starts = self._shard.starts(drawn)
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
