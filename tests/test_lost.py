"""Rounds in which parts get lost, followed by hand: two workers, one value, three rounds.

The inner step is w ← w − gradient throughout, so every number below can be checked in one's head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import Lab, draws
from torch import Tensor

from islands.compression import Payload, decode, encode
from islands.faults import KEPT, Fate
from islands.methods import (
    METHODS,
    Arrival,
    DeMo,
    Dense,
    DiLoCo,
    LocalSGD,
    Method,
    Shared,
    SignSGD,
    Sparta,
    TopK,
    mean_of,
    method_class,
)
from islands.methods.base import MEANS
from islands.methods.robust import median, trimmed_mean

#: Gradients of the two workers in three rounds.
GRADIENTS = ((1.0, 3.0), (1.0, 1.0), (2.0, 4.0))
BOTH = Fate(up=True, down=True)
OLD_ANCHOR = Fate(up=True, down=True, reanchor=False)
GONE = Fate(up=True, down=True, restore=False)
UP, DOWN = Fate(up=True), Fate(down=True)

DILOCO = DiLoCo(payload_dtype="fp64", outer={"name": "sgd", "lr": 0.5})
LOCAL = LocalSGD(payload_dtype="fp64")
DENSE = Dense(payload_dtype="fp64")
SPARTA = Sparta(payload_dtype="fp64", fraction=1.0)
TOPK = TopK(payload_dtype="fp64", ratio=1, momentum=0.0)
HEAVY = TopK(payload_dtype="fp64", ratio=1, momentum=0.5)
SIGNS = SignSGD(payload_dtype="fp64")
DEMO = DeMo(payload_dtype="fp64", decay=0.5, apply="identity")


def scalar_lab(method: Method) -> Lab:
    return Lab(method, ((1,),), 2, lr=1.0, may_lose=True)


def run(method: Method, first: Mapping[int, Fate]) -> list[list[float]]:
    """Both workers' parameters after each round; ``first``: the fates of the first round."""
    lab = scalar_lab(method)
    found = []
    for n, gradients in enumerate(GRADIENTS):
        lab.round([torch.tensor([g], dtype=torch.float64) for g in gradients], {} if n else first)
        found.append([float(state.params) for state in lab.states])
    return found


