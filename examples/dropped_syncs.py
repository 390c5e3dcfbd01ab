"""DiLoCo when contributions get lost: the average divides by what came, the others train on.

    python examples/dropped_syncs.py

A worker whose part in a round is dropped keeps its own parameters for the next steps and measures
its next pseudo-gradient from the current shared value.
"""

import tempfile
from pathlib import Path

import islands
from islands import Experiment


def main() -> None:
    """One run for each probability on the same data and seed, and one line each."""
    print(f"{'lost':<8}{'loss':>6}{'combined':>10}{'dropped':>9}{'unsynced':>10}{'wasted MB':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for probability in (0.0, 0.1, 0.3, 0.5, 1.0):
            experiment = Experiment(
                method={"name": "diloco", "sync_every": 5},
                faults=[{"kind": "drop", "probability": probability}],
                steps=100,
            )
            out = Path(folder) / f"{probability}"
            summary = islands.run(experiment, in_process=True, out=out).summary
            fates = summary["contributions"]
            print(
                f"{probability:<8.0%}{summary['final_val_loss']:>6.1f}{fates['ok']:>10}"
                f"{fates['dropped']:>9}{summary['unsynced_steps']:>10}"
                f"{summary['wasted_bytes'] / 1e6:>11.2f}"
            )


if __name__ == "__main__":
    main()
