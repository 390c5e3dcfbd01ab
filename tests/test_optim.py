"""Inner optimizers on the flat vector, and the learning rate's course."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import experiment, train

from islands import optim
from islands.errors import InputError
from islands.fragments import hidden_matrices
from islands.job import prepare
from islands.layout import Layout
from islands.models import build_model
from islands.optim import InnerOptimizer, LearningRate


def optimizer(
    name: str, start: list[float], *, lr: float = 0.1, decay: float = 0.0, clip: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, InnerOptimizer]:
    """Masters, their gradient, and an optimizer at a constant rate."""
    masters = torch.tensor(start, dtype=torch.float64)
    grad = torch.zeros_like(masters)
    rate = LearningRate(lr, 0, 100, "constant")
    return masters, grad, InnerOptimizer(name, masters, grad, rate, weight_decay=decay, clip=clip)


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    """Warm-up of 4 to 8.0: 2, 4, 6, 8 for the first four steps."""
    rate = LearningRate(8.0, 4, 12, "constant")
    assert [rate.at(step) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_falls_to_a_tenth() -> None:
    """Peak 1 after the warm-up, 0.55 half-way, 0.1 at the end, a quarter of the way cos(45°)."""
    rate = LearningRate(1.0, 4, 12, "cosine")
    assert rate.at(4) == pytest.approx(1.0)
    assert rate.at(6) == pytest.approx(0.1 + 0.9 * (0.5 + 0.5 * 0.5**0.5))
    assert rate.at(8) == pytest.approx(0.55)
    assert rate.at(12) == pytest.approx(0.1)
    assert rate.at(11) > rate.at(12)


def test_no_warm_up_starts_at_the_peak() -> None:
    """Warm-up 0: the first step is taken at the peak, and a run of one step works."""
    assert LearningRate(3.0, 0, 10, "cosine").at(0) == pytest.approx(3.0)
    assert LearningRate(3.0, 0, 1, "cosine").at(0) == pytest.approx(3.0)


def test_a_run_that_is_all_warm_up_never_divides_by_zero() -> None:
    """Warm-up as long as the run, or longer."""
    assert [LearningRate(1.0, 2, 2, "cosine").at(s) for s in (0, 1)] == [0.5, 1.0]
    assert LearningRate(1.0, 8, 2, "cosine").at(1) == 0.25


def test_sgd_steps_against_the_gradient() -> None:
    """w − lr (g + decay·w)."""
    masters, grad, inner = optimizer("sgd", [1.0, -2.0], lr=0.1, decay=0.5)
    grad.copy_(torch.tensor([3.0, 4.0]))
    inner.step(0)
    assert masters.tolist() == pytest.approx([1 - 0.1 * (3 + 0.5), -2 - 0.1 * (4 - 1.0)])


def test_adamw_is_the_textbook_formula() -> None:
    """Three steps of Loshchilov and Hutter's algorithm 2 with betas 0.9 and 0.95, eps 1e-8."""
    masters, grad, inner = optimizer("adamw", [1.0, -2.0], lr=0.1, decay=0.2)
    w, m, v = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for t, gradient in enumerate([(3.0, -4.0), (1.0, 0.0), (-2.0, 0.5)], start=1):
        grad.copy_(torch.tensor(gradient))
        inner.step(t - 1)
        for i, g in enumerate(gradient):
            w[i] -= 0.1 * 0.2 * w[i]
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            root = (v[i] / (1 - 0.95**t)) ** 0.5
            w[i] -= 0.1 * m[i] / (1 - 0.9**t) / (root + 1e-8)
        assert masters.tolist() == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize(("clip", "scale"), [(1.0, 0.2), (5.0, 1.0), (10.0, 1.0), (None, 1.0)])
def test_clip_bounds_the_global_norm(clip: float | None, scale: float) -> None:
    """A gradient (3, 4) of norm 5 is scaled to the bound, and left alone below it."""
    masters, grad, inner = optimizer("sgd", [0.0, 0.0], lr=1.0, clip=clip)
    grad.copy_(torch.tensor([3.0, 4.0]))
    inner.step(0)
    assert masters.tolist() == pytest.approx([-3 * scale, -4 * scale])


