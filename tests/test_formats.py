"""Number formats and payloads: what is counted is what is encoded, and nothing infinite passes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.compression import Payload, Statistics, Update, decode, encode, itemsize

FORMATS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_buffer_is_as_long_as_its_values(fmt: str) -> None:
    """n values take n times the format's bytes, in a flat byte buffer that owns its memory."""
    buffer = encode(torch.arange(10.0), fmt)
    assert itemsize(fmt) == FORMATS[fmt]
    assert (buffer.dtype, buffer.shape) == (np.uint8, (10 * FORMATS[fmt],))
    assert decode(buffer, fmt).dtype == DTYPES[fmt]
    assert decode(buffer, fmt).tolist() == list(range(10))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(0,), (1,), (), (3, 0), (2, 3)])
def test_any_shape_is_a_row_of_values(fmt: str, shape: tuple[int, ...]) -> None:
    """Tensors without elements or without dimensions are encoded like all others."""
    tensor = torch.ones(shape)
    buffer = encode(tensor, fmt)
    assert buffer.nbytes == tensor.numel() * FORMATS[fmt]
    assert decode(buffer, fmt).tolist() == [1.0] * tensor.numel()


def test_a_strided_view_is_encoded_in_its_own_order() -> None:
    """A transposed matrix is read row by row as it is seen, not as it lies in memory."""
    matrix = torch.arange(6.0).view(2, 3)
    assert decode(encode(matrix.T, "fp32"), "fp32").tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_small_view_of_a_large_tensor_travels_alone(fmt: str) -> None:
    """Ten elements of a million: their bytes, not four megabytes, and later changes do not show."""
    large = torch.zeros(1_000_000, dtype=DTYPES[fmt])
    payload = Payload(encode(large[:10], fmt), fmt)
    large[:10] = 1.0
    assert len(pickle.dumps(payload)) < 1_000
    assert not decode(payload.values, fmt).any()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(allow_nan=False, width=32), max_size=20))
def test_bf16_keeps_the_nearest_value(values: list[float]) -> None:
    """bf16 is fp32 without its lower 16 bits, rounded to nearest, ties to even."""
    exact = np.array(values, np.float32)
    bits = exact.view(np.uint32).astype(np.uint64)
    upper = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert encode(torch.from_numpy(exact), "bf16").view(np.uint16).tolist() == upper.tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-60_000, 60_000), max_size=20))
def test_fp16_keeps_the_nearest_value(values: list[float]) -> None:
    """fp16 rounds like NumPy's."""
    exact = torch.tensor(values, dtype=torch.float32)
    expected = np.array(values, np.float32).astype(np.float16)
    assert encode(exact, "fp16").view(np.float16).tolist() == expected.tolist()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(allow_nan=False, width=32), max_size=20))
def test_wide_formats_lose_nothing(values: list[float]) -> None:
    """Encoding fp32 masters as fp32 or fp64 is not quantising."""
    exact = torch.tensor(values, dtype=torch.float32)
    for fmt in ("fp32", "fp64"):
        assert torch.equal(decode(encode(exact, fmt), fmt).float(), exact)


def test_read_only_buffers_can_be_decoded() -> None:
    """Buffers from shared memory cannot be written to; reading them gives no warning."""
    buffer = encode(torch.arange(4.0), "fp32")
    buffer.flags.writeable = False
    assert decode(buffer, "fp32").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 4])
def test_a_value_that_is_not_finite_is_seen(fmt: str, bad: float, place: int) -> None:
    """NaN and both infinities, wherever they stand."""
    values = torch.ones(5)
    assert Payload(encode(values, fmt), fmt).is_finite()
    values[place] = bad
    assert not Payload(encode(values, fmt), fmt).is_finite()


def test_overflow_of_the_wire_format_counts_as_infinite() -> None:
    """70,000 does not fit fp16: what would arrive is infinite."""
    assert not Payload(encode(torch.tensor([7e4]), "fp16"), "fp16").is_finite()


def test_an_empty_payload_is_finite_and_free() -> None:
    """A fragment without elements has nothing to send and nothing to refuse."""
    payload = Payload(encode(torch.empty(0), "bf16"), "bf16")
    assert payload.is_finite()
    assert payload.size.total == 0


#: 3 fp32 numbers and one int64: 20 bytes.
STATISTICS = Statistics(np.zeros(3, np.float32), np.zeros(1, np.int64))


def test_running_statistics_can_make_a_payload_unfit() -> None:
    """An infinite variance must not reach the shared model either."""
    values = encode(torch.ones(3), "bf16")
    bad = Statistics(np.array([np.inf], np.float32), np.zeros(1, np.int64))
    assert Payload(values, "bf16", STATISTICS).is_finite()
    assert not Payload(values, "bf16", bad).is_finite()


def test_sizes_count_values_and_running_statistics() -> None:
    """6 bf16 values and 20 bytes of buffers are 32 bytes, all of kind ``values``."""
    payload = Payload(encode(torch.ones(6), "bf16"), "bf16", STATISTICS)
    assert (payload.size.values, payload.size.indices, payload.size.scales) == (32, 0, 0)
    assert payload.size.total == 32
    assert Update(payload.values, "bf16", payload.buffers).nbytes == 32


@pytest.mark.parametrize(("fmt", "alone"), [("bf16", 2), ("fp32", 4), ("fp64", 8)])
def test_a_ring_cuts_at_whole_values(fmt: str, alone: int) -> None:
    """The unit of a ring divides the payload, with running statistics (4-byte numbers) too."""
    values = encode(torch.ones(3), fmt)
    assert Payload(values, fmt).itemsize == alone
    mixed = Payload(values, fmt, STATISTICS)
    assert mixed.itemsize == min(alone, 4)
    assert mixed.size.total % mixed.itemsize == 0
