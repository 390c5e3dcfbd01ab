"""Experiments: defaults, precedence, writing and reading back, and one-line messages."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from islands.config import (
    Cluster,
    DataConfig,
    Experiment,
    ModelConfig,
    cluster_names,
    load_experiment,
)
from islands.errors import InputError
from islands.methods.base import Collective, Method
from islands.settings import parse_yaml, write_yaml


def load(*overrides: str, config: Path | None = None, **options: object) -> Experiment:
    return load_experiment(config, overrides, options)


def problem(*overrides: str, config: Path | None = None, **options: object) -> str:
    """The message with which this input is refused."""
    with pytest.raises(InputError) as caught:
        load(*overrides, config=config, **options).resolved()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file to write an experiment into."""
    return tmp_path / "experiment.yaml"


# ---------------------------------------------------------------------------------------- defaults


def test_defaults_are_the_main_job() -> None:
    """DiLoCo on two islands: decoder, python-docs, 4 windows of 16, AdamW, 1,000 steps, seed 0."""
    run = Experiment().resolved()
    assert run.cluster == Cluster.load("two_islands")
    assert run.method.model_dump() == {
        "name": "diloco",
        "payload_dtype": "bf16",
        "sync_every": 50,
        "weights": "uniform",
        "prune": 0.0,
        "outer": {"name": "nesterov", "lr": 0.7, "momentum": 0.9},
    }
    assert (run.model.name, run.model.settings) == ("decoder", {})
    assert run.data.model_dump() == {
        "name": "python-docs",
        "column": None,
        "batch": 4,
        "window": 16,
        "shards": "iid",
        "tokenizer": "characters",
        "vocab_size": 64,
    }
    assert run.optimizer.model_dump() == {
        "name": "adamw",
        "lr": 1e-2,
        "warmup": 100,
        "schedule": "cosine",
        "weight_decay": 0.1,
        "clip": 1.0,
        "accumulate": 1,
    }
    assert run.eval.model_dump() == {"every": 100, "windows": 64, "target_loss": None}
    assert (run.steps, run.seed, run.device, run.gpus_per_worker) == (1000, 0, "auto", None)
    assert load() == Experiment()


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (99, 9), (2000, 200), (50_000, 1000)])
def test_warmup_is_a_tenth_of_the_steps_up_to_a_thousand(steps: int, warmup: int) -> None:
    """The default warm-up is the smaller of 1,000 steps and 10 % of them."""
    assert Experiment(steps=steps).resolved().optimizer.warmup == warmup


def test_given_values_are_not_replaced_by_defaults() -> None:
    """Resolving only fills what is null."""
    run = load("data.window=8", "optimizer.lr=1e-4", "optimizer.warmup=0", "data.vocab_size=32")
    run = run.resolved()
    assert (run.data.window, run.data.vocab_size) == (8, 32)
    assert (run.optimizer.lr, run.optimizer.warmup) == (1e-4, 0)


# ------------------------------------------------------------------------------ writing and reading


@pytest.mark.parametrize("method", ["diloco", "dense", "local_sgd"])
@pytest.mark.parametrize("cluster", cluster_names())
def test_a_resolved_experiment_reads_back_equal(method: str, cluster: str, config: Path) -> None:
    """Writing as YAML and loading gives the same object, and resolving is idempotent."""
    run = load("optimizer.clip=null", method=method, cluster=cluster, steps=7, seed=3).resolved()
    config.write_text(run.dump_yaml(), encoding="utf-8")
    assert Experiment.load(config) == run
    assert Experiment.load(config).resolved() == run


def test_the_written_experiment_is_readable_by_people() -> None:
    """Quantities with units, the cluster in full, the method with all of its settings."""
    text = Experiment().resolved().dump_yaml()
    for line in ("bandwidth: 1 Gbit/s", "delay: 65 ms", "step_time: 100 ms", "sync_every: 50"):
        assert line in text


def test_experiments_are_frozen_and_picklable() -> None:
    """A run's recipe cannot change under it, and travels to actors whole."""
    run = Experiment().resolved()
    with pytest.raises(ValidationError):
        run.steps = 5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(run)) == run


def test_parts_may_be_given_by_name_alone() -> None:
    """cluster, method, model, data and optimizer accept a string, in Python as in YAML."""
    run = Experiment(
        cluster="laptop", method="dense", model="gpt-1m", data="python-docs", optimizer="sgd"
    )
    assert run == load(
        "optimizer=sgd", cluster="laptop", method="dense", model="gpt-1m", data="python-docs"
    )
    assert run.optimizer.name == "sgd"


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(max_size=8), scalars | st.lists(scalars, max_size=3), max_size=4))
@settings(max_examples=150, deadline=None)
def test_whatever_is_written_as_yaml_reads_back(values: dict[str, object]) -> None:
    """Text that looks like a number, a date, a boolean or a key stays text."""
    assert parse_yaml(write_yaml(values), "values") == values


