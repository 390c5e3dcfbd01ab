"""The methods by name. A user's own is named ``package.module:Class``."""

from __future__ import annotations

from islands.errors import InputError, nearest
from islands.methods.base import (
    Arrival,
    Context,
    Method,
    Shared,
    WorkerState,
    clip_gradient,
    dense_update,
    mean_of,
    step_along,
)
from islands.methods.co2 import CO2
from islands.methods.delayed import Delayed
from islands.methods.demo import DeMo
from islands.methods.dense import Dense
from islands.methods.diloco import DiLoCo
from islands.methods.eager import EagerDiLoCo
from islands.methods.local_sgd import LocalSGD
from islands.methods.signsgd import SignSGD
from islands.methods.slowmo import SlowMo
from islands.methods.sparta import Sparta
from islands.methods.streaming import StreamingDiLoCo
from islands.methods.topk import TopK
from islands.plugins import load

METHODS: dict[str, type[Method]] = {
    "co2": CO2,
    "delayed": Delayed,
    "demo": DeMo,
    "dense": Dense,
    "diloco": DiLoCo,
    "eager_diloco": EagerDiLoCo,
    "local_sgd": LocalSGD,
    "signsgd": SignSGD,
    "slowmo": SlowMo,
    "sparta": Sparta,
    "streaming_diloco": StreamingDiLoCo,
    "topk": TopK,
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
    "CO2",
    "METHODS",
    "Arrival",
    "Context",
    "DeMo",
    "Delayed",
    "Dense",
    "DiLoCo",
    "EagerDiLoCo",
    "LocalSGD",
    "Method",
    "Shared",
    "SignSGD",
    "SlowMo",
    "Sparta",
    "StreamingDiLoCo",
    "TopK",
    "WorkerState",
    "clip_gradient",
    "dense_update",
    "mean_of",
    "method_class",
    "step_along",
]
