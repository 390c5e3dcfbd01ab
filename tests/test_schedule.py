"""One worker's program: what is sent, received and evaluated after which step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands import schedule
from islands.layout import Stream
from islands.schedule import Action, Due, program
from islands.trace import Compute, End, Mark, Receive


def stream(period: int, first: int | None = None, overlap: int = 0) -> Stream:
    return Stream(("w",), period=period, first=first or period, overlap=overlap)


def timeline(streams: list[Stream], steps: int, eval_every: int = 0) -> list[tuple[int, Action]]:
    """Every action but Compute with the step after which it happens."""
    at, found = 0, []
    for action in program(streams, steps, eval_every):
        if isinstance(action, Compute):
            assert action.first == at, "steps are counted without gaps"
            at += action.count
        else:
            found.append((at, action))
    assert at == steps
    return found


def sends(actions: list[tuple[int, Action]], fragment: int = 0) -> list[int]:
    return [at for at, a in actions if isinstance(a, Due) and a.fragment == fragment]


def lands(actions: list[tuple[int, Action]], fragment: int = 0) -> list[int]:
    return [at for at, a in actions if isinstance(a, Receive) and a.fragment == fragment]


def test_a_short_last_period_is_synchronised_too() -> None:
    """H = 5 and 12 steps: rounds after 5, 10 and 12."""
    assert list(program([stream(5)], 12, 0)) == [
        Compute(0, 5),
        Due(0, 1, 5),
        Receive(0, 1),
        Compute(5, 5),
        Due(0, 2, 10),
        Receive(0, 2),
        Compute(10, 2),
        Due(0, 3, 12),
        Receive(0, 3),
        Mark(12),
        End(),
    ]


def test_no_second_round_where_the_period_ends_with_the_run() -> None:
    """A fragment that was just sent has no unsent steps."""
    assert sends(timeline([stream(5)], 10)) == [5, 10]


def test_a_run_shorter_than_its_period_has_one_round() -> None:
    """H = 50 and 3 steps: one round, after 3."""
    assert sends(timeline([stream(50)], 3)) == [3]


def test_evaluations_stand_at_multiples_and_at_the_end() -> None:
    """``eval_every`` 4 and 10 steps: before training, after 4, 8 and 10; the last one last."""
    actions = timeline([stream(4)], 10, 4)
    assert [at for at, a in actions if isinstance(a, Mark)] == [0, 4, 8, 10]
    assert actions[-2:] == [(10, Mark(10)), (10, End())]
    assert [a for at, a in actions if at == 4] == [Due(0, 1, 4), Receive(0, 1), Mark(4)]


def test_zero_evaluates_only_at_the_end() -> None:
    """``eval_every`` 0: one evaluation, after the last round."""
    assert [a for _, a in timeline([stream(4)], 10) if isinstance(a, Mark)] == [Mark(10)]


def test_the_result_is_received_overlap_steps_after_the_send() -> None:
    """Overlap 2, period 4: sent after 4, 8, 12; received after 6, 10, and at the end."""
    actions = timeline([stream(4, overlap=2)], 12)
    assert (sends(actions), lands(actions)) == ([4, 8, 12], [6, 10, 12])


def test_at_a_shared_boundary_a_send_comes_before_a_receive() -> None:
    """Overlap = period: after 8 steps version 2 is sent, then version 1 received."""
    actions = timeline([stream(4, overlap=4)], 10)
    assert [a for at, a in actions if at == 8] == [Due(0, 2, 8), Receive(0, 1)]


def test_what_is_in_flight_lands_before_the_final_round() -> None:
    """At the end flying fragments are applied, then what has unsent steps goes once more."""
    actions = timeline([stream(4, overlap=4)], 10)
    assert [a for at, a in actions if at == 10] == [
        Receive(0, 2),
        Due(0, 3, 10),
        Receive(0, 3),
        Mark(10),
        End(),
    ]


def test_fragments_keep_their_own_calendars() -> None:
    """Three streams: firsts 2, 3, 5; periods 4, 6, 5; overlaps 1, 6, 0; 12 steps."""
    actions = timeline([stream(4, 2, 1), stream(6, 3, 6), stream(5, 5, 0)], 12)
    assert [sends(actions, f) for f in range(3)] == [[2, 6, 10, 12], [3, 9, 12], [5, 10, 12]]
    assert [lands(actions, f) for f in range(3)] == [[3, 7, 11, 12], [9, 12, 12], [5, 10, 12]]


@pytest.mark.parametrize(
    ("period", "first", "overlap"), [(0, 1, 0), (4, 0, 0), (4, 4, 5), (4, 4, -1)]
)
def test_impossible_schedules_are_refused(period: int, first: int, overlap: int) -> None:
    """A period and a first step of at least one, an overlap of at most one period."""
    with pytest.raises(ValueError, match="no such schedule"):
        Stream(("w",), period=period, first=first, overlap=overlap)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    period = draw(st.integers(1, 9))
    return stream(period, draw(st.integers(1, 12)), draw(st.integers(0, period)))


@settings(deadline=None, max_examples=60)
@given(st.lists(streams(), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 9))
def test_any_program_sends_and_receives_everything(
    calendars: list[Stream], steps: int, eval_every: int
) -> None:
    """Any streams: versions count from 1, each is received once and after its send, in time or at
    the end, and at the end no step is unsent."""
    actions = timeline(calendars, steps, eval_every)
    for fragment, calendar in enumerate(calendars):
        sent = [
            (at, a.version)
            for at, a in actions
            if isinstance(a, Due) and a.fragment == fragment and a.step == at
        ]
        received = [
            (at, a.version)
            for at, a in actions
            if isinstance(a, Receive) and a.fragment == fragment
        ]
        due = [s for s in range(1, steps + 1) if s >= calendar.first]
        due = [s for s in due if (s - calendar.first) % calendar.period == 0]
        expected = due if due and due[-1] == steps else [*due, steps]
        assert sent == list(zip(expected, range(1, len(expected) + 1), strict=True))
        assert received == [(min(at + calendar.overlap, steps), version) for at, version in sent]
    order = [a for _, a in actions if isinstance(a, Due | Receive)]
    for action in order:
        if isinstance(action, Receive):
            key = (action.fragment, action.version)
            before = order[: order.index(action)]
            assert key in {(a.fragment, a.version) for a in before if isinstance(a, Due)}
    assert Counter(type(a) for _, a in actions)[End] == 1


@settings(deadline=None, max_examples=200)
@given(st.lists(streams(), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 45))
def test_sends_are_counted_without_the_program(
    calendars: list[Stream], steps: int, first: int
) -> None:
    """As many as the program has, also of a worker that begins later."""
    due = Counter(
        a.fragment for a in program(calendars, steps, 0, first=first) if isinstance(a, Due)
    )
    assert schedule.sends(calendars, steps, first) == [due[n] for n in range(len(calendars))]
