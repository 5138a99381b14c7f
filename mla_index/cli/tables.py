"""Tables for a terminal of any width: names and numbers stay whole, and text is folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from mla_index.cli.screen import ANY_WIDTH
from mla_index.explanation import Candidate, Explanation

STYLES = {True: "green", False: "red", None: "yellow"}

NARROW = 60
"""Columns below which a reason stands on a line of its own."""


def table(title: str, *columns: Column, header: bool = True) -> Table:
    """A table without lines."""
    return Table(
        *columns, title=title or None, title_justify="left", box=None, show_header=header,
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


def backend_table(title: str, answers: Iterable[Explanation]) -> RenderableType:
    """Every backend × operation, the chosen one marked, each with its reason.

    Operations for which the same is true stand together, on a line above their backends.
    """
    groups = list(alike(answers))
    width = max(len(row.name) for _, answer in groups for row in answer.rows)
    parts: list[RenderableType] = [Text(title, style="italic")]
    for ops, answer in groups:
        parts += [Text(f"  {', '.join(ops)}", style="bold"), Candidates(answer, width, indent=4)]
    return Group(*parts)


def alike(answers: Iterable[Explanation]) -> Iterator[tuple[list[str], Explanation]]:
    """The answers, operations with the same one together."""
    groups: dict[object, tuple[list[str], Explanation]] = {}
    for answer in answers:
        groups.setdefault((answer.rows, answer.chosen), ([], answer))[0].append(answer.op)
    yield from groups.values()


class Candidates:
    """The backends of one answer, a line each; in a narrow terminal the reason on its own.

    Args:
        answer: theirs.
        width: columns for the names.
        indent: blanks before every line.
    """

    def __init__(self, answer: Explanation, width: int = 0, indent: int = 0) -> None:
        self._answer = answer
        self._width = max(width, *(len(row.name) for row in answer.rows))
        self._indent = indent

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Drawn at the width that there is."""
        lines = [_cells(self._answer, row, self._width) for row in self._answer.rows]
        if options.max_width < NARROW:
            for name, verdict, reason in lines:
                yield Padding(Text("  ").join([name, verdict]), (0, 0, 0, self._indent))
                if reason:
                    yield Padding(reason, (0, 0, 0, self._indent + 4))
            return
        drawn = table("", names(), names(), text(), header=False)
        for line in lines:
            drawn.add_row(*line)
        yield Padding(drawn, (0, 0, 0, self._indent), expand=False)


def _cells(answer: Explanation, row: Candidate, width: int) -> tuple[Text, Text, Text]:
    chosen = row.name == answer.chosen
    reason = row.reason
    if chosen:
        reason = "; ".join(filter(None, (f"chosen (by {answer.source})", reason)))
    return (
        Text(f"{'→' if chosen else ' '} {row.name:<{width}}", style="bold" if chosen else ""),
        Text(f"{row.verdict:<9}", style=STYLES[row.accepted]),
        Text(reason, overflow="fold"),
    )
