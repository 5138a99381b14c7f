"""The kernels: one family for remap and dcp_filter, one for safe_lengths.

A row of the grid is a query row. A warp takes a run of adjacent columns, a lane of it one to four
groups of four, laid so that the groups begin where 16 bytes do: the first and last group of a row
may hang over its ends. Compaction sums valid entries over lanes, warps and tiles in order, gathers
the slots in shared memory and writes them from there, again in aligned groups. No atomics: the
same input gives the same bits.

Functions here are Numba's language (see `target` for what varies between card and simulator). Two
integers of 32 bits give one of 64 in it, so what shall stay narrow is cast back at once, and
nothing unsigned ever meets anything signed: that would become a float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda

from mla_index.backends.numba.target import Four, Pointer, Target

GROUP = 4
TOTALS = 32
"""Shared elements that hold the warps' totals, before those that gather slots."""
MARGIN = 8
"""Shared elements beyond a tile: what hangs over its two ends."""


class RemapConfig(NamedTuple):
    """What is compiled in. The rest of a `mla_index.RemapSpec` is told to the kernel by arguments.

    Args:
        token, table, slot: `int32` or `int64`.
        compact: put valid slots first.
        counts: count them; said of a compacting kernel too.
        workspace: rows may read the gathered workspace.
        groups: groups of four columns that a lane has in flight, 1 to 4.
        warps: of a thread block at most.
        resident: thread blocks of so many that a multiprocessor shall have registers for.
    """

    token: str
    table: str
    slot: str
    block_size: int
    dcp_size: int
    dcp_interleave: int
    compact: bool
    counts: bool
    workspace: bool
    groups: int
    warps: int
    resident: int


REMAP_PARAMETERS = (
    "tokens", "token_row", "token_step", "out", "out_row", "topk", "table", "table_row",
    "table_step", "table_rows", "last_local", "stride", "last_slot", "pad", "rank",
    "request_wide", "requests", "request_step", "counts", "counts_step", "lengths", "lengths_step",
    "mapping_wide", "limit_wide",
    "mapping", "mapping_step", "mapping_size", "limits", "limit_step", "last_block", "last_offset",
    "gathers", "gather_step", "gather_wide", "starts", "start_step", "start_wide", "starts_size",
    "rank_stride", "last_ws_row",
)  # fmt: skip
"""What the remap kernel takes; all are int64 but the pointers.

Steps and rows are in elements, the table's step in bytes. `*_wide`: whether the elements are int64
(1) or int32 (0), since they are read as int32 words; -1: there is no such tensor, nor is there one
with a step of -1. `last_local`: the largest token number of this rank that the table has a column
for, or -1. A launch may leave out from `mapping` on what the kernel does not come to read.
"""

ABSENT = -1

SAFE_LENGTHS_PARAMETERS = (
    "slots", "slot_row", "counts", "counts_step", "lengths", "lengths_step", "rows",
)  # fmt: skip


def remap_pointers(config: RemapConfig) -> dict[str, str]:
    """Element type of each pointer among `REMAP_PARAMETERS`."""
    words = ("requests", "mapping", "limits", "gathers", "starts", "counts", "lengths")
    return {
        "tokens": config.token,
        "table": config.table,
        "out": config.slot,
        **dict.fromkeys(words, "int32"),
    }


def safe_lengths_pointers(slot: str, count: str) -> dict[str, str]:
    """Element type of each pointer among `SAFE_LENGTHS_PARAMETERS`."""
    return {"slots": slot, "counts": count, "lengths": count}


def safe_lengths_kernel(target: Target, count: str) -> Callable[..., None]:
    """One thread a row."""
    int64 = target.cast("int64")
    number = target.cast(count)

    def safe_lengths(
        slots: Pointer, slot_row: int, counts: Pointer, counts_step: int, lengths: Pointer,
        lengths_step: int, rows: int,
    ) -> None:  # fmt: skip
        row = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)
        if row < rows:
            count = counts[row * counts_step]
            lengths[row * lengths_step] = max(count, number(1))
            if count <= 0:
                slots[row * slot_row] = 0

    return safe_lengths


# --- the parts of remap -------------------------------------------------------------------------


def _reader(target: Target) -> Callable[[Pointer, int, int], int]:
    """`(words, index, wide)` to the element of an int32 or int64 tensor, without a branch."""
    int64 = target.cast("int64")

    def read(words: Pointer, index: int, wide: int) -> int:
        at = index << wide
        low = int64(words[at])
        high = int64(words[at + wide])
        return (high << 32) | (low & 0xFFFFFFFF) if wide else low

    return target.function(read)


