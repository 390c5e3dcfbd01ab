"""A trace of rounds that are not everyone's, written, read back and timed again."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.errors import InputError
from islands.network import Timeline
from islands.optim import LearningRate
from islands.recording import Recording, read_recording
from islands.results.folder import EXPERIMENT, write_text
from islands.results.recorder import RunRecorder
from islands.trace import Compute, End, Idle, Mark, Members, Op
from tests.helpers import cluster, experiment
from tests.test_rounds_of_some import Case, told, varying, whole
from tests.test_timeline_laws import Uneven


def write(folder: Path, lists: Sequence[Sequence[Op]], declared: Sequence[Members]) -> None:
    """A run's folder with this trace, whose declarations all come first, as the engine's do."""
    workers = len(lists)
    what = experiment(cluster=cluster((workers,), (0.1,)))
    write_text(folder / EXPERIMENT, what.dump_yaml())
    recorder = RunRecorder(
        folder,
        island_of=["a"] * workers,
        steps=30,
        fragments=2,
        rate=LearningRate(1.0, 0, 30, "constant"),
        compute=Uneven(1),
    )
    recorder.traced([(0, members) for members in declared])
    for worker, ops in enumerate(lists):
        for op in ops:
            recorder.traced([(worker, op)])
    recorder.close()


def read(lists: Sequence[Sequence[Op]], declared: Sequence[Members]) -> Recording:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), lists, declared)
        return read_recording(name)


@settings(max_examples=40, deadline=None)
@given(varying(), st.integers(1, 7))
def test_a_recorded_trace_gives_the_runs_own_times(case: Case, piece: int) -> None:
    """To the last bit, however the lists are cut: one worker's piece after the other's."""
    recording = read(case.lists, case.declared)
    timeline = Timeline(
        case.topology, recording.compute, case.operation, scheme=case.scheme, seed=3
    )
    parts = []
    longest = max(map(len, recording.ops))
    for first in range(0, longest, piece):
        for worker, ops in enumerate(recording.ops):
            timeline.extend((worker, op) for op in ops[first : first + piece])
        assert timeline.advance() is None
        parts.append(timeline.take())
    parts.append(timeline.end())
    assert told(parts) == told([whole(case)[1]])


@settings(max_examples=40, deadline=None)
@given(varying(), st.integers(1, 4))
def test_the_opening_of_a_recording_is_a_whole(case: Case, rounds: int) -> None:
    """It comes to an end, and up to there it has the run's own times."""
    recording = read(case.lists, case.declared)
    timeline = Timeline(
        case.topology, recording.compute, case.operation, scheme=case.scheme, seed=3
    )
    opening = recording.opening(rounds)
    timeline.extend((worker, op) for worker, ops in enumerate(opening) for op in ops)
    assert timeline.advance() is None
    _, syncs, marks, _, _ = told([timeline.end()])
    _, all_syncs, all_marks, _, _ = told([whole(case)[1]])
    assert set(marks) <= set(all_marks)
    # What is in flight at the end may have met more traffic in the whole run; marks wait for it.
    assert {sync[:4] for sync in syncs} <= {sync[:4] for sync in all_syncs}


def test_a_trace_with_times_of_its_own_cannot_be_timed_again() -> None:
    """Its rounds closed by the clock."""
    with pytest.raises(InputError, match="closed by the clock"):
        read([[Compute(0, 1), Idle(3.0), Mark(1), End()]], [])


def test_computing_is_joined_only_where_steps_follow_each_other() -> None:
    """Who dies and comes back may go on at another step."""
    ops = [Compute(0, 2), Compute(2, 1), Compute(7, 2), End()]
    assert read([ops], []).ops == ((Compute(0, 3), Compute(7, 2), End()),)
