"""The command `mla-index`. Needs the extra `cli`; the library itself never imports this."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings

from mla_index.cli import streams


def main() -> None:
    """Run the command line; says in one line what is missing without the extra `cli`."""
    streams.open_closed()
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"error: the command line needs {error.name}: pip install 'mla_index[cli]'",
            file=sys.stderr,
        )
        # The number of `exits.MISSING`, which cannot be imported without typer.
        raise SystemExit(3) from None
    _speak_to_people()
    try:
        from mla_index.cli.app import app

        app(prog_name="mla-index")
    except KeyboardInterrupt:  # while importing; later the commands say it
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # The number of `exits.USAGE`; at once, since what is left cannot be flushed either.
        print(f"error: standard output: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(2)


def _speak_to_people() -> None:
    """Warnings in a line, and no error for a sign that the terminal or the pipe cannot show."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
