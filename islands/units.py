"""Quantities as people write them: ``1 Gbit/s``, ``12.5 GB/s``, ``65 ms``, ``64 KiB``.

A factor of eight or of 1.05 hides easily in a number without its unit, so nothing is guessed: a
bare number is refused, ``b`` alone (bits or bytes?) is refused, ``k M G T`` are powers of ten and
``Ki Mi Gi Ti`` powers of two. Inside the program every quantity is in base units: bytes per second,
seconds, bytes, floating-point operations per second.

Arithmetic is exact (fractions, rounded once at the end), so each ``format_*`` returns text that its
``parse_*`` reads back as the very same number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from islands.errors import InputError, nearest

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NUMBER_AND_UNIT = re.compile(rf"({_NUMBER})\s*(.*)", re.DOTALL)
_PRICE = re.compile(rf"({_NUMBER})\s*([A-Z]{{3}})\s*/\s*(\S+)")
_LONGEST = 64  # characters; no quantity needs more, and exact arithmetic on longer ones is slow

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_SIZES: dict[str, Fraction] = {
    prefix + unit: Fraction(factor * bits, 8)
    for prefix, factor in (_DECIMAL | _BINARY).items()
    for unit, bits in {"bit": 1, "bits": 1, "B": 8, "byte": 8, "bytes": 8}.items()
}
_BANDWIDTHS = {f"{unit}/s": factor for unit, factor in _SIZES.items()}
_TIMES: dict[str, Fraction] = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),  # the micro sign
    "μs": Fraction(1, 10**6),  # the Greek letter
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_FLOPS = {f"{prefix}FLOP/s": Fraction(factor) for prefix, factor in _DECIMAL.items()}


class Price(NamedTuple):
    """What a byte costs that leaves over a link: an amount of a currency (``USD``)."""

    per_byte: float
    currency: str


# --------------------------------------------------------------------------------------- from text


def parse_bandwidth(value: object) -> float:
    """``"1 Gbit/s"`` or ``"12.5 GB/s"`` as bytes per second, ``"unlimited"`` as infinity.

    Raises `InputError` for a missing or ambiguous unit, zero, a negative or a non-finite number.
    """
    if value == "unlimited":
        return math.inf
    return _more_than_zero(_parse(value, "a bandwidth", _BANDWIDTHS, "1 Gbit/s"), value)


def parse_time(value: object) -> float:
    """``"65 ms"`` as seconds; zero is legal. Raises `InputError` as `parse_bandwidth` does."""
    return _rounded(_parse(value, "a time", _TIMES, "65 ms"), value)


def parse_size(value: object) -> int:
    """``"64 KiB"`` as a whole number of bytes; zero is legal.

    Raises `InputError` as `parse_bandwidth` does, and for a size that ends inside a byte.
    """
    size = _parse(value, "a size", _SIZES, "64 KiB")
    if size.denominator != 1:
        raise InputError(f"{_shown(value)} is not a whole number of bytes")
    return int(size)


def parse_flops(value: object) -> float:
    """``"10 TFLOP/s"``, or a plain number of operations per second: there is no second unit.

    Raises `InputError` for zero, a negative or a non-finite number, or an unknown unit.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value!r} FLOP/s"
    return _more_than_zero(_parse(value, "a compute rate", _FLOPS, "10 TFLOP/s"), value)


def parse_price(value: object) -> Price:
    """``"0.02 USD/GB"`` as an amount per byte and its currency (three capitals); zero is legal.

    Raises `InputError` for a missing currency or size, a negative or a non-finite amount.
    """
    text = value.strip() if isinstance(value, str) else ""
    match = _PRICE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise InputError(
            f"{_shown(value)} is not a price; write an amount, a currency and a size, "
            "for example 0.02 USD/GB"
        )
    amount, currency, unit = match.groups()
    if unit not in _SIZES:
        raise InputError(f"{_shown(value)} has an unknown unit {_unit_hint(unit, _SIZES)}")
    if amount.startswith("-"):
        raise InputError(f"{_shown(value)} must not be negative")
    if math.isinf(float(amount)):
        raise InputError(f"{_shown(value)} is too large")
    return Price(_rounded(Fraction(amount) / _SIZES[unit], value), currency)


