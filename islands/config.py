"""What a run is: clusters and experiments as frozen, validated objects.

The names are those of the YAML files. Quantities are written with their units and held in base
units (bytes per second, seconds): a ``delay`` of ``65 ms`` is ``0.065``, and writing puts the unit
back. An experiment that was resolved and written is the whole recipe of its run: the cluster in
full, the method with all of its settings, every default that depends on something else filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from islands.errors import InputError, nearest
from islands.settings import (
    FieldError,
    Part,
    explain,
    override,
    read_yaml,
    shown,
    split_override,
)
from islands.units import (
    format_bandwidth,
    format_flops,
    format_time,
    parse_bandwidth,
    parse_flops,
    parse_time,
)

if TYPE_CHECKING:
    from islands.methods import Method
    from islands.network import Topology
else:
    Method = BaseModel  # its module imports torch, which reading a cluster file must not wait for


def _name(text: str) -> str:
    if not text or not all(c.isalnum() or c in "_-" for c in text):
        raise InputError(f"{shown(text)} is not a name; use letters, digits, '_' and '-'")
    return text


Name = Annotated[str, AfterValidator(_name)]
Count = Annotated[int, Field(strict=True, ge=1)]
Index = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Bandwidth = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(parse_bandwidth),
    PlainSerializer(format_bandwidth),
]
Time = Annotated[float, BeforeValidator(parse_time), PlainSerializer(format_time)]
FlopRate = Annotated[float, BeforeValidator(parse_flops), PlainSerializer(format_flops)]


def _warm_start(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or (type(value) is int and value >= 0):
        return value
    raise InputError(
        f"{shown(value)} is neither a number of dense steps (0: none) nor a model.safetensors"
    )


WarmStart = Annotated[int | str, BeforeValidator(_warm_start)]


# ----------------------------------------------------------------------------------------- cluster


class Lan(Part):
    """The network inside an island: a non-blocking switch with a full-duplex port per worker."""

    bandwidth: Bandwidth = parse_bandwidth("100 Gbit/s")
    delay: Time = parse_time("20 us")


class Island(Part):
    """A site: workers joined by a LAN, and how fast each of them computes.

    A step takes either ``step_time`` (100 ms unless said otherwise) or the time of its arithmetic
    at ``flops_per_second``; the other one is None.
    """

    name: Name
    workers: Count
    step_time: Time | None = None
    flops_per_second: FlopRate | None = None
    lan: Lan = Lan()

    @model_validator(mode="before")
    @classmethod
    def _default_speed(cls, values: object) -> object:
        if isinstance(values, Mapping) and not (_given(values, "step_time", "flops_per_second")):
            return {**values, "step_time": "100 ms"}
        return values

    @model_validator(mode="after")
    def _one_speed(self) -> Island:
        if self.step_time is not None and self.flops_per_second is not None:
            raise FieldError(
                "flops_per_second",
                f"{format_flops(self.flops_per_second)} is given beside step_time "
                f"{format_time(self.step_time)}; set one of them to null",
            )
        if self.step_time == 0:
            raise FieldError("step_time", "'0 s' is too small; it must be more than zero")
        return self


class Link(Part):
    """A wide-area connection of two islands; each direction has the bandwidth and one-way delay."""

    name: Name
    between: tuple[str, str]
    bandwidth: Bandwidth
    delay: Time
    queue: Literal["fifo"] = "fifo"

    @field_validator("between", mode="before")
    @classmethod
    def _two_islands(cls, ends: object) -> object:
        if not isinstance(ends, list | tuple) or len(ends) != 2:
            raise InputError(f"{shown(ends)} must name two islands, for example [dublin, oregon]")
        return ends


class Cluster(Part):
    """Islands and the links between them. The coordinator sits in the first island by default."""

    name: Name
    islands: tuple[Island, ...]
    links: tuple[Link, ...] = ()
    coordinator: str | None = None

    @classmethod
    def load(cls, name: str | Path) -> Cluster:
        """A shipped cluster by name, or any cluster file. Raises `InputError` if it is neither."""
        return cls.parse(_read_cluster(name, Path()), "cluster")

    @property
    def workers(self) -> int:
        """All workers of all islands."""
        return sum(island.workers for island in self.islands)

    def topology(self) -> Topology:
        """The network of this cluster. Raises `InputError` if two islands have no route."""
        from islands.network import Site, Topology, Wire

        sites = [Site(i.name, i.workers, i.lan.bandwidth, i.lan.delay) for i in self.islands]
        wires = [Wire(link.name, link.between, link.bandwidth, link.delay) for link in self.links]
        return Topology.build(sites, wires, self.coordinator)

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        islands = [island.name for island in self.islands]
        if not islands:
            raise FieldError("islands", "[] is too short; a cluster has at least one island")
        _distinct("islands", islands)
        _distinct("links", [link.name for link in self.links])
        for n, link in enumerate(self.links):
            for end in link.between:
                if end not in islands:
                    raise FieldError(
                        f"links.{n}.between", f"no island {end!r}{nearest(end, islands)}"
                    )
            if link.between[0] == link.between[1]:
                raise FieldError(
                    f"links.{n}.between", f"link {link.name!r} joins {link.between[0]!r} to itself"
                )
        if self.coordinator is not None and self.coordinator not in islands:
            raise FieldError(
                "coordinator",
                f"no island {self.coordinator!r}{nearest(self.coordinator, islands)}",
            )
        try:
            self.topology()
        except InputError as error:  # what is left to go wrong: islands without a route
            raise FieldError("links", str(error).removeprefix("links: ")) from None
        return self


def cluster_names() -> list[str]:
    """The clusters that are shipped, by name."""
    return sorted(path.stem for path in _shipped_folder().glob("*.yaml"))


def _shipped_folder() -> Path:
    """Inside an installed wheel beside this module, in a source checkout beside the package."""
    inside = Path(__file__).parent / "cluster_configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "cluster_configs"


def _read_cluster(name: str | Path, folder: Path) -> dict[str, Any]:
    """The raw settings of a shipped cluster or of a file, relative to ``folder``."""
    path = folder / Path(name).expanduser()
    looks_like_a_file = path.suffix in (".yaml", ".yml") or Path(name).name != str(name)
    if not looks_like_a_file:
        if str(name) in cluster_names():
            return read_yaml(_shipped_folder() / f"{name}.yaml")
        if not path.is_file():
            hint = nearest(str(name), cluster_names())
            raise InputError(f"cluster: no shipped cluster and no file named {str(name)!r}{hint}")
    read = read_yaml(path)
    if "islands" not in read and read.keys() & {"cluster", "method", "model", "steps"}:
        raise InputError(f"cluster: {path} is an experiment file; give it as the config")
    return read


def _distinct(field: str, names: Sequence[str]) -> None:
    for n, name in enumerate(names):
        if name in names[:n]:
            raise FieldError(f"{field}.{n}.name", f"{name!r} is already taken; names are unique")


# -------------------------------------------------------------------------------------- experiment


class ModelConfig(Part):
    """A model by name (``decoder``, ``gpt-1m``, ``package.module:build``) and its own settings."""

    model_config = ConfigDict(extra="allow")

    name: str = "decoder"

    @property
    def settings(self) -> dict[str, Any]:
        """Every key besides ``name``: what the model's builder is given."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _builder_accepts(self) -> ModelConfig:
        from islands.models import model_settings

        model_settings(self.name, self.settings)
        return self


