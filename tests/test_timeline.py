"""A trace gets its times: textbook collectives, and small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
import pytest

from islands.clock import FixedSteps
from islands.errors import InputError
from islands.network import Site, SyncTiming, Timeline, Timings, Topology, Wire, collective_seconds
from islands.trace import Bytes, Compute, End, Mark, Op, Receive, Send


def ring_of_islands(count: int, bytes_per_s: float, delay_s: float) -> Topology:
    """One worker per island, LANs that cost nothing, equal wires between neighbours."""
    sites = [Site(f"i{k}", 1, inf, 0.0) for k in range(count)]
    pairs = [(k, (k + 1) % count) for k in range(count if count > 2 else count - 1)]
    wires = [Wire(f"w{a}", (f"i{a}", f"i{b}"), bytes_per_s, delay_s) for a, b in pairs]
    return Topology.build(sites, wires, None)


def run(
    topology: Topology,
    collective: str,
    programs: Sequence[Sequence[Op]],
    step_s: Sequence[float] | None = None,
    **options: bool,
) -> tuple[Timeline, Timings]:
    """Time whole programs, one per worker; steps take a second unless told otherwise."""
    compute = FixedSteps(tuple(step_s or [1.0] * topology.workers))
    timeline = Timeline(topology, compute, collective, **options)
    for worker, ops in enumerate(programs):
        timeline.extend((worker, op) for op in [*ops, End()])
    assert timeline.advance() is None
    return timeline, timeline.take()


def exchange(size: int, version: int = 1, step: int = 0) -> list[Op]:
    """Send and wait for the result."""
    return [Send(0, version, step, Bytes(size), 1), Receive(0, version)]


def by_worker(syncs: Iterable[SyncTiming]) -> dict[tuple[int, int, int], SyncTiming]:
    return {(sync.fragment, sync.version, sync.worker): sync for sync in syncs}


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("members", [2, 3, 4, 7])
def test_idle_ring_all_reduce_takes_the_textbook_time(members: int, vectorise: bool) -> None:
    """2(p − 1)·(n/p/bandwidth + delay) for n bytes over p members."""
    size = 1000 * members
    topology = ring_of_islands(members, 500.0, 0.25)
    _, found = run(
        topology, "all_reduce", [exchange(size)] * members, [0.0] * members, vectorise=vectorise
    )
    textbook = 2 * (members - 1) * (size / members / 500.0 + 0.25)
    assert [sync.done_s for sync in found.syncs] == pytest.approx([textbook] * members, rel=1e-12)
    assert collective_seconds(topology, "all_reduce", size, 1) == pytest.approx(textbook)


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("members", [2, 3, 4, 7])
def test_idle_ring_all_gather_takes_the_textbook_time(members: int, vectorise: bool) -> None:
    """(p − 1)·(n/bandwidth + delay) for n bytes from each of p members."""
    topology = ring_of_islands(members, 500.0, 0.25)
    _, found = run(topology, "all_gather", [exchange(1000)] * members, vectorise=vectorise)
    textbook = (members - 1) * (1000 / 500.0 + 0.25)
    assert [sync.done_s for sync in found.syncs] == pytest.approx([textbook] * members, rel=1e-12)
    assert collective_seconds(topology, "all_gather", 1000, 1) == pytest.approx(textbook)


def test_star_time_is_up_then_down() -> None:
    """Two islands, coordinator in the first: its own worker is in at once, the other decides."""
    topology = ring_of_islands(2, 100.0, 1.0)
    _, found = run(topology, "star", [exchange(50), exchange(150)])
    up_s, down_s = 150 / 100.0 + 1.0, 50 / 100.0 + 1.0
    done = by_worker(found.syncs)
    assert done[0, 1, 0].done_s == up_s
    assert done[0, 1, 1].done_s == up_s + down_s
    assert (done[0, 1, 0].wire_bytes, done[0, 1, 1].wire_bytes) == (100, 200)


def test_star_members_share_the_coordinators_port() -> None:
    """Three workers of one LAN send 10 bytes at 10 B/s: the port takes them one by one."""
    topology = Topology.build([Site("a", 3, 10.0, 0.5)], [], None)
    _, found = run(topology, "star", [exchange(10)] * 3)
    # Up: in by 1.5, 2.5, 3.5. Down: the out-port sends at 3.5, 4.5, 5.5; 1 s + 0.5 s each.
    assert [by_worker(found.syncs)[0, 1, w].done_s for w in range(3)] == [5.0, 6.0, 7.0]
    # They queued for 0, 1 and 2 s at the in-port, the answers as long at the out-port.
    assert found.transfers == [(0, 1, "lan:a", "values", 60, 6, 0.0, 7.0, 6.0)]


def test_a_star_closes_at_the_last_arrival_not_at_the_last_service() -> None:
    """From afar the coordinator's own LAN delay comes after its port, from nearby before it."""
    sites = [Site("a", 1, inf, 5.0), Site("b", 1, inf, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("a", "b"), inf, 0.0)], None)
    programs = [exchange(8), [Compute(0, 1), *exchange(8)]]
    _, found = run(topology, "star", programs, [0.0, 4.0])
    # In at 5 (port served at 5) and at 9 (port served at 4); answers take 5 s to either.
    assert [sync.done_s for sync in found.syncs] == [14.0, 14.0]


