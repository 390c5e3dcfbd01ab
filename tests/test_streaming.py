"""Streaming DiLoCo: the paper's algebra, its bytes, and its moments on the emulated network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import INSTANT, Run, assert_identical, cluster, experiment, train
from overlapping import follow, halving, losses, nesterov

from islands.compression import Payload
from islands.job import prepare
from islands.layout import Layout
from islands.methods import Arrival, DiLoCo, Shared, StreamingDiLoCo
from islands.models import build_model
from islands.plan import Apply, SendOut, Steps
from islands.replica import Replica

STREAMING = "streaming_diloco"
#: Two workers an ocean apart, no LAN: 0.1 s per step.
FAR = ((1, 1), (0.1, 0.1))


def streaming(**settings: Any) -> dict[str, Any]:
    return {"name": STREAMING, **settings}


def run_of(**parts: Any) -> Run:
    run = train(experiment(**parts))
    assert run.error is None
    return run


# --- identities


@pytest.mark.parametrize("model", ["decoder", "helpers:build_float64", "helpers:build_batchnorm"])
def test_one_fragment_at_once_is_diloco(model: str) -> None:
    """Law 4: fragments 1, overlap 0, alpha 0: every table, byte, time and bit of the parameters."""
    both = [
        run_of(model=model, method={"name": name, "sync_every": 5}, steps=23)
        for name in ("diloco", STREAMING)
    ]
    for run in both:
        assert run.summary.pop("method") in ("diloco", STREAMING)
    assert_identical(*both)


@pytest.mark.parametrize("settings", [{}, {"prune": 0.5}, {"weights": "shard"}, {"outer": "adam"}])
def test_everything_else_is_inherited_from_diloco(settings: dict[str, Any]) -> None:
    """Outer optimizer, weights and pruning are DiLoCo's; so are the defaults."""
    streamed, plain = (
        run_of(method={"name": name, "sync_every": 4, **settings}, steps=8)
        for name in (STREAMING, "diloco")
    )
    assert streamed.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    own = StreamingDiLoCo().model_dump()
    assert {k: own[k] for k in DiLoCo().model_dump() if k != "name"} == DiLoCo().model_dump(
        exclude={"name"}
    )
    assert (own["fragments"], own["pattern"], own["overlap"]) == (1, "strided", 0)
    assert (own["alpha"], own["embeddings"], own["scale_block"]) == (0, "own", None)


@pytest.mark.parametrize("fragments", [2, 3, 4])
def test_each_fragment_moves_as_on_its_own_schedule(fragments: int) -> None:
    """Overlap 0, recorded inner steps: every tensor ends, bit for bit, where DiLoCo takes it whose
    only difference is the step of the first synchronisation."""
    period, steps = 7, 20
    common = {"sync_every": period, "payload_dtype": "bf16"}

    def recorded(name: str, **settings: Any) -> Run:
        method = {"name": f"overlapping:{name}", **common, **settings}
        return run_of(model={"name": "gpt", "layers": 3, **SMALL}, method=method, steps=steps)

    streamed = recorded("RecordedStreaming", fragments=fragments)
    layout = Layout.of(build_model("gpt", {"layers": 3, **SMALL}))
    streams = StreamingDiLoCo(fragments=fragments, **common).streams(layout)
    assert [s.first for s in streams] == [(p + 1) * period // fragments for p in range(fragments)]
    for stream in streams:
        alone = recorded("RecordedAt", first=stream.first)
        for name in stream.tensors:
            assert torch.equal(streamed.parameters[name], alone.parameters[name]), name


SMALL = {"heads": 1, "width": 8, "context": 8, "vocab_size": 64}


# --- trajectories


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize("steps", [13, 14])
def test_trajectories(fragments: int, overlap: int, alpha: float, steps: int) -> None:
    """Period 4: the outer values after every step, and where each worker ends."""
    run = halving(
        "HalvingStreaming",
        steps,
        sync_every=4,
        fragments=fragments,
        overlap=overlap,
        alpha=alpha,
    )
    expect(run, fragments, 4, overlap, alpha, steps)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("period", "steps"), [(1, 5), (2, 9), (3, 9), (4, 10)])
