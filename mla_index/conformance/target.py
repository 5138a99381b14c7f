"""What the suite runs on: one backend on one device at one scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla_index import registry, selector
from mla_index.errors import BackendUnavailable, BackendUnsupported
from mla_index.specs import RemapSpec, Spec


class Failure(AssertionError):
    """The backend does not do what the definition says; the message says where."""


class NotTaken(Exception):
    """The backend says that it does not take this configuration here; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """One backend under test.

    Args:
        backend: its name.
        device: where the tensors are.
        full: whether the sizes of production are run, else small ones (for interpreters).
        examples: generated inputs per property.
    """

    backend: str
    device: torch.device
    full: bool = False
    examples: int = 30

    def choose(self, op: str, spec: Spec) -> selector.Choice:
        """The choice for a configuration, which must fall on this backend.

        Raises:
            NotTaken: the backend declares that it does not serve it.
        """
        try:
            choice = selector.choose(op, spec, self.device, self.backend)
        except (BackendUnavailable, BackendUnsupported) as error:
            raise NotTaken(error.reasons.get(self.backend, str(error))) from None
        if choice.backend != self.backend and op != "flat_row_view":
            raise Failure(f"asked for {self.backend}, the selector chose {choice.backend}")
        return choice

    def unavailable(self) -> str | None:
        """Why the backend cannot run on this device at all, or None."""
        try:
            self.choose("remap", RemapSpec(64, 1))
        except NotTaken:
            return registry.load(self.backend).unavailable(self.device, probe=True)
        return None

    def compiled_kernels(self) -> int | None:
        """Kernels that the backend has compiled in this process, where it tells."""
        count: Callable[[], int] | None = getattr(
            registry.load(self.backend), "compiled_kernels", None
        )
        return None if count is None else count()


@dataclass(frozen=True, slots=True)
class Job:
    """One check of the suite: `check(target)` passes or raises `Failure` or `NotTaken`.

    Args:
        id: stable; what a failure and a report name.
        op: the operation it belongs to.
        tags: what it looks at.
        check: runs it.
    """

    id: str
    op: str
    tags: tuple[str, ...]
    check: Callable[[Target], None]

    def run(self, target: Target) -> None:
        """Run the check; a failure names the job and the backend."""
        try:
            self.check(target)
        except Failure as failure:
            raise Failure(f"{self.id} on {target.backend}: {failure}") from None
