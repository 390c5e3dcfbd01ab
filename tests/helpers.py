"""What the tests of training share: one way to run an experiment, small models, and test methods.

Nothing here needs Ray. The models are user models (``helpers:build_…``), the methods user methods
(``helpers:Fragments``), so that every run also goes the way that a user's own code goes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from islands.compression import Payload, Update, decode, encode
from islands.config import Experiment
from islands.coordinator import Coordinator
from islands.job import Job, prepare
from islands.layout import Layout, Stream
from islands.local import LocalWorkers
from islands.methods import (
    Arrival,
    Context,
    Delayed,
    Dense,
    DiLoCo,
    EagerDiLoCo,
    Shared,
    Sparta,
    WorkerState,
    dense_update,
    mean_of,
)
from islands.models import build_model
from islands.protocols import Network, Workers
from islands.replica import Replica
from islands.results import SCHEMAS, read_table

#: A text that does not change with the version of Python, about 2,300 characters.
PROSE = str(Path(__file__).parent / "data" / "prose.txt")
#: Settings under which a run is a textbook algorithm: no schedule, no decay, no clipping.
PLAIN = {"schedule": "constant", "warmup": 0, "weight_decay": 0.0, "clip": None}
SIX_CHARACTERS = {
    "name": PROSE,
    "batch": 2,
    "window": 6,
    "tokenizer": "characters",
    "vocab_size": 16,
}


# ------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """What a run left behind, read back from its folder, and its replicas as they ended."""

    summary: dict[str, Any]
    tables: dict[str, pa.Table]
    parameters: dict[str, Tensor]
    replicas: list[Replica]
    clocks: Sequence[tuple[float, float, float]]
    error: BaseException | None = None

    def rows(self, table: str, *columns: str) -> list[Any]:
        """A table's rows as tuples of the given columns; plain values if there is only one."""
        picked = [self.tables[table].column(name).to_pylist() for name in columns]
        return picked[0] if len(columns) == 1 else list(zip(*picked, strict=True))


def cluster(
    workers: Sequence[int] = (2, 2),
    step_s: Sequence[float] = (0.1, 0.1),
    bandwidth: str = "1 Gbit/s",
    delay: str = "65 ms",
    lan: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Islands ``a``, ``b``, … of so many workers, each linked with the next."""
    names = [chr(ord("a") + n) for n in range(len(workers))]
    return {
        "name": "test",
        "islands": [
            {"name": name, "workers": count, "step_time": f"{seconds} s", "lan": dict(lan or {})}
            for name, count, seconds in zip(names, workers, step_s, strict=True)
        ],
        "links": [
            {"name": f"{x}{y}", "between": [x, y], "bandwidth": bandwidth, "delay": delay}
            for x, y in pairwise(names)
        ],
    }


#: No network: only computing takes time.
INSTANT = {
    "bandwidth": "unlimited",
    "delay": "0 s",
    "lan": {"bandwidth": "unlimited", "delay": "0 s"},
}


def experiment(model: str | Mapping[str, Any] = "decoder", **parts: Any) -> Experiment:
    """An experiment of 12 steps on ``PROSE``, which user models read in small windows."""
    name = model if isinstance(model, str) else model["name"]
    small = {"data": SIX_CHARACTERS} if ":" in name else {"data": {"name": PROSE}}
    defaults = {"cluster": cluster(), "steps": 12, "eval": {"every": 4, "windows": 8}, **small}
    return Experiment.parse({**defaults, "model": model, **parts})


def train(
    what: Experiment | Job,
    *,
    shuffle: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    per_transfer: bool = False,
    network: Network | None = None,
    spy: Callable[[Workers], Workers] = lambda workers: workers,
) -> Run:
    """Run in this process; an error that ends the run is kept in ``Run.error``.

    ``shuffle`` seeds the order in which the host's answers come. ``network`` stands in for the
    job's own, and what ``spy`` makes of the workers for them.
    """
    job = what if isinstance(what, Job) else prepare(what, per_transfer=per_transfer)
    replicas = [Replica(job.replica(w), job.corpus.train) for w in range(job.workers)]
    error: BaseException | None = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        coordinator = Coordinator(job, folder)
        order = None if shuffle is None else Random(shuffle)
        try:
            workers = spy(LocalWorkers(replicas, order))
            coordinator.run(workers, network or job.emulation().network(), stop)
        except BaseException as raised:
            error = raised
        summary = _read_summary(folder, error)
        tables = {name: read_table(folder, name) for name in [*SCHEMAS, "trace"]}
        parameters = load_file(folder / "model.safetensors")
    return Run(summary, tables, parameters, replicas, coordinator.recorder.clocks, error)


def _read_summary(folder: Path, error: BaseException | None) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.exists():
        raise AssertionError("the run left no summary") from error
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def assert_identical(one: Run, other: Run) -> None:
    """Equal tables and traces row for row, summaries but for the wall clock."""
    for name in [*SCHEMAS, "trace"]:
        assert one.tables[name].equals(other.tables[name]), f"table {name} differs"
    hosts = ("wall_s", "pace")
    assert {k: v for k, v in one.summary.items() if k not in hosts} == {
        k: v for k, v in other.summary.items() if k not in hosts
    }


def by_worker(run: Run) -> list[dict[str, Any]]:
    """The trace as rows, each worker's in its own order, one worker after the other."""
    return sorted(run.tables["trace"].to_pylist(), key=lambda row: row["worker"])


def initial(job: Job) -> dict[str, Tensor]:
    """The initial parameters of a float64 model whose tensors are all non-empty, by name."""
    with torch.device("meta"):
        shapes = build_model(job.experiment.model.name, job.experiment.model.settings)
    return {
        name: torch.from_numpy(np.array(job.initial[name]).view(np.float64)).view(p.shape).clone()
        for name, p in shapes.named_parameters()
    }


def batch_of(job: Job, worker: int, index: int) -> Tensor:
    """Batch number ``index`` of a worker: (batch, window + 1)."""
    return torch.from_numpy(job.replica(worker).batches(job.corpus.train).draw(index))


# ----------------------------------------------------------------------------------------- models


class Bigram(nn.Module):
    """Embedding, a hidden layer, logits; ``tie`` shares the embedding with the head."""

    def __init__(
        self, vocab_size: int, width: int, dtype: torch.dtype, tie: bool, drop: float
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab_size, width, dtype=dtype)
        self.hidden = nn.Linear(width, width, dtype=dtype)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(width, vocab_size, bias=False, dtype=dtype)
        if tie:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(torch.tanh(self.hidden(self.emb(tokens)))))
        return logits


