"""Whether the times of a record can be told from noise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mla_index.bench.record import Row, rows_of

DISTURBED = ("host_us", "cpu_us")
"""What another programme on the machine disturbs."""
WIDE = 0.25
"""Quartiles that lie further apart than this share of the median tell little."""
LEGEND = f"~: the quartiles are more than {WIDE:.0%} of the median apart"
MOST_WIDE = 0.25
"""Share of the times of which that may be so: a few are, on any machine."""
COMPARED = ("gpu_us", "cpu_us")
"""What targets compare shape by shape. A wide time says little about the code, but is likely to be
the worst, or what another is compared with: it answers no target."""


def load() -> dict[str, float] | None:
    """The machine's load of the last minute, and its threads; None where it does not tell."""
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    return {"average": round(os.getloadavg()[0], 2), "threads": os.cpu_count() or 1}


def warnings(record: Mapping[str, Any]) -> Iterator[str]:
    """Why the times on the host or the CPU are noise, a line for each sign of it."""
    times = [row for row in rows_of(record) if row.metric in DISTURBED]
    wide = sum(map(is_wide, times))
    if times and wide > MOST_WIDE * len(times):
        yield (
            f"{wide} of {len(times)} times on the host or the CPU have quartiles more than "
            f"{WIDE:.0%} of the median apart: such differences are noise"
        )
    found = record.get("load")
    if times and found and found["average"] > found["threads"]:
        yield (
            f"the load was {found['average']:g} on {found['threads']:g} threads before the run: "
            "times on the host or the CPU are noise"
        )


def steady(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows without the times that can answer no target."""
    return (row for row in rows if not (row.metric in COMPARED and is_wide(row)))


def unsteady(record: Mapping[str, Any]) -> str:
    """Which times of a record answer no target, if any do not."""
    compared = [row for row in rows_of(record) if row.metric in COMPARED]
    wide = list(filter(is_wide, compared))
    whose = ", ".join(dict.fromkeys(row.operation for row in wide))
    told = f"too unsteady (~) to answer a target: {len(wide)} of {len(compared)} times, of {whose}"
    return told if wide else ""


def is_wide(row: Row) -> bool:
    """Whether it is a time in µs whose quartiles lie too far apart for the median to tell much."""
    if not row.metric.endswith("_us") or row.low is None or row.high is None:
        return False
    return row.high - row.low > WIDE * row.value