@pytest.mark.parametrize(
    ("method", "fate", "expected"),
    [
        # Nothing lost: anchor 0, mean move 2, half a step; then mean 1 and 3.
        (DILOCO, KEPT, [[-1, -1], [-1.5, -1.5], [-3, -3]]),
        # Only 1 is averaged. Worker 1 stays at −3 with anchor −0.5: its next move is 3.5, and the
        # mean 2.25. With the old anchor 0 it is 4.
        (DILOCO, BOTH, [[-0.5, -3], [-1.625, -1.625], [-3.125, -3.125]]),
        (DILOCO, OLD_ANCHOR, [[-0.5, -3], [-1.75, -1.75], [-3.25, -3.25]]),
        # Only the contribution is lost: worker 1 adopts, and its move is gone.
        (DILOCO, UP, [[-0.5, -0.5], [-1, -1], [-2.5, -2.5]]),
        # Only the result: both moves count, worker 1 stays at −3 with anchor −1 and next moves 3.
        (DILOCO, DOWN, [[-1, -3], [-2, -2], [-3.5, -3.5]]),
        (DILOCO, Fate(down=True, reanchor=False), [[-1, -3], [-2.25, -2.25], [-3.75, -3.75]]),
        (LOCAL, BOTH, [[-1, -3], [-3, -3], [-6, -6]]),
        (LOCAL, OLD_ANCHOR, [[-1, -3], [-3.5, -3.5], [-6.5, -6.5]]),
        (LOCAL, UP, [[-1, -1], [-2, -2], [-5, -5]]),
        # Every value is averaged each step: as local SGD.
        (SPARTA, BOTH, [[-1, -3], [-3, -3], [-6, -6]]),
        (SPARTA, OLD_ANCHOR, [[-1, -3], [-3.5, -3.5], [-6.5, -6.5]]),
        (SPARTA, UP, [[-1, -1], [-2, -2], [-5, -5]]),
        # A dropped worker stays in step; its gradient is missing.
        (DENSE, BOTH, [[-1, -1], [-2, -2], [-5, -5]]),
        (DENSE, UP, [[-1, -1], [-2, -2], [-5, -5]]),
        (DENSE, DOWN, [[-2, -2], [-3, -3], [-6, -6]]),
        # The 3 returns to the residual: round 2 averages 1 and 4. Lost: 1 and 1.
        (TOPK, BOTH, [[-1, -1], [-3.5, -3.5], [-6.5, -6.5]]),
        (TOPK, GONE, [[-1, -1], [-2, -2], [-5, -5]]),
        (SIGNS, BOTH, [[-1, -1], [-3.5, -3.5], [-6.5, -6.5]]),
        (SIGNS, GONE, [[-1, -1], [-2, -2], [-5, -5]]),
        # The momentum is not masked where nothing was sent: u = 3, then 0.5·3 + 1 = 2.5, and v is
        # 3 + 2.5. Lost: both were emptied.
        (HEAVY, BOTH, [[-1, -1], [-4.25, -4.25], [-7.25, -7.25]]),
        (HEAVY, GONE, [[-1, -1], [-2, -2], [-5, -5]]),
        # The momentum is the residual: 3, then 0.5·3 + 1.
        (DEMO, BOTH, [[-1, -1], [-2.75, -2.75], [-5.75, -5.75]]),
        (DEMO, GONE, [[-1, -1], [-2, -2], [-5, -5]]),
    ],
)
def test_three_rounds_of_which_the_first_loses_worker_1s_part(
    method: Method, fate: Fate, expected: list[list[float]]
) -> None:
    """Every semantics of a drop: direction, anchor, restored or lost."""
    assert run(method, {1: fate}) == expected


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("fate", [BOTH, GONE, UP])
def test_a_round_in_which_everything_was_lost_changes_nothing_shared(name: str, fate: Fate) -> None:
    """Neither the shared parameters nor the outer momentum, as if the round were not there; the
    workers go on from what they have."""
    lab = Lab(method_class(name)(payload_dtype="fp64"), ((6,), (2, 3)), 2, may_lose=True)
    gradients = draws(3, 3, 2, 12)
    lab.round(list(gradients[0]))
    before, update = copy.deepcopy(lab.shared), lab.update
    params = [state.params.clone() for state in lab.states]
    lab.round(list(gradients[1]), {0: fate, 1: fate})
    assert torch.equal(lab.shared.params, before.params)
    assert lab.update is update
    for state, old in zip(lab.states, params, strict=True):
        moved = -lab.lr * gradients[1][state.worker]
        own = lab.method.shared_in != "replicas"
        assert torch.equal(state.params, old + moved if own else old)
    if name == "diloco":
        (mine,), (other,) = lab.shared.slots["outer"], before.slots["outer"]
        kept = mine.state_dict()
        assert kept["buffer"].abs().sum() > 0
        assert all(torch.equal(kept[key], value) for key, value in other.state_dict().items())


def test_pruned_pseudo_gradients_get_lost_like_whole_ones() -> None:
    """What was sent returns with the next pseudo-gradient, because nothing was adopted."""
    method = DiLoCo(payload_dtype="fp64", prune=0.5, outer={"name": "sgd", "lr": 1.0})
    lab = Lab(method, ((1, 2),), 2, lr=1.0, may_lose=True)
    zero = torch.zeros(2, dtype=torch.float64)
    lab.round([zero, zero + torch.tensor([4.0, 1.0])], {1: BOTH})
    assert lab.states[1].params.tolist() == [-4, -1]
    lab.round([zero, zero])
    assert lab.states[1].params.tolist() == lab.states[0].params.tolist() == [-2, 0]


# --- law 6

ERROR_FEEDBACK = st.one_of(
    st.builds(
        TopK,
        payload_dtype=st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
        ratio=st.sampled_from([1.0, 2.0, 16.0]),
        momentum=st.sampled_from([0.0, 0.9]),
        factor_masking=st.booleans(),
    ),
    st.builds(
        DeMo,
        payload_dtype=st.sampled_from(["bf16", "fp32", "fp64"]),
        k=st.integers(1, 5),
        chunk=st.sampled_from([4, 64]),
        alpha=st.sampled_from([0.0, 0.2, 1.0]),
        transform=st.sampled_from(["flat", "tiles"]),
    ),
    st.builds(SignSGD, payload_dtype=st.sampled_from(["bf16", "fp32", "fp64"])),
)
SHAPES = ((7,), (), (3, 5), (0, 2), (64,))


