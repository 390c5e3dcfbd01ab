"""Which part of the training text each worker draws from.

A shard is a set of places where a window may start, in pieces of equal length, so that a draw is
one uniform integer whatever the kind of shard:

* ``iid``: everyone draws from the whole text;
* ``contiguous``: worker w draws from the w-th of equal parts;
* ``clustered``: worker w draws from the w-th cluster of passages that resemble each other, the
  non-i.i.d. setting of DiLoCo (Douillard et al. 2023, arXiv:2311.08105, which clusters documents by
  a language model's features; here k-means on hashed n-grams needs no model and no download).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from islands import rng
from islands.errors import InputError, nearest

_KINDS = ("iid", "contiguous", "clustered")

#: The shortest passage: 16 characters say little about what a text is about.
PASSAGE_TOKENS = 256
#: Buckets that n-grams are hashed into, and the longest n-gram.
FEATURES = 256
LONGEST_GRAM = 3
#: Draws for each centre to start from, of which the best is taken.
CANDIDATES = 8
#: Most rounds of k-means; it ends sooner where a round changes nothing.
ITERATIONS = 20
#: Passages whose features are made together: bounds the memory.
_TOGETHER = 4096


@dataclass(frozen=True, eq=False)
class Shard:
    """``places`` successive starts of windows from each of ``first`` (pieces,), in text order."""

    first: NDArray[np.int64]
    places: int
    window: int

    @property
    def size(self) -> int:
        """Number of places where a window can start."""
        return len(self.first) * self.places

    @property
    def tokens(self) -> int:
        """Tokens of text in the shard."""
        return len(self.first) * (self.places + self.window)

    def starts(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions in the text of the given places, each in [0, size); any shape."""
        piece, offset = np.divmod(drawn, self.places)
        places: NDArray[np.int64] = self.first[piece] + offset
        return places


def split(
    tokens: NDArray[np.unsignedinteger], kind: str, *, workers: int, window: int, seed: int
) -> tuple[Shard, ...]:
    """One shard per worker.

    Args:
        tokens: (n,) the training split; only looked at.
        kind: ``iid``, ``contiguous`` or ``clustered``.
        window: tokens per window, not counting the last target.
        seed: decides where k-means starts.

    Raises:
        InputError: an unknown kind, or too little text for a window in every shard.
    """
    if kind not in _KINDS:
        raise InputError(f"data.shards: unknown kind {kind!r}{nearest(kind, _KINDS)}")
    if kind == "clustered":
        return _clustered(tokens, workers, window, seed)
    n = len(tokens)
    shards = []
    for worker in range(workers):
        low, high = (0, n) if kind == "iid" else _part(n, worker, workers)
        if high - low < window + 1:
            raise InputError(
                f"data.shards: {kind} gives worker {worker} {high - low} tokens, but a window "
                f"of {window} needs {window + 1}; give more text, fewer workers or a smaller window"
            )
        shards.append(Shard(np.array([low]), high - low - window, window))
    return tuple(shards)


def _part(n: int, index: int, parts: int) -> tuple[int, int]:
    return index * n // parts, (index + 1) * n // parts


def _clustered(
    tokens: NDArray[np.unsignedinteger], workers: int, window: int, seed: int
) -> tuple[Shard, ...]:
    """Worker w's shard is the w-th cluster of passages, numbered by their first passages.

    A passage is twice as long as a window, or `PASSAGE_TOKENS`; no window crosses its ends.
    """
    length = max(PASSAGE_TOKENS, 2 * window + 1)
    count = len(tokens) // length
    if count < workers:
        raise InputError(
            f"data.shards: clustered needs a passage of {length} tokens for each of {workers} "
            f"workers, but the {len(tokens)} tokens hold {count}; give more text or fewer workers"
        )
    first = np.array([_part(len(tokens), index, count)[0] for index in range(count)])
    cluster = kmeans(features(tokens, first, length), workers, rng.generator(seed, "clusters"))
    return tuple(Shard(first[cluster == w], length - window, window) for w in range(workers))


