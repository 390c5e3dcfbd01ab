"""Lines: their traces, windows and background, what is wrong with them, what is made of them."""

from __future__ import annotations

import pickle
from math import cos, inf, pi, sin
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.config import Cluster
from islands.errors import InputError
from islands.lines import Background, BandwidthTrace, DelayTrace, Line, Window
from islands.network import Link
from islands.network.background import Load
from islands.network.steps import Steps
from islands.network.steps import Window as StepsWindow
from islands.settings import parse_yaml

CONFIGS = Path(__file__).parent.parent / "cluster_configs"


def line(**fields: object) -> Line:
    """A line of 1 Gbit/s and 10 ms unless said otherwise."""
    return Line.parse({"bandwidth": "1 Gbit/s", "delay": "10 ms", **fields}, "line")


def problem(**fields: object) -> str:
    """The one line with which these fields are refused."""
    with pytest.raises(InputError) as caught:
        line(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def link(**fields: object) -> Link:
    """The emulated network's link of such a line."""
    return line(**fields).directed("l:a>b", "a", "b")


# ---------------------------------------------------------------------------------- what it becomes


def test_a_plain_line_is_constant() -> None:
    """Numbers only; nothing that would have to be looked up over time."""
    assert link() == Link("l:a>b", "a", "b", 125e6, 0.01)


def test_every_field_reaches_the_network() -> None:
    """Each in base units, under its own name."""
    found = link(
        queue="fair",
        max_rate_per_flow="10 Mbit/s",
        background={"load": 0.3, "size": "13.5 GB"},
        jitter="1 ms",
        egress_price="0.02 USD/GB",
    )
    assert found.fair
    assert found.flow_bytes_per_s == 1.25e6
    assert found.background == Load(0.3, 13.5e9)
    assert found.jitter_s == 0.001
    assert found.price is not None
    assert (found.price.per_byte, found.price.currency) == (2e-11, "USD")


def test_background_kinds() -> None:
    """Exponential sizes, bursts, and a load of nothing, which is none."""
    bursts = {"on": "2 s", "off": "3 min"}
    load = {"load": 0.5, "size": "1 MB", "sizes": "exponential", "bursts": bursts}
    assert link(background=load).background == Load(0.5, 1e6, True, 2.0, 180.0)
    assert link(background={"load": 0, "size": "1 MB"}).background is None


def test_a_repeating_trace_begins_again_after_its_last_value() -> None:
    """The last value holds as long as the one before it did."""
    points = [["0 s", "1 Mbit/s"], ["10 s", "3 Mbit/s"], ["15 s", "2 Mbit/s"]]
    found = link(bandwidth={"points": points, "repeat": True})
    assert found.bandwidth == Steps((0.0, 10.0, 15.0), (125e3, 375e3, 250e3), 20.0)
    assert found.bytes_per_s == (10 * 125e3 + 5 * 375e3 + 5 * 250e3) / 20
    assert found.delay is None


def test_a_trace_that_does_not_repeat_ends() -> None:
    """There, and the line says so."""
    points = [["0 s", "10 ms"], ["1 min", "30 ms"]]
    changing = line(delay={"points": points})
    found = changing.directed("", "", "")
    assert found.delay == Steps((0.0, 60.0), (0.01, 0.03), None, ends_s=120.0)
    assert found.delay_s == 0.02
    assert changing.trace_ends() == [("delay", 120.0)]
    assert line(delay={"points": points, "repeat": True}).trace_ends() == []


def test_one_value_that_repeats_is_constant() -> None:
    """It never changes, and never ends."""
    changing = line(bandwidth={"points": [["0 s", "1 kB/s"]], "repeat": True})
    found = changing.directed("", "", "")
    assert found.bandwidth == Steps((0.0,), (1000.0,))
    assert (found.bytes_per_s, changing.trace_ends()) == (1000.0, [])


def test_windows_replace_what_they_name() -> None:
    """A cut is a bandwidth of nothing; a delay in a window leaves the bandwidth alone."""
    windows = [
        {"from": "1 h", "to": "2 h", "bandwidth": "cut"},
        {"from": "0 s", "to": "5 min", "every": "24 h", "bandwidth": "1 kB/s", "delay": "1 s"},
        {"from": "3 h", "delay": "2 s"},
    ]
    found = link(windows=[windows[0], windows[1]])
    dip = StepsWindow(0.0, 300.0, 86400.0, 1000.0)
    cut = StepsWindow(3600.0, 7200.0, None, 0.0)
    assert found.bandwidth == Steps((0.0,), (125e6,), windows=(cut, dip))
    assert found.delay == Steps((0.0,), (0.01,), windows=(StepsWindow(0.0, 300.0, 86400.0, 1.0),))
    assert (found.bytes_per_s, found.delay_s) == (125e6, 0.01)
    for_good = link(windows=[windows[2]])
    assert for_good.delay == Steps((0.0,), (0.01,), windows=(StepsWindow(10800.0, inf, None, 2.0),))
    assert for_good.bandwidth is None


def test_the_shipped_trace_is_its_formula() -> None:
    """Every row, as the comment in the cluster file says."""
    rows = (CONFIGS / "traces" / "cross_country.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "time [s],bandwidth [Mbit/s]"
    expected = [
        f"{k},{round(2500 + 1500 * cos(2 * pi * k / 120) + 800 * sin(2 * pi * k / 24))}"
        for k in range(120)
    ]
    assert rows[1:] == expected
    trace = Cluster.load("traced_cross_country").links[0].bandwidth
    assert isinstance(trace, BandwidthTrace)
    assert trace.period_s == 120.0
    assert (min(trace.values), max(trace.values)) == (273e6 / 8, 4727e6 / 8)


# -------------------------------------------------------------------------------------- round trips


times = st.integers(0, 10_000).map(lambda n: n / 10)
rates = st.integers(1, 10_000).map(lambda n: n * 1000.0 / 8)


@st.composite
def lines(draw: st.DrawFn) -> dict[str, object]:
    """Fields of any line that is right, as a file has them."""
    steps = sorted(draw(st.sets(st.integers(1, 99), min_size=1, max_size=3)))
    points = [["0 s", f"{draw(rates)} B/s"], *([f"{t} s", f"{draw(rates)} B/s"] for t in steps)]
    delays = [["0 s", "1 s"], *([f"{t} ms", f"{1 + t} s"] for t in steps)]
    window = {"from": f"{draw(times)} s", draw(st.sampled_from(["bandwidth", "delay"])): "x"}
    window = {
        k: ("cut" if k == "bandwidth" else "2 s") if v == "x" else v for k, v in window.items()
    }
    every = {"to": "1001 s", "every": "2000 s"} if draw(st.booleans()) else {}
    fields: dict[str, object] = {
        "bandwidth": {"points": points, "repeat": draw(st.booleans())},
        "delay": {"points": delays, "repeat": draw(st.booleans())},
        "queue": draw(st.sampled_from(["fifo", "fair"])),
        "max_rate_per_flow": draw(st.sampled_from(["unlimited", "2 Gbit/s"])),
        "jitter": f"{draw(times) / 1000} s",
        "windows": [{**window, **every}],
        "egress_price": draw(st.sampled_from([None, "0.02 USD/GB", "7 EUR/TiB"])),
        "background": draw(
            st.none()
            | st.fixed_dictionaries(
                {
                    "load": st.sampled_from([0, 0.3, 0.9]),
                    "size": st.sampled_from(["1 B", "13.5 GB"]),
                    "sizes": st.sampled_from(["fixed", "exponential"]),
                    "bursts": st.none() | st.just({"on": "1 s", "off": "2 s"}),
                }
            )
        ),
    }
    return {k: v for k, v in fields.items() if k in ("bandwidth", "delay") or draw(st.booleans())}


@given(lines(), lines())
@settings(max_examples=25, deadline=None)
def test_what_is_written_reads_back(there: dict[str, object], back: dict[str, object]) -> None:
    """A cluster with any lines: the same object, and the same network, from its own YAML."""
    island = {"workers": 1, "uplink": there, "downlink": back}
    reverse = {k: v for k, v in back.items() if k not in ("queue", "bandwidth")}
    own = {"name": "w", "between": ["a", "b"], **there, "reverse": reverse}
    for queue in ("fifo", "fair"):
        islands = [{"name": name, **island} for name in "ab"]
        for fields in (there, back, own):
            fields["queue"] = queue
        try:
            cluster = Cluster.parse({"name": "c", "islands": islands, "links": [own]})
        except InputError as error:
            if "in the long run" not in str(error):  # windows of one line, the load of another
                raise
            return
        again = Cluster.parse(parse_yaml(cluster.dump_yaml(), "cluster"))
        assert again == cluster
        assert again.topology() == cluster.topology()
        assert pickle.loads(pickle.dumps(cluster)).topology() == cluster.topology()


def test_python_sees_the_numbers_of_the_parts() -> None:
    """Seconds and bytes per second, and what was not given is its default."""
    found = line(
        background={"load": 0.5, "size": "1 MB"}, windows=[{"from": "1 s", "delay": "2 s"}]
    )
    assert found.background == Background(load=0.5, size="1 MB")
    assert found.windows == (Window(**{"from": "1 s", "delay": "2 s"}),)
    assert (found.max_rate_per_flow, found.jitter, found.egress_price) == (inf, 0.0, None)
    trace = DelayTrace(points=[["0 s", "1 ms"]], repeat=True)
    assert line(delay=trace).delay is trace


# ----------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bandwidth": "0 bit/s"}, "line.bandwidth: '0 bit/s' must be more than zero"),
        ({"bandwidth": 5}, "line.bandwidth: 5 needs a unit, for example 1 Gbit/s"),
        ({"bandwidth": None}, "line.bandwidth: None is not a bandwidth"),
        ({"delay": "-1 ms"}, "line.delay: '-1 ms' must not be negative"),
        ({"delay": 0}, "line.delay: 0 needs a unit"),
        ({"queue": "fare"}, "line.queue: 'fare' is not one of fifo, fair; did you mean 'fair'?"),
        ({"max_rate_per_flow": "0 B/s"}, "line.max_rate_per_flow: '0 B/s' must be more than zero"),
        ({"max_rate_per_flow": "1 MB"}, "line.max_rate_per_flow: '1 MB' has an unknown unit"),
        ({"jitter": "11 ms"}, "line.jitter: 11 ms is larger than the delay of 10 ms"),
        ({"jitter": "-1 ms"}, "line.jitter: '-1 ms' must not be negative"),
        ({"egress_price": "0.02"}, "line.egress_price: '0.02' is not a price; write an amount, a"),
        ({"egress_price": "0.02 USD"}, "line.egress_price: '0.02 USD' is not a price"),
        ({"egress_price": "0.02 /GB"}, "line.egress_price: '0.02 /GB' is not a price"),
        (
            {"egress_price": "1 USD/Gb"},
            "line.egress_price: '1 USD/Gb' has an unknown unit 'Gb': bit",
        ),
        ({"egress_price": "-1 USD/GB"}, "line.egress_price: '-1"),
        (
            {"backgroung": 1},
            "line.backgroung: unknown key 'backgroung'; did you mean 'background'?",
        ),
    ],
)
def test_wrong_numbers_are_refused(fields: dict[str, object], message: str) -> None:
    """The field, the value, and what would be right."""
    assert problem(**fields).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load": 1}, "line.background.load: 1 is too large; at a load of 1 the queue grows for e"),
        ({"load": 1.5}, "line.background.load: 1.5 is too large"),
        ({"load": -0.1}, "line.background.load: -0.1 is too small; it must be at least 0"),
        ({"load": "30 %"}, "line.background.load: '30 %' is not a number"),
        ({"load": float("nan")}, "line.background.load: nan is not a"),
        ({"size": "0 B"}, "line.background.size: '0 B' is too small; it must be more than zero"),
        ({"size": 5}, "line.background.size: 5 needs a unit, for example 64 KiB"),
        ({"sizes": "poisson"}, "line.background.sizes: 'poisson' is not one of fixed, exponential"),
        ({"bursts": {"on": "1 s"}}, "line.background.bursts.off: is missing"),
        ({"bursts": {"on": "1 s", "off": "0 s"}}, "line.background.bursts.off: '0 s' is too small"),
        ({"lod": 1}, "line.background.lod: unknown key 'lod'; did you mean 'load'?"),
    ],
)
def test_wrong_background_is_refused(changes: dict[str, object], message: str) -> None:
    """Loads from 0 to less than 1, sizes and bursts of something."""
    assert problem(background={"load": 0.3, "size": "1 MB", **changes}).startswith(message)


