"""A run's folder, tables and summary: fixed shapes, and readable whatever happened to the run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.errors import InputError
from islands.results import SCHEMAS, TRACE, Result, TableWriter, read_table
from islands.results.folder import new_folder, to_json, write_json, write_text

COLUMNS = {
    "steps": "worker island step loss lr start_s end_s",
    "syncs": "fragment version step worker payload_bytes value_bytes index_bytes scale_bytes "
    "ready_s done_s wait_s status",
    "transfers": "fragment version link kind bytes count first_start_s last_delivered_s queued_s",
    "evals": "step emulated_s val_loss worker",
    "similarity": "fragment version step worker other cosine",
    "events": "emulated_s kind subject detail",
}
TEXTS = {"island", "status", "link", "kind", "subject", "detail", "op"}
FLOATS = {"loss", "lr", "val_loss", "cosine"}


def frozen_type(column: str) -> pa.DataType:
    if column in TEXTS:
        return pa.string()
    return pa.float64() if column in FLOATS or column.endswith("_s") else pa.int64()


def evals(rows: int, start: int = 0) -> dict[str, list[float]]:
    steps = range(start, start + rows)
    return {
        "step": list(steps),
        "emulated_s": [step / 10 for step in steps],
        "val_loss": [1 / (1 + step) for step in steps],
        "worker": [-1] * rows,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder in which a run has begun."""
    (tmp_path / "experiment.yaml").write_text("steps: 1\n")
    return tmp_path


# --- tables


def test_schemas_are_frozen() -> None:
    """The tables' columns, their order and their types change only on purpose."""
    assert SCHEMAS.keys() == COLUMNS.keys()
    for name, columns in COLUMNS.items():
        expected = [(column, frozen_type(column)) for column in columns.split()]
        assert [(field.name, field.type) for field in SCHEMAS[name]] == expected
    columns = "worker op fragment version step count value_bytes index_bytes scale_bytes itemsize"
    expected = [(column, frozen_type(column)) for column in columns.split()]
    expected.append(("seconds", pa.list_(pa.float64())))
    expected.append(("members", pa.list_(pa.int64())))
    assert [(field.name, field.type) for field in TRACE] == expected


@given(
    pieces=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=8),
    rows_per_part=st.integers(1, 10),
)
@settings(max_examples=40, deadline=None)
def test_rows_come_back_in_order_however_they_were_cut(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bool]], rows_per_part: int
) -> None:
    """Any cutting into appends, flushes and parts, of lists or arrays, reads back as one table."""
    folder = tmp_path_factory.mktemp("run")
    written = 0
    with TableWriter(folder, "evals", rows_per_part) as writer:
        for rows, as_arrays in pieces:
            columns = evals(rows, written)
            if as_arrays:
                writer.append(**{name: np.asarray(column) for name, column in columns.items()})
                writer.flush()
            else:
                writer.append(**columns)
            written += rows
    assert read_table(folder, "evals").to_pydict() == evals(written)
    assert read_table(folder, "evals").schema == SCHEMAS["evals"]


@pytest.mark.parametrize("name", [*SCHEMAS, "trace"])
def test_an_empty_table_leaves_one_part_with_its_schema(run: Path, name: str) -> None:
    """A table that never had a row is there, with every column."""
    TableWriter(run, name).close()
    place = run / "trace" if name == "trace" else run / "tables" / name
    assert [path.name for path in place.iterdir()] == ["part-00000.parquet"]
    table = read_table(run, name)
    assert (table.num_rows, table.schema) == (0, {**SCHEMAS, "trace": TRACE}[name])


def test_a_part_whose_values_are_all_missing_keeps_the_types(run: Path) -> None:
    """Types come from the schema: a first part of only None joins a later one with numbers."""
    with TableWriter(run, "evals") as writer:
        writer.append(step=[0], emulated_s=[None], val_loss=[None], worker=[-1])
        writer.flush()
        writer.append(step=[1], emulated_s=[0.5], val_loss=[math.nan], worker=[-1])
    table = read_table(run, "evals").to_pydict()
    assert table["emulated_s"] == [None, 0.5]
    assert table["val_loss"][0] is None
    assert math.isnan(table["val_loss"][1])


