"""What streaming, overlap and four bits each buy: DiLoCo on gpt-1m, one part added at a time.

    python examples/streaming_study.py                        # 400 steps: some minutes
    python examples/streaming_study.py --figure streaming.png

Each method trains once. What it would have taken over slower and faster links is then read off its
trace, without training: rounds wait for everyone, so a loss does not depend on the network.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import islands
from islands import Experiment
from islands.figures import check_figure, draw_retiming
from islands.retime import retime

#: The same for all: gentler than DiLoCo's 0.7 and 0.9, which suit hundreds of rounds.
DILOCO: dict[str, Any] = {"sync_every": 20, "outer": {"lr": 0.7, "momentum": 0.6}}
STREAMING = DILOCO | {"name": "streaming_diloco", "fragments": 5}  # four blocks, embeddings
OVERLAP = STREAMING | {"overlap": 5, "alpha": 0.5}
METHODS = {
    "DiLoCo": DILOCO | {"name": "diloco"},
    "streaming": STREAMING,
    "+ overlap": OVERLAP,
    "+ FP4": OVERLAP | {"payload_dtype": "e3m0"},
}
BANDWIDTHS = ("1Mbit/s", "10Mbit/s", "100Mbit/s", "1Gbit/s")
#: Closer together, for the picture.
CURVE = "1Mbit/s,2Mbit/s,…,1024Mbit/s"


def main(steps: int = 400, figure: Path | None = None, in_process: bool = False) -> None:
    """Train, time again, and print a line per method in two tables."""
    check_figure(figure)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / name for name in METHODS}
        print("                  payload bytes per worker      wire bytes")
        print(f"{'method':<12}{'loss':>6}{'mean of a step':>16}{'at most':>12}{'per step':>12}")
        for name, method in METHODS.items():
            experiment = Experiment(
                cluster="two_islands",
                model="gpt-1m",
                data={"name": "python-docs", "batch": 4},
                optimizer={"lr": 0.003},
                method=method,
                steps=steps,
                eval={"every": 0},
            )
            run = islands.run(experiment, out=runs[name], in_process=in_process, quiet=True)
            summary = run.summary
            print(
                f"{name:<12}{summary['final_val_loss']:>6.2f}"
                f"{summary['payload_bytes_per_step']:>16,.0f}"
                f"{summary['peak_payload_bytes_per_step']:>12,}"
                f"{summary['wire_bytes_per_step']:>12,.0f}"
            )
        timed = retime(list(runs.values()), bandwidth=",".join(BANDWIDTHS)).rows
        print(f"\n{'':<12}" + "".join(f"{bandwidth:>17}" for bandwidth in BANDWIDTHS))
        for name, path in runs.items():
            own = [row for row in timed if row["folder"] == str(path)]
            cells = (f"{r['emulated_s']:,.0f} s {r['compute_utilization']:6.1%}" for r in own)
            print(f"{name:<12}" + "".join(f"{cell:>17}" for cell in cells))
        if figure is not None:
            draw_retiming(retime(list(runs.values()), bandwidth=CURVE), figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What streaming, overlap and four bits buy.")
    parser.add_argument("--steps", type=int, default=400, help="local steps of each worker")
    parser.add_argument("--figure", type=Path, help="also draw utilisation against bandwidth")
    parser.add_argument("--in-process", action="store_true", help="without Ray; same results")
    main(**vars(parser.parse_args()))
