"""Clusters: islands and what joins them, and where their files are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator, model_validator

from islands.errors import InputError, nearest
from islands.fields import MEASURED, Bandwidth, Count, FlopRate, Name, StepTime, Time, distinct
from islands.lines import ChangingDelay, Line, Reverse
from islands.settings import FieldError, Part, read_yaml, shown
from islands.units import format_flops, parse_bandwidth, parse_time

if TYPE_CHECKING:
    from islands.network import Link as NetworkLink
    from islands.network import Topology

#: The network's own names for lines: ``uplink:dublin``, ``default:dublin>oregon``, ``backbone``.
UPLINK, DOWNLINK, DEFAULT, BACKBONE = "uplink", "downlink", "default", "backbone"


class Lan(Part):
    """The network inside an island: a non-blocking switch with a full-duplex port per worker."""

    bandwidth: Bandwidth = parse_bandwidth("100 Gbit/s")
    delay: Time = parse_time("20 us")


class Island(Part):
    """A site: workers joined by a LAN, and how fast each of them computes.

    A step takes either ``step_time`` (100 ms unless said otherwise; ``measured``: what it takes on
    this host) or the time of its arithmetic at ``flops_per_second``; the other one is None.
    ``uplink`` and ``downlink`` are the site's access lines: all that its workers send to, or
    receive from, other islands crosses them.
    """

    name: Name
    workers: Count
    step_time: StepTime | None = None
    flops_per_second: FlopRate | None = None
    lan: Lan = Lan()
    uplink: Line | None = None
    downlink: Line | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_speed(cls, values: object) -> object:
        if isinstance(values, Mapping) and not (
            any(values.get(key) is not None for key in ("step_time", "flops_per_second"))
        ):
            return {**values, "step_time": "100 ms"}
        return values

    @model_validator(mode="after")
    def _one_speed(self) -> Island:
        if self.step_time is not None and self.flops_per_second is not None:
            raise FieldError(
                "flops_per_second",
                f"{format_flops(self.flops_per_second)} is given beside step_time "
                f"{self.model_dump(mode='json')['step_time']}; set one of them to null",
            )
        if self.step_time == 0:
            raise FieldError("step_time", "'0 s' is too small; it must be more than zero")
        return self


class _Ends(Part):
    """What a link is called and joins; before a line's fields, so that it is written first."""

    name: Name
    between: tuple[str, str]

    @field_validator("between", mode="before")
    @classmethod
    def _two_islands(cls, ends: object) -> object:
        if not isinstance(ends, list | tuple) or len(ends) != 2:
            raise InputError(f"{shown(ends)} must name two islands, for example [dublin, oregon]")
        return ends


class Link(Line, _Ends):
    """A connection of two islands, with the same numbers both ways but for those in ``reverse``.

    The line's own fields are those of the direction from the first island to the second.
    """

    delay: ChangingDelay
    reverse: Reverse | None = None

    def directions(self) -> tuple[Line, Line]:
        """The line from the first island to the second, and the one back."""
        return self, self if self.reverse is None else self.model_copy(update=self.reverse.given())

    def check(self) -> None:
        """Both directions."""
        super().check()
        if self.reverse is None:
            return
        back = self.directions()[1]
        try:
            Line.check(back)
        except FieldError as error:
            message = str(error).removeprefix(f"{error.path}: ")
            raise FieldError(f"reverse.{error.path}", message) from None


