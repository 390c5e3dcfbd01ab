"""Encoding what travels: number formats and payload buffers."""

from islands.compression.formats import DTYPES, Buffer, FloatFormat, decode, encode, itemsize
from islands.compression.payload import CHECKSUM_BYTES, Payload, Statistics, Update
from islands.compression.signs import SignCode
from islands.compression.sparse import SparseCode, rows_of_tensor

__all__ = [
    "CHECKSUM_BYTES",
    "DTYPES",
    "Buffer",
    "FloatFormat",
    "Payload",
    "SignCode",
    "SparseCode",
    "Statistics",
    "Update",
    "decode",
    "encode",
    "itemsize",
    "rows_of_tensor",
]
