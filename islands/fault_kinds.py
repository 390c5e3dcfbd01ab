"""What can go wrong, as an experiment file and ``--fault`` say it.

Each kind is one frozen part with its settings; :mod:`islands.faults` draws from them, and
:mod:`islands.fault_checks` compares them with a cluster. Kinds differ in what they touch: how long
a step takes (straggler, slow, pause), what a round is made of (drop, corrupt), who takes part
(leave, join), the links (outage, partition), or a worker's life by the clock (crash).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from islands.fields import Bandwidth, Count, Duration, Index, NonNegative, Positive, Time
from islands.settings import FieldError, Part, explain, parse_yaml, shown
from islands.units import format_time

Probability = Annotated[float, Field(strict=True, ge=0, le=1)]


def _several(value: object) -> object:
    """One item as a list of it."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        if not value:
            raise InputError("[] names nobody; leave it out for everyone")
        return value
    return (value,)


def _one_or_several(items: tuple[object, ...] | None) -> object:
    return items[0] if items is not None and len(items) == 1 else items


Numbers = Annotated[
    tuple[Index, ...] | None, BeforeValidator(_several), PlainSerializer(_one_or_several)
]
Names = Annotated[
    tuple[str, ...] | None, BeforeValidator(_several), PlainSerializer(_one_or_several)
]


class FaultPart(Part):
    """What all kinds share: a name."""

    kind: str

    def settings(self) -> str:
        """What was set, as ``--fault`` would say it."""
        found = self.model_dump(mode="json", exclude_defaults=True)
        return ",".join(f"{key}={value}" for key, value in found.items() if key != "kind")


#: A step takes at most so many times longer: beyond that numbers lose their meaning.
MOST = 1e6


class Aimed(FaultPart):
    """A fault of some workers: those of the numbers ``worker``, all of the islands ``island``, or
    everyone."""

    worker: Numbers = None
    island: Names = None

    def hits(self, worker: int, island: str) -> bool:
        """Whether it is about a worker of an island."""
        if self.worker is not None:
            return worker in self.worker
        return self.island is None or island in self.island

    @model_validator(mode="after")
    def _one_selector(self) -> Aimed:
        if self.worker is not None and self.island is not None:
            raise FieldError("island", "is given beside worker; choose by one of them")
        return self


# ----------------------------------------------------------------------------------- compute times


class Straggler(Aimed):
    """Every step takes its nominal time × (1 + X), X drawn for each worker and step.

    ``mean`` and ``std`` (the mean, unless said) are those of X. ``normal`` is cut where the step
    would take less than no time.
    """

    kind: Literal["straggler"] = "straggler"
    jitter: Literal["exponential", "lognormal", "gamma", "normal"] = "exponential"
    mean: Annotated[NonNegative, Field(le=MOST)] = 0.1
    std: Annotated[NonNegative, Field(le=MOST)] | None = None

    @property
    def spread(self) -> float:
        """The standard deviation of X."""
        return self.mean if self.std is None else self.std

    @model_validator(mode="after")
    def _fits(self) -> Straggler:
        if self.jitter == "exponential" and self.std is not None:
            raise FieldError(
                "std", "is always the mean of an exponential; leave it out, or choose gamma"
            )
        if self.jitter in ("lognormal", "gamma") and not self.mean:
            raise FieldError("mean", f"0 is too small; a {self.jitter} has a mean of more than 0")
        if self.jitter in ("lognormal", "gamma") and self.spread > MOST * self.mean:
            raise FieldError(
                "std", f"{self.spread:g} is too large; it must be at most {MOST:g} times the mean"
            )
        return self


class Slow(Aimed):
    """Every step takes ``factor`` times its nominal time."""

    kind: Literal["slow"] = "slow"
    factor: Annotated[Positive, Field(le=MOST)]


class Pause(Aimed):
    """A worker stands still for ``lasting``, every ``every`` seconds of its own nominal computing.

    Its first pause falls somewhere in the first ``every`` seconds, drawn for each worker.
    """

    kind: Literal["pause"] = "pause"
    every: Duration
    lasting: Duration

    @model_validator(mode="after")
    def _fits(self) -> Pause:
        if self.lasting > MOST * self.every:
            raise FieldError(
                "lasting",
                f"{format_time(self.lasting)} is too long; it must be at most {MOST:g} times every",
            )
        return self


# --------------------------------------------------------------------------------- rounds, members


