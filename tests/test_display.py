"""What the terminal shows: never wider than 80 columns, never silent about trouble."""

from __future__ import annotations

import io
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from islands.results.display import (
    LiveDisplay,
    Progress,
    exact_bytes,
    final_table,
    live_block,
    next_commands,
    print_final,
    remaining_s,
)

LINK = {
    "bytes": 645_120,
    "busy_s": 0.00516,
    "utilization": 0.00516 / 106.55,
    "peak_utilization": 0.002,
    "p95_utilization": 0.001,
    "background_bytes": 0,
}
SUMMARY: dict[str, Any] = {
    "method": "diloco",
    "islands": 2,
    "workers": 4,
    "steps": 1000,
    "seed": 0,
    "parameters": 5376,
    "tokens": 256_000,
    "final_val_loss": 2.34561,
    "final_perplexity": math.exp(2.34561),
    "best_val_loss": 2.3,
    "emulated_s": 106.55,
    "compute_s": 100.0,
    "wait_s": 6.55,
    "compute_utilization": 100 / 106.55,
    "time": {
        "compute_s": 100.0,
        "background_s": 1.0,
        "queue_s": 0.0,
        "transmission_s": 0.02,
        "propagation_s": 3.53,
        "others_s": 2.0,
        "away_s": 0.0,
    },
    "egress_cost": {},
    "contributions": {"ok": 80, "late": 0, "dropped": 0, "rejected": 0, "absent": 0},
    "wasted_bytes": 0,
    "lost_s": {},
    "dropped_results": 0,
    "payload_bytes_per_sync": 10_752.0,
    "payload_bytes_per_step": 215.04,
    "wire_bytes_per_step": 322.56,
    "wire_bytes_total": 1_290_240,
    "wan_bytes": 645_120,
    "lan_bytes": 645_120,
    "links": {"atlantic:dublin>oregon": LINK, "lan:dublin": LINK | {"utilization": 0.0}},
    "syncs": 20,
    "dropped_syncs": 0,
    "rejected_payloads": 0,
    "unsynced_steps": 0,
    "wall_s": 3.21,
}
FOLDER = Path("runs/diloco-1")


def progress(step: int, phase: str = "training", **other: Any) -> Progress:
    values: dict[str, Any] = {
        "rounds": step // 50,
        "train_loss": 3.0,
        "val_loss": None,
        "emulated_s": step * 0.1,
        "wire_bytes": step * 1290,
        "wan_bytes": step * 645,
        "wall_s": 2 + step * 0.003,
    }
    return Progress(step=step, steps=1000, workers=4, phase=phase, **(values | other))


def console(terminal: bool = False, width: int = 80) -> Console:
    # An explicit environment: NO_COLOR, COLUMNS or TERM of the host must not decide a test.
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        height=25,
        _environ={"TERM": "xterm"},
    )


