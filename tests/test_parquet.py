"""Parquet files as data: text and tokens as if they had come another way, and what is refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import cluster, experiment, train

from islands.data import load_corpus
from islands.errors import InputError

IDS = np.random.default_rng(3).integers(0, 64, 700).tolist()
ROWS = ["to be", "or not", "", "ça va 🙂", "to be"] * 40


def table(folder: Path, name: str = "a.parquet", **columns: Any) -> str:
    path = folder / name
    pq.write_table(pa.table(columns), path, row_group_size=97)
    return str(path)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_a_text_column_is_a_text_file(tmp_path: Path, tokenizer: str, kind: pa.DataType) -> None:
    """Rows joined by line breaks, whatever the tokenizer; missing rows are left out."""
    path = table(tmp_path, text=pa.array([*ROWS, None], kind), other=[0] * 201)
    (tmp_path / "a.txt").write_text("\n".join(ROWS), encoding="utf-8")
    plain = load_corpus(str(tmp_path / "a.txt"), tokenizer, 256, 16)
    corpus = load_corpus(path, tokenizer, 256, 16, "text")
    assert corpus.train.tolist() == plain.train.tolist()
    assert corpus.val.tolist() == plain.val.tolist()
    assert (corpus.sha256, corpus.tokenizer) == (plain.sha256, plain.tokenizer)


def test_dictionary_columns_are_their_values(tmp_path: Path) -> None:
    """How a column is stored does not matter: categories are text."""
    path = table(tmp_path, text=pa.array(ROWS).dictionary_encode())
    assert load_corpus(path, "bytes", 256, 16, "text").sha256 == (
        hashlib.sha256("\n".join(ROWS).encode()).hexdigest()
    )


@pytest.mark.parametrize(
    "column",
    [
        pa.array(IDS, pa.int64()),
        pa.array([*IDS, None], pa.int32()),
        pa.array(IDS, pa.uint8()),
        pa.array([IDS[:500], [], None, IDS[500:]], pa.list_(pa.int32())),
        pa.array([IDS[:350], IDS[350:]], pa.list_(pa.int64(), 350)),
        pa.array([IDS[n : n + 7] for n in range(0, 700, 7)], pa.large_list(pa.uint16())),
    ],
    ids=str,
)
def test_a_token_column_is_taken_as_it_is(tmp_path: Path, column: pa.Array) -> None:
    """Whole numbers and lists of them, of any type, one after the other; split nine to one."""
    corpus = load_corpus(table(tmp_path, ids=column), "characters", 64, 16, "ids")
    assert [*corpus.train.tolist(), *corpus.val.tolist()] == IDS
    assert len(corpus.train) == 630
    assert corpus.train.dtype == np.uint8
    assert corpus.sha256 == hashlib.sha256(np.array(IDS, "<i8").tobytes()).hexdigest()
    assert corpus.tokenizer == "tokens"


def test_tokens_are_mapped_and_read_only(tmp_path: Path) -> None:
    """The corpus is a file in memory's address space, not memory, and nobody can write to it."""
    path = table(tmp_path, ids=[id + 1000 for id in IDS])
    corpus = load_corpus(path, "characters", 4096, 16, "ids")
    assert corpus.train.dtype == np.uint16
    assert not corpus.train.flags.writeable
    base: Any = corpus.train
    while base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert list(tmp_path.iterdir()) == [Path(path)]


def test_a_glob_of_tables_is_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files by name, as with text, also when they store the tokens in different types."""
    table(tmp_path, "b.parquet", ids=pa.array(IDS[300:], pa.int16()))
    table(tmp_path, "a.parquet", ids=pa.array([IDS[:300]]))
    monkeypatch.chdir(tmp_path)
    corpus = load_corpus("*.parquet", "bytes", 256, 16, "ids")
    assert [*corpus.train.tolist(), *corpus.val.tolist()] == IDS


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"column": None}, ["data.column: is missing", "a.parquet", "text, ids, number"]),
        ({"column": "txet"}, ["data.column", "'txet'", "'text'"]),
        ({"column": "number"}, ["data.column", "'number'", "double", "text, whole numbers"]),
        ({"column": "nested"}, ["data.column", "'nested'", "list"]),
        ({"column": "ids", "vocab_size": 40}, ["data.column", "'ids'", "63", "40", "vocab_size"]),
        ({"column": "negative"}, ["data.column", "'negative'", "-1"]),
        ({"name": "bad.parquet"}, ["data.name", "bad.parquet", "Parquet"]),
        ({"name": "*t*"}, ["data.name", "'*t*'", "one kind"]),
        ({"name": "plain.txt"}, ["data.column", "'text'", "plain.txt", ".parquet"]),
        ({"name": "python-docs"}, ["data.column", "python-docs"]),
        ({"name": "none.parquet"}, ["data.name", "none.parquet"]),
        ({"name": "[az].parquet", "column": "ids"}, ["data.column", "tokens", "text"]),
        ({"window": 500}, ["data.name", "too short", "500"]),
    ],
)
def test_wrong_tables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], parts: list[str]
) -> None:
    """One line that names the field, the value and what would do."""
    monkeypatch.chdir(tmp_path)
    columns = {
        "text": ["word"] * 700,
        "ids": [63, *IDS[1:]],
        "number": [0.5] * 700,
        "nested": [[["x"]]] * 700,
        "negative": [-1] * 700,
    }
    table(tmp_path, **columns)
    table(tmp_path, "z.parquet", ids=["text"])
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no table PAR1")
    (tmp_path / "plain.txt").write_text("text")
    given = {"name": "a.parquet", "tokenizer": "bytes", "vocab_size": 256, "window": 4}
    with pytest.raises(InputError) as error:
        load_corpus(**{**given, "column": "text", **change})
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_trains_on_tokens(tmp_path: Path) -> None:
    """``data.name`` and ``data.column`` are all that it takes; the written experiment repeats
    it."""
    data = {"name": table(tmp_path, ids=IDS), "column": "ids"}
    what = experiment(data=data, cluster=cluster((1, 1)), steps=3)
    run = train(what)
    assert run.summary["corpus_sha256"] == hashlib.sha256(np.array(IDS, "<i8")).hexdigest()
    again = train(type(what).parse(what.resolved().model_dump(mode="json")))
    assert again.summary["parameters_sha256"] == run.summary["parameters_sha256"]


def test_reading_text_does_not_load_pyarrow() -> None:
    """Every worker imports the data's code; pyarrow would be memory in each of them."""
    code = (
        "import sys; from islands.data import load_corpus;"
        "load_corpus('python-docs', 'bytes', 256, 4); import islands.replica;"
        "assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