def _locator(config: RemapConfig, target: Target) -> Callable[..., tuple[int, int]]:
    """`(token)` to the rank that owns it and its number there: of a negative one, any numbers."""
    number = target.cast(config.token)
    unsigned = target.cast("u" + config.token)
    size = target.constant("u" + config.token, config.dcp_size)
    interleave = target.constant("u" + config.token, config.dcp_interleave)
    signed_size = target.constant(config.token, config.dcp_size)
    signed_interleave = target.constant(config.token, config.dcp_interleave)

    def alone(token: int) -> tuple[int, int]:
        return number(0), token

    def locate(token: int) -> tuple[int, int]:
        group = number(unsigned(token) // interleave)
        turn = number(unsigned(group) // size)
        owner = number(group - number(turn * signed_size))
        within = number(token - number(group * signed_interleave))
        return owner, number(number(turn * signed_interleave) + within)

    return target.function(locate if config.dcp_size > 1 else alone)


def _paged(config: RemapConfig, target: Target) -> Callable[..., int]:
    """A token to its slot through the block table, `absent` where it is not valid."""
    int32, int64 = target.cast("int32"), target.cast("int64")
    number, slot_type = target.cast(config.token), target.cast(config.slot)
    unsigned = target.cast("u" + config.token)
    block_size = target.constant("u" + config.token, config.block_size)
    signed_block_size = target.constant(config.token, config.block_size)
    shared, wide_table = config.dcp_size > 1, config.table == "int64"
    locate, load_at, multiply_wide = _locator(config, target), target.load_at, target.multiply_wide

    def paged(
        token: int, last: int, last_local: int, rank: int, table_row: Pointer, step: int,
        stride: int, last_slot: int, last_block: int, last_offset: int, absent: int,
    ) -> int:  # fmt: skip
        valid = (token >= 0) & (token <= last)
        owner, local = locate(token)
        if shared:
            valid = valid & (owner == rank) & (local <= last_local)
        # Invalid entries read column 0: a load that always may be done needs no branch.
        local = local if valid else number(0)
        block = number(unsigned(local) // block_size)
        offset = int64(number(local - number(block * signed_block_size)))
        entry = load_at(table_row, int64(block), step)
        if wide_table:
            # The product may not fit, so block and offset are compared instead.
            most = last_block - 1 if offset > last_offset else last_block
            valid = valid & (entry >= 0) & (entry <= most)
            slot = entry * stride + offset
        else:
            # Entry and stride are of 32 bits: with 2**62 taken off, no product comes back above 0.
            penalty = int32(0) if valid else int32(-(2**30))
            slot = multiply_wide(entry, int32(stride)) + (offset | (int64(penalty) << 32))
            valid = (slot >= 0) & (slot <= last_slot)
        return slot_type(slot) if valid else absent

    return target.function(paged)


def _gathered(config: RemapConfig, target: Target) -> Callable[..., int]:
    """A token to its row of the gathered workspace, `absent` where it is not valid."""
    int64 = target.cast("int64")
    number, slot_type = target.cast(config.token), target.cast(config.slot)
    locate = _locator(config, target)

    def gathered(
        token: int, last: int, last_local: int, start: int, rank_stride: int, last_row: int,
        absent: int,
    ) -> int:  # fmt: skip
        valid = (token >= 0) & (token <= last)
        owner, local = locate(token if valid else number(0))
        skipped = int64(owner) * rank_stride
        # Once the start fits, the sum either fits or wraps to a negative number.
        slot = skipped + start + int64(local)
        valid = valid & (local <= last_local) & (start <= last_row - skipped)
        valid = valid & (slot >= 0) & (slot <= last_row)
        return slot_type(slot) if valid else absent

    return target.function(gathered)


def _group_loader(config: RemapConfig, target: Target) -> Callable[..., Four]:
    """Four of a row's tokens from `column` on, -1 outside the row."""
    int32, number = target.cast("int32"), target.cast(config.token)
    load4, moved = target.load4, target.moved

    def load(tokens: Pointer, step: int, column: int, width: int) -> Four:
        a = b = c = d = number(-1)
        if (step == 1) & (column >= 0) & (int32(column + GROUP) <= width):
            a, b, c, d = load4(tokens, column)
        else:
            here = moved(tokens, column * step)
            for i in range(GROUP):
                a, b, c, d = b, c, d, number(-1)
                at = int32(column + i)
                if (at >= 0) & (at < width):
                    d = here[0]
                here = moved(here, step)
        return a, b, c, d

    return target.function(load)


def _group_storer(target: Target) -> Callable[..., None]:
    """Write four slots from `column` on, as far as they lie in the row."""
    int32 = target.cast("int32")
    store4 = target.store4

    def store(
        out: Pointer, column: int, width: int, aligned: bool, a: int, b: int, c: int, d: int
    ) -> None:
        if aligned & (column >= 0) & (int32(column + GROUP) <= width):
            store4(out, column, a, b, c, d)
        else:
            for i in range(GROUP):
                at = int32(column + i)
                if (at >= 0) & (at < width):
                    out[at] = a
                a, b, c = b, c, d

    return target.function(store)


def _row_reader(config: RemapConfig, target: Target) -> Callable[..., tuple[int, ...]]:
    """What holds for a whole row; whatever in it is out of range makes its width 0.

    Returns `(width, base, last, start, gathered)`: columns to read, offset of its row of the table,
    largest token that may be valid, first workspace row, and whether it reads the workspace.
    """
    int64 = target.cast("int64")
    most = {"int32": 2**31 - 1, "int64": 2**63 - 1}[config.token]
    read = _reader(target)
    has_workspace, shared = config.workspace, config.dcp_size > 1

    def read_row(
        row: int, topk: int, table_row: int, table_rows: int, last_local: int, last_slot: int,
        requests: Pointer, request_step: int, request_wide: int,
        mapping: Pointer, mapping_step: int, mapping_wide: int, mapping_size: int,
        limits: Pointer, limit_step: int, limit_wide: int,
        gathers: Pointer, gather_step: int, gather_wide: int,
        starts: Pointer, start_step: int, start_wide: int, starts_size: int, last_ws_row: int,
    ) -> tuple[int, ...]:  # fmt: skip
        width = topk
        last = int64(most)
        if limit_wide >= 0:
            limit = read(limits, row * limit_step, limit_wide)
            last = min(last, max(limit, int64(0)) - 1)
        if not shared:
            last = min(last, last_local)
        base = int64(0)
        start = int64(0)
        gathered = False
        if has_workspace:
            place = read(gathers, row * gather_step, gather_wide)
            gathered = place >= 0
            if gathered:
                if (place < starts_size) & (last_ws_row >= 0):
                    start = read(starts, place * start_step, start_wide)
                else:
                    width = int64(0)
        if not gathered:
            request = row
            if request_wide >= 0:
                request = read(requests, row * request_step, request_wide)
            if mapping_wide >= 0:
                if (request >= 0) & (request < mapping_size):
                    request = read(mapping, request * mapping_step, mapping_wide)
                else:
                    request = int64(-1)
            if (request >= 0) & (request < table_rows) & (last_slot >= 0):
                base = request * table_row
            else:
                width = int64(0)
        if (last < 0) | (last_local < 0):
            width = int64(0)
        return width, base, last, start, gathered

    return target.function(read_row)


def _byte_summer(target: Target) -> Callable[[int], int]:
    """The sum of the four bytes of an int32."""
    int32 = target.cast("int32")

    def sum_bytes(packed: int) -> int:
        pairs = int32((packed & 0x00FF00FF) + ((packed >> 8) & 0x00FF00FF))
        return int32((pairs & 0xFFFF) + (pairs >> 16))

    return target.function(sum_bytes)


def _flusher(target: Target) -> Callable[..., None]:
    """Write columns `[first, end)` of a row: gathered slots up to `filled`, then `pad`."""
    int32 = target.cast("int32")
    load4 = target.load4
    store = _group_storer(target)

    def flush(
        shared: Any, out: Pointer, first: int, end: int, filled: int, width: int, thread: int,
        threads: int, pad: int,
    ) -> None:  # fmt: skip
        at = int32(thread * GROUP)
        column = int32(first + at)
        while column < end:
            a = b = c = d = pad
            left = int32(filled - column)
            if left > 0:
                a, b, c, d = load4(shared, TOTALS + at)
                b = b if left > 1 else pad
                c = c if left > 2 else pad
                d = d if left > 3 else pad
            store(out, column, width, True, a, b, c, d)
            at = int32(at + threads * GROUP)
            column = int32(first + at)

    return target.function(flush)


def _tile_compactor(config: RemapConfig, target: Target) -> Callable[..., int]:
    """Append a tile's valid slots to the row; after the last tile, fill it up.

    Takes how many the row had before, returns how many it has. Groups that are begun stay in shared
    memory for the next tile, so that the row is written in whole ones.
    """
    int32, unsigned = target.cast("int32"), target.cast("uint32")
    slot_type = target.cast(config.slot)
    groups, sign = config.groups, 63 if config.slot == "int64" else 31
    warp_scan, warp_last, over_warps = target.warp_scan, target.warp_last, target.over_warps
    sum_bytes, flush = _byte_summer(target), _flusher(target)

    def compact_tile(
        shared: Any, slot: Any, out: Pointer, shift: int, columns: int, done: int,
        last_tile: bool, dummy: bool, thread: int, threads: int, lane: int, warp: int, warps: int,
        pad: int,
    ) -> int:  # fmt: skip
        # A byte a group, so that one scan sums them all: no more than 128 a group and warp.
        held = int32(0)
        for g in range(groups):
            valid = int32(GROUP)
            for i in range(GROUP):
                valid = int32(valid + int32(slot[GROUP * g + i] >> sign))
            held = int32(held | (valid << (8 * g)))
        upto = warp_scan(held, lane)
        total = warp_last(upto)
        ahead = int32(upto - held)
        if lane == 0:
            shared[unsigned(warp)] = slot_type(sum_bytes(total))
        cuda.syncthreads()
        first = int32((done + shift) & ~3)  # the row is written up to here
        before, found = over_warps(shared, warp, warps, lane)
        place = int32(done + before + TOTALS + shift - first)
        done = int32(done + found)
        for g in range(groups):
            to = int32(place + ((ahead >> (8 * g)) & 255))
            for i in range(GROUP):
                if slot[GROUP * g + i] >= 0:
                    shared[unsigned(to)] = slot[GROUP * g + i]
                    to = int32(to + 1)
            place = int32(place + ((total >> (8 * g)) & 255))
        filled = done
        if dummy and last_tile and done == 0:
            filled = int32(1)
            if thread == 0:
                shared[unsigned(TOTALS + shift)] = slot_type(0)
        cuda.syncthreads()
        full = int32((done + shift) & ~3)
        flush(
            shared, out, int32(first - shift), columns if last_tile else int32(full - shift),
            filled, columns, thread, threads, pad,
        )  # fmt: skip
        if not last_tile:
            left = int32(done + shift - full)
            carried = pad
            if thread < left:
                carried = shared[unsigned(TOTALS + full - first + thread)]
            cuda.syncthreads()
            if thread < left:
                shared[unsigned(TOTALS + thread)] = carried
        return done

    return target.function(compact_tile)


def remap_kernel(config: RemapConfig, target: Target) -> Callable[..., None]:
    """One block a row; without counts, several where the row is wide (y of the grid)."""
    int32, int64 = target.cast("int32"), target.cast("int64")
    unsigned = target.cast("uint32")
    number, slot_type = target.cast(config.token), target.cast(config.slot)
    token_dtype, slot_dtype = target.dtype(config.token), target.dtype(config.slot)
    lanes, groups = target.lanes, config.groups
    apart, span = lanes * GROUP, lanes * GROUP * config.groups
    entries = GROUP * config.groups
    compact, counting, has_workspace = config.compact, config.counts, config.workspace
    address, moved, shared_pointer = target.address, target.moved, target.shared_pointer
    warp_scan, warp_last, over_warps = target.warp_scan, target.warp_last, target.over_warps
    token_bits, slot_bits = (3 if name == "int64" else 2 for name in (config.token, config.slot))
    load, store = _group_loader(config, target), _group_storer(target)
    read_row, compact_tile = _row_reader(config, target), _tile_compactor(config, target)
    paged, gathered = _paged(config, target), _gathered(config, target)

    def remap(
        tokens: Pointer, token_row: int, token_step: int, out: Pointer, out_row: int, topk: int,
        table: Pointer, table_row: int, table_step: int, table_rows: int, last_local: int,
        stride: int, last_slot: int, pad: int, rank: int,
        request_wide: int, requests: Pointer, request_step: int,
        counts: Pointer, counts_step: int, lengths: Pointer, lengths_step: int,
        mapping_wide: int, limit_wide: int,
        mapping: Pointer, mapping_step: int, mapping_size: int, limits: Pointer, limit_step: int,
        last_block: int, last_offset: int,
        gathers: Pointer, gather_step: int, gather_wide: int,
        starts: Pointer, start_step: int, start_wide: int, starts_size: int,
        rank_stride: int, last_ws_row: int,
    ) -> None:  # fmt: skip
        row = int64(cuda.blockIdx.x)
        thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        lane = int32(unsigned(thread) % unsigned(lanes))
        warp = int32(unsigned(thread) // unsigned(lanes))
        warps = int32(unsigned(threads) // unsigned(lanes))
        shared = shared_pointer(cuda.shared.array(0, slot_dtype))
        token = cuda.local.array(entries, token_dtype)
        slot = cuda.local.array(entries, slot_dtype)

        token_base, out_base = row * token_row, row * out_row
        row_tokens, row_out = moved(tokens, token_base), moved(out, out_base)
        # By how many elements the row begins past a multiple of four.
        out_shift = int32(((address(out) >> slot_bits) + out_base) & 3)
        shift = out_shift
        if token_step == 1:
            shift = int32(((address(tokens) >> token_bits) + token_base) & 3)
        # Known not to be negative, like the bounds below: `0 <= x < columns` is one comparison.
        columns, filler = max(int32(topk), int32(0)), slot_type(pad)
        # Valid slots are not negative, so -1 tells the others where they have to be told.
        absent = slot_type(-1) if counting else filler
        tile = int32(warps * span)
        at = int32(cuda.blockIdx.y * tile)
        done = int32(0)
        more = compact or at < columns + shift
        while more:
            # Tokens first: they come while the row's own numbers are read, one after the other.
            # (Those are read again for each tile, which costs less than a wait before the first.)
            column = int32(at + warp * span + lane * GROUP - shift)
            for g in range(groups):
                a, b, c, d = load(row_tokens, token_step, int32(column + g * apart), columns)
                token[GROUP * g], token[GROUP * g + 1] = a, b
                token[GROUP * g + 2], token[GROUP * g + 3] = c, d
            width, base, last, start, in_workspace = read_row(
                row, topk, table_row, table_rows, last_local, last_slot,
                requests, request_step, request_wide,
                mapping, mapping_step, mapping_wide, mapping_size, limits, limit_step, limit_wide,
                gathers, gather_step, gather_wide, starts, start_step, start_wide, starts_size,
                last_ws_row,
            )  # fmt: skip
            row_table = moved(table, base)
            # Known not to be negative, `0 <= x <= bound` is one comparison. A row with a bound
            # that is has no width.
            last_token, highest = max(number(last), number(0)), max(last_slot, int64(0))
            last_here, own_rank, readable = number(last_local), number(rank), int32(width)
            end = int32((readable if compact else columns) + shift)
            last_tile = int32(at + tile) >= end
            # The loops are unrolled: all reads of the table are under way together.
            if readable <= 0:
                for i in range(entries):
                    slot[i] = absent
            elif has_workspace and in_workspace:
                for i in range(entries):
                    slot[i] = gathered(
                        number(token[i]), last_token, last_here, start, rank_stride, last_ws_row,
                        absent,
                    )  # fmt: skip
            else:
                for i in range(entries):
                    slot[i] = paged(
                        number(token[i]), last_token, last_here, own_rank, row_table, table_step,
                        stride, highest, last_block, last_offset, absent,
                    )  # fmt: skip
            if compact:
                done = compact_tile(
                    shared, slot, row_out, out_shift, columns, done, last_tile,
                    lengths_step >= 0, thread, threads, lane, warp, warps, filler,
                )  # fmt: skip
            else:
                if counting:
                    for i in range(entries):
                        done = int32(done + 1) if slot[i] >= 0 else done
                        slot[i] = slot[i] if slot[i] >= 0 else filler
                for g in range(groups):
                    store(
                        row_out, int32(column + g * apart), columns, shift == out_shift,
                        slot[GROUP * g], slot[GROUP * g + 1], slot[GROUP * g + 2],
                        slot[GROUP * g + 3],
                    )  # fmt: skip
            at = int32(at + cuda.gridDim.y * tile)
            more = at < end

        if counting and not compact:
            total = warp_last(warp_scan(done, lane))
            if lane == 0:
                shared[unsigned(warp)] = slot_type(total)
            cuda.syncthreads()
            _, done = over_warps(shared, warp, warps, lane)
        if counting and thread == 0:
            if counts_step >= 0:
                counts[row * counts_step] = done
            if lengths_step >= 0:
                lengths[row * lengths_step] = max(done, int32(1))

    return remap
