"""How models are cut into fragments."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import build_tied
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import build_zoo
from torch import nn

from islands.errors import InputError
from islands.fragments import Cut, cut, hidden_matrices, parts_of
from islands.layout import Layout, TensorSpec
from islands.models import build_model

GPT = {"layers": 4, "heads": 2, "width": 8, "context": 8, "vocab_size": 16}


def gpt(**settings: Any) -> Layout:
    return Layout.of(build_model("gpt", {**GPT, **settings}))


def blocks_in(cut: Cut) -> list[list[int]]:
    """The numbers of the blocks of each fragment."""
    return [
        sorted({int(n.split(".")[1]) for n in names if n.startswith("blocks.")})
        for names in cut.fragments
    ]


def outside(cut: Cut) -> list[list[str]]:
    return [[n for n in names if not n.startswith("blocks.")] for names in cut.fragments]


def test_one_fragment_is_the_whole_model_in_its_own_order() -> None:
    """So that it is DiLoCo's fragment, bit for bit."""
    layout = gpt()
    for embeddings in ("own", "first", "split"):
        found = cut(layout, 1, "strided", embeddings)  # type: ignore[arg-type]
        assert found == Cut((tuple(t.name for t in layout.tensors),))


@pytest.mark.parametrize(
    ("pattern", "count", "blocks"),
    [
        ("strided", 3, [[], [0, 2], [1, 3]]),
        ("sequential", 3, [[], [0, 1], [2, 3]]),
        ("strided", 4, [[], [0, 3], [1], [2]]),
        ("sequential", 4, [[], [0, 1], [2], [3]]),
        ("strided", 2, [[], [0, 1, 2, 3]]),
        ("strided", 5, [[], [0], [1], [2], [3]]),
    ],
)
def test_blocks_are_dealt_out_whole(pattern: Any, count: int, blocks: list[list[int]]) -> None:
    """Strided or in runs, after a fragment of embeddings and head."""
    found = cut(gpt(tie=False), count, pattern, "own")
    assert blocks_in(found) == blocks
    assert outside(found) == [["tokens", "positions", "head"], *[[]] * (count - 1)]
    assert found.notes == ()


def test_embeddings_with_the_first_blocks() -> None:
    """Then all fragments have blocks."""
    found = cut(gpt(tie=False), 2, "strided", "first")
    assert blocks_in(found) == [[0, 2], [1, 3]]
    assert outside(found) == [["tokens", "positions", "head"], []]


def test_embeddings_and_head_apart() -> None:
    """The embeddings come first, the head, with the last norm, last."""
    found = cut(gpt(tie=False, norm_parameters=True), 4, "sequential", "split")
    assert blocks_in(found) == [[], [0, 1], [2, 3], []]
    assert outside(found) == [["tokens", "positions"], [], [], ["gain", "head"]]


def test_a_tied_weight_is_in_one_fragment() -> None:
    """Split, but the head is the embedding: only the embeddings stand apart."""
    found = cut(gpt(tie=True), 3, "strided", "split")
    assert outside(found) == [["tokens", "positions"], [], []]
    assert blocks_in(found) == [[], [0, 2], [1, 3]]
    tied = cut(Layout.of(build_tied()), 2, "strided", "own")
    assert sorted(n for names in tied.fragments for n in names) == [
        "emb.weight",
        "hidden.bias",
        "hidden.weight",
    ]


def test_too_few_blocks_are_balanced_by_size_and_the_cut_says_so() -> None:
    """Four blocks cannot be five fragments beside the embeddings."""
    found = cut(gpt(), 6, "strided", "own")
    assert len(found.fragments) == 6
    (note,) = found.notes
    assert note.startswith("the model has 4 blocks, too few for 5 fragments: tensors are balanced")