class Drop(Aimed):
    """A worker's part in a round is lost with ``probability``.

    ``direction``  up: its contribution does not arrive; down: the result does not reach it; both:
                   one draw decides both
    ``anchor``     what its next pseudo-gradient is measured against: the current shared value,
                   which reaches it as control bytes without being adopted, or the one it last
                   received
    ``on_drop``    with error feedback, what was in the payload returns to the residual, or is lost
    ``burst``      mean length in rounds of a run of losses; 1: each round is drawn by itself
    """

    kind: Literal["drop"] = "drop"
    probability: Probability
    direction: Literal["both", "up", "down"] = "both"
    anchor: Literal["current", "last_received"] = "current"
    on_drop: Literal["restore", "lose"] = "restore"
    burst: Annotated[float, Field(strict=True, ge=1)] = 1.0

    @model_validator(mode="after")
    def _fits(self) -> Drop:
        if self.direction == "up" and self.anchor != "current":
            raise FieldError("anchor", "has no use with direction: up, which loses no result")
        if self.direction == "down" and self.on_drop != "restore":
            raise FieldError("on_drop", "has no use with direction: down, which loses no payload")
        if self.probability == 1 and self.burst > 1:
            raise FieldError("burst", f"{self.burst:g} has no use with probability 1; leave it out")
        least = inf if self.probability == 1 else 1 / (1 - self.probability)
        if 1 < self.burst < least:
            raise FieldError(
                "burst",
                f"{self.burst:g} is too small; rounds that are drawn by themselves already lose "
                f"{least:.3g} in a row, so it must be 1 or at least that",
            )
        return self


def _first_and_last(value: object) -> object:
    if value is None or (isinstance(value, list | tuple) and len(value) == 2):
        return tuple(value) if value else None
    raise InputError(f"{shown(value)} is not a first and a last round, such as [2, 5]")


class Corrupt(Aimed):
    """A payload is bad, with ``probability``, in the rounds ``rounds`` (first, last) of each
    fragment, or in all of them.

    ``nan``, ``inf``, ``scale`` (by ``factor``) and ``flip`` (of the sign) come from a bad worker,
    whose checksum is right; ``truncate`` and ``bits`` from a bad wire, where it is not.
    """

    kind: Literal["corrupt"] = "corrupt"
    how: Literal["nan", "inf", "scale", "flip", "truncate", "bits"]
    factor: Annotated[float, Field(strict=True)] = 10.0
    probability: Probability = 1.0
    rounds: Annotated[tuple[Count, Count] | None, BeforeValidator(_first_and_last)] = None

    @model_validator(mode="after")
    def _fits(self) -> Corrupt:
        if self.how != "scale" and self.factor != type(self).model_fields["factor"].default:
            raise FieldError("factor", f"{self.factor:g} has no use with how: {self.how}")
        if self.rounds is not None and self.rounds[1] < self.rounds[0]:
            raise FieldError("rounds", f"{list(self.rounds)} ends before it begins")
        return self


class Leave(Aimed):
    """Takes no part any more once ``step`` local steps are done."""

    kind: Literal["leave"] = "leave"
    step: Index


class Join(Aimed):
    """Takes part from there on that ``step`` local steps are done; a worker that has not left
    before was not there at all until then."""

    kind: Literal["join"] = "join"
    step: Index


# --------------------------------------------------------------------------------------- the clock


