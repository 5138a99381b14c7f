"""Where tables are printed: as wide as the terminal, and whole where nobody watches."""

from __future__ import annotations

import os
import re
import sys
from typing import IO, Any, cast

from rich.console import Console

ANY_WIDTH = 10_000
"""Columns of what has none: a file or another program takes lines of any length."""

TRAILING = re.compile(r"(?: |\x1b\[[\d;]*m)+(?=\n)")
"""Blanks at the end of a line, with the colours among them."""


def console(*, stderr: bool = False) -> Console:
    """A console on a standard stream, which writes no blanks at the ends of lines.

    Where the stream is no terminal, nothing is folded, unless `COLUMNS` asks for a width.
    """
    stream = sys.stderr if stderr else sys.stdout
    wide = not (stream.isatty() or os.environ.get("COLUMNS", "").isdigit())
    return Console(file=cast("IO[str]", _Trimmed(stream)), width=ANY_WIDTH if wide else None)


class _Trimmed:
    """A stream that drops what nobody sees; in all else the stream that it was given."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write whole lines, as a console hands them over."""
        self._stream.write(TRAILING.sub(lambda found: found[0].replace(" ", ""), text))
        return len(text)
