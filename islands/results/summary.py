"""The summary of a run: one flat dictionary, the same keys for every method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from islands.flat import state_sha256
from islands.results.bandwidth import peak_payload_bytes, ring_bytes
from islands.results.recorder import RunRecorder

if TYPE_CHECKING:
    from islands.job import Job


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
    worker_steps = max(1, workers * steps)
    emulated_s = max(clock_s for _, _, clock_s in recorder.clocks)
    compute_s = sum(compute_s for compute_s, _, _ in recorder.clocks) / workers
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
        "notes": list(experiment.method.notes(job.layout)),
        "islands": len(experiment.cluster.islands),
        "cluster": experiment.cluster.name,
        "model": experiment.model.name,
        "workers": workers,
        "steps": steps,
        "seed": experiment.seed,
        "parameters": job.parameters,
        "tokens": steps * workers * job.tokens_per_step,
        "final_val_loss": final,
        "final_perplexity": math.exp(final) if final < 700 else math.inf,
        "best_val_loss": min(finite, default=math.nan),
        "target_loss": target,
        "steps_to_target": reached[0][0] if reached else None,
        "time_to_target_s": reached[0][1] if reached else None,
        "emulated_s": emulated_s,
        "compute_s": compute_s,
        "wait_s": sum(wait_s for _, wait_s, _ in recorder.clocks) / workers,
        "compute_utilization": compute_s / emulated_s if emulated_s else 1.0,
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
            }
            for name, link in recorder.links.items()
        },
        "syncs": recorder.rounds,
        "dropped_syncs": recorder.status["dropped"],
        "rejected_payloads": recorder.status["rejected"],
        "unsynced_steps": recorder.unsynced_steps,
        "corpus_sha256": job.corpus.sha256,
        "shards": experiment.data.shards,
        "shard_sizes": [shard.tokens for shard in job.shards],
        "weights": getattr(experiment.method, "weights", "uniform"),
        "warm_start": experiment.warm_start,
        "initial_sha256": state_sha256(job.initial),
        "device": job.device,
        "wall_s": wall_s,
        "parameters_sha256": parameters_sha256,
        "versions": dict(versions),
    }
