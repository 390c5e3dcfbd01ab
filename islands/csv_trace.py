"""Traces in CSV files: a header, then one line per moment from which a value holds.

``time,value`` with a unit in every cell (``10 s,500 Mbit/s``), or units once in the header:
``time [s],bandwidth [Mbit/s]`` above bare numbers.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from islands.errors import nearest
from islands.settings import FieldError, shown

_HEADER = re.compile(r"(.*?)\s*(?:\[\s*([^\]]+?)\s*\])?", re.DOTALL)
#: Every one of them is written into the resolved experiment and read from there again: seconds.
_MOST_ROWS = 10_000


def read_trace(file: object, column: str) -> list[tuple[str, str]]:
    """The rows as (time, value), each a text with its unit.

    ``column`` is what the values may be called besides ``value``: ``bandwidth`` or ``delay``.
    Raises a FieldError, naming the file and the line, for anything but such a table.
    """
    if not isinstance(file, str | Path):
        raise FieldError("file", f"{shown(file)} is not the path of a CSV file")
    path = Path(file).expanduser()
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise FieldError("file", f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise FieldError("file", f"{path}: not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FieldError("file", f"{path}: cannot be read: {reason}") from None
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise FieldError("file", f"{path}, line {reader.line_num}: {error}") from None
    if len(lines) < 2:
        raise FieldError("file", f"{path}: has no values; expected a header 'time,value' and rows")
    if len(lines) > _MOST_ROWS + 1:
        raise FieldError(
            "file",
            f"{path}: has {len(lines) - 1:,} rows, more than {_MOST_ROWS:,}; keep every n-th",
        )
    (_, header), *rows = lines
    order, units = _columns(header, column, path)
    found = []
    for number, row in rows:
        if len(row) != len(header):
            raise FieldError(
                "file", f"{path}, line {number}: {len(row)} cells under a header of {len(header)}"
            )
        time, value = (f"{row[place].strip()} {units[place]}".strip() for place in order)
        found.append((time, value))
    return found


def _columns(header: list[str], column: str, path: Path) -> tuple[tuple[int, int], list[str]]:
    """Where the times and the values are, and the unit of each column ('' for none)."""
    names, units = [], []
    for cell in header:
        match = _HEADER.fullmatch(cell.strip())
        assert match is not None  # it matches any text
        names.append(match.group(1))
        units.append(match.group(2) or "")
    known = ["time", "value", column]
    for name in names:
        if name not in known:
            raise FieldError("file", f"{path}: unknown column {name!r}{nearest(name, known)}")
    values = [n for n, name in enumerate(names) if name != "time"]
    if names.count("time") != 1 or len(values) != 1:
        raise FieldError(
            "file",
            f"{path}: a trace has the columns 'time' and '{column}', not {shown(header)}",
        )
    return (names.index("time"), values[0]), units