def test_trace_rows_keep_their_durations(run: Path) -> None:
    """A row of the trace carries a list of floats, bit for bit, or nothing."""
    durations = np.random.default_rng(0).random(5)
    rows = {column: [None, None] for column in TRACE.names}
    rows |= {"worker": [0, 0], "op": ["compute", "end"], "seconds": [durations, None]}
    with TableWriter(run, "trace") as writer:
        writer.append(**rows)
    assert read_table(run, "trace")["seconds"].to_pylist() == [durations.tolist(), None]


def test_a_killed_run_is_readable_up_to_its_last_part(run: Path) -> None:
    """Rows that were flushed survive without a close; an unfinished part is no part."""
    writer = TableWriter(run, "evals")
    writer.append(**evals(3))
    writer.flush()
    writer.append(**evals(2, 3))  # never flushed: the process dies here
    (run / "tables" / "evals" / ".part-00001.parquet.tmp").write_bytes(b"PAR1 cut off")
    assert read_table(run, "evals").to_pydict() == evals(3)
    assert read_table(run, "steps").num_rows == 0  # a table that was not begun yet


def test_the_same_rows_give_the_same_bytes(run: Path) -> None:
    """Nothing of the moment or the process gets into a part."""
    parts = []
    for name in ("a", "b"):
        with TableWriter(run / name, "evals") as writer:
            writer.append(**evals(10))
        parts.append((run / name / "tables" / "evals" / "part-00000.parquet").read_bytes())
    assert parts[0] == parts[1]


def test_wrong_columns_are_refused_at_once(run: Path) -> None:
    """A missing, an extra or a shorter column is a bug that shows where it is made."""
    writer = TableWriter(run, "evals")
    with pytest.raises(ValueError, match="columns"):
        writer.append(step=[1])
    with pytest.raises(ValueError, match="columns"):
        writer.append(**evals(1), extra=[1])
    with pytest.raises(ValueError, match=r"unequal length.*'worker': 1"):
        writer.append(**(evals(2) | {"worker": [0]}))


def test_a_table_is_begun_once(run: Path) -> None:
    """A second writer never writes over the parts of the first."""
    TableWriter(run, "evals").close()
    with pytest.raises(FileExistsError):
        TableWriter(run, "evals")


def test_reading_what_is_not_there_says_so(run: Path, tmp_path: Path) -> None:
    """An unknown table names the nearest; a folder without a run and a damaged part are named."""
    with pytest.raises(InputError, match="did you mean 'syncs'"):
        read_table(run, "sync")
    with pytest.raises(InputError, match="nowhere holds no run"):
        read_table(tmp_path / "nowhere", "syncs")
    TableWriter(run, "syncs").close()
    (run / "tables" / "syncs" / "part-00000.parquet").write_bytes(b"not a table")
    with pytest.raises(InputError, match=r"part-00000\.parquet cannot be read"):
        read_table(run, "syncs")


# --- the folder


def test_fresh_folders_take_the_smallest_free_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --out a run goes to runs/<name>-<n>, and a gap is filled."""
    monkeypatch.chdir(tmp_path)
    first, second, third = (new_folder(None, "diloco", False) for _ in range(3))
    assert [path.name for path in (first, second, third)] == ["diloco-1", "diloco-2", "diloco-3"]
    second.rmdir()
    assert new_folder(None, "diloco", False) == tmp_path / "runs" / "diloco-2"
    assert new_folder(None, "dense", False).name == "dense-1"


def test_a_method_of_the_users_own_names_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs that mean something in a path do not get into the folder's name."""
    monkeypatch.chdir(tmp_path)
    assert new_folder(None, "my_pkg.mod:Method", False).name == "my_pkg.mod-Method-1"
    assert new_folder(None, "../../up", False).parent == tmp_path / "runs"