def test_lan_delay_is_charged_once_inside_an_island() -> None:
    """Two workers of one island exchange: bytes/bandwidth + one delay, cutting through."""
    topology = Topology.build([Site("a", 2, 10.0, 0.5)], [], None)
    _, found = run(topology, "all_gather", [exchange(20)] * 2)
    assert [sync.done_s for sync in found.syncs] == [2.5, 2.5]


def test_a_member_is_not_done_before_its_last_send_has_left() -> None:
    """The receiver of a small block still has its own large block in its slow out-port."""
    sites = [Site("slow", 1, 10.0, 0.0), Site("fast", 1, inf, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("slow", "fast"), inf, 0.0)], None)
    _, found = run(topology, "all_gather", [exchange(100), exchange(1)])
    assert by_worker(found.syncs)[0, 1, 0].done_s == 10.0


def test_unlimited_network_is_no_network() -> None:
    """Everybody is done exactly when the last one is ready."""
    topology = ring_of_islands(4, inf, 0.0)
    steps = [0.3, 0.1, 0.7, 0.2]
    for collective in ("all_reduce", "all_gather", "star"):
        _, found = run(
            topology, collective, [[Compute(0, 3), *exchange(999)] for _ in steps], steps
        )
        last = 0.7 + 0.7 + 0.7
        assert {sync.done_s for sync in found.syncs} == {last}
        assert by_worker(found.syncs)[0, 1, 2].wait_s == 0.0


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "star"])
def test_one_worker_has_nobody_to_wait_for(collective: str) -> None:
    """Nothing goes on the wire and no time passes."""
    topology = Topology.build([Site("a", 1, 1.0, 1.0)], [], None)
    timeline, found = run(topology, collective, [[Compute(0, 2), *exchange(99, step=2)]])
    assert found.syncs == [SyncTiming(0, 1, 0, 2, 2.0, 2.0, 0.0, 0, 2.0)]
    assert found.transfers == []
    assert timeline.wire_bytes == 0
    assert collective_seconds(topology, collective, 99, 1) == 0.0


