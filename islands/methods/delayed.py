"""Delayed DiLoCo: a round's result is applied when the next round ends.

The plain way to hide a whole round of communication (Kale et al. 2025, arXiv:2502.12996, "delayed
outer gradients"). The outer step is one round behind, so the paper's outer learning rate is too
large for it: it reports 3.01 against DiLoCo's 2.67, and 2.73 with a lower one.
"""

from __future__ import annotations

from islands.methods.diloco import DiLoCo


class Delayed(DiLoCo):
    """DiLoCo with one round of overlap: bytes as DiLoCo, hidden behind ``sync_every`` steps."""

    name: str = "delayed"

    @property
    def lag(self) -> int:
        return self.sync_every