@pytest.mark.parametrize("fragments", [1, 3])
def test_trajectories_with_a_whole_period_of_overlap(
    fragments: int, period: int, steps: int, alpha: float
) -> None:
    """Pseudo-gradients are measured from where the phase began: before the first result from the
    workers' own values at the previous send."""
    settings = {"sync_every": period, "fragments": fragments, "overlap": period, "alpha": alpha}
    run = halving("HalvingStreaming", steps, **settings)
    expect(run, fragments, period, period, alpha, steps)


def expect(run: Run, fragments: int, period: int, overlap: int, alpha: float, steps: int) -> None:
    """Compare with each scalar's own course. Of equal size, a, b and c are dealt out in turn."""
    courses, ends = [], {}
    for number, name in enumerate("abc"):
        first = max(1, (number % fragments + 1) * period // fragments)
        course, ends[name] = follow(
            first=first,
            period=period,
            overlap=overlap,
            alpha=alpha,
            steps=steps,
            move=nesterov(0.7, 0.9),
        )
        courses.append(course)
    assert run.rows("evals", "val_loss") == pytest.approx(losses(courses), rel=1e-9)
    for worker, replica in enumerate(run.replicas):
        for tensor in replica.flat.layout.tensors:
            value = replica.state.params[tensor.offset].item()
            assert value == pytest.approx(ends[tensor.name][worker], rel=1e-9)


def test_a_trajectory_by_hand() -> None:
    """One fragment, period 4, overlap 1, alpha 0.5, outer SGD(1); x ← x/2 − 1 and x/2 − 2.

    After 4 steps: −1.875 and −3.75, mean pseudo-gradient 2.8125. After a fifth, −1.9375 and
    −3.875, it lands: outer −2.8125, local −2.375 and −3.34375. Steps 6 to 8: −2.1875 and −3.671875,
    −2.09375 and −3.8359375, −2.046875 and −3.91796875. Measured from −2.8125 the mean is
    (−0.765625 + 1.10546875)/2 = 0.169921875, which lands after step 9.
    """
    run = halving(
        "HalvingStreaming",
        9,
        sync_every=4,
        overlap=1,
        alpha=0.5,
        outer={"name": "sgd", "lr": 1.0},
    )
    outer = [loss / 10_101 for loss in run.rows("evals", "val_loss")]
    # The ninth step is synchronised once more in the end: see the course in plain Python.
    assert outer[:9] == pytest.approx([0.0] * 5 + [-2.8125] * 4)
    course, _ = follow(
        first=4, period=4, overlap=1, alpha=0.5, steps=9, move=lambda gradient: -gradient
    )
    landed = -2.8125 - 0.169921875
    mixed = [(x / 2 - d + landed) / 2 for x, d in ((-2.046875, 1), (-3.91796875, 2))]
    last = landed - sum(landed - x for x in mixed) / 2
    assert outer[9] == pytest.approx(last)
    assert outer == pytest.approx(course)


def test_losses_are_those_of_the_outer_parameters() -> None:
    """Alpha 1: workers never adopt anything, yet the evaluated model is the outer one."""
    run = halving("HalvingStreaming", 8, sync_every=4, alpha=1.0, outer={"name": "sgd", "lr": 1.0})
    assert run.rows("evals", "val_loss")[4] == pytest.approx(-2.8125 * 10_101)
    assert run.replicas[0].state.params.tolist() != [run.parameters["a"].item()] * 3


# --- numbers of few bits


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "int8", "int4", "e2m1", "e3m0"])
@pytest.mark.parametrize("overlap", [0, 3])
def test_every_format_trains(fmt: str, overlap: int) -> None:
    """The loss falls, and stays near that of exact payloads."""
    method = {"sync_every": 10, "overlap": overlap, "outer": {"lr": 0.5, "momentum": 0.5}}
    data = {"model": "decoder", "steps": 60, "optimizer": {"lr": 0.01}}
    exact, coded = (
        run_of(method=streaming(payload_dtype=d, **method), **data) for d in ("fp64", fmt)
    )
    assert coded.summary["final_val_loss"] < coded.rows("evals", "val_loss")[0] - 0.5
    assert abs(coded.summary["final_val_loss"] - exact.summary["final_val_loss"]) < 0.15


