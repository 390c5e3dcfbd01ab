"""The wide area as users meet it: shared, changing, priced; where the time goes; what stalls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.config import Cluster
from islands.network import Site, Timeline, Timings, Topology, Wire
from islands.network.timed import Reply
from islands.network.timed_timeline import TimedTimeline
from islands.trace import Bytes, Compute, End, Op, Receive, Send
from tests.helpers import cluster, experiment, train

MEGABYTE = 1_000_000


def pair(link: Mapping[str, Any], **parts: Any) -> Topology:
    """Two islands of one worker each with ports that cost nothing, joined by a link ``wan``."""
    free = {"bandwidth": "unlimited", "delay": "0 s"}
    islands = [{"name": name, "workers": 1, "lan": free} for name in "ab"]
    wan = {"name": "wan", "between": ["a", "b"], "bandwidth": "8 Mbit/s", "delay": "1 s", **link}
    return Cluster.parse({"name": "pair", "islands": islands, "links": [wan], **parts}).topology()


def gather_rounds(
    topology: Topology, step_s: tuple[float, float], rounds: int = 1, seed: int = 0
) -> Timings:
    """An all-gather of 1 MB from each of two workers after every step; the final totals."""
    timeline = Timeline(topology, FixedSteps(step_s), "all_gather", seed=seed)
    for worker in range(2):
        ops: list[Op] = []
        for n in range(rounds):
            ops += [Compute(n, 1), Send(0, n + 1, n + 1, Bytes(MEGABYTE), 2), Receive(0, n + 1)]
        timeline.extend((worker, op) for op in [*ops, End()])
    assert timeline.advance() is None
    return timeline.end()


# ------------------------------------------------------------------------- where did the time go


def test_a_wait_is_transmission_propagation_and_others() -> None:
    """1 MB over 8 Mbit/s and 1 s: the slow worker waits 1 + 1 s, the fast one 2 s more for it."""
    found = gather_rounds(pair({}), (1.0, 3.0))
    quick, slow = found.clocks
    # b's payload leaves at 3 and is at a at 5; a's has been at b since 3.
    assert quick.clock_s == 5.0
    assert quick.others_s == 2.0
    assert (quick.transmission_s, quick.propagation_s) == (1.0, 1.0)
    # b waits only for its own payload to leave its port, which on an unlimited one takes no time.
    assert (slow.clock_s, slow.wait_s) == (3.0, 0.0)


def test_queueing_behind_our_own_transfers() -> None:
    """Two rounds in flight at once on one link: the second queues for half of the first."""
    topology = pair({})
    timeline = Timeline(topology, FixedSteps((0.5, 0.5)), "all_gather")
    for worker in range(2):
        first, second = (Send(f, 1, f, Bytes(MEGABYTE), 2) for f in (0, 1))
        ops = [first, Compute(0, 1), second, Receive(0, 1), Receive(1, 1), End()]
        timeline.extend((worker, op) for op in ops)
    timeline.advance()
    clock = timeline.end().clocks[0]
    # Round 1 is ready at 0.5, queues until 1, is sent by 2 and there at 3. The worker begins to
    # wait for it at 2, when three fifths of the 2.5 s are over.
    assert clock.clock_s == 3.0
    share = 1.0 / 2.5
    assert clock.queue_s == pytest.approx(0.5 * share)
    # For round 0 it waited from 0.5 to 2: three quarters of one second each.
    assert clock.transmission_s == pytest.approx(1.0 * share + 0.75)
    assert clock.propagation_s == pytest.approx(1.0 * share + 0.75)


@pytest.mark.parametrize("queue", ["fifo", "fair"])
def test_background_is_told_apart_and_counted(queue: str) -> None:
    """Waiting for other jobs' transfers is its own part, and their bytes are in the ledger."""
    background = {"load": 0.7, "size": "500 kB"}
    idle = gather_rounds(pair({"queue": queue}), (1.0, 1.0), rounds=40)
    busy = gather_rounds(pair({"queue": queue, "background": background}), (1.0, 1.0), rounds=40)
    assert all(clock.background_s == 0.0 for clock in idle.clocks)
    for before, after in zip(idle.clocks, busy.clocks, strict=True):
        assert after.background_s > 5.0
        assert sum(after[3:]) == pytest.approx(after.wait_s, rel=1e-9)
        # The two drift apart, and who comes late waits for less than the whole chain.
        assert 0.7 * before.transmission_s < after.transmission_s < 1.001 * before.transmission_s
    rows = [row for row in busy.transfers if row.kind == "background"]
    assert {row.link for row in rows} == {"wan:a>b", "wan:b>a"}
    for row in rows:
        total = busy.links[row.link]
        assert row.bytes == row.count * 500_000 == total.background_bytes
        assert total.bytes == 40 * MEGABYTE + row.bytes
        ours = 40 * MEGABYTE / 1e6
        end_s = max(clock.clock_s for clock in busy.clocks)
        assert total.busy_s == pytest.approx(ours + 0.7 * end_s, rel=0.2)
        assert total.p95 is not None
        assert total.peak is not None
        assert 0.7 < total.p95 <= total.peak <= 1.0


