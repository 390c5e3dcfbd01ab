"""Bad payloads: what a checksum finds, what the numbers tell, and that all of them can be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import Lab, draws

from islands.compression import CHECKSUM_BYTES, Payload, Statistics, decode, encode
from islands.corruption import corrupt
from islands.methods import METHODS, Arrival, method_class

HOW = ("nan", "inf", "scale", "flip", "truncate", "bits")
SHAPES = ((40, 3), (7,), ())


def payload_of(name: str, seed: int = 0, fmt: Any = "bf16") -> tuple[Lab, Payload]:
    """A payload that a method really sends."""
    lab = Lab(method_class(name)(payload_dtype=fmt), SHAPES)
    return lab, lab.send([draws(seed, 1, 1, lab.layout.numel)[0, 0]])[0]


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("how", HOW)
def test_who_notices_what(name: str, how: str) -> None:
    """Not a number: everyone. Bytes that changed under way: the checksum. A bad worker's wrong
    numbers: nobody. Sizes never change."""
    _, payload = payload_of(name)
    bad = corrupt(payload, how, seed=3)
    assert bad.checksum is not None
    assert bad.is_intact() == (how not in ("truncate", "bits"))
    if how in ("nan", "inf", "scale", "flip"):
        assert bad.is_finite() == (how in ("scale", "flip"))
    assert bad.size == payload.size
    assert payload.is_intact()
    assert payload.checksum is None


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(METHODS)),
    st.sampled_from(HOW),
    st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
    st.integers(0, 500),
)
def test_whatever_arrives_can_be_read(name: str, how: str, fmt: str, seed: int) -> None:
    """Passed on instead of refused, a bad payload gives a bad update, not an error."""
    lab, payload = payload_of(name, seed, fmt)
    bad = corrupt(payload, how, 10.0, seed)
    arrivals = [Arrival(n, p, 0, 1) for n, p in enumerate((payload, bad))]
    update = lab.method.combine(lab.shared, 0, arrivals)
    lab.method.receive(lab.states[0], 0, update, lab.context)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-1e3, 1e3, width=16), max_size=40),
    st.sampled_from(["truncate", "bits"]),
    st.integers(0, 10_000),
)
def test_a_checksum_finds_all_damage(numbers: list[float], how: str, seed: int) -> None:
    """Zeros included, of which a truncated transfer looks whole; nothing can happen to no bytes.
    The payload that was made is not touched."""
    payload = Payload(encode(torch.tensor(numbers), "bf16"), "bf16")
    before = payload.values.copy()
    bad = corrupt(payload, how, seed=seed)
    assert bad.is_intact() == (not numbers)
    assert (payload.values == before).all()
    changed = np.unpackbits(bad.values ^ before).sum()
    if how == "bits":
        assert changed == min(8, 16 * len(numbers))
    else:
        kept = np.flatnonzero(bad.values)
        assert (bad.values[: kept[-1] + 1] == before[: kept[-1] + 1]).all() if kept.size else True


def test_damage_is_drawn_from_its_seed() -> None:
    """The same seed flips the same bits, another one others."""
    _, payload = payload_of("dense")
    found = [corrupt(payload, "bits", seed=seed).values.tobytes() for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("how", "expected"),
    [("scale", [-3.0, 0.0, 6.0]), ("flip", [1.0, 0.0, -2.0])],
)
def test_a_bad_workers_numbers(how: str, expected: list[float]) -> None:
    """Exactly the factor asked for."""
    payload = Payload(encode(torch.tensor([-1.0, 0.0, 2.0]), "bf16"), "bf16")
    assert decode(corrupt(payload, how, 3.0).values, "bf16").tolist() == expected


def test_quantised_payloads_are_bad_by_their_scales() -> None:
    """Signs are multiples of a scale: with it turned, all of them turn."""
    lab, payload = payload_of("signsgd", fmt="fp64")
    both = [
        decode(lab.method.combine(lab.shared, 0, [Arrival(0, p, 0, 1)]).values, "fp64")
        for p in (payload, corrupt(payload, "flip"))
    ]
    assert torch.equal(both[0], -both[1])
    assert both[0].abs().min() > 0


def test_a_checksum_covers_every_buffer() -> None:
    """Values, positions, scales and running statistics: a change anywhere shows. It is no part of
    a payload's size."""
    payload = Payload(
        np.arange(6, dtype=np.uint8),
        "bf16",
        Statistics(np.ones(2, np.float32), np.arange(3)),
        np.arange(4, dtype=np.uint8),
        np.arange(8, dtype=np.uint8),
    )
    sealed = payload.sealed()
    assert sealed.is_intact()
    assert sealed.size == payload.size
    assert CHECKSUM_BYTES == 4
    assert 0 <= (sealed.checksum or 0) < 1 << 8 * CHECKSUM_BYTES
    for field in ("values", "indices", "scales"):
        changed = getattr(payload, field).copy()
        changed[-1] ^= 1
        assert not replace(sealed, **{field: changed}).is_intact()
    for statistics in (
        Statistics(np.array([1, 2], np.float32), np.arange(3)),
        Statistics(np.ones(2, np.float32), np.arange(1, 4)),
    ):
        assert not replace(sealed, buffers=statistics).is_intact()
