"""When a round closes, and what is made of what came: the experiment's ``policy``.

``all`` waits for everyone who is alive. A quorum closes a round earlier, or, beside a deadline, is
the least that is committed; below it nothing is, and everyone goes on from what they have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from islands.errors import InputError, nearest
from islands.fields import Count
from islands.settings import FieldError, Part, explain, shown
from islands.units import format_time, parse_time

Mean: TypeAlias = Literal["mean", "trimmed_mean", "median"]

_MEDIANS = re.compile(r"([0-9.eE+-]+)\s*[x×*]\s*median")


@dataclass(frozen=True)
class Deadline:
    """So many seconds after a round's first arrival, or ``medians`` times the median member's time
    since the round opened. One of them is None."""

    seconds: float | None = None
    medians: float | None = None


def _deadline(value: object) -> Deadline:
    if isinstance(value, Deadline):
        return value
    match = _MEDIANS.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        try:
            seconds = parse_time(value)
        except InputError as error:
            raise InputError(f"{error}; or write a multiple such as 2 x median") from None
        if not seconds:
            raise InputError(f"{shown(value)} is too small; it must be more than zero")
        return Deadline(seconds=seconds)
    try:
        medians = float(match[1])
    except ValueError:
        medians = 0.0
    if not 1 <= medians < inf:
        raise InputError(f"{shown(value)} is not a multiple of at least 1, such as 2 x median")
    return Deadline(medians=medians)


def _format_deadline(deadline: Deadline | None) -> str | None:
    if deadline is None:
        return None
    if deadline.seconds is not None:
        return format_time(deadline.seconds)
    text = f"{deadline.medians:g}"
    return f"{text if float(text) == deadline.medians else repr(deadline.medians)} x median"


class Policy(Part):
    """How rounds close and payloads are combined.

    ``quorum``    contributions that a commit needs; without a deadline a round closes with them
    ``deadline``  when a round closes without those who are missing
    ``late``      what becomes of a result that came after its round: dropped, part of the next
                  round, or that with the weight ``discount``
    ``invalid``   a payload that is not finite, or whose checksum is wrong, is refused or passed on
    ``mean``      mean; trimmed_mean: without the largest and the smallest ``trim`` of each
                  coordinate; median: of each coordinate
    """

    quorum: Count | None = None
    deadline: Annotated[
        Deadline | None,
        BeforeValidator(lambda value: None if value is None else _deadline(value)),
        PlainSerializer(_format_deadline),
    ] = None
    late: Literal["drop", "apply_next", "discount"] = "drop"
    discount: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.5
    invalid: Literal["refuse", "accept"] = "refuse"
    mean: Mean = "mean"
    trim: Annotated[float, Field(strict=True, gt=0, lt=0.5)] = 0.1

    @property
    def timed(self) -> bool:
        """Whether rounds close by the clock."""
        return self.quorum is not None or self.deadline is not None

    @property
    def late_weight(self) -> float | None:
        """The weight of a late result in the next round; None: it is dropped."""
        return {"drop": None, "apply_next": 1.0, "discount": self.discount}[self.late]

    def closes_at(self, opened_s: float, arrivals_s: Sequence[float], alive: int) -> float:
        """When an open round closes if nobody else comes; infinite as long as it waits.

        A moment that has passed means now. ``arrivals_s`` are in order and all after
        ``opened_s``, the moment since which the members have worked for this round.
        """
        if not arrivals_s:
            return inf
        if len(arrivals_s) >= alive:
            return arrivals_s[-1]
        if self.deadline is None:
            there = self.quorum is not None and len(arrivals_s) >= self.quorum
            return arrivals_s[-1] if there else inf
        if self.deadline.seconds is not None:
            return arrivals_s[0] + self.deadline.seconds
        assert self.deadline.medians is not None
        median = (alive - 1) // 2  # the lower of two
        if len(arrivals_s) <= median:
            return inf
        return opened_s + self.deadline.medians * (arrivals_s[median] - opened_s)

    def commits(self, usable: int) -> bool:
        """Whether so many contributions to a closed round are enough."""
        return usable >= (self.quorum or 1)

    def collective(self, own: str) -> str:
        """What carries a round: a sum can be formed on the way, an order statistic needs every
        value, so that an all-reduce becomes an all-gather."""
        return "all_gather" if self.mean != "mean" and own == "all_reduce" else own

    @model_validator(mode="after")
    def _everything_is_read(self) -> Policy:
        needed = (
            ("late", self.timed, "a quorum or a deadline; without them nobody is late"),
            ("discount", self.late == "discount", "late: discount"),
            ("trim", self.mean == "trimmed_mean", "mean: trimmed_mean"),
        )
        for field, read, what in needed:
            value = getattr(self, field)
            if not read and value != type(self).model_fields[field].default:
                raise FieldError(field, f"{shown(value)} has no use without {what}")
        return self

    @model_serializer(mode="wrap")
    def _all_by_its_name(self, dump: SerializerFunctionWrapHandler) -> Any:
        return "all" if self == Policy() else dump(self)


def read_policy(value: object) -> Policy:
    """``all`` or a mapping. Raises FieldError with the path inside the policy."""
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        if value != "all":
            hint = nearest(value, ["all", *Policy.model_fields])
            if value in Policy.model_fields:
                hint = f"; write for example {{{value}: …}}"
            raise InputError(f"{shown(value)} is neither 'all' nor a mapping of settings{hint}")
        return Policy()
    if not isinstance(value, Mapping):
        raise InputError(f"{shown(value)} is neither 'all' nor a mapping such as {{quorum: 3}}")
    try:
        return Policy.model_validate(value)
    except ValidationError as error:
        raise explain(error, Policy) from None


PolicyField = Annotated[Policy, BeforeValidator(read_policy)]
