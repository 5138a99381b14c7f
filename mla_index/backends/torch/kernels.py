"""The operations as eager tensor operations.

No host synchronisation, no data-dependent shape, no atomics: what the values are never changes what
is launched. Two habits keep kernels and temporaries few. A range check is a clamp and a comparison
with what was clamped, which leaves a safe index behind. And sums and products that a wrapped number
could spoil are compared before they are formed, so that the narrow dtypes stay exact: whatever
wraps belongs to an entry already invalid.
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
    slot, valid = _slots(
        spec, req_id, block_table, token_indices, request_rows, token_limits, ws_request_ids,
        ws_starts, rank, block_stride_rows, rank_stride, last_slot, last_ws_row,
    )  # fmt: skip
    padding = torch.full((), pad, dtype=spec.slot_dtype, device=out.device)
    if not spec.compact:
        torch.where(valid, slot, padding, out=out)
        if counts is not None:
            torch.sum(valid, 1, dtype=torch.int32, out=counts)
        return
    slot = torch.where(valid, slot, padding)
    # Valid entries go to their rank within the row. The invalid ones all go to the first column
    # after those: each writes pad where pad belongs, so it does not matter which is last.
    place = valid.cumsum(1)
    count = place[:, -1].clone() if counts is None else counts.copy_(place[:, -1])
    place -= 1
    torch.where(valid, place, count[:, None], out=place)
    out.fill_(pad)
    out.scatter_(1, place, slot)
    if lengths is not None:
        torch.clamp(count, min=1, out=lengths)
        out[:, 0].masked_fill_(count == 0, 0)


def safe_lengths(slots: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """`lengths = max(counts, 1)`; the dummy slot 0 where a row is empty."""
    torch.clamp(counts, min=1, out=lengths)
    slots[:, 0].masked_fill_(counts <= 0, 0)


def _slots(
    spec: RemapSpec,
    req_id: Tensor | None,
    block_table: Tensor,
    token_indices: Tensor,
    request_rows: Tensor | None,
    token_limits: Tensor | None,
    ws_request_ids: Tensor | None,
    ws_starts: Tensor | None,
    rank: int,
    block_stride_rows: int,
    rank_stride: int,
    last_slot: int,
    last_ws_row: int,
) -> tuple[Tensor, Tensor]:
    """The slot of each entry (any number where it has none), and where it is valid.

    What is deleted on the way keeps the temporaries within their bound.
    """
    owner, local = share(token_indices, spec)
    mine = None if owner is None else owner == rank
    gathered = None
    if ws_request_ids is not None and ws_starts is not None:
        start, known = _take(ws_starts, ws_request_ids)
        first = start = start[:, None].long()
        if owner is not None:  # on a CPU the sum of two dtypes would first convert a copy
            first = owner.long()
            torch.add(start, first, alpha=rank_stride, out=first)
        del owner
        gathered, valid_there = _workspace_slots(first, start, local, last_ws_row)
        del first, start
        valid_there &= known[:, None]
        gathered = gathered.to(spec.slot_dtype)
    else:
        del owner
    block = floor_divide(local, spec.block_size)
    offset = _remainder(local, block, spec.block_size)
    del local
    column, in_table = _within(block, block_table.shape[1])
    del block
    row, exists = table_rows(req_id, block_table, request_rows, token_indices.shape[0])
    if 0 not in block_table.shape:
        entry = _entries(block_table, row, column)
        del column
        slot, valid = _paged_slots(spec, entry, offset, block_stride_rows, last_slot)
        valid &= exists[:, None]
        del entry
    else:
        slot, valid = offset.to(spec.slot_dtype), torch.zeros_like(in_table)
    if mine is not None:
        valid &= mine
    if gathered is not None and ws_request_ids is not None:
        from_workspace = (ws_request_ids >= 0)[:, None]
        slot = torch.where(from_workspace, gathered, slot)
        valid = torch.where(from_workspace, valid_there, valid)
    valid &= in_table
    if token_limits is not None:
        valid &= _below(token_indices, token_limits)
    return slot, valid


def share(tokens: Tensor, spec: RemapSpec) -> tuple[Tensor | None, Tensor]:
    """Owning rank and token number on that rank; no owner without dcp.

    Negative tokens keep negative numbers, which no later check lets pass.
    """
    if spec.dcp_size == 1:
        return None, tokens
    group = floor_divide(tokens, spec.dcp_interleave)
    turn = floor_divide(group, spec.dcp_size)
    owner = _remainder(group, turn, spec.dcp_size)
    if spec.dcp_interleave == 1:
        return owner, turn
    rest = _remainder(tokens, group, spec.dcp_interleave)
    return owner, rest.add_(turn, alpha=spec.dcp_interleave)


def table_rows(
    req_id: Tensor | None, block_table: Tensor, request_rows: Tensor | None, num_rows: int
) -> tuple[Tensor, Tensor]:
    """For each query row its row of the block table (any row where it has none), and if it has."""
    if req_id is None:
        req_id = torch.arange(num_rows, device=block_table.device)
    named = None
    if request_rows is not None:
        req_id, named = _take(request_rows, req_id)
    row, exists = _within(req_id, block_table.shape[0])
    return row, exists if named is None else exists & named


def _entries(block_table: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """`block_table[row[t], column[t, k]]`, by one flat index into what the table's strides span.

    Indexing by two tensors would expand the row numbers to `[T, K]` on CUDA, and take int64 only.
    A compiler fuses that, and may have laid out the table in another way than its strides say.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return block_table[row[:, None], column]
    rows, columns = block_table.shape
    # The stride to a row or column that does not exist may be any number.
    row_stride = block_table.stride(0) if rows > 1 else 0
    column_stride = block_table.stride(1) if columns > 1 else 0
    span = (rows - 1) * row_stride + (columns - 1) * column_stride + 1
    flat = block_table.as_strided((span,), (1,))  # at the offset of the view
    if span > DTYPE_MAX[row.dtype]:
        row = row.long()
    index = (row * row_stride)[:, None].add(column, alpha=column_stride)
    return flat.index_select(0, index.reshape(-1)).view(column.shape)