def test_quantised_rounds_sum_what_was_decoded_in_fp32() -> None:
    """Of two single values, each its own scale, the mean is not rounded to the format."""
    method = StreamingDiLoCo(payload_dtype="int4", outer={"name": "sgd", "lr": 1.0})  # type: ignore[arg-type]
    run = prepare(experiment("helpers:build_averages"))  # any layout of one tensor
    layout = run.layout
    code = method._code(layout, 0)
    assert code.nbytes == (1, 4)
    common = Shared(layout, torch.zeros(1))
    method.begin_shared(common)
    arrivals = [Arrival(w, code.write(torch.tensor([v])), 0, 1) for w, v in enumerate((1.7, 2.4))]
    assert method.average(common, 0, arrivals).item() == pytest.approx((1.7 + 2.4) / 2, rel=1e-7)
    method.combine(common, 0, arrivals)
    assert common.params.item() == pytest.approx(-2.05, rel=1e-6)


@pytest.mark.parametrize("fmt", ["e3m0", "int8", "bf16"])
def test_error_feedback_loses_nothing(fmt: str) -> None:
    """Law 6: what was sent so far and the residual are what was accumulated, rounding included."""
    job = prepare(
        experiment(method=streaming(sync_every=2, payload_dtype=fmt, error_feedback=True), steps=8)
    )
    replica = Replica(job.replica(0), job.corpus.train)
    method = job.experiment.method
    assert isinstance(method, StreamingDiLoCo)
    sent = torch.zeros(job.layout.numel, dtype=torch.float64)
    accumulated = torch.zeros_like(sent)
    for _ in range(3):
        replica.run([Steps(2)], [])
        accumulated += replica.state.slots["anchor"] - replica.state.params
        (payload,) = replica.run([SendOut(0)], []).payloads
        sent += method.read(job.layout, 0, payload)
    residual = replica.state.slots["residual"].double()
    assert residual.abs().max() > 0
    assert torch.allclose(sent + residual, accumulated, atol=1e-6)


def test_without_error_feedback_there_is_no_residual() -> None:
    """It is an option, and costs nothing where it is off."""
    run = run_of(method=streaming(sync_every=4, payload_dtype="e3m0"))
    assert all("residual" not in r.state.slots for r in run.replicas)
    on = run_of(method=streaming(sync_every=4, payload_dtype="e3m0", error_feedback=True))
    assert on.summary["parameters_sha256"] != run.summary["parameters_sha256"]


def test_a_payload_that_is_not_finite_is_refused() -> None:
    """A NaN shows in a scale: the worker is out of that round, and nothing of it stays behind."""
    job = prepare(experiment(method=streaming(payload_dtype="e3m0", error_feedback=True)))
    replica = Replica(job.replica(0), job.corpus.train)
    replica.state.params[5] = torch.nan
    (payload,) = replica.run([SendOut(0)], []).payloads
    assert not payload.is_finite()
    assert not replica.state.slot("residual").any()


# --- bytes


def sent_in_schedule(run: Run, period: int, steps: int, column: str) -> int:
    """Bytes of worker 0's rounds but those that only end the run."""
    rows = run.rows("syncs", "worker", "fragment", "step", column)
    firsts = {f: min(s for _, g, s, _ in rows if g == f) for _, f, _, _ in rows}
    return sum(b for w, f, s, b in rows if w == 0 and (s - firsts[f]) % period == 0 and s <= steps)


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_bytes_per_period_are_dilocos(fragments: int) -> None:
    """Whatever the number of fragments; the most after one step becomes less."""
    period, steps = 10, 40
    run = run_of(method=streaming(sync_every=period, fragments=fragments), steps=steps)
    total = sent_in_schedule(run, period, steps, "payload_bytes")
    assert total == 4 * 10_752
    peak = run.summary["peak_payload_bytes_per_step"]
    largest = max(run.rows("syncs", "payload_bytes"))
    assert peak == largest
    assert (peak < 10_752) == (fragments > 1)


def test_fragments_that_share_a_boundary_add_to_the_peak() -> None:
    """Five fragments in two steps: 1, 1, 1, 1, 2 are their first sends."""
    run = run_of(method=streaming(sync_every=2, fragments=5), steps=6)
    sizes = dict(run.rows("syncs", "fragment", "payload_bytes"))
    assert run.summary["peak_payload_bytes_per_step"] == sum(sizes[f] for f in range(4))
    assert sum(sizes.values()) == 10_752