def test_background_on_an_unlimited_line_is_refused() -> None:
    """A share of infinity says nothing; none at all is fine."""
    text = problem(bandwidth="unlimited", background={"load": 0.3, "size": "1 MB"})
    assert text.startswith("line.background: there is no load of an unlimited bandwidth")
    line(bandwidth="unlimited", background={"load": 0, "size": "1 MB"})


def test_a_capped_background_must_drain() -> None:
    """One transfer after the other at 100 Mbit/s never catches up with 300 Mbit/s of them; side by
    side they do."""
    fields = {"background": {"load": 0.3, "size": "1 MB"}, "max_rate_per_flow": "100 Mbit/s"}
    assert problem(**fields).startswith("line.max_rate_per_flow: 100 Mbit/s is not more than the b")
    line(**fields, queue="fair")
    line(**{**fields, "max_rate_per_flow": "301 Mbit/s"})


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"from": "1 s"}, "line.windows.0.bandwidth: is missing; a window changes"),
        ({"to": "1 s", "delay": "1 s"}, "line.windows.0.from: is missing"),
        ({"from": "2 s", "to": "2 s", "delay": "1 s"}, "line.windows.0.to: 2 s is not after from"),
        ({"from": "2 s", "to": "1 s", "delay": "1 s"}, "line.windows.0.to: 1 s is not after from"),
        ({"from": 2, "delay": "1 s"}, "line.windows.0.from: 2 needs a unit"),
        (
            {"from": "1 s", "every": "9 s", "delay": "1 s"},
            "line.windows.0.to: is missing; a window t",
        ),
        (
            {"from": "1 s", "to": "9 s", "every": "8 s", "delay": "1 s"},
            "line.windows.0.every: 8 s is not longer than the window itself, which lasts 8 s",
        ),
        (
            {"from": "1 s", "to": "2 s", "every": "0 s", "delay": "1 s"},
            "line.windows.0.every: '0 s' is too small",
        ),
        (
            {"from": "1 s", "bandwidth": "0 bit/s"},
            "line.windows.0.bandwidth: '0 bit/s' must be more",
        ),
        ({"from": "1 s", "bandwidth": "unlimited"}, "line.windows.0.bandwidth: 'unlimited' cannot"),
        (
            {"from": "1 s", "bandwidth": "cutt"},
            "line.windows.0.bandwidth: 'cutt' is not a bandwidth",
        ),
        ({"fromm": "1 s"}, "line.windows.0.fromm: unknown key 'fromm'; did you mean 'from'?"),
        (
            {"from": "1 s", "delay": "1 s", "til": "2 s"},
            "line.windows.0.til: unknown key 'til'; choose from bandwidth, delay, every, from, to",
        ),
    ],
)
def test_wrong_windows_are_refused(window: dict[str, object], message: str) -> None:
    """A window has a beginning, an end after it if any, and changes something."""
    assert problem(windows=[window]).startswith(message)


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ("0 s–10 s", "10 s–20 s", False),
        ("0 s–10 s", "9 s–20 s", True),
        ("5 s–", "1 s–5 s", False),
        ("5 s–", "1 s–6 s", True),
        ("5 s–", "9 s–", True),
        ("5 s–", "0 s–1 s/10 s", True),
        ("0 s–1 s/10 s", "5 s–10 s", False),
        ("0 s–1 s/10 s", "5 s–11 s", True),
        ("0 s–1 s/10 s", "15 s–20 s", False),
        ("0 s–1 s/10 s", "5 s–6 s/10 s", False),
        ("0 s–1 s/10 s", "5 s–6 s/15 s", True),
        ("0 s–1 s/4 s", "1 s–2 s/6 s", False),
        ("0 s–1 s/4 s", "2 s–3 s/6 s", True),
        ("0 s–1 s/0.4 min", "1.5 s–2.5 s/36 s", False),
        ("0 s–2 s/0.4 min", "1.5 s–2.5 s/36 s", True),
    ],
)
def test_windows_of_one_field_must_not_overlap(first: str, second: str, overlap: bool) -> None:
    """Now or in any later repetition. Of two fields they may: they do not contradict each other."""
    pair = [_window(first), _window(second)]
    for windows in (pair, pair[::-1]):
        one, other = ({**window, "delay": "11 ms"} for window in windows)
        if overlap:
            text = problem(windows=[one, other])
            assert text == "line.windows.1: overlaps with windows.0: both set the delay"
        else:
            line(windows=[one, other])
        line(windows=[one, {**windows[1], "bandwidth": "1 bit/s"}])


