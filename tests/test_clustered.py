"""Clustered shards: passages, features and k-means against restatements; reported sizes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import PROSE, cluster, experiment, train
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from islands import rng
from islands.data import Batches, Shard, split
from islands.data.shards import FEATURES, PASSAGE_TOKENS, features, kmeans
from islands.errors import InputError
from islands.job import prepare
from islands.results.display import final_table


def clustered(tokens: Any, workers: int, window: int = 16, seed: int = 0) -> tuple[Shard, ...]:
    return split(tokens, "clustered", workers=workers, window=window, seed=seed)


def planted(sizes: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Passages of as many kinds, each kind with three tokens of its own, in a shuffled order."""
    draws = np.random.default_rng(7)
    kinds = draws.permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    text = [10 * kind + draws.integers(0, 3, PASSAGE_TOKENS) for kind in kinds]
    return np.concatenate(text).astype(np.uint8), kinds


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(9, 9), (40, 8, 3), (2, 20, 5, 13)])
def test_kinds_of_text_are_found_again(sizes: tuple[int, ...], seed: int) -> None:
    """Where passages of several kinds are mixed each worker gets the passages of one kind, in the
    order in which the kinds first occur."""
    tokens, kinds = planted(sizes)
    shards = clustered(tokens, len(sizes), seed=seed)
    for shard, kind in zip(shards, dict.fromkeys(kinds), strict=True):
        expected = [n * PASSAGE_TOKENS for n, other in enumerate(kinds) if other == kind]
        assert shard.first.tolist() == expected
        assert shard.tokens == sizes[kind] * PASSAGE_TOKENS


def test_windows_lie_inside_the_passages_of_their_cluster() -> None:
    """A worker sees its own kind of text and nothing else, and all places where a window fits."""
    tokens, kinds = planted((6, 5))
    for worker, kind in enumerate(dict.fromkeys(kinds)):
        shard = clustered(tokens, 2)[worker]
        assert shard.size == (6, 5)[kind] * (PASSAGE_TOKENS - 16)
        drawn = Batches(tokens, shard, worker=worker, batch=400, seed=0)
        windows = np.concatenate([drawn.draw(n) for n in range(40)])
        assert set((windows // 10).ravel().tolist()) == {kind}
        places = shard.starts(np.arange(shard.size))
        inside = [f + n for f in shard.first.tolist() for n in range(PASSAGE_TOKENS - 16)]
        assert places.tolist() == inside


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1024, 4000),
    letters=st.integers(1, 6),
    window=st.sampled_from([3, 16, 120]),
    seed=st.integers(0, 3),
)
def test_clusters_share_all_passages_between_them(
    n: int, letters: int, window: int, seed: int
) -> None:
    """Any text: equal parts of it, each in exactly one shard, none without one; twice the same."""
    tokens = np.random.default_rng(n).integers(0, letters, n).astype(np.uint8)
    shards = clustered(tokens, 4, window, seed)
    count = n // 256  # a passage is never shorter than 256 tokens and here 256 > 2·window
    first = sorted(place for shard in shards for place in shard.first.tolist())
    assert first == [i * n // count for i in range(count)]
    assert all(len(shard.first) and shard.places == 256 - window for shard in shards)
    assert all(b - a >= 256 for a, b in pairwise([*first, n]))
    again = clustered(tokens, 4, window, seed)
    assert [s.first.tolist() for s in shards] == [s.first.tolist() for s in again]


def test_long_windows_have_long_passages() -> None:
    """A passage holds two windows and the last target, so that most windows fit into one."""
    shards = clustered(np.zeros(10_000, np.uint8), 2, window=500)
    assert {shard.places + shard.window for shard in shards} == {1001}


def mixed(key: int) -> int:
    """The finaliser of SplitMix64, in whole numbers."""
    wrap = 2**64
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % wrap
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB % wrap
    return key ^ (key >> 31)


def test_features_are_roots_of_the_shares_of_hashed_grams() -> None:
    """1-, 2- and 3-grams counted one by one; a passage's vector has the length one."""
    tokens = np.random.default_rng(1).integers(0, 300, 400).astype(np.uint16)
    found = features(tokens, np.array([0, 130]), 200)
    for row, start in zip(found, (0, 130), strict=True):
        counts: Counter[int] = Counter()
        for length in (1, 2, 3):
            for at in range(start, start + 200 - length + 1):
                gram = 0
                for n, token in enumerate(tokens[at : at + length].tolist(), start=1):
                    gram = mixed((gram + token + n) % 2**64)
                counts[gram % FEATURES] += 1
        expected = [(counts[b] / (200 + 199 + 198)) ** 0.5 for b in range(FEATURES)]
        assert row.tolist() == pytest.approx(expected, rel=1e-6)
        assert float(np.square(row, dtype=np.float64).sum()) == pytest.approx(1, rel=1e-6)


def test_kmeans_by_hand() -> None:
    """Two pairs of points, far apart; the first point's cluster is number 0."""
    points = np.array([[10.0], [0.0], [11.0], [1.0]], np.float32)
    for seed in range(5):
        assert kmeans(points, 2, rng.generator(seed, "test")).tolist() == [0, 1, 0, 1]


def test_equal_points_still_fill_every_cluster() -> None:
    """All distances tie: the first cluster has everything, and the empty ones take the first
    points that are not alone."""
    points = np.ones((5, 2), np.float32)
    assert kmeans(points, 3, rng.generator(0, "test")).tolist() == [0, 1, 2, 2, 2]
    assert kmeans(points[:3], 3, rng.generator(0, "test")).tolist() == [0, 1, 2]


def test_too_little_text_is_refused() -> None:
    """Each worker needs a passage of its own."""
    with pytest.raises(InputError) as error:
        clustered(np.zeros(1000, np.uint8), 4)
    assert str(error.value) == (
        "data.shards: clustered needs a passage of 256 tokens for each of 4 workers, "
        "but the 1000 tokens hold 3; give more text or fewer workers"
    )


def test_a_run_reports_its_shards() -> None:
    """The sizes in the summary are those of the workers' own shards; training sees them."""
    settings = {"cluster": cluster((1, 1)), "steps": 2}
    what = experiment(data={"name": PROSE, "shards": "clustered"}, **settings)
    sizes = [shard.tokens for shard in prepare(what).shards]
    run = train(what)
    assert run.summary["shard_sizes"] == sizes
    assert run.summary["shards"] == "clustered"
    plain = train(experiment(data={"name": PROSE}, **settings))
    tokens = len(prepare(what).corpus.train)
    assert plain.summary["shard_sizes"] == [tokens, tokens]
    assert plain.summary["shards"] == "iid"
    assert plain.summary["parameters_sha256"] != run.summary["parameters_sha256"]


@pytest.mark.parametrize(("start", "shown"), [(30, "30 steps"), ("some.safetensors", "a model")])
def test_the_final_table_shows_shards_and_warm_starts(start: int | str, shown: str) -> None:
    """Only where there is something to show."""
    plain = train(experiment(data={"name": PROSE}, steps=2)).summary

    def text(summary: dict[str, Any]) -> str:
        console = Console(width=80)
        with console.capture() as captured:
            console.print(final_table(summary))
        return captured.get()

    assert "shards" not in text(plain)
    assert "warm start" not in text(plain)
    sizes = {"shards": "clustered", "shard_sizes": [4096, 512, 256, 10_240]}
    table = text({**plain, **sizes, "warm_start": start})
    assert "256  to 10,240 tokens, in 4 clusters" in table
    assert "warm start" in table
    assert shown in table
