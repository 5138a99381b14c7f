"""`torch.ops.mla_index.*`: the operations as a compiler sees them.

A compiler cannot look into a kernel, a cache of plans or a context variable. So while it traces,
`operations.py` hands a call over to the functions here, which the compiler traces instead. They
check what the trace fixes, allocate the results in the open, and then either

- call one operator that writes them: opaque to the compiler, with the checks of every call and the
  choice of the backend made when it runs, so that `use_backend` and the settings hold; or
- where nothing but torch can be chosen, run its tensor operations in the open, to be fused.

Importing this module registers the operators, which a program saved by `torch.export` needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_index import checks, operations, selector, views
from mla_index.backends.torch import kernels
from mla_index.errors import UnknownBackend
from mla_index.operations import Remapped
from mla_index.selector import Names
from mla_index.specs import Dcp, PrefillWorkspace, RemapSpec, SafeLengthsSpec
from mla_index.views import FlatRows

_REMAP = (
    "(Tensor? req_id, Tensor block_table, Tensor token_indices, Tensor(a!) out, "
    "Tensor(b!)? counts, Tensor(c!)? lengths, Tensor? request_rows, Tensor? token_limits, "
    "Tensor? ws_request_ids, Tensor? ws_starts, *, int block_size, SymInt block_stride_rows, "
    "int dcp_size, SymInt dcp_rank, int dcp_interleave, SymInt rank_stride, SymInt? num_slots, "
    "SymInt? ws_rows, SymInt pad, bool compact, str[] backend) -> ()"
)
SCHEMAS = {
    "remap": _REMAP,
    "dcp_filter": _REMAP,
    "safe_lengths": "(Tensor(a!) slots, Tensor counts, Tensor(b!) lengths, *, str[] backend) -> ()",
}
"""The operators. Each writes results that its caller has allocated; None: not asked for."""


# --- what runs inside a compiled graph ----------------------------------------------------------


def _run_remap(op: str) -> Callable[..., None]:
    def run(
        req_id: Tensor | None,
        block_table: Tensor,
        token_indices: Tensor,
        out: Tensor,
        counts: Tensor | None,
        lengths: Tensor | None,
        request_rows: Tensor | None,
        token_limits: Tensor | None,
        ws_request_ids: Tensor | None,
        ws_starts: Tensor | None,
        *,
        block_size: int,
        block_stride_rows: int,
        dcp_size: int,
        dcp_rank: int,
        dcp_interleave: int,
        rank_stride: int,
        num_slots: int | None,
        ws_rows: int | None,
        pad: int,
        compact: bool,
        backend: list[str],
    ) -> None:
        workspace = None
        if ws_request_ids is not None and ws_starts is not None:
            workspace = PrefillWorkspace(ws_request_ids, ws_starts, rank_stride, ws_rows)
        operations._remap(
            op, req_id, block_table, token_indices, block_size, block_stride_rows, request_rows,
            token_limits, workspace, Dcp(dcp_size, dcp_rank, dcp_interleave), num_slots, compact,
            counts is not None, lengths is not None, pad, None, out, counts, lengths, backend,
        )  # fmt: skip

    return run


def _run_safe_lengths(
    slots: Tensor, counts: Tensor, lengths: Tensor, *, backend: list[str]
) -> None:
    checks.safe_lengths_tensors(slots, counts, lengths)
    spec = SafeLengthsSpec(slots.dtype, counts.dtype)
    choice = selector.choose("safe_lengths", spec, slots.device, backend)
    if slots.shape[0]:
        choice.kernel.launch(slots, counts, lengths)


_IMPLEMENTATIONS: dict[str, Callable[..., None]] = {
    "remap": _run_remap("remap"),
    "dcp_filter": _run_remap("dcp_filter"),
    "safe_lengths": _run_safe_lengths,
}


def _nothing(*tensors: object, **parameters: object) -> None:
    """On tensors without data: the results are there already, with their shapes."""


_library = torch.library.Library("mla_index", "DEF")  # type: ignore[no-untyped-call]
# The strides of a given output are part of the contract: no other layout may be chosen for it.
_tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
for _op, _schema in SCHEMAS.items():
    _library.define(_op + _schema, tags=_tags)  # type: ignore[no-untyped-call]
    _library.impl(_op, _IMPLEMENTATIONS[_op], "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mla_index::{_op}", _nothing, lib=_library)


# --- what a compiler traces ---------------------------------------------------------------------


def remap(
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
    """`remap` and `dcp_filter` while compiling; arguments as `operations._remap`."""
    for name, flag in (("compact", compact), ("counts", counts), ("safe_lengths", safe_lengths)):
        checks.flag(flag, name)
    spec = operations.remap_spec(
        req_id, block_table, token_indices, block_size, request_rows, token_limits, workspace, dcp,
        compact, counts, safe_lengths, out_dtype, out, counts_out, lengths_out,
        topk=1,  # a traced width may stand for many; the operator finds its class when it runs
    )  # fmt: skip
    rank, rank_stride, ws_rows, ws_request_ids, ws_starts = 0, 0, None, None, None
    if workspace is not None:
        ws_request_ids, ws_starts = workspace.request_ids, workspace.starts
        rank_stride = checks.rank_stride(workspace.rank_stride, spec.dcp_size)
        ws_rows = workspace.num_rows
    if dcp is not None:
        rank = dcp.rank
    inputs = (
        token_indices, block_table, req_id, request_rows, token_limits, ws_request_ids, ws_starts
    )  # fmt: skip
    given = (out, counts_out, lengths_out)
    _refuse_same(inputs, given, in_place=not compact)
    if block_stride_rows is None:
        block_stride_rows = spec.block_size
    block_stride_rows = checks.block_stride(block_stride_rows, spec.block_size)
    pad = checks.pad_value(pad, spec.slot_dtype)
    last_slot = checks.last_row(num_slots, "num_slots", spec.slot_dtype)
    last_ws_row = checks.last_row(ws_rows, "workspace.num_rows", spec.slot_dtype)
    if _stays_torch(op, token_indices.device, backend):
        checks.remap_shapes(inputs, given)
        fresh = _allocate(spec, token_indices, None, None, None)
        if token_indices.shape[1]:
            kernels.remap(
                spec, req_id, block_table, token_indices, *fresh, request_rows, token_limits,
                ws_request_ids, ws_starts, rank, block_stride_rows, rank_stride, last_slot,
                last_ws_row, pad,
            )  # fmt: skip
        elif fresh.counts is not None:
            fresh.counts.zero_()
        return Remapped(
            _written(out, fresh.slots),
            None if fresh.counts is None else _written(counts_out, fresh.counts),
            None if fresh.lengths is None else _written(lengths_out, fresh.lengths),
        )
    results = _allocate(spec, token_indices, *given)
    getattr(torch.ops.mla_index, op)(
        req_id, block_table, token_indices, *results, request_rows, token_limits, ws_request_ids,
        ws_starts, block_size=spec.block_size, block_stride_rows=block_stride_rows,
        dcp_size=spec.dcp_size, dcp_rank=rank, dcp_interleave=spec.dcp_interleave,
        rank_stride=rank_stride, num_slots=num_slots, ws_rows=ws_rows, pad=pad, compact=compact,
        backend=list(selector.names(backend)),
    )  # fmt: skip
    return results


def safe_lengths(slots: Tensor, counts: Tensor, out: Tensor | None, backend: Names) -> Tensor:
    """`safe_lengths` while compiling."""
    checks.index_tensor(slots, "slots")
    checks.index_tensor(counts, "counts")
    if out is not None:
        checks.output_dtype(out, "out", counts.dtype)
    _refuse_same((counts,), (slots, out), in_place=False)
    if _stays_torch("safe_lengths", slots.device, backend):
        checks.safe_lengths_shapes(slots, counts, out)
        fresh = torch.empty_like(counts, memory_format=torch.contiguous_format)
        if slots.shape[1]:
            kernels.safe_lengths(slots, counts, fresh)
        return fresh if out is None else out.copy_(fresh)
    if out is None:
        out = torch.empty_like(counts, memory_format=torch.contiguous_format)
    torch.ops.mla_index.safe_lengths(slots, counts, out, backend=list(selector.names(backend)))
    return out


def flat_row_view(kv_cache: Tensor, block_size: int, backend: Names) -> FlatRows:
    """`flat_row_view` while compiling: by strides, whichever backend is asked for."""
    fault = _fault(selector.names(backend))
    if fault is not None:
        raise UnknownBackend(fault)
    if _INDUCTOR_KEEPS_OFFSETS:
        return views.flat_row_view(kv_cache, block_size)
    return _flat_row_view_eagerly(kv_cache, block_size)  # type: ignore[no-any-return]


_INDUCTOR_KEEPS_OFFSETS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Seen on 2.11 and 2.12: `as_strided` of a slice made in the same graph reads from the beginning of
what was sliced. A break of the graph gives the right rows, or with `fullgraph` an error."""

