"""What a study is: methods, learning rates and seeds over one experiment, and the runs that follow.

A method may come with faults, a policy, a schedule of replicas or data of its own, so that what
goes wrong can be an axis of the study too.

The seeds are paired, so a seed is the same initial model and the same data for every method and
rate. :mod:`islands.comparison` trains the runs and judges them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    PlainSerializer,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from islands.config import (
    DataConfig,
    Experiment,
    Index,
    Positive,
    build_experiment,
    load_experiment,
    parse_method,
)
from islands.errors import InputError
from islands.fault_checks import ReplicasField
from islands.fault_kinds import FaultsField
from islands.methods import METHODS, Method
from islands.policy import Policy, read_policy
from islands.results.folder import plain
from islands.settings import (
    FieldError,
    Part,
    override,
    read_yaml,
    shown,
    split_override,
    write_yaml,
)


def method_settings(text: str) -> dict[str, Any]:
    """``NAME:key=value,key=value`` as settings; a user's method is ``package.module:Class:key=…``.

    Values are YAML, and a comma separates settings only where a new ``key=`` follows it.
    """
    name, _, rest = text.partition(":")
    if name not in METHODS and "=" not in rest.partition(":")[0] and rest:
        attribute, _, rest = rest.partition(":")
        name = f"{name}:{attribute}"
    settings: dict[str, Any] = {"name": name}
    for part in filter(None, re.split(r",(?=\s*[\w.]+=)", rest)):
        override(settings, *split_override(part))
    return settings


def _given(part: BaseModel, path: str = "") -> Iterator[str]:
    """The settings that were given, but the name: ``sync_every=10``, ``outer.lr=0.4``."""
    for key in type(part).model_fields:
        value = getattr(part, key)
        if key not in part.model_fields_set or path + key == "name":
            continue
        if isinstance(value, BaseModel):
            yield from _given(value, f"{path}{key}.")
        else:
            yield f"{path}{key}={value}"


def _label(one: Contender) -> str:
    """The method's name and all settings that were given: ``diloco sync_every=10
    drop:probability=0.5``."""
    parts = [one.method.name, *_given(one.method)]
    parts += [f"{fault.kind}:{fault.settings()}".rstrip(":") for fault in one.faults]
    if one.policy is not None:
        written: Any = one.policy.model_dump(mode="json")
        written = {"policy": written} if isinstance(written, str) else written
        own = {"policy", *one.policy.model_fields_set}
        parts += [f"{key}={value}" for key, value in written.items() if key in own]
    if one.replicas:
        parts.append("replicas=" + ",".join(f"{step}:{count}" for step, count in one.replicas))
    if one.data is not None:
        parts += [one.data.name] if "name" in one.data.model_fields_set else []
        parts += _given(one.data)
    return " ".join(parts)


def _grid(values: object) -> object:
    """One learning rate is a grid of one."""
    return [values] if isinstance(values, int | float) else values


def _as_float(values: object) -> object:
    if not isinstance(values, list | tuple):
        return values
    return [float(v) if type(v) is int else v for v in values]


#: More seeds than anybody waits for.
MOST_SEEDS = 1000


def _distinct(field: str, values: Sequence[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise FieldError(field, f"{value!r} is given twice")
        seen.add(value)


def refuse_settings_of_a_method(overrides: Sequence[str]) -> None:
    """Raise InputError for a setting that no method here would read: each has its own."""
    for text in overrides:
        if text.split("=")[0].split(".")[0].strip() == "method":
            raise InputError(f"set: {text!r} belongs to a method; write --method NAME:key=value")


def _refuse_one_seed(overrides: Sequence[str]) -> None:
    for text in overrides:
        if text.split("=")[0].strip() == "seed":
            raise InputError(f"set: {text!r} would be one seed of a study; use --seeds")


def _named_data(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


#: Policy and data that a method may have of its own; of the data only what was given is written.
_OwnPolicy = Annotated[
    Policy | None, BeforeValidator(lambda value: None if value is None else read_policy(value))
]
_OwnData = Annotated[
    DataConfig | None,
    BeforeValidator(_named_data),
    PlainSerializer(lambda data: data and data.model_dump(mode="json", exclude_unset=True)),
]


class Contender(Part):
    """A method of a study: its settings, its name there, and the learning rates to choose from.

    ``lr`` None stands for the study's grid. ``faults`` come after those of the study's experiment;
    ``policy`` and ``replicas`` stand in place of the experiment's, and so does each setting of
    ``data`` that is given.
    """

    method: SerializeAsAny[Method]
    label: str = ""
    lr: tuple[Positive, ...] | None = None
    faults: FaultsField = ()
    policy: _OwnPolicy = None
    replicas: ReplicasField = ()
    data: _OwnData = None

    @field_validator("method", mode="before")
    @classmethod
    def _known_method(cls, value: object) -> object:
        if isinstance(value, BaseModel):
            return value
        try:
            return parse_method(method_settings(value) if isinstance(value, str) else value)
        except FieldError:
            raise
        except InputError as error:  # its place in the study goes in front
            raise InputError(str(error).removeprefix("method: ")) from None

    @field_validator("lr", mode="before")
    @classmethod
    def _one_rate(cls, value: object) -> object:
        return _as_float(_grid(value))

    @model_validator(mode="after")
    def _fits(self) -> Contender:
        if not self.label:
            object.__setattr__(self, "label", _label(self))
        _must_be_grid(self.lr)
        return self

    def on(self, base: Experiment) -> Experiment:
        """``base`` with the method and whatever it has of its own. Raises InputError if that does
        not fit."""
        values = {name: getattr(base, name) for name in Experiment.model_fields}
        values |= {"method": self.method, "faults": (*base.faults, *self.faults)}
        if self.policy is not None:
            values["policy"] = self.policy
        if self.replicas:
            values["replicas"] = self.replicas
        if self.data is not None:
            own = {key: getattr(self.data, key) for key in self.data.model_fields_set}
            values["data"] = base.data.model_copy(update=own)
        return Experiment.parse(values)


def _must_be_grid(rates: Sequence[float] | None) -> None:
    if rates is not None:
        if not rates:
            raise FieldError("lr", "[] is too short; give at least one learning rate")
        _distinct("lr", rates)


@dataclass(frozen=True)
class Planned:
    """One run of a study; ``experiment`` is resolved, ``place`` its folder within the study's."""

    method: str
    lr: float
    seed: int
    experiment: Experiment
    place: str

    @property
    def title(self) -> str:
        return f"{self.method}, lr {self.lr:g}, seed {self.seed}"