def test_usage_over_seconds_of_an_idle_link() -> None:
    """1 s of sending in every 3 s: a third on average, all of one second, idle in the others."""
    found = gather_rounds(pair({}), (1.0, 1.0), rounds=10)
    total = found.links["wan:a>b"]
    assert (total.bytes, total.busy_s, total.peak) == (10 * MEGABYTE, 10.0, 1.0)
    assert max(clock.clock_s for clock in found.clocks) == 30.0


# -------------------------------------------------------------------------- every field of a link

BASE: dict[str, Any] = {
    "bandwidth": "8 Mbit/s",
    "delay": "1 s",
    "background": {"load": 0.3, "size": "200 kB"},
}
CHANGES: dict[str, dict[str, Any]] = {
    "bandwidth": {"bandwidth": "9 Mbit/s"},
    "bandwidth as a trace": {
        "bandwidth": {"points": [["0 s", "8 Mbit/s"], ["3 s", "6 Mbit/s"]], "repeat": True}
    },
    "delay": {"delay": "900 ms"},
    "delay as a trace": {
        "delay": {"points": [["0 s", "1 s"], ["3 s", "1.5 s"]], "repeat": True},
    },
    "queue": {"queue": "fair"},
    "max_rate_per_flow": {"max_rate_per_flow": "4 Mbit/s"},
    "background.load": {"background": {"load": 0.4, "size": "200 kB"}},
    "background.size": {"background": {"load": 0.3, "size": "300 kB"}},
    "background.sizes": {"background": {"load": 0.3, "size": "200 kB", "sizes": "exponential"}},
    "background.bursts": {
        "background": {"load": 0.3, "size": "200 kB", "bursts": {"on": "1 s", "off": "2 s"}}
    },
    "jitter": {"jitter": "100 ms"},
    "windows.bandwidth": {"windows": [{"from": "2 s", "to": "5 s", "bandwidth": "1 Mbit/s"}]},
    "windows.every": {
        "windows": [{"from": "2 s", "to": "3 s", "every": "9 s", "bandwidth": "cut"}]
    },
    "windows.delay": {"windows": [{"from": "2 s", "to": "5 s", "delay": "2 s"}]},
    "reverse": {"reverse": {"bandwidth": "4 Mbit/s"}},
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("queue", ["fifo", "fair"])
def test_every_field_of_a_link_changes_some_time(change: str, queue: str) -> None:
    """No setting that nobody reads: each moves the last worker's clock."""
    base = {**BASE, "queue": queue}
    changed = {**base, **CHANGES[change]}
    if change == "queue" and queue == "fair":
        changed["queue"] = "fifo"
    before, after = (gather_rounds(pair(link), (0.7, 1.1), 20) for link in (base, changed))
    assert [c.clock_s for c in before.clocks] != [c.clock_s for c in after.clocks]


def test_a_price_is_paid_per_byte_and_direction() -> None:
    """2 USD/MB one way and 1 EUR/MB back: the summary has each currency's total."""
    where = cluster((1, 1))
    where["links"][0] |= {"egress_price": "2 USD/MB", "reverse": {"egress_price": "1 EUR/MB"}}
    summary = train(experiment(cluster=where)).summary
    sent = summary["links"]["ab:a>b"]["bytes"] / 1e6
    assert summary["egress_cost"] == {
        "EUR": pytest.approx(summary["links"]["ab:b>a"]["bytes"] / 1e6),
        "USD": pytest.approx(2 * sent),
    }
    assert summary["links"]["ab:a>b"]["egress_cost"] == {"USD": pytest.approx(2 * sent)}


# --------------------------------------------------------------------------- stalls, determinism


@pytest.mark.parametrize("queue", ["fifo", "fair"])
@pytest.mark.parametrize(
    ("link", "why"),
    [
        ({"windows": [{"from": "5 s", "bandwidth": "cut"}]}, "cut for good"),
        ({"bandwidth": {"points": [["0 s", "8 Mbit/s"], ["3 s", "9 Mbit/s"]]}}, "trace"),
    ],
)
def test_a_link_that_can_carry_nothing_any_more_stalls(
    queue: str, link: dict[str, Any], why: str
) -> None:
    """The timeline says so and keeps every time up to there."""
    found = gather_rounds(pair({**link, "queue": queue}), (1.0, 1.0), rounds=10)
    assert found.stalled is not None
    assert why in found.stalled
    assert "wan:" in found.stalled
    assert {sync.version for sync in found.syncs} >= {1}
    assert max(sync.version for sync in found.syncs) < 10


def test_a_stalled_run_ends_with_its_results() -> None:
    """Exit by RunError, the rounds before the cut in the tables."""
    where = cluster((1, 1), bandwidth="1 Mbit/s")
    where["links"][0]["windows"] = [{"from": "0.7 s", "bandwidth": "cut"}]
    run = train(experiment(cluster=where, method={"name": "diloco", "sync_every": 2}))
    assert "cut for good" in str(run.error)
    assert run.summary["status"] == "failed"
    done = run.rows("syncs", "version")
    assert done
    assert max(done) < 6


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["fifo", "fair"]),
    st.integers(0, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=12),
)
def test_later_traffic_never_changes_what_was_answered(
    queue: str, seed: int, cuts: list[int]
) -> None:
    """Handing a program in piece by piece gives every completion its final value at once, under
    background, jitter and a changing bandwidth."""
    link = {
        **BASE,
        "queue": queue,
        "jitter": "50 ms",
        "windows": [{"from": "4 s", "to": "6 s", "every": "11 s", "bandwidth": "3 Mbit/s"}],
    }
    topology = pair(link)
    whole = gather_rounds(topology, (0.7, 1.1), rounds=12, seed=seed)
    expected = {(s.worker, s.version): s for s in whole.syncs}
    timeline = Timeline(topology, FixedSteps((0.7, 1.1)), "all_gather", seed=seed)
    answered = {}
    at = [0, 0]
    for turn, count in enumerate([*cuts, 12, 12]):
        worker = turn % 2
        for n in range(at[worker], min(12, at[worker] + count)):
            ops = [Compute(n, 1), Send(0, n + 1, n + 1, Bytes(MEGABYTE), 2), Receive(0, n + 1)]
            timeline.extend((worker, op) for op in ops)
        at[worker] = min(12, at[worker] + count)
        timeline.advance()
        for sync in timeline.take().syncs:
            answered[sync.worker, sync.version] = sync
            assert sync == expected[sync.worker, sync.version]
    timeline.extend((worker, End()) for worker in range(2))
    timeline.advance()
    answered |= {(sync.worker, sync.version): sync for sync in timeline.take().syncs}
    assert answered == expected