def test_overlapping_collectives_share_a_link() -> None:
    """All-gather of fragment 0 at 0 s and fragment 1 at 0.5 s over 100 B/s and 1 s, 100 bytes."""
    program: list[Op] = [
        Send(0, 1, 0, Bytes(100), 1),
        Compute(0, 1),
        Send(1, 1, 1, Bytes(100), 1),
        Receive(0, 1),
        Receive(1, 1),
    ]
    timeline, found = run(ring_of_islands(2, 100.0, 1.0), "all_gather", [program] * 2, [0.5, 0.5])
    syncs = by_worker(found.syncs)
    # The first is sent 0 … 1; the second is ready at 0.5, starts at 1, is sent by 2.
    assert (syncs[0, 1, 0].done_s, syncs[0, 1, 0].wait_s) == (2.0, 1.5)
    assert (syncs[1, 1, 0].done_s, syncs[1, 1, 0].wait_s) == (3.0, 1.0)
    queued = {(row.fragment, row.link): row.queued_s for row in found.transfers}
    assert queued == {
        (0, "w0:i0>i1"): 0.0,
        (0, "w0:i1>i0"): 0.0,
        (1, "w0:i0>i1"): 0.5,
        (1, "w0:i1>i0"): 0.5,
    }
    assert timeline.links["w0:i0>i1"][:2] == (200, 2.0)


def test_two_fragments_with_overlap() -> None:
    """Sends do not block: a fragment is received a step later, and only the rest is waited for."""
    program: list[Op] = [
        Compute(0, 1),
        Send(0, 1, 1, Bytes(100), 1),
        Compute(1, 1),
        Send(1, 1, 2, Bytes(100), 1),
        Receive(0, 1),
        Compute(2, 2),
        Receive(1, 1),
    ]
    _, found = run(ring_of_islands(2, 100.0, 0.5), "all_gather", [program] * 2)
    syncs = by_worker(found.syncs)
    # Fragment 0: ready 1, sent by 2, there at 2.5; the worker is at 2 and waits half a second.
    assert syncs[0, 1, 1] == (0, 1, 1, 1, 1.0, 2.5, 0.5, 100, 2.5)
    # Fragment 1: ready 2, sent by 3, there at 3.5; the worker comes back at 4.5 and waits no more.
    assert syncs[1, 1, 1] == (1, 1, 1, 2, 2.0, 3.5, 0.0, 100, 4.5)
    assert found.clocks[1][:3] == (4.0, 0.5, 4.5)
    # Of the second and a half from ready to there, a third of each part was left to wait for.
    assert found.clocks[1].transmission_s == pytest.approx(1 / 3)
    assert found.clocks[1].propagation_s == pytest.approx(0.5 / 3)


def test_a_straggler_delays_only_the_data_that_depends_on_it() -> None:
    """All-gather over three members: the block of the late one is what the others wait for."""
    topology = ring_of_islands(3, 100.0, 0.0)
    programs = [[Compute(0, 1), *exchange(100)] for _ in range(3)]
    _, found = run(topology, "all_gather", programs, [0.0, 0.0, 5.0])
    done = by_worker(found.syncs)
    # Block 2 goes 5 → 6 to worker 0, and 6 → 7 to worker 1; behind it block 1 goes 6 → 7 to
    # worker 0. Worker 2 has all it needs since 2 s, and its unlimited port is empty at once.
    assert [done[0, 1, worker].done_s for worker in range(3)] == [7.0, 7.0, 5.0]
    assert done[0, 1, 2].wait_s == 0.0


@pytest.mark.parametrize("vectorise", [False, True])
def test_a_later_round_never_overtakes_an_earlier_one(vectorise: bool) -> None:
    """Empty rounds take no time at all, so three are ready at 0 s; only the third has bytes."""
    topology = Topology.build([Site("a", 2, 10.0, 0.0)], [], None)
    rounds = [(0, 1, 0), (0, 2, 0), (1, 1, 10)]
    programs: list[list[Op]] = [[], []]
    for worker, ops in enumerate(programs):
        for fragment, version, size in rounds:
            ops += [Send(fragment, version, 0, Bytes(size * worker), 1), Receive(fragment, version)]
    _, found = run(topology, "all_gather", programs, vectorise=vectorise)
    done = by_worker(found.syncs)
    assert [done[0, 2, worker].done_s for worker in range(2)] == [0.0, 0.0]
    assert [done[1, 1, worker].done_s for worker in range(2)] == [1.0, 1.0]