class _Span(FaultPart):
    """From one emulated moment to another; ``to``: None for good."""

    from_: Time = Field(0.0, alias="from")
    to: Time | None = None

    @property
    def to_s(self) -> float:
        """The end; infinite for good."""
        return inf if self.to is None else self.to

    @model_validator(mode="after")
    def _forward(self) -> _Span:
        if self.to is not None and self.to <= self.from_:
            raise FieldError(
                "to", f"{format_time(self.to)} is not after from: {format_time(self.from_)}"
            )
        return self

    @model_serializer(mode="wrap")
    def _under_its_own_names(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dump(self)
        return {"from" if key == "from_" else key: value for key, value in found.items()}


class Outage(_Span):
    """A link, or all that touch an island, has another bandwidth, or none (``bandwidth`` absent).

    ``link`` is a link's name, for both directions, or that of one direction, as in
    ``atlantic:dublin>oregon``. ``every``: the time from one beginning to the next.
    """

    kind: Literal["outage"] = "outage"
    link: Names = None
    island: Names = None
    every: Duration | None = None
    bandwidth: Bandwidth | None = None

    @property
    def bytes_per_s(self) -> float:
        """What is left; 0.0: a cut."""
        return self.bandwidth or 0.0

    @model_validator(mode="after")
    def _fits(self) -> Outage:
        if (self.link is None) == (self.island is None):
            one = "is missing; name a link or an island"
            raise FieldError("link", one if self.link is None else "is given beside island")
        if self.bandwidth == inf:
            raise FieldError("bandwidth", "'unlimited' is no outage; leave it out for a cut")
        if self.every is not None:
            if self.to is None:
                raise FieldError("to", "is missing; what repeats has an end")
            if self.to - self.from_ >= self.every:
                raise FieldError(
                    "every",
                    f"{format_time(self.every)} is too short; the next outage would begin before "
                    "this one is over",
                )
        return self


class Partition(_Span):
    """Nothing passes between ``groups`` of islands, or between ``islands`` and all others."""

    kind: Literal["partition"] = "partition"
    groups: tuple[tuple[str, ...], ...] | None = None
    islands: Names = None

    @model_validator(mode="after")
    def _fits(self) -> Partition:
        if (self.groups is None) == (self.islands is None):
            one = "is missing; give the groups, or islands to be cut off"
            raise FieldError("groups", one if self.groups is None else "is given beside islands")
        if self.groups is not None:
            if len(self.groups) < 2:
                raise FieldError("groups", f"{len(self.groups)} is too few; there are two or more")
            for n, group in enumerate(self.groups):
                if not group:
                    raise FieldError(f"groups.{n}", "[] is too short; a group has an island")
        return self

    def sides(self, islands: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The groups, of all ``islands``."""
        if self.groups is not None:
            return self.groups
        assert self.islands is not None
        return self.islands, tuple(name for name in islands if name not in self.islands)


class Crash(Aimed):
    """A worker dies ``at`` a moment, or again and again with a mean time between failures, and is
    back after ``downtime`` (None: never)."""

    kind: Literal["crash"] = "crash"
    at: Time | None = None
    mtbf: Duration | None = None
    downtime: Time | None = None

    @property
    def downtime_s(self) -> float:
        """Until it is back; infinite for never."""
        return inf if self.downtime is None else self.downtime

    @model_validator(mode="after")
    def _one_when(self) -> Crash:
        if (self.at is None) == (self.mtbf is None):
            one = "is missing; give the moment, or a mean time between failures as mtbf"
            raise FieldError("at", one if self.at is None else "is given beside mtbf")
        return self


# ----------------------------------------------------------------------------------------- reading

#: Faults that change when something happens and nothing else, as long as rounds wait for everyone;
#: in the order in which they are left out to see what each costs.
TIMED_KINDS = ("outage", "partition", "pause", "slow", "straggler")

Fault: TypeAlias = (
    Straggler | Slow | Pause | Drop | Outage | Partition | Crash | Leave | Join | Corrupt
)
KINDS: dict[str, type[Fault]] = {
    "straggler": Straggler,
    "slow": Slow,
    "pause": Pause,
    "drop": Drop,
    "outage": Outage,
    "partition": Partition,
    "crash": Crash,
    "leave": Leave,
    "join": Join,
    "corrupt": Corrupt,
}
_EXAMPLE = "straggler:jitter=exponential,mean=0.1"


def read_fault(value: object) -> Fault:
    """The fault that a mapping with its ``kind``, or a text as for ``--fault``, stands for.

    Raises FieldError with the path inside the fault.
    """
    if isinstance(value, FaultPart):
        return value  # type: ignore[return-value]  # every subclass is in the union
    if isinstance(value, str):
        value = fault_settings(value)
    if not isinstance(value, Mapping):
        raise InputError(f"{shown(value)} is not a fault; write for example {_EXAMPLE}")
    settings = dict(value)
    kind = settings.pop("kind", None)
    if kind is None:
        raise FieldError("kind", f"is missing{nearest('', KINDS)}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise FieldError("kind", f"no fault {shown(kind)}{nearest(str(kind), KINDS)}")
    try:
        return KINDS[kind].model_validate(settings)
    except ValidationError as error:
        raise explain(error, KINDS[kind]) from None


def parse_fault(text: str) -> Fault:
    """``KIND:key=value,…`` as on the command line. Raises `InputError` that repeats the text."""
    try:
        return read_fault(text)
    except InputError as error:
        raise InputError(f"fault {shown(text)}: {error}") from None


def fault_settings(text: str) -> dict[str, object]:
    """The settings in ``KIND:key=value,…``, each value as YAML reads it; nothing is checked yet."""
    kind, _, rest = text.partition(":")
    found: dict[str, object] = {"kind": kind.strip()}
    for item in _items(rest):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not (equals and key and value.strip()):
            raise InputError(f"{shown(item)} is not KEY=VALUE, as in {_EXAMPLE}")
        if key in found:
            raise FieldError(key, "is given twice")
        found[key] = parse_yaml(value, key)
    return found


def _items(text: str) -> Iterator[str]:
    """The parts between the commas that are outside of brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if start or text.strip():
        yield text[start:]


FaultField = Annotated[Fault, BeforeValidator(read_fault)]
FaultsField = tuple[FaultField, ...]