def test_seeds_decide_background_and_nothing_else_does() -> None:
    """The same seed gives the same run, another one another."""
    first, again, other = (
        gather_rounds(pair(BASE), (0.7, 1.1), rounds=5, seed=seed) for seed in (0, 0, 1)
    )
    assert first.clocks == again.clocks != other.clocks


def test_three_fair_flows_of_the_textbook() -> None:
    """1 MB and 1 MB on 8 Mbit/s, a third MB from 0.5 s: 2.75, 2.75 and 3.0 s."""
    sites = [Site("a", 3, float("inf"), 0.0), Site("b", 1, float("inf"), 0.0)]
    topology = Topology.build(sites, [Wire("wan", ("a", "b"), 1e6, 0.0, True)], coordinator="b")
    timeline = TimedTimeline(topology, FixedSteps((0.0, 0.0, 0.5, 0.0)), "star")
    for worker in range(4):
        size = Bytes(MEGABYTE if worker < 3 else 0)
        ops = [Compute(0, 1), Send(0, 1, 1, size, 1), Receive(0, 1), End()]
        timeline.extend((worker, op) for op in ops)
    moments = {}
    while (arrival := timeline.advance()) is not None:
        moments[arrival.worker] = arrival.time_s
        timeline.act([Reply(arrival.worker, 0, 1, 0, 1)])
    expected = {0: 2.75, 1: 2.75, 2: 3.0, 3: 0.0}
    assert moments == {worker: pytest.approx(t, abs=1e-9) for worker, t in expected.items()}


def test_a_wait_on_a_loaded_link_is_several_transfers_long() -> None:
    """LLaMA 7B's dense gradient, 13.5 GB over 12.5 GB/s: 1.08 s alone; behind like-sized traffic
    at load 0.9 the mean wait of a newcomer is 4.5 times that (M/D/1)."""
    gradient = 13_500_000_000
    alone = 13.5 / 12.5
    link = {"bandwidth": "12.5 GB/s", "delay": "0 s"}
    loaded = {**link, "background": {"load": 0.9, "size": "13.5 GB"}}
    found = {}
    for name, wan in (("idle", link), ("loaded", loaded)):
        # Newcomers so rare that they do not add to the load: one in about 10,000 s.
        timeline = Timeline(pair(wan), FixedSteps((10_007.3, 10_007.3)), "all_gather")
        for worker in range(2):
            for n in range(1000):
                size = Bytes(gradient if worker == 0 else 0)
                ops = [Compute(n, 1), Send(0, n + 1, n + 1, size, 2), Receive(0, n + 1)]
                timeline.extend((worker, op) for op in ops)
            timeline.extend([(worker, End())])
        timeline.advance()
        ours = [row for row in timeline.end().transfers if row[2:4] == ("wan:a>b", "values")]
        found[name] = sum(row.queued_s for row in ours) / len(ours)
        first = ours[0]
        assert first.last_delivered_s - first.first_start_s == pytest.approx(alone)
    assert found["idle"] == 0.0
    # A newcomer's wait deviates by about 5.1 transfers: of 1,000, three standard errors are 0.5.
    assert found["loaded"] / alone == pytest.approx(4.5, abs=0.5)
