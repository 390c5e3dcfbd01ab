"""Models: exact shapes and counts, forward against a plain restatement, settings, user models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from islands.errors import InputError
from islands.models import (
    MODEL_NAMES,
    build_model,
    check_model,
    model_defaults,
    model_settings,
    window_loss,
)


def count(name: str, **settings: object) -> int:
    with torch.device("meta"):
        model = build_model(name, settings)
    return sum(parameter.numel() for parameter in model.parameters())


def tokens(batch: int = 4, window: int = 16, vocab_size: int = 64) -> Tensor:
    return torch.randint(0, vocab_size, (batch, window + 1))


@pytest.mark.parametrize(
    ("name", "layers", "width", "attention", "context", "vocabulary", "head_matrices", "gains"),
    [
        ("decoder", 1, 16, 16, 16, 64, 2, 0),
        ("gpt-1m", 4, 128, 128, 128, 256, 1, 0),
        ("gpt-15m", 8, 384, 384, 256, 4096, 1, 0),
        ("chinchilla-60m", 3, 896, 16 * 64, 1024, 32_000, 1, 1),
        ("chinchilla-150m", 12, 896, 16 * 64, 1024, 32_000, 1, 1),
        ("chinchilla-400m", 12, 1536, 12 * 128, 1024, 32_000, 1, 1),
    ],
)
def test_parameter_count_follows_the_shape(
    name: str,
    layers: int,
    width: int,
    attention: int,
    context: int,
    vocabulary: int,
    head_matrices: int,
    gains: int,
) -> None:
    """Embeddings and head + positions + per block 4 attention and 8 MLP matrices + norm gains."""
    expected = (
        head_matrices * vocabulary * width
        + context * width
        + layers * (4 * width * attention + 8 * width * width)
        + gains * (2 * layers + 1) * width
    )
    assert count(name) == expected


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("decoder", 5_376),
        ("gpt-1m", 835_584),
        ("gpt-15m", 15_826_944),
        ("chinchilla-60m", 59_873_408),
        ("chinchilla-150m", 150_722_432),
        ("chinchilla-400m", 390_501_888),
    ],
)
def test_stated_parameter_counts(name: str, parameters: int) -> None:
    """The counts that the documentation states."""
    assert count(name) == parameters


def test_decoder_tensors_are_multiples_of_64() -> None:
    """Chunks of 64 cut every tensor of the decoder without a rest."""
    assert all(p.numel() % 64 == 0 for p in build_model("decoder", {}).parameters())


def plain_gpt(
    weights: dict[str, Tensor], ids: Tensor, layers: int, heads: int, relu: bool
) -> Tensor:
    """A pre-norm GPT of one sequence written with explicit matrices; ids: (window,)."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * weights.get(name + "gain", torch.tensor(1.0)) + weights.get(name + "offset", 0.0)

    def product(x: Tensor, name: str) -> Tensor:
        return x @ weights[name].T + weights.get(name + "_bias", 0.0)

    n = len(ids)
    x = weights["tokens"][ids] + weights["positions"][:n]
    for layer in range(layers):
        block = f"blocks.{layer}."
        query, key, value = product(norm(x, block + "attention_"), block + "qkv").chunk(3, -1)
        size = query.shape[1] // heads
        outputs = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            scores = query[:, own] @ key[:, own].T / size**0.5
            scores[torch.ones(n, n).triu(1) == 1] = -torch.inf
            outputs.append(scores.softmax(-1) @ value[:, own])
        x = x + product(torch.cat(outputs, -1), block + "out")
        hidden = product(norm(x, block + "mlp_"), block + "up")
        gelu = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        x = x + product(hidden.clamp(min=0) if relu else gelu, block + "down")
    return norm(x, "") @ weights.get("head", weights["tokens"]).T


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": 1, "heads": 1, "tie": False, "activation": "relu"},
        {"layers": 2, "heads": 4, "bias": True, "norm_parameters": True},
        {"layers": 2, "heads": 3, "head_size": 5, "norm_parameters": True, "tie": True},
    ],
)
@pytest.mark.parametrize("window", [1, 7, 12])
def test_forward_is_the_textbook_transformer(settings: dict[str, Any], window: int) -> None:
    """Logits equal an explicit restatement, for short and full windows and every option."""
    shape = {"width": 16, "context": 12, "vocab_size": 10, "init_std": 0.3, **settings}
    model = build_model("gpt", shape).double()
    for parameter in model.parameters():  # gains of one and offsets of zero would hide mistakes
        nn.init.normal_(parameter, 0.3, 0.3)
    ids = torch.randint(0, 10, (3, window))
    relu = settings.get("activation") == "relu"
    weights = dict(model.named_parameters())
    expected = [plain_gpt(weights, row, settings["layers"], settings["heads"], relu) for row in ids]
    torch.testing.assert_close(model(ids), torch.stack(expected))