def features(
    tokens: NDArray[np.unsignedinteger], first: NDArray[np.int64], length: int
) -> NDArray[np.float32]:
    """The passages of ``length`` tokens from each of ``first`` as unit vectors: (passages,
    FEATURES).

    Square roots of the shares of hashed 1-, 2- and 3-grams, so that the Euclidean distance is
    Hellinger's between n-gram distributions: common n-grams do not drown the others.
    """
    found = np.empty((len(first), FEATURES), np.float32)
    for begin in range(0, len(first), _TOGETHER):
        starts = first[begin : begin + _TOGETHER]
        passages = tokens[starts[:, None] + np.arange(length)].astype(np.uint64)
        rows = np.arange(len(starts), dtype=np.int64)[:, None] * FEATURES
        counts = np.zeros(len(starts) * FEATURES)
        grams = np.zeros_like(passages)
        for n in range(1, LONGEST_GRAM + 1):
            grams = _mixed(grams[:, : length - n + 1] + passages[:, n - 1 :] + np.uint64(n))
            buckets = rows + (grams % np.uint64(FEATURES)).astype(np.int64)
            counts += np.bincount(buckets.ravel(), minlength=len(counts))
        counts /= counts.sum() / len(starts)  # every passage has the same number of n-grams
        found[begin : begin + len(starts)] = np.sqrt(counts).reshape(-1, FEATURES)
    return found


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Well-spread 64-bit hashes of 64-bit keys (the finaliser of SplitMix64)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def kmeans(
    points: NDArray[np.float32], clusters: int, draws: np.random.Generator
) -> NDArray[np.int64]:
    """The cluster of each point, (n,), none of them empty; clusters are numbered as they first
    occur.

    Lloyd's algorithm from k-means++ centres (Arthur and Vassilvitskii 2007), at most `ITERATIONS`
    rounds; of equally near centres the first one wins. A cluster without points takes the point
    that is farthest from its centre. ``points``: (n, features) with n >= ``clusters``.
    """
    centres = points[_spread(points, clusters, draws)]
    owner: NDArray[np.int64] = np.full(len(points), -1)
    for _ in range(ITERATIONS):
        before = owner
        distance = np.stack([_squared(points, centre) for centre in centres], axis=1)
        owner = _none_empty(distance.argmin(axis=1), distance)
        if np.array_equal(owner, before):  # and so it would stay
            break
        centres = np.stack([points[owner == c].mean(axis=0) for c in range(clusters)])
    _, begin = np.unique(owner, return_index=True)
    rank = np.empty(clusters, np.int64)
    rank[np.argsort(begin)] = np.arange(clusters)
    numbered: NDArray[np.int64] = rank[owner]
    return numbered


def _squared(points: NDArray[np.float32], centre: NDArray[np.float32]) -> NDArray[np.float64]:
    """Squared distances (n,). A sum by NumPy itself: a BLAS product would depend on the machine's
    threads."""
    squares: NDArray[np.float64] = np.sum(np.square(points - centre), axis=1, dtype=np.float64)
    return squares


def _spread(points: NDArray[np.float32], clusters: int, draws: np.random.Generator) -> list[int]:
    """Greedy k-means++: each further centre is drawn with a chance proportional to its squared
    distance from the nearest one, and the best of `CANDIDATES` such draws is taken."""
    chosen = [int(draws.integers(len(points)))]
    nearest_centre = _squared(points, points[chosen[0]])
    while len(chosen) < clusters:
        total = np.cumsum(nearest_centre)
        # Where every point sits on a centre any will do: the clusters are then filled by force.
        drawn = np.searchsorted(total, draws.random(CANDIDATES) * total[-1], side="right")
        options = [
            (np.minimum(nearest_centre, _squared(points, points[point])), int(point))
            for point in np.minimum(drawn, len(points) - 1)
        ]
        nearest_centre, point = min(options, key=lambda option: option[0].sum())
        chosen.append(point)
    return chosen


def _none_empty(owner: NDArray[np.int64], distance: NDArray[np.float64]) -> NDArray[np.int64]:
    """The same assignment, but each empty cluster has taken a point from one that has several."""
    sizes = np.bincount(owner, minlength=distance.shape[1])
    for cluster in np.flatnonzero(sizes == 0):
        away = np.where(sizes[owner] > 1, distance[np.arange(len(owner)), owner], -1.0)
        point = int(away.argmax())
        sizes[owner[point]] -= 1
        sizes[cluster] = 1
        owner[point] = cluster
    return owner