class Study(Part):
    """Methods, learning rates and seeds over one experiment (whose method and seed play no part).

    ``lr`` is the grid of the methods that have none of their own; None is the experiment's rate, or
    the method's default. ``target_loss`` None is that of ``experiment.eval``.
    """

    experiment: Experiment
    methods: tuple[Contender, ...]
    lr: tuple[Positive, ...] | None = None
    seeds: tuple[Index, ...] = (0,)
    target_loss: Positive | None = None

    @field_validator("methods", mode="before")
    @classmethod
    def _methods_by_name(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        return [v if isinstance(v, dict | Contender) else {"method": v} for v in value]

    @field_validator("lr", mode="before")
    @classmethod
    def _one_rate(cls, value: object) -> object:
        return _as_float(_grid(value))

    @field_validator("seeds", mode="before")
    @classmethod
    def _so_many_seeds(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            return value
        if type(value) is not int:
            raise InputError(f"{shown(value)} is neither a number of seeds nor a list of them")
        if value < 1:
            raise InputError(f"{value} is too small; a study has at least one seed")
        if value > MOST_SEEDS:
            raise InputError(f"{value} is too large; a study has at most {MOST_SEEDS} seeds")
        return tuple(range(value))

    @model_validator(mode="after")
    def _fits(self) -> Study:
        if not self.methods:
            raise FieldError("methods", "[] is too short; a study has at least one method")
        if not self.seeds:
            raise FieldError("seeds", "[] is too short; a study has at least one seed")
        _must_be_grid(self.lr)
        _distinct("seeds", self.seeds)
        _distinct("methods", [plain(c.label) for c in self.methods])
        return self

    @classmethod
    def load(
        cls,
        path: Path,
        overrides: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        **changes: object,
    ) -> Study:
        """A study file. ``overrides`` and ``options`` change its experiment (see
        ``load_experiment``), ``changes`` the study's own settings unless they are None."""
        refuse_settings_of_a_method(overrides)
        _refuse_one_seed(overrides)
        values = read_yaml(path)
        base = values.get("experiment") or {}
        if not isinstance(base, dict):
            raise InputError(f"experiment: {shown(base)} is not a mapping of settings")
        for key, instead in (("method", "methods"), ("seed", "seeds")):
            if key in base:
                raise InputError(f"experiment.{key}: a study has {instead!r} beside its experiment")
        values["experiment"] = build_experiment(base, path.parent, overrides, options)
        return cls.parse({**values, **{k: v for k, v in changes.items() if v is not None}})

    def dump_yaml(self) -> str:
        """The study as a file that reads back as the same study."""
        values = self.model_dump(mode="json", exclude={"experiment": {"method", "seed"}})
        return write_yaml(values)

    @property
    def target(self) -> float | None:
        """The validation loss that runs are to reach, if one was asked for."""
        return self.experiment.eval.target_loss if self.target_loss is None else self.target_loss

    def runs(self) -> list[Planned]:
        """Every run, method by method, rate by rate, seed by seed. Raises InputError."""
        planned = []
        for contender in self.methods:
            try:
                base = contender.on(self.experiment)
            except InputError as error:
                raise InputError(f"{contender.label}: {error}") from None
            for lr in contender.lr or self.lr or (self.experiment.optimizer.lr,):
                for seed in self.seeds:
                    optimizer = base.optimizer.model_copy(update={"lr": lr})
                    changes = {"optimizer": optimizer, "seed": seed}
                    experiment = base.model_copy(update=changes).resolved()
                    rate = experiment.optimizer.lr
                    assert rate is not None
                    place = f"{plain(contender.label)}/lr-{rate!r}/seed-{seed}"
                    planned.append(Planned(contender.label, rate, seed, experiment, place))
        return planned


def study_of(
    methods: Sequence[str],
    config: Path | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    **changes: object,
) -> Study:
    """A study of methods as the command line names them; see :meth:`Study.load` for the rest."""
    refuse_settings_of_a_method(overrides)
    _refuse_one_seed(overrides)
    for key in {"method", "seed"} & (read_yaml(config).keys() if config else set()):
        raise InputError(f"config: {config} sets {key!r}, which a study varies; leave it out")
    experiment = load_experiment(config, overrides, options)
    given = {k: v for k, v in changes.items() if v is not None}
    return Study.parse({"experiment": experiment, "methods": contenders(methods), **given})


def contenders(methods: Sequence[str]) -> list[Contender]:
    """Methods as the command line names them, each under a label of its own.

    Raises InputError that names the method's place and what is wrong with it."""
    found = [Contender.parse({"method": text}, f"methods.{n}") for n, text in enumerate(methods)]
    _distinct("methods", [plain(one.label) for one in found])
    return found
