"""A run's tables: fixed schemas, written as closed Parquet parts while the run goes on.

A Parquet file without its footer cannot be read, so a part gets its name only when it is closed: a
killed run loses at most the rows since the last part. The types come from the schema and never
from the rows, so a table without rows, or whose first value is missing, has the same columns as any
other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from islands.errors import InputError, nearest
from islands.results import folder as layout

Column: TypeAlias = Sequence[Any] | NDArray[Any]

_int, _float, _text = pa.int64(), pa.float64(), pa.string()

#: The tables under ``tables/``. Units are in the names; worker −1 stands for the shared parameters.
SCHEMAS: dict[str, pa.Schema] = {
    "steps": pa.schema(
        {
            "worker": _int,
            "island": _text,
            "step": _int,
            "loss": _float,
            "lr": _float,
            "start_s": _float,
            "end_s": _float,
        }
    ),
    "syncs": pa.schema(
        {
            "fragment": _int,
            "version": _int,
            "step": _int,
            "worker": _int,
            "payload_bytes": _int,
            "value_bytes": _int,
            "index_bytes": _int,
            "scale_bytes": _int,
            "ready_s": _float,
            "done_s": _float,
            "wait_s": _float,
            "status": _text,
        }
    ),
    "transfers": pa.schema(
        {
            "fragment": _int,
            "version": _int,
            "link": _text,
            "kind": _text,
            "bytes": _int,
            "count": _int,
            "first_start_s": _float,
            "last_delivered_s": _float,
            "queued_s": _float,
        }
    ),
    "evals": pa.schema(
        {"step": _int, "emulated_s": _float, "val_loss": _float, "worker": _int},
    ),
    "similarity": pa.schema(
        {
            "fragment": _int,
            "version": _int,
            "step": _int,
            "worker": _int,
            "other": _int,
            "cosine": _float,
        }
    ),
    "events": pa.schema(
        {"emulated_s": _float, "kind": _text, "subject": _text, "detail": _text},
    ),
}

#: The trace, under ``trace/``: one row per operation, each worker's in its own order. Columns that
#: an operation does not have are null; ``seconds`` are the durations of a compute's steps, or until
#: when an idle lasts; a control's bytes are in ``value_bytes``. ``members`` are a round's, or for
#: fragment −1 the workers that pass step ``version``.
TRACE = pa.schema(
    {
        "worker": _int,
        "op": _text,
        "fragment": _int,
        "version": _int,
        "step": _int,
        "count": _int,
        "value_bytes": _int,
        "index_bytes": _int,
        "scale_bytes": _int,
        "itemsize": _int,
        "seconds": pa.list_(_float),
        "members": pa.list_(_int),
    }
)

_ALL = {**SCHEMAS, "trace": TRACE}
_PARTS = "part-*.parquet"


def _place(folder: Path, name: str) -> Path:
    return folder / layout.TRACE if name == "trace" else folder / layout.TABLES / name


class TableWriter:
    """Appends rows to one new table of a run: a name in ``SCHEMAS``, or ``trace``.

    Rows are kept in memory until ``flush`` (called by itself every ``rows_per_part`` rows) closes
    them into the next part. Raises FileExistsError if the table was begun before.
    """

    def __init__(self, folder: Path, name: str, rows_per_part: int = 100_000) -> None:
        self.schema = _ALL[name]
        self._place = _place(folder, name)
        self._place.mkdir(parents=True)
        self._rows_per_part = rows_per_part
        self._parts = 0
        self._start_part()

    def _start_part(self) -> None:
        self._rows = 0
        self._pieces: dict[str, list[Column]] = {column: [] for column in self.schema.names}

    def append(self, **columns: Column) -> None:
        """Add rows: every column of the schema, all of one length; None is a missing value.

        The sequences are read at the next flush, so the caller gives them away. Raises ValueError
        for other columns than the schema's or unequal lengths.
        """
        if columns.keys() != self._pieces.keys():
            raise ValueError(f"columns {sorted(columns)} are not {sorted(self._pieces)}")
        lengths = {len(values) for values in columns.values()}
        if len(lengths) != 1:
            sizes = {name: len(values) for name, values in columns.items()}
            raise ValueError(f"columns of unequal length: {sizes}")
        for name, values in columns.items():
            self._pieces[name].append(values)
        self._rows += lengths.pop()
        if self._rows >= self._rows_per_part:
            self.flush()

    def flush(self) -> None:
        """Close the rows so far into a part; nothing if there are none."""
        if self._rows:
            self._write_part()

    def _write_part(self) -> None:
        arrays = [_array(self._pieces[field.name], field.type) for field in self.schema]
        part = self._place / f"part-{self._parts:05d}.parquet"
        unfinished = self._place / f".{part.name}.tmp"
        pq.write_table(pa.Table.from_arrays(arrays, schema=self.schema), unfinished)
        os.replace(unfinished, part)
        self._parts += 1
        self._start_part()

    def close(self) -> None:
        """Write what is left; a table that never had a row gets one empty part with its schema."""
        if self._rows or not self._parts:
            self._write_part()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _array(pieces: list[Column], kind: pa.DataType) -> pa.Array:
    """One column from its pieces; arrays are joined by NumPy, anything else value by value."""
    if pieces and all(isinstance(piece, np.ndarray) for piece in pieces):
        return pa.array(np.concatenate(pieces), type=kind)
    return pa.array(list(chain.from_iterable(pieces)), type=kind)


def read_table(folder: Path, name: str) -> pa.Table:
    """All rows of a run's table in the order they were written; also while the run still goes on.

    Raises InputError if there is no such table, no run in the folder, or a part is damaged.
    """
    if name not in _ALL:
        raise InputError(f"table: there is no {name!r}{nearest(name, _ALL)}")
    if not layout.holds_run(folder):
        raise InputError(f"folder: {folder} holds no run (no {layout.EXPERIMENT} or tables)")
    parts = sorted(_place(folder, name).glob(_PARTS))
    return pa.concat_tables([_ALL[name].empty_table(), *(_read_part(part) for part in parts)])


def _read_part(part: Path) -> pa.Table:
    try:
        return pq.ParquetFile(part).read()
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"folder: {part} cannot be read: {str(error).splitlines()[0]}") from error