@pytest.mark.parametrize("content", ["experiment.yaml", "tables/steps/x", "model.safetensors"])
def test_a_run_is_not_overwritten_unasked(tmp_path: Path, content: str) -> None:
    """Whatever a run would replace is refused, naming the folder and --overwrite."""
    (tmp_path / content).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / content).write_text("precious")
    with pytest.raises(InputError, match=r"already holds a run.*--overwrite") as refusal:
        new_folder(tmp_path, "diloco", False)
    assert str(tmp_path) in str(refusal.value)
    assert (tmp_path / content).read_text() == "precious"


def test_overwrite_removes_only_what_a_run_writes(tmp_path: Path) -> None:
    """Notes beside a run stay; its files, also a linked folder, go, and nothing behind the link."""
    elsewhere = tmp_path / "elsewhere"
    out = tmp_path / "out"
    for path in (elsewhere, out, out / "tables" / "steps"):
        path.mkdir(parents=True)
    (elsewhere / "kept").touch()
    (out / "trace").symlink_to(elsewhere)
    for name in ("experiment.yaml", "summary.json", "model.safetensors", "notes.md"):
        (out / name).touch()
    assert new_folder(out, "diloco", True) == out
    assert [path.name for path in out.iterdir()] == ["notes.md"]
    assert (elsewhere / "kept").exists()


def test_an_empty_or_unrelated_folder_is_accepted(tmp_path: Path) -> None:
    """--out may name a folder that exists, or one deep below one that does."""
    (tmp_path / "notes.md").touch()
    assert new_folder(tmp_path, "diloco", False) == tmp_path
    assert new_folder(tmp_path / "a" / "b", "diloco", False).is_dir()


def test_a_place_that_cannot_be_written_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a path through a file, and a folder without permission are the user's mistakes."""
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"out: .*file is a file"):
        new_folder(tmp_path / "file", "diloco", True)
    with pytest.raises(InputError, match="out: cannot write"):
        new_folder(tmp_path / "file" / "below", "diloco", False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        with pytest.raises(InputError, match="permission denied"):
            new_folder(tmp_path, "diloco", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(InputError, match="--out"):
        new_folder(None, "diloco", False)


# --- files and the result


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A file is replaced whole or not at all."""
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert json.loads(path.read_text()) == {"steps": 1}


def test_json_is_strict() -> None:
    """NaN and infinity become null, NumPy's numbers plain ones, and the order of keys is kept."""

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    value = {"z": np.float32(0.5), "a": [math.nan, np.float64(math.inf), 1], "p": Path("x/y")}
    value |= {"n": np.int64(2**40), "t": "é", "b": True}
    text = to_json(value)
    assert list(json.loads(text, parse_constant=no_constant).items()) == [
        ("z", 0.5),
        ("a", [None, None, 1]),
        ("p", "x/y"),
        ("n", 2**40),
        ("t", "é"),
        ("b", True),
    ]


def test_a_result_is_loaded_from_its_folder(run: Path) -> None:
    """The summary, every table and the folder of an earlier run."""
    write_json(run / "summary.json", {"steps": 5})
    with TableWriter(run, "evals") as writer:
        writer.append(**evals(2))
    result = Result.load(str(run))
    assert (result.summary, result.folder) == ({"steps": 5}, run)
    assert result.table("evals").to_pydict() == evals(2)


def test_a_result_that_is_not_whole_says_what_is_missing(run: Path, tmp_path: Path) -> None:
    """No run, a run without a summary, and a broken summary are told apart."""
    with pytest.raises(InputError, match="holds no run"):
        Result.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="did not finish"):
        Result.load(run)
    (run / "summary.json").write_text("{")
    with pytest.raises(InputError, match="cannot read"):
        Result.load(run)
