"""A progress bar for what takes longer than a person likes to wait in the dark."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 2.0
"""Seconds without a bar."""


class PatientProgress:
    """Called as `mla_index.simulation.setting.Progress`; draws nothing until `PATIENCE` is over.

    Draws only on a terminal, and leaves nothing behind on it.

    Args:
        console: where to draw.
        clock: seconds from some point on.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._clock = clock
        self._start = clock()
        self.shown = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note of a step."""
        if not self.shown and self._clock() - self._start > PATIENCE:
            self._bar.start()
            self.shown = True
        self._bar.update(self._task, description=stage, completed=done, total=total)

    def __enter__(self) -> PatientProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.shown:
            self._bar.stop()
