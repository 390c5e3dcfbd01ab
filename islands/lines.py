"""What a line of the wide area is: its bandwidth and delay, and what else happens on it.

Links, access lines and the backbone share all of this. A bandwidth or a delay is a quantity, or a
trace of values that hold one after the other; windows replace it for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf, isinf
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from islands.csv_trace import read_trace
from islands.errors import InputError, nearest
from islands.fields import Bandwidth, Duration, NonNegative, PerByte, Size, Time
from islands.settings import FieldError, Part, shown
from islands.units import format_bandwidth, format_time, parse_bandwidth, parse_time

if TYPE_CHECKING:
    from islands.network import Link as NetworkLink
    from islands.network.steps import Steps
    from islands.network.steps import Window as StepsWindow

CUT = "cut"


# ------------------------------------------------------------------------------------------ traces


class Trace(Part):
    """Values that hold one after the other: ``points`` of (seconds, value), the first at 0 s.

    The last value holds as long as the one before it did. There the trace begins again
    (``repeat``), or it ends and nothing is known any more. One value alone holds for ever.
    """

    points: tuple[tuple[float, float], ...]
    repeat: bool = False

    @property
    def values(self) -> tuple[float, ...]:
        """The values in the order in which they hold."""
        return tuple(value for _, value in self.points)

    @property
    def period_s(self) -> float | None:
        """When it ends or begins again; None: never, it has one value."""
        if len(self.points) == 1:
            return None
        (before, _), (last, _) = self.points[-2:]
        return last + (last - before)

    def steps(self, windows: tuple[StepsWindow, ...]) -> Steps:
        """The same as a function of emulated time, with windows over it."""
        from islands.network.steps import Steps

        period_s = self.period_s
        times = tuple(time for time, _ in self.points)
        if period_s is None or self.repeat:
            return Steps(times, self.values, period_s, windows=windows)
        return Steps(times, self.values, None, ends_s=period_s, windows=windows)

    @model_validator(mode="after")
    def _goes_forward(self) -> Trace:
        times = [time for time, _ in self.points]
        if not times:
            raise FieldError("points", "[] is too short; a trace has at least one value")
        if times[0] != 0:
            raise FieldError("points.0", f"a trace begins at 0 s, not at {format_time(times[0])}")
        for n, (before, time) in enumerate(pairwise(times), start=1):
            if time <= before:
                raise FieldError(
                    f"points.{n}",
                    f"the trace goes backwards: {format_time(time)} does not come after "
                    f"{format_time(before)}",
                )
        if len(times) == 1 and not self.repeat:
            raise FieldError(
                "repeat", "a trace of one value ends at once; write repeat: true to keep it"
            )
        return self


def _points(value: object, parse: Callable[[object], float]) -> object:
    """Pairs of texts as pairs of numbers; what is no list of pairs is left to be refused."""
    if not isinstance(value, list | tuple):
        return value
    points = []
    for n, point in enumerate(value):
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise FieldError(f"{n}", f"{shown(point)} is not a time and a value")
        try:
            points.append((parse_time(point[0]), parse(point[1])))
        except InputError as error:
            raise FieldError(f"{n}", str(error)) from None
    return tuple(points)


def _finite_bandwidth(value: object) -> float:
    bytes_per_s = parse_bandwidth(value)
    if isinf(bytes_per_s):
        raise InputError("'unlimited' cannot change over time; write a bandwidth")
    return bytes_per_s


class BandwidthTrace(Trace):
    """A bandwidth that changes: bytes per second."""

    points: Annotated[
        tuple[tuple[float, float], ...],
        BeforeValidator(lambda value: _points(value, _finite_bandwidth)),
        PlainSerializer(lambda ps: [[format_time(t), format_bandwidth(v)] for t, v in ps]),
    ]


class DelayTrace(Trace):
    """A one-way delay that changes: seconds."""

    points: Annotated[
        tuple[tuple[float, float], ...],
        BeforeValidator(lambda value: _points(value, parse_time)),
        PlainSerializer(lambda ps: [[format_time(t), format_time(v)] for t, v in ps]),
    ]


def _quantity_or_trace(
    value: object, trace: type[Trace], column: str, parse: Callable[[object], float]
) -> object:
    if isinstance(value, Trace) or not isinstance(value, Mapping):
        return value if isinstance(value, trace) else parse(value)
    settings = dict(value)
    for key in settings:
        if key not in (known := ("file", "points", "repeat")):
            raise FieldError(str(key), f"unknown key {str(key)!r}{nearest(str(key), known)}")
    file = settings.pop("file", None)
    if file is None:
        return trace.parse(settings)
    if "points" in settings:
        raise FieldError("points", "are given beside a file; a trace has one of them")
    settings["points"] = read_trace(file, column)
    try:
        return trace.parse(settings)
    except FieldError as error:
        message = str(error).removeprefix(f"{error.path}: ")
        raise FieldError(error.path, f"{message} (in {file})") from None


def _dump_quantity(form: Callable[[float], str]) -> Callable[[Any], Any]:
    return lambda value: value.model_dump() if isinstance(value, Part) else form(value)


ChangingBandwidth = Annotated[
    Annotated[float, Field(allow_inf_nan=True)] | BandwidthTrace,
    BeforeValidator(
        lambda value: _quantity_or_trace(value, BandwidthTrace, "bandwidth", parse_bandwidth)
    ),
    PlainSerializer(_dump_quantity(format_bandwidth)),
]
ChangingDelay = Annotated[
    float | DelayTrace,
    BeforeValidator(lambda value: _quantity_or_trace(value, DelayTrace, "delay", parse_time)),
    PlainSerializer(_dump_quantity(format_time)),
]


# ----------------------------------------------------------------------------------------- windows


WindowBandwidth = Annotated[
    float,
    BeforeValidator(lambda value: 0.0 if value == CUT else _finite_bandwidth(value)),
    PlainSerializer(lambda v: format_bandwidth(v) if v else CUT, when_used="unless-none"),
]


class Window(Part):
    """Another bandwidth (``cut``: none) or delay from one moment to another.

    ``to``: None for good. ``every``: the time from one beginning to the next, None for once.
    """

    from_: Time = Field(alias="from")
    to: Time | None = None
    every: Duration | None = None
    bandwidth: WindowBandwidth | None = None
    delay: Time | None = None

    @property
    def to_s(self) -> float:
        """The end; infinite for good."""
        return inf if self.to is None else self.to

    def over(self, value: float) -> StepsWindow:
        """The same for a function of emulated time that it makes ``value``."""
        from islands.network.steps import Window

        return Window(self.from_, self.to_s, self.every, value)

    @model_validator(mode="after")
    def _makes_sense(self) -> Window:
        if self.bandwidth is None and self.delay is None:
            raise FieldError("bandwidth", "is missing; a window changes the bandwidth or the delay")
        if self.to is not None and self.to <= self.from_:
            raise FieldError(
                "to", f"{format_time(self.to)} is not after from: {format_time(self.from_)}"
            )
        if self.every is not None:
            if self.to is None:
                raise FieldError("to", "is missing; a window that repeats has an end")
            if self.to - self.from_ >= self.every:
                raise FieldError(
                    "every",
                    f"{format_time(self.every)} is not longer than the window itself, which lasts "
                    f"{format_time(self.to - self.from_)}",
                )
        return self

    @model_serializer(mode="wrap")
    def _under_its_own_names(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dump(self)
        return {"from" if key == "from_" else key: value for key, value in found.items()}


# -------------------------------------------------------------------------------- background, lines


class Bursts(Part):
    """Arrivals only in on-periods; their lengths and the pauses' are exponential with these
    means."""

    on: Duration
    off: Duration


class Background(Part):
    """Other jobs' transfers: so much of the line's capacity, in transfers of this (mean) size."""

    load: NonNegative
    size: Size
    sizes: Literal["fixed", "exponential"] = "fixed"
    bursts: Bursts | None = None

    @field_validator("load")
    @classmethod
    def _bearable(cls, load: float) -> float:
        if load >= 1:
            raise InputError(
                f"{load:g} is too large; at a load of 1 the queue grows for ever, so it must be "
                "less than 1"
            )
        return load


class Line(Part):
    """One direction of something that bytes cross, shared by all transfers on it.

    Args:
        bandwidth, delay: a quantity, or a trace.
        queue: ``fifo``: whole transfers, one after the other; ``fair``: those present share.
        max_rate_per_flow: what one transfer gets at most.
        background: other jobs' transfers.
        jitter: by how much the delay of a transfer may deviate, both ways.
        windows: when bandwidth or delay are different ones.
        egress_price: of what leaves over this line.
    """

    bandwidth: ChangingBandwidth
    delay: ChangingDelay = 0.0
    queue: Literal["fifo", "fair"] = "fifo"
    max_rate_per_flow: Bandwidth = inf
    background: Background | None = None
    jitter: Time = 0.0
    windows: tuple[Window, ...] = ()
    egress_price: PerByte | None = None

    def directed(self, name: str, source: str, target: str) -> NetworkLink:
        """The link that the emulated network has for it."""
        from islands.network import Link
        from islands.network.background import Load

        bandwidth = _steps(
            self.bandwidth, [w.over(w.bandwidth) for w in self.windows if w.bandwidth is not None]
        )
        delay = _steps(self.delay, [w.over(w.delay) for w in self.windows if w.delay is not None])
        load = self.background
        return Link(
            name=name,
            source=source,
            target=target,
            bytes_per_s=_mean(self.bandwidth, bandwidth),
            delay_s=_mean(self.delay, delay),
            fair=self.queue == "fair",
            flow_bytes_per_s=self.max_rate_per_flow,
            background=None
            if load is None or not load.load
            else Load(
                load=load.load,
                size_bytes=load.size,
                exponential=load.sizes == "exponential",
                on_s=load.bursts.on if load.bursts else None,
                off_s=load.bursts.off if load.bursts else None,
            ),
            jitter_s=self.jitter,
            bandwidth=bandwidth,
            delay=delay,
            price=self.egress_price,
        )

    def trace_ends(self) -> list[tuple[str, float]]:
        """The traces that end, by field, and when."""
        found = []
        for field, value in (("bandwidth", self.bandwidth), ("delay", self.delay)):
            if isinstance(value, Trace) and not value.repeat:
                assert value.period_s is not None  # one value alone must repeat
                found.append((field, value.period_s))
        return found

    def check(self) -> None:
        """Raise a FieldError unless the fields fit together."""
        for field in ("bandwidth", "delay"):
            _do_not_overlap(field, self.windows)
        if self.bandwidth == inf:
            if self.background is not None and self.background.load:
                raise FieldError(
                    "background",
                    "there is no load of an unlimited bandwidth; give the line a bandwidth",
                )
            for n, window in enumerate(self.windows):
                if window.bandwidth is not None:
                    raise FieldError(
                        f"windows.{n}.bandwidth",
                        "an unlimited bandwidth does not change; give the line a bandwidth",
                    )
        self._drains()
        delays = self.delay.values if isinstance(self.delay, DelayTrace) else (self.delay,)
        least_s = min([*delays, *(w.delay for w in self.windows if w.delay is not None)])
        if self.jitter > least_s:
            raise FieldError(
                "jitter",
                f"{format_time(self.jitter)} is larger than the "
                f"{'smallest ' if len(delays) > 1 or self.windows else ''}delay of "
                f"{format_time(least_s)}",
            )

    def _drains(self) -> None:
        """Refuse a background that never gets done: more than what the windows leave, or than one
        transfer after the other, each capped, takes."""
        load = self.background
        if load is None:
            return
        whole = _mean(self.bandwidth, _steps(self.bandwidth, []))
        given = load.load * whole
        left, where = whole, 0
        for n, window in enumerate(self.windows):
            if window.bandwidth is None:
                continue
            if window.to is None and window.bandwidth:  # a cut for good ends the run anyway
                left, where = min(left, window.bandwidth), n
            elif window.every is not None:
                assert window.to is not None
                share = (window.to - window.from_) / window.every
                left, where = left - share * (whole - window.bandwidth), n
        if given and given >= left:
            raise FieldError(
                f"windows.{where}",
                f"leaves {format_bandwidth(left)} of the line in the long run, no more than the "
                f"background of {format_bandwidth(given)}, whose queue would grow for ever",
            )
        if self.queue == "fair" or isinf(self.max_rate_per_flow):
            return
        if given >= self.max_rate_per_flow:
            raise FieldError(
                "max_rate_per_flow",
                f"{format_bandwidth(self.max_rate_per_flow)} is not more than the background of "
                f"{format_bandwidth(given)}, which a fifo queue serves at that rate",
            )

    @model_validator(mode="after")
    def _fits_together(self) -> Line:
        self.check()
        return self


def _steps(base: float | Trace, windows: list[StepsWindow]) -> Steps | None:
    """None for what never changes."""
    from islands.network.steps import Steps

    if isinstance(base, Trace):
        return base.steps(tuple(windows))
    return Steps((0.0,), (base,), None, windows=tuple(windows)) if windows else None


def _mean(base: float | Trace, steps: Steps | None) -> float:
    """The constant, or the time mean of a trace."""
    if isinstance(base, Trace):
        assert steps is not None
        return steps.mean()
    return base


def _do_not_overlap(field: str, windows: tuple[Window, ...]) -> None:
    from islands.network.steps import overlapping

    given = [(n, w) for n, w in enumerate(windows) if getattr(w, field) is not None]
    over = [window.over(getattr(window, field)) for _, window in given]
    found = overlapping(over)
    if found is not None:
        first, second, *_ = (n for (n, _), w in zip(given, over, strict=True) if w in found)
        raise FieldError(
            f"windows.{second}", f"overlaps with windows.{first}: both set the {field}"
        )


class Reverse(Part):
    """What differs in the direction from a link's second island to its first.

    Only what is given counts: ``background: null`` is none that way, no ``background`` is the same
    one both ways.
    """

    bandwidth: ChangingBandwidth | None = None
    delay: ChangingDelay | None = None
    max_rate_per_flow: Bandwidth | None = None
    background: Background | None = None
    jitter: Time | None = None
    windows: tuple[Window, ...] | None = None
    egress_price: PerByte | None = None

    def given(self) -> dict[str, Any]:
        """The fields that differ, by name."""
        may_be_none = ("background", "egress_price")
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in self.model_fields_set
            and (getattr(self, name) is not None or name in may_be_none)
        }

    @model_serializer(mode="wrap")
    def _what_is_given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dump(self)
        return {key: found[key] for key in self.given()}