def test_yaml_means_what_people_expect() -> None:
    """1e-3 is a number, no and on are words, 010 is ten, a date is text."""
    text = "{a: 1e-3, b: no, c: on, d: 010, e: 2024-01-01, f: 1:30, g: true, h: ~, i: .5}"
    assert parse_yaml(text, "text") == {
        "a": 0.001,
        "b": "no",
        "c": "on",
        "d": 10,
        "e": "2024-01-01",
        "f": "1:30",
        "g": True,
        "h": None,
        "i": 0.5,
    }


# -------------------------------------------------------------------------------------- precedence


def test_later_sources_win(config: Path) -> None:
    """Defaults, then the file, then options, then overrides."""
    config.write_text("steps: 10\nseed: 1\ndata: {batch: 2}\n", encoding="utf-8")
    run = load("seed=3", config=config, seed=2, steps=None)
    assert (run.steps, run.seed, run.data.batch, run.data.name) == (10, 3, 2, "python-docs")
    assert load(config=config, steps=20).steps == 20


def test_another_method_drops_the_files_settings_and_the_same_one_keeps_them(config: Path) -> None:
    """--method dense must not inherit DiLoCo's sync_every; --method diloco keeps the file's."""
    config.write_text("method: {name: diloco, sync_every: 7}\n", encoding="utf-8")
    assert load(config=config, method="diloco").method.model_dump()["sync_every"] == 7
    assert load(config=config, method="dense") == load(method="dense")
    assert load("method=dense", config=config) == load(method="dense")
    assert load("method.sync_every=9", config=config, method="local_sgd").method.model_dump() == {
        **load(method="local_sgd").method.model_dump(),
        "sync_every": 9,
    }


def test_another_model_drops_the_files_settings(config: Path) -> None:
    """A model's settings mean nothing to another model."""
    config.write_text("model: {name: gpt, layers: 3}\n", encoding="utf-8")
    assert load(config=config).model.settings == {"layers": 3}
    assert load(config=config, model="decoder").model.settings == {}


def test_another_corpus_keeps_batch_and_window(config: Path) -> None:
    """batch and window do not belong to the corpus."""
    config.write_text("data: {name: a.txt, batch: 2, window: 8}\n", encoding="utf-8")
    data = load(config=config, data="python-docs").data
    assert data == DataConfig(name="python-docs", batch=2, window=8)


