"""`explain` and its answer: every backend, accepted or rejected with the reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from mla_index import questions, registry, selector, verdicts
from mla_index.errors import UnknownBackend
from mla_index.selector import Names
from mla_index.specs import RemapSpec, SafeLengthsSpec, Spec

REMOVED = "MLA_INDEX_BLOCK removes it from auto"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend. `accepted` is None where only the device could tell and was not asked."""

    name: str
    accepted: bool | None
    reason: str

    @property
    def verdict(self) -> str:
        """`accepted` in words."""
        return {True: "accepted", False: "rejected", None: "not tried"}[self.accepted]


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
            "spec": None if self.spec is None else _as_json(self.spec),
            "source": self.source,
            "chosen": self.chosen,
            "candidates": [
                {"name": row.name, "accepted": row.accepted, "reason": row.reason}
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{self.op} on {self.device}: {self.chosen or 'no backend'} (by {self.source})"]
        for row in self.rows:
            mark = "->" if row.name == self.chosen else "  "
            lines.append(f"{mark} {row.name:<{width}}  {row.verdict:<9}  {row.reason}".rstrip())
        return "\n".join(lines)


def explain(
    op: str,
    *,
    device: torch.device | str,
    spec: Spec = None,
    backend: Names = "auto",
    probe: bool | None = None,
) -> Explanation:
    """Which backend would serve an operation on a device, and why not each of the others.

    Args:
        op: an operation from `mla_index.OPERATIONS`.
        device: where the tensors would be.
        spec: the configuration; without one, only what does not depend on it is answered.
        backend: as for the operations.
        probe: whether a device may be initialised for the answer. By default only if this process
            has initialised it already, so that a process may ask and then fork.

    Raises:
        ValueError, TypeError: an unknown operation, a spec of another operation.
        UnknownBackend: a name that no backend has.
        NotWarm: a device would have to be tried inside a CUDA graph capture.
    """
    questions.check(op, spec)
    request, source = selector.requested(backend)
    place = questions.named_device(device)
    if probe is None:
        probe = questions.initialised(place)
    if probe:
        place = questions.with_index(place)
    order = selector.order_of(op, request, place)
    blocked = _blocked(request, place, order)
    rows = []
    for name in dict.fromkeys((*order, *registry.names())):
        try:
            refusal = verdicts.refusal(name, op, spec, place, probe=probe)
        except UnknownBackend:  # another thread has taken it back
            continue
        accepted: bool | None = refusal is None
        reason = "" if refusal is None else str(refusal)
        if accepted and not (probe or verdicts.tried(name, place)):
            accepted, reason = None, "not tried: that needs the device; a call tries it"
        elif accepted and name not in order:
            reason = "can run" if name in blocked else f"can run, but {source} does not ask for it"
        if name in blocked:
            reason = f"{REMOVED}; {reason}"
        rows.append(Candidate(name, accepted, reason))
    chosen = next((r.name for r in rows if r.name in order and r.accepted is not False), None)
    return Explanation(op, place, spec, source, tuple(rows), chosen)


def _blocked(
    request: tuple[str, ...] | None, device: torch.device, order: tuple[str, ...]
) -> set[str]:
    """The backends that `auto` would try here, were they not in `MLA_INDEX_BLOCK`."""
    if request is not None and "auto" not in request:
        return set()
    _, _, block = selector.in_force()
    return {*selector.auto_order(device)}.intersection(block).difference(order)


def _as_json(spec: RemapSpec | SafeLengthsSpec) -> dict[str, object]:
    """The fields of a spec; dtypes by their names, `int32` of `torch.int32`."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in asdict(spec).items()
    }
