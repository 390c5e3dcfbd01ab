"""Adding workers: closed forms of the bytes, the break-even by trying, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from islands import scale as scaling
from islands.cli import app
from islands.compression import Payload, Update
from islands.config import Cluster, Experiment
from islands.errors import InputError
from islands.methods import (
    Arrival,
    Context,
    Dense,
    DiLoCo,
    Shared,
    WorkerState,
    dense_update,
)
from islands.results.study_tables import print_scaling
from islands.scale import Probe, Scaling, fit, scale, scale_experiment, spread
from islands.study import contenders

DENSE_BYTES = 2 * 5376


class Gathered(Dense):
    """Everyone's whole gradient goes to everyone."""

    collective: ClassVar[Any] = "all_gather"


class Starred(Dense):
    """Everyone's whole gradient goes to the coordinator."""

    collective: ClassVar[Any] = "star"


class Sparse(DiLoCo):
    """Gathers the first ``values`` values: only their bytes are of interest."""

    collective: ClassVar[Any] = "all_gather"
    values: int = 100

    def send(self, state: WorkerState, fragment: int, ctx: Context) -> Payload:
        whole = super().send(state, fragment, ctx)
        return Payload(whole.values[: 2 * self.values], whole.fmt)

    def combine(self, shared: Shared, fragment: int, arrivals: Sequence[Arrival]) -> Update:
        return dense_update(shared.params)


def scaled(*methods: str, workers: list[int], bytes_only: bool = True, **more: Any) -> Scaling:
    overrides = ["steps=10", *more.pop("overrides", ())]
    experiment = scale_experiment(None, overrides)
    return scale(
        experiment, contenders(methods), workers, bytes_only=bytes_only, in_process=True, **more
    )


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["scale", *arguments])


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("bytes_only", [True, False])
def test_bytes_follow_the_closed_forms(bytes_only: bool) -> None:
    """All-reduce 2(p − 1)/p, all-gather p − 1, star 2 payloads per worker: exactly; WAN plus LAN is
    everything that was sent."""
    names = ("dense", "test_scale:Gathered", "test_scale:Starred")
    found = scaled(*names, workers=[2, 3, 8], bytes_only=bytes_only)
    shares = {
        "dense": lambda p: 2 * (p - 1) / p,
        "test_scale:Gathered": lambda p: p - 1,
        "test_scale:Starred": lambda p: 2,
    }
    assert len(found.rows) == 9
    for row in found.rows:
        p = row["workers"]
        assert row["payload_bytes"] == DENSE_BYTES
        expected = shares[row["method"]](p) * DENSE_BYTES
        assert row["wire_bytes_per_worker"] == pytest.approx(expected, rel=1e-12)
        assert row["wire_bytes_total"] == pytest.approx(p * expected, rel=1e-12)
        # Two islands, one link: nothing crosses two.
        total = row["wan_bytes"] + row["lan_bytes"]
        assert total == pytest.approx(row["wire_bytes_total"], rel=1e-12)
        assert row["trained"] is not bytes_only
    collectives = {row["method"]: row["collective"] for row in found.rows}
    assert collectives == dict(zip(names, ("ring", "ring", "star"), strict=True))


def test_of_a_ring_two_members_cross_the_ocean() -> None:
    """Each direction of the link carries what one member sends, whatever the number of members."""
    for row in scaled("test_scale:Gathered", workers=[4, 20]).rows:
        assert row["wan_bytes"] == 2 * (row["workers"] - 1) * DENSE_BYTES


def test_bytes_only_gives_what_training_gives() -> None:
    """The same payload, wire, WAN and LAN bytes, and the same time to within a round's skew."""
    names = ("dense", "diloco:sync_every=5", "test_scale:Sparse:sync_every=10")
    trained = scaled(*names, workers=[2, 5, 8], bytes_only=False, overrides=["steps=80"])
    carried = scaled(*names, workers=[2, 5, 8])
    for one, other in zip(trained.rows, carried.rows, strict=True):
        for key, value in one.items():
            if isinstance(value, float) and key != "emulated_s_per_step":
                assert value == pytest.approx(other[key], rel=1e-12), key
        assert one["emulated_s_per_step"] == pytest.approx(other["emulated_s_per_step"], rel=0.02)


def test_fragments_count_by_their_own_periods() -> None:
    """Three fragments with periods 4, 6 and 5: bytes per step are the sum of size / period."""
    method = contenders(["helpers:Fragments"])
    probe = Probe.of(Experiment(method=method[0].method))
    sizes = [2 * (part.stop - part.start) for part in probe.job.layout.fragments]
    assert sum(sizes) == DENSE_BYTES
    expected = sum(size / period for size, period in zip(sizes, (4, 6, 5), strict=True))
    (row,) = scaled("helpers:Fragments", workers=[4]).rows
    assert row["payload_bytes"] == pytest.approx(expected, rel=1e-12)
    assert row["wire_bytes_per_worker"] == pytest.approx(1.5 * expected, rel=1e-12)


