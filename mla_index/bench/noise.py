"""Whether the times of a record can be told from noise."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mla_index.bench.record import Row, rows_of

HOST_METRICS = ("host_us", "cpu_us")
"""What another programme on the machine disturbs."""
WIDE = 0.25
"""Quartiles that lie further apart than this share of the median tell little."""
MOST_WIDE = 0.25
"""Share of the times of which that may be so: a few are, on any machine."""


def load() -> dict[str, float] | None:
    """The machine's load of the last minute, and its threads; None where it does not tell."""
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    return {"average": round(os.getloadavg()[0], 2), "threads": os.cpu_count() or 1}


def warnings(record: Mapping[str, Any]) -> Iterator[str]:
    """Why the times on the host or the CPU are noise, a line for each sign of it."""
    times = [row for row in rows_of(record) if row.metric in HOST_METRICS]
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


def is_wide(row: Row) -> bool:
    """Whether the quartiles lie too far apart for the median to tell much."""
    if row.low is None or row.high is None:
        return False
    return row.high - row.low > WIDE * row.value
