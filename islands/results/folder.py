"""A run's folder: chosen once, never shared by two runs, and never showing half a file.

Every file gets its final name only when it is whole (write beside it, then rename), because a run
may be killed at any moment and must leave readable results behind.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from islands.errors import InputError

EXPERIMENT = "experiment.yaml"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
TABLES = "tables"
TRACE = "trace"

#: Everything that a run puts into its folder, and all that ``--overwrite`` removes.
WRITTEN = (EXPERIMENT, SUMMARY, TRACE, TABLES, MODEL)


def holds_run(folder: Path) -> bool:
    """Whether a run has written (or begun to write) its results here."""
    return (folder / EXPERIMENT).exists() or (folder / TABLES).is_dir()


def refuse_used(out: Path | None, overwrite: bool) -> None:
    """Raise the InputError that :func:`new_folder` would, before anything has cost time."""
    if out is None:
        return
    folder = out.absolute()
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"out: {out} is a file; name a folder")
    present = _present(folder)
    if present and not overwrite:
        raise InputError(
            f"out: {out} already holds a run ({present[0].name}); "
            "give another folder, or --overwrite to replace it"
        )


def _present(folder: Path) -> list[Path]:
    return [folder / name for name in WRITTEN if os.path.lexists(folder / name)]


def new_folder(out: Path | None, name: str, overwrite: bool) -> Path:
    """Make the folder of a new run and return its absolute path.

    Without ``out`` it is ``runs/<name>-<n>`` under the current folder with the smallest free n
    from 1; two runs that start together get different ones. ``out`` may exist and hold other files.
    If it holds anything that a run would write it is refused, or with ``overwrite`` cleared of just
    that.

    Raises InputError when ``out`` is a file, holds a run, or cannot be written.
    """
    if out is None:
        return _next_free(Path("runs").absolute(), plain(name))
    refuse_used(out, overwrite)
    folder = out.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in _present(folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise InputError(f"out: cannot write to {out}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"out: cannot write to {out}: permission denied")
    return folder


def _next_free(runs: Path, name: str) -> Path:
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for n in count(1):
            folder = runs / f"{name}-{n}"
            try:
                folder.mkdir()  # exclusive: of two runs that ask together only one gets this n
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise InputError(
            f"out: cannot make a folder in {runs}: {error.strerror}; name another with --out"
        ) from error
    raise AssertionError("the loop over n has no end")


def plain(name: str) -> str:
    """The name as one path component: ``package.module:Method`` is ``package.module-Method``."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole or not at all; see ``to_json`` for what becomes of NaN."""
    write_text(path, to_json(value) + "\n")


def to_json(value: object) -> str:
    """Strict JSON, keys in their own order.

    JSON has no NaN or infinity, and many readers stop at one: such a number (the loss of a run that
    diverged) is written as null. NumPy scalars become plain numbers, paths text.
    """
    return json.dumps(_strict(value), indent=2, ensure_ascii=False, allow_nan=False)


def _strict(value: object) -> object:
    if hasattr(value, "dtype") and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, Path) else value
