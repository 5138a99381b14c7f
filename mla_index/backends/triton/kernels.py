# mypy: ignore-errors
# ruff: noqa: N803, N806, SIM102, SIM108 (a constexpr is written in capitals; `if` is for the compiler)
"""The kernels: one family for remap and dcp_filter, and safe_lengths.

One program takes one query row, or one piece of it. `tokens`, `table` and `slots` are typed at
compile time; what is read once a row (`req_id`, `request_rows`, `token_limits`, the workspace's
arrays) is read as 32-bit words with a run-time width, so that its dtypes make no further kernels.
Absent tensors, and the numbers that mean nothing without them, are None at compile time.

Numbers are compared as unsigned ones: `0 <= x <= last` is then the one test `x < last + 1`, and a
division needs no care for signs. No sum or product is trusted that an earlier test has not bounded:
whatever wraps belongs to an entry that is invalid already.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _unsigned(numbers):
    """The same bits as unsigned numbers."""
    if numbers.dtype.primitive_bitwidth == 64:
        result = numbers.to(tl.uint64, bitcast=True)
    else:
        result = numbers.to(tl.uint32, bitcast=True)
    return result


@triton.jit
def _signed(numbers):
    """The same bits as signed numbers."""
    if numbers.dtype.primitive_bitwidth == 64:
        result = numbers.to(tl.int64, bitcast=True)
    else:
        result = numbers.to(tl.int32, bitcast=True)
    return result


@triton.jit
def _size(last):
    """`last + 1` of a last index (-1: none) as an unsigned number, exact up to 2**63."""
    return last.to(tl.uint64) + 1


@triton.jit
def _number(words, index, stride, is_wide, is_read):
    """One number of an int32 or int64 array, as int64; `stride` counts 32-bit words."""
    at = words + index * stride.to(tl.int64)
    low = tl.load(at, mask=is_read, other=0).to(tl.int64)
    high = tl.load(at + 1, mask=is_read & is_wide, other=0).to(tl.int64)
    return tl.where(is_wide, (high << 32) | (low & 0xFFFFFFFF), low)


@triton.jit
def _table_row(row, req_id, request_rows, req_stride, map_stride, map_size, table_rows, wide):
    """The row of the block table that a query row reads, and whether there is one."""
    if req_id is None:
        request = row
    else:
        request = _number(req_id, row, req_stride, (wide & 1) != 0, row >= 0)
    exists = request >= 0
    if request_rows is not None:
        exists = exists & (request < map_size)
        request = _number(request_rows, request, map_stride, (wide & 2) != 0, exists)
        exists = exists & (request >= 0)
    return request, exists & (request < table_rows)


@triton.jit
def _share(token, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Owning rank of (unsigned) tokens, and the token numbers on that rank."""
    if DCP_SIZE == 1:
        owner, local = token, token  # the one rank is not asked for
    else:
        owner = token // INTERLEAVE % DCP_SIZE
        local = token // (DCP_SIZE * INTERLEAVE) * INTERLEAVE + token % INTERLEAVE
    return owner, local


@triton.jit
def _tokens(columns, topk, token_row, token_stride, DENSE: tl.constexpr, MASKED: tl.constexpr):
    """Tokens (unsigned) of some columns of a row; beyond the row one that is never valid."""
    if DENSE:
        token_at = token_row + columns
    else:
        token_at = token_row + columns.to(tl.int64) * token_stride.to(tl.int64)
    if MASKED:
        token = tl.load(token_at, mask=columns < topk, other=-1)
    else:
        token = tl.load(token_at)
    return _unsigned(token)


