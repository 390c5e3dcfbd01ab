"""Quantities: what text means, what is refused, and that writing and reading are inverse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.errors import InputError
from islands.units import (
    Price,
    format_bandwidth,
    format_bytes,
    format_flops,
    format_price,
    format_seconds,
    format_size,
    format_time,
    parse_bandwidth,
    parse_flops,
    parse_price,
    parse_size,
    parse_time,
)

positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8 bit/s", 1.0),
        ("1 Gbit/s", 1e9 / 8),
        ("12.5 GB/s", 12.5e9),
        ("100 Gbit/s", 12.5e9),
        ("1 Mbit/s", 125_000.0),
        ("1 MB/s", 1_000_000.0),
        ("1 MiB/s", 1_048_576.0),
        ("1 Mibit/s", 131_072.0),
        ("3kbytes/s", 3000.0),
        ("1e-3 Tbit/s", 125e6),
        (".5 B/s", 0.5),
        ("unlimited", math.inf),
    ],
)
def test_bandwidth_is_bytes_per_second(text: str, bytes_per_s: float) -> None:
    """Decimal prefixes are powers of ten, Ki-style ones powers of two, eight bits are a byte."""
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("65 ms", 0.065),
        ("20 us", 20e-6),
        ("20 µs", 20e-6),
        ("20 μs", 20e-6),
        ("7 ns", 7e-9),
        ("0 s", 0.0),
        ("1.5 s", 1.5),
        ("2 min", 120.0),
        ("1 h", 3600.0),
    ],
)
def test_time_is_seconds(text: str, seconds: float) -> None:
    """Zero is a legal delay; both ways to write a micro sign are understood."""
    assert parse_time(text) == seconds


def test_size_is_whole_bytes() -> None:
    """Sizes are integers, exact beyond what a float holds."""
    assert parse_size("64 KiB") == 65_536
    assert parse_size("64 kB") == 64_000
    assert parse_size("16 bit") == 2
    assert parse_size("0 B") == 0
    assert parse_size("9007199254740993 B") == 2**53 + 1
    with pytest.raises(InputError, match=r"'1.5 B' is not a whole number of bytes"):
        parse_size("1.5 B")


def test_compute_rate_may_be_a_plain_number() -> None:
    """Operations per second have no second unit to be mixed up with."""
    assert parse_flops("10 TFLOP/s") == parse_flops(10**13) == parse_flops(1e13) == 1e13


@pytest.mark.parametrize("bare", [5, 5.0, "5", "1e3", 0])
def test_a_bare_number_is_refused(bare: object) -> None:
    """A bandwidth or time without unit is an error that shows a way to write it."""
    with pytest.raises(InputError, match="needs a unit, for example 1 Gbit/s"):
        parse_bandwidth(bare)
    with pytest.raises(InputError, match="needs a unit, for example 65 ms"):
        parse_time(bare)


@pytest.mark.parametrize("text", ["1 Gb/s", "1 Gbps", "1 GBps", "1 gbps"])
def test_bits_or_bytes_are_never_guessed(text: str) -> None:
    """An ambiguous unit is refused, and both things it could mean are named."""
    with pytest.raises(InputError, match=r"bits or bytes\? write Gbit/s or GB/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1 gbit/s", "did you mean 'Gbit/s'"),
        ("1 Gbit", "did you mean 'Gbit/s'"),
        ("1 parsec/s", "unknown unit 'parsec/s'"),
        ("-1 Gbit/s", "must not be negative"),
        ("0 Gbit/s", "must be more than zero"),
        ("1e-320 bit/s", ""),
        ("1e-400 B/s", "must be more than zero"),
        ("1e400 B/s", "too large"),
        ("1e999999999 B/s", "too large"),
        ("1e300 TB/s", "too large"),
        ("nan B/s", "is not a bandwidth"),
        ("inf B/s", "is not a bandwidth"),
        ("fast", "is not a bandwidth"),
        ("", "is not a bandwidth"),
        ("9" * 5000 + " B/s", "is not a bandwidth"),
    ],
)
def test_what_no_link_can_have_is_refused(text: str, hint: str) -> None:
    """Unknown units, and zero, negative, endless or meaningless numbers, each with its reason."""
    if not hint:
        assert parse_bandwidth(text) > 0  # tiny, but a bandwidth
        return
    with pytest.raises(InputError) as caught:
        parse_bandwidth(text)
    assert hint in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [None, True, [1], {"a": 1}, math.nan, math.inf])
def test_what_is_no_text_is_refused(value: object) -> None:
    """Whatever YAML may hold in the place of a quantity is an InputError."""
    for parse in (parse_bandwidth, parse_time, parse_size, parse_flops):
        with pytest.raises(InputError):
            parse(value)


@given(positive)
@settings(max_examples=300, deadline=None)
def test_written_quantities_read_back_as_the_same_float(number: float) -> None:
    """format then parse is the identity, for any positive float."""
    assert parse_bandwidth(format_bandwidth(number)) == number
    assert parse_time(format_time(number)) == number
    assert parse_flops(format_flops(number)) == number


@given(st.integers(min_value=0, max_value=2**80))
@settings(max_examples=200, deadline=None)
def test_written_sizes_read_back_as_the_same_integer(size: int) -> None:
    """format_size then parse_size is the identity, for any size."""
    assert parse_size(format_size(size)) == size


def test_written_quantities_use_the_unit_a_person_would() -> None:
    """Whole numbers of the largest fitting unit, where there is one."""
    assert format_bandwidth(125e6) == "1 Gbit/s"
    assert format_bandwidth(12.5e9) == "100 Gbit/s"
    assert format_bandwidth(math.inf) == "unlimited"
    assert format_time(0.065) == "65 ms"
    assert format_time(0.0) == "0 s"
    assert format_time(90.0) == "90 s"
    assert format_flops(1e13) == "10 TFLOP/s"
    assert [format_size(n) for n in (0, 10_752, 65_536, 10**9)] == [
        "0 B",
        "10752 B",
        "64 KiB",
        "1 GB",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (10_752, "10.8 kB"),
        (999_950, "1 MB"),
        (1_234_567_890, "1.23 GB"),
        (3e17, "300000 TB"),
    ],
)
def test_bytes_for_reading(count: float, text: str) -> None:
    """Three significant digits, and never a thousand of a smaller unit."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (20e-6, "20 us"),
        (0.065, "65 ms"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (86_399, "1 d 00 h"),
        (math.nan, "nan"),
    ],
)
def test_seconds_for_reading(seconds: float, text: str) -> None:
    """Two units above a minute, and rounding carries into the larger one."""
    assert format_seconds(seconds) == text


