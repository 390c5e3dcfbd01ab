"""The two kinds of failure a user sees. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """The input was wrong: exit code 2, one message with the field, the value and a valid
    choice."""


class TooManyWorkers(InputError):
    """More workers were asked for than the Ray cluster has memory for."""


class RunError(RuntimeError):
    """The run failed after it began: exit code 1; what was recorded so far stays readable."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or the list of choices: the tail of a message about a wrong name."""
    known = sorted(choices)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose from {', '.join(known)}" if known else ""
