"""Data: tokenizers against a restatement, splits, shards, and batches without history."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.data import Batches, Shard, load_corpus, split, validation_windows
from islands.errors import InputError


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_python_docs_is_real_text_split_nine_to_one() -> None:
    """The default corpus: the help topics in order of name, hashed as they are."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    corpus = load_corpus("python-docs", "characters", 64, 16)
    assert len(corpus.train) == len(text) * 9 // 10
    assert len(corpus.train) + len(corpus.val) == len(text)
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert (corpus.vocab_size, corpus.tokenizer, corpus.name) == (64, "characters", "python-docs")
    assert corpus.train.max() == 63
    assert corpus.train.dtype == np.uint8


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(st.sampled_from("aabcdeéß漢🙂\n \r"), min_size=40, max_size=120),
    vocab_size=st.integers(2, 16),
)
def test_characters_are_ranked_by_the_training_split(
    text: str, vocab_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Id = rank by (−count in the training split, code point); every other one is the last id."""
    path = write(tmp_path_factory.mktemp("text"), "a.txt", text)
    corpus = load_corpus(path, "characters", vocab_size, 1)
    cut = len(text) * 9 // 10
    counts = Counter(text[:cut])
    ranked = sorted(counts, key=lambda c: (-counts[c], ord(c)))[: vocab_size - 1]
    expected = [ranked.index(c) if c in ranked else vocab_size - 1 for c in text]
    assert [*corpus.train.tolist(), *corpus.val.tolist()] == expected


def test_bytes_are_their_own_ids(tmp_path: Path) -> None:
    """All 256 bytes survive, whether or not they are UTF-8."""
    raw = bytes(range(256)) * 2
    corpus = load_corpus(write(tmp_path, "a.bin", raw), "bytes", 256, 4)
    assert bytes([*corpus.train, *corpus.val]) == raw
    assert corpus.train.dtype == np.uint8
    assert load_corpus(str(tmp_path / "a.bin"), "bytes", 4096, 4).train.dtype == np.uint16


def test_undecodable_bytes_count_as_replacement_characters(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are text all the same: each is one U+FFFD."""
    corpus = load_corpus(write(tmp_path, "a.txt", b"a\xff" * 50), "characters", 3, 4)
    assert len(corpus.train) + len(corpus.val) == 100
    assert corpus.train[:4].tolist() == [0, 1, 0, 1]


def test_glob_joins_files_in_sorted_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A glob, relative to the current folder, reads files by name, not by age; folders are left."""
    write(tmp_path, "b.txt", "b" * 50)
    write(tmp_path, "a.txt", "a" * 50)
    (tmp_path / "c.txt").mkdir()
    monkeypatch.chdir(tmp_path)
    corpus = load_corpus("*.txt", "bytes", 256, 4)
    assert bytes([*corpus.train, *corpus.val]) == b"a" * 50 + b"b" * 50
    assert corpus.sha256 == hashlib.sha256(b"a" * 50 + b"b" * 50).hexdigest()


def test_corpus_is_read_only() -> None:
    """Nobody can change the text that others train on."""
    corpus = load_corpus("python-docs", "bytes", 256, 16)
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"name": "python-doc"}, ["data.name", "'python-doc'", "'python-docs'"]),
        ({"name": "x" * 5000}, ["data.name", "no file or data set"]),
        ({"name": "~nobody/a.txt"}, ["data.name", "'~nobody/a.txt'"]),
        ({"name": "missing.txt"}, ["data.name", "'missing.txt'"]),
        ({"name": "missing/*.txt"}, ["data.name", "no file matches", "'missing/*.txt'"]),
        ({"name": "folder"}, ["data.name", "is a folder", "folder/*.txt"]),
        ({"name": "short.txt"}, ["data.name", "too short", "10 characters", "needs 17"]),
        ({"name": "empty.txt"}, ["data.name", "too short"]),
        ({"tokenizer": "byte"}, ["data.tokenizer", "'byte'", "'bytes'"]),
        ({"tokenizer": "bytes"}, ["data.vocab_size", "64", "256"]),
        ({"vocab_size": 1}, ["data.vocab_size", "1", "2"]),
    ],
)
def test_wrong_data_is_refused_in_one_line(
    change: dict[str, Any], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the field, the value and what would do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path, "short.txt", "x" * 100)
    write(tmp_path, "empty.txt", "")
    given = {"name": "python-docs", "tokenizer": "characters", "vocab_size": 64, "window": 16}
    with pytest.raises(InputError) as error:
        load_corpus(**{**given, **change})
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the system will not open names the file and the reason."""
    path = write(tmp_path, "a.txt", "x" * 100)

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=r"a\.txt.*permission denied"):
        load_corpus(path, "bytes", 256, 4)


