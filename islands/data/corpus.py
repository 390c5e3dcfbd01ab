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
    ``vocab_size`` ids; ``sha256`` is that of the text's bytes before any decoding.
    """

    train: NDArray[np.unsignedinteger]
    val: NDArray[np.unsignedinteger]
    vocab_size: int
    tokenizer: str
    sha256: str
    name: str


def load_corpus(name: str, tokenizer: str, vocab_size: int, window: int) -> Corpus:
    """Read and tokenize a text.

    Args:
        name: ``python-docs`` (the language reference that ships with CPython), a file, or a glob,
            whose files are joined in sorted order; paths are relative to the current folder.
        tokenizer: ``characters`` (the ``vocab_size − 1`` most frequent ones of the training split
            by falling frequency, ties by code point; the last id stands for every other one) or
            ``bytes`` (an id is the byte).
        vocab_size: number of ids; 256 or more for bytes, 2 or more for characters.
        window: tokens per training window; each split must hold one window and its last target.

    Raises:
        InputError: names ``data.<field>``, the value and what would do.
    """
    if tokenizer not in _TOKENIZERS:
        hint = nearest(tokenizer, _TOKENIZERS)
        raise InputError(f"data.tokenizer: unknown tokenizer {tokenizer!r}{hint}")
    least = 256 if tokenizer == "bytes" else 2
    if vocab_size < least:
        raise InputError(
            f"data.vocab_size: {vocab_size} is too small; {tokenizer} need at least {least}"
        )
    raw = _read(name)
    text: NDArray[np.unsignedinteger]
    text = np.frombuffer(raw, np.uint8) if tokenizer == "bytes" else _code_points(raw)
    cut = len(text) * 9 // 10
    shorter = min(cut, len(text) - cut)
    if shorter < window + 1:
        raise InputError(
            f"data.name: {name!r} is too short: {shorter} {tokenizer} in its smaller split, "
            f"but a window of {window} needs {window + 1}; give more text or a smaller data.window"
        )
    if tokenizer == "characters":
        text = _table(text[:cut], vocab_size)[text]
    ids = text.astype(np.min_scalar_type(vocab_size - 1), copy=False)
    ids.flags.writeable = False
    return Corpus(
        train=ids[:cut],
        val=ids[cut:],
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        sha256=hashlib.sha256(raw).hexdigest(),
        name=name,
    )


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


def _read(name: str) -> bytes:
    if name == "python-docs":
        return _python_docs()
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        raise InputError(f"data.name: {name!r} is a folder; name its files, as in '{name}/*.txt'")
    if os.path.exists(path):
        return _read_file(path)
    if glob.has_magic(path):
        found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
        if not found:
            raise InputError(f"data.name: no file matches {name!r}")
        return b"".join(map(_read_file, found))
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
