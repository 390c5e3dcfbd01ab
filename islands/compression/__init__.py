"""Encoding what travels: number formats and payload buffers."""

from islands.compression.formats import DTYPES, Buffer, FloatFormat, decode, encode, itemsize
from islands.compression.payload import Payload, Update

__all__ = ["DTYPES", "Buffer", "FloatFormat", "Payload", "Update", "decode", "encode", "itemsize"]
