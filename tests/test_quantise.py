"""Codes of few bits: every code, ties, zeros, outliers, single values, and error bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.compression import BlockCode, Payload, bits_of, itemsize
from islands.compression.quantise import pack, unpack

FORMATS = ("int8", "int4", "e2m1", "e3m0")
#: The magnitudes of the four-bit formats by code, as multiples of the top one.
MAGNITUDES = {
    "int4": [k / 7 for k in range(8)],
    "e2m1": [m / 6 for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
    "e3m0": [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1],
}


def through(values: list[float], fmt: str, block: int | None = None) -> list[float]:
    """Values written and read as one tensor."""
    code = BlockCode([len(values)], fmt, block)
    return code.read(code.write(torch.tensor(values))).tolist()


def codes_of(values: list[float], fmt: str) -> list[int]:
    packed = BlockCode([len(values)], fmt).write(torch.tensor(values)).values
    return unpack(packed, len(values)).tolist()


@pytest.mark.parametrize("fmt", MAGNITUDES)
def test_every_code_of_four_bits(fmt: str) -> None:
    """Each level with either sign has its own code, is read back as it was, and minus zero (8) is
    never written."""
    levels = MAGNITUDES[fmt]
    values = [8.0 * m for m in levels] + [-8.0 * m for m in levels]
    assert codes_of(values, fmt) == [*range(8), 0, *range(9, 16)]
    assert through(values, fmt) == pytest.approx(values, rel=1e-7)


def test_every_code_of_eight_bits() -> None:
    """-127 to 127 times a scale; -128 is never written."""
    values = [k / 4 for k in range(-127, 128)]
    payload = BlockCode([255], "int8").write(torch.tensor(values))
    assert payload.values.view(np.int8).tolist() == list(range(-127, 128))
    assert through(values, "int8") == pytest.approx(values, rel=1e-6)


def test_a_code_that_is_never_written_is_read_as_zero() -> None:
    """Four bits: code 8 is minus zero."""
    code = BlockCode([2], "e3m0")
    payload = code.write(torch.tensor([1.0, 1.0]))
    strange = Payload(pack(np.array([8, 7], np.uint8)), "e3m0", scales=payload.scales)
    assert code.read(strange).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("fmt", "top", "ties"),
    [
        ("int8", 127, {0.5: 0, 1.5: 2, 2.5: 2, 125.5: 126, 126.5: 126}),
        ("int4", 7, {0.5: 0, 1.5: 2, 2.5: 2, 3.5: 4, 4.5: 4, 5.5: 6, 6.5: 6}),
        ("e2m1", 6, {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}),
        ("e3m0", 64, {0.5: 0}),
    ],
)
def test_ties(fmt: str, top: float, ties: dict[float, float]) -> None:
    """Half-way between two levels the even code wins, on both sides of zero."""
    # All of these, and their quotients by the top, are exact or rounded back to themselves.
    values = [float(top), *ties]
    both = through([*values, *(-v for v in values)], fmt)
    expected = [top, *ties.values()]
    assert both == pytest.approx([*expected, *(-v for v in expected)], rel=1e-6)


def test_e3m0_rounds_in_log_space() -> None:
    """Between two powers the geometric mean decides: 1.41 is nearer to 1 and 1.42 nearer to 2; what
    is more than half of the smallest power becomes it."""
    assert through([64, 1.41, 1.42, 0.51, 0.49, 45.2, 45.3], "e3m0") == [64, 1, 2, 1, 0, 32, 64]


def test_e3m0_keeps_the_length_of_normal_values() -> None:
    """The gain on 100,000 normal values is between 1.0 and 1.04; to the nearest value it would be
    0.96."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    code = BlockCode([100_000], "e3m0")
    q = code.read(code.write(x))
    assert 1.0 < float(q @ x / (x @ x)) < 1.04


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [3.7, -1e-30, 1e30, -0.0, 0.0, 1.1754943508222875e-38])
def test_one_element_is_exact(fmt: str, value: float) -> None:
    """It is its own scale, whatever its size."""
    assert through([value], fmt) == torch.tensor([value]).tolist()


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_stay_zero(fmt: str) -> None:
    """A scale of zero divides nothing, and says nothing about other blocks."""
    assert through([0.0] * 5, fmt) == [0.0] * 5
    assert through([0.0, 0.0, 5.0, 0.0], fmt, block=2) == [0.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_outlier_is_exact_and_hides_the_rest_of_its_block(fmt: str) -> None:
    """A thousand times larger than the others: it is kept, they become zero, unless blocks keep
    them apart."""
    values = [1.0, -1.0, 1000.0, 0.5, 1.0]
    expected = [0.0, 0.0, 1000.0, 0.0, 0.0]
    assert through(values, fmt) == expected
    assert through(values, fmt, block=2)[:2] == [1.0, -1.0]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(fmt: str, bad: float) -> None:
    """It shows in its block's scale."""
    payload = BlockCode([4], fmt, 2).write(torch.tensor([1.0, 2.0, bad, 1.0]))
    assert not payload.is_finite()
    assert BlockCode([2], fmt).write(torch.tensor([1.0, 2.0])).is_finite()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("block", "scales"), [(None, 3), (4, 2 + 1 + 3), (100, 3), (1, 15)])
