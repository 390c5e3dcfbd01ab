"""The user's own code by name: ``package.module:attribute``, importable or in the current
folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from islands.errors import InputError, nearest


def load(field: str, name: str) -> object:
    """Import ``package.module`` and return its attribute.

    Raises InputError that begins with ``field`` if the name is malformed, the module or the
    attribute is missing, or anything raises while importing.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise InputError(f"{field}: {name!r} must read package.module:attribute")
    # A console script does not look in the current folder, unlike `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InputError(f"{field}: importing {module_name!r} failed: {one_line(error)}") from error
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise InputError(
            f"{field}: {module_name!r} has no attribute {attribute!r}{nearest(attribute, public)}"
        )
    return getattr(module, attribute)


def look_also_in(paths: Sequence[str]) -> None:
    """Append to the import path: a process on its own finds user code where its driver did."""
    sys.path.extend(path for path in paths if path not in sys.path)


def one_line(error: BaseException) -> str:
    """An exception's type and message without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
