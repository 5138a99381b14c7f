"""How a command ends: the exit codes, and errors as one line on the standard error stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from mla_index.errors import BackendUnavailable, BackendUnsupported, UnknownBackend
from mla_index.simulation.setting import ConfigError
from mla_index.simulation.trace import TraceError

FAILED = 1
USAGE = 2
MISSING = 3

HELP = (
    "Exit codes: 0 all is well; 1 a check failed or a bound is broken; 2 the arguments, a setting "
    "or an input file is wrong; 3 no backend can serve the call, or a needed package is missing."
)


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """End the command with a line and a code on errors that are the user's to mend.

    Everything else is a fault of ours, and keeps its traceback.
    """
    try:
        yield
    except (BackendUnavailable, BackendUnsupported) as error:
        raise stop(str(error), MISSING) from error
    except (ConfigError, TraceError, UnknownBackend) as error:
        raise stop(str(error), USAGE) from error


def stop(message: str, code: int) -> typer.Exit:
    """What to raise after saying why."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(code)
