"""Ring, star and hierarchical collectives: what they send, how long it takes, and what decided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.clock import FixedSteps
from islands.errors import InputError
from islands.network import Site, Timeline, Topology, Wire
from islands.network.alpha_beta import ring_seconds
from islands.network.collectives import Collective, Ring, Scheme
from islands.network.fabric import Fabric
from islands.network.ledger import TransferRow
from islands.network.schemes import SCHEMES, plan_for
from islands.trace import Bytes, End, Op, Receive, Send
from tests.test_timeline_laws import Uneven, clusters, gather, programs

operations = st.sampled_from(["all_reduce", "all_gather"])
sizes_of_kinds = st.builds(Bytes, st.integers(0, 60), st.integers(0, 9), st.integers(0, 3))


def factory(
    topology: Topology,
    operation: str,
    scheme: str,
    order: Sequence[str] | None = None,
    per_transfer: bool = False,
) -> Scheme:
    return plan_for(topology, operation, scheme, topology.ring(order), per_transfer=per_transfer)


def play(
    scheme: Scheme,
    topology: Topology,
    ready_s: Sequence[float],
    sizes: Sequence[Bytes],
    itemsize: int = 1,
    late: bool = True,
) -> Collective:
    """One collective on an idle network. ``late``: nobody enters before its time has come."""
    fabric = Fabric(topology)
    done: list[int] = []
    collective = scheme.open((0, 1), fabric, lambda _, member: done.append(member))
    if isinstance(collective, Ring):
        collective.launch()
    for member in sorted(range(scheme.members), key=lambda m: ready_s[m]):
        if late:
            fabric.horizon_s = ready_s[member]
            assert fabric.run() is None
        collective.enter(member, 1, ready_s[member], Send(0, 1, 7, sizes[member], itemsize))
    fabric.horizon_s = inf
    assert fabric.run() is None
    assert sorted(done) == list(range(scheme.members))
    assert collective.step == [7] * scheme.members
    return collective


@st.composite
def plays(
    draw: st.DrawFn, queues: Sequence[bool] = (False, True)
) -> tuple[Topology, str, list[str], list[float], list[Bytes]]:
    """A cluster, an operation, an order of its islands, and ready times and sizes by position.

    ``queues``: whether links may be FIFO, fair, or either.
    """
    topology = draw(clusters())
    fair = draw(st.sampled_from(queues))
    links = tuple(replace(link, fair=fair) for link in topology.links)
    topology = replace(topology, links=links)
    operation = draw(operations)
    order = draw(st.permutations(topology.island_names))
    members = topology.workers
    ready = draw(
        st.lists(st.sampled_from([0.0, 0.1, 0.3, 2.0, 9.0]), min_size=members, max_size=members)
    )
    common = draw(sizes_of_kinds)
    same = operation == "all_reduce"
    sizes = [common if same else draw(sizes_of_kinds) for _ in range(members)]
    return topology, operation, list(order), ready, sizes


def kinds(rows: Sequence[TransferRow]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for row in rows:
        found[row.kind] += row.bytes
    return dict(found)


# --- what is sent ---------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(plays(), st.sampled_from(SCHEMES))
def test_wire_bytes_follow_their_formulas(
    case: tuple[Topology, str, list[str], list[float], list[Bytes]], scheme: str
) -> None:
    """All-reduce: 2(p − 1)n in ring and hierarchy, 2pn in the star; all-gather: (p − 1) or p
    times all payloads. The rows say the same where no route has more than one link."""
    topology, operation, order, ready, sizes = case
    members = topology.workers
    found = play(factory(topology, operation, scheme, order), topology, ready, sizes)
    total = sum(size.total for size in sizes)
    if members == 1:
        assert list(found.wire) == [0]
        assert found.rows() == []
        return
    if operation == "all_reduce":
        expected = 2 * (members - (scheme != "star")) * sizes[0].total
    else:
        expected = (members - (scheme != "star")) * total
    assert sum(found.wire) == expected
    if all(len(topology.route(a, b)) < 2 for a in range(len(topology.sites)) for b in range(a)):
        assert sum(row.bytes for row in found.rows()) == expected


@settings(max_examples=60, deadline=None)
@given(plays(), st.sampled_from(SCHEMES))
def test_single_transfers_sum_to_the_rows(
    case: tuple[Topology, str, list[str], list[float], list[Bytes]], scheme: str
) -> None:
    """A row per transfer has the same bytes and counts per link and kind as a row per link."""
    topology, operation, order, ready, sizes = case
    plain = play(factory(topology, operation, scheme, order), topology, ready, sizes)
    each = play(factory(topology, operation, scheme, order, True), topology, ready, sizes)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, inf, 0.0])
    for row in each.rows():
        found = sums[row.link, row.kind]
        found[0] += row.bytes
        found[1] += row.count
        found[2] = min(found[2], row.first_start_s)
        found[3] = max(found[3], row.last_delivered_s)
    assert len(sums) == len(plain.rows())
    for row in plain.rows():
        size, count, first_s, last_s = sums[row.link, row.kind]
        assert (row.bytes, row.count) == (size, count)
        assert row.first_start_s <= first_s
        assert row.last_delivered_s >= last_s
    assert (plain.done_s, plain.why, list(plain.wire)) == (each.done_s, each.why, list(each.wire))


def two_and_two(lan: float = inf, rate: float = inf, delay_s: float = 0.0) -> Topology:
    """Two islands of two workers each."""
    sites = [Site("a", 2, lan, 0.0), Site("b", 2, lan, 0.0)]
    return Topology.build(sites, [Wire("w", ("a", "b"), rate, delay_s)], None)


PAYLOADS = [Bytes(10, 1, 0), Bytes(20, 2, 0), Bytes(40, 4, 0), Bytes(80, 8, 1)]


def test_what_each_member_sends() -> None:
    """Ring: all but the next one's. Star: own, and the others' back. Leader: its island's bundle,
    and to its members what they lack."""
    total = 166
    own = [size.total for size in PAYLOADS]  # 11, 22, 44, 89
    wires = {}
    for scheme in SCHEMES:
        found = play(
            factory(two_and_two(), "all_gather", scheme), two_and_two(), [0.0] * 4, PAYLOADS
        )
        wires[scheme] = list(found.wire)
        assert sum(kinds(found.rows()).values()) == sum(found.wire)
    assert wires["ring"] == [total - 22, total - 44, total - 89, total - 11]
    assert wires["star"] == [total] * 4
    assert wires["hierarchical"] == [
        (11 + 22) + (total - 22),
        22,
        (44 + 89) + (total - 89),
        89,
    ]
    assert own == [11, 22, 44, 89]
    reduced = play(
        factory(two_and_two(), "all_reduce", "hierarchical"),
        two_and_two(),
        [0.0] * 4,
        [Bytes(8)] * 4,
    )
    # A leader's share of the exchange is 2(g − 1)/g of 8 bytes, then 8 for its member.
    assert list(reduced.wire) == [16, 8, 16, 8]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bundles_keep_their_kinds(scheme: str) -> None:
    """Values, indices and scales are counted apart, however payloads are put together."""
    topology = two_and_two()
    found = play(factory(topology, "all_gather", scheme), topology, [0.0] * 4, PAYLOADS)
    factor = 4 if scheme == "star" else 3
    assert kinds(found.rows()) == {
        "values": factor * 150,
        "indices": factor * 15,
        "scales": factor * 1,
    }


def test_a_hierarchy_crosses_the_wide_area_once_per_island() -> None:
    """All-gather on two islands: each direction carries the other side's payloads once."""
    topology = two_and_two()
    found = play(factory(topology, "all_gather", "hierarchical"), topology, [0.0] * 4, PAYLOADS)
    crossed = {
        link: sum(row.bytes for row in found.rows() if row.link == link)
        for link in ("w:a>b", "w:b>a")
    }
    assert crossed == {"w:a>b": 33, "w:b>a": 133}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_all_reduce_needs_one_size(scheme: str) -> None:
    """Adding up vectors of different lengths is a mistake in every scheme."""
    topology = two_and_two()
    with pytest.raises(ValueError, match="all-reduce"):
        play(factory(topology, "all_reduce", scheme), topology, [0.0] * 4, PAYLOADS)


