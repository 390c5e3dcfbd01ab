"""How well a run on the wall clock kept its pace, as rows of the final table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from islands.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from islands.network.pace import Pace

#: Links with a row of their own: those that fell short the most.
MOST_LINKS = 6


def pace_summary(pace: Pace | None) -> dict[str, Any] | None:
    """``pace`` of ``summary.json``: rates in bytes per emulated second, the rest in wall seconds;
    None on the emulated clock."""
    if pace is None:
        return None
    return {
        "links": {
            name: {"asked_bytes_per_s": asked, "achieved_bytes_per_s": achieved}
            for name, (asked, achieved) in pace.links.items()
        },
        "lag_mean_s": pace.lag_mean_s,
        "lag_max_s": pace.lag_max_s,
        "wall_s": pace.wall_s,
    }


def pace_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(section, label, value, note) of the lag and of the links; nothing on the emulated clock."""
    pace = summary.get("pace")
    if pace is None:
        return
    most = format_seconds(pace["lag_max_s"])
    lag = format_seconds(pace["lag_mean_s"])
    yield "pace", "computing lags", lag, f"mean; at most {most} behind the clock"
    links = pace["links"]
    shares = {n: r["achieved_bytes_per_s"] / r["asked_bytes_per_s"] for n, r in links.items()}
    worst = sorted(shares, key=lambda name: (shares[name], name))
    for name in worst[:MOST_LINKS]:
        asked, achieved = (
            format_bytes(links[name][f"{rate}_bytes_per_s"]) for rate in ("asked", "achieved")
        )
        note = f"{achieved}/s of {asked}/s over {name}"
        yield "", "achieved", f"{100 * shares[name]:.1f} %", note
    if len(worst) > MOST_LINKS:
        least = 100 * shares[worst[MOST_LINKS]]
        yield "", "", f"≥ {least:.1f} %", f"over {len(worst) - MOST_LINKS} more links"
