"""Sparse codes, signs and cosines: what is written is read, in the bytes that it should take."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lab import ZOO, layout_of

from islands.compression import Payload, SignCode, SparseCode, decode, encode, rows_of_tensor
from islands.compression.dct import ChunkedDCT, basis, blocks, largest_divisor
from islands.compression.sparse import Rows, encoded_bytes, index_dtype, largest

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
#: Few different values, so that ties are the rule, and now and then one that is not a number.
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.5, math.nan, math.inf])
shapes = st.lists(
    st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=6
) | st.just(list(ZOO))


# --- choosing


@settings(deadline=None)
@given(
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=12).flatmap(
        lambda shape: hnp.arrays(np.float64, shape, elements=VALUES)
    ),
    st.integers(1, 11),
)
def test_the_largest_of_each_row_win_and_of_equal_ones_the_first(
    rows: np.ndarray, keep: int
) -> None:
    """As a stable sort by falling magnitude says; NaN counts as infinite."""
    keep = min(keep, rows.shape[1] - 1)
    found = largest(np.abs(rows), keep)
    for row, positions in zip(rows, found, strict=True):
        rank = [math.inf if math.isnan(v) else abs(v) for v in row]
        expected = sorted(range(len(rank)), key=lambda n: (-rank[n], n))[:keep]
        assert positions.tolist() == sorted(expected)


def test_ties_go_to_the_lowest_index() -> None:
    """Six equal values, then one larger: the larger one and the first two."""
    assert largest(np.array([[1.0, 1, 1, 1, 1, 1, 2]]), 3).tolist() == [[0, 1, 6]]
    assert largest(np.zeros((2, 5)), 2).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("width", "chunk", "tensor"),
    [(1, 1, 2), (256, 1, 2), (257, 2, 2), (65_536, 2, 2), (65_537, 4, 4)],
)
def test_positions_take_as_few_bytes_as_their_kind_allows(
    width: int, chunk: int, tensor: int
) -> None:
    """1 byte up to 256 positions in a chunk, 2 up to 65,536, else 4; in a tensor at least 2."""
    assert index_dtype(width).itemsize == chunk
    assert index_dtype(width, chunked=False).itemsize == tensor


# --- sparse codes


def code_of(
    sizes: list[tuple[int, ...]], keep: int, chunk: int, fmt: str
) -> tuple[SparseCode, list[Rows], int]:
    rows: list[Rows] = []
    size = 0
    for shape in sizes:
        numel = math.prod(shape)
        cut = [(chunk, numel // chunk), (numel % chunk, 1)]
        rows += rows_of_tensor(size, cut, keep, fmt)
        size += numel
    return SparseCode(size, rows, fmt), rows, size


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 9), st.integers(1, 70), st.sampled_from(sorted(BYTES)), st.data())
def test_what_is_written_is_read(
    sizes: list[tuple[int, ...]], keep: int, chunk: int, fmt: str, data: st.DataObject
) -> None:
    """Values at their positions, rounded once; several payloads are added in their order."""
    code, rows, size = code_of(sizes, keep, chunk, fmt)
    seed = data.draw(st.integers(0, 2**32 - 1))
    flats = [torch.from_numpy(np.random.default_rng(seed + n).normal(size=size)) for n in range(3)]
    payloads = []
    expected = torch.zeros(size, dtype=code.wide)
    for flat in flats:
        payload, where = code.write(flat)
        payloads.append(payload)
        rounded = decode(encode(flat, fmt), fmt).to(code.wide)
        expected[where] += rounded[where]
        assert len(set(where.tolist())) == len(where) == sum(r.keep * r.count for r in rows)
        assert payload.size == encoded_bytes(rows, fmt)
    total, where = code.total(payloads)
    assert torch.equal(total, expected)
    assert len(where) == 3 * sum(r.keep * r.count for r in rows)


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 70), st.integers(1, 70), st.sampled_from(sorted(BYTES)))
def test_no_tensor_takes_more_than_all_of_its_values(
    sizes: list[tuple[int, ...]], keep: int, chunk: int, fmt: str
) -> None:
    """Per tensor: the sparse form, or all values without positions where that is shorter."""
    for shape in sizes:
        numel = math.prod(shape)
        cut = [(chunk, numel // chunk), (numel % chunk, 1)]
        rows = rows_of_tensor(0, cut, keep, fmt)
        sparse = sum(
            min(keep, width) * count * (BYTES[fmt] + (keep < width)) for width, count in cut
        )
        assert encoded_bytes(rows, fmt).total == min(sparse, numel * BYTES[fmt])
        assert sum(r.width * r.count for r in rows) == numel


def test_rows_of_one_width_stand_together_whatever_lies_between() -> None:
    """Two tensors of 4 around one of 2: the values of both 4s, then the 2's, positions per row."""
    rows = [Rows(0, 4, 1, 1), Rows(4, 2, 1, 1), Rows(6, 4, 1, 1)]
    code = SparseCode(10, rows, "fp32")
    payload, where = code.write(torch.tensor([0.0, 5, 0, 0, 0, 3, 0, 0, 0, 7]))
    assert decode(payload.values, "fp32").tolist() == [5, 7, 3]
    assert payload.indices is not None
    assert payload.indices.tolist() == [1, 3, 1]
    assert where.tolist() == [1, 9, 5]