def _window(text: str) -> dict[str, object]:
    """``from–to/every``."""
    span, _, every = text.partition("/")
    begin, _, end = span.partition("–")
    found = {"from": begin, "to": end or None, "every": every or None}
    return {key: value for key, value in found.items() if value is not None}


def test_an_unlimited_bandwidth_does_not_change() -> None:
    """Neither by a window nor in a trace."""
    text = problem(bandwidth="unlimited", windows=[{"from": "1 s", "bandwidth": "cut"}])
    assert text.startswith("line.windows.0.bandwidth: an unlimited bandwidth does not change")
    text = problem(bandwidth={"points": [["0 s", "unlimited"]], "repeat": True})
    assert text.startswith("line.bandwidth.points.0: 'unlimited' cannot change over time")


def test_jitter_is_held_against_the_smallest_delay() -> None:
    """Of a trace and of windows."""
    points = {"points": [["0 s", "3 ms"], ["1 s", "1 ms"]]}
    assert problem(delay=points, jitter="2 ms").startswith(
        "line.jitter: 2 ms is larger than the smallest delay of 1 ms"
    )
    assert "smallest delay of 2 ms" in problem(
        jitter="5 ms", windows=[{"from": "1 s", "delay": "2 ms"}]
    )


# ------------------------------------------------------------------------------------------- traces


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ({"points": []}, "line.bandwidth.points: [] is too short"),
        ({"points": 3}, "line.bandwidth.points: 3 is not a list"),
        ({"points": [3]}, "line.bandwidth.points.0: 3 is not a time and a value"),
        (
            {"points": [["0 s", "1 B/s"]]},
            "line.bandwidth.repeat: a trace of one value ends at once",
        ),
        (
            {"points": [["1 s", "1 B/s"]]},
            "line.bandwidth.points.0: a trace begins at 0 s, not at 1 s",
        ),
        ({"points": [["0 s", "0 B/s"]]}, "line.bandwidth.points.0: '0 B/s' must be more than zero"),
        ({"points": [["0 s", "1 s"]]}, "line.bandwidth.points.0: '1 s' has an unknown unit"),
        ({}, "line.bandwidth.points: is missing"),
        ({"file": 3}, "line.bandwidth.file: 3 is not the path of a CSV file"),
        ({"file": "no.csv"}, "line.bandwidth.file: no.csv: no such file"),
        ({"file": "x", "points": []}, "line.bandwidth.points: are given beside a file"),
        ({"points": [["0 s", "1 B/s"]], "repeat": 3}, "line.bandwidth.repeat: 3"),
        ({"pionts": []}, "line.bandwidth.pionts: unknown key 'pionts'; did you mean 'points'?"),
    ],
)
def test_wrong_traces_are_refused(trace: object, message: str) -> None:
    """Where in the trace, and what."""
    assert problem(bandwidth=trace).startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "time,value\n0 s,1 Mbit/s\n10 s,2 Mbit/s\n",
        "time,bandwidth\n0 s,1 Mbit/s\n10 s,2 Mbit/s\n",
        "time [s],value [Mbit/s]\n0,1\n10,2\n",
        "bandwidth[kbit/s] , time [ms]\r\n1000 , 0\r\n\r\n2000 , 1e4\r\n",
        "\ufefftime,value [Mbit/s]\n0 s,1\n\n10 s,2\n\n",
    ],
)
def test_csv_files_are_read(text: str, tmp_path: Path) -> None:
    """Units in the cells or in the header, columns in any order, empty lines, a byte-order mark."""
    (tmp_path / "t.csv").write_bytes(text.encode())
    found = line(bandwidth={"file": str(tmp_path / "t.csv")}).bandwidth
    assert found == BandwidthTrace(points=[["0 s", "1 Mbit/s"], ["10 s", "2 Mbit/s"]])