@pytest.mark.parametrize(("method", "payload", "limit"), [("topk", 1_344, 16), ("demo", 1_008, 22)])
def test_sparse_methods_against_a_dense_ring(method: str, payload: int, limit: int) -> None:
    """Per worker (p − 1) payloads: 4,032 and 3,024 bytes of four; at p = 2D/S no less than dense.

    The decoder has 84 chunks of 64 values: 336 values of 2 + 2 bytes, or of 2 + 1.
    """
    found = scaled(method, workers=[4, 8, limit - 1, limit])
    assert [row["payload_bytes"] for row in found.rows] == [payload] * 4
    assert [row["wire_bytes_per_worker"] for row in found.rows] == pytest.approx(
        [payload * (p - 1) for p in (4, 8, limit - 1, limit)], rel=1e-12
    )
    assert [row["pays"] for row in found.rows] == [True, True, True, False]
    assert found.growth[0]["stops_paying_at"] == limit


@pytest.mark.parametrize("values", [40, 448, 500, 5376])
def test_where_gathering_stops_paying(values: int) -> None:
    """The smallest p at which (p − 1) payloads are no less than a dense ring's 2(p − 1)/p, found
    by trying; rows from there on are marked."""
    by_trying = next(
        p for p in range(2, 10**4) if (p - 1) * 2 * values * p >= 2 * (p - 1) * DENSE_BYTES
    )
    name = f"test_scale:Sparse:values={values},sync_every=2"
    counts = sorted({2, by_trying - 1, by_trying, by_trying + 1} - {0, 1})
    found = scaled(name, workers=counts)
    assert found.growth[0]["stops_paying_at"] == by_trying
    assert [row["pays"] for row in found.rows] == [count < by_trying for count in counts]


def test_a_density_warm_up_is_over_before_anything_is_measured() -> None:
    """Top-k's first steps send more; what is scaled is what it sends from then on."""
    found = scaled("topk:density_warmup=9", workers=[2, 16])
    assert [row["payload_bytes"] for row in found.rows] == [1344, 1344]
    assert [row["pays"] for row in found.rows] == [True, False]


def test_training_covers_whole_periods() -> None:
    """7 steps asked for at a period of 5: trained for 10, so bytes per step are those of longer
    runs."""
    steps = {"overrides": ["steps=7"], "bytes_only": False}
    found = scaled("diloco:sync_every=5", workers=[4], **steps)
    assert found.rows[0]["payload_bytes"] == 10_752 / 5


def test_growth_is_fitted() -> None:
    """All-reduce: what it saturates at, all-gather: what a worker adds; in payloads 2, 1, 2."""
    found = scaled("dense", "test_scale:Gathered", "test_scale:Starred", workers=[2, 4, 16])
    assert [fitted["payloads"] for fitted in found.growth] == pytest.approx([2, 1, 2])
    assert found.growth[0]["bytes"] == pytest.approx(2 * DENSE_BYTES)
    assert [fitted["stops_paying_at"] for fitted in found.growth] == [None, 2, None]
    # Least squares through the origin: (1·3 + 3·5) / (1 + 9).
    rows = [
        {"method": "m", "operation": "all_gather", "workers": p, "payload_bytes": 1.8} | {key: y}
        for p, y in ((2, 3), (4, 5))
        for key in ("wire_bytes_per_worker",)
    ]
    fitted = fit(rows, None)
    assert (fitted["bytes"], fitted["payloads"]) == pytest.approx((1.8, 1.0))


def test_thousands_of_workers_take_seconds() -> None:
    """No training and no event per transfer: 3,000 workers are p − 1 phases of arrays."""
    (row,) = scaled("test_scale:Sparse", workers=[3000]).rows
    assert row["wire_bytes_per_worker"] == pytest.approx(2999 * 200 / 50, rel=1e-12)


# ---------------------------------------------------------------------------------------- clusters


def test_workers_are_spread_evenly() -> None:
    """The first islands get what is left over; links, speeds and LANs stay."""
    cluster = Cluster.load("four_continents")
    bigger = spread(cluster, 10)
    assert [island.workers for island in bigger.islands] == [3, 3, 2, 2]
    assert bigger.links == cluster.links
    assert bigger.topology().workers == 10
    found = scaled("dense", workers=[4, 6], overrides=["cluster=four_continents"])
    assert list(found.sites[6].values()) == [2, 2, 1, 1]


