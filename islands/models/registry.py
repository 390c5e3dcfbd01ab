"""Model names: their settings, their defaults for data and optimizer, and how they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError
from torch import nn

from islands.errors import InputError, nearest
from islands.models.gpt import GPT, GPTSettings
from islands.models.user import build_user_model


@dataclass(frozen=True)
class ModelDefaults:
    """What a run uses when it does not say otherwise."""

    context: int
    vocab_size: int
    tokenizer: str
    lr: float


@dataclass(frozen=True)
class _Preset:
    settings: Mapping[str, object]
    lr: float


def _chinchilla(layers: int, width: int, heads: int, head_size: int) -> _Preset:
    """A shape of DiLoCo's Table 1 (Douillard et al. 2023, arXiv:2311.08105).

    The table leaves open what we choose as for every preset here: an MLP of four times the width,
    learned positions, layer norms (with gains), no biases.
    """
    return _Preset(
        {
            "layers": layers,
            "width": width,
            "heads": heads,
            "head_size": head_size,
            "context": 1024,
            "vocab_size": 32_000,
            "norm_parameters": True,
        },
        lr=4e-4,
    )


_PRESETS = {
    # 5,376 parameters, every tensor a multiple of 64 elements.
    "decoder": _Preset(
        {
            "layers": 1,
            "heads": 1,
            "width": 16,
            "context": 16,
            "vocab_size": 64,
            "tie": False,
            "activation": "relu",
        },
        lr=1e-2,
    ),
    "gpt": _Preset({}, lr=1e-3),
    # 835,584 parameters.
    "gpt-1m": _Preset(
        {"layers": 4, "heads": 4, "width": 128, "context": 128, "vocab_size": 256}, lr=3e-3
    ),
    # 15,826,944 parameters.
    "gpt-15m": _Preset(
        {"layers": 8, "heads": 6, "width": 384, "context": 256, "vocab_size": 4096}, lr=1e-3
    ),
    # 59,873,408, 150,722,432 and 390,501,888 parameters.
    "chinchilla-60m": _chinchilla(3, 896, 16, 64),
    "chinchilla-150m": _chinchilla(12, 896, 16, 64),
    "chinchilla-400m": _chinchilla(12, 1536, 12, 128),
}

#: Names of the built-in models; any other name must read ``package.module:build``.
MODEL_NAMES = tuple(_PRESETS)

_USER_LR = 1e-3
_USER_CONTEXT = 64
_BYTES = 256


def _preset(name: str) -> _Preset | None:
    """The preset of a built-in name, None for a user's model; anything else is an InputError."""
    if name in _PRESETS:
        return _PRESETS[name]
    if ":" in name:
        return None
    hint = nearest(name, MODEL_NAMES)
    raise InputError(f"model.name: unknown model {name!r}{hint} (or package.module:build)")


def model_settings(name: str, settings: Mapping[str, object]) -> GPTSettings | Mapping[str, object]:
    """The complete settings of a model: the name's own defaults, changed by ``settings``.

    A user model's settings are returned as they are: only its build function knows them.

    Raises:
        InputError: unknown name or key, or a value out of range; names ``model.<key>``.
    """
    preset = _preset(name)
    if preset is None:
        return settings
    for key in settings:
        if key not in GPTSettings.model_fields:
            raise InputError(f"model.{key}: unknown key{nearest(key, GPTSettings.model_fields)}")
    try:
        return GPTSettings.model_validate({**preset.settings, **settings})
    except ValidationError as error:
        raise InputError(_first_of(error)) from None


def _first_of(error: ValidationError) -> str:
    """The first of pydantic's complaints in one line, and how many more there are."""
    problems = error.errors()
    first = problems[0]
    reason = first["msg"].removeprefix("Value error, ")
    if first["loc"]:
        key = first["loc"][0]
        reason = f"{first['input']!r} is wrong: {reason[:1].lower()}{reason[1:]}"
    else:  # a rule about several settings: its message begins with the name of one
        key, _, reason = reason.partition(" ")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"model.{key}: {reason}{more}"


def model_defaults(name: str, settings: Mapping[str, object]) -> ModelDefaults:
    """Context, vocabulary, tokenizer and learning rate that go with a model.

    A user model says its context and vocabulary by having settings of these names, else they are
    64 tokens and bytes.

    Raises:
        InputError: as ``model_settings``.
    """
    preset = _preset(name)
    known = model_settings(name, settings)
    if isinstance(known, GPTSettings):
        context, vocabulary = known.context, known.vocab_size
        tokenizer = "bytes" if vocabulary == _BYTES else "characters"
    else:
        context = _whole(known, "context", _USER_CONTEXT)
        vocabulary = _whole(known, "vocab_size", _BYTES)
        tokenizer = "bytes" if vocabulary >= _BYTES else "characters"
    return ModelDefaults(context, vocabulary, tokenizer, preset.lr if preset else _USER_LR)


def _whole(settings: Mapping[str, object], key: str, default: int) -> int:
    value = settings.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"model.{key}: {value!r} must be a whole number of at least 1")
    return value


def build_model(name: str, settings: Mapping[str, object]) -> nn.Module:
    """A freshly initialised model on torch's default device, drawn from torch's current RNG.

    Raises:
        InputError: as ``model_settings``; a user model that cannot be imported or built.
    """
    known = model_settings(name, settings)
    return GPT(known) if isinstance(known, GPTSettings) else build_user_model(name, known)