def test_same_seed_same_model_and_residual_matrices_start_smaller() -> None:
    """Weights come from torch's RNG: std 0.02, and 0.02 / sqrt(2 layers) into the residual."""
    torch.manual_seed(3)
    first = build_model("gpt-1m", {}).state_dict()
    torch.manual_seed(3)
    second = build_model("gpt-1m", {}).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert first["blocks.0.up"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["blocks.0.down"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)


def test_tied_head_is_one_parameter() -> None:
    """A tied head is listed, counted and stepped once."""
    model = build_model("gpt", {"layers": 1})
    assert model.head is model.tokens
    assert "head" not in dict(model.named_parameters())


def test_loss_is_mean_next_token_cross_entropy() -> None:
    """window_loss = − mean log softmax of each next token."""
    model, windows = build_model("decoder", {}), tokens()
    logs = model(windows[:, :-1]).log_softmax(-1)
    expected = -torch.stack(
        [logs[b, t, windows[b, t + 1]] for b in range(4) for t in range(16)]
    ).mean()
    torch.testing.assert_close(window_loss(model, windows), expected)


class OwnLoss(nn.Module):
    """A model that scores windows itself."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.shape = shape

    def loss(self, batch: Tensor) -> Tensor:
        return (self.weight * batch.float().mean()).expand(self.shape or (1,)).reshape(self.shape)


def test_own_loss_is_used_unless_it_is_a_part() -> None:
    """A method `loss` scores the whole window; a loss module kept as `loss` is left alone."""
    windows = tokens()
    assert window_loss(OwnLoss(), windows).item() == pytest.approx(windows.float().mean().item())
    model = build_model("decoder", {})
    expected = window_loss(model, windows)
    model.loss = nn.CrossEntropyLoss()
    assert torch.equal(window_loss(model, windows), expected)


def test_decoder_learns_with_its_default_learning_rate() -> None:
    """AdamW at the decoder's default rate learns a repeating sequence almost perfectly."""
    torch.manual_seed(0)
    model = build_model("decoder", {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=model_defaults("decoder", {}).lr)
    cycle = torch.arange(200) % 11
    starts = torch.randint(0, 150, (150, 4))
    for row in starts:
        optimizer.zero_grad()
        loss = window_loss(model, torch.stack([cycle[s : s + 17] for s in row]))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("decoder", {}, (16, 64, "characters", 1e-2)),
        ("gpt-1m", {}, (128, 256, "bytes", 3e-3)),
        ("gpt-15m", {}, (256, 4096, "characters", 1e-3)),
        ("gpt", {"context": 32, "vocab_size": 96}, (32, 96, "characters", 1e-3)),
        ("chinchilla-60m", {}, (1024, 32_000, "characters", 4e-4)),
        ("mine:build", {}, (64, 256, "bytes", 1e-3)),
        ("mine:build", {"context": 8, "vocab_size": 64}, (8, 64, "characters", 1e-3)),
    ],
)
def test_defaults(name: str, settings: dict[str, Any], expected: tuple[object, ...]) -> None:
    """Each model brings its window, vocabulary, tokenizer and learning rate."""
    found = model_defaults(name, settings)
    assert (found.context, found.vocab_size, found.tokenizer, found.lr) == expected


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", 1), ("width", 48), ("context", 9), ("vocab_size", 77), ("head_size", 3)],
)
def test_settings_change_a_preset(name: str, key: str, value: int) -> None:
    """What the user sets wins over the preset, and changes the model."""
    changed = model_settings(name, {key: value, "heads": 1})
    assert getattr(changed, key) == value
    original = model_settings(name, {"heads": 1})
    if original != changed:
        assert count(name, heads=1) != count(name, **{key: value, "heads": 1})


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("decodr", {}, ["model.name", "'decodr'", "'decoder'"]),
        ("gpt", {"layer": 2}, ["model.layer", "'layers'"]),
        ("gpt", {"layers": 0}, ["model.layers", "0", "greater than or equal to 1"]),
        ("gpt", {"layers": "2"}, ["model.layers", "'2'", "integer"]),
        ("gpt", {"vocab_size": -5}, ["model.vocab_size", "-5"]),
        ("gpt", {"init_std": float("nan")}, ["model.init_std", "nan"]),
        ("gpt", {"activation": "tanh"}, ["model.activation", "'tanh'", "'gelu' or 'relu'"]),
        ("gpt", {"heads": 5, "width": 128}, ["model.heads", "5", "128", "4 heads"]),
        ("gpt", {"layers": 0, "width": 0}, ["model.layers", "1 more"]),
    ],
)
def test_wrong_settings_are_refused_in_one_line(
    name: str, settings: dict[str, Any], parts: list[str]
) -> None:
    """The message names the field, the value and what would do."""
    with pytest.raises(InputError) as error:
        build_model(name, settings)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module beside the current folder, which is on no path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_islands_model.py").write_text(
        "from torch import nn\n"
        "def build(width=8):\n"
        "    return nn.Sequential(nn.Embedding(64, width), nn.Linear(width, 64))\n"
        "def broken():\n    raise RuntimeError('no\\nluck')\n"
        "def nothing():\n    return 3\n"
    )
    (tmp_path / "my_islands_bad_import.py").write_text("1 / 0\n")
    return tmp_path