def had_nothing_been_sent(method: Any, lab: Lab, worker: int) -> dict[str, Tensor]:
    """The slots with the latest gradient folded in, and nothing taken out."""
    state = lab.states[worker]
    slots = {name: state.slot(name).clone() for name in method.feedback}
    if isinstance(method, TopK):
        folded = torch.add(state.grad, slots["momentum"], alpha=method.momentum)
        return {"momentum": folded, "residual": slots["residual"] + folded}
    if isinstance(method, DeMo):
        return {"momentum": torch.add(state.grad, slots["momentum"], alpha=method.decay)}
    return {"residual": slots["residual"] + state.grad}


@settings(deadline=None, max_examples=60)
@given(
    ERROR_FEEDBACK,
    st.lists(st.booleans(), min_size=3, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 1000),
)
def test_a_lost_payload_leaves_the_state_as_if_it_had_not_been_sent(
    method: Any, losses: list[bool], dtype: torch.dtype, seed: int
) -> None:
    """Law 6 with drops, bit for bit: the accumulated mass is all in the residual (and the momentum
    that a mask would have emptied), whatever the number format; every other slot is untouched."""
    lab = Lab(method, SHAPES, 2, dtype=dtype, may_lose=True)
    for gradients, lost in zip(draws(seed, len(losses), 2, lab.layout.numel), losses, strict=True):
        for state, gradient in zip(lab.states, gradients, strict=True):
            method.local_step(state, gradient, lab.context)
            state.step += 1
        expected = had_nothing_been_sent(method, lab, 1)
        for state in lab.states:
            method.send(state, 0, lab.context)
        if lost:
            method.lost(lab.states[1], 0, lab.context)
            slots = lab.states[1].slots
            assert set(slots) == set(expected)
            assert all(torch.equal(slots[name], value) for name, value in expected.items())


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1.0, 3.0, 16.0]),
    st.sampled_from(["bf16", "fp16", "fp32", "fp64"]),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.integers(0, 1000),
)
def test_what_arrived_and_what_is_kept_are_what_was_accumulated(
    ratio: float, fmt: Any, losses: list[bool], seed: int
) -> None:
    """Law 6 over rounds of which any may be lost, to the accuracy of the float64 sums."""
    lab = Lab(TopK(ratio=ratio, payload_dtype=fmt, momentum=0.0), SHAPES, may_lose=True)
    gradients = draws(seed, 5, 1, lab.layout.numel)
    for gradient, lost in zip(gradients, losses, strict=True):
        lab.round(list(gradient), {0: BOTH} if lost else {})
    arrived = -lab.params / lab.lr
    kept = lab.states[0].slot("residual")
    assert torch.allclose(arrived + kept, gradients.sum((0, 1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [TOPK, HEAVY, SIGNS, DEMO])
def test_a_refused_gradient_is_not_mistaken_for_an_earlier_payload(method: Any) -> None:
    """A NaN gradient changed nothing when it was sent, so its loss puts nothing back, although the
    round before left something to put back."""
    lab = scalar_lab(method)
    one = torch.ones(1, dtype=torch.float64)
    lab.round([one, one])
    before = {name: lab.states[1].slot(name).clone() for name in method.feedback}
    lab.round([one, one * torch.nan])
    assert all(torch.equal(lab.states[1].slots[name], value) for name, value in before.items())


@pytest.mark.parametrize("method", [TOPK, SIGNS, DEMO])
def test_a_loss_is_put_back_once(method: Any) -> None:
    """Hearing of it again changes nothing."""
    lab = scalar_lab(method)
    lab.send([torch.ones(1, dtype=torch.float64)] * 2)
    method.lost(lab.states[0], 0, lab.context)
    kept = {name: value.clone() for name, value in lab.states[0].slots.items()}
    method.lost(lab.states[0], 0, lab.context)
    assert {k: v.tolist() for k, v in lab.states[0].slots.items()} == {
        k: v.tolist() for k, v in kept.items()
    }


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nothing_is_kept_where_nothing_can_get_lost(name: str) -> None:
    """A fault-free run has the slots of the method and no others; with losses the others go as soon
    as they were used."""
    slots = []
    for may_lose in (False, True):
        lab = Lab(method_class(name)(), ((6,),), 2, may_lose=may_lose)
        lab.round(list(draws(0, 1, 2, 6)[0]), {0: BOTH} if may_lose else {})
        slots.append(set(lab.states[0].slots))
    assert slots[0] == slots[1]


def test_without_error_feedback_nothing_returns() -> None:
    """What is not received is lost: the ablation stays one."""
    method = TopK(payload_dtype="fp64", ratio=2, momentum=0.0, error_feedback=False)
    lab = Lab(method, ((2,),), 1, may_lose=True)
    lab.round([torch.tensor([2.0, 1.0], dtype=torch.float64)], {0: BOTH})
    assert lab.states[0].slot("residual").tolist() == [0, 0]


# --- weights


@pytest.mark.parametrize(
    "method",
    [DILOCO, LOCAL, DENSE, SPARTA, TOPK, SIGNS, DEMO, DEMO.model_copy(update={"merge": "senders"})],
)
def test_a_discounted_arrival_counts_less(method: Method) -> None:
    """(1·1 + 0.5·4)/1.5 = 2 where the plain mean of 1 and 4 is 2.5."""
    lab = Lab(method, ((1,),), 2, lr=1.0)
    payloads = lab.send([torch.tensor([v], dtype=torch.float64) for v in (1.0, 4.0)])
    arrivals = [Arrival(n, p, 0, 1, weight=(1.0, 0.5)[n]) for n, p in enumerate(payloads)]
    update = method.combine(lab.shared, 0, arrivals)
    method.receive(lab.states[0], 0, update, lab.context)
    step = 0.5 if method is DILOCO else 1.0
    assert float(lab.params) == pytest.approx(-2.0 * step, rel=1e-15)


def test_weights_by_shard_and_by_lateness_multiply() -> None:
    """Shards of 1 and 4, the second late at 0.5: (1·0 + 2·3)/(1 + 2) = 2."""
    method = LocalSGD(payload_dtype="fp64", weights="shard")
    lab = Lab(method, ((1,),), 2, lr=1.0)
    lab.shared.shard_sizes = (1, 4)
    payloads = lab.send([torch.tensor([v], dtype=torch.float64) for v in (0.0, 3.0)])
    arrivals = [Arrival(n, p, 0, 1, weight=(1.0, 0.5)[n]) for n, p in enumerate(payloads)]
    assert method.average(lab.shared, 0, arrivals).tolist() == pytest.approx([2.0], rel=1e-15)


def test_late_top_k_payloads_are_read_at_their_own_density() -> None:
    """During the warm-up of the density a payload of the step before has more values."""
    method = TopK(payload_dtype="fp64", ratio=8, momentum=0.0, density_warmup=2)
    lab = Lab(method, ((16,),), 1)
    gradient = torch.arange(1.0, 17, dtype=torch.float64)
    first = lab.send([gradient])[0]
    second = lab.send([gradient])[0]
    assert first.nbytes > second.nbytes
    arrivals = [Arrival(0, first, 0, 1), Arrival(1, second, 0, 2)]
    update = decode(method.combine(lab.shared, 0, arrivals).values, "fp64")
    alone = [
        decode(method.combine(lab.shared, 0, [arrival]).values, "fp64") for arrival in arrivals
    ]
    assert torch.equal(update, (alone[0] + alone[1]) / 2)


# --- means


def values(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_robust_means_by_hand() -> None:
    """Each coordinate by itself; an even number has two middles; NaN is left out first."""
    nan, inf = torch.nan, torch.inf
    four = values([1, 8, nan], [2, 6, 5], [40, -inf, 3], [3, 7, 4])
    one = [1.0] * 4
    assert median(four, torch.float64, one).tolist() == [2.5, 6.5, 4.5]
    assert trimmed_mean(four, torch.float64, one, 0.25).tolist() == [2.5, 6.5, 4.5]
    assert trimmed_mean(four, torch.float64, one, 0.1).tolist()[0] == 11.5
    assert median(four[:3], torch.float64, one[:3]).tolist() == [2, 6, 5]
    assert median(four[:1], torch.float64, [0.5]).tolist()[:2] == [1, 8]
    assert median(values([], []), torch.float64, [1, 1]).tolist() == []


def test_robust_means_weigh() -> None:
    """The median is where half of the weight is reached; trimming counts parts, not weights."""
    five = values([1], [2], [3], [4], [100])
    assert median(five, torch.float64, [1, 1, 1, 1, 5]).tolist() == [100]
    assert median(five, torch.float64, [1, 1, 2, 0.5, 0.5]).tolist() == [3]
    assert median(five, torch.float64, [1, 1, 1, 0.5, 0.5]).tolist() == [2.5]
    assert trimmed_mean(five, torch.float64, [1, 1, 1, 2, 9], 0.2).tolist() == [(2 + 3 + 8) / 4]


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(
            st.lists(st.floats(-1e6, 1e6), min_size=n, max_size=n), min_size=1, max_size=4
        )
    )
)
def test_the_median_is_torchs_and_numpys(columns: list[list[float]]) -> None:
    """Any number of workers and coordinates, equal weights."""
    stacked = torch.tensor(columns, dtype=torch.float64).T
    found = median(list(stacked), torch.float64, [1.0] * len(stacked))
    assert torch.allclose(found, torch.quantile(stacked, 0.5, dim=0, interpolation="midpoint"))


def test_many_coordinates_are_sorted_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same whatever is sorted together."""
    parts = list(draws(4, 1, 5, 1000)[0])
    whole = median(parts, torch.float64, [1.0] * 5)
    monkeypatch.setattr("islands.methods.robust._TOGETHER", 7)
    assert torch.equal(median(parts, torch.float64, [1.0] * 5), whole)


#: Methods that can form every mean.
ROBUST = [name for name in sorted(METHODS) if method_class(name)().means == MEANS]


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("mean", MEANS)
def test_equal_payloads_have_one_mean(name: str, mean: Any) -> None:
    """Four workers that send the same: every mean is that, for every method."""
    updates = []
    for how in ("mean", mean):
        lab = Lab(method_class(name)(payload_dtype="fp64"), ((6,), (3, 4)), 4)
        lab.shared.mean, lab.shared.trim = how, 0.25
        lab.round([draws(5, 1, 1, 18)[0, 0]] * 4)
        assert lab.update is not None
        updates.append(decode(lab.update.values, lab.update.fmt))
    assert torch.allclose(*updates, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("mean", ["trimmed_mean", "median"])
def test_one_bad_worker_of_four_moves_a_robust_mean_no_further_than_the_others(
    name: str, mean: Any
) -> None:
    """With payloads 1,000 times too large and of the wrong sign the update stays inside the range
    of the good ones; the plain mean leaves it."""
    outside = {}
    for how in ("mean", mean):
        bound = {"clip": None} if name == "co2" else {}  # which is a bound of another kind
        lab = Lab(method_class(name)(payload_dtype="fp64", **bound), ((40,),), 4, lr=1.0)
        lab.shared.mean, lab.shared.trim = how, 0.25
        good = draws(6, 1, 1, 40)[0, 0] + 3
        lab.round([good, good * 1.1, good * 0.9, good * -1000])
        assert lab.update is not None
        update = decode(lab.update.values, lab.update.fmt)
        outside[how] = float(update.abs().max()) > 10 * float(good.abs().max())
    assert outside == {"mean": True, mean: False}


def test_the_mean_is_that_of_the_coordinator() -> None:
    """mean_of without a shared state is the plain one, with it the one that was chosen."""
    payloads = [Payload(encode(torch.tensor([v]), "fp32"), "fp32") for v in (1.0, 2.0, 9.0)]
    arrivals = [Arrival(n, payload, 0, 1) for n, payload in enumerate(payloads)]
    lab = Lab(DENSE, ((1,),))
    shared = Shared(lab.layout, lab.params, mean="median")
    assert mean_of(arrivals, "fp32").tolist() == [4.0]
    assert mean_of(arrivals, "fp32", shared=shared).tolist() == [2.0]
