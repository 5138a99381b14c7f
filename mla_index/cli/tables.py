"""Tables for a terminal of any width: names and numbers stay whole, and text is folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mla_index.explanation import Candidate, Explanation

STYLES = {True: "green", False: "red", None: "yellow"}

ANY_WIDTH = 10_000


def table(title: str, *columns: Column, header: bool = True) -> Table:
    """A table without lines."""
    return Table(
        *columns, title=title, title_justify="left", box=None, show_header=header,
        padding=(0, 2, 0, 0), pad_edge=False,
    )  # fmt: skip


def names(heading: str = "") -> Column:
    """A column of what a reader copies: never folded."""
    return Column(heading, no_wrap=True)


def numbers(heading: str) -> Column:
    """A column of numbers."""
    return Column(heading, justify="right", no_wrap=True)


def text(heading: str = "") -> Column:
    """A column that gives way where the terminal is narrow; a word that is too long is broken."""
    return Column(heading, overflow="fold")


def fits(drawn: Table, console: Console) -> bool:
    """Whether it can be shown without folding anything."""
    measured = console.measure(drawn, options=console.options.update(width=ANY_WIDTH))
    return measured.maximum <= console.width


def backend_table(title: str, answers: Iterable[Explanation]) -> Table:
    """Every backend × operation, the chosen one marked, each with its reason.

    Operations for which the same is true stand together.
    """
    drawn = table(title, names("operation"), names("backend"), names(), text("reason"))
    for ops, answer in _alike(answers):
        for op, row in zip_longest(ops, answer.rows):
            drawn.add_row(op or "", *(_cells(answer, row) if row else ()))
    return drawn


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
        Text(row.verdict, style=STYLES[row.accepted]),
        Text(reason),
    )