@pytest.mark.usefixtures("user_module")
def test_user_model_is_built_with_its_settings() -> None:
    """Settings become keyword arguments; logits of any module that fits are enough."""
    model = build_model("my_islands_model:build", {"width": 4})
    assert model[0].weight.shape == (64, 4)
    assert check_model(model, tokens()) == ()
    assert window_loss(model, tokens()).shape == ()


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("my_islands_missing:build", {}, ["my_islands_missing", "ModuleNotFoundError"]),
        ("my_islands_bad_import:build", {}, ["my_islands_bad_import", "ZeroDivisionError"]),
        ("my_islands_model:biuld", {}, ["my_islands_model", "'biuld'", "'build'"]),
        ("my_islands_model:broken", {}, ["broken", "RuntimeError: no luck"]),
        ("my_islands_model:build", {"depth": 1}, ["my_islands_model:build", "depth"]),
        ("my_islands_model:nothing", {}, ["torch.nn.Module", "int"]),
        (":build", {}, ["':build'", "package.module:attribute"]),
        ("my_islands_model:", {}, ["package.module:attribute"]),
    ],
)
def test_user_model_failures_name_the_model(
    name: str, settings: dict[str, Any], parts: list[str]
) -> None:
    """Whatever a user's module does wrong is one line with the module and the cause."""
    with pytest.raises(InputError) as error:
        build_model(name, settings)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


class Stateful(nn.Module):
    """Counts its passes by replacing a buffer, normalises in place, draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen_part = nn.Dropout(0.5).eval()
        self.head = nn.Linear(8, 64)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        self.scratch += torch.rand(2)  # type: ignore[operator]
        with torch.no_grad():
            self.head.bias.add_(1.0)
        hidden = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.frozen_part(hidden))


def test_check_reports_changed_buffers_and_leaves_no_trace() -> None:
    """Names of persistent buffers that a pass changes; tensors, modes and RNG stay as they were."""
    model = Stateful()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scratch = model.scratch.clone()
    counter = model.passes
    windows = tokens()
    random = torch.get_rng_state()
    changed = check_model(model, windows)
    batch_norm = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(changed) == {"passes", *batch_norm}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.scratch, scratch)
    assert model.passes is counter
    assert (model.training, model.norm.training, model.frozen_part.training) == (True, False, False)
    assert torch.equal(torch.get_rng_state(), random)


class Returns(nn.Module):
    """A model that returns what it was told to."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.output = output

    def forward(self, _: Tensor) -> object:
        return self.output


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (Returns(torch.zeros(4, 16, 63)), ["(4, 16, 63)", "64 or more"]),
        (Returns(torch.zeros(4, 17, 64)), ["(4, 17, 64)", "(4, 16, 64 or more)"]),
        (Returns(torch.zeros(4, 64)), ["(4, 64)"]),
        (Returns((torch.zeros(4, 16, 64),)), ["tensor", "tuple"]),
        (OwnLoss(shape=(2,)), ["scalar", "(2,)"]),
        (Returns(torch.zeros(4, 16, 64)), ["logits have no gradient"]),
        (nn.Linear(16, 64), ["forward pass fails", "RuntimeError"]),
        (nn.Embedding(64, 64).requires_grad_(False), ["no parameters"]),
        (nn.LazyLinear(3), ["without shapes"]),
    ],
)
def test_check_refuses_models_that_do_not_fit(model: nn.Module, parts: list[str]) -> None:
    """A wrong shape, a failing pass or nothing to train is found before training."""
    with pytest.raises(InputError) as error:
        check_model(model, tokens(), vocab_size=64)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_window_beyond_the_context_is_refused() -> None:
    """The message gives both lengths."""
    with pytest.raises(InputError, match=r"17 tokens.*context of 16"):
        check_model(build_model("decoder", {}), tokens(window=17))