def test_the_rate_follows_the_given_step() -> None:
    """Step 1 of a warm-up of 4: half the peak, whatever was stepped before."""
    masters = torch.zeros(1)
    grad = torch.ones(1)
    rate = LearningRate(1.0, 4, 8, "constant")
    inner = InnerOptimizer("sgd", masters, grad, rate, weight_decay=0.0, clip=None)
    inner.step(1)
    assert masters.item() == -0.5


# --- Muon

SMALL = {"layers": 2, "heads": 1, "width": 6, "context": 8, "vocab_size": 16, "bias": True}


def test_muon_is_torchs_on_hidden_matrices_and_adamw_elsewhere() -> None:
    """Three steps of torch.optim.Muon (rates matched to AdamW's) on the matrices in blocks, and of
    torch.optim.AdamW on embeddings, norms and biases, from the same gradients: bit for bit, but for
    AdamW's last bit, which depends on where in a vector of the processor a value stands."""
    layout = Layout.of(build_model("gpt", {**SMALL, "norm_parameters": True}))
    draws = torch.Generator().manual_seed(3)
    masters = torch.randn(layout.numel, generator=draws)
    grad = torch.zeros_like(masters)
    rate = LearningRate(0.03, 2, 9, "cosine")
    apart = {t.name: masters[t.slice].view(t.shape).clone() for t in layout.tensors}
    inner = InnerOptimizer("muon", masters, grad, rate, weight_decay=0.1, clip=None, layout=layout)
    hidden = {t.name for t in hidden_matrices(layout)}
    assert len(hidden) == 8
    matrices = [p for n, p in apart.items() if n in hidden]
    rest = [p for n, p in apart.items() if n not in hidden]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(3):
        gradient = torch.randn(layout.numel, generator=draws)
        grad.copy_(gradient)
        inner.step(step)
        for t in layout.tensors:
            apart[t.name].grad = gradient[t.slice].view(t.shape).clone()
        for optimizer in (muon, adamw):
            optimizer.param_groups[0]["lr"] = rate.at(step)
            optimizer.step()
    for t in layout.tensors:
        found = masters[t.slice].view(t.shape)
        if t.name in hidden:
            assert torch.equal(found, apart[t.name]), t.name
        else:
            assert torch.allclose(found, apart[t.name], rtol=1e-6, atol=1e-7), t.name


def test_muon_trains_and_is_no_adamw() -> None:
    """MuLoCo is a setting: the loss falls, and the course is another one."""
    losses = {}
    for name in ("muon", "adamw"):
        method = {"name": "diloco", "sync_every": 5, "outer": {"lr": 0.7, "momentum": 0.5}}
        run = train(experiment(method=method, optimizer={"name": name, "lr": 0.01}, steps=60))
        assert run.error is None
        first, *_, losses[name] = run.rows("evals", "val_loss")
        assert losses[name] < first - 0.5
    assert losses["muon"] != losses["adamw"]


def test_muon_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the run, in one line."""
    monkeypatch.setattr(optim, "muon", None)
    with pytest.raises(InputError, match=r"^optimizer.name: 'muon' needs torch 2.9 .* 'adamw'$"):
        prepare(experiment(optimizer="muon"))


def test_optimizers_do_not_load_torchs_compiler() -> None:
    """It costs every worker's process a second and 70 MB."""
    code = (
        "import sys, torch; from islands.layout import Layout; "
        "from islands.models import build_model; from islands.optim import *; "
        f"layout = Layout.of(build_model('gpt', {SMALL})); p = torch.randn(layout.numel); "
        "rate = LearningRate(0.1, 0, 9, 'cosine'); "
        "[InnerOptimizer(n, p, p.clone(), rate, weight_decay=0.1, clip=1.0, layout=layout).step(0) "
        "for n in ('adamw', 'sgd', 'muon')]; sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