def test_the_default_numbers_give_every_island_a_worker() -> None:
    """Eight islands: 8, 16 and 32 of the default numbers."""
    experiment = scale_experiment(None, (), {"cluster": "eight_small_sites"})
    found = scale(experiment, contenders(["diloco"]), bytes_only=True)
    assert [row["workers"] for row in found.rows] == [8, 16, 32]


def test_what_does_not_fit_is_carried_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a row has the real payload of one worker, and says that nothing was trained."""
    monkeypatch.setattr(scaling, "_fits", lambda probe, workers, here: workers < 8)
    found = scaled("dense", workers=[4, 8], bytes_only=False)
    assert [row["trained"] for row in found.rows] == [True, False]
    assert found.rows[1]["wire_bytes_per_worker"] == pytest.approx(2 * 7 / 8 * DENSE_BYTES)
    assert "bytes only" in text_of(found)


# ----------------------------------------------------------------------------------------- outside


def text_of(found: Scaling) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_scaling(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_fits_and_marks_the_break_even() -> None:
    """80 columns, growth in a sentence, rows that do not pay marked."""
    printed = text_of(scaled("dense", "test_scale:Sparse:values=500", workers=[2, 21, 22, 1000]))
    assert max(map(len, printed.splitlines())) <= 80
    assert "saturates at 21,504 B (2 payloads)" in printed
    assert "from 22 workers on" in printed
    assert printed.count("≥ dense") == 2


def test_out_keeps_rows_and_runs(tmp_path: Path) -> None:
    """`scale.parquet` has the rows; a second time needs `overwrite`."""
    found = scaled("dense", workers=[2, 4], bytes_only=False, out=tmp_path / "s")
    assert pq.read_table(tmp_path / "s" / "scale.parquet").to_pylist() == found.rows
    assert (tmp_path / "s" / "dense" / "workers-4" / "summary.json").is_file()
    with pytest.raises(InputError, match="already holds"):
        scaled("dense", workers=[2], out=tmp_path / "s")
    again = scaled("dense", workers=[2], out=tmp_path / "s", overwrite=True)
    assert pq.read_table(tmp_path / "s" / "scale.parquet").to_pylist() == again.rows


def test_json_has_the_rows(tmp_path: Path) -> None:
    """`--json` is alone on stdout; nothing is left in the current folder."""
    arguments = ["--bytes-only", "--method", "dense", "--workers", "2,4", "--json"]
    found = json.loads(invoke(*arguments).stdout)
    (first, second) = found["rows"]
    wanted = {"method", "collective", "workers", "payload_bytes", "wire_bytes_per_worker"}
    wanted |= {"wire_bytes_total", "wan_bytes", "lan_bytes", "emulated_s_per_step"}
    assert wanted <= first.keys()
    assert second["wire_bytes_per_worker"] == 16_128


def test_a_figure_is_drawn(tmp_path: Path) -> None:
    """Bytes and seconds against the number of workers."""
    pytest.importorskip("matplotlib")
    figure = tmp_path / "f.png"
    arguments = ["--bytes-only", "--method", "dense", "--method", "test_scale:Sparse"]
    result = invoke(*arguments, "--workers", "2,200", "--figure", str(figure))
    assert result.exit_code == 0, result.output
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--workers", ""], ["workers", "at least one"]),
        (["--workers", "0"], ["workers", "0"]),
        (["--workers", "2,-4"], ["workers", "-4"]),
        (["--workers", "2,2.5"], ["workers", "2.5"]),
        (["--workers", "2,many"], ["workers", "'many'"]),
        (["--workers", "4,4"], ["workers", "4", "twice"]),
        (["--workers", "1"], ["workers", "1", "2 islands"]),
        (["--method", "densee"], ["methods.0", "'densee'", "'dense'"]),
        (["--method", "dense:k=3"], ["methods.0", "'k'"]),
        (["--set", "method.sync_every=1"], ["'method.sync_every=1'", "--method NAME:key=value"]),
        (["--cluster", "marz"], ["cluster", "'marz'"]),
        (["--steps", "0"], ["steps", "0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_wrong_input_is_one_message(arguments: list[str], parts: list[str]) -> None:
    """Exit code 2 and one line that names the field and the value."""
    defaults = [] if "--method" in arguments else ["--method", "dense"]
    result = invoke("--bytes-only", *defaults, *arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line


@pytest.mark.ray
def test_on_actors_the_same_rows() -> None:
    """New actors for each number of workers, the same numbers."""
    experiment = scale_experiment(None, (), {"steps": 5})
    there = scale(experiment, contenders(["dense"]), [2, 3])
    here = scale(experiment, contenders(["dense"]), [2, 3], in_process=True)
    assert there.rows == here.rows