def test_an_unknown_scheme_is_refused() -> None:
    """With the nearest one."""
    with pytest.raises(InputError, match="'hierarchical'"):
        plan_for(two_and_two(), "all_reduce", "hierarchy", range(4))


# --- how long it takes ----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(plays(), st.sampled_from(SCHEMES))
def test_entering_early_changes_nothing(
    case: tuple[Topology, str, list[str], list[float], list[Bytes]], scheme: str
) -> None:
    """Known long before or only at its moment: a payload moves when its member is ready."""
    topology, operation, order, ready, sizes = case
    one, other = (
        play(factory(topology, operation, scheme, order), topology, ready, sizes, late=late)
        for late in (True, False)
    )
    assert (one.done_s, one.why, one.rows()) == (other.done_s, other.why, other.rows())


@settings(max_examples=100, deadline=None)
@given(plays())
def test_a_hierarchy_of_single_workers_is_the_ring(
    case: tuple[Topology, str, list[str], list[float], list[Bytes]],
) -> None:
    """With one worker per island both schemes agree in every bit: times, chains, bytes, rows."""
    topology, operation, order, ready, sizes = case
    sites = [
        Site(site.name, 1, *(site.lan_bytes_per_s, site.lan_delay_s)) for site in topology.sites
    ]
    topology = Topology.build(sites, topology.links, None)
    ready, sizes = ready[: len(sites)], sizes[: len(sites)]
    ring, hierarchy = (
        play(factory(topology, operation, scheme, order), topology, ready, sizes)
        for scheme in ("ring", "hierarchical")
    )
    assert ring.done_s == hierarchy.done_s
    assert ring.why == hierarchy.why
    assert list(ring.wire) == list(hierarchy.wire)
    assert ring.rows() == hierarchy.rows()