@triton.jit
def _translate(
    token, token_size, local_size, table_row, table_stride, rank, block_stride_rows, block_count,
    last_slot, is_gathered, ws_start, rank_stride, last_ws_row,
    SLOT: tl.constexpr, WORKSPACE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DCP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Slots (unsigned) of some tokens of a row, and whether they are valid.

    `token_size` bounds the row's tokens (0: the row is out), `local_size` those on one rank.
    """
    present = token < token_size.to(token.dtype)
    owner, local = _share(token, DCP_SIZE, INTERLEAVE)
    if DCP_SIZE > 1:
        present = present & (local < local_size.to(token.dtype))
    if WORKSPACE:
        if is_gathered:
            slot, valid = _gathered(
                present, owner, local, ws_start, rank_stride.to(tl.int64),
                last_ws_row.to(tl.int64), SLOT, DCP_SIZE,
            )  # fmt: skip
        else:
            slot, valid = _paged(
                present, owner, local, table_row, table_stride, rank, block_stride_rows,
                block_count, last_slot, SLOT, BLOCK_SIZE, DCP_SIZE, DENSE,
            )  # fmt: skip
    else:
        slot, valid = _paged(
            present, owner, local, table_row, table_stride, rank, block_stride_rows,
            block_count, last_slot, SLOT, BLOCK_SIZE, DCP_SIZE, DENSE,
        )  # fmt: skip
    return slot, valid


@triton.jit
def _paged(
    present, owner, local, table_row, table_stride, rank, block_stride_rows, block_count, last_slot,
    SLOT: tl.constexpr, BLOCK_SIZE: tl.constexpr, DCP_SIZE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Slots through the block table, of this rank's tokens."""
    if DCP_SIZE > 1:
        present = present & (owner == rank.to(owner.dtype))
    block = _signed(local // BLOCK_SIZE)
    if DENSE:
        entry_at = table_row + block
    else:
        entry_at = table_row + block.to(tl.int64) * table_stride.to(tl.int64)
    # What is not read is as good as a block that is not allocated.
    entry = _unsigned(tl.load(entry_at, mask=present, other=-1))
    slot = entry.to(SLOT) * block_stride_rows.to(SLOT) + (local % BLOCK_SIZE).to(SLOT)
    return slot, (entry < block_count.to(entry.dtype)) & (slot <= last_slot.to(SLOT))


@triton.jit
def _gathered(
    present, owner, local, ws_start, rank_stride, last_ws_row,
    SLOT: tl.constexpr, DCP_SIZE: tl.constexpr,
):  # fmt: skip
    """Slots in the gathered workspace, of every rank's tokens."""
    slot = local.to(tl.int64)
    if DCP_SIZE > 1:
        part = owner.to(tl.int64) * rank_stride
        present = present & (ws_start <= last_ws_row - part)
        slot += part
    else:
        present = present & (ws_start <= last_ws_row)
    slot += ws_start
    return slot.to(SLOT), present & (slot >= 0) & (slot <= last_ws_row)


@triton.jit
def _sum_of_fields(numbers, BITS: tl.constexpr):
    """The sum of the four fields of so many bits that a number consists of."""
    LAST: tl.constexpr = (1 << BITS) - 1
    low = (numbers & LAST) + ((numbers >> BITS) & LAST)
    return low + ((numbers >> (2 * BITS)) & LAST) + ((numbers >> (3 * BITS)) & LAST)


@triton.jit
def _ranks(valid, TILE: tl.constexpr):
    """How many entries of the tile are valid before each of its entries, and in all.

    A scan costs one step for each register that holds an entry. Wide tiles are therefore scanned as
    rows of 128, four of them at once, a byte for each in a 32-bit word.
    """
    if TILE < 512:
        flags = valid.to(tl.int32)
        ranks = tl.cumsum(flags, 0) - flags
        total = tl.sum(flags, 0)
    else:
        WORDS: tl.constexpr = TILE // 512
        byte = tl.arange(0, 4)[None, :, None] * 8
        valid = tl.reshape(valid, [WORDS, 4, 128])
        packed = tl.sum(tl.where(valid, 1 << byte, 0), 1)
        upto = tl.cumsum(packed, 1)
        within = (upto - packed)[:, None, :] >> byte
        # What precedes a row of 128 are fields of sums: a scan over them would be cheap but for the
        # barriers around it.
        if WORDS == 1:
            sums = tl.reshape(tl.gather(upto, tl.full([1, 1], 127, tl.int32), 1), [1])
        else:
            sums = tl.sum(packed, 1)
        full = _sum_of_fields(sums, 8)
        before = _sum_of_fields(sums[:, None, None] & ((1 << byte) - 1), 8)
        if WORDS > 4:
            before += (tl.cumsum(full, 0) - full)[:, None, None]
        elif WORDS > 1:
            field = tl.arange(0, WORDS).to(tl.int64) * 16
            earlier = tl.sum(full.to(tl.int64) << field, 0) & ((1 << field) - 1)
            before += _sum_of_fields(earlier, 16).to(tl.int32)[:, None, None]
        ranks = tl.reshape((within & 255) + before, [TILE])
        total = tl.sum(full, 0)
    return ranks, total


@triton.jit
def _store(
    columns, topk, slot_row, slot, valid, count, pad,
    COMPACT: tl.constexpr, COUNTED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write some columns of a row; `count` of its entries were valid before, returns how many now.

    Compacted, the store is a permutation of the row: the valid entries go to the front in their
    order, the others fill the row from its end. So each place is written once, whatever is valid,
    and all that a tile has to know of the others is how many valid entries came before it.
    """
    pad = pad.to(slot_row.dtype.element_ty)
    place = columns
    if COMPACT:
        ranks, total = _ranks(valid, TILE)
        place = count + ranks + tl.where(valid, 0, topk - 1 - columns)
        count += total
    elif COUNTED:
        count += tl.sum(valid.to(tl.int32), 0)
    value = tl.where(valid, _signed(slot), pad)
    # Scattered words are not read again here: let them pass the cache.
    PASS: tl.constexpr = ".cs" if COMPACT else ""
    if MASKED:
        tl.store(slot_row + place, value, mask=columns < topk, cache_modifier=PASS)
    else:
        tl.store(slot_row + place, value, cache_modifier=PASS)
    return count


@triton.jit
def remap(
    tokens, table, slots, req_id, counts, lengths,
    request_rows, token_limits, ws_request_ids, ws_starts,
    wide, topk, req_stride, token_row_stride, table_row_stride, slot_row_stride, count_stride,
    table_rows, last_local, block_stride_rows, last_block, last_slot, pad, rank,
    pieces, pieces_inverse, pieces_shift, token_stride, table_stride, length_stride,
    map_stride, map_size, limit_stride, ws_stride, start_stride, ws_size, rank_stride, last_ws_row,
    BLOCK_SIZE: tl.constexpr, DCP_SIZE: tl.constexpr, INTERLEAVE: tl.constexpr,
    COMPACT: tl.constexpr, DENSE: tl.constexpr, PLAN: tl.constexpr, TILE: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Remap one row, or one piece of it.

    Strides are in elements, but those of the arrays that are read once a row, in 32-bit words;
    which of these hold int64 is in the bits of `wide` (1: `req_id`, 2: `request_rows`,
    4: `token_limits`, 8: `ws_request_ids`, 16: `ws_starts`). Every `last_…` is inclusive and fits
    the dtype of what it bounds; `last_local` is the last token that the table's width has room for.

    `PLAN` says how the programs share a row: `tile`: one program, one tile; `walk`: one program
    walks the tiles of a row that is wider than one tile; `split`: `pieces` programs with a tile
    each, which (compacting) count for themselves what is valid in the tiles before theirs. `TAIL`
    is how many columns may be left over after whole tiles; where it is as much as `TILE`, every
    access is masked. `DENSE`: the columns of tokens and table are adjacent.

    Tokens are asked for as early as can be: with the row's own numbers, and of the next tile
    before this one is stored. What every kernel needs stands first among the parameters, since
    each line of them that is read costs time.
    """
    COUNTED: tl.constexpr = counts is not None
    SAFE: tl.constexpr = lengths is not None
    WORKSPACE: tl.constexpr = ws_starts is not None
    MASKED: tl.constexpr = TAIL == TILE
    SLOT: tl.constexpr = tl.uint64 if slots.dtype.element_ty == tl.int64 else tl.uint32
    TOKEN_MAX: tl.constexpr = (1 << (tokens.dtype.element_ty.primitive_bitwidth - 1)) - 1
    row = tl.program_id(0).to(tl.int64)
    piece = 0
    if PLAN == "split":
        # Exact for every program id, and a fifth of a division: see `variants.inverse`.
        quotient = (tl.program_id(0).to(tl.uint64) * pieces_inverse.to(tl.uint64)) >> pieces_shift
        piece = tl.program_id(0) - quotient.to(tl.int32) * pieces
        row = quotient.to(tl.int64)

    token_row = tokens + row * token_row_stride.to(tl.int64)
    lanes = tl.arange(0, TILE)
    first = piece * TILE
    if PLAN == "split" and COMPACT:
        first = first * 0  # it counts from the row's beginning; a plain 0 would have another type
    token = _tokens(first + lanes, topk, token_row, token_stride, DENSE, MASKED)
    whole = topk if MASKED else topk // TILE * TILE
    if PLAN == "walk" and not MASKED and TAIL > 0:
        tail_columns = whole + tl.arange(0, TAIL)
        tail_token = _tokens(tail_columns, topk, token_row, token_stride, DENSE, True)

    # --- what holds for the whole row ---
    table_index, exists = _table_row(
        row, req_id, request_rows, req_stride, map_stride, map_size, table_rows, wide
    )
    last_token = last_local.to(tl.int64)
    if DCP_SIZE > 1:
        last_token = last_token * 0 + TOKEN_MAX
    if token_limits is not None:
        limit = _number(token_limits, row, limit_stride, (wide & 4) != 0, row >= 0)
        last_token = tl.minimum(last_token, tl.maximum(limit, 0) - 1)
    table_row = table + tl.where(exists, table_index, 0) * table_row_stride.to(tl.int64)
    is_gathered = row < 0
    ws_start = row * 0
    if WORKSPACE:
        entry = _number(ws_request_ids, row, ws_stride, (wide & 8) != 0, row >= 0)
        is_gathered = entry >= 0
        if is_gathered:
            exists = entry < ws_size
            ws_start = _number(ws_starts, entry, start_stride, (wide & 16) != 0, exists)
    slot_row = slots + row * slot_row_stride.to(tl.int64)
    given = (
        _size(tl.where(exists, last_token, -1)), _size(last_local), table_row, table_stride, rank,
        block_stride_rows, _size(last_block), last_slot, is_gathered, ws_start, rank_stride,
        last_ws_row,
    )  # fmt: skip

    # --- its columns ---
    count = topk * 0
    if PLAN == "walk":
        if not MASKED and TAIL > 0:
            tail_slot, tail_valid = _translate(
                tail_token, *given,
                SLOT, WORKSPACE, BLOCK_SIZE, DCP_SIZE, INTERLEAVE, DENSE,
            )  # fmt: skip
        for start in range(0, whole, TILE):
            slot, valid = _translate(
                token, *given,
                SLOT, WORKSPACE, BLOCK_SIZE, DCP_SIZE, INTERLEAVE, DENSE,
            )  # fmt: skip
            # After the last tile: nothing, or where nothing is masked, that tile again.
            ahead = start + TILE if MASKED else tl.minimum(start + TILE, whole - TILE)
            token = _tokens(ahead + lanes, topk, token_row, token_stride, DENSE, MASKED)
            count = _store(
                start + lanes, topk, slot_row, slot, valid, count, pad,
                COMPACT, COUNTED, MASKED, TILE,
            )  # fmt: skip
        if not MASKED and TAIL > 0:
            if whole < topk:
                count = _store(
                    tail_columns, topk, slot_row, tail_slot, tail_valid, count, pad,
                    COMPACT, COUNTED, True, TAIL,
                )  # fmt: skip
    else:
        if PLAN == "split" and COMPACT:
            seen = tl.zeros([TILE], tl.int32)
            for start in range(0, piece * TILE, TILE):
                _, valid = _translate(
                    token, *given,
                    SLOT, WORKSPACE, BLOCK_SIZE, DCP_SIZE, INTERLEAVE, DENSE,
                )  # fmt: skip
                ahead = start + TILE + lanes
                token = _tokens(ahead, topk, token_row, token_stride, DENSE, MASKED)
                seen += valid.to(tl.int32)
            count = tl.sum(seen, 0)
        slot, valid = _translate(
            token, *given,
            SLOT, WORKSPACE, BLOCK_SIZE, DCP_SIZE, INTERLEAVE, DENSE,
        )  # fmt: skip
        count = _store(
            piece * TILE + lanes, topk, slot_row, slot, valid, count, pad,
            COMPACT, COUNTED, MASKED, TILE,
        )  # fmt: skip

    if COUNTED:
        # The program with the row's last columns knows the row's count.
        is_last = row >= 0
        if PLAN == "split":
            is_last = piece == pieces - 1
        tl.store(counts + row * count_stride.to(tl.int64), count, mask=is_last)
        if SAFE:
            length = tl.maximum(count, 1)
            tl.store(lengths + row * length_stride.to(tl.int64), length, mask=is_last)
            if is_last & (count == 0):
                # The dummy slot goes where a thread of this program has put a pad.
                tl.debug_barrier()
                tl.store(slot_row, count)


@triton.jit
def safe_lengths(
    slots, counts, lengths, slot_row_stride, count_stride, length_stride, rows, TILE: tl.constexpr
):
    """`lengths = max(counts, 1)` and the dummy slot 0 in empty rows, for `TILE` rows."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    count = tl.load(counts + row * count_stride.to(tl.int64), mask=row < rows, other=1)
    tl.store(lengths + row * length_stride.to(tl.int64), tl.maximum(count, 1), mask=row < rows)
    empty = (row < rows) & (count <= 0)
    tl.store(slots + row * slot_row_stride.to(tl.int64), count * 0, mask=empty)
