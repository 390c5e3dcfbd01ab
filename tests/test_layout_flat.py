"""The flat view of a model: every trainable tensor once, as slices of one vector of masters."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from helpers import build_batchnorm, build_bf16, build_frozen, build_tied
from torch import Tensor, nn

from islands.flat import BufferSet, FlatModel, load_state, pack_state, parameters_sha256
from islands.layout import Layout, Stream


class Odd(nn.Module):
    """Tensors of awkward shapes; ``unused`` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
        self.cube = nn.Parameter(torch.ones(1, 2, 1, 3))
        self.unused = nn.Parameter(torch.full((5,), 7.0))

    def forward(self) -> Tensor:
        return self.scalar * (self.turned.sum() + self.cube.sum()) + self.nothing.sum()


def flat(model: nn.Module) -> FlatModel:
    return FlatModel(model, Layout.of(model))


def test_every_tensor_has_its_slice() -> None:
    """Scalars, empty, transposed and 4-dimensional tensors: 1 + 0 + 6 + 6 + 5 values in order."""
    layout = Layout.of(Odd())
    assert [(t.name, t.shape, t.offset) for t in layout.tensors] == [
        ("scalar", (), 0),
        ("nothing", (0, 3), 1),
        ("turned", (3, 2), 1),
        ("cube", (1, 2, 1, 3), 7),
        ("unused", (5,), 13),
    ]
    assert (layout.numel, layout.fragments) == (18, (slice(0, 18),))


def test_flattening_changes_no_value() -> None:
    """The model computes the same afterwards, and masters hold the values row by row."""
    model = Odd()
    before = model()
    view = flat(model)
    assert torch.equal(model(), before)
    assert view.params.tolist() == [2, 0, 3, 1, 4, 2, 5, *[1] * 6, *[7] * 5]


def test_parameters_are_the_masters_memory() -> None:
    """A change of the flat vector is a change of the model, without copying."""
    model = Odd()
    view = flat(model)
    view.params.zero_()
    assert all(not p.any() for p in model.parameters())


def test_a_missing_gradient_counts_as_zero() -> None:
    """``unused`` takes no part in the loss: zeros, also after a step in which it had a gradient."""
    model = Odd()
    view = flat(model)
    (model() + model.unused.sum()).backward()
    view.collect_grad()
    assert view.grad.tolist() == [21, *[2] * 12, *[1] * 5]
    view.clear_grad()
    model().backward()
    view.collect_grad()
    assert view.grad.tolist() == [21, *[2] * 12, *[0] * 5]


def test_tied_weights_are_one_tensor() -> None:
    """Embedding and head share a tensor: counted once, still tied, its gradient the sum of both."""
    model = build_tied()
    layout = Layout.of(model)
    assert [t.name for t in layout.tensors] == ["emb.weight", "hidden.weight", "hidden.bias"]
    assert layout.numel == 16 * 4 + 4 * 4 + 4
    view = FlatModel(model, layout)
    assert model.head.weight is model.emb.weight
    (3 * model.emb.weight.sum() + 4 * model.head.weight.sum()).backward()
    assert view.grad[:64].tolist() == [7.0] * 64


def test_frozen_parameters_are_not_sent() -> None:
    """They are no part of the vector and keep their memory and value."""
    model = build_frozen()
    frozen = model.emb.weight.clone()
    view = flat(model)
    assert "emb.weight" not in {t.name for t in view.layout.tensors}
    view.params.zero_()
    assert torch.equal(model.emb.weight, frozen)


def test_small_updates_survive_in_fp32_masters() -> None:
    """bf16 parameters: 1 + 0.001 a hundred times is 1.1, not 1."""
    model = build_bf16()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    view = flat(model)
    assert view.params.dtype == torch.float32
    for _ in range(100):
        view.params += 0.001
        view.publish()
    assert view.params.tolist() == pytest.approx([1.1] * view.layout.numel, rel=1e-5)
    expected = torch.tensor(1.1).bfloat16()
    for p in model.parameters():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, expected.expand_as(p))


def test_bf16_gradients_come_to_the_masters() -> None:
    """The gradient of a low-precision parameter is collected, a missing one is zero."""
    model = build_bf16()
    view = flat(model)
    (2 * model.hidden.bias).sum().backward()
    view.collect_grad()
    of = {t.name: view.grad[t.slice] for t in view.layout.tensors}
    assert of["hidden.bias"].tolist() == [2.0] * 4
    assert not of["emb.weight"].any()
    view.clear_grad()
    view.collect_grad()
    assert not view.grad.any()