def test_a_cluster_path_in_a_file_is_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with an experiment and its cluster can be moved; options start at the cwd."""
    folder = tmp_path / "study"
    folder.mkdir()
    cluster = "name: mine\nislands: [{name: a, workers: 3}]\n"
    (folder / "mine.yaml").write_text(cluster, encoding="utf-8")
    (folder / "run.yaml").write_text("cluster: mine.yaml\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load(config=folder / "run.yaml").cluster.workers == 3
    assert load(cluster="study/mine.yaml").cluster.workers == 3
    assert problem(cluster="mine.yaml") == "mine.yaml: no such file"


def test_overrides_reach_lists_by_index_and_by_name() -> None:
    """cluster.links.0 and cluster.links.atlantic are the same link."""
    by_index = load("cluster.links.0.bandwidth=1 Mbit/s")
    assert by_index == load("cluster.links.atlantic.bandwidth=1 Mbit/s")
    assert by_index.cluster.links[0].bandwidth == 125_000.0
    run = load("cluster.islands.oregon.lan.delay=1 ms", "cluster=laptop", "cluster.name=mine")
    assert (run.cluster.name, run.cluster.islands[0].name) == ("mine", "desk")


def test_overrides_create_what_the_defaults_leave_out() -> None:
    """Parts that neither file nor defaults mention can be set, and values are read as YAML."""
    run = load(
        "cluster.islands.dublin.step_time=null",
        "cluster.islands.dublin.flops_per_second=1e12",
        "eval={every: 0, windows: 3}",
        "method.outer.name=adam",
        "data.name=a=b.txt",
    )
    assert run.cluster.islands[0].flops_per_second == 1e12
    assert (run.eval.every, run.eval.windows) == (0, 3)
    assert run.method.model_dump()["outer"]["name"] == "adam"
    assert run.data.name == "a=b.txt"


# ---------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "steps: 0 is too small; it must be at least 1"),
        ("steps=-1", "steps: -1 is too small; it must be at least 1"),
        ("steps=1.5", "steps: 1.5 is not a whole number"),
        ("steps=true", "steps: True is not a whole number"),
        ("seed=-1", "seed: -1 is too small; it must be at least 0"),
        ("stepz=1", "stepz: unknown key 'stepz'; did you mean 'steps'?"),
        ("device=gpu", "device: 'gpu' is not one of auto, cpu, cuda; did you mean 'cpu'?"),
        ("gpus_per_worker=-1", "gpus_per_worker: -1 is too small"),
        ("data.batch=0", "data.batch: 0 is too small; it must be at least 1"),
        ("data.window=17", "data.window: 17 is more than the model's context of 16"),
        ("data.vocab_size=65", "data.vocab_size: 65 is more than the model's vocabulary of 64"),
        ("data.shards=all", "data.shards: 'all' is not one of iid, contiguous, clustered"),
        ("optimizer.lr=0", "optimizer.lr: 0 is too small; it must be more than 0"),
        ("optimizer.lr=.nan", "optimizer.lr: nan is not a finite number"),
        ("optimizer=adam", "optimizer.name: 'adam' is not one of adamw, sgd, muon; did you mean"),
        ("optimizer.clip=-1", "optimizer.clip: -1 is too small"),
        ("eval.windows=0", "eval.windows: 0 is too small"),
        ("method=dilco", "method: unknown method 'dilco'; did you mean 'diloco'?"),
        ("method=3", "method: 3 is neither a method's name nor a mapping"),
        ("method.name=3", "method.name: 3 is not a method's name"),
        ("method.sync_evry=3", "method.sync_evry: unknown key 'sync_evry'; did you mean 'sync_ev"),
        ("method.sync_every=0", "method.sync_every: 0 is too small; it must be at least 1"),
        ("method.outer.momentun=0", "method.outer.momentun: unknown key 'momentun'; did you mean"),
        ("model=decodr", "model"),
        ("model.widht=3", "model"),
        ("collective=rink", "collective: 'rink' is not one of ring, star, hierarchical, auto; did"),
        ("ring_order=[dublin, mars]", "ring_order: no island 'mars'; choose from dublin, oregon"),
        ("ring_order=[dublin, oregn]", "ring_order: no island 'oregn'; did you mean 'oregon'?"),
        ("ring_order=[dublin, dublin]", "ring_order: 'dublin' is named twice; name each island o"),
        ("ring_order=[oregon]", "ring_order: 'dublin' is missing; name each island once"),
        ("ring_order=dublin", "ring_order: 'dublin' is not a list"),
        ("cluster.links.0.bandwidth.fil=x", "cluster.links.0.bandwidth: '1 Gbit/s' has no parts"),
        (
            "cluster.links.0.bandwidth={fil: x}",
            "cluster.links.0.bandwidth.fil: unknown key 'fil'; ",
        ),
        ("cluster.links.0.reverse.queue=fair", "cluster.links.0.reverse.queue: unknown key 'queue"),
        ("cluster.links.0.background.load=.5", "cluster.links.0.background.size: is missing"),
        ("cluster.islands.0.uplnk=1", "cluster.islands.0.uplnk: unknown key 'uplnk'; did you mean"),
        ("cluster=two_ilands", "cluster: no shipped cluster and no file named 'two_ilands'; did"),
        ("cluster=3", "cluster: 3 is not a mapping"),
        ("cluster.links.0.bandwith=1 B/s", "cluster.links.0.bandwith: unknown key 'bandwith'; d"),
        ("cluster.links.atlantik.delay=1 s", "cluster.links: no item named 'atlantik'; did you"),
        ("cluster.links.1.delay=1 s", "cluster.links: no item 1; there are 1, counted from 0"),
        ("cluster.name.x=1", "cluster.name: 'two_islands' has no parts"),
        ("steps", "'steps' is not KEY.PATH=VALUE, for example"),
        ("a..b=1", "'a..b=1' is not KEY.PATH=VALUE, for example"),
        ("=1", "'=1' is not KEY.PATH=VALUE, for example"),
        ("steps=", "steps: has no value (write null for none)"),
        ("steps=[1", "steps, line 1, column 3: "),
        ("steps={a: 1, a: 2}", "steps, line 1, column 8: the key 'a' is given twice"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(override: str, message: str) -> None:
    """The message starts with the field, then the value and the nearest valid choice."""
    assert problem(override).startswith(message)


class StarMethod(Method):
    """A method whose workers talk to the coordinator only."""

    name: str = "star-method"
    collective: ClassVar[Collective] = "star"


@pytest.mark.parametrize("collective", ["ring", "star", "auto"])
def test_a_star_method_is_a_star_anyway(collective: str) -> None:
    """The default, star itself, and leaving the choice are accepted."""
    run = Experiment(method=StarMethod(name="s"), collective=collective)
    assert run.collective == collective


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collective": "hierarchical"}, "collective: 'hierarchical' is not possible with method"),
        ({"ring_order": ["dublin", "oregon"]}, "ring_order: a star has no ring; remove it"),
    ],
)
def test_what_a_star_method_cannot_do_is_refused(settings: dict[str, object], message: str) -> None:
    """No other collective, and no order of a ring that nothing reads."""
    with pytest.raises(InputError) as caught:
        Experiment(method=StarMethod(name="s"), **settings)
    assert str(caught.value).startswith(message)


def test_the_ring_order_of_a_star_is_refused() -> None:
    """collective: star does not read it."""
    text = problem("collective=star", "ring_order=[dublin, oregon]")
    assert text.startswith("ring_order: a star has no ring")


def test_collective_and_ring_order_are_kept() -> None:
    """As given; by default a ring whose order is chosen."""
    assert (Experiment().collective, Experiment().ring_order) == ("ring", None)
    run = load("collective=hierarchical", "ring_order=[oregon, dublin]")
    assert (run.collective, run.ring_order) == ("hierarchical", ("oregon", "dublin"))


def test_a_trace_is_found_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster file, and in an experiment with its cluster inside; and with --set from the
    current folder. The resolved experiment has the points and needs no file."""
    (tmp_path / "study" / "traces").mkdir(parents=True)
    (tmp_path / "study" / "traces" / "t.csv").write_text("time,value\n0 s,1 Mbit/s\n9 s,2 Mbit/s\n")
    islands = "islands: [{name: a, workers: 1}, {name: b, workers: 1}]\n"
    rate = "{file: traces/t.csv, repeat: true}"
    link = f"links: [{{name: w, between: [a, b], bandwidth: {rate}, delay: 0 s}}]\n"
    (tmp_path / "study" / "c.yaml").write_text(f"name: c\n{islands}{link}")
    inside = "".join(f"  {line}\n" for line in f"name: c\n{islands}{link}".splitlines())
    (tmp_path / "study" / "named.yaml").write_text("cluster: c.yaml\n")
    (tmp_path / "study" / "inside.yaml").write_text(f"cluster:\n{inside}")
    monkeypatch.chdir(tmp_path)
    named = load(config=Path("study/named.yaml"))
    assert named == load(config=Path("study/inside.yaml")) == load(cluster="study/c.yaml")
    assert named.cluster.links[0].bandwidth.points == ((0.0, 125e3), (9.0, 250e3))
    monkeypatch.chdir(tmp_path / "study" / "traces")
    setting = "cluster.links.0.bandwidth={file: t.csv, repeat: true}"
    assert load(setting).cluster.links[0].bandwidth == named.cluster.links[0].bandwidth
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "run.yaml").write_text(named.resolved().dump_yaml())
    assert load(config=tmp_path / "away" / "run.yaml") == named.resolved()


