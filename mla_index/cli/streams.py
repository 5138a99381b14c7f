"""Standard streams that whoever started the programme has closed (`mla-index … >&-`)."""

from __future__ import annotations

import os
import sys

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_closed() -> None:
    """Let them lead nowhere, as if they led to the null device.

    Before any file is opened: it would get the number of a standard stream, and be written to by
    whatever writes there. In the order of the numbers, as each new file gets the lowest that is
    free; and for the programmes that this one starts as well, as streams are.
    """
    for name, mode in MODES.items():
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def stdout_is_closed() -> bool:
    """Whether standard output was closed; a redirection to the null device is not that."""
    return sys.stdout is None or getattr(sys.stdout, "name", None) == os.devnull
