"""A backend in plain Python over the launch contract, made of steps that a fault can replace.

It works on memory as a kernel does: by address, from the start and the strides of each tensor. An
address outside the storage reads as 1, as a wild read would give some plausible number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mla_index.registry import CONTRACT_VERSION, LAUNCH_PARAMETERS, Kernel, Limits
from mla_index.specs import RemapSpec, Spec
from mla_index.views import flat_row_view

LIMITS = Limits(("remap", "safe_lengths", "flat_row_view"), ("cpu",))
WILD = 1
SMALL = 10_000_000


class Memory:
    """The storages of one launch, as lists while they are small, else element by element."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[Tensor, list[int] | None]] = {}

    def _storage(self, tensor: Tensor) -> tuple[Tensor, list[int] | None]:
        start = tensor.untyped_storage().data_ptr()
        if start not in self.storages:
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            flat = tensor.as_strided((count,), (1,), 0)
            self.storages[start] = (flat, flat.tolist() if count <= SMALL else None)
        return self.storages[start]

    def read(self, tensor: Tensor, offset: int) -> int:
        flat, values = self._storage(tensor)
        at = tensor.storage_offset() + offset
        if not 0 <= at < len(flat):
            return WILD
        return int(flat[at]) if values is None else values[at]

    def write(self, tensor: Tensor, offset: int, value: int) -> None:
        flat, values = self._storage(tensor)
        at = tensor.storage_offset() + offset
        if not 0 <= at < len(flat):
            return
        if values is None:
            flat[at] = value
        else:
            values[at] = value

    def flush(self) -> None:
        for flat, values in self.storages.values():
            if values is not None:
                flat.copy_(torch.tensor(values, dtype=flat.dtype))


@dataclass
class Launch:
    """The arguments of one launch of `remap`, by name, and the memory they point into."""

    spec: RemapSpec
    a: dict[str, object]
    memory: Memory = field(default_factory=Memory)

    def __getattr__(self, name: str) -> object:
        return self.a[name]

    def read(self, name: str, offset: int) -> int:
        tensor = self.a[name]
        assert isinstance(tensor, Tensor)
        return self.memory.read(tensor, offset)


# --- the steps, right ---------------------------------------------------------------------------


def offset_1d(tensor: Tensor, t: int) -> int:
    return t * tensor.stride(0)


def offset_2d(tensor: Tensor, t: int, k: int) -> int:
    return t * tensor.stride(0) + k * tensor.stride(1)


def share(tok: int, size: int, interleave: int) -> tuple[int, int]:
    local = tok // (size * interleave) * interleave + tok % interleave
    return tok // interleave % size, local


def table_row(x: Launch, s: Steps, t: int) -> int | None:
    """The row of the table, or None."""
    r = s.implied_id(t) if x.req_id is None else x.read("req_id", s.id_offset(x.req_id, t))
    if x.request_rows is not None:
        if not s.request_ok(r, x.request_rows.shape[0]):
            return None
        r = x.read("request_rows", offset_1d(x.request_rows, r))
    return r if s.row_ok(r, x.block_table.shape[0]) else None


def paged_slot(x: Launch, s: Steps, t: int, owner: int, block: int, offset: int) -> int | None:
    if not s.owned(owner, x.rank):
        return None
    r = table_row(x, s, t)
    if r is None:
        return None
    b = x.read("block_table", s.table_offset(x.block_table, r, block))
    if not s.allocated(b):
        return None
    return s.fit(s.product(b, s.stride(x)) + offset, s.last_slot(x), x.spec.slot_dtype)


def gathered_slot(x: Launch, s: Steps, p: int, owner: int, local: int) -> int | None:
    if not s.workspace_id_ok(p, x.ws_starts.shape[0]) or not s.gathers(owner, x.rank):
        return None
    start = x.read("ws_starts", offset_1d(x.ws_starts, p))
    slot = owner * s.rank_stride(x) + start + local
    return s.fit(slot, s.last_ws_row(x), x.spec.slot_dtype)


def fit(slot: int, last: int, dtype: torch.dtype) -> int | None:
    return slot if 0 <= slot <= last else None


def limited(x: Launch, t: int, tok: int) -> bool:
    limits = x.token_limits
    return limits is not None and tok >= x.read("token_limits", offset_1d(limits, t))


def workspace_id(x: Launch, t: int) -> int:
    """The row's entry in the workspace, negative for a paged row."""
    ids = x.ws_request_ids
    return -1 if ids is None else x.read("ws_request_ids", offset_1d(ids, t))


def entry(x: Launch, s: Steps, t: int, k: int) -> int | None:
    """The slot of one entry, or None."""
    tok = s.token(x.read("token_indices", s.token_offset(x.token_indices, t, k)))
    if not s.token_ok(tok) or s.limited(x, t, tok):
        return None
    owner, local = s.share(tok, x.spec.dcp_size, x.spec.dcp_interleave)
    block = s.divide(local, x.spec.block_size)
    offset = local - block * x.spec.block_size
    if not s.block_ok(block, x.block_table.shape[1]):
        return None
    p = s.workspace_id(x, t)
    if p >= 0:
        return gathered_slot(x, s, p, owner, local)
    return paged_slot(x, s, t, owner, block, offset)


