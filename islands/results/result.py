"""What a finished run hands back: its summary, its tables and where they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from islands.errors import InputError
from islands.results.folder import SUMMARY, holds_run
from islands.results.tables import read_table


@dataclass(frozen=True)
class Result:
    """A run's results. ``summary`` is what ``summary.json`` holds; a number that was not finite
    (the loss of a run that diverged) is None there."""

    folder: Path
    summary: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """The results of an earlier run; InputError if there is none or it did not finish."""
        folder = Path(folder)
        if not holds_run(folder):
            raise InputError(f"folder: {folder} holds no run")
        try:
            summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"folder: the run in {folder} did not finish (no {SUMMARY}); "
                "its tables so far can be read with islands.results.read_table"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"folder: cannot read {folder / SUMMARY}: {error}") from error
        return cls(folder, summary)

    def table(self, name: str) -> pa.Table:
        """A table as one pyarrow.Table: steps, syncs, transfers, evals, events or trace."""
        return read_table(self.folder, name)
