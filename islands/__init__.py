"""islands: train real models on emulated, geographically split clusters.

``islands.run(islands.Experiment(...))`` returns a ``Result`` with ``.summary``, ``.table(name)``
and
``.folder``. The names load on first use, so that reading a cluster file does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from islands.config import Cluster, Experiment
    from islands.errors import InputError, RunError
    from islands.experiment import run
    from islands.results.result import Result

_HOMES = {
    "Cluster": "islands.config",
    "Experiment": "islands.config",
    "InputError": "islands.errors",
    "Result": "islands.results.result",
    "RunError": "islands.errors",
    "run": "islands.experiment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'islands' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = ["Cluster", "Experiment", "InputError", "Result", "RunError", "run"]