def compacted(slots: list[int | None], pad: int) -> list[int]:
    valid = [slot for slot in slots if slot is not None]
    return valid + [pad] * (len(slots) - len(valid))


def count(x: Launch, t: int, slots: list[int | None]) -> int:
    return sum(slot is not None for slot in slots)


def dummy(row: list[int], pad: int) -> None:
    row[0] = 0


def store(x: Launch, s: Steps, t: int, row: list[int]) -> None:
    for k, slot in enumerate(row):
        if s.column_done(k, len(row)):
            x.memory.write(x.out, s.out_offset(x.out, t, k), slot)


def nothing(x: Launch) -> None:
    """What a fault does before or after everything else."""


def safe_row(count: int) -> bool:
    return count <= 0


@dataclass(frozen=True)
class Steps:
    """The steps of the reference; a fault replaces one or two."""

    token: Callable = lambda tok: tok
    token_ok: Callable = lambda tok: tok >= 0
    limited: Callable = limited
    share: Callable = share
    divide: Callable = lambda number, by: number // by
    block_ok: Callable = lambda block, width: block < width
    workspace_id: Callable = workspace_id
    workspace_id_ok: Callable = lambda p, starts: p < starts
    gathers: Callable = lambda owner, rank: True
    rank_stride: Callable = lambda x: x.rank_stride
    owned: Callable = lambda owner, rank: owner == rank
    implied_id: Callable = lambda t: t
    request_ok: Callable = lambda r, count: 0 <= r < count
    row_ok: Callable = lambda r, rows: 0 <= r < rows
    allocated: Callable = lambda b: b >= 0
    product: Callable = lambda b, stride: b * stride
    stride: Callable = lambda x: x.block_stride_rows
    fit: Callable = fit
    last_slot: Callable = lambda x: x.last_slot
    last_ws_row: Callable = lambda x: x.last_ws_row
    pad: Callable = lambda x: x.pad
    compacted: Callable = compacted
    count: Callable = count
    dummy: Callable = dummy
    stored_count: Callable = lambda count, safe: count
    length: Callable = lambda count: max(count, 1)
    id_offset: Callable = offset_1d
    token_offset: Callable = offset_2d
    table_offset: Callable = offset_2d
    out_offset: Callable = offset_2d
    count_offset: Callable = offset_1d
    column_done: Callable = lambda k, topk: True
    row_done: Callable = lambda t, rows: True
    store: Callable = store
    after: Callable = nothing
    safe_row: Callable = safe_row
    safe_column: Callable = lambda topk: 0
    safe_count: Callable = lambda count: count


def remap(steps: Steps, spec: RemapSpec, *arguments: object) -> None:
    x = Launch(spec, dict(zip(LAUNCH_PARAMETERS["remap"], arguments, strict=True)))
    rows, topk = x.token_indices.shape
    for t in range(rows):
        if not steps.row_done(t, rows):
            continue
        slots = [entry(x, steps, t, k) for k in range(topk)]
        pad = steps.pad(x)
        if spec.compact:
            row = steps.compacted(slots, pad)
        else:
            row = [pad if slot is None else slot for slot in slots]
        number = steps.count(x, t, slots)
        if spec.safe_lengths and number == 0:
            steps.dummy(row, pad)
        steps.store(x, steps, t, row)
        if x.counts is not None:
            stored = steps.stored_count(number, spec.safe_lengths)
            x.memory.write(x.counts, steps.count_offset(x.counts, t), stored)
        if x.lengths is not None:
            x.memory.write(x.lengths, offset_1d(x.lengths, t), steps.length(number))
    steps.after(x)
    x.memory.flush()


def safe_lengths(steps: Steps, slots: Tensor, counts: Tensor, lengths: Tensor) -> None:
    memory = Memory()
    for t in range(slots.shape[0]):
        at = steps.count_offset(counts, t)
        number = memory.read(counts, at)
        memory.write(lengths, offset_1d(lengths, t), max(number, 1))
        memory.write(counts, at, steps.safe_count(number))
        if steps.safe_row(number):
            memory.write(slots, offset_2d(slots, t, steps.safe_column(slots.shape[1])), 0)
    memory.flush()


@dataclass(frozen=True)
class ReferenceBackend:
    """The reference, whole or with a fault in its steps."""

    name: str
    steps: Steps = Steps()
    contract_version: int = CONTRACT_VERSION
    limits: Limits = LIMITS

    def unavailable(self, device: torch.device, *, probe: bool) -> str | None:
        return None

    def unsupported(self, op: str, spec: Spec) -> str | None:
        return None

    def build(self, op: str, spec: Spec, device: torch.device) -> Kernel:
        if isinstance(spec, RemapSpec):
            return Kernel(partial(remap, self.steps, spec))
        return Kernel(partial(safe_lengths, self.steps) if op == "safe_lengths" else flat_row_view)
