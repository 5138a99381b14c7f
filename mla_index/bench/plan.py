"""What a run is asked for, what it covers by default, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mla_index.bench.contenders import COMPOSED, COMPOSITION, OPERATIONS, Operation
from mla_index.bench.workloads import REQUESTS, VALID
from mla_index.errors import BackendUnavailable
from mla_index.explanation import explain
from mla_index.selector import check_names
from mla_index.simulation.setting import ConfigError
from mla_index.specs import Dcp, index_dtype

CPU = torch.device("cpu")
ROWS = tuple(2**power for power in range(16))
QUICK_ROWS = {"cpu": (1, 32, 512), "cuda": (1, 32, 512, 2048, 8192)}
STEPS = tuple(2**power for power in range(REQUESTS.bit_length()))
QUICK_STEPS = (1, 16, 128)
"""Requests of the decode steps of a trace."""
TOPK = (2048, 512, 2176, 4224, 16384)
"""The first is the one for which everything is measured."""
DCP = (2, 4, 8)
QUICK_OPERATIONS = (
    "remap", "remap_counts", "remap_safe_lengths", "dcp_filter", "safe_lengths", "flat_row_view",
)  # fmt: skip

MOST_ENTRIES = {"cpu": 2**23, "cuda": 2**29}
"""T * K of the largest shape, by device type."""
MOST_EAGER_ENTRIES = 2**24
"""The same on an accelerator for what is made of eager tensor operations."""
SECONDS = {("cpu", True): 12.0, ("cpu", False): 240.0, ("cuda", True): 40.0, ("cuda", False): 240.0}
"""After how long no new shape is begun, by device type and `quick`."""


@dataclass(frozen=True)
class Plan:
    """What to measure. What is None takes the default of the device and of `quick`.

    Args:
        operations: names from `contenders.OPERATIONS`.
        backends: names; by default every backend that can run on the device.
        rows, topk: T and K; every pair of them is measured.
        dcp: numbers of ranks for `dcp_filter`, each at least 2.
        valid: share of a uniform batch's entries that are not -1, above 0 and at most 1. None with
            a trace: there a row has as many as it may see, and the record's rows tell the share.
        dtype: of selection, block table, request ids and slots.
        device: where.
        trace: a serving trace in JSON lines instead of uniform batches; T then is the size of the
            decode steps, of `REQUESTS` requests at most.
        mtp: drafted tokens: a request has `1 + mtp` rows in a decode step of a trace.
        quick: fewer shapes, operations and repeats.
        seconds: after how long no new shape is begun.
        seed: of the inputs.

    Raises:
        ConfigError: a value out of its range.
        UnknownBackend: a name that no backend has.
    """

    operations: tuple[str, ...] | None = None
    backends: tuple[str, ...] | None = None
    rows: tuple[int, ...] | None = None
    topk: tuple[int, ...] | None = None
    dcp: tuple[int, ...] | None = None
    valid: float | None = None
    dtype: torch.dtype = torch.int32
    device: torch.device = CPU
    trace: Path | None = None
    mtp: int = 1
    quick: bool = False
    seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        kind = self.device.type
        if kind not in MOST_ENTRIES:
            raise ConfigError(f"device must be one of {', '.join(MOST_ENTRIES)}, got {kind}")
        defaults = {
            "operations": QUICK_OPERATIONS if self.quick else tuple(OPERATIONS),
            "rows": self._default_rows(),
            "topk": TOPK[:1] if self.quick else TOPK,
            "dcp": DCP[-1:] if self.quick else DCP,
            "seconds": SECONDS[kind, self.quick],
            "valid": VALID if self.trace is None else None,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if kind == "cuda" and self.device.index is None:
            object.__setattr__(self, "device", torch.device("cuda", 0))
        self._check()

    def _default_rows(self) -> tuple[int, ...]:
        if self.trace is None:
            return QUICK_ROWS[self.device.type] if self.quick else ROWS
        return tuple(size * (1 + self.mtp) for size in (QUICK_STEPS if self.quick else STEPS))

    def _check(self) -> None:
        if self.mtp < 0:  # first: the default rows follow from it
            raise ConfigError(f"mtp must be at least 0, got {self.mtp}")
        for name in self.operations or ():
            if name not in OPERATIONS:
                raise ConfigError(f"op must be one of {', '.join(OPERATIONS)}, got {name}")
        for name, least in (("rows", 1), ("topk", 1), ("dcp", 2)):
            for value in getattr(self, name):
                if value < least:
                    raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.valid is not None and self.trace is not None:
            raise ConfigError(f"valid must be None with a trace, got {self.valid}")
        if self.valid is not None and not 0 < self.valid <= 1:
            raise ConfigError(f"valid must be above 0 and at most 1, got {self.valid}")
        try:
            index_dtype(self.dtype, "dtype")
            for ranks in self.dcp or ():
                Dcp(ranks, 0)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        if self.backends is not None:
            check_names(self.backends)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        trace = None if self.trace is None else self.trace.name
        found = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        return found | {"dtype": dtype_name(self.dtype), "device": str(self.device), "trace": trace}


@dataclass(frozen=True)
class Contender:
    """One operation by one provider, for a number of DCP ranks."""

    operation: Operation
    provider: str
    dcp: int

    def __str__(self) -> str:
        ranks = f" of {self.dcp} ranks" if self.dcp > 1 else ""
        return f"{self.operation.name}{ranks} on {self.provider}"


def dtype_name(dtype: torch.dtype) -> str:
    """`int32` of `torch.int32`."""
    return str(dtype).removeprefix("torch.")


def usable_backends(plan: Plan) -> tuple[str, ...]:
    """The backends that were named, which must run, or all that can; starts the device.

    Raises:
        BackendUnavailable: one that was named cannot run, or none can.
    """
    if plan.backends is None:
        rows = explain("remap", device=plan.device, probe=True).rows
        able = tuple(row.name for row in rows if row.accepted)
        if not able:
            reasons = {row.name: row.reason for row in rows}
            told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise BackendUnavailable(f"no backend can run on {plan.device}: {told}", reasons)
        return able
    for name in plan.backends:
        answer = explain("remap", device=plan.device, backend=name, probe=True)
        row = next(row for row in answer.rows if row.name == name)
        if not row.accepted:
            raise BackendUnavailable(f"{name} cannot run on {plan.device}: {row.reason}")
    return plan.backends


def contenders(plan: Plan, backends: tuple[str, ...], *, on_device: bool) -> Iterator[Contender]:
    """Who is measured; without those that have no time on the device if that is asked for."""
    for name in plan.operations or ():
        operation = OPERATIONS[name]
        if on_device and not operation.on_device:
            continue
        composed = (COMPOSITION,) if name in COMPOSED and "torch" in backends else ()
        for dcp in operation.ranks(plan.dcp or ()):
            for provider in (*backends, *composed):
                yield Contender(operation, provider, dcp)


def eager(provider: str) -> bool:
    """Whether the provider is made of eager tensor operations: many kernels, and temporaries."""
    return provider in ("torch", COMPOSITION)


def too_large(plan: Plan, rows: int, topk: int) -> str | None:
    """Why a shape is left out, or None."""
    entries = rows * topk
    most = MOST_ENTRIES[plan.device.type]
    if entries > most:
        return f"T * K is {entries}, and at most {most} is measured on {plan.device.type}"
    if plan.device.type == "cuda":
        # Selection and slots, the temporaries of making them, and the slots to compare with.
        needed = 6 * entries * plan.dtype.itemsize
        free = torch.cuda.mem_get_info(plan.device)[0]
        if needed > free:
            return f"it takes about {needed >> 20} MiB, and {free >> 20} are free"
    return None
