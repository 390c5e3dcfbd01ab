"""Counter-based random numbers: every draw is named, so none depends on who drew before.

A generator is keyed by (seed, purpose, worker or link, index). Two actors that draw in another
order, or a run that is cut into other pieces, see the same numbers (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3": Philox).
"""

from __future__ import annotations

import hashlib

import numpy as np


def _digest(seed: int, purpose: str, ids: tuple[int | str, ...]) -> bytes:
    return hashlib.blake2b(repr((seed, purpose, *ids)).encode(), digest_size=16).digest()


def generator(seed: int, purpose: str, *ids: int | str) -> np.random.Generator:
    """A NumPy generator for this purpose and these ids, independent of every other one."""
    key = int.from_bytes(_digest(seed, purpose, ids), "little")
    return np.random.Generator(np.random.Philox(key=key))


def seed_for(seed: int, purpose: str, *ids: int | str) -> int:
    """A 63-bit seed for a library that wants an integer (``torch.manual_seed``)."""
    return int.from_bytes(_digest(seed, purpose, ids)[:8], "little") >> 1