def test_one_island_has_no_exchange() -> None:
    """Three workers, 10 B/s ports, half a second: up to the leader, and what they lack back."""
    topology = Topology.build([Site("a", 3, 10.0, 0.5)], [], None)
    sizes = [Bytes(10), Bytes(20), Bytes(30)]
    found = play(factory(topology, "all_gather", "hierarchical"), topology, [0.0] * 3, sizes)
    # Up: the leader's in-port serves 0.5 … 2.5 and 2.5 … 5.5. Down: 40 bytes for 4 s, then 30.
    assert found.done_s == [5.5 + 4 + 3, 5.5 + 4 + 0.5, 5.5 + 4 + 3 + 0.5]
    assert {row.link for row in found.rows()} == {"lan:a"}


def test_a_hierarchical_all_reduce_by_hand() -> None:
    """Two islands of two, LANs of 10 B/s, a wire of 5 B/s and 1 s, 20 bytes."""
    topology = two_and_two(lan=10.0, rate=5.0, delay_s=1.0)
    found = play(
        factory(topology, "all_reduce", "hierarchical"), topology, [0.0] * 4, [Bytes(20)] * 4
    )
    # Inside: 2 s. Exchange: twice 10 bytes at 5 B/s and a second of delay. Inside again: 2 s.
    assert found.done_s == [10.0] * 4
    # The leader's last 10 bytes left at 6, its answer to its member at 10.
    root_s, own_s, background_s, propagation_s, others_s = found.why[1]
    assert (root_s, own_s, background_s, propagation_s, others_s) == (0.0, 0.0, 0.0, 2.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([7.0, 90.0, 1234.5]), st.sampled_from([0.0, 0.01, 1.7])),
        min_size=3,
        max_size=6,
    ),
    operations,
    st.integers(1, 90),
)
def test_a_ring_takes_as_long_over_fair_links_as_over_fifo_ones(
    wires: list[tuple[float, float]], operation: str, size: int
) -> None:
    """One worker per island and a wire to the next: the pieces of one connection do not slow each
    other down, so both disciplines are the pipes of the alpha-beta model."""
    members = len(wires)
    sites = [Site(f"i{k}", 1, inf, 0.0) for k in range(members)]
    reduce = operation == "all_reduce"
    total = size * members if reduce else size
    seconds = []
    for fair in (False, True):
        topology = Topology.build(
            sites,
            [
                Wire(f"w{k}", (f"i{k}", f"i{(k + 1) % members}"), *numbers, fair)
                for k, numbers in enumerate(wires)
            ],
        )
        order = topology.island_names
        rings = factory(topology, operation, "ring", order)
        found = play(rings, topology, [0.0] * members, [Bytes(total)] * members)
        seconds.append(max(found.done_s))
        pipes = ring_seconds(topology, rings.order, [size] * members, 2 if reduce else 1)
    assert seconds == pytest.approx([pipes.max()] * 2, rel=1e-9)


def test_pieces_wait_for_each_other_on_a_fair_lane() -> None:
    """Two wires of 100 B/s and one of 10: behind it pieces wait in order, and that is queueing."""
    sites = [Site(name, 1, inf, 0.0) for name in "abc"]
    wires = [
        Wire(a + b, (a, b), rate, 0.0, True)
        for a, b, rate in (("a", "b", 100.0), ("b", "c", 100.0), ("c", "a", 10.0))
    ]
    topology = Topology.build(sites, wires)
    rings = factory(topology, "all_gather", "ring", ["a", "b", "c"])
    found = play(rings, topology, [0.0] * 3, [Bytes(100)] * 3)
    # c sends its own for 10 s, then what it had from b since 1 s: a has them at 10 and 20.
    assert found.done_s == [20.0, 11.0, 20.0]
    assert found.why[0] == (0.0, 9.0, 0.0, 0.0, 0.0)


