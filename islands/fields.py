"""Types of the fields that clusters and experiments are made of.

Quantities are read from text with a unit, held in base units, and written with their unit again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from islands.errors import InputError
from islands.settings import FieldError, shown
from islands.units import (
    Price,
    format_bandwidth,
    format_flops,
    format_price,
    format_size,
    format_time,
    parse_bandwidth,
    parse_flops,
    parse_price,
    parse_size,
    parse_time,
)


def _name(text: str) -> str:
    if not text or not all(c.isalnum() or c in "_-" for c in text):
        raise InputError(f"{shown(text)} is not a name; use letters, digits, '_' and '-'")
    return text


def _more_than_zero(quantity: float, text: str) -> float:
    if not quantity:
        raise InputError(f"{text!r} is too small; it must be more than zero")
    return quantity


Name = Annotated[str, AfterValidator(_name)]
Count = Annotated[int, Field(strict=True, ge=1)]
Index = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Scale = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Bandwidth = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(parse_bandwidth),
    PlainSerializer(format_bandwidth),
]
Time = Annotated[float, BeforeValidator(parse_time), PlainSerializer(format_time)]
#: Written instead of a time that is measured before the run.
MEASURED = "measured"


def _step_time(value: object) -> float | str:
    if value == MEASURED:
        return MEASURED
    try:
        return parse_time(value)
    except InputError as error:
        raise InputError(f"{error}; or {MEASURED}") from None


StepTime = Annotated[
    float | Literal["measured"],
    BeforeValidator(_step_time),
    PlainSerializer(lambda value: value if value == MEASURED else format_time(value)),
]
#: A time of more than zero.
Duration = Annotated[Time, AfterValidator(lambda s: _more_than_zero(s, "0 s"))]
#: A whole number of bytes, at least one.
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    AfterValidator(lambda size: int(_more_than_zero(size, "0 B"))),
    PlainSerializer(format_size),
]
FlopRate = Annotated[float, BeforeValidator(parse_flops), PlainSerializer(format_flops)]
PerByte = Annotated[Price, BeforeValidator(parse_price), PlainSerializer(format_price)]


def distinct(field: str, names: Sequence[str]) -> None:
    """Raise a FieldError if a name in the list ``field`` is taken twice."""
    for n, name in enumerate(names):
        if name in names[:n]:
            raise FieldError(f"{field}.{n}.name", f"{name!r} is already taken; names are unique")