def written(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def final(width: int = 80, folder: Path = FOLDER, **other: Any) -> str:
    screen = console(width=width)
    print_final(SUMMARY | other, folder, screen)
    return written(screen)


def row(text: str, label: str) -> str:
    (line,) = (line for line in text.splitlines() if label in line[:26])
    return " ".join(line.split())


# --- while it runs


def test_a_log_gets_a_line_at_each_tenth_and_each_phase() -> None:
    """Without a terminal 1,001 updates become 12 plain lines without control characters."""
    screen = console()
    with LiveDisplay(console=screen) as display:
        display.update(progress(0, "starting actors"))
        for step in range(1, 1001):
            display.update(progress(step))
    lines = written(screen).splitlines()
    assert len(lines) == 12
    assert lines[0].startswith("starting actors")
    assert [line.split(",", 1)[0] for line in lines[1:3]] == [
        "training: step 1/1",
        "training: step 100/1",
    ]
    assert lines[-1].startswith("training: step 1,000/1,000, 20 rounds, train 3.0000, emulated ")
    assert "\x1b" not in written(screen)


def test_a_slow_run_still_gives_a_sign_every_ten_seconds() -> None:
    """Between tenths a line follows once ten wall seconds have passed since the last."""
    screen = console()
    with LiveDisplay(console=screen) as display:
        for step in range(1, 32):
            display.update(progress(step, wall_s=float(step)))
    assert [int(line.split("step ")[1].split("/")[0]) for line in written(screen).splitlines()] == [
        1,
        11,
        21,
        31,
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_prints_nothing(terminal: bool) -> None:
    """With quiet neither a terminal nor a log gets a byte."""
    screen = console(terminal)
    with LiveDisplay(quiet=True, console=screen) as display:
        display.update(progress(0))
        display.update(progress(1000))
    assert written(screen) == ""


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout carries the result and nothing else."""
    with LiveDisplay() as display:
        display.update(progress(100))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "100/1,000" in shown.err


def test_a_terminal_shows_one_block_within_80_columns() -> None:
    """The bar, the losses, time and bytes are drawn, also on a wide screen within 80 columns."""
    screen = console(terminal=True, width=200)
    with pytest.raises(KeyboardInterrupt), LiveDisplay(console=screen) as display:  # noqa: PT012
        display.update(progress(0, "starting actors"))
        display.update(progress(500, val_loss=math.nan))
        raise KeyboardInterrupt
    shown = written(screen)  # what an interrupted run leaves on the screen
    for expected in ("500/1,000 steps", "1.5 s left", "nan (diverged)", "50 s", "645 kB", "322 kB"):
        assert expected in shown
    plain = console(width=200)
    plain.print(live_block(progress(500, val_loss=math.nan), left_s=1e6))
    assert max(map(len, written(plain).splitlines())) <= 80


def test_the_time_left_leaves_out_the_start() -> None:
    """Start-up is no pace: 100 steps in 1 s after 60 s of start leave 9 s for 900 steps."""
    begin = progress(0, wall_s=60.0)
    assert remaining_s(begin, progress(100, wall_s=61.0)) == pytest.approx(9.0)
    assert remaining_s(begin, begin) is None


# --- in the end


def test_the_final_table_shows_what_the_run_cost() -> None:
    """Each number stands in its row; wire bytes stand beside dense all-reduce in bf16,
    2·(3/4)·2·5,376 = 16,128 bytes per step, 50 times as much."""
    text = final()
    assert text.startswith("diloco with 4 workers on 2 islands, 1,000 steps, seed 0\n")
    assert "5,376" in row(text, "parameters")
    assert "2.3456 perplexity 10.44" in row(text, "validation")
    assert "1 min 47 s" in row(text, "emulated")
    assert "93.9 %" in row(text, "computing")
    assert "6.55 s" in row(text, "waiting")
    assert "10,752 B" in row(text, "payload per sync")
    assert "20 rounds" in row(text, "payload per sync")
    assert "322.56 B 50.0 x less than dense in bf16: 16,128 B" in row(text, "wire per step")
    assert row(text, "atlantic") == "atlantic:dublin>oregon 645 kB 5.16 ms <0.1 % 0.1 % 0.2 %"
    assert row(text, "lan:dublin").startswith("lan:dublin 645 kB 5.16 ms 0.0 %")
    assert "results runs/diloco-1\n" in text


@pytest.mark.parametrize(
    ("wire", "words"),
    [(16_128.0, "the same as dense"), (32_256.0, "2.0 x more than dense"), (0.0, "nothing; dense")],
)
def test_the_comparison_with_dense_goes_both_ways(wire: float, words: str) -> None:
    """As much as dense, more than dense, and nothing at all are each said in words."""
    assert words in row(final(wire_bytes_per_step=wire), "wire per step")


def test_one_worker_has_nobody_to_synchronise_with() -> None:
    """One worker's table has no division by zero and no network rows, and says why."""
    none = {"wire_bytes_per_step": 0.0, "wan_bytes": 0, "lan_bytes": 0, "links": {}}
    text = final(workers=1, islands=1, **none)
    assert "1 worker on 1 island," in text
    assert "nobody to synchronise with" in row(text, "wire per step")
    assert "WAN" not in text


def test_fragments_codes_and_notes_are_shown() -> None:
    """The most that goes out after one step, where that is not everything; what a ring would have
    cost, where codes are gathered; and what the method has to say."""
    assert row(final(), "payload per step") == "payload per step 215.04 B"
    ring = {"fp32": 645.12, "requantised": 80.64}
    text = final(
        peak_payload_bytes_per_step=1344,
        ring_wire_bytes_per_step=ring,
        notes=["tensors are balanced by size"],
    )
    assert row(text, "payload per step").endswith("215.04 B at most 1,344 B after one step")
    ring_row = row(text, "a ring instead")
    assert ring_row.endswith("645.12 B partial sums in fp32; 80.64 B requantised")
    assert "note: tensors are balanced by size" in text
    assert "a ring" not in final()
    assert "note" not in final()


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_diverged_run_says_so(loss: float | None) -> None:
    """A loss that is no number, also as JSON stores it, is shown as diverged."""
    text = final(final_val_loss=loss, final_perplexity=loss, best_val_loss=loss)
    assert "nan (diverged)" in row(text, "validation")
    assert "perplexity" not in text


def test_trouble_is_shown_only_when_there_was_some() -> None:
    """Dropped contributions, rejected payloads and unsynchronised steps get a row each."""
    assert not any(word in final() for word in ("dropped", "rejected", "unsynced"))
    text = final(dropped_syncs=3, rejected_payloads=2, unsynced_steps=1)
    assert row(text, "dropped") == "dropped 3 contributions"
    assert row(text, "rejected") == "rejected 2 payloads"
    assert row(text, "unsynced") == "unsynced 1 local steps"


@given(
    numbers=st.lists(st.floats(0, 1e18), min_size=9, max_size=9),
    names=st.lists(st.text("ab:>[/]-", min_size=1, max_size=120), max_size=20, unique=True),
    method=st.text("abc.:[]", min_size=1, max_size=120),
    width=st.sampled_from([80, 200]),
)
@settings(max_examples=60, deadline=None)
def test_no_table_is_wider_than_80_columns(
    numbers: list[float], names: list[str], method: str, width: int
) -> None:
    """Any numbers and any names, markup-like ones too, fit into 80 columns."""
    keys = [
        key
        for key, value in SUMMARY.items()
        if (key.endswith("_s") or "bytes" in key) and not isinstance(value, dict)
    ]
    screen = console(width=width)
    seconds = {"peak_utilization": 1.0, "p95_utilization": 0.5, "background_bytes": numbers[0]}
    link = {"bytes": numbers[0], "busy_s": 1e9, "utilization": 1.0, **seconds}
    links = dict.fromkeys(names, link)
    changed = dict(zip(keys, numbers, strict=False)) | {"links": links, "method": method}
    screen.print(final_table(SUMMARY | changed))
    assert max(map(len, written(screen).splitlines())) <= 80


def test_of_many_links_the_busiest_are_listed() -> None:
    """A cluster with many links keeps its table short and says how many are left out."""
    links = {f"link{n}:a>b": LINK | {"utilization": n / 100} for n in range(30)}
    text = final(links=links)
    assert text.index("link29:") < text.index("link18:")
    assert "link17:" not in text
    assert "and 18 less busy ones" in text


def test_a_long_path_stays_whole() -> None:
    """A path longer than the screen is neither cut nor broken: it can be copied."""
    folder = Path("/somewhere") / ("long" * 40) / "with space"
    text = final(folder=folder)
    assert f"results {folder}\n" in text
    assert shlex.quote(str(folder / "experiment.yaml")) in text


def test_commands_to_try_next_are_ones_a_shell_reads() -> None:
    """Each is one `islands run` of the run's own experiment file that changes one thing."""
    file = str(FOLDER / "experiment.yaml")
    again = ["islands", "run", "--config", file]
    slow = ["--set", "cluster.links.atlantic.bandwidth=10 Mbit/s"]

    def tried(**other: Any) -> list[list[str]]:
        return [
            shlex.split(command.replace("\\\n", " "))
            for _, command in next_commands(SUMMARY | other, FOLDER)
        ]

    assert tried() == [[*again, "--method", "dense"], [*again, *slow]]
    assert tried(method="dense")[0] == [*again, "--method", "diloco"]
    assert tried(links={"lan:home": LINK})[1] == [*again, "--cluster", "two_islands"]
    assert all(len(line) <= 80 for line in final().splitlines())


def test_bytes_that_a_formula_gives_are_shown_exactly() -> None:
    """Up to 100 kB no digit that a formula can be checked against is lost."""
    shown = [exact_bytes(count) for count in (0, 322.56, 1612.8, 16128, 99_999)]
    assert shown == ["0 B", "322.56 B", "1,612.80 B", "16,128 B", "99,999 B"]
    assert exact_bytes(31_653_888) == "31.7 MB"


@pytest.mark.parametrize(
    ("link", "path"),
    [
        ("backbone", "backbone"),
        ("uplink:a", "islands.a.uplink"),
        ("default:a>b", "default_link"),
        ("atlantic:a>b", "links.atlantic"),
    ],
)
def test_the_next_command_names_what_the_cluster_file_has(link: str, path: str) -> None:
    """Also where the busiest line is no link of a pair."""
    text = final(links={link: LINK})
    assert f"cluster.{path}.bandwidth=10 Mbit/s" in text