def _parse(value: object, what: str, units: Mapping[str, Fraction], example: str) -> Fraction:
    """Number times unit, exactly."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    text = str(value).strip() if numeric or isinstance(value, str) else ""
    match = _NUMBER_AND_UNIT.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise InputError(f"{_shown(value)} is not {what}; write for example {example}")
    number, unit = match.groups()
    if not unit:
        raise InputError(f"{_shown(value)} needs a unit, for example {example}")
    if unit not in units:
        raise InputError(f"{_shown(value)} has an unknown unit {_unit_hint(unit, units)}")
    if number.startswith("-"):
        raise InputError(f"{_shown(value)} must not be negative")
    # An exponent beyond float64 is caught before it becomes a fraction of that many digits.
    if math.isinf(float(number)):
        raise InputError(f"{_shown(value)} is too large")
    return Fraction(number) * units[unit] if float(number) else Fraction(0)


def _rounded(exact: Fraction, value: object) -> float:
    try:
        return float(exact)
    except OverflowError:
        raise InputError(f"{_shown(value)} is too large") from None


def _more_than_zero(exact: Fraction, value: object) -> float:
    number = _rounded(exact, value)
    if number == 0.0:
        raise InputError(f"{_shown(value)} must be more than zero")
    return number


def _unit_hint(unit: str, units: Mapping[str, Fraction]) -> str:
    """What to write instead: the ambiguous ``b`` and ``ps`` spelt out, else the nearest unit."""
    unclear = re.fullmatch(r"([kKmMgGtT]i?)?(?:b|bps|b/s|Bps)", unit)
    if unclear and units in (_SIZES, _BANDWIDTHS):
        prefix = (unclear.group(1) or "").capitalize()
        prefix = "k" if prefix == "K" else prefix
        tail = "" if units is _SIZES else "/s"
        return f"{unit!r}: bits or bytes? write {prefix}bit{tail} or {prefix}B{tail}"
    usual = [known for known in units if not re.search("bits|byte|µ|μ|^P|^T|FLOP", known)]
    same = [known for known in units if known.lower() == unit.lower()]
    return f"{unit!r}{nearest(same[0] if same else unit, same or usual or units)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# ----------------------------------------------------------------- to text that reads back the same


def format_bandwidth(bytes_per_s: float) -> str:
    """The largest unit of bits per second that leaves at least 1: 1.25e8 -> ``1 Gbit/s``."""
    if bytes_per_s == math.inf:
        return "unlimited"
    units = ("Tbit/s", "Gbit/s", "Mbit/s", "kbit/s", "bit/s")
    return _format(bytes_per_s, _BANDWIDTHS, units)


def format_time(seconds: float) -> str:
    """The largest of s, ms, us, ns that leaves at least 1: 0.065 -> ``65 ms``."""
    return "0 s" if seconds == 0 else _format(seconds, _TIMES, ("s", "ms", "us", "ns"))


def format_flops(flops_per_s: float) -> str:
    """The largest unit that leaves at least 1: 1e13 -> ``10 TFLOP/s``."""
    units = ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s", "FLOP/s")
    return _format(flops_per_s, _FLOPS, units)


def format_price(price: Price) -> str:
    """Per gigabyte: ``0.02 USD/GB``."""
    amount, _ = _format(price.per_byte, {"GB": 1 / _SIZES["GB"]}, ["GB"]).split()
    return f"{amount} {price.currency}/GB"


def format_size(size_bytes: int) -> str:
    """The shortest whole number of a unit: 65536 -> ``64 KiB``, 1000 -> ``1 kB``, 7 -> ``7 B``."""
    units = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB", "B")
    whole = [(size_bytes / _SIZES[unit], unit) for unit in units]
    texts = [f"{count} {unit}" for count, unit in whole if count.denominator == 1 and count]
    return min(texts, key=len, default="0 B")


def _format(number: float, units: Mapping[str, Fraction], names: Iterable[str]) -> str:
    """Exact decimal text in the first unit that leaves at least 1, else in the last.

    The shortest decimal that denotes the float is multiplied by an exact factor, so parsing divides
    it by that factor again and rounds to the same float.
    """
    shortest = Fraction(repr(float(number)))
    unit = ""
    for unit in names:
        if shortest >= units[unit]:
            break
    count = shortest / units[unit]
    decimal = (Decimal(count.numerator) / Decimal(count.denominator)).normalize()
    return f"{decimal:f} {unit}" if 1e-6 <= decimal < 10**15 else f"{decimal} {unit}"


# ------------------------------------------------------------------------------ to text for reading


def format_bytes(count: float) -> str:
    """About three significant digits: ``999 B``, ``10.8 kB``, ``1.23 GB`` (powers of ten)."""
    return _three_digits(count, (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)))


def format_seconds(seconds: float) -> str:
    """About three significant digits below a minute, then two units: ``65 ms``, ``2 min 05 s``."""
    if not math.isfinite(seconds):
        return f"{seconds}"
    if seconds < 59.95:
        units = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0))
        return _three_digits(seconds, units) if seconds else "0 s"
    minutes, second = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {second:02d} s"
    hours, minute = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours} h {minute:02d} min"
    days, hour = divmod(round(seconds / 3600), 24)
    return f"{days} d {hour:02d} h"


def _three_digits(number: float, units: tuple[tuple[str, float], ...]) -> str:
    """In the largest unit that leaves at least 1 after rounding (never ``1000 kB``)."""
    rounded = float(f"{number:.3g}")
    name, factor = units[0]
    for unit, size in units:
        if abs(rounded) >= size * (1 - 1e-12):
            name, factor = unit, size
    count = float(f"{number / factor:.3g}")
    return f"{count:.0f} {name}" if abs(count) >= 1000 else f"{count:g} {name}"
