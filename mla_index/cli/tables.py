"""Explanations as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from rich.table import Table
from rich.text import Text

from mla_index.explanation import Candidate, Explanation

WORDS = {True: "accepted", False: "rejected", None: "not tried"}
STYLES = {True: "green", False: "red", None: "yellow"}


def backend_table(title: str, answers: Iterable[Explanation]) -> Table:
    """Every backend × operation, the chosen one marked, each with its reason.

    Operations for which the same is true stand together.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("operation", "backend", "", "reason"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("operation", "backend"))
    for ops, answer in _alike(answers):
        for op, row in zip_longest(ops, answer.rows):
            table.add_row(op or "", *(_cells(answer, row) if row else ()))
    return table


def _alike(answers: Iterable[Explanation]) -> Iterator[tuple[list[str], Explanation]]:
    """The answers, operations with the same one together."""
    groups: dict[object, tuple[list[str], Explanation]] = {}
    for answer in answers:
        groups.setdefault((answer.rows, answer.chosen), ([], answer))[0].append(answer.op)
    yield from groups.values()


def _cells(answer: Explanation, row: Candidate) -> tuple[Text, Text, Text]:
    chosen = row.name == answer.chosen
    reason = row.reason
    if chosen:
        reason = "; ".join(filter(None, (f"chosen (by {answer.source})", reason)))
    return (
        Text(f"{'→' if chosen else ' '} {row.name}", style="bold" if chosen else ""),
        Text(WORDS[row.accepted], style=STYLES[row.accepted]),
        Text(reason),
    )
