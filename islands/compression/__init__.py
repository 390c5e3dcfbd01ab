"""Encoding what travels: number formats and payload buffers."""

from islands.compression.formats import (
    CODE_BITS,
    DTYPES,
    Buffer,
    FloatFormat,
    WireFormat,
    bits_of,
    decode,
    encode,
    itemsize,
)
from islands.compression.payload import CHECKSUM_BYTES, Payload, Statistics, Update
from islands.compression.quantise import BlockCode
from islands.compression.signs import SignCode
from islands.compression.sparse import SparseCode, rows_of_tensor

__all__ = [
    "CHECKSUM_BYTES",
    "CODE_BITS",
    "DTYPES",
    "BlockCode",
    "Buffer",
    "FloatFormat",
    "Payload",
    "SignCode",
    "SparseCode",
    "Statistics",
    "Update",
    "WireFormat",
    "bits_of",
    "decode",
    "encode",
    "itemsize",
    "rows_of_tensor",
]
