"""Shapes in words: which T and K a record has, and what was left out, each reason told once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from mla_index.bench.record import Row

FEWEST_IN_A_RUN = 3
SHAPE = re.compile(r"(?P<workload>.+), T = (?P<rows>\d+), K = (?P<topk>\d+): (?P<why>.+)")
"""A line of a record's `left_out` that is about a shape."""
TOO_LARGE = re.compile(r"T \* K is \d+, and at most (\d+) is measured")


def counts(found: Collection[int], among: Collection[int]) -> str:
    """Numbers in their order, as `1, 8 to 64`: a run leaves out none of those that there are."""
    runs: list[list[int]] = [[]]
    for number in sorted(among):
        if number in found:
            runs[-1].append(number)
        elif runs[-1]:
            runs.append([])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) >= FEWEST_IN_A_RUN else ", ".join(map(str, run))
        for run in runs
        if run
    )


def shapes(
    rows_of: Mapping[int, Collection[int]], among: Collection[int], *, alone: str = ""
) -> str:
    """K with T, those K together that have the same T.

    Args:
        rows_of: by K the T.
        among: every T that there is.
        alone: what to say behind a single T.
    """
    alike: dict[str, list[int]] = {}
    for topk, found in rows_of.items():
        told = counts(found, among) + (alone if len(found) == 1 else "")
        alike.setdefault(told, []).append(topk)
    return "; ".join(f"K = {', '.join(map(str, topk))}: T = {told}" for told, topk in alike.items())


def measured(rows: Iterable[Row]) -> str:
    """Which T were measured for each K, by workload; where it was one T alone, that is said."""
    found: dict[str, dict[int, set[int]]] = {}
    among = set()
    for row in rows:
        found.setdefault(row.workload, {}).setdefault(row.topk, set()).add(row.rows)
        among.add(row.rows)
    return "; ".join(
        f"{workload}, {shapes(by_topk, among, alone=' alone')}"
        for workload, by_topk in found.items()
    )


def left_out(lines: Iterable[str], rows: Collection[int]) -> list[str]:
    """A line for each reason, with the shapes that it was the reason for.

    Args:
        lines: `left_out` of a record; what is not about a shape stays as it is.
        rows: every T that was measured.
    """
    whom: dict[tuple[str, str, int, int], list[str]] = {}
    others = []
    for line in lines:
        match = SHAPE.fullmatch(line)
        if match is None:
            others.append(line)
            continue
        who, _, reason = match["why"].rpartition(": ")
        reason = TOO_LARGE.sub(r"T * K is above \1, the most that is measured", reason)
        key = (match["workload"], reason, int(match["topk"]), int(match["rows"]))
        whom.setdefault(key, []).append(who)
    among = {*rows, *(count for *_, count in whom)}
    together: dict[tuple[str, str, str], dict[int, set[int]]] = {}
    for (workload, reason, topk, count), who in whom.items():
        by_topk = together.setdefault((workload, ", ".join(filter(None, who)), reason), {})
        by_topk.setdefault(topk, set()).add(count)
    told = [
        ": ".join(filter(None, (f"{workload}, {shapes(by_topk, among)}", who, reason)))
        for (workload, who, reason), by_topk in together.items()
    ]
    return told + others