def test_star_all_gather_returns_what_others_have() -> None:
    """Two islands, 100 B/s and a second: the far worker's 50 up, then the near one's 150 down."""
    sites = [Site("a", 1, inf, 0.0), Site("b", 1, inf, 0.0)]
    topology = Topology.build(sites, [Wire("w", ("a", "b"), 100.0, 1.0)], None)
    found = play(
        factory(topology, "all_gather", "star"), topology, [0.0] * 2, [Bytes(150), Bytes(50)]
    )
    assert found.done_s == [1.5, 1.5 + 2.5]
    assert list(found.wire) == [200, 200]


def test_the_order_of_islands_decides_the_neighbours() -> None:
    """In a line of three islands the order a, c, b makes every step cross at least one link."""
    sites = [Site(name, 1, inf, 0.0) for name in "abc"]
    topology = Topology.build(
        sites, [Wire("x", ("a", "b"), inf, 1.0), Wire("y", ("b", "c"), inf, 4.0)]
    )
    rings = factory(topology, "all_gather", "ring", ["a", "c", "b"])
    assert rings.order == (0, 2, 1)
    found = play(rings, topology, [0.0] * 3, [Bytes(1)] * 3)
    # Position 0 (a) hears from b (1 s) and, through b, from c (4 + 1 s).
    assert found.done_s == [5.0, 5.0 + 1.0, 9.0]
    timeline = Timeline(
        topology, FixedSteps((0.0,) * 3), "all_gather", ring_order=["a", "c", "b"], vectorise=False
    )
    for worker in range(3):
        timeline.extend((worker, op) for op in (Send(0, 1, 0, Bytes(1), 1), Receive(0, 1), End()))
    timeline.advance()
    assert {sync.worker: sync.done_s for sync in timeline.take().syncs} == {0: 5.0, 2: 6.0, 1: 9.0}


@settings(max_examples=80, deadline=None)
@given(st.data(), clusters(), operations, st.sampled_from(SCHEMES))
def test_results_do_not_depend_on_how_operations_arrive(
    data: st.DataObject, topology: Topology, operation: str, scheme: str
) -> None:
    """Several rounds in flight, handed in whole or piece by piece in any interleaving."""
    lists = data.draw(programs(topology.workers, operation == "all_reduce"))
    found = []
    for pieces in (False, True):
        timeline = Timeline(topology, Uneven(1), operation, scheme=scheme)
        rest: list[list[Op]] = [list(ops) for ops in lists]
        parts = []
        while any(rest):
            worker = data.draw(st.sampled_from([w for w, ops in enumerate(rest) if ops]))
            count = data.draw(st.integers(1, 6)) if pieces else len(rest[worker])
            timeline.extend((worker, op) for op in rest[worker][:count])
            del rest[worker][:count]
            if pieces and data.draw(st.booleans()):
                assert timeline.advance() is None
                parts.append(timeline.take())
        assert timeline.advance() is None
        found.append(gather([*parts, timeline.take()]))
    assert found[0] == found[1]


def test_a_worker_that_is_alone_sends_nothing() -> None:
    """In every scheme and operation it is done at once, and nobody is to blame."""
    topology = Topology.build([Site("a", 1, 10.0, 0.5)], [], None)
    for operation in ("all_reduce", "all_gather", "star"):
        for scheme in SCHEMES:
            found = play(factory(topology, operation, scheme), topology, [3.0], [Bytes(5)])
            assert (found.done_s, list(found.wire)) == ([3.0], [0])
            assert found.why == [(3.0, 0.0, 0.0, 0.0, 0.0)]
            assert found.rows() == []


def test_sending_twice_to_a_round_is_a_mistake() -> None:
    """It would overwrite the first payload."""
    topology = two_and_two()
    for scheme in SCHEMES:
        found = factory(topology, "all_gather", scheme).open((0, 1), Fabric(topology), print)
        found.enter(1, 1, 0.0, Send(0, 1, 0, Bytes(1), 1))
        with pytest.raises(ValueError, match="twice"):
            found.enter(1, 2, 0.0, Send(0, 1, 0, Bytes(1), 1))
