"""The option by which a person asks for backends as a call does."""

from __future__ import annotations

from typing import Any

import typer

OPTION: Any = typer.Option(
    help="As in a call: a name, an ordered list with commas, or `auto`.",
    show_default="as a call without it: MLA_INDEX_BACKEND, else auto",
)
