"""What a worker does in which order: the streams' schedules merged into one program.

With round policy ``all`` every worker runs the same program, or the parts of it in which it takes
part, so the order of its receives is also the order in which the coordinator closes rounds.
Nothing here knows a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from islands.layout import Stream
from islands.trace import Compute, End, Join, Leave, Mark, Pass, Receive, RoundKey

#: Local steps first … last − 1, counted from 0.
Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Due:
    """Fragment ``fragment`` is to be sent, for the ``version``-th time, after ``step`` local
    steps."""

    fragment: int
    version: int
    step: int


Action: TypeAlias = Compute | Due | Receive | Mark | Pass | Join | Leave | End


def program(
    streams: Sequence[Stream],
    steps: int,
    eval_every: int,
    changes: Iterable[int] = (),
    first: int = 0,
    versions: Mapping[int, int] | None = None,
) -> Iterator[Action]:
    """The operations of one worker over a whole run of ``steps`` local steps, from ``first`` on.

    At a boundary sends come before receives, receives before an evaluation, and last, at the steps
    ``changes``, workers join and leave. At the end fragments in flight are applied, then every
    fragment with unsent steps is sent once more; only then comes the last evaluation.
    ``eval_every`` = 0 evaluates only there. Who begins later sends a fragment only after a full
    period, and counts on from ``versions``.
    """
    cuts = sorted({step for step in changes if first < step < steps})
    sent = [(versions or {}).get(fragment, 0) for fragment in range(len(streams))]
    flying: list[tuple[int, Due]] = []  # (step at which it lands, what)

    def send(fragment: int, step: int) -> Due:
        sent[fragment] += 1
        due = Due(fragment, sent[fragment], step)
        flying.append((step + streams[fragment].overlap, due))
        return due

    def ready(stream: Stream, step: int) -> bool:
        return not first or step - first >= stream.period

    def land(now: int) -> Iterator[Receive]:
        landing = sorted(
            (e for e in flying if e[0] <= now), key=lambda e: (e[0], e[1].step, e[1].fragment)
        )
        for entry in landing:
            flying.remove(entry)
            yield Receive(entry[1].fragment, entry[1].version)

    yield from [Mark(0)] if eval_every and not first else []
    step = first
    while step < steps:
        done = step
        boundaries = [stream.next_due(step) for stream in streams]
        boundaries += [at for at, _ in flying]
        boundaries += [step + eval_every - step % eval_every] if eval_every else []
        while cuts and cuts[0] <= step:
            cuts.pop(0)
        step = min(steps, *boundaries, *cuts[:1])
        yield Compute(done, step - done)
        for fragment, stream in enumerate(streams):
            if stream.is_due(step) and ready(stream, step):
                yield send(fragment, step)
        yield from land(step if step < steps else steps + max(s.overlap for s in streams))
        if step < steps and eval_every and step % eval_every == 0:
            yield Mark(step)
        if cuts[:1] == [step] and step < steps:
            yield Pass(step)
    for fragment, stream in enumerate(streams):
        if not stream.is_due(steps) and ready(stream, steps):
            yield send(fragment, steps)
    yield from land(steps + max(s.overlap for s in streams))
    yield Mark(steps)
    yield End()


def sends(streams: Sequence[Stream], steps: int, first: int = 0) -> list[int]:
    """How often :func:`program` sends each fragment."""
    found = []
    for stream in streams:
        least = max(stream.first, first + stream.period) if first else stream.first
        begins = least if stream.is_due(least) else stream.next_due(least)
        count = (steps - begins) // stream.period + 1 if begins <= steps else 0
        rest = not stream.is_due(steps) and (not first or steps - first >= stream.period)
        found.append(count + rest)
    return found


class Roster:
    """Who takes part when, and in which rounds.

    ``spans`` holds each worker's spans of local steps, in order. A worker that joins later takes
    part in a fragment's round only after a full period; until then it adopts what others made.
    """

    def __init__(
        self, streams: Sequence[Stream], spans: Sequence[Sequence[Span]], steps: int
    ) -> None:
        self._streams = streams
        self._spans = spans
        self.everyone = all(list(own) == [(0, steps)] for own in spans)
        #: Steps at which somebody joins or leaves.
        self.changes = sorted({edge for own in spans for span in own for edge in span} - {0, steps})
        there = sorted(span for own in spans for span in own)
        ends = 0
        for first, last in there:
            if first > ends:
                break
            ends = max(ends, last)
        #: The run ends here: nobody is left after it.
        self.last_step = ends

    def present(self, worker: int, step: int) -> bool:
        """Whether the worker has taken the local step that ends at ``step`` (0: begins there)."""
        own = self._spans[worker]
        return any(first < step <= last or first == step == 0 for first, last in own)

    def contributes(self, worker: int, fragment: int, step: int) -> bool:
        """Whether the worker sends the fragment after ``step`` local steps."""
        period = self._streams[fragment].period
        return any(
            first < step <= last and (not first or step - first >= period)
            for first, last in self._spans[worker]
        )

    def gaps(self, worker: int, steps: int) -> list[Span]:
        """The spans of local steps in which the worker takes no part."""
        edges = [0, *(edge for span in self._spans[worker] for edge in span), steps]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def those_present(self, step: int) -> tuple[int, ...]:
        """The workers for which :meth:`present` holds."""
        return tuple(w for w in range(len(self._spans)) if self.present(w, step))

    def contributors(self, fragment: int, step: int) -> tuple[int, ...]:
        """The workers for which :meth:`contributes` holds."""
        return tuple(w for w in range(len(self._spans)) if self.contributes(w, fragment, step))

    def program(self, worker: int, eval_every: int) -> Iterator[Action]:
        """What one worker does: the common program where it takes part."""
        whole = program(self._streams, self.last_step, eval_every, self.changes)
        return whole if self.everyone else self._part(worker, whole)

    def _part(self, worker: int, whole: Iterable[Action]) -> Iterator[Action]:
        spans = list(self._spans[worker])
        present = bool(spans) and spans[0][0] == 0
        sent: set[RoundKey] = set()
        steps_of: dict[RoundKey, int] = {}
        for action in whole:
            match action:
                case Due(fragment, version, step):
                    steps_of[fragment, version] = step
                    if present and self.contributes(worker, fragment, step):
                        sent.add((fragment, version))
                        yield action
                case Receive(fragment, version):
                    key = (fragment, version)
                    somebody = self.contributors(fragment, steps_of[key])
                    if key in sent or (present and somebody):
                        sent.discard(key)
                        yield action
                case Pass(step):
                    if present:
                        yield action
                    if present and spans[0][1] == step:
                        yield from (Receive(*key) for key in sorted(sent))
                        sent.clear()
                        del spans[0]
                        present = False
                        yield Leave()
                    if not present and spans and spans[0][0] == step:
                        present = True
                        yield Join(step)
                case End():
                    yield action
                case _ if present:
                    yield action