def test_a_payload_accounts_for_each_kind_of_byte() -> None:
    """Values, indices and scales apart, and only numbers can make it unfit."""
    one = np.zeros(1, np.uint8)
    payload = Payload(
        encode(torch.ones(3), "bf16"),
        "bf16",
        indices=one,
        scales=encode(torch.tensor([1.0, math.inf]), "fp32"),
    )
    assert tuple(payload.size) == (6, 1, 8)
    assert not payload.is_finite()
    assert Payload(
        np.full(9, 255, np.uint8), "bits", scales=encode(torch.ones(1), "fp32")
    ).is_finite()


# --- signs


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(0, 2**32 - 1), st.sampled_from(sorted(BYTES)))
def test_signs_and_scales_are_read_as_written(
    sizes: list[tuple[int, ...]], seed: int, fmt: str
) -> None:
    """Each tensor is ±its mean magnitude, rounded; one bit a value and one scale a tensor, none of
    which exceeds the dense tensor."""
    layout = layout_of(sizes)
    flat = torch.from_numpy(np.random.default_rng(seed).normal(size=layout.numel))
    code = SignCode([t.numel for t in layout.tensors], fmt)
    payload = code.write(flat)
    found = code.read(payload)
    for tensor in layout.tensors:
        part = flat[tensor.slice].numpy()
        if not part.size:
            continue
        scale = decode(encode(torch.tensor([np.abs(part).mean()]), fmt), fmt).item()
        one_ulp = {"bf16": 2.0**-7, "fp16": 2.0**-9, "fp32": 1e-6, "fp64": 1e-15}[fmt]
        np.testing.assert_allclose(found[tensor.slice], np.sign(part) * scale, rtol=one_ulp)
    filled = [t.numel for t in layout.tensors if t.numel]
    bits = sum(n for n in filled if n > 1)
    assert tuple(payload.size) == (math.ceil(bits / 8), 0, len(filled) * BYTES[fmt])
    assert payload.nbytes <= layout.numel * BYTES[fmt] + 1 / 8


def test_zeros_and_single_values_are_exact() -> None:
    """An all-zero tensor stays zero; a lone value keeps its sign and its size."""
    code = SignCode([3, 1, 0, 1], "fp32")
    flat = torch.tensor([0.0, -0.0, 0.0, -2.5, 4.0])
    assert code.read(code.write(flat)).tolist() == flat.tolist()


# --- cosines


@pytest.mark.parametrize(
    ("size", "divisor"), [(768, 64), (50304, 64), (50257, 29), (65, 13), (97, 1), (1, 1), (7, 7)]
)
def test_a_chunk_is_the_largest_divisor(size: int, divisor: int) -> None:
    """Up to 64; a prime side beyond that cannot be cut."""
    assert largest_divisor(size, 64) == divisor


def test_the_basis_is_scipys_transform() -> None:
    """Orthonormal DCT-II, every size up to 64."""
    fft = pytest.importorskip("scipy.fft")
    for size in range(1, 65):
        found = basis(size, torch.float64, torch.device("cpu")).numpy()
        np.testing.assert_allclose(found, fft.dct(np.eye(size), axis=0, norm="ortho"), atol=1e-14)


