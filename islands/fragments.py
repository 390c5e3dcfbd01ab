"""Cutting a model into fragments: whole transformer blocks where there are enough of them.

Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512, section 2) deals blocks out to fragments,
either strided (block j to fragment j mod P) or in runs, and gives the embeddings a fragment of
their own. Blocks are found by name: tensors ``<stack>.<number>.<rest>``; of several stacks the one
with the most parameters counts, and everything else belongs to the embeddings and the head. Where
there are too few blocks, tensors are dealt out by size instead.

Nothing here depends on the order of the tensors: a layout that was arranged by its fragments gives
the same ones. A tied weight is one tensor of the layout, so it is in exactly one fragment.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from islands.errors import InputError
from islands.layout import Layout, TensorSpec

Pattern = Literal["strided", "sequential"]
Embeddings = Literal["own", "first", "split"]

#: All that a single layer has.
_LAYER = {"weight", "bias"}
_BLOCK = re.compile(r"(?:(.*?)\.)?(\d+)\.(.+)")
#: Names of tensors that turn tokens into activations; what else is outside of blocks is the head.
_EMBEDDING = re.compile(r"emb|wte|wpe|tok|pos", re.IGNORECASE)
_HEAD = re.compile(r"head|out|logit|classif", re.IGNORECASE)


class Cut(NamedTuple):
    """The tensors of each fragment, in the layout's order, and what the user must know about it."""

    fragments: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


class Parts(NamedTuple):
    """A model's blocks in order, its embeddings, and its head with the last norm."""

    blocks: tuple[tuple[TensorSpec, ...], ...]
    embeddings: tuple[TensorSpec, ...]
    head: tuple[TensorSpec, ...]


def _rest(tensor: TensorSpec) -> str:
    """What follows the block's number in a tensor's name."""
    found = _BLOCK.fullmatch(tensor.name)
    assert found is not None
    return found[3]


def parts_of(tensors: Sequence[TensorSpec]) -> Parts:
    """Find the blocks. A model that has none is all embeddings and head."""
    stacks: dict[str, dict[int, list[TensorSpec]]] = defaultdict(lambda: defaultdict(list))
    for tensor in tensors:
        if found := _BLOCK.fullmatch(tensor.name):
            stacks[found[1] or ""][int(found[2])].append(tensor)
    sizes = {
        name: sum(t.numel for b in stack.values() for t in b) for name, stack in stacks.items()
    }
    largest = min(stacks, key=lambda name: (-sizes[name], name), default="")
    stack = stacks[largest]
    # In a plain Sequential the embedding and the head are numbered too: a single layer is a block
    # only if there is another one like it.
    kinds = {n: tuple((_rest(t), t.shape) for t in stack[n]) for n in stack}
    alike = Counter(kinds.values())
    blocks = tuple(
        tuple(stack[n])
        for n in sorted(stack)
        if alike[kinds[n]] > 1 or not {name for name, _ in kinds[n]} <= _LAYER
    )
    inside = {t.name for block in blocks for t in block}
    outside = [t for t in tensors if t.name not in inside]
    first = tuple(t for t in outside if _EMBEDDING.search(t.name))
    return Parts(blocks, first, tuple(t for t in outside if not _EMBEDDING.search(t.name)))


def hidden_matrices(layout: Layout) -> tuple[TensorSpec, ...]:
    """The matrices between embeddings and head: those in blocks, or, without blocks, those whose
    names speak of neither."""
    parts = parts_of(layout.tensors)
    if parts.blocks:
        return tuple(t for block in parts.blocks for t in block if len(t.shape) == 2)
    return tuple(t for t in parts.head if len(t.shape) == 2 and not _HEAD.search(t.name))


def cut(layout: Layout, count: int, pattern: Pattern, embeddings: Embeddings) -> Cut:
    """Cut a model's tensors into ``count`` fragments.

    ``embeddings``: ``own`` makes one fragment of them and the head, the first; ``first`` joins
    both to the first fragment of blocks; ``split`` makes the embeddings the first fragment and the
    head the last. Raises InputError for more fragments than tensors, or too few for ``split``.
    """
    tensors = layout.tensors
    if count == 1:
        return Cut((tuple(t.name for t in tensors),))
    if count > len(tensors):
        raise InputError(
            f"method.fragments: {count} is too large; the model has {len(tensors)} tensors"
        )
    blocks, first, last = parts_of(tensors)
    apart = _apart(first, last, embeddings)
    groups = count - len(apart)
    if groups > len(blocks) or not blocks:
        return _by_size(tensors, count, len(blocks), groups)
    if groups < 1:
        raise InputError(
            f"method.fragments: {count} is too small for embeddings 'split'; it must be at least "
            f"{len(apart) + 1}"
        )
    dealt: list[list[TensorSpec]] = [[] for _ in range(groups)]
    for number, block in enumerate(blocks):
        to = number % groups if pattern == "strided" else number * groups // len(blocks)
        dealt[to] += block
    if embeddings == "first":
        dealt[0] = [*first, *last, *dealt[0]]
    pieces = [*apart[:1], *dealt, *apart[1:]]
    return Cut(tuple(_names(tensors, piece) for piece in pieces))


def _apart(
    first: Sequence[TensorSpec], last: Sequence[TensorSpec], embeddings: Embeddings
) -> list[Sequence[TensorSpec]]:
    """The fragments without any block."""
    if embeddings == "own" and (first or last):
        return [[*first, *last]]
    return [piece for piece in (first, last) if piece] if embeddings == "split" else []


def _by_size(tensors: Sequence[TensorSpec], count: int, blocks: int, wanted: int) -> Cut:
    """The largest tensor first, each to the fragment that has least so far."""
    dealt: list[list[TensorSpec]] = [[] for _ in range(count)]
    for tensor in sorted(tensors, key=lambda t: (-t.numel, t.name)):
        sizes = [(sum(t.numel for t in piece), len(piece), n) for n, piece in enumerate(dealt)]
        dealt[min(sizes)[2]].append(tensor)
    why = "the model has no blocks"
    if blocks:
        why = f"the model has {blocks} block{'s' * (blocks > 1)}, too few for {wanted} fragments"
    largest = max(sum(t.numel for t in piece) for piece in dealt)
    return Cut(
        tuple(_names(tensors, piece) for piece in dealt),
        (f"{why}: tensors are balanced by size, at most {largest:,} values in a fragment",),
    )


def _names(tensors: Sequence[TensorSpec], piece: Sequence[TensorSpec]) -> tuple[str, ...]:
    inside = {t.name for t in piece}
    return tuple(t.name for t in tensors if t.name in inside)