def _paged_slots(
    spec: RemapSpec, entry: Tensor, offset: Tensor, block_stride_rows: int, last_slot: int
) -> tuple[Tensor, Tensor]:
    """Slots of entries of the block table, and which of them lie within `[0, last_slot]`.

    `entry * stride + offset <= last_slot` is decided without the product, by comparing block and
    offset.
    """
    last_block, last_offset = last_slot // block_stride_rows, last_slot % block_stride_rows
    if last_block > DTYPE_MAX[entry.dtype]:  # no entry reaches the block where the offset decides
        last_block, last_offset = DTYPE_MAX[entry.dtype], block_stride_rows - 1
    if last_offset >= spec.block_size - 1:
        safe, valid = _within(entry, last_block + 1)
        del safe
    else:
        valid = entry >= 0
        valid &= entry <= last_block - (offset > last_offset).to(entry.dtype)
    if spec.slot_dtype == torch.int64:
        entry = entry.long()  # the sum below is formed in the wider dtype of its two parts
    return offset.add(entry, alpha=block_stride_rows).to(spec.slot_dtype), valid


def _workspace_slots(
    first: Tensor, start: Tensor, local: Tensor, last_row: int
) -> tuple[Tensor, Tensor]:
    """Rows of the gathered workspace, and which of them lie within `[0, last_row]`.

    `first` is the start and what the owner adds to it, which is not negative: the sum has wrapped
    exactly if it is below the start. `local` is not negative either: adding it to what did not wrap
    leaves the right number, or a negative one where the right one is too large.
    """
    valid = first >= start
    slot = first + local if first is start else first.add_(local)
    valid = valid & (slot >= 0)
    valid &= slot <= last_row
    return slot, valid


def floor_divide(numbers: Tensor, divisor: int) -> Tensor:
    """A shift where the divisor allows it: exact for negative numbers too, and far cheaper."""
    if divisor & (divisor - 1) == 0:
        return numbers >> (divisor.bit_length() - 1)
    return numbers // divisor


def _remainder(numbers: Tensor, quotient: Tensor, divisor: int) -> Tensor:
    """`numbers - quotient * divisor`, of the sign of the divisor."""
    if divisor & (divisor - 1) == 0:
        return numbers & (divisor - 1)
    return numbers.sub(quotient, alpha=divisor)


def _within(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """An index that is safe for `size` elements (if there are any), and where it is the given."""
    if size == 0:
        return torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    safe = index.clamp(0, min(size - 1, DTYPE_MAX[index.dtype]))
    return safe, safe == index


def _take(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """`values[index]` where the index is within them, and where it is."""
    safe, within = _within(index, values.shape[0])
    return values.index_select(0, safe) if values.shape[0] else safe, within


def _below(tokens: Tensor, limits: Tensor) -> Tensor:
    """`tokens < limits` for each row, without converting the tokens to a wider dtype."""
    if tokens.dtype == torch.int32 and limits.dtype == torch.int64:
        last = limits.clamp(0, DTYPE_MAX[torch.int32] + 1).sub_(1).to(torch.int32)
        return tokens <= last[:, None]
    return tokens < limits[:, None]
