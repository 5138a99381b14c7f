"""Names as people list them: with commas, or by giving an option several times."""

from __future__ import annotations

from collections.abc import Iterable

from mla_index.cli import exits


def listed(option: str, values: Iterable[str] | None) -> tuple[str, ...]:
    """All names that an option was given, each once.

    Raises:
        typer.Exit: one is empty; said on standard error.
    """
    found = [part.strip() for value in values or () for part in value.split(",")]
    if not all(found):
        raise exits.stop(f"{option} must be names with commas, and one is empty", exits.USAGE)
    return tuple(dict.fromkeys(found))
