"""The methods by name. A user's own is named ``package.module:Class``."""

from __future__ import annotations

from islands.errors import InputError, nearest
from islands.methods.base import (
    Arrival,
    Context,
    Method,
    Shared,
    WorkerState,
    mean_of,
)
from islands.methods.dense import Dense
from islands.methods.diloco import DiLoCo
from islands.methods.local_sgd import LocalSGD
from islands.plugins import load

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "diloco": DiLoCo,
    "local_sgd": LocalSGD,
}


def method_class(name: str) -> type[Method]:
    """The class of a method's name. Raises InputError with the nearest name, or what failed to
    import."""
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise InputError(f"method: unknown method {name!r}{nearest(name, METHODS)}")
    found = load("method", name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise InputError(f"method: {name!r} is not a subclass of islands.methods.Method")
    return found


__all__ = [
    "METHODS",
    "Arrival",
    "Context",
    "Dense",
    "DiLoCo",
    "LocalSGD",
    "Method",
    "Shared",
    "WorkerState",
    "mean_of",
    "method_class",
]
