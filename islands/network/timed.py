"""Rounds that close by the clock: what the caller may do at each event of a timed run.

The caller gets one event after the other (:data:`islands.network.timings.Event`) and answers each
with actions, which all happen at the moment of the latest event.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Reply(NamedTuple):
    """Methods that need a star: send the coordinator's answer of ``nbytes`` to a contribution that
    has arrived. ``itemsize`` is the bytes of one value. Result: None."""

    worker: int
    fragment: int
    version: int
    nbytes: int
    itemsize: int


class Launch(NamedTuple):
    """All other methods: start the collective of these workers' contributions, all of which have
    arrived.

    Args:
        parts: (worker, version) of each member, each worker once. Ledger rows carry the first
            one's version.
        fragment: the fragment that is synchronised.
        number: names the collective from now on; each is used once.
        barrier: members go on when the last of them is done, right after the decision about the
            Closed that comes then; without it each goes on when it is done, and no event comes.

    Result: None.
    """

    parts: tuple[tuple[int, int], ...]
    fragment: int
    number: int
    barrier: bool


class Release(NamedTuple):
    """A contribution that has arrived takes no part: its worker goes on without it.

    ``nbytes`` of control are handed to the worker. ``after``: it goes on only when this collective
    has ended, if that is still under way; if it is aborted, the worker waits for another decision,
    and no control has been counted. Result: None.
    """

    worker: int
    fragment: int
    version: int
    nbytes: int
    after: int | None = None


class WakeAt(NamedTuple):
    """Ask for a Wake with this ``tag`` at ``time_s``, now or later. Result: None."""

    time_s: float
    tag: int


class Kill(NamedTuple):
    """The worker dies now.

    All that it was told and has not done is dropped, what it did in advance of now is undone, it
    waits for nothing and holds nobody up; its clock stands at this moment. Its transfers count that
    its port has had in its queue by now, and nothing more of it begins. A collective in which it is
    not done can only be aborted any more. To its contributions there can be no Reply, Launch or
    Release. Of its syncs, all those are told with the latest event that will ever be.

    Result: the numbers of the collectives under way in which it was not done, ascending (tuple).
    """

    worker: int


class Abort(NamedTuple):
    """The collective ``number`` ends now, without a result.

    What no port has had in its queue by now never begins; what one has counts. Its living members
    that have not gone on wait for another decision, as if they had just arrived; no new Arrival
    comes.

    Result: the wire bytes of those who have not gone on (int), which are in ``Timings.spent`` too.
    """

    number: int


class Revive(NamedTuple):
    """A dead worker lives again, from ``time_s`` on, now or later, and waits for operations.

    ``step``: the local steps it stands at; no Mark or Pass before that is waited for. Result: None.
    """

    worker: int
    time_s: float
    step: int


Action: TypeAlias = Reply | Launch | Release | WakeAt | Kill | Abort | Revive

#: What an action gives back: see each of them.
Result: TypeAlias = int | tuple[int, ...] | None
