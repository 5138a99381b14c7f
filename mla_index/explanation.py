"""The answer of `explain`: every backend, accepted or rejected with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_index.specs import Spec


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend. `accepted` is None where only the device could tell and was not asked."""

    name: str
    accepted: bool | None
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which backend serves an operation on a device, and why. Prints as a table.

    Args:
        op, device, spec: what was asked about.
        source: who determined the order (`auto`, the argument, `MLA_INDEX_BACKEND` …).
        rows: the backends, those that are tried first, in their order.
        chosen: the name of the one that serves, or None.
    """

    op: str
    device: torch.device
    spec: Spec
    source: str
    rows: tuple[Candidate, ...]
    chosen: str | None

    def as_dict(self) -> dict[str, object]:
        """The same as JSON can hold it."""
        return {
            "op": self.op,
            "device": str(self.device),
            "spec": None if self.spec is None else str(self.spec),
            "source": self.source,
            "chosen": self.chosen,
            "candidates": [
                {"name": row.name, "accepted": row.accepted, "reason": row.reason}
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        words = {True: "accepted", False: "rejected", None: "not tried"}
        width = max(len(row.name) for row in self.rows)
        lines = [f"{self.op} on {self.device}: {self.chosen or 'no backend'} (by {self.source})"]
        for row in self.rows:
            mark = "->" if row.name == self.chosen else "  "
            lines.append(
                f"{mark} {row.name:<{width}}  {words[row.accepted]:<9}  {row.reason}".rstrip()
            )
        return "\n".join(lines)