@pytest.mark.parametrize("fmt", ["int4", "e2m1", "e3m0"])
@pytest.mark.parametrize("fragments", [1, 3])
def test_four_bit_values_are_a_quarter_of_bf16s(fmt: str, fragments: int) -> None:
    """And a scale of four bytes per tensor, or per block, comes on top."""
    coded, plain = (
        run_of(method=streaming(sync_every=4, fragments=fragments, payload_dtype=d), steps=12)
        for d in (fmt, "bf16")
    )
    assert [4 * v for v in coded.rows("syncs", "value_bytes")] == plain.rows("syncs", "value_bytes")
    assert sum(plain.rows("syncs", "scale_bytes")) == 0
    scales = dict(coded.rows("syncs", "fragment", "scale_bytes"))
    assert sum(scales.values()) == 4 * 7  # tensors of the decoder
    blocks = run_of(method=streaming(sync_every=4, payload_dtype=fmt, scale_block=64), steps=4)
    assert set(blocks.rows("syncs", "scale_bytes")) == {4 * 5376 // 64}


def test_codes_are_gathered_and_the_ring_is_shown_beside_it() -> None:
    """Four workers: three payloads on the wire instead of 2·3/4; partial sums in fp32 would be
    2·3/4 of four bytes a value."""
    summary = run_of(method=streaming(sync_every=4, payload_dtype="e3m0")).summary
    payload = 5376 / 2 + 4 * 7
    assert summary["payload_bytes_per_step"] == payload / 4
    assert summary["wire_bytes_per_step"] == 3 * payload / 4
    assert summary["ring_wire_bytes_per_step"] == {
        "fp32": pytest.approx(1.5 * 4 * 5376 / 4),
        "requantised": pytest.approx(1.5 * payload / 4),
    }
    assert run_of(method=streaming()).summary["ring_wire_bytes_per_step"] is None


@pytest.mark.parametrize("workers", [2, 4])
def test_400_times_fewer_bits_than_dense(workers: int) -> None:
    """H = 100 and four bits against bf16 gradients after every step: 100·16/4 in value bytes over
    whole periods, for any fragments and overlap. On the wire, scales aside, the same for two
    workers, and for four half as much: codes are gathered, p − 1 payloads against 2(p − 1)/p."""
    steps = 200
    places = cluster((workers // 2, workers // 2))
    dense = run_of(method="dense", steps=4, cluster=places)
    per_step = dense.rows("syncs", "value_bytes")[0]
    method = streaming(sync_every=100, fragments=2, overlap=3, alpha=0.5, payload_dtype="e3m0")
    run = run_of(method=method, steps=steps, cluster=places, eval={"every": 0, "windows": 1})
    values = sent_in_schedule(run, 100, steps, "value_bytes")
    assert per_step * steps / values == 400
    dense_wire = 2 * (workers - 1) / workers * per_step * steps
    assert dense_wire / ((workers - 1) * values) == {2: 400, 4: 200}[workers]


# --- moments


def far(bytes_per_s: float, delay: str) -> dict[str, Any]:
    """Two workers, no LAN, one link of so many bytes per second."""
    return cluster(*FAR, f"{bytes_per_s * 8:g} bit/s", delay, INSTANT["lan"])


def test_a_late_transfer_stalls_by_exactly_what_is_missing() -> None:
    """A ring all-reduce of 10,752 bytes between two takes 2·(0.5 s + 50 ms) = 1.1 s at 10,752 B/s.
    Sent after step 10 (1.0 s), needed after step 13 (1.3 s), done at 2.1 s: 0.8 s of waiting."""
    method = streaming(sync_every=10, overlap=3)
    run = run_of(method=method, cluster=far(10_752, "50 ms"), steps=15)
    for worker in (0, 1):
        rows = run.rows("syncs", "worker", "ready_s", "done_s", "wait_s")
        first = next(r for r in rows if r[0] == worker)
        assert first[1:] == pytest.approx((1.0, 2.1, 0.8), rel=1e-12)
    starts = dict(run.rows("steps", "step", "start_s"))
    assert starts[13] == pytest.approx(1.2)
    assert starts[14] == pytest.approx(2.1)


@pytest.mark.parametrize(("overlap", "wait"), [(0, 1.1), (1, 1.0), (10, 0.1), (11, 0.0)])
def test_overlap_hides_what_it_covers(overlap: int, wait: float) -> None:
    """The same transfer: each step of 0.1 s hides that much of it."""
    method = streaming(sync_every=20, overlap=overlap)
    run = run_of(method=method, cluster=far(10_752, "50 ms"), steps=31)
    waits = [r[2] for r in run.rows("syncs", "worker", "version", "wait_s") if r[1] == 1]
    assert waits == pytest.approx([wait, wait], abs=1e-12)
    last = [r[2] for r in run.rows("syncs", "worker", "version", "wait_s") if r[1] == 2]
    assert last == pytest.approx([1.1, 1.1])  # nothing is left to hide behind at the end


def test_overlapping_collectives_share_the_link() -> None:
    """Two fragments of the decoder in fp32 codes of a byte, gathered, so that each of the two
    workers sends its payload once. The second is ready 0.2 s after the first, which still has the
    link: it begins when the first has left, and both need their own delay."""
    rate = 4_000.0
    method = streaming(sync_every=4, fragments=2, overlap=4, payload_dtype="int8")
    run = run_of(method=method, cluster=far(rate, "30 ms"), steps=6)
    size = dict(run.rows("syncs", "fragment", "payload_bytes"))
    rows = {
        (f, w): (ready, done)
        for f, v, w, ready, done in run.rows(
            "syncs", "fragment", "version", "worker", "ready_s", "done_s"
        )
        if v == 1
    }
    left = 0.2 + size[0] / rate
    assert left > 0.4
    for worker in (0, 1):
        assert rows[0, worker] == pytest.approx((0.2, left + 0.03))
        assert rows[1, worker] == pytest.approx((0.4, left + size[1] / rate + 0.03))
    queued = {
        f: q for f, v, q in run.rows("transfers", "fragment", "version", "queued_s") if v == 1
    }
    assert queued[0] == 0
    assert queued[1] == pytest.approx(left - 0.4)


# --- determinism and state

ALL = {
    "sync_every": 6,
    "fragments": 3,
    "overlap": 4,
    "alpha": 0.5,
    "payload_dtype": "e3m0",
    "scale_block": 32,
    "error_feedback": True,
}


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_answers_changes_nothing(order: int) -> None:
    """Law 10, with all of it switched on; another seed is another run."""
    job = prepare(experiment(method=streaming(**ALL), steps=20, eval={"every": 1, "windows": 1}))
    plain = train(job)
    assert_identical(plain, train(job, shuffle=order))
    other = train(experiment(method=streaming(**ALL), steps=20, seed=order))
    assert other.summary["parameters_sha256"] != plain.summary["parameters_sha256"]


@pytest.mark.parametrize("name", [STREAMING, "delayed", "eager_diloco", "co2", "slowmo"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_replica_is_saved_and_restored_in_mid_flight(name: str, optimizer: str) -> None:
    """Taken between a send and its receive, with a residual, a momentum of its own and a second
    payload to come: the restored replica goes on bit for bit like the one that went on."""
    settings = ALL if name == STREAMING else {"sync_every": 3}
    job = prepare(
        experiment(
            {"name": "gpt", "layers": 2, **SMALL},
            method={"name": name, **settings},
            optimizer={"name": optimizer, "lr": 0.02, "warmup": 4},
        )
    )
    method = job.experiment.method
    first, second = (Replica(job.replica(1), job.corpus.train) for _ in range(2))
    common = Shared(job.layout, first.state.params.clone())
    method.begin_shared(common)

    def update_of(payload: Payload) -> Any:
        return method.combine(common, 0, [Arrival(1, payload, 0, 3)])

    (one,) = first.run([Steps(3), SendOut(0)], []).payloads
    (two,) = first.run([Steps(3), SendOut(0), Apply(0, 0), Steps(1)], [update_of(one)]).payloads
    second.load_state_dict(first.state_dict())
    rest = [Apply(0, 0), Steps(2), SendOut(0), Steps(1)]
    landing = update_of(two)
    answers = [replica.run(rest, [landing]) for replica in (first, second)]
    assert answers[0].failure is None
    assert answers[0].losses == answers[1].losses
    assert answers[0].payloads[0].values.tobytes() == answers[1].payloads[0].values.tobytes()
    assert torch.equal(first.state.params, second.state.params)
    assert first.state.slots.keys() == second.state.slots.keys()
    for slot, tensor in first.state.slots.items():
        assert torch.equal(tensor, second.state.slots[slot]), slot
