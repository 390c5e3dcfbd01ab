"""Dense data parallelism and DiLoCo across a slow Atlantic: what each sends, waits and learns.

    python examples/quickstart.py

Runs inside this process (`in_process=True`), so it needs no Ray and takes seconds; without that
argument the same experiment runs on Ray actors and gives the same numbers.
"""

import tempfile
from pathlib import Path

import islands
from islands import Experiment


def main() -> None:
    """Run both methods on the same cluster, data and seed, and print one line each."""
    print(f"{'method':<10}{'loss':>6}{'payload B/step':>16}{'wire B/step':>13}{'emulated s':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for method in ({"name": "dense"}, {"name": "diloco", "sync_every": 10}):
            experiment = Experiment(cluster="transatlantic", method=method, steps=200)
            result = islands.run(experiment, in_process=True, out=Path(folder) / method["name"])
            summary = result.summary
            print(
                f"{summary['method']:<10}{summary['final_val_loss']:>6.1f}"
                f"{summary['payload_bytes_per_step']:>16,.1f}"
                f"{summary['wire_bytes_per_step']:>13,.1f}{summary['emulated_s']:>12.2f}"
            )
        waits = result.table("syncs").to_pydict()
    longest = max(waits["wait_s"])
    print(f"DiLoCo: {len(set(waits['version']))} rounds, the longest wait {1000 * longest:.0f} ms")


if __name__ == "__main__":
    main()