_flat_row_view_eagerly = torch.compiler.disable(  # type: ignore[no-untyped-call]
    views.flat_row_view,
    reason="before torch 2.13 inductor may lose the offset of a flat row view: make it outside of "
    "the compiled code",
)


def _stays_torch(op: str, device: torch.device, backend: Names) -> bool:
    """Whether the call is to be traced as torch's tensor operations, instead of as an operator."""
    names = selector.names(backend)
    fault = _fault(names)
    if fault is not None:
        raise UnknownBackend(fault)
    if names != ("auto",):
        return bool(_only_torch(op, device, names))
    torch_only = bool(_only_torch(op, device, names, selector.in_force()))
    return torch_only and not selector.overridden()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _fault(names: tuple[str, ...]) -> str | None:
    """What is wrong with the names asked for, in the argument or in a setting (now read)."""
    try:
        selector.check_names(names)
        selector.in_force()
    except UnknownBackend as error:
        return str(error)
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _only_torch(op: str, device: torch.device, names: tuple[str, ...], *guarded: object) -> bool:
    """`selector.only_torch`, asked once a trace; what is passed on top, the compiler guards."""
    return selector.only_torch(op, device, names)


def _allocate(
    spec: RemapSpec,
    token_indices: Tensor,
    out: Tensor | None,
    counts: Tensor | None,
    lengths: Tensor | None,
) -> Remapped:
    """The results that are asked for: those given, and the others made."""
    rows, device = token_indices.shape[0], token_indices.device
    if out is None:
        out = torch.empty(token_indices.shape, dtype=spec.slot_dtype, device=device)
    if counts is None and spec.counts:
        counts = torch.empty((rows,), dtype=torch.int32, device=device)
    if lengths is None and spec.safe_lengths:
        lengths = torch.empty((rows,), dtype=torch.int32, device=device)
    return Remapped(out, counts, lengths)


def _written(given: Tensor | None, fresh: Tensor) -> Tensor:
    """The result, in the tensor that was given for it, if one was."""
    return fresh if given is None else given.copy_(fresh)


def _refuse_same(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...], in_place: bool
) -> None:
    """Refuse one tensor as input and output; a compiler shows no addresses, to find overlaps by."""
    for number, output in enumerate(outputs):
        if output is None:
            continue
        for other in (*inputs, *outputs[:number]):
            if output is other and not (in_place and number == 0 and other is inputs[0]):
                raise ValueError(
                    "an output must not be an input or another output too "
                    "(out may be token_indices itself only with compact=False)"
                )
