"""The errors that a selection can end in.

Bad arguments raise `ValueError` or `TypeError`; these are for calls whose arguments are right
but for which no implementation can be had. All derive from `BackendError`.
"""

from __future__ import annotations


class BackendError(RuntimeError):
    """A backend was asked for and cannot serve the call."""


class UnknownBackend(BackendError, ValueError):
    """A name that no backend has; the message lists the valid ones."""


class BackendUnavailable(BackendError):
    """The backend cannot run on this device (library, driver or device is missing).

    `reasons` maps each candidate to why it was not taken, root cause first.
    """

    def __init__(self, message: str, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons: dict[str, str] = dict(reasons or {})


class BackendUnsupported(BackendError):
    """The backend runs here, but does not take this operation, dtype or configuration.

    `reasons` maps each candidate to why it was not taken, root cause first.
    """

    def __init__(self, message: str, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons: dict[str, str] = dict(reasons or {})


class NotWarm(BackendError):
    """A first use inside a CUDA graph capture: call `mla_index.warmup` before capturing."""


class InvalidBackend(BackendError, TypeError):
    """An object offered as a backend does not keep the contract; the message lists how."""