def test_a_python_without_its_docs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that was stripped of pydoc_data says so, and what to do."""
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match=r"python-docs.*pydoc_data.*text file"):
        load_corpus("python-docs", "bytes", 256, 4)


def shard(tokens: np.ndarray[Any, Any], worker: int = 0, **change: Any) -> Shard:
    """One of four workers' shards, for windows of 5 tokens."""
    given = {"workers": 4, "window": 5, "seed": 0}
    return split(tokens, change.pop("shards", "iid"), **{**given, **change})[worker]


def batches(
    tokens: np.ndarray[Any, Any], worker: int = 0, shards: str = "iid", **change: Any
) -> Batches:
    given = {"batch": 3, "seed": 0}
    place = shard(tokens, worker, shards=shards)
    return Batches(tokens, place, worker=worker, **{**given, **change})


POSITIONS = np.arange(1000, dtype=np.uint16)


@settings(max_examples=50, deadline=None)
@given(
    order=st.lists(st.integers(0, 2000), min_size=1, max_size=8),
    worker=st.integers(0, 3),
    seed=st.integers(0, 5),
    shards=st.sampled_from(["iid", "contiguous"]),
)
def test_a_batch_does_not_depend_on_earlier_ones(
    order: list[int], worker: int, seed: int, shards: str
) -> None:
    """draw(index) is the same in any order and from a fresh object."""
    used = batches(POSITIONS, worker=worker, seed=seed, shards=shards)
    for index in order:
        fresh = batches(POSITIONS, worker=worker, seed=seed, shards=shards)
        drawn = used.draw(index)
        assert drawn.dtype == np.int64
        assert drawn.shape == (3, 6)
        assert np.array_equal(drawn, fresh.draw(index))


def test_workers_seeds_and_indices_see_different_text() -> None:
    """Each of (seed, worker, index) changes the batch; seed 0 is a seed."""
    first = batches(POSITIONS).draw(0)
    others = [
        batches(POSITIONS).draw(1),
        batches(POSITIONS).draw(256),
        batches(POSITIONS, worker=1).draw(0),
        batches(POSITIONS, seed=1).draw(0),
    ]
    assert not any(np.array_equal(first, other) for other in others)


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(24, 60), worker=st.integers(0, 3), shards=st.sampled_from(["iid", "contiguous"])
)
def test_windows_cover_exactly_the_shard(n: int, worker: int, shards: str) -> None:
    """Windows are runs of neighbours, and all starts of the shard occur, and no others."""
    drawn = batches(np.arange(n, dtype=np.uint8), worker=worker, shards=shards, batch=400).draw(0)
    assert np.array_equal(drawn, drawn[:, :1] + np.arange(6))
    low, high = (worker * n // 4, (worker + 1) * n // 4) if shards == "contiguous" else (0, n)
    assert set(drawn[:, 0].tolist()) == set(range(low, high - 5))
    found = shard(POSITIONS[:n], worker, shards=shards)
    assert (found.size, found.tokens) == (high - low - 5, high - low)


def test_batches_look_at_shared_read_only_tokens() -> None:
    """The tokens are neither copied nor changed; what is drawn is the caller's own."""
    tokens = POSITIONS.copy()
    tokens.flags.writeable = False
    drawn = batches(tokens).draw(0)
    drawn[:] = 0
    assert np.array_equal(tokens, POSITIONS)
    assert not np.shares_memory(drawn, tokens)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"shards": "iidd"}, ["data.shards", "'iidd'", "'iid'"]),
        ({"shards": "contiguous", "workers": 250}, ["data.shards", "4 tokens", "needs 6"]),
        ({"window": 1000}, ["data.shards", "1000 tokens", "needs 1001"]),
    ],
)
def test_wrong_shards_are_refused(change: dict[str, Any], parts: list[str]) -> None:
    """An unknown kind, and a shard in which no window fits."""
    with pytest.raises(InputError) as error:
        shard(POSITIONS, **change)
    assert all(part in str(error.value) for part in parts), str(error.value)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 200), window=st.integers(1, 20), count=st.integers(0, 30))
def test_validation_windows_are_spread_and_never_share_a_target(
    n: int, window: int, count: int
) -> None:
    """As many as asked or as fit; from the first to the last token; no target twice."""
    windows = validation_windows(np.arange(n, dtype=np.uint8), window, count)
    assert windows.dtype == np.int64
    assert windows.shape == (min(count, max(n - 1, 0) // window), window + 1)
    targets = windows[:, 1:].ravel().tolist()
    assert len(targets) == len(set(targets))
    if len(windows):
        assert windows[0, 0] == 0
    if len(windows) > 1:
        assert windows[-1, -1] == n - 1
        assert np.ptp(np.diff(windows[:, 0])) <= 1
