"""Text to token ids: real text that every Python carries, or the user's own files."""

from __future__ import annotations

import glob
import hashlib
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from islands.errors import InputError, nearest

_DATASETS = ("python-docs",)
_TOKENIZERS = ("bytes", "characters")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of a text, split by position: the first 90 % train, the last 10 % validate.

    ``train`` and ``val`` are one-dimensional, read-only, of the smallest unsigned type that holds
    ``vocab_size`` ids; ``sha256`` is that of the text's bytes before any decoding, or of the ids
    themselves as little-endian 64-bit integers where they were given (``tokenizer`` is then
    ``tokens``).
    """

    train: NDArray[np.unsignedinteger]
    val: NDArray[np.unsignedinteger]
    vocab_size: int
    tokenizer: str
    sha256: str
    name: str


def load_corpus(
    name: str, tokenizer: str, vocab_size: int, window: int, column: str | None = None
) -> Corpus:
    """Read and tokenize a text, or take the tokens of a Parquet file.

    Args:
        name: ``python-docs`` (the language reference that ships with CPython), a file, or a glob,
            whose files are joined in sorted order; paths are relative to the current folder.
            Files that end in ``.parquet`` are tables.
        tokenizer: ``characters`` (the ``vocab_size − 1`` most frequent ones of the training split
            by falling frequency, ties by code point; the last id stands for every other one) or
            ``bytes`` (an id is the byte).
        vocab_size: number of ids; 256 or more for bytes, 2 or more for characters.
        window: tokens per training window; each split must hold one window and its last target.
        column: of the tables. Text, whose rows are joined by line breaks and read like a text file;
            or whole numbers, or lists of them, which are the tokens themselves: ``tokenizer`` is
            not used, and the corpus is a memory-mapped file.

    Raises:
        InputError: names ``data.<field>``, the value and what would do.
    """
    tables = _parquet_files(name, column)
    if not tables:
        _check(tokenizer, vocab_size)
        raw = _read(name)
    else:
        from islands.data import parquet  # loads pyarrow, which no worker needs

        assert column is not None
        if parquet.holds_tokens(tables, column):
            ids, sha256 = parquet.read_tokens(tables, column, vocab_size)
            return _split(ids, vocab_size, "tokens", sha256, name, window)
        _check(tokenizer, vocab_size)
        raw = parquet.read_text(tables, column)
    text: NDArray[np.unsignedinteger]
    text = np.frombuffer(raw, np.uint8) if tokenizer == "bytes" else _code_points(raw)
    if tokenizer == "characters":
        text = _table(text[: _cut(text)], vocab_size)[text]
    ids = text.astype(np.min_scalar_type(vocab_size - 1), copy=False)
    ids.flags.writeable = False
    sha256 = hashlib.sha256(raw).hexdigest()
    return _split(ids, vocab_size, tokenizer, sha256, name, window)


def _check(tokenizer: str, vocab_size: int) -> None:
    if tokenizer not in _TOKENIZERS:
        hint = nearest(tokenizer, _TOKENIZERS)
        raise InputError(f"data.tokenizer: unknown tokenizer {tokenizer!r}{hint}")
    least = 256 if tokenizer == "bytes" else 2
    if vocab_size < least:
        raise InputError(
            f"data.vocab_size: {vocab_size} is too small; {tokenizer} need at least {least}"
        )


def _cut(ids: NDArray[np.unsignedinteger]) -> int:
    return len(ids) * 9 // 10


def _split(
    ids: NDArray[np.unsignedinteger],
    vocab_size: int,
    tokenizer: str,
    sha256: str,
    name: str,
    window: int,
) -> Corpus:
    cut = _cut(ids)
    shorter = min(cut, len(ids) - cut)
    if shorter < window + 1:
        raise InputError(
            f"data.name: {name!r} is too short: {shorter} {tokenizer} in its smaller split, "
            f"but a window of {window} needs {window + 1}; give more text or a smaller data.window"
        )
    return Corpus(ids[:cut], ids[cut:], vocab_size, tokenizer, sha256, name)


def _code_points(raw: bytes) -> NDArray[np.uint32]:
    """UTF-8 to code points; what is no UTF-8 becomes U+FFFD."""
    return np.frombuffer(raw.decode("utf-8", errors="replace").encode("utf-32-le"), np.uint32)


def _table(train: NDArray[np.unsignedinteger], vocab_size: int) -> NDArray[np.uint32]:
    """Id of every code point: rank by (−frequency, code point), or the last id."""
    points, counts = np.unique(train, return_counts=True)
    ranked = points[np.lexsort((points, -counts))][: vocab_size - 1]
    table = np.full(0x110000, vocab_size - 1, np.uint32)
    table[ranked] = np.arange(len(ranked), dtype=np.uint32)
    return table


def _parquet_files(name: str, column: str | None) -> list[str]:
    """The Parquet files that ``name`` stands for; none if it is text. Raises InputError if files
    and ``column`` do not go together."""
    files = [] if name == "python-docs" else _files(name)
    tables = [path for path in files if path.lower().endswith(".parquet")]
    if column is None and tables:
        from islands.data import parquet

        names = ", ".join(parquet.column_names(tables[0]))
        raise InputError(
            f"data.column: is missing; say which one of {tables[0]!r} holds text or tokens: {names}"
        )
    if column is not None and not tables:
        raise InputError(f"data.column: {column!r} is of no use: {name!r} is no .parquet file")
    if tables and len(tables) < len(files):
        raise InputError(f"data.name: {name!r} matches .parquet files and others; take one kind")
    return tables


def _read(name: str) -> bytes:
    return _python_docs() if name == "python-docs" else b"".join(map(_read_file, _files(name)))


def _files(name: str) -> list[str]:
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        raise InputError(f"data.name: {name!r} is a folder; name its files, as in '{name}/*.txt'")
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        if not found:
            raise InputError(f"data.name: no file matches {name!r}")
        return found
    hint = nearest(name, _DATASETS)
    raise InputError(f"data.name: no file or data set {name!r}{hint} (or a path or glob of text)")


def _python_docs() -> bytes:
    """The topics of Python's own ``help()``: the language reference as text, in order of name."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions strip it
        raise InputError(
            "data.name: 'python-docs' needs pydoc_data, which this Python lacks; name a text file"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"data.name: cannot read {path!r}: {reason.lower()}") from error