class Cluster(Part):
    """Islands and what joins them. The coordinator sits in the first island by default.

    Args:
        links: of pairs of islands.
        default_link: for every pair of islands without a link of its own.
        backbone: one line that everything crosses which goes between islands without a link.
    """

    name: Name
    islands: tuple[Island, ...]
    links: tuple[Link, ...] = ()
    default_link: Line | None = None
    backbone: Line | None = None
    coordinator: str | None = None

    @classmethod
    def load(cls, name: str | Path) -> Cluster:
        """A shipped cluster by name, or any cluster file. Raises `InputError` if it is neither."""
        return cls.parse(read_cluster(name, Path()), "cluster")

    @property
    def workers(self) -> int:
        """All workers of all islands."""
        return sum(island.workers for island in self.islands)

    def measured(self, seconds: float) -> Cluster:
        """The same cluster with ``seconds`` for every step time that is to be measured."""
        islands = tuple(
            island.model_copy(update={"step_time": seconds})
            if island.step_time == MEASURED
            else island
            for island in self.islands
        )
        return self.model_copy(update={"islands": islands})

    def lines(self) -> Iterator[tuple[str, Line]]:
        """Every line that the file describes, by the path of its settings."""
        for n, link in enumerate(self.links):
            yield f"links.{n}", link
            if link.reverse is not None:
                yield f"links.{n}.reverse", link.directions()[1]
        for n, island in enumerate(self.islands):
            for access in (UPLINK, DOWNLINK):
                line = getattr(island, access)
                if line is not None:
                    yield f"islands.{n}.{access}", line
        for field in ("default_link", "backbone"):
            line = getattr(self, field)
            if line is not None:
                yield field, line

    def trace_ends(self) -> list[tuple[str, float]]:
        """Traces that do not repeat: the field of each, and the emulated time at which it ends."""
        return [
            (f"cluster.{path}.{field}", end_s)
            for path, line in self.lines()
            for field, end_s in line.trace_ends()
        ]

    def topology(self) -> Topology:
        """The network of this cluster. Raises `InputError` if two islands have no route, or if one
        has both disciplines."""
        from islands.network import Site, Topology

        sites = [Site(i.name, i.workers, i.lan.bandwidth, i.lan.delay) for i in self.islands]
        return Topology.build(sites, list(self._directed()), self.coordinator)

    def _directed(self) -> Iterator[NetworkLink]:
        """Every one-directional resource between the islands."""
        from islands.network import CORE

        for link in self.links:
            ends = (link.between, link.between[::-1])
            for line, (a, b) in zip(link.directions(), ends, strict=True):
                yield line.directed(f"{link.name}:{a}>{b}", a, b)
        for island in self.islands:
            here = island.name
            if island.uplink is not None:
                yield island.uplink.directed(f"{UPLINK}:{here}", here, CORE)
            if island.downlink is not None:
                yield island.downlink.directed(f"{DOWNLINK}:{here}", CORE, here)
        if self.backbone is not None:
            yield self.backbone.directed(BACKBONE, CORE, CORE)
        if self.default_link is not None:
            joined = {pair for link in self.links for pair in (link.between, link.between[::-1])}
            names = [island.name for island in self.islands]
            for a, b in permutations(names, 2):
                if (a, b) not in joined:
                    yield self.default_link.directed(f"{DEFAULT}:{a}>{b}", a, b)

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        islands = [island.name for island in self.islands]
        if not islands:
            raise FieldError("islands", "[] is too short; a cluster has at least one island")
        distinct("islands", islands)
        distinct("links", [link.name for link in self.links])
        for n, link in enumerate(self.links):
            if link.name == "lan":  # the ledger would take lan:a>b for the inside of an island
                raise FieldError(
                    f"links.{n}.name", "'lan' is the name of what is inside an island; take another"
                )
            for end in link.between:
                if end not in islands:
                    raise FieldError(
                        f"links.{n}.between", f"no island {end!r}{nearest(end, islands)}"
                    )
            if link.between[0] == link.between[1]:
                raise FieldError(
                    f"links.{n}.between", f"link {link.name!r} joins {link.between[0]!r} to itself"
                )
        if self.backbone is not None and self.default_link is not None:
            raise FieldError(
                "default_link",
                "is given beside a backbone; islands without a link have one of them",
            )
        if self.coordinator is not None and self.coordinator not in islands:
            raise FieldError(
                "coordinator",
                f"no island {self.coordinator!r}{nearest(self.coordinator, islands)}",
            )
        try:
            self.topology()
        except InputError as error:  # islands without a route, or a route of both disciplines
            raise FieldError("links", str(error).removeprefix("links: ")) from None
        return self


def cluster_names() -> list[str]:
    """The clusters that are shipped, by name."""
    return sorted(path.stem for path in _shipped_folder().glob("*.yaml"))


def _shipped_folder() -> Path:
    """Inside an installed wheel beside this module, in a source checkout beside the package."""
    inside = Path(__file__).parent / "cluster_configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "cluster_configs"


def read_cluster(name: str | Path, folder: Path) -> Any:
    """The raw settings of a shipped cluster or of a file, relative to ``folder``."""
    path = folder / Path(name).expanduser()
    looks_like_a_file = path.suffix in (".yaml", ".yml") or Path(name).name != str(name)
    if not looks_like_a_file:
        if str(name) in cluster_names():
            path = _shipped_folder() / f"{name}.yaml"
            return with_trace_files(read_yaml(path), path.parent)
        if not path.is_file():
            hint = nearest(str(name), cluster_names())
            raise InputError(f"cluster: no shipped cluster and no file named {str(name)!r}{hint}")
    read = read_yaml(path)
    if "islands" not in read and read.keys() & {"cluster", "method", "model", "steps"}:
        raise InputError(f"cluster: {path} is an experiment file; give it as the config")
    return with_trace_files(read, path.parent)


def with_trace_files(values: Any, folder: Path) -> Any:
    """The settings of a cluster with its traces' files relative to ``folder``."""
    if isinstance(values, Mapping):
        return {
            key: str(folder / Path(value).expanduser())
            if key == "file" and isinstance(value, str)
            else with_trace_files(value, folder)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [with_trace_files(value, folder) for value in values]
    return values