def build_float64(vocab_size: int = 16, width: int = 4) -> nn.Module:
    """204 or so float64 parameters: for identities that must hold to 1e-12."""
    return Bigram(vocab_size, width, torch.float64, tie=False, drop=0.0)


def build_tied(vocab_size: int = 16, width: int = 4) -> nn.Module:
    """One tensor under two names."""
    return Bigram(vocab_size, width, torch.float32, tie=True, drop=0.0)


def build_dropout(vocab_size: int = 16, width: int = 4) -> nn.Module:
    """Draws random numbers in every forward pass."""
    return Bigram(vocab_size, width, torch.float32, tie=False, drop=0.5)


def build_bf16(vocab_size: int = 16, width: int = 4) -> nn.Module:
    """Parameters of a lower precision than their masters."""
    return Bigram(vocab_size, width, torch.bfloat16, tie=False, drop=0.0)


def build_frozen(vocab_size: int = 16, width: int = 4) -> nn.Module:
    """The embedding does not train."""
    model = Bigram(vocab_size, width, torch.float32, tie=False, drop=0.0)
    model.emb.weight.requires_grad_(False)
    return model


class Normed(nn.Module):
    """Batch normalisation over all positions: two float buffers and an integer one."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab_size, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.emb(tokens).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(hidden)
        return logits


def build_batchnorm(vocab_size: int = 16, width: int = 4) -> nn.Module:
    """A model with running statistics."""
    return Normed(vocab_size, width)


class Abc(nn.Module):
    """Three scalars a, b, c from 0 and the loss a + 100 b + 10,000 c, whatever the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(())) for _ in range(3))

    def loss(self, tokens: Tensor) -> Tensor:
        return self.a + 100 * self.b + 10_000 * self.c


def build_abc() -> nn.Module:
    """A model that can be followed by hand and has its own loss."""
    return Abc()


class Averages(nn.Module):
    """Its own loss ½ (w − mean token)²: a gradient that depends on the worker's data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def loss(self, tokens: Tensor) -> Tensor:
        return 0.5 * (self.w - tokens.double().mean()) ** 2


def build_averages() -> nn.Module:
    """One float64 parameter, a quadratic loss."""
    return Averages()


# ---------------------------------------------------------------------------------------- methods


class Fragments(DiLoCo):
    """DiLoCo over three fragments with first steps, periods and overlaps of their own.

    The tensors are dealt out one by one, so that no fragment is contiguous in the model. What a
    fragment did between sending and receiving is overwritten.
    """

    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        names = [t.name for t in layout.tensors]
        return (
            Stream(tuple(names[0::3]), period=4, first=2, overlap=1),
            Stream(tuple(names[1::3]), period=6, first=3, overlap=6),
            Stream(tuple(names[2::3]), period=5, first=5, overlap=0),
        )


class EachArrival(DiLoCo):
    """Asynchronous: every arrival closes a round, and counts 2^−staleness.

    Staleness is the number of commits between what the worker started from and now.
    """

    collective: ClassVar[Any] = "star"
    timed: ClassVar[bool] = True

    def close(self, arrivals: Sequence[Arrival], alive: int, now_s: float) -> bool:
        return True

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        (arrival,) = arrivals
        commits = shared.slots.get("commits", 0)
        part = shared.layout.fragments[fragment]
        pseudo_gradient = mean_of(arrivals, self.payload_dtype)
        shared.params[part] -= pseudo_gradient * 0.5 ** (commits - arrival.base)
        shared.slots["commits"] = commits + 1
        return dense_update(shared.params[part])


class EachArrivalLate(EachArrival):
    """The same, but workers go on for two steps before they need the answer."""

    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        names = tuple(t.name for t in layout.tensors)
        return (Stream(names, period=self.sync_every, first=self.sync_every, overlap=2),)


class Drift(DiLoCo):
    """No training: worker w moves every parameter by −(w + 1) per step."""

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        state.params -= state.worker + 1
        return float(state.step)


class DriftDelayed(Drift, Delayed):
    """One round late, by hand."""


class DriftEager(Drift, EagerDiLoCo):
    """One's own at once, by hand."""


