"""The summary of a run: one flat dictionary, the same keys for every method."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from islands.fault_kinds import TIMED_KINDS
from islands.flat import state_sha256
from islands.results.bandwidth import peak_payload_bytes, ring_bytes
from islands.results.pace_rows import pace_summary
from islands.results.recorder import RunRecorder
from islands.stragglers import Stretched

if TYPE_CHECKING:
    from islands.job import Job


#: What a worker's time goes into: fields of a WorkerClock that sum to its elapsed time.
TIMES = (
    "compute_s",
    "background_s",
    "queue_s",
    "transmission_s",
    "propagation_s",
    "others_s",
    "away_s",
)
#: What can become of a worker's part in a round; of each round they sum to the workers.
FATES = ("ok", "late", "dropped", "rejected", "absent")


def summarize(
    job: Job,
    recorder: RunRecorder,
    *,
    status: str,
    parameters_sha256: str,
    wall_s: float,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Everything a run is asked for first. ``status`` is done, failed or interrupted.

    Bytes per sync and per step are means over the workers; seconds are emulated, but ``wall_s``.
    """
    experiment = job.experiment
    workers, steps = job.workers, recorder.steps_done
    worker_steps = max(1, recorder.steps_taken)
    clocks = recorder.clocks
    emulated_s = max(clock.clock_s for clock in clocks)
    time = {name: sum(getattr(clock, name) for clock in clocks) / workers for name in TIMES}
    costs: dict[str, dict[str, float]] = {}
    for priced in job.topology.links:
        if priced.price is not None and priced.name in recorder.links:
            total = recorder.links[priced.name]
            own_bytes = total.bytes - total.background_bytes
            costs[priced.name] = {priced.price.currency: own_bytes * priced.price.per_byte}
    losses = [loss for _, _, loss in recorder.evals]
    final = losses[-1] if losses else math.nan
    finite = [loss for loss in losses if math.isfinite(loss)]
    target = experiment.eval.target_loss
    method, parts = experiment.method, job.layout.fragments
    values = sum((parts[f].stop - parts[f].start) * n for f, n in recorder.sent.items())
    reached = [(s, t) for s, t, loss in recorder.evals if target is not None and loss <= target]
    return {
        "status": status,
        "method": experiment.method.name,
        "notes": list(job.notes),
        "islands": len(experiment.cluster.islands),
        "cluster": experiment.cluster.name,
        "model": experiment.model.name,
        "workers": workers,
        "steps": steps,
        "seed": experiment.seed,
        "parameters": job.parameters,
        "tokens": recorder.steps_taken * job.tokens_per_step,
        "final_val_loss": final,
        "final_perplexity": math.exp(final) if final < 700 else math.inf,
        "best_val_loss": min(finite, default=math.nan),
        "target_loss": target,
        "steps_to_target": reached[0][0] if reached else None,
        "time_to_target_s": reached[0][1] if reached else None,
        "emulated_s": emulated_s,
        "compute_s": time["compute_s"],
        "wait_s": sum(clock.wait_s for clock in clocks) / workers,
        "away_s": time["away_s"],
        "compute_utilization": time["compute_s"] / emulated_s if emulated_s else 1.0,
        "time": time,
        "time_by_worker": [
            {"worker": worker, "island": island, "elapsed_s": clock.clock_s}
            | {name: getattr(clock, name) for name in TIMES}
            for worker, (island, clock) in enumerate(zip(job.island_of, clocks, strict=True))
        ],
        "payload_bytes_per_sync": recorder.payload_bytes / max(1, recorder.payloads),
        "payload_bytes_per_step": recorder.payload_bytes / worker_steps,
        "peak_payload_bytes_per_step": peak_payload_bytes(
            method.streams(job.layout), recorder.largest, steps
        ),
        "wire_bytes_per_step": recorder.wire_bytes / worker_steps,
        "ring_wire_bytes_per_step": ring_bytes(
            method, workers, values / worker_steps, recorder.payload_bytes / worker_steps
        ),
        "wire_bytes_total": recorder.wire_bytes,
        "wan_bytes": recorder.wan_bytes,
        "lan_bytes": recorder.lan_bytes,
        "links": {
            name: {
                "bytes": link.bytes,
                "busy_s": link.busy_s,
                "utilization": link.busy_s / emulated_s if emulated_s else 0.0,
                "peak_utilization": link.peak,
                "p95_utilization": link.p95,
                "background_bytes": link.background_bytes,
                "egress_cost": costs.get(name, {}),
            }
            for name, link in recorder.links.items()
        },
        "egress_cost": {
            currency: sum(cost.get(currency, 0.0) for cost in costs.values())
            for currency in sorted({currency for cost in costs.values() for currency in cost})
        },
        "syncs": recorder.rounds,
        "contributions": {fate: recorder.status[fate] for fate in FATES},
        "dropped_syncs": recorder.status["dropped"],
        "dropped_results": recorder.unheard,
        "rejected_payloads": recorder.status["rejected"],
        "wasted_bytes": recorder.wasted_bytes,
        "lost_s": {
            kind: None if lost is None else lost / workers
            for kind, lost in sorted(_lost(job, recorder).items())
        },
        "unsynced_steps": recorder.unsynced_steps,
        "corpus_sha256": job.corpus.sha256,
        "shards": experiment.data.shards,
        "shard_sizes": [shard.tokens for shard in job.shards],
        "weights": getattr(experiment.method, "weights", "uniform"),
        "warm_start": experiment.warm_start,
        "initial_sha256": state_sha256(job.initial),
        "device": job.device,
        "collective": "star" if experiment.method.collective == "star" else experiment.collective,
        "chosen_collective": job.chosen_collective,
        "pace": pace_summary(recorder.pace),
        "wall_s": wall_s,
        "parameters_sha256": parameters_sha256,
        "versions": dict(versions),
    }


def _lost(job: Job, recorder: RunRecorder) -> dict[str, float | None]:
    """Emulated seconds that each kind of fault cost, over all workers; of jitter it may be less
    than nothing.

    It is by how much later the workers end than on the same operations without it. Where rounds
    close by the clock something else would have been trained, so there it is only what the workers
    themselves lost: longer steps, being away. None: it cannot be told.
    """
    found = Counter(recorder.lost_s)
    if job.timed and isinstance(job.compute, Stretched):
        for worker in range(job.workers):
            for first, last in job.faults.spans(worker, job.experiment.steps):
                taken = min(last, recorder.steps_done) - first
                if taken > 0:
                    found.update(job.compute.lost_s(worker, first, taken))
    there = set(TIMED_KINDS) & {fault.kind for fault in job.experiment.faults}
    return {**dict.fromkeys(there), **found}
