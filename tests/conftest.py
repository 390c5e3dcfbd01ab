"""Fixtures and options that every test file may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from islands.config import Experiment
from islands.experiment import Runner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write the recorded trajectories under tests/data anew instead of comparing with them",
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether recorded values are to be written instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny models on one torch thread: faster, and the rounding is the actors'."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """The experiments that were really trained, in order."""
    seen: list[Experiment] = []
    run = Runner.run

    def spy(self: Runner, job: Any, folder: Path) -> Any:
        seen.append(job.experiment)
        return run(self, job, folder)

    monkeypatch.setattr(Runner, "run", spy)
    return seen