class PoisonedEager(EagerDiLoCo):
    """Eager DiLoCo in which some (worker, step) send NaN."""

    poison: tuple[tuple[int, int], ...] = ()

    def write(
        self, state: WorkerState, fragment: int, pseudo_gradient: Tensor, ctx: Context
    ) -> Payload:
        payload = super().write(state, fragment, pseudo_gradient, ctx)
        return poisoned(payload, (state.worker, state.step) in self.poison)


class DriftFragments(Fragments, Drift):
    """Three fragments whose course can be followed by hand."""


class DriftEach(Drift, EachArrival):
    """Arrivals whose effect can be followed by hand. ``poison``: (worker, step) that send NaN."""

    poison: tuple[tuple[int, int], ...] = ()

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        return poisoned(
            super().send(state, fragment, ctx), (state.worker, state.step) in self.poison
        )


class PoisonedDense(Dense):
    """Dense in which some (worker, step) send NaN."""

    poison: tuple[tuple[int, int], ...] = ()

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        return poisoned(
            super().send(state, fragment, ctx), (state.worker, state.step) in self.poison
        )


class PoisonedDrift(Drift):
    """Drift in which some (worker, step) send NaN."""

    poison: tuple[tuple[int, int], ...] = ()

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        return poisoned(
            super().send(state, fragment, ctx), (state.worker, state.step) in self.poison
        )


def poisoned(payload: Payload, now: bool) -> Payload:
    """The payload with its first value NaN, if ``now``."""
    if not now:
        return payload
    values = decode(payload.values, payload.fmt).clone()
    values[0] = torch.nan
    return Payload(encode(values, payload.fmt), payload.fmt, payload.buffers)


class Failing(DiLoCo):
    """Raises on worker 2 in step 7 (from 0); ``interrupt``: Ctrl-C at that moment instead."""

    interrupt: bool = False

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        if (state.worker, state.step) == (2, 7):
            if self.interrupt:
                raise KeyboardInterrupt
            raise ArithmeticError("out of numbers")
        return super().local_step(state, batch, ctx)


class Dying(DiLoCo):
    """The process of worker 3 is gone in step 5 (from 0), as if the kernel had killed it."""

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        if (state.worker, state.step) == (3, 5):
            os._exit(1)
        return super().local_step(state, batch, ctx)


class Signalled(DiLoCo):
    """Sends its own process the signal of the environment variable, in step 9 of worker 1."""

    sync_every: int = 5

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        if (state.worker, state.step) == (1, 9):
            os.kill(os.getpid(), int(os.environ["ISLANDS_TEST_SIGNAL"]))
        return super().local_step(state, batch, ctx)


class Broken(DiLoCo):
    """Fails where ``place`` says."""

    sync_every: int = 4
    place: str

    def _fail_in(self, place: str) -> None:
        if self.place == place:
            raise ArithmeticError(f"no {place}\ntoday")

    def streams(self, layout: Layout) -> tuple[Stream, ...]:
        self._fail_in("streams")
        return super().streams(layout)

    def begin(self, state: WorkerState, ctx: Context) -> None:
        self._fail_in("begin")
        super().begin(state, ctx)

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Any:
        self._fail_in("send")
        return None if self.place == "no_payload" else super().send(state, fragment, ctx)

    def receive(self, state: WorkerState, fragment: int, update: Update, ctx: Context) -> None:
        self._fail_in("receive")
        super().receive(state, fragment, update, ctx)

    def begin_shared(self, shared: Shared) -> None:
        self._fail_in("begin_shared")
        super().begin_shared(shared)

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Any:
        self._fail_in("combine")
        return None if self.place == "no_update" else super().combine(shared, fragment, arrivals)


class NaNGradient(Sparta):
    """SPARTA in which worker 1's third gradient is not a number."""

    def local_step(self, state: WorkerState, batch: Any, ctx: Context) -> float:
        loss = ctx.gradient(state, batch)
        if (state.worker, state.step) == (1, 2):
            state.grad.fill_(float("nan"))
        ctx.optimize(state)
        return loss


class Impatient(DiLoCo):
    """Closes rounds at the first arrival without saying that time decides."""

    def close(self, arrivals: Sequence[Arrival], alive: int, now_s: float) -> bool:
        return bool(arrivals)