def test_delays_have_their_own_column(tmp_path: Path) -> None:
    """``delay`` for a delay, and not ``bandwidth``."""
    (tmp_path / "t.csv").write_text("time,delay\n0 s,1 ms\n10 s,0 s\n")
    trace = {"file": str(tmp_path / "t.csv")}
    assert line(delay=trace).delay == DelayTrace(points=[["0 s", "1 ms"], ["10 s", "0 s"]])
    text = problem(bandwidth=trace)
    assert "unknown column 'delay'; choose from bandwidth, time, value" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "t.csv: has no values; expected a header 'time,value' and rows"),
        ("time,value\n", "t.csv: has no values"),
        ("tme,value\n0 s,1 B/s\n", "t.csv: unknown column 'tme'; did you mean 'time'?"),
        ("time,value,note\n0 s,1 B/s,x\n", "t.csv: unknown column 'note'"),
        ("time\n0 s\n", "t.csv: a trace has the columns 'time' and 'bandwidth', not ['time']"),
        ("time,time\n0 s,1 s\n", "t.csv: a trace has the columns"),
        ("time,value,bandwidth\n0 s,1 B/s,1 B/s\n", "t.csv: a trace has the columns"),
        ("0 s,1 B/s\n1 s,1 B/s\n", "t.csv: unknown column '0 s'"),
        ("time,value\n0 s,1 B/s\n5 s\n", "t.csv, line 3: 1 cells under a header of 2"),
        ("time,value\n0,1 B/s\n1 s,1 B/s\n", "points.0: '0' needs a unit, for example 65 ms (in "),
        ("time,value\n0 s,1\n1 s,1 B/s\n", "points.0: '1' needs a unit, for example 1 Gbit/s (in "),
        ("time [s],value\n0 s,1 B/s\n1,1 B/s\n", "points.0: '0 s s' has an unknown unit 's s'"),
        (
            "time [s],value [Mb/s]\n0,1\n1,1\n",
            "points.0: '1 Mb/s' has an unknown unit 'Mb/s': bits",
        ),
        (
            "time,value\n0 s,1 B/s\n2 s,1 B/s\n1 s,1 B/s\n",
            "points.2: the trace goes backwards: 1 s d",
        ),
        ("time,value\n0 s,1 B/s\n0 s,2 B/s\n", "points.1: the trace goes backwards: 0 s does not"),
        ("time,value\n1 s,1 B/s\n2 s,2 B/s\n", "points.0: a trace begins at 0 s, not at 1 s"),
        ("time,value\n0 s,0 bit/s\n2 s,2 B/s\n", "points.0: '0 bit/s' must be more than zero"),
        ("time,value\n0 s,1 B/s\n2 s,-2 B/s\n", "points.1: '-2 B/s' must not be negative"),
        (
            "time,value\n0 s,1 B/s\n",
            "repeat: a trace of one value ends at once; write repeat: true",
        ),
    ],
)
def test_wrong_csv_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    """The file, and where in it."""
    file = tmp_path / "t.csv"
    file.write_text(content)
    text = problem(bandwidth={"file": str(file)})
    assert text.startswith("line.bandwidth.")
    assert message in text
    assert str(file) in text


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A folder, bytes that are not UTF-8, and far too many rows."""
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in problem(bandwidth={"file": str(tmp_path / "t.csv")})
    assert "cannot be read" in problem(bandwidth={"file": str(tmp_path)})
    assert "cannot be read" in problem(bandwidth={"file": "a\0b"})
    (tmp_path / "t.csv").write_text("time,value\n" + "0 s,1 B/s\n" * 10_001)
    assert "has 10,001 rows, more than 10,000" in problem(
        bandwidth={"file": str(tmp_path / "t.csv")}
    )


@pytest.mark.parametrize(
    "window",
    [
        {"from": "0 s", "to": "9 s", "every": "10 s", "bandwidth": "cut"},
        {"from": "1 s", "bandwidth": "400 kbit/s"},
    ],
)
def test_a_background_that_never_drains_is_refused(window: dict[str, str]) -> None:
    """What the windows leave in the long run must be more than the load, or a queue grows."""
    line = {"bandwidth": "1 Mbit/s", "background": {"load": 0.5, "size": "10 kB"}}
    Line.parse({**line, "windows": [{**window, "to": "2 s", "every": "10 s"}]})
    with pytest.raises(InputError, match=r"windows\.0: leaves .*bit/s of the line in the long run"):
        Line.parse({**line, "windows": [window]})