# ------------------------------------------------------------------------------------------ prices


@pytest.mark.parametrize(
    ("text", "per_byte", "currency", "written"),
    [
        ("0.02 USD/GB", 2e-11, "USD", "0.02 USD/GB"),
        ("20EUR / TB", 2e-11, "EUR", "0.02 EUR/GB"),
        ("0 CHF/B", 0.0, "CHF", "0 CHF/GB"),
        ("1 USD/GiB", 1 / 2**30, "USD", None),
    ],
)
def test_a_price_is_per_byte(text: str, per_byte: float, currency: str, written: str) -> None:
    """An amount of a currency; written per gigabyte, as the very same number."""
    price = parse_price(text)
    assert price == Price(per_byte, currency)
    assert parse_price(format_price(price)) == price
    assert written in (None, format_price(price))


@given(st.floats(0, 1e6), st.sampled_from(["USD", "EUR"]))
def test_written_prices_read_back_as_the_same_number(per_byte: float, currency: str) -> None:
    """Any amount per byte."""
    price = Price(per_byte, currency)
    assert parse_price(format_price(price)) == price


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("0.02", "is not a price; write an amount, a currency and a size, for example 0.02 USD/GB"),
        (0.02, "is not a price"),
        ("0.02 USD", "is not a price"),
        ("0.02 /GB", "is not a price"),
        ("0.02 usd/GB", "is not a price"),
        ("USD/GB", "is not a price"),
        ("x USD/GB", "is not a price"),
        ("-1 USD/GB", "must not be negative"),
        ("1e999 USD/GB", "is too large"),
        ("1 USD/Gb", "'Gb': bits or bytes? write Gbit or GB"),
        ("1 USD/GBB", "unknown unit 'GBB'; did you mean 'GB'?"),
    ],
)
def test_what_is_no_price_is_refused(value: object, hint: str) -> None:
    """The whole value is repeated, with what is wrong about it."""
    with pytest.raises(InputError) as caught:
        parse_price(value)
    assert str(caught.value).startswith(repr(value))
    assert hint in str(caught.value)
