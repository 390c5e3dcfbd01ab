"""Workers that come and go: DiLoCo's schedules of equal total compute, and an island that leaves.

    python examples/elastic.py

`replicas` says from which step on how many workers take part (DiLoCo, Douillard et al. 2023,
section 3.3). The last line is an experiment whose second island is away for 40 steps.
"""

import tempfile
from pathlib import Path

import islands
from islands import Experiment

CLUSTER = {
    "name": "eight",
    "islands": [
        {"name": "home", "workers": 4, "step_time": "100 ms"},
        {"name": "away", "workers": 4, "step_time": "100 ms"},
    ],
    "links": [
        {"name": "line", "between": ["home", "away"], "bandwidth": "1 Gbit/s", "delay": "50 ms"}
    ],
}
RUNS = {
    "constant": {"replicas": [[0, 6]]},
    "doubling": {"replicas": [[0, 4], [40, 8]]},
    "halving": {"replicas": [[0, 8], [40, 4]]},
    "ramp up": {"replicas": [[0, 4], [20, 5], [40, 7], [60, 8]]},
    "ramp down": {"replicas": [[0, 8], [20, 7], [40, 5], [60, 4]]},
    "island away": {
        "faults": [
            {"kind": "leave", "island": "away", "step": 20},
            {"kind": "join", "island": "away", "step": 60},
        ]
    },
}


def main() -> None:
    """Run each schedule on the same data and seed, and print one line each."""
    print(
        f"{'workers':<13}{'worker steps':>13}{'loss':>6}{'combined':>10}{'absent':>8}{'away s':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in RUNS.items():
            experiment = Experiment(
                cluster=CLUSTER, method={"name": "diloco", "sync_every": 10}, steps=80, **parts
            )
            result = islands.run(experiment, in_process=True, out=Path(folder) / name)
            summary, fates = result.summary, result.summary["contributions"]
            print(
                f"{name:<13}{len(result.table('steps')):>13}{summary['final_val_loss']:>6.1f}"
                f"{fates['ok']:>10}{fates['absent']:>8}{summary['away_s']:>8.1f}"
            )


if __name__ == "__main__":
    main()
