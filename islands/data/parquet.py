"""Parquet files as training data: a column of text, or of token ids.

Only this module reads Parquet in, and only a run that names such a file imports it. Token ids are
decoded batch by batch into a temporary file that is mapped into memory, so a corpus may be larger
than that; the file has no name and is gone with the process.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from islands.errors import InputError, nearest

#: Rows that are decoded together: a row may be a whole document.
_ROWS = 4096


def holds_tokens(paths: Sequence[str], column: str) -> bool:
    """Whether the column holds token ids; False if it holds text.

    Raises:
        InputError: a file that cannot be read, lacks the column, holds something else in it, or
            another kind than the first file.
    """
    kinds = [_kind(path, column) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise InputError(
                f"data.column: {column!r} is {kinds[0]} in {paths[0]!r} but {kind} in {path!r}"
            )
    return kinds[0] == "tokens"


def read_text(paths: Sequence[str], column: str) -> bytes:
    """All rows of a text column joined by line breaks, in the order of the files; UTF-8. Missing
    values are left out."""
    rows = (row for part in _parts(paths, column) for row in part.to_pylist() if row is not None)
    return "\n".join(rows).encode()


def read_tokens(
    paths: Sequence[str], column: str, vocab_size: int
) -> tuple[NDArray[np.unsignedinteger], str]:
    """All token ids of a column in order, (n,), and their SHA-256 as little-endian int64.

    The array is a read-only view of a mapped file, of the smallest type that holds ``vocab_size``
    ids. Missing values and rows are left out.

    Raises:
        InputError: an id that the vocabulary does not have.
    """
    dtype = np.min_scalar_type(vocab_size - 1)
    digest, count = hashlib.sha256(), 0
    with tempfile.TemporaryFile() as file:
        for part in _parts(paths, column):
            while _is_list(part.type):
                part = part.flatten()
            part = part.drop_null()
            _in_vocabulary(part, column, vocab_size)
            ids = part.cast(pa.int64()).to_numpy(zero_copy_only=False)
            digest.update(ids.astype("<i8", copy=False))
            file.write(ids.astype(dtype))
            count += len(ids)
        file.flush()
        mapped = np.memmap(file, dtype, "r", shape=count) if count else np.empty(0, dtype)
    return np.asarray(mapped), digest.hexdigest()


def _in_vocabulary(ids: pa.Array, column: str, vocab_size: int) -> None:
    bounds = pc.min_max(ids).as_py()
    for value in (bounds["min"], bounds["max"]):
        if value is not None and not 0 <= value < vocab_size:
            raise InputError(
                f"data.column: {column!r} holds the token {value}, but the model's vocabulary has "
                f"{vocab_size} (0 to {vocab_size - 1}); set data.vocab_size or take another model"
            )


def column_names(path: str) -> list[str]:
    """The columns of a file. Raises InputError if it cannot be read."""
    return list(_schema(path).names)


def _schema(path: str) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"data.name: cannot read {path!r} as Parquet: {reason}") from None


def _kind(path: str, column: str) -> str:
    """``text`` or ``tokens``."""
    schema = _schema(path)
    if column not in schema.names:
        raise InputError(
            f"data.column: {path!r} has no column {column!r}{nearest(column, schema.names)}"
        )
    found = _plain(schema.field(column).type)
    if pa.types.is_string(found) or pa.types.is_large_string(found):
        return "text"
    if pa.types.is_integer(found.value_type if _is_list(found) else found):
        return "tokens"
    raise InputError(
        f"data.column: {column!r} of {path!r} holds {found}; "
        "it must hold text, whole numbers or lists of them"
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _parts(paths: Sequence[str], column: str) -> Iterator[pa.Array]:
    """The column piece by piece, dictionaries resolved."""
    for path in paths:
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                for batch in file.iter_batches(_ROWS, columns=[column]):
                    part = batch.column(batch.schema.names.index(column))
                    yield part.cast(_plain(part.type))
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"data.name: cannot read {path!r} as Parquet: {reason}") from None