def test_one_float64_parameter_makes_the_masters_float64() -> None:
    """Mixed precision: masters are as wide as the widest parameter, narrower ones are rounded."""
    model = nn.ParameterDict(
        {"a": nn.Parameter(torch.ones(2).double()), "b": nn.Parameter(torch.ones(2))}
    )
    view = flat(model)
    assert view.params.dtype == torch.float64
    view.params.fill_(1 + 1e-12)
    view.publish()
    assert model["a"].tolist() == [1 + 1e-12] * 2
    assert model["b"].tolist() == [1.0, 1.0]


def test_fragments_are_slices_whatever_their_tensors() -> None:
    """Streams deal tensors out; each fragment is contiguous and holds its own tensors."""
    layout = Layout.of(Odd())
    dealt = layout.arranged(
        [Stream(("unused", "scalar"), 1, 1), Stream(("cube", "nothing", "turned"), 1, 1)]
    )
    assert dealt.fragments == (slice(0, 6), slice(6, 18))
    assert [t.name for t in dealt.tensors] == ["unused", "scalar", "cube", "nothing", "turned"]
    model = Odd()
    view = FlatModel(model, dealt)
    assert view.params.tolist() == [*[7] * 5, 2, *[1] * 6, 0, 3, 1, 4, 2, 5]


def test_each_tensor_belongs_to_one_fragment() -> None:
    """Also one without elements."""
    dealt = Layout.of(Odd()).arranged(
        [Stream(("unused", "scalar"), 1, 1), Stream(("cube", "nothing", "turned"), 1, 1)]
    )
    names = [[t.name for t in dealt.of_fragment(f)] for f in range(2)]
    assert names == [["unused", "scalar"], ["cube", "nothing", "turned"]]


@pytest.mark.parametrize("named", [("scalar",), ("scalar", "scalar"), ("elsewhere",)])
def test_streams_must_name_every_tensor_once(named: tuple[str, ...]) -> None:
    """A tensor that is left out, named twice or not there."""
    with pytest.raises(ValueError, match="exactly once"):
        Layout.of(Odd()).arranged([Stream(named, 1, 1)])


@pytest.mark.parametrize("build", [Odd, build_tied, build_bf16, build_batchnorm])
def test_a_model_travels_as_bytes(build: type[nn.Module]) -> None:
    """Packed and loaded into another one of the same kind: equal parameters and buffers."""
    torch.manual_seed(1)
    one = build()
    torch.manual_seed(2)
    other = build()
    load_state(other, pack_state(one))
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_packed_bytes_are_copies() -> None:
    """Later training does not change what was packed."""
    model = build_tied()
    packed = pack_state(model)
    with torch.no_grad():
        model.emb.weight.fill_(0.0)
    assert packed["emb.weight"].view(np.float32).any()


def normed(seed: float) -> tuple[nn.Module, BufferSet]:
    """A batch-normalised model whose statistics are set by hand, and its buffers."""
    model = build_batchnorm()
    model.norm.running_mean.fill_(seed)
    model.norm.running_var.fill_(10 * seed)
    model.norm.num_batches_tracked.fill_(int(100 * seed))
    names = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    return model, BufferSet(model, names)


def test_running_statistics_take_their_own_bytes() -> None:
    """4 means and 4 variances as fp32, one counter as int64: 40 bytes; none without buffers."""
    _, buffers = normed(1.0)
    packed = buffers.pack()
    assert packed is not None
    assert packed.nbytes == 8 * 4 + 8
    empty = BufferSet(build_tied(), ())
    assert not empty
    assert empty.pack() is None


def test_floats_are_averaged_and_integers_are_the_first_workers() -> None:
    """Means 1, 2, 6 make 3, variances ten times that, the counter stays worker 0's."""
    sets = [normed(value) for value in (1.0, 2.0, 6.0)]
    packs = [pack for _, s in sets if (pack := s.pack()) is not None]
    model, buffers = normed(0.0)
    buffers.unpack(buffers.merge(packs))
    assert model.norm.running_mean.tolist() == [3.0] * 4
    assert model.norm.running_var.tolist() == [30.0] * 4
    assert model.norm.num_batches_tracked.item() == 100


def test_the_digest_is_over_fp32_values_in_name_order() -> None:
    """sha256 of little-endian float32 values, names sorted, tied tensors once."""
    model = build_tied()
    values = [model.emb.weight, model.hidden.bias, model.hidden.weight]
    raw = b"".join(v.detach().numpy().astype("<f4").tobytes() for v in values)
    assert parameters_sha256(flat(model)) == hashlib.sha256(raw).hexdigest()