def test_steps_marks_and_clocks() -> None:
    """Every step has start and end; a mark is passed when the last worker has passed it."""
    programs = [[Compute(0, 2), Mark(2), *exchange(0, step=2), Compute(2, 1)] for _ in range(2)]
    _, found = run(ring_of_islands(2, inf, 0.0), "all_reduce", programs, [1.0, 3.0])
    steps = {(worker, first): (a.tolist(), b.tolist()) for worker, first, a, b in found.steps}
    assert steps == {
        (0, 0): ([0.0, 1.0], [1.0, 2.0]),
        (0, 2): ([6.0], [7.0]),
        (1, 0): ([0.0, 3.0], [3.0, 6.0]),
        (1, 2): ([6.0], [9.0]),
    }
    assert found.marks == [(2, 6.0)]
    assert [clock[:3] for clock in found.clocks] == [(3.0, 4.0, 7.0), (9.0, 0.0, 9.0)]
    assert [clock.others_s for clock in found.clocks] == [4.0, 0.0]


def test_steps_may_differ_in_length() -> None:
    """Durations come from the compute model, asked by worker and first step."""

    class Growing:
        def seconds(self, worker: int, first: int, count: int) -> np.ndarray:
            return (worker + 1.0) * np.arange(first, first + count)

    topology = ring_of_islands(2, inf, 0.0)
    timeline = Timeline(topology, Growing(), "all_reduce")
    timeline.extend((worker, Compute(2, 3)) for worker in range(2))
    timeline.advance()
    assert [clock.clock_s for clock in timeline.take().clocks] == [9.0, 18.0]


def test_nothing_is_decided_before_a_silent_worker_is_heard() -> None:
    """A worker whose operations ran out may yet send: others' later sends must wait for it."""
    topology = ring_of_islands(2, 100.0, 0.0)
    timeline = Timeline(topology, FixedSteps((1.0, 1.0)), "all_gather", vectorise=False)
    timeline.extend([(0, op) for op in exchange(100)])
    timeline.advance()
    assert timeline.hops == 0
    timeline.extend([(1, Compute(0, 1))])
    timeline.advance()
    assert timeline.hops == 2  # the block enters port and link at 0 s, but arrives only at 1 s
    timeline.extend([(1, op) for op in exchange(100)])
    timeline.advance()
    # Worker 1 has its block at 1 s and could send something else from there on.
    assert [(sync.worker, sync.done_s) for sync in timeline.take().syncs] == [(1, 1.0)]
    timeline.extend([(0, End()), (1, End())])
    timeline.advance()
    assert [(sync.worker, sync.done_s) for sync in timeline.take().syncs] == [(0, 2.0)]


def test_misuse_is_told() -> None:
    """Receiving what was not sent, sending twice, going on after the end, waiting for nobody."""
    topology = ring_of_islands(2, 1.0, 0.0)
    with pytest.raises(ValueError, match="without having sent"):
        run(topology, "all_reduce", [[Receive(0, 1)], []])
    with pytest.raises(ValueError, match="sends twice"):
        run(topology, "all_reduce", [[Send(0, 1, 0, Bytes(1), 1)] * 2, []])
    with pytest.raises(ValueError, match="after its end"):
        run(topology, "all_reduce", [[End()], []])
    with pytest.raises(ValueError, match="which 1 of 2 workers joined"):
        run(topology, "all_reduce", [exchange(8), []])
    with pytest.raises(ValueError, match="others"):
        run(topology, "all_reduce", [exchange(8), exchange(9)])
    with pytest.raises(InputError, match=r"all_reduc.*did you mean 'all_reduce'"):
        Timeline(topology, FixedSteps((1.0, 1.0)), "all_reduc")
