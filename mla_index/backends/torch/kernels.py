"""The operations as eager tensor operations.

No host synchronisation, no data-dependent shape, no atomics: what the values are never changes what
is launched. Temporaries are reused in place; for int32 they stay below six times the output.

Arithmetic is in the narrowest dtype that is exact: sums and products that a wrapped number could
spoil are compared before they are formed, so whatever wraps belongs to an entry already invalid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_index.specs import DTYPE_MAX, RemapSpec


def remap(
    spec: RemapSpec,
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
    rank: int,
    block_stride_rows: int,
    rank_stride: int,
    last_slot: int,
    last_ws_row: int,
    pad: int,
) -> None:
    """One configuration of remap and dcp_filter; see `registry.LAUNCH_PARAMETERS`."""
    valid = token_indices >= 0
    if token_limits is not None:
        valid &= token_indices <= _last_tokens(token_limits, token_indices.dtype)[:, None]
    owner, local = share(token_indices, spec)
    block = _floor_divide(local, spec.block_size)
    offset = local - block * spec.block_size

    row, row_exists = table_rows(req_id, block_table, request_rows, token_indices.shape[0])
    width = row_exists * block_table.shape[1]
    in_workspace = starts = None
    if ws_request_ids is not None and ws_starts is not None:
        in_workspace = ws_request_ids >= 0
        known = in_workspace & (ws_request_ids < ws_starts.shape[0])
        starts = _take(ws_starts, ws_request_ids, known)
        width = torch.where(in_workspace, known * block_table.shape[1], width)
    # A row that is out has no columns in the table: one comparison covers rows and columns.
    valid &= block < width[:, None].to(block.dtype)
    if owner is not None and in_workspace is None:
        valid &= owner == rank

    slot, in_bounds = _paged_slots(
        spec, block_table, row, block, offset, valid, block_stride_rows, last_slot
    )
    del block, offset
    if in_workspace is None or starts is None:
        valid &= in_bounds
    else:
        if owner is not None:
            in_bounds &= owner == rank
        gathered, in_workspace_bounds = _workspace_slots(
            owner, local, starts, rank_stride, last_ws_row
        )
        is_gathered = in_workspace[:, None]
        slot = torch.where(is_gathered, gathered.to(slot.dtype), slot)
        valid &= torch.where(is_gathered, in_workspace_bounds, in_bounds)
    slot.masked_fill_(~valid, pad)
    del owner, local
    _store(spec, slot, valid, out, counts, lengths, pad)


def share(tokens: Tensor, spec: RemapSpec) -> tuple[Tensor | None, Tensor]:
    """Owning rank and token number on that rank; no owner without dcp."""
    if spec.dcp_size == 1:
        return None, tokens
    group = _floor_divide(tokens, spec.dcp_interleave)
    turn = _floor_divide(group, spec.dcp_size)
    owner = group - turn * spec.dcp_size
    if spec.dcp_interleave == 1:
        return owner, turn
    group *= -spec.dcp_interleave
    group += tokens  # what is left of the token within its group
    turn *= spec.dcp_interleave
    turn += group
    return owner, turn


def table_rows(
    req_id: Tensor | None, block_table: Tensor, request_rows: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor]:
    """For each query row its row of the block table (0 where it has none), and whether it has."""
    if req_id is None:
        req_id = torch.arange(num_rows, device=block_table.device)
    exists = req_id >= 0
    if request_rows is not None:
        exists &= req_id < request_rows.shape[0]
        req_id = _take(request_rows, req_id, exists)
        exists &= req_id >= 0
    exists &= req_id < block_table.shape[0]
    return req_id.masked_fill(~exists, 0).long(), exists


def _paged_slots(
    spec: RemapSpec,
    block_table: Tensor,
    row: Tensor,
    block: Tensor,
    offset: Tensor,
    valid: Tensor,
    block_stride_rows: int,
    last_slot: int,
) -> tuple[Tensor, Tensor]:
    """Slots through the block table, and which of them exist and are at most `last_slot`."""
    if block_table.numel() == 0:
        return torch.zeros_like(block, dtype=spec.slot_dtype), torch.zeros_like(valid)
    entry = block_table[row[:, None], block.masked_fill(~valid, 0)]
    # entry * stride + offset <= last_slot, without the product: compare block and offset.
    last_block, last_offset = divmod(last_slot, block_stride_rows)
    last_block = min(last_block, DTYPE_MAX[entry.dtype])
    in_bounds = entry >= 0
    if last_offset >= spec.block_size - 1:
        in_bounds &= entry <= last_block
    else:
        in_bounds &= entry <= last_block - (offset > last_offset).to(entry.dtype)
    slot = entry.to(torch.promote_types(entry.dtype, spec.slot_dtype))
    slot *= block_stride_rows
    slot += offset.to(slot.dtype)
    return slot.to(spec.slot_dtype), in_bounds


def _workspace_slots(
    owner: Tensor | None, local: Tensor, starts: Tensor, rank_stride: int, last_row: int
) -> tuple[Tensor, Tensor]:
    """Rows of the gathered workspace, and which of them lie in `[0, last_row]`.

    `owner * rank_stride` and `local` are not negative, so once the start is known to be at most
    `last_row` less the first, the rest either fits or wraps to a negative number.
    """
    slot = local.long() if owner is None else owner.long().mul_(rank_stride)
    starts = starts[:, None].long()
    if owner is None:
        fits = (starts <= last_row).expand_as(slot).clone()
        slot = slot + starts
    else:
        fits = starts <= last_row - slot
        slot += starts
        slot += local
    fits &= slot >= 0
    fits &= slot <= last_row
    return slot, fits


def _store(
    spec: RemapSpec,
    slot: Tensor,
    valid: Tensor,
    out: Tensor,
    counts: Tensor | None,
    lengths: Tensor | None,
    pad: int,
) -> None:
    """Write slots (`pad` where invalid), compacted if asked for, with counts and lengths."""
    if not spec.compact:
        out.copy_(slot)
        if counts is not None:
            counts.copy_(valid.sum(1, dtype=torch.int32))
        return
    # Valid entries go to their rank within the row. The invalid ones all go to the first column
    # after those: each writes pad where pad belongs, so it does not matter which is last.
    place = valid.cumsum(1)
    count = place[:, -1].clone()
    place -= 1
    torch.where(valid, place, count[:, None], out=place)
    out.fill_(pad)
    out.scatter_(1, place, slot)
    if counts is not None:
        counts.copy_(count)
    if lengths is not None:
        lengths.copy_(count.clamp(min=1))
        out[:, 0].masked_fill_(count == 0, 0)


def safe_lengths(slots: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """`lengths = max(counts, 1)`; the dummy slot 0 where a row is empty."""
    torch.clamp(counts, min=1, out=lengths)
    slots[:, 0].masked_fill_(counts <= 0, 0)


def _floor_divide(numbers: Tensor, divisor: int) -> Tensor:
    """A shift where the divisor allows it: exact for negative numbers too, and far cheaper."""
    if divisor & (divisor - 1) == 0:
        return numbers >> (divisor.bit_length() - 1)
    return numbers // divisor


def _take(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """`values[index]` where valid, some other number elsewhere."""
    if values.shape[0] == 0:
        return torch.zeros_like(index)
    return values[index.masked_fill(~valid, 0).long()]


def _last_tokens(limits: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest token that each limit allows (-1: none), in the tokens' dtype."""
    return limits.long().clamp(min=0).sub_(1).clamp_(max=DTYPE_MAX[dtype]).to(dtype)
