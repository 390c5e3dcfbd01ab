"""Encoding what travels: number formats and payload buffers."""

from islands.compression.formats import DTYPES, Buffer, FloatFormat, decode, encode, itemsize
from islands.compression.payload import Payload, Statistics, Update

__all__ = [
    "DTYPES",
    "Buffer",
    "FloatFormat",
    "Payload",
    "Statistics",
    "Update",
    "decode",
    "encode",
    "itemsize",
]
