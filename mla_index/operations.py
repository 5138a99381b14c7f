"""The public operations: check, allocate, launch.

What a configuration fixes is checked and selected once and kept as a plan; a call then looks its
plan up, checks what may differ from call to call (shapes, strides, devices, overlaps, scalars) and
launches. `docs/operations.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mla_index import checks, selector, views
from mla_index.selector import Names
from mla_index.specs import (
    DTYPE_MAX,
    INT32_MAX,
    Dcp,
    PrefillWorkspace,
    RemapSpec,
    SafeLengthsSpec,
    Spec,
    index_dtype,
    integer,
)
from mla_index.views import FlatRows


class Remapped(NamedTuple):
    """Result of `remap` and `dcp_filter`.

    Args:
        slots: `[T, K]`, rows of the flat cache, `pad` where there is none.
        counts: int32 `[T]`, valid entries of each row, or None when not asked for.
        lengths: int32 `[T]`, `max(counts, 1)`, or None when not asked for.
    """

    slots: Tensor
    counts: Tensor | None
    lengths: Tensor | None


class _Plan:
    """What a configuration fixes. The kernel is resolved by the first call that has work."""

    __slots__ = ("backend", "counts", "device", "launch", "lengths", "op", "slot_dtype", "spec")

    def __init__(
        self, op: str, spec: RemapSpec | SafeLengthsSpec, device: torch.device, backend: Names
    ) -> None:
        selector.check_names(backend)
        self.op = op
        self.spec: Spec = spec
        self.device = device
        self.backend = backend
        self.launch: Callable[..., object] | None = None
        self.slot_dtype = spec.slot_dtype
        self.counts = isinstance(spec, RemapSpec) and spec.counts
        self.lengths = isinstance(spec, RemapSpec) and spec.safe_lengths

    def resolve(self) -> Callable[..., object]:
        self.launch = selector.choose(self.op, self.spec, self.device, self.backend).kernel.launch
        return self.launch


_plans: dict[tuple[object, ...], _Plan] = {}
selector.on_change(_plans.clear)

# Constants to a compiler, which so sees one branch only. `is_compiling` is no answer: it is true in
# every thread while one of them compiles.
_compiling, _exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting


def _traced() -> ModuleType:
    """The operations as a compiler traces them; an eager call never imports them."""
    from mla_index import torch_library

    return torch_library


def remap(
    req_id: Tensor | None,
    block_table: Tensor,
    token_indices: Tensor,
    *,
    block_size: int,
    block_stride_rows: int | None = None,
    request_rows: Tensor | None = None,
    token_limits: Tensor | None = None,
    workspace: PrefillWorkspace | None = None,
    dcp: Dcp | None = None,
    num_slots: int | None = None,
    compact: bool = False,
    counts: bool = False,
    safe_lengths: bool = False,
    pad: int = -1,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    counts_out: Tensor | None = None,
    lengths_out: Tensor | None = None,
    backend: Names = "auto",
) -> Remapped:
    """Turn the token numbers that each query row selected into rows (slots) of the flat cache.

    An entry is valid if its token is not negative, below its row's limit, this rank's (under
    `dcp`), in an allocated block within the table, and its slot within the bounds; every other
    entry becomes `pad`. Inputs are int32 or int64, each on its own, with any strides; no value in
    them can make the call read or write out of bounds. Nothing waits for the device.

    Args:
        req_id: `[T]`, the request of each row; None: row `t` is request `t`. A request outside
            the table (a padding row's -1 or stale id) makes its whole row invalid.
        block_table: `[R, W]`, block numbers; negative: not allocated.
        token_indices: `[T, K]`, request-local token numbers; negative: nothing.
        block_size: tokens in a block, at least 1.
        block_stride_rows: rows of the flat cache from one block to the next, at least
            `block_size` (the default); more when other layers' pages lie between.
        request_rows: `[n]`, maps a request id to its row of the table.
        token_limits: `[T]`; tokens at or beyond a row's limit are invalid.
        workspace: rows that read the gathered prefill workspace instead of the paged cache.
        dcp: this rank's share under decode context parallelism.
        num_slots: rows of the flat cache; a slot at or beyond it is invalid.
        compact: put the valid slots of a row first, in the order in which they came.
        counts: return the number of valid entries of each row.
        safe_lengths: return `max(counts, 1)` and give an empty row the dummy slot 0 in column 0,
            so that attention never sees an empty row. Needs `compact`; switches `counts` on.
        pad: what stands for "nothing here".
        out_dtype: dtype of the slots; by default that of `out`, else of `token_indices`.
        out: `[T, K]`, last stride 1; may be `token_indices` itself when not compact.
        counts_out: int32 `[T]`, any stride but 0; giving it switches `counts` on.
        lengths_out: int32 `[T]`, any stride but 0; giving it switches `safe_lengths` on.
        backend: a name, an ordered list of names, or `auto`.

    Returns:
        `Remapped(slots, counts, lengths)`; a given output is returned as itself.

    Raises:
        ValueError, TypeError: a bad argument, before anything is launched or written.
        BackendUnavailable, BackendUnsupported, UnknownBackend: no backend can serve the call.
        NotWarm: a first use inside a CUDA graph capture.
    """
    run = _traced().remap if _compiling() or _exporting() else _remap
    return run(
        "remap", req_id, block_table, token_indices, block_size, block_stride_rows, request_rows,
        token_limits, workspace, dcp, num_slots, compact, counts, safe_lengths, pad, out_dtype,
        out, counts_out, lengths_out, backend,
    )  # fmt: skip


def dcp_filter(
    req_id: Tensor | None,
    block_table: Tensor,
    token_indices: Tensor,
    dcp: Dcp,
    *,
    block_size: int,
    block_stride_rows: int | None = None,
    request_rows: Tensor | None = None,
    token_limits: Tensor | None = None,
    workspace: PrefillWorkspace | None = None,
    num_slots: int | None = None,
    compact: bool = True,
    counts: bool = True,
    safe_lengths: bool = False,
    pad: int = -1,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    counts_out: Tensor | None = None,
    lengths_out: Tensor | None = None,
    backend: Names = "auto",
) -> Remapped:
    """This rank's share of a global selection: `remap` under `dcp`, compacted and counted.

    For paged rows, with each rank's own `block_table` covering its share of each request, the valid
    sets of all ranks partition the valid global selection, and each keeps the row's order.

    Args, returns, raises: as `remap`.
    """
    if dcp is None:
        raise TypeError("dcp must be a mla_index.Dcp, got NoneType")
    run = _traced().remap if _compiling() or _exporting() else _remap
    return run(
        "dcp_filter", req_id, block_table, token_indices, block_size, block_stride_rows,
        request_rows, token_limits, workspace, dcp, num_slots, compact, counts, safe_lengths, pad,
        out_dtype, out, counts_out, lengths_out, backend,
    )  # fmt: skip


def _remap(
    op: str,
    req_id: Tensor | None,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    block_stride_rows: int | None,
    request_rows: Tensor | None,
    token_limits: Tensor | None,
    workspace: PrefillWorkspace | None,
    dcp: Dcp | None,
    num_slots: int | None,
    compact: bool,
    counts: bool,
    safe_lengths: bool,
    pad: int,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    counts_out: Tensor | None,
    lengths_out: Tensor | None,
    backend: Names,
) -> Remapped:
    # An equal number of another type (True, 64.0) must not find the plan of the right one.
    if type(block_size) is not int:
        block_size = integer(block_size, "block_size")
    if not (type(compact) is bool and type(counts) is bool and type(safe_lengths) is bool):
        checks.flag(compact, "compact")
        checks.flag(counts, "counts")
        checks.flag(safe_lengths, "safe_lengths")
    if type(backend) is not str:
        backend = selector.names(backend)
    key: tuple[object, ...] | None
    try:
        rows, topk = token_indices.shape
        device = token_indices.device
        key = (
            op, backend, selector.override(), device, block_size, topk and (topk - 1).bit_length(),
            token_indices.dtype, block_table.dtype, out_dtype, compact, counts, safe_lengths,
            None if req_id is None else req_id.dtype,
            None if request_rows is None else request_rows.dtype,
            None if token_limits is None else token_limits.dtype,
            None if workspace is None else (
                type(workspace), workspace.request_ids.dtype, workspace.starts.dtype
            ),
            None if dcp is None else (type(dcp), dcp.size, dcp.interleave),
            None if out is None else out.dtype,
            None if counts_out is None else counts_out.dtype,
            None if lengths_out is None else lengths_out.dtype,
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError, ValueError):
        key = plan = None  # an argument is not what it should be: the plan's checks say which
    if plan is None:
        spec = remap_spec(
            req_id, block_table, token_indices, block_size, request_rows, token_limits, workspace,
            dcp, compact, counts, safe_lengths, out_dtype, out, counts_out, lengths_out,
        )  # fmt: skip
        plan = _Plan(op, spec, token_indices.device, backend)
        if key is not None:
            _plans[key] = plan

    # --- what may differ from call to call ---
    ws_request_ids = ws_starts = None
    if workspace is not None:
        ws_request_ids, ws_starts = workspace.request_ids, workspace.starts
    inputs = (
        token_indices, block_table, req_id, request_rows, token_limits, ws_request_ids, ws_starts
    )  # fmt: skip
    outputs = (out, counts_out, lengths_out)
    try:
        fits = checks.remap_fits(inputs, outputs, rows, topk, device)
    except RuntimeError:  # a tensor without strides: a closer look says which
        fits = False
    if not fits:
        checks.remap_tensors(inputs, outputs, in_place=not compact)
    slot_dtype = plan.slot_dtype
    if block_stride_rows is None:
        block_stride_rows = block_size
    elif type(block_stride_rows) is not int or not block_size <= block_stride_rows <= INT32_MAX:
        block_stride_rows = checks.block_stride(block_stride_rows, block_size)
    if type(pad) is not int or pad != -1:
        pad = checks.pad_value(pad, slot_dtype)
    last_slot = last_ws_row = DTYPE_MAX[slot_dtype]
    if num_slots is not None:
        last_slot = checks.last_row(num_slots, "num_slots", slot_dtype)
    rank_stride = 0
    if workspace is not None:
        rank_stride = checks.rank_stride(workspace.rank_stride, 1 if dcp is None else dcp.size)
        if workspace.num_rows is not None:
            last_ws_row = checks.last_row(workspace.num_rows, "workspace.num_rows", slot_dtype)
    if plan.lengths and topk == 0 and rows:
        raise ValueError(
            f"safe_lengths needs at least one column for the dummy slot, got token_indices of "
            f"shape {(rows, topk)}"
        )

    if out is None:
        out = torch.empty((rows, topk), dtype=slot_dtype, device=device)
    if counts_out is None and plan.counts:
        counts_out = torch.empty((rows,), dtype=torch.int32, device=device)
    if lengths_out is None and plan.lengths:
        lengths_out = torch.empty((rows,), dtype=torch.int32, device=device)
    if rows == 0 or topk == 0:
        if counts_out is not None:
            counts_out.zero_()
        return Remapped(out, counts_out, lengths_out)

    launch = plan.launch or plan.resolve()
    try:
        launch(
            req_id, block_table, token_indices, out, counts_out, lengths_out, request_rows,
            token_limits, ws_request_ids, ws_starts, 0 if dcp is None else dcp.rank,
            block_stride_rows, rank_stride, last_slot, last_ws_row, pad,
        )  # fmt: skip
    except RuntimeError:  # a layout without strides may have passed the quick checks: look closer
        checks.remap_tensors(inputs, outputs, in_place=not compact)
        raise
    return Remapped(out, counts_out, lengths_out)


def remap_spec(
    req_id: Tensor | None,
    block_table: Tensor,
    token_indices: Tensor,
    block_size: int,
    request_rows: Tensor | None,
    token_limits: Tensor | None,
    workspace: PrefillWorkspace | None,
    dcp: Dcp | None,
    compact: bool,
    counts: bool,
    safe_lengths: bool,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    counts_out: Tensor | None,
    lengths_out: Tensor | None,
    topk: int | None = None,
) -> RemapSpec:
    """Check what the configuration fixes: types, dtypes and the parameters of the kernel."""
    checks.index_tensor(block_table, "block_table")
    checks.index_tensor(token_indices, "token_indices")
    checks.dimensions(token_indices, 2, "token_indices", "[T, K]")
    for name, tensor in (
        ("req_id", req_id),
        ("request_rows", request_rows),
        ("token_limits", token_limits),
    ):
        if tensor is not None:
            checks.index_tensor(tensor, name)
    if workspace is not None:
        if not isinstance(workspace, PrefillWorkspace):
            raise TypeError(
                f"workspace must be a mla_index.PrefillWorkspace, got {type(workspace).__name__}"
            )
        checks.index_tensor(workspace.request_ids, "workspace.request_ids")
        checks.index_tensor(workspace.starts, "workspace.starts")
    if dcp is not None and not isinstance(dcp, Dcp):
        raise TypeError(f"dcp must be a mla_index.Dcp, got {type(dcp).__name__}")
    for name, tensor in (("counts_out", counts_out), ("lengths_out", lengths_out)):
        if tensor is not None:
            checks.output_dtype(tensor, name, torch.int32)
    if lengths_out is not None and not compact:
        raise ValueError("lengths_out asks for safe_lengths, which needs compact=True")
    return RemapSpec(
        block_size=block_size,
        topk=token_indices.shape[1] if topk is None else topk,
        token_dtype=token_indices.dtype,
        table_dtype=block_table.dtype,
        slot_dtype=_slot_dtype(token_indices, out, out_dtype),
        dcp_size=1 if dcp is None else dcp.size,
        dcp_interleave=1 if dcp is None else dcp.interleave,
        compact=compact,
        counts=counts or counts_out is not None,
        safe_lengths=safe_lengths or lengths_out is not None,
        req_id=req_id is not None,
        request_rows=request_rows is not None,
        token_limits=token_limits is not None,
        workspace=workspace is not None,
    )


def _slot_dtype(
    token_indices: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    if out_dtype is not None:
        index_dtype(out_dtype, "out_dtype")
    if out is None:
        return token_indices.dtype if out_dtype is None else out_dtype
    checks.index_tensor(out, "out")
    if out_dtype not in (None, out.dtype):
        raise TypeError(f"out_dtype and out must agree, got {out_dtype} and out of {out.dtype}")
    return out.dtype


def safe_lengths(
    slots: Tensor, counts: Tensor, *, out: Tensor | None = None, backend: Names = "auto"
) -> Tensor:
    """Lengths that attention can take: `max(counts, 1)`, with a dummy slot in empty rows.

    Where `counts <= 0`, `slots[t, 0]` becomes 0 in place, so that an empty row reads one row that
    exists. `counts` keeps the raw number: neutralise the empty row's output by it.

    Args:
        slots: int32 or int64 `[T, K]`, any strides but expanded; changed in place.
        counts: int32 or int64 `[T]`, any strides.
        out: `[T]` in counts' dtype, any stride but 0.
        backend: a name, an ordered list of names, or `auto`.

    Returns:
        The lengths `[T]`, in counts' dtype; `out` if given.

    Raises:
        ValueError, TypeError: a bad argument, before anything is launched or written.
        BackendUnavailable, BackendUnsupported, UnknownBackend: no backend can serve the call.
        NotWarm: a first use inside a CUDA graph capture.
    """
    if _compiling() or _exporting():
        return _traced().safe_lengths(slots, counts, out, backend)  # type: ignore[no-any-return]
    if type(backend) is not str:
        backend = selector.names(backend)
    key: tuple[object, ...] | None
    try:
        key = (
            "safe_lengths", backend, selector.override(), slots.device, slots.dtype, counts.dtype,
            None if out is None else out.dtype,
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        key = plan = None  # an argument is not what it should be: the plan's checks say which
    if plan is None:
        plan = _plan_safe_lengths(slots, counts, out, backend)
        if key is not None:
            _plans[key] = plan
    try:
        fits = checks.safe_lengths_fit(slots, counts, out)
    except RuntimeError:  # a tensor without strides: a closer look says which
        fits = False
    if not fits:
        checks.safe_lengths_tensors(slots, counts, out)
    if out is None:
        out = torch.empty(counts.shape, dtype=counts.dtype, device=slots.device)
    if slots.shape[0]:
        (plan.launch or plan.resolve())(slots, counts, out)
    return out


def _plan_safe_lengths(slots: Tensor, counts: Tensor, out: Tensor | None, backend: Names) -> _Plan:
    checks.index_tensor(slots, "slots")
    checks.index_tensor(counts, "counts")
    if out is not None:
        checks.output_dtype(out, "out", counts.dtype)
    spec = SafeLengthsSpec(slots.dtype, counts.dtype)
    return _Plan("safe_lengths", spec, slots.device, backend)


def flat_row_view(kv_cache: Tensor, block_size: int, *, backend: Names = "auto") -> FlatRows:
    """The paged cache as rows `[num_rows, head_dim]`: a view, never a copy.

    Row `b * block_stride_rows + i` is token `i` of block `b`; pages of other layers between the
    blocks are rows that no slot names. Of the last block the view holds only the first `block_size`
    rows. The storage offset is kept.

    Args:
        kv_cache: `[num_blocks, rows_per_block, head_dim]`, any dtype, rows dense.
        block_size: rows of a block that hold tokens, in `[1, rows_per_block]`.
        backend: as for `remap`; a backend without a view of its own is served by torch's.

    Returns:
        `FlatRows(rows, block_stride_rows)`.

    Raises:
        ValueError, TypeError: the cache has no flat row view; the message has the numbers.
        UnknownBackend: the argument names no backend. No setting makes the view fail.
    """
    size = checks.dense_rows(kv_cache, block_size)
    if _compiling() or _exporting():
        return _traced().flat_row_view(kv_cache, size, backend)  # type: ignore[no-any-return]
    if selector.names(backend) != ("auto",):
        launch = selector.choose("flat_row_view", None, kv_cache.device, backend).kernel.launch
        return launch(kv_cache, size)  # type: ignore[return-value]
    try:
        launch = selector.choose("flat_row_view", None, kv_cache.device, "auto").kernel.launch
    except Exception:  # whatever a setting leads to, it must not stand in the way of a view
        launch = views.flat_row_view
    return launch(kv_cache, size)  # type: ignore[return-value]
