"""What every configured part shares: YAML in and out, overrides by path, messages of one line.

YAML here is YAML 1.2's core schema, so that ``1e-3`` is a number and an island may be called
``no``; a key given twice is an error instead of a silent last-one-wins. A validation failure is
one `InputError` that names the field, the value and the nearest valid choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from islands.errors import InputError, nearest

_Self = TypeVar("_Self", bound="Part")
_LONGEST = 60  # characters of a wrong value that a message repeats


class Part(BaseModel):
    """A frozen piece of configuration: unknown keys are refused, failures are `InputError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers see the fields' own signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise explain(error, type(self)) from None

        # pydantic must go on validating nested parts itself: only it knows where they are.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def parse(cls: type[_Self], values: object, where: str = "") -> _Self:
        """Build from a mapping as read from YAML. ``where`` is the path that messages start with.

        Raises `InputError` with one line for whatever is wrong.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, cls, where) from None

    def dump_yaml(self) -> str:
        """YAML, quantities with their units, that reads back as an equal object."""
        return write_yaml(self.model_dump(mode="json"))


class FieldError(InputError):
    """An `InputError` that knows its field, so that an outer part can put its own path in front."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


# ---------------------------------------------------------------------------------------- messages


def explain(error: ValidationError, model: type[BaseModel], where: str = "") -> FieldError:
    """The first failure as one line, and how many more there are.

    ``model`` is what was validated (for the names that would have been valid), ``where`` its path.
    """
    # A misspelt key is the cause of a missing one, and not the other way round.
    first, *more = sorted(
        error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden"
    )
    location = first["loc"]
    path = ".".join(str(part) for part in ([where] if where else []) + list(location))
    message = _message(first, model)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError) and cause.path:
        message = str(cause).removeprefix(f"{cause.path}: ")
        path = f"{path}.{cause.path}" if path else cause.path
    elif isinstance(cause, InputError) and path and message.startswith((f"{path}.", f"{path}:")):
        path, message = message.split(": ", 1)  # it already says where
    if more:
        message += f" (and {len(more)} more {'problem' if len(more) == 1 else 'problems'})"
    return FieldError(path, " ".join(message.split()))


def _message(error: ErrorDetails, model: type[BaseModel]) -> str:
    kind, ctx, value = error["type"], error.get("ctx", {}), shown(error["input"])
    match kind:
        case "extra_forbidden":
            key = str(error["loc"][-1])
            return f"unknown key {key!r}{nearest(key, _keys_at(model, error['loc'][:-1]))}"
        case "missing":
            return "is missing"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", str(ctx["expected"]))
            hint = nearest(str(error["input"]), choices)
            known = f"{value} is not one of {', '.join(choices)}"
            return known + hint if hint.startswith("; did you mean") else known
        case "greater_than_equal":
            return f"{value} is too small; it must be at least {ctx['ge']:g}"
        case "greater_than":
            return f"{value} is too small; it must be more than {ctx['gt']:g}"
        case "less_than_equal":
            return f"{value} is too large; it must be at most {ctx['le']:g}"
        case "less_than":
            return f"{value} is too large; it must be less than {ctx['lt']:g}"
        case "int_type" | "int_parsing" | "int_from_float":
            return f"{value} is not a whole number"
        case "float_type" | "float_parsing":
            return f"{value} is not a number"
        case "finite_number":
            return f"{value} is not a finite number"
        case "string_type":
            return f"{value} is not text (put it in quotes)"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{value} is not a mapping of settings"
        case "tuple_type" | "list_type":
            return f"{value} is not a list"
        case "value_error":
            return str(ctx["error"])
    return f"{value}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys that are valid at a location inside a model: follows the fields' types."""
    models = [model]
    for part in location:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        if fields:  # else an index, or the name of a union's member
            models = [m for f in fields for m in _models_in(f.annotation)]
    return [field.alias or name for m in models for name, field in m.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def shown(value: object) -> str:
    """A value as a message repeats it: on one line and not too long."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# -------------------------------------------------------------------------------------------- YAML

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$")
_CORE_SCHEMA: tuple[tuple[str, re.Pattern[str], str], ...] = (  # first match decides
    ("null", re.compile(r"(~|null|Null|NULL|)$"), "~nN\0"),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"[-+]?[0-9]{1,4000}$"), "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("merge", re.compile(r"<<$"), "<"),
)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars; a key given twice is an error."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # 010 is ten, not eight


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    odd = any(c in text for c in "\x85\u2028\u2029\ufeff")  # line breaks unless they are escaped
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if odd else None)


for _tag, _pattern, _first in _CORE_SCHEMA:
    _starts = [c for c in _first if c != "\0"] + ([""] if "\0" in _first else [])
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _starts)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _starts)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Dumper.add_representer(str, _text)


def parse_yaml(text: str, source: str) -> object:
    """The one document in ``text``; ``source`` names it in messages. Raises `InputError`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{source}{place}: {_one_line(error.problem or error)}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise InputError(f"{source}: not readable as YAML: {_one_line(error)}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `InputError`, naming the file, if there is none."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, not a YAML file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from None
    values = parse_yaml(text, str(path))
    if values is None:
        raise InputError(f"{path}: is empty; expected settings such as 'steps: 1000'")
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected 'key: value' settings, not {shown(values)}")
    return values


def write_yaml(values: Mapping[str, Any]) -> str:
    """YAML in the order given."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())


# --------------------------------------------------------------------------------------- overrides


def split_override(text: str) -> tuple[list[str], object]:
    """``key.path=value`` as the path's parts and the value as YAML reads it."""
    path, equals, value = text.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise InputError(f"{shown(text)} is not KEY.PATH=VALUE, for example method.sync_every=10")
    if not value.strip():
        raise InputError(f"{path.strip()}: has no value (write null for none)")
    return parts, parse_yaml(value, path.strip())


def override(values: dict[str, Any], parts: list[str], value: object) -> None:
    """Set ``values[a][b][…] = value`` in place; lists go by index or by their items' ``name``.

    Keys that are missing on the way are created: validation refuses those that nothing reads.
    """
    place: Any = values
    for depth, part in enumerate(parts):
        key: Any = part
        here = ".".join(parts[:depth])
        if isinstance(place, list):
            key = _position(place, part, here)
        elif not isinstance(place, dict):
            raise InputError(f"{here}: {shown(place)} has no parts; cannot set {'.'.join(parts)}")
        if depth == len(parts) - 1:
            place[key] = value
        elif isinstance(place, dict):
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        else:
            place = place[key]


def _position(items: list[Any], part: str, here: str) -> int:
    if part.isdecimal():
        if int(part) >= len(items):
            raise InputError(f"{here}: no item {part}; there are {len(items)}, counted from 0")
        return int(part)
    names = [
        str(item["name"]) if isinstance(item, dict) and "name" in item else "" for item in items
    ]
    if part not in names:
        raise InputError(f"{here}: no item named {part!r}{nearest(part, filter(None, names))}")
    return names.index(part)