def test_a_model_without_blocks_is_balanced_by_size() -> None:
    """Sizes 130, 260, … of the zoo: the largest fragment is at most 4/3 of its ideal share."""
    layout = Layout.of(build_zoo())
    found = cut(layout, 3, "strided", "own")
    size = {t.name: t.numel for t in layout.tensors}
    sizes = [sum(size[n] for n in names) for names in found.fragments]
    ideal = max(sum(sizes) / 3, max(size.values()))
    assert max(sizes) <= 4 / 3 * ideal
    (note,) = found.notes
    assert note == (
        "the model has no blocks: tensors are balanced by size, "
        f"at most {max(sizes)} values in a fragment"
    )


@pytest.mark.parametrize("embeddings", ["own", "first", "split"])
def test_more_fragments_than_tensors(embeddings: Any) -> None:
    """Refused; as many as there are tensors is fine, each in its own."""
    layout = Layout.of(build_zoo())
    count = len(layout.tensors)
    with pytest.raises(
        InputError, match=rf"^method.fragments: {count + 1} is too large; .* 12 ten"
    ):
        cut(layout, count + 1, "strided", embeddings)
    assert {len(names) for names in cut(layout, count, "strided", embeddings).fragments} == {1}


def test_split_needs_a_fragment_for_the_blocks() -> None:
    """Two fragments are taken by embeddings and head."""
    with pytest.raises(InputError, match=r"^method.fragments: 2 is too small .* at least 3$"):
        cut(gpt(tie=False), 2, "strided", "split")


def test_the_largest_stack_counts() -> None:
    """An encoder of two small blocks beside a decoder of three: the decoder's are the blocks."""
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "decoder": nn.ModuleList(nn.Linear(9, 9) for _ in range(3)),
        }
    )
    parts = parts_of(Layout.of(model).tensors)
    assert [[t.name for t in block] for block in parts.blocks] == [
        [f"decoder.{n}.weight", f"decoder.{n}.bias"] for n in range(3)
    ]
    assert len(parts.head) == 4


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    count=st.integers(1, 12),
    embeddings=st.sampled_from(["own", "first", "split"]),
    pattern=st.sampled_from(["strided", "sequential"]),
    named=st.booleans(),
)
@settings(deadline=None)
def test_any_cut_has_every_tensor_once_and_no_empty_fragment(
    sizes: list[int], count: int, embeddings: Any, pattern: Any, named: bool
) -> None:
    """And a layout that was arranged by it is cut the same way again."""
    names = [f"h.{n // 2}.t{n}" if named and n < 8 else f"emb{n}" for n in range(len(sizes))]
    offsets = [sum(sizes[:n]) for n in range(len(sizes))]
    rows = zip(names, sizes, offsets, strict=True)
    layout = Layout(tuple(TensorSpec(n, (s,), o) for n, s, o in rows), (slice(0, sum(sizes)),))
    try:
        found = cut(layout, count, pattern, embeddings)
    except InputError:
        assert count > len(sizes) or embeddings == "split"
        return
    assert sorted(n for piece in found.fragments for n in piece) == sorted(names)
    assert len(found.fragments) == count
    assert all(found.fragments)
    order = [layout.tensors[names.index(n)] for piece in found.fragments for n in piece]
    again = cut(Layout(tuple(order), ()), count, pattern, embeddings)
    assert [set(p) for p in again.fragments] == [set(p) for p in found.fragments]
    assert again.notes == found.notes


def test_hidden_matrices() -> None:
    """In blocks where there are some; else what is neither embedding nor head by name."""
    names = {t.name for t in hidden_matrices(gpt(bias=True, norm_parameters=True, layers=1))}
    assert names == {f"blocks.0.{n}" for n in ("qkv", "out", "up", "down")}
    assert [t.name for t in hidden_matrices(Layout.of(build_tied()))] == ["hidden.weight"]


def test_layers_of_a_sequential_are_no_blocks() -> None:
    """Embedding and head have numbers there too; a layer is a block if there is another like it."""
    model = nn.Sequential(
        nn.Embedding(20, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 20)
    )
    layout = Layout.of(model)
    parts = parts_of(layout.tensors)
    assert [[t.name for t in block] for block in parts.blocks] == [
        ["1.weight", "1.bias"],
        ["3.weight", "3.bias"],
    ]
    assert {t.name for t in hidden_matrices(layout)} == {"1.weight", "3.weight"}
