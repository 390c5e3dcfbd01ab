"""What a worker does in which order: the streams' schedules merged into one program.

With round policy ``all`` every worker runs the same program, so the order of its receives is also
the order in which the coordinator closes rounds. Nothing here knows a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from islands.layout import Stream
from islands.trace import Compute, End, Mark, Receive


@dataclass(frozen=True, slots=True)
class Due:
    """Fragment ``fragment`` is to be sent, for the ``version``-th time, after ``step`` local
    steps."""

    fragment: int
    version: int
    step: int


Action: TypeAlias = Compute | Due | Receive | Mark | End


def program(streams: Sequence[Stream], steps: int, eval_every: int) -> Iterator[Action]:
    """The operations of one worker over a whole run of ``steps`` local steps.

    At a boundary sends come before receives, receives before an evaluation. At the end fragments in
    flight are applied, then every fragment with unsent steps is sent once more; only then comes the
    last evaluation. ``eval_every`` = 0 evaluates only there.
    """
    versions = [0] * len(streams)
    flying: list[tuple[int, Due]] = []  # (step at which it lands, what)

    def send(fragment: int, step: int) -> Due:
        versions[fragment] += 1
        due = Due(fragment, versions[fragment], step)
        flying.append((step + streams[fragment].overlap, due))
        return due

    def land(now: int) -> Iterator[Receive]:
        landing = sorted(
            (e for e in flying if e[0] <= now), key=lambda e: (e[0], e[1].step, e[1].fragment)
        )
        for entry in landing:
            flying.remove(entry)
            yield Receive(entry[1].fragment, entry[1].version)

    def due_at(stream: Stream, step: int) -> bool:
        return step >= stream.first and (step - stream.first) % stream.period == 0

    def next_due(stream: Stream, after: int) -> int:
        if after < stream.first:
            return stream.first
        return after + stream.period - (after - stream.first) % stream.period

    yield from [Mark(0)] if eval_every else []
    step = 0
    while step < steps:
        done = step
        boundaries = [next_due(stream, step) for stream in streams]
        boundaries += [at for at, _ in flying]
        boundaries += [step + eval_every - step % eval_every] if eval_every else []
        step = min(steps, *boundaries)
        yield Compute(done, step - done)
        for fragment, stream in enumerate(streams):
            if due_at(stream, step):
                yield send(fragment, step)
        yield from land(step if step < steps else steps + max(s.overlap for s in streams))
        if step < steps and eval_every and step % eval_every == 0:
            yield Mark(step)
    for fragment, stream in enumerate(streams):
        if not due_at(stream, steps):
            yield send(fragment, steps)
    yield from land(steps + max(s.overlap for s in streams))
    yield Mark(steps)
    yield End()
