"""Models that the user brings: `package.module:build`, importable or beside the current folder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from islands.errors import InputError
from islands.plugins import load, one_line


def build_user_model(name: str, settings: Mapping[str, object]) -> nn.Module:
    """Import ``package.module`` and call its ``build`` with the settings as keyword arguments.

    Raises:
        InputError: the name is malformed, the module or attribute is missing, anything raises while
            importing or building, or what comes back is no ``nn.Module``.
    """
    build = load("model.name", name)
    if not callable(build):
        raise InputError(f"model.name: {name} is not a function")
    try:
        model = build(**settings)
    except (Exception, SystemExit) as error:
        raise InputError(f"model.name: {name} failed to build: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise InputError(f"model.name: {name} must return a torch.nn.Module, but returned {got}")
    return model