def test_bytes(fmt: str, block: int | None, scales: int) -> None:
    """Tensors of 5, 0, 1 and 9 values: codes without gaps, four bytes per scale, no block over two
    tensors."""
    code = BlockCode([5, 0, 1, 9], fmt, block)
    payload = code.write(torch.randn(15))
    assert payload.size == (8 if bits_of(fmt) == 4 else 15, 0, 4 * scales)
    assert (code.nbytes, payload.itemsize, itemsize(fmt)) == (payload.size[::2], 1, 1)
    assert code.read(payload).shape == (15,)


def test_nothing_at_all() -> None:
    """A fragment without any value."""
    code = BlockCode([0], "int4")
    payload = code.write(torch.empty(0))
    assert payload.nbytes == 0
    assert payload.is_finite()
    assert code.read(payload).shape == (0,)


@given(st.lists(st.integers(0, 15), max_size=9))
def test_packing_loses_nothing(codes: list[int]) -> None:
    """Two codes a byte, the first in the low half, any number of them."""
    packed = pack(np.array(codes, np.uint8))
    assert len(packed) == -(-len(codes) // 2)
    assert unpack(packed, len(codes)).tolist() == codes
    if len(codes) > 1:
        assert packed[0] == codes[0] + 16 * codes[1]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
numbers = st.lists(finite, min_size=1, max_size=40)


@given(values=numbers, fmt=st.sampled_from(FORMATS), block=st.none() | st.integers(1, 7))
@settings(max_examples=300, deadline=None)
def test_error_bounds(values: list[float], fmt: str, block: int | None) -> None:
    """The table in the module's docstring, per block; signs never flip, and writing what was read
    changes nothing."""
    read = through(values, fmt, block)
    assert through(read, fmt, block) == pytest.approx(read, rel=1e-6)
    size = block or len(values)
    for start in range(0, len(values), size):
        part = values[start : start + size]
        scale = max(abs(v) for v in part)
        for x, q in zip(part, read[start : start + size], strict=True):
            bound = {"int8": scale / 254, "int4": scale / 14, "e2m1": scale / 6}.get(
                fmt, max((math.sqrt(2) - 1) * abs(x), scale / 128)
            )
            assert abs(x - q) <= bound * (1 + 1e-5) + 1e-37  # fp32's own rounding
            assert x * q >= 0
            if abs(x) == scale:
                assert q == x


@given(values=numbers, fmt=st.sampled_from(FORMATS))
@settings(max_examples=100, deadline=None)
def test_float64_values_are_read_as_close(values: list[float], fmt: str) -> None:
    """Masters in float64 are rounded to fp32 scales, never beyond the top code."""
    code = BlockCode([len(values)], fmt)
    x = torch.tensor(values, dtype=torch.float64) * (1 + 2**-30)
    if x.abs().max() > torch.finfo(torch.float32).max:
        return
    q = code.read(code.write(x)).double()
    assert torch.allclose(q, torch.tensor(through(values, fmt)).double(), rtol=1e-5, atol=1e-37)
