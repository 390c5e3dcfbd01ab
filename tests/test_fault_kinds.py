"""Faults, policy and replicas as users write them: reading, writing, and every way to be wrong."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import pytest

from islands.errors import InputError
from islands.fault_checks import ReplicasField, check_faults, check_method
from islands.fault_kinds import (
    KINDS,
    Corrupt,
    Crash,
    Drop,
    FaultsField,
    Outage,
    Straggler,
    parse_fault,
)
from islands.methods import METHODS, DeMo, Method, method_class
from islands.policy import Deadline, Policy, PolicyField
from islands.settings import Part, parse_yaml


class Plan(Part):
    """The part of an experiment that this is about."""

    faults: FaultsField = ()
    policy: PolicyField = Policy()
    replicas: ReplicasField = ()


class Edge(NamedTuple):
    name: str
    source: str
    target: str


ISLAND_OF = ("a", "a", "b", "c")
EDGES = tuple(
    Edge(f"{x}{y}:{s}>{t}", s, t) for x, y in (("a", "b"), ("b", "c")) for s, t in ((x, y), (y, x))
)


def on_the_cluster(values: Any) -> Plan:
    """The settings, if they are sound and fit four workers on three islands in a row."""
    plan = Plan.parse(values)
    check_faults(plan.faults, plan.policy, plan.replicas, ISLAND_OF, EDGES)
    return plan


def problem(values: Any) -> str:
    """The one line with which these settings are refused, alone or on a cluster."""
    with pytest.raises(InputError) as caught:
        on_the_cluster(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- reading


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("straggler", Straggler()),
        ("straggler:jitter=exponential,mean=0.1", Straggler(mean=0.1)),
        ("straggler:jitter=gamma, mean=0.2, std=0.4", Straggler(jitter="gamma", mean=0.2, std=0.4)),
        ("drop:probability=0.5", Drop(probability=0.5)),
        ("drop:probability=1,worker=[0, 2]", Drop(probability=1.0, worker=[0, 2])),
        ("drop:probability=1,island=[a,b],direction=up", Drop(
            probability=1, island=["a", "b"], direction="up")),
        ("crash:worker=3,at=5 s,downtime=1 min", Crash(worker=3, at="5 s", downtime="1 min")),
        ("outage:link=ab,from=1 s,to=2 s", Outage(**{"link": "ab", "from": "1 s", "to": "2 s"})),
        ("corrupt:how=scale,factor=-3,rounds=[2, 5]", Corrupt(
            how="scale", factor=-3.0, rounds=[2, 5])),
    ],
)  # fmt: skip
def test_the_command_line_says_the_same_as_a_mapping(text: str, expected: Any) -> None:
    """Values are read as YAML, commas in brackets belong to the value; texts may stand in files."""
    assert parse_fault(text) == expected
    assert Plan.parse({"faults": [text]}).faults == (expected,)


FULL: list[dict[str, Any]] = [
    {"kind": "straggler", "jitter": "lognormal", "mean": 0.2, "std": 0.1, "island": "a"},
    {"kind": "slow", "factor": 2.5, "worker": [1, 2]},
    {"kind": "pause", "every": "10 s", "lasting": "500 ms", "worker": 0},
    {"kind": "drop", "probability": 0.1, "direction": "down", "anchor": "last_received"},
    {"kind": "drop", "probability": 0.1, "on_drop": "lose", "burst": 4},
    {"kind": "outage", "island": "c", "from": "1 s", "to": "2 s", "every": "5 s"},
    {"kind": "outage", "link": "ab", "from": "10 s", "to": "15 s", "bandwidth": "1 Mbit/s"},
    {"kind": "partition", "groups": [["a", "b"], ["c"]], "from": "20 s", "to": "30 s"},
    {"kind": "partition", "islands": "a", "from": "40 s", "to": "50 s"},
    {"kind": "crash", "worker": 2, "at": "5 s", "downtime": "10 s"},
    {"kind": "crash", "island": "a", "mtbf": "1 h"},
    {"kind": "leave", "worker": 3, "step": 10},
    {"kind": "join", "worker": 3, "step": 20},
    {"kind": "corrupt", "how": "scale", "factor": 3.0, "probability": 0.5, "rounds": [1, 4]},
]


def test_what_was_written_reads_back_equal() -> None:
    """Every kind, with the names that users write; and it fits the cluster."""
    assert {fault["kind"] for fault in FULL} == set(KINDS)
    policy = {"quorum": 2, "deadline": "2.5 x median", "late": "discount", "mean": "median"}
    plan = on_the_cluster({"faults": FULL, "policy": policy, "replicas": [[0, 2], [5, 4]]})
    text = plan.dump_yaml()
    assert Plan.parse(parse_yaml(text, "")) == plan
    for line in ("from: 20 s", "lasting: 500 ms", "deadline: 2.5 x median", "island: c"):
        assert line in text


def test_the_policy_all_is_written_as_one_word() -> None:
    """The default costs one line in a written experiment."""
    assert "policy: all\n" in Plan().dump_yaml()
    assert Plan.parse({"policy": "all"}) == Plan.parse({"policy": {}}) == Plan()


# --- faults that are wrong by themselves


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (7, "faults.0: 7 is not a fault; write for example straggler:"),
        ({}, "faults.0.kind: is missing; choose from corrupt, crash,"),
        ("strangler", "faults.0.kind: no fault 'strangler'; did you mean 'straggler'?"),
        ("drop:probability=1.5", "faults.0.probability: 1.5 is too large; it must be at most 1"),
        ("drop:probability=-0.1", "faults.0.probability: -0.1 is too small; it must be at least 0"),
        ("drop:probability=often", "faults.0.probability: 'often' is not a number"),
        ("drop", "faults.0.probability: is missing"),
        ("drop:probability", "faults.0: 'probability' is not KEY=VALUE, as in straggler:"),
        ("drop:probability=", "faults.0: 'probability=' is not KEY=VALUE"),
        ("drop:probability=0,probability=1", "faults.0.probability: is given twice"),
        ("drop:kind=slow", "faults.0.kind: is given twice"),
        ("drop:probabilty=1", "faults.0.probabilty: unknown key 'probabilty'; did you mean"),
        ("slow:factor=2,wroker=1", "faults.0.wroker: unknown key 'wroker'; did you mean 'worker'?"),
        ("drop:probability=.5,direction=u", "faults.0.direction: 'u' is not one of both, up, down"),
        ("drop:probability=.5,burst=1.5", "faults.0.burst: 1.5 is too small; rounds that are"),
        ("drop:probability=1,burst=3", "faults.0.burst: 3 has no use"),
        ("drop:probability=1,burst=0.5", "faults.0.burst: 0.5 is too small; it must be at least 1"),
        ("drop:probability=1,direction=up,anchor=last_received", "faults.0.anchor: has no use"),
        ("drop:probability=1,direction=down,on_drop=lose", "faults.0.on_drop: has no use"),
        ("drop:probability=1,worker=1,island=a", "faults.0.island: is given beside worker"),
        ("drop:probability=1,worker=[]", "faults.0.worker: [] names nobody"),
        ("straggler:std=0.1", "faults.0.std: is always the mean of an exponential"),
        ("straggler:jitter=gamma,mean=0", "faults.0.mean: 0 is too small; a gamma has a mean"),
        ("straggler:mean=-1", "faults.0.mean: -1 is too small; it must be at least 0"),
        ("straggler:mean=.inf", "faults.0.mean: inf is not a finite number"),
        ("slow:factor=0", "faults.0.factor: 0 is too small; it must be more than 0"),
        ("pause:every=0 s,lasting=1 s", "faults.0.every: '0 s' is too small"),
        ("pause:every=1 s,lasting=3", "faults.0.lasting: 3 needs a unit"),
        ("crash:at=-5 s", "faults.0.at: '-5 s' must not be negative"),
        ("crash:at=5 s,downtime=-1 s", "faults.0.downtime: '-1 s' must not be negative"),
        ("crash:worker=1", "faults.0.at: is missing; give the moment, or a mean time"),
        ("crash:at=1 s,mtbf=1 s", "faults.0.at: is given beside mtbf"),
        ("crash:mtbf=0 s", "faults.0.mtbf: '0 s' is too small"),
        ("leave:step=-1", "faults.0.step: -1 is too small; it must be at least 0"),
        ("join", "faults.0.step: is missing"),
        ("outage:from=1 s", "faults.0.link: is missing; name a link or an island"),
        ("outage:link=ab,island=a", "faults.0.link: is given beside island"),
        ("outage:link=ab,from=2 s,to=1 s", "faults.0.to: 1 s is not after from: 2 s"),
        ("outage:link=ab,from=2 s,to=2 s", "faults.0.to: 2 s is not after from: 2 s"),
        ("outage:link=ab,from=-2 s", "faults.0.from: '-2 s' must not be negative"),
        ("outage:link=ab,fron=2 s", "faults.0.fron: unknown key 'fron'; did you mean 'from'?"),
        ("outage:link=ab,every=2 s", "faults.0.to: is missing; what repeats has an end"),
        ("outage:link=ab,to=2 s,every=2 s", "faults.0.every: 2 s is too short; the next outage"),
        ("outage:link=ab,bandwidth=0 bit/s", "faults.0.bandwidth: '0 bit/s' must be more than"),
        ("outage:link=ab,bandwidth=unlimited", "faults.0.bandwidth: 'unlimited' is no outage"),
        ("partition:from=1 s", "faults.0.groups: is missing; give the groups, or islands"),
        ("partition:groups=[[a],[b,c]],islands=a", "faults.0.groups: is given beside islands"),
        ("partition:groups=[[a,b,c]]", "faults.0.groups: 1 is too few"),
        ("partition:groups=[[a,b,c],[]]", "faults.0.groups.1: [] is too short"),
        ("corrupt:how=zero", "faults.0.how: 'zero' is not one of nan, inf, scale, flip"),
        ("corrupt:how=nan,factor=3", "faults.0.factor: 3 has no use with how: nan"),
        ("corrupt:how=nan,rounds=[0,3]", "faults.0.rounds.0: 0 is too small"),
        ("corrupt:how=nan,rounds=[5,3]", "faults.0.rounds: [5, 3] ends before it begins"),
        ("corrupt:how=nan,probability=2", "faults.0.probability: 2 is too large"),
    ],
)  # fmt: skip
def test_a_wrong_fault_is_one_line_with_its_field(fault: Any, message: str) -> None:
    """Field, value, and what would be right."""
    assert problem({"faults": [fault]}).startswith(message)


def test_a_wrong_fault_on_the_command_line_is_repeated() -> None:
    """There is no file to look into, so the message has the whole text."""
    with pytest.raises(InputError, match=r"^fault 'drop:probability=2': probability: 2 is too"):
        parse_fault("drop:probability=2")


# --- faults that do not fit the cluster or each other


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["slow:factor=2,worker=4"], "faults.0.worker: no worker 4; there are 4, counted from 0"),
        (["slow:factor=2", "drop:probability=1,island=[a,d]"], "faults.1.island: no island 'd'"),
        (["outage:link=abb"], "faults.0.link: no link 'abb'; did you mean 'ab'?"),
        (["outage:link=ab:a>c"], "faults.0.link: no link 'ab:a>c'; did you mean 'ab:a>b'?"),
        (["outage:island=d"], "faults.0.island: no island 'd'"),
        (["partition:islands=d"], "faults.0.islands: no island 'd'"),
        (["partition:islands=[a,b,c]"], "faults.0.islands: names every island"),
        (["partition:groups=[[a],[b]]"], "faults.0.groups: 'c' is missing"),
        (["partition:groups=[[a,b],[b,c]]"], "faults.0.groups: 'b' is named twice"),
        (
            ["outage:link=ab,to=9 s", "outage:island=a,from=5 s,bandwidth=1 Mbit/s"],
            "faults.1: link 'ab:a>b' would be at 1 Mbit/s and, by faults.0, cut at the same time",
        ),
        (
            ["outage:link=bc,bandwidth=1 Mbit/s", "partition:islands=c,from=5 s"],
            "faults.1: link 'bc:b>c' would be cut and, by faults.0, at 1 Mbit/s",
        ),
        (
            ["outage:link=bc,to=1 s,every=10 s,bandwidth=1 Mbit/s", "outage:link=bc,from=95.5 s"],
            "faults.1: link 'bc:b>c' would be cut",
        ),
        (["leave:worker=1,step=5", "leave:worker=1,step=9"], "faults.1.step: worker 1 leaves"),
        (["join:step=9", "join:worker=2,step=5"], "faults.1.step: worker 2 joins twice, at"),
        (["leave:step=5", "join:worker=2,step=5"], "faults.1.step: worker 2 has two moves at step"),
        (
            ["crash:at=5 s,downtime=9 s", "crash:worker=1,at=6 s"],
            "faults.1.at: worker 1 cannot die at 6 s: by faults.0 it died at 5 s and at 14 s is",
        ),
        (["crash:at=5 s", "crash:worker=1,at=6 s"], "faults.1.at: worker 1 cannot die at 6 s: by"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_with_its_field(faults: list[str], message: str) -> None:
    """Unknown names with the nearest one, numbers out of range, and faults that contradict."""
    assert problem({"faults": faults}).startswith(message)


@pytest.mark.parametrize(
    "faults",
    [
        ["outage:link=ab,to=9 s", "outage:island=a,from=5 s", "partition:islands=a,from=6 s"],
        ["outage:link=ab,to=9 s", "outage:link=ab,from=9 s,bandwidth=1 Mbit/s"],
        ["outage:link=ab:a>b,bandwidth=1 Mbit/s", "outage:link=ab:b>a"],
        ["join:worker=1,step=5", "leave:worker=1,step=9", "join:worker=1,step=12"],
        ["leave:worker=1,step=0"],
        ["crash:at=5 s,downtime=1 s", "crash:worker=1,at=7 s"],
        ["crash:at=5 s", "crash:mtbf=1 s"],
        ["slow:factor=2,worker=3", "slow:factor=2,worker=3"],
    ],
)
def test_what_fits_is_not_refused(faults: list[str]) -> None:
    """Outages that agree or take turns, moves that alternate, a crash after a recovery."""
    assert len(on_the_cluster({"faults": faults}).faults) == len(faults)


# --- policy and replicas


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "some"}, "policy: 'some' is neither 'all' nor a mapping of settings"),
        ({"policy": 3}, "policy: 3 is neither 'all' nor a mapping such as {quorum: 3}"),
        ({"policy": {"quorom": 2}}, "policy.quorom: unknown key 'quorom'; did you mean 'quorum'?"),
        ({"policy": {"quorum": 0}}, "policy.quorum: 0 is too small; it must be at least 1"),
        ({"policy": {"quorum": 5}}, "policy.quorum: 5 is too large; there are 4 workers"),
        (
            {"policy": {"quorum": 3}, "replicas": [[0, 4], [8, 2]]},
            "policy.quorum: 3 is too large; from step 8 on there are 2 workers",
        ),
        ({"policy": {"deadline": "0 s"}}, "policy.deadline: '0 s' is too small; it must be more"),
        ({"policy": {"deadline": "-1 s"}}, "policy.deadline: '-1 s' must not be negative"),
        ({"policy": {"deadline": 5}}, "policy.deadline: 5 needs a unit"),
        ({"policy": {"deadline": "0.5 x median"}}, "policy.deadline: '0.5 x median' is not a"),
        ({"policy": {"deadline": "e x median"}}, "policy.deadline: 'e x median' is not a multiple"),
        ({"policy": {"deadline": "1e999 x median"}}, "policy.deadline: '1e999 x median' is not"),
        ({"policy": {"deadline": "2 x mean"}}, "policy.deadline: '2 x mean'"),
        ({"policy": {"late": "apply_next"}}, "policy.late: 'apply_next' has no use without a"),
        ({"policy": {"quorum": 2, "discount": 0.2}}, "policy.discount: 0.2 has no use without"),
        ({"policy": {"trim": 0.2}}, "policy.trim: 0.2 has no use without mean: trimmed_mean"),
        ({"policy": {"mean": "trimmed_mean", "trim": 0.5}}, "policy.trim: 0.5 is too large"),
        ({"policy": {"mean": "trimmed_mean"}}, "policy.trim: 0.1 of 4 workers is nobody; 0.25"),
        ({"policy": {"mean": "average"}}, "policy.mean: 'average' is not one of mean, trimmed_"),
        ({"policy": {"invalid": "refused"}}, "policy.invalid: 'refused' is not one of refuse, "),
        ({"replicas": 4}, "replicas: 4 is not a list such as [[0, 4], [1000, 8]]"),
        ({"replicas": [4]}, "replicas.0: 4 is not a step and a number of workers"),
        ({"replicas": [[0, 4.5]]}, "replicas.0: [0, 4.5] is not a step and a number of workers"),
        ({"replicas": [[5, 4]]}, "replicas.0: the first entry is of step 0, not of step 5"),
        ({"replicas": [[0, 4], [0, 2]]}, "replicas.1: step 0 does not come after step 0"),
        ({"replicas": [[0, 0]]}, "replicas.0: 0 is too few workers; it must be at least 1"),
        ({"replicas": [[0, 2], [5, 5]]}, "replicas.1: 5 is more than the 4 workers"),
    ],
)
def test_a_wrong_policy_is_one_line_with_its_field(values: dict[str, Any], message: str) -> None:
    """Field, value, and what would be right."""
    assert problem(values).startswith(message)


def test_when_rounds_close() -> None:
    """Four members, a round that opened at 10 s."""
    everyone = Policy()
    assert everyone.closes_at(10, [11, 12, 13], 4) == inf
    assert everyone.closes_at(10, [11, 12, 13, 15], 4) == 15
    quorum = Policy(quorum=2)
    assert quorum.closes_at(10, [11], 4) == inf
    assert quorum.closes_at(10, [11, 12], 4) == 12
    both = Policy(quorum=2, deadline="5 s")
    assert [both.closes_at(10, times, 4) for times in ([], [11], [11, 12])] == [inf, 16, 16]
    assert both.closes_at(10, [11, 12, 13, 14], 4) == 14
    median = Policy(deadline="2 x median")
    assert median.closes_at(10, [11], 4) == inf
    assert median.closes_at(10, [11, 13], 4) == 16
    assert [both.commits(n) for n in (0, 1, 2)] == [False, False, True]
    assert [median.commits(n) for n in (0, 1)] == [False, True]
    assert median.deadline == Deadline(medians=2.0)
    assert [p.timed for p in (everyone, quorum, median)] == [False, True, True]


def test_what_late_results_count() -> None:
    """Nothing, the same, or less."""
    late = [Policy(quorum=1, late=rule).late_weight for rule in ("drop", "apply_next", "discount")]
    assert late == [None, 1.0, 0.5]


def test_a_median_needs_everyones_values() -> None:
    """A sum is formed on the way, an order statistic is not."""
    assert Policy().collective("all_reduce") == "all_reduce"
    robust = Policy(mean="median")
    found = [robust.collective(c) for c in ("all_reduce", "all_gather", "star")]
    assert found == ["all_gather", "all_gather", "star"]


# --- methods


class Own(Method):
    """Says nothing about means, anchors or lateness."""

    name: str = "own"


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("dense", {"faults": ["drop:probability=1,anchor=last_received"]}, "faults.0.anchor: "),
        ("topk", {"faults": ["drop:probability=1,anchor=last_received"]}, "faults.0.anchor: topk"),
        (Own(), {"policy": {"mean": "median"}}, "policy.mean: own cannot form a median of its"),
        (DeMo(merge="senders"), {"policy": {"mean": "median"}}, "policy.mean: demo cannot form"),
        ("sparta", {"policy": {"quorum": 1, "late": "apply_next"}}, "policy.late: sparta has no"),
    ],
)  # fmt: skip
def test_what_a_method_cannot_do_is_refused(method: Any, values: Any, message: str) -> None:
    """One line with the field and the method's name."""
    plan = Plan.parse(values)
    made = method_class(method)() if isinstance(method, str) else method
    with pytest.raises(InputError) as caught:
        check_method(plan.faults, plan.policy, made)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("mean", ["mean", "trimmed_mean", "median"])
def test_every_method_takes_drops_and_every_mean(name: str, mean: Any) -> None:
    """With the default settings of both; but for the one whose workers replace a term of it."""
    policy = Policy(mean=mean, quorum=1, trim=0.25 if mean == "trimmed_mean" else 0.1)
    if name == "eager_diloco" and mean != "mean":
        with pytest.raises(InputError, match=r"policy\.mean: eager_diloco"):
            check_method([Drop(probability=0.5)], policy, method_class(name)())
        return
    check_method([Drop(probability=0.5)], policy, method_class(name)())
