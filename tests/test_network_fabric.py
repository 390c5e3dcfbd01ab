"""Transfers over FIFO links: cut-through, order of service, ties; all expected times by hand."""

from __future__ import annotations

from math import inf

from islands.network.fabric import ARRIVED, Chain, Fabric
from islands.network.topology import Hop, Path, Site, Topology


class Recorder:
    """An owner that remembers when each of its transfers (told apart by lane) arrived."""

    final_phase = 0

    def __init__(self, slots: int) -> None:
        self.first_s = [inf] * slots
        self.last_s = [0.0] * slots
        self.queued_s = [0.0] * slots
        self.arrived: dict[int, float] = {}
        self.gone: dict[int, float] = {}
        self.chains: dict[int, Chain] = {}

    def left(self, lane: int, finish_s: float, chain: Chain) -> None:
        self.gone[lane] = finish_s

    def delivered(self, lane: int, phase: int, time_s: float, chain: Chain) -> None:
        self.arrived[lane] = time_s
        self.chains[lane] = chain


def ports() -> Fabric:
    """Eight plain resources: the ports of three workers and of the coordinator."""
    return Fabric(Topology.build([Site("a", 3, inf, 0.0)], []))


def begun(time_s: float) -> Chain:
    """The chain of a transfer that begins one."""
    return [time_s, 0.0, 0.0, 0.0, 0.0]


def carry(*sends: tuple[float, int, Path, int]) -> Recorder:
    """Run (time, order, path, bytes) sends in the given order of calls; lane = position."""
    fabric, owner, slot = ports(), Recorder(32), 0
    for lane, (time, order, path, size) in enumerate(sends):
        fabric.send(time, order, (path, size, owner, slot, lane, 0, begun(time)))
        slot += len(path)
    assert fabric.run() is None
    return owner


def test_slow_downstream_is_fed_while_upstream_still_sends() -> None:
    """100 bytes at 100 B/s into 50 B/s: the second hop starts one delay after the first."""
    owner = carry((0.0, 0, (Hop(0, 100.0, 1.0), Hop(1, 50.0, 2.0)), 100))
    assert owner.first_s[:2] == [0.0, 1.0]
    assert owner.gone == {0: 1.0}
    assert owner.arrived == {0: 1.0 + 2.0 + 2.0}


def test_fast_downstream_is_not_held_by_slow_upstream() -> None:
    """100 bytes at 100 B/s into 200 B/s: the fast hop starts late enough never to run dry."""
    owner = carry((0.0, 0, (Hop(0, 100.0, 1.0), Hop(1, 200.0, 2.0)), 100))
    assert owner.first_s[:2] == [0.0, 1.5]
    assert owner.arrived == {0: 1.5 + 0.5 + 2.0}


def test_a_fast_link_serves_others_while_a_slow_upstream_trickles() -> None:
    """A transfer that reaches the fast link during the trickle goes first."""
    slow_then_fast = (Hop(0, 10.0, 0.0), Hop(1, 100.0, 0.0))
    fast_only = (Hop(2, inf, 0.0), Hop(1, 100.0, 0.0))
    owner = carry((0.0, 0, slow_then_fast, 100), (2.0, 1, fast_only, 100))
    assert owner.arrived == {0: 10.0, 1: 3.0}


def test_service_is_in_order_of_ready_time_not_of_calls() -> None:
    """The later call that is ready earlier goes first; the other queues."""
    path = (Hop(0, 100.0, 0.0), Hop(1, inf, 0.0))
    owner = carry((0.5, 0, path, 100), (0.0, 1, path, 100))
    assert owner.arrived == {0: 2.0, 1: 1.0}
    assert owner.queued_s[:4] == [0.5, 0.0, 0.0, 0.0]
    assert owner.chains == {0: [0.5, 0.5, 0.0, 0.0, 0.0], 1: begun(0.0)}


def test_order_is_decided_anew_at_every_hop() -> None:
    """A long first hop lets a transfer that started later reach the shared link first."""
    far = (Hop(0, 100.0, 5.0), Hop(2, 100.0, 0.0))
    near = (Hop(1, 100.0, 0.0), Hop(2, 100.0, 0.0))
    owner = carry((0.0, 0, far, 100), (4.5, 1, near, 100))
    assert owner.arrived == {0: 5.5 + 1.0, 1: 5.5}


def test_ties_go_to_the_lower_id() -> None:
    """Same ready time: the id decides, whichever was submitted first."""
    path = (Hop(0, 100.0, 0.0), Hop(1, inf, 0.0))
    assert carry((1.0, 7, path, 100), (1.0, 3, path, 100)).arrived == {0: 3.0, 1: 2.0}
    assert carry((1.0, 3, path, 100), (1.0, 7, path, 100)).arrived == {0: 2.0, 1: 3.0}


def test_an_empty_message_takes_only_the_delays() -> None:
    """Zero bytes are sent in no time."""
    assert carry((1.0, 0, (Hop(0, 5.0, 1.0), Hop(1, 5.0, 2.0)), 0)).arrived == {0: 4.0}


def test_nothing_at_or_after_the_horizon_happens() -> None:
    """An event exactly at the horizon waits until the horizon has moved."""
    fabric, owner = ports(), Recorder(2)
    path = (Hop(0, 1.0, 0.0), Hop(1, 1.0, 0.0))
    fabric.send(3.0, 0, (path, 1, owner, 0, 0, 0, begun(3.0)))
    fabric.horizon_s = 3.0
    assert fabric.run() is None
    assert owner.arrived == {}
    fabric.horizon_s = inf
    fabric.run()
    assert owner.arrived == {0: 4.0}


def test_an_announcement_stops_the_loop_before_anything_later() -> None:
    """What is announced for a moment comes before transfers that are ready at that moment."""
    fabric, owner = ports(), Recorder(2)
    path = (Hop(0, 1.0, 0.0), Hop(1, 1.0, 0.0))
    fabric.send(2.0, 0, (path, 1, owner, 0, 0, 0, begun(2.0)))
    fabric.announce(2.0, ARRIVED, 9, "news")
    assert fabric.run() == (2.0, "news")
    assert owner.first_s[0] == inf
