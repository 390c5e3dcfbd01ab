"""What a run is: experiments as frozen, validated objects.

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
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from islands.cluster import (
    Cluster,
    Island,
    Lan,
    Link,
    cluster_names,
    read_cluster,
    with_trace_files,
)
from islands.errors import InputError
from islands.fault_checks import ReplicasField, check_faults, check_method
from islands.fault_kinds import FaultsField
from islands.fields import Count, Index, NonNegative, Positive, Scale, Time
from islands.network.topology import must_name_each_island_once
from islands.policy import Policy, PolicyField
from islands.settings import (
    FieldError,
    Part,
    explain,
    override,
    read_yaml,
    shown,
    split_override,
)

if TYPE_CHECKING:
    from islands.methods import Method
else:
    Method = BaseModel  # its module imports torch, which reading a cluster file must not wait for


def _warm_start(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or (type(value) is int and value >= 0):
        return value
    raise InputError(
        f"{shown(value)} is neither a number of dense steps (0: none) nor a model.safetensors"
    )


__all__ = [
    "Cluster",
    "DataConfig",
    "EvalConfig",
    "Experiment",
    "Index",
    "Island",
    "Lan",
    "Link",
    "ModelConfig",
    "OptimizerConfig",
    "Positive",
    "build_experiment",
    "cluster_names",
    "load_experiment",
    "parse_method",
]

WarmStart = Annotated[int | str, BeforeValidator(_warm_start)]


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
    ``model.safetensors`` to start from. ``collective``: how a round's bytes travel; ``ring_order``
    names the islands in the order of the ring, null takes the one that crosses links the least.
    ``clock``: ``wall`` holds deliveries back until they are due, after ``time_scale`` (null: 1)
    wall seconds per emulated second. ``faults``: what goes wrong; ``policy``: when rounds close
    and what is made of them; ``detect``: after how long a death is noticed (null: 1 s);
    ``replicas``: from which local step on how many workers take part.
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
    collective: Literal["ring", "star", "hierarchical", "auto"] = "ring"
    ring_order: tuple[str, ...] | None = None
    clock: Literal["emulated", "wall"] = "emulated"
    time_scale: Scale | None = None
    faults: FaultsField = ()
    policy: PolicyField = Policy()
    detect: Time | None = None
    replicas: ReplicasField = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_worker: NonNegative | None = None

    @field_validator("cluster", mode="before")
    @classmethod
    def _named_cluster(cls, value: object) -> object:
        return read_cluster(value, Path()) if isinstance(value, str | Path) else value

    @field_validator("method", mode="before")
    @classmethod
    def _known_method(cls, value: object) -> object:
        return value if isinstance(value, BaseModel) else parse_method(value)

    @field_validator("model", "data", "optimizer", mode="before")
    @classmethod
    def _named_part(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _collective_fits(self) -> Experiment:
        if self.method.collective == "star" and self.collective == "hierarchical":
            raise FieldError(
                "collective",
                f"{self.collective!r} is not possible with method {self.method.name!r}, whose "
                "workers talk to the coordinator only; choose from ring (the default), star, auto",
            )
        if self.ring_order is None:
            return self
        if "star" in (self.collective, self.method.collective):
            raise FieldError("ring_order", "a star has no ring; remove it or choose another one")
        islands = [island.name for island in self.cluster.islands]
        try:
            must_name_each_island_once(self.ring_order, islands)
        except InputError as error:
            raise FieldError("ring_order", str(error).removeprefix("ring_order: ")) from None
        return self

    @model_validator(mode="after")
    def _scale_is_read(self) -> Experiment:
        if self.time_scale is not None and self.clock != "wall":
            raise FieldError(
                "time_scale",
                f"{self.time_scale} is read by nobody on the {self.clock} clock; choose clock wall",
            )
        return self

    @model_validator(mode="after")
    def _faults_fit(self) -> Experiment:
        islands = [island.name for island in self.cluster.islands for _ in range(island.workers)]
        links = self.cluster.topology().links
        check_faults(self.faults, self.policy, self.replicas, islands, links)
        check_method(self.faults, self.policy, self.method)
        self._members_fit()
        if self.detect is not None and not any(fault.kind == "crash" for fault in self.faults):
            raise FieldError("detect", "is read by nobody without a crash among the faults")
        return self

    def _members_fit(self) -> None:
        """Members that change by step need rounds that wait for all of them."""
        moves = [n for n, fault in enumerate(self.faults) if fault.kind in ("leave", "join")]
        if not (moves or self.replicas):
            return
        why = ""
        if any(fault.kind == "crash" for fault in self.faults):
            why = "a crash"
        elif self.policy.timed:
            why = "a quorum or a deadline"
        elif self.method.timed:
            why = f"method {self.method.name!r}, which closes its rounds by the clock"
        if why:
            field = f"faults.{moves[0]}" if moves else "replicas"
            raise FieldError(field, f"workers cannot come and go by step beside {why}")

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
        changed: dict[str, Any] = {"data": data, "optimizer": optimizer, "warm_start": start}
        if self.clock == "wall":
            changed["time_scale"] = _or(self.time_scale, 1.0)
        if any(fault.kind == "crash" for fault in self.faults):
            changed["detect"] = _or(self.detect, 1.0)
        return self.model_copy(update=changed)


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
        values["cluster"] = read_cluster(values["cluster"], folder)
    else:
        values["cluster"] = with_trace_files(values["cluster"], folder)
    for key in _BY_NAME:
        values[key] = _as_mapping(values.get(key))
    options = dict(options or {})
    more = options.pop("faults", None)
    if isinstance(more, list | tuple) and more:  # in addition to those of the file
        values["faults"] = [*(values.get("faults") or ()), *more]
    for key, value in options.items():
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
        values[key] = read_cluster(value, Path())
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
