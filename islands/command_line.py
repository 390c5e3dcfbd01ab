"""What the commands share besides their options: exit codes, lists of numbers, JSON on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from islands.errors import InputError, RunError


def numbers(field: str, text: str | None, count: bool = False) -> Any:
    """``0.003,0.01`` as a list; a single number alone if it is a ``count``."""
    from islands.settings import parse_yaml

    if text is None:
        return None
    found = parse_yaml(f"[{text}]", field)
    single = count and isinstance(found, list) and len(found) == 1 and "," not in text
    return found[0] if single and isinstance(found, list) else found


def refuse_others(context: typer.Context, mode: str, *read: str) -> None:
    """Refuse options of the command line that ``--mode`` does not read."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and option.name not in (mode, *read):
            raise InputError(f"{mode}: it does not read {option.opts[0]}; leave that out")


def print_json(value: Any) -> None:
    from islands.results.folder import to_json

    print(to_json(value))


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the failures that a user can cause into one message and the exit code for it."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