@pytest.mark.parametrize("shape", ZOO, ids=str)
def test_flat_chunks_are_transformed_one_by_one(shape: tuple[int, ...]) -> None:
    """Runs of 64 values of the flattened tensor, the last one shorter."""
    fft = pytest.importorskip("scipy.fft")
    (tensor,) = layout_of([shape]).tensors
    values = np.random.default_rng(1).normal(size=tensor.numel)
    found = ChunkedDCT(blocks(tensor, 0, 64, "flat")).forward(torch.from_numpy(values))
    expected = [fft.dct(values[n : n + 64], norm="ortho") for n in range(0, tensor.numel, 64)]
    np.testing.assert_allclose(found.numpy(), np.concatenate([[], *expected]), atol=1e-13)


@pytest.mark.parametrize("shape", [(128, 192), (65, 4), (13, 7), (1, 64), (97, 6), (3, 5, 2)])
def test_tiles_are_transformed_along_both_sides(shape: tuple[int, ...]) -> None:
    """Tiles of h by w row by row, each of them flattened; leading dimensions are rows."""
    fft = pytest.importorskip("scipy.fft")
    (tensor,) = layout_of([shape]).tensors
    matrix = np.random.default_rng(2).normal(size=(math.prod(shape[:-1]), shape[-1]))
    h, w = (max(d for d in range(1, 65) if n % d == 0) for n in matrix.shape)
    tiles = [
        fft.dctn(matrix[y : y + h, x : x + w], norm="ortho").ravel()
        for y in range(0, matrix.shape[0], h)
        for x in range(0, matrix.shape[1], w)
    ]
    dct = ChunkedDCT(blocks(tensor, 0, 64, "tiles"))
    found = dct.forward(torch.from_numpy(matrix.ravel()))
    np.testing.assert_allclose(found.numpy(), np.concatenate(tiles), atol=1e-13)


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 70), st.sampled_from(["flat", "tiles"]), st.integers(0, 2**32 - 1))
def test_transforming_loses_nothing(
    sizes: list[tuple[int, ...]], chunk: int, cut: str, seed: int
) -> None:
    """The inverse gives the values back, and the norm stays, for any tensors side by side."""
    layout = layout_of(sizes)
    parts = [b for t in layout.tensors for b in blocks(t, t.offset, chunk, cut)]  # type: ignore[arg-type]
    dct = ChunkedDCT(parts)
    flat = torch.from_numpy(np.random.default_rng(seed).normal(size=layout.numel))
    found = dct.forward(flat)
    assert torch.allclose(dct.inverse(found), flat, rtol=0, atol=1e-12)
    assert float(found.norm()) == pytest.approx(float(flat.norm()), rel=1e-12)


# --- published sizes


def olmo(width: int) -> list[tuple[int, ...]]:
    """The matrices of an OLMo-like model: 50,304 tokens (tied), 16 layers of queries, keys and
    values together, attention output, and a gated MLP of 8 and 4 times the width."""
    layer = [(3 * width, width), (width, width), (8 * width, width), (width, 4 * width)]
    return [(50_304, width), *(16 * layer)]


@pytest.mark.parametrize(
    ("width", "millions", "k", "published", "ours"),
    [(2048, 1176.76, 32, 110.32, 36.77), (1024, 319.95, 8, 7.50, 2.50)],
)
def test_demos_published_megabytes_follow_from_the_shapes(
    width: int, millions: float, k: int, published: float, ours: float
) -> None:
    """k coefficients per 64 × 64 tile at 12 bytes (int64 and fp32); bf16 and 2-byte positions make
    a third of that."""
    layout = layout_of(olmo(width))
    assert layout.numel / 1e6 == pytest.approx(millions, abs=0.005)
    rows: list[Rows] = []
    for tensor in layout.tensors:
        cut = [(b.h * b.w, b.chunks) for b in blocks(tensor, tensor.offset, 64, "tiles")]
        rows += rows_of_tensor(tensor.offset, cut, k, "bf16")
    assert {part.width for part in rows} == {64 * 64}
    assert 12 * sum(part.count * part.keep for part in rows) / 1e6 == pytest.approx(
        published, abs=0.005
    )
    assert encoded_bytes(rows, "bf16").total / 1e6 == pytest.approx(ours, abs=0.005)
