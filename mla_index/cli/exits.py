"""How a command ends: the exit codes, and errors as one line on the standard error stream."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from mla_index.errors import BackendUnavailable, BackendUnsupported, UnknownBackend
from mla_index.simulation.memory import is_exhausted
from mla_index.simulation.setting import ConfigError
from mla_index.simulation.trace import TraceError

FAILED = 1
USAGE = 2
MISSING = 3
INTERRUPTED = 130
"""What a shell reports of a programme that Ctrl-C ended."""

HELP = (
    "Exit codes: 0 all is well; 1 a check failed or a bound is broken; 2 the arguments, a setting "
    "or a file is wrong, or the memory too small for what is asked; 3 no backend can serve the "
    "call, or a needed package is missing; 130 interrupted."
)


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """End the command with a line and a code on errors that are the user's to mend.

    Everything else is a fault of ours, and keeps its traceback.
    """
    try:
        yield
    except (BackendUnavailable, BackendUnsupported) as error:
        raise stop(_told(error), MISSING) from error
    except (ConfigError, TraceError, UnknownBackend) as error:
        raise stop(str(error), USAGE) from error
    except KeyboardInterrupt as error:
        raise stop("interrupted", INTERRUPTED) from error
    except (MemoryError, RuntimeError) as error:
        if not is_exhausted(error):
            raise
        # torch's allocator on the CPU says first where in its sources it stands
        first = str(error).partition("\n")[0].rpartition("DefaultCPUAllocator: ")[2]
        raise stop(f"memory ran out, ask for less ({first or 'MemoryError'})", USAGE) from error


@contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Let SIGTERM, as of `timeout`, do what Ctrl-C does: for a command that keeps its work."""
    before = signal.getsignal(signal.SIGTERM)
    # The main thread alone may ask for it; a handler that is not Python's could not be put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _told(error: BackendUnavailable | BackendUnsupported) -> str:
    """What the error says, its reasons on lines of their own if there are several."""
    message = str(error)
    reasons = [f"{name}: {reason}" for name, reason in error.reasons.items()]
    together = "; ".join(reasons)
    if len(reasons) <= 1 or together not in message:
        return message
    before, _, after = message.partition(together)
    lines = [f"  {reason}" for reason in reasons]
    return "\n".join(filter(None, [before.rstrip(), *lines, after.removeprefix(". ")]))


def stop(message: str, code: int) -> typer.Exit:
    """What to raise after saying why."""
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(code)