def test_several_problems_are_counted() -> None:
    """The first is shown, the rest are numbered, so that nobody fixes one and thinks it done."""
    text = problem("steps=0", "seed=-1", "optimizer.lr=-1")
    assert text.endswith("(and 2 more problems)")


def test_a_wrong_keyword_in_python_gets_the_same_message() -> None:
    """Building the objects by hand raises the same one line as loading a file."""
    with pytest.raises(InputError, match="stepz: unknown key 'stepz'; did you mean 'steps'"):
        Experiment(stepz=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"cluster\.islands\.0\.workers: 0 is too small"):
        Experiment(cluster={"name": "x", "islands": [{"name": "a", "workers": 0}]})


def test_a_models_settings_are_checked_where_they_are_given() -> None:
    """An unknown setting of a model names the nearest one."""
    with pytest.raises(InputError, match=r"^model\.layres: .*'layers'"):
        ModelConfig(name="gpt", layres=3)
    with pytest.raises(InputError, match=r"'gtp'.*'gpt'"):
        ModelConfig(name="gtp")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- 1\n- 2\n", "expected 'key: value' settings, not [1, 2]"),
        (b"steps\n", "expected 'key: value' settings, not 'steps'"),
        (b"steps: 1\nsteps: 2\n", ", line 2, column 1: the key 'steps' is given twice"),
        (b"steps: [1\nseed: 3\n", ", line 2, column "),
        (b"steps: !!python/object:os.system 1\n", "could not determine a constructor"),
        (b"steps: !!bool x\n", "not readable as YAML"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"[" * 3000, ""),
    ],
)
def test_an_unusable_file_is_named(content: bytes, message: str, config: Path) -> None:
    """Malformed files are one line with the file's name, and the line where there is one."""
    config.write_bytes(content)
    text = problem(config=config)
    assert text.startswith(str(config))
    assert message in text


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    """Neither is a traceback."""
    assert problem(config=tmp_path / "no.yaml") == f"{tmp_path / 'no.yaml'}: no such file"
    assert problem(config=tmp_path) == f"{tmp_path}: is a folder, not a YAML file"