class DataConfig(Part):
    """The text, and what a worker draws of it: ``batch`` windows of ``window`` tokens a step.

    ``column`` is that of a Parquet file: of text, or of token ids, which need no ``tokenizer``.
    """

    name: str = "python-docs"
    column: str | None = None
    batch: Count = 4
    window: Count | None = None
    shards: Literal["iid", "contiguous", "clustered"] = "iid"
    tokenizer: Literal["characters", "bytes"] | None = None
    vocab_size: Count | None = None


class OptimizerConfig(Part):
    """The inner optimizer. ``clip`` bounds the gradient's norm, null switches it off."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    lr: Positive | None = None
    warmup: Index | None = None
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: NonNegative | None = None
    clip: Positive | None = 1.0
    accumulate: Count = 1


class EvalConfig(Part):
    """Evaluation ``every`` so many steps (0: only at the end) on ``windows`` windows."""

    every: Index = 100
    windows: Count = 64
    target_loss: Positive | None = None


class Experiment(Part):
    """Everything that decides a run's numbers. The defaults are a run of the main job.

    ``cluster``, ``method``, ``model``, ``data`` and ``optimizer`` may be given by name alone.
    ``warm_start``: so many dense steps come first, outside of the emulation, or the path of a
    ``model.safetensors`` to start from.
    """

    cluster: Cluster = Field(default_factory=lambda: Cluster.load("two_islands"))
    method: SerializeAsAny[Method] = Field(default_factory=lambda: parse_method("diloco"))
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    steps: Count = 1000
    seed: Index = 0
    warm_start: WarmStart = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_worker: NonNegative | None = None

    @field_validator("cluster", mode="before")
    @classmethod
    def _named_cluster(cls, value: object) -> object:
        return _read_cluster(value, Path()) if isinstance(value, str | Path) else value

    @field_validator("method", mode="before")
    @classmethod
    def _known_method(cls, value: object) -> object:
        return value if isinstance(value, BaseModel) else parse_method(value)

    @field_validator("model", "data", "optimizer", mode="before")
    @classmethod
    def _named_part(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def load(cls, path: str | Path) -> Experiment:
        """An experiment file. Raises `InputError`."""
        return load_experiment(Path(path))

    def resolved(self) -> Experiment:
        """The same experiment with every null default filled in from the model and the steps.

        Raises `InputError` if the data do not fit the model.
        """
        from islands.models import model_defaults

        defaults = model_defaults(self.model.name, self.model.settings)
        data = self.data.model_copy(
            update={
                "window": _or(self.data.window, defaults.context),
                "tokenizer": _or(self.data.tokenizer, defaults.tokenizer),
                "vocab_size": _or(self.data.vocab_size, defaults.vocab_size),
            }
        )
        if ":" not in self.model.name:  # a user's own model is only known by trying it
            _at_most("data.window", data.window, defaults.context, "context")
            _at_most("data.vocab_size", data.vocab_size, defaults.vocab_size, "vocabulary")
        optimizer = self.optimizer.model_copy(
            update={
                "lr": _or(self.optimizer.lr, _or(self.method.default_lr, defaults.lr)),
                "warmup": _or(self.optimizer.warmup, min(1000, self.steps // 10)),
                "weight_decay": _or(self.optimizer.weight_decay, self.method.default_weight_decay),
            }
        )
        start = self.warm_start
        if isinstance(start, str):  # the written experiment may be run from another folder
            start = str(Path(start).expanduser().absolute())
        return self.model_copy(update={"data": data, "optimizer": optimizer, "warm_start": start})


def parse_method(value: object) -> Method:
    """The method that a name, or a mapping with a name, stands for."""
    from islands.methods import method_class

    settings = {"name": value} if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise InputError(f"{shown(value)} is neither a method's name nor a mapping of settings")
    name = settings.get("name", "diloco")
    if not isinstance(name, str):
        raise FieldError("name", f"{shown(name)} is not a method's name")
    found = method_class(name)
    try:
        return found.model_validate({**settings, "name": name})
    except ValidationError as error:
        raise explain(error, found) from None


def _given(values: Mapping[str, Any], *keys: str) -> bool:
    return any(values.get(key) is not None for key in keys)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _at_most(field: str, value: Any, limit: int, what: str) -> None:
    if value > limit:
        raise InputError(f"{field}: {value} is more than the model's {what} of {limit}")


# ----------------------------------------------------------------------------------------- loading

_BY_NAME = ("method", "model", "data", "optimizer")


def load_experiment(
    config: Path | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> Experiment:
    """Defaults, then the file, then ``options``, then ``overrides``: the later one wins.

    ``options`` are parts by name (cluster, method, model, data) or numbers (steps, seed); None is
    not given. Naming another method or model drops the settings that the file had for its own.
    ``overrides`` are ``key.path=value`` texts; a list's item goes by its index or its name. A path
    of a cluster inside the file is relative to the file. Raises `InputError` with one line.
    """
    found = {} if config is None else read_yaml(config)
    folder = Path() if config is None else config.parent
    return build_experiment(found, folder, overrides, options)


def build_experiment(
    found: Mapping[str, Any],
    folder: Path = Path(),
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> Experiment:
    """:func:`load_experiment` from settings that were read already, of a file in ``folder``."""
    values: dict[str, Any] = {"cluster": "two_islands", "method": "diloco", "model": "decoder"}
    if "islands" in found:
        raise InputError("config: this is a cluster file; give it as the cluster")
    values |= {k: v for k, v in found.items() if v is not None or k not in values}
    if isinstance(values["cluster"], str):
        values["cluster"] = _read_cluster(values["cluster"], folder)
    for key in _BY_NAME:
        values[key] = _as_mapping(values.get(key))
    for key, value in (options or {}).items():
        if value is not None:
            _choose(values, key, value)
    for text in overrides:
        parts, value = split_override(text)
        if len(parts) == 1 and isinstance(value, str):
            _choose(values, parts[0], value)
        else:
            override(values, parts, value)
    return Experiment.parse(values)


def _choose(values: dict[str, Any], key: str, value: object) -> None:
    """Set a part by its name, keeping settings that still mean the same."""
    current = values.get(key)
    if key == "cluster" and isinstance(value, str | Path):
        values[key] = _read_cluster(value, Path())
    elif key not in _BY_NAME or not isinstance(value, str):
        values[key] = value
    elif key in ("method", "model") and isinstance(current, dict) and current.get("name") != value:
        values[key] = {"name": value}
    else:
        values[key] = {**(current if isinstance(current, dict) else {}), "name": value}


def _as_mapping(value: object) -> object:
    """A part given by name alone, or not at all, as a mapping that an override can reach into."""
    if value is None:
        return {}
    return {"name": value} if isinstance(value, str) else value
