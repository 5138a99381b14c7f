"""The kernels: one family for remap and dcp_filter, one for safe_lengths.

A row of the grid is a query row. A warp takes a run of adjacent columns, a lane of it one or two
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

Columns = tuple[int, int, int, int, bool, bool, bool, bool]
"""Slots of a group, and which of them are valid."""


class RemapConfig(NamedTuple):
    """What is compiled in; `mla_index.RemapSpec` with the width class turned into `groups`.

    Args:
        token, table, slot: `int32` or `int64`.
        groups: groups of four columns that a lane has in flight, 1 or 2.
    """

    token: str
    table: str
    slot: str
    block_size: int
    dcp_size: int
    dcp_interleave: int
    compact: bool
    counts: bool
    safe_lengths: bool
    req_id: bool
    request_rows: bool
    token_limits: bool
    workspace: bool
    groups: int


REMAP_PARAMETERS = (
    "tokens", "token_row", "token_step", "token_phase", "out", "out_row", "out_phase", "topk",
    "table", "table_row", "table_step", "table_rows", "last_local", "stride", "last_slot",
    "last_block", "last_offset", "pad", "requests", "request_step", "request_wide", "rank",
    "counts", "counts_step", "lengths", "lengths_step",
    "mapping", "mapping_step", "mapping_wide", "mapping_size",
    "limits", "limit_step", "limit_wide",
    "gathers", "gather_step", "gather_wide", "starts", "start_step", "start_wide", "starts_size",
    "rank_stride", "last_ws_row",
)  # fmt: skip
"""What the remap kernel takes; steps and rows in elements. All are int64 but the pointers.

`*_phase`: by how many elements the address of row 0 is past a multiple of four. `*_wide`: whether
the elements are int64 (1) or int32 (0): they are read as int32 words. `last_local`: the largest
token number of this rank that the table has a column for, -1 if it has none.
"""

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
    """`(token)` to the rank that owns it and its number there; tokens are not negative."""
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


def _paged(config: RemapConfig, target: Target) -> Callable[..., tuple[int, bool]]:
    """A token to its slot through the block table, `pad` where it is not valid."""
    int32, int64 = target.cast("int32"), target.cast("int64")
    number, slot_type = target.cast(config.token), target.cast(config.slot)
    unsigned = target.cast("u" + config.token)
    block_size = target.constant("u" + config.token, config.block_size)
    signed_block_size = target.constant(config.token, config.block_size)
    shared, wide_table = config.dcp_size > 1, config.table == "int64"
    locate = _locator(config, target)

    def paged(
        token: int, last: int, last_local: int, rank: int, table: Pointer, base: int, step: int,
        stride: int, last_slot: int, last_block: int, last_offset: int, pad: int,
    ) -> tuple[int, bool]:  # fmt: skip
        valid = (token >= 0) & (token <= last)
        local = token if valid else number(0)
        if shared:
            owner, local = locate(local)
            valid = valid & (owner == rank) & (local <= last_local)
            local = local if valid else number(0)
        # Invalid entries read column 0: a load that always may be done needs no branch.
        block = number(unsigned(local) // block_size)
        offset = number(local - number(block * signed_block_size))
        entry = table[base + int64(block) * step]
        if wide_table:
            # The product may not fit, so block and offset are compared instead.
            most = last_block - 1 if int64(offset) > last_offset else last_block
            valid = valid & (entry >= 0) & (entry <= most)
            slot = entry * int64(stride) + int64(offset)
        else:
            slot = int64(entry) * int64(int32(stride)) + int64(offset)
            valid = valid & (slot >= 0) & (slot <= last_slot)
        return slot_type(slot) if valid else pad, valid

    return target.function(paged)


def _gathered(config: RemapConfig, target: Target) -> Callable[..., tuple[int, bool]]:
    """A token to its row of the gathered workspace, `pad` where it is not valid."""
    int64 = target.cast("int64")
    number, slot_type = target.cast(config.token), target.cast(config.slot)
    locate = _locator(config, target)

    def gathered(
        token: int, last: int, last_local: int, start: int, rank_stride: int, last_row: int,
        pad: int,
    ) -> tuple[int, bool]:  # fmt: skip
        valid = (token >= 0) & (token <= last)
        owner, local = locate(token if valid else number(0))
        skipped = int64(owner) * rank_stride
        # Once the start fits, the sum either fits or wraps to a negative number.
        slot = skipped + start + int64(local)
        valid = valid & (local <= last_local) & (start <= last_row - skipped)
        valid = valid & (slot >= 0) & (slot <= last_row)
        return slot_type(slot) if valid else pad, valid

    return target.function(gathered)


def _group_loader(config: RemapConfig, target: Target) -> Callable[..., Four]:
    """Four tokens from `column` on, -1 outside the row."""
    number = target.cast(config.token)
    load4 = target.load4

    def load(tokens: Pointer, base: int, step: int, column: int, width: int) -> Four:
        a = b = c = d = number(-1)
        if (step == 1) & (column >= 0) & (column + 4 <= width):
            a, b, c, d = load4(tokens, base + column)
        else:
            if (column >= 0) & (column < width):
                a = tokens[base + column * step]
            if (column + 1 >= 0) & (column + 1 < width):
                b = tokens[base + (column + 1) * step]
            if (column + 2 >= 0) & (column + 2 < width):
                c = tokens[base + (column + 2) * step]
            if (column + 3 >= 0) & (column + 3 < width):
                d = tokens[base + (column + 3) * step]
        return a, b, c, d

    return target.function(load)


def _group_storer(target: Target) -> Callable[..., None]:
    """Write four slots from `column` on, as far as they lie in the row."""
    store4 = target.store4

    def store(
        out: Pointer, base: int, column: int, width: int, aligned: bool, a: int, b: int, c: int,
        d: int,
    ) -> None:  # fmt: skip
        at = base + column
        if aligned & (column >= 0) & (column + 4 <= width):
            store4(out, at, a, b, c, d)
        else:
            if (column >= 0) & (column < width):
                out[at] = a
            if (column + 1 >= 0) & (column + 1 < width):
                out[at + 1] = b
            if (column + 2 >= 0) & (column + 2 < width):
                out[at + 2] = c
            if (column + 3 >= 0) & (column + 3 < width):
                out[at + 3] = d

    return target.function(store)


def _row_reader(config: RemapConfig, target: Target) -> Callable[..., tuple[int, ...]]:
    """What holds for a whole row; whatever in it is out of range makes its width 0.

    Returns `(width, base, last, start, gathered)`: columns to read, offset of its row of the table,
    largest token that may be valid, first workspace row, and whether it reads the workspace.
    """
    int64 = target.cast("int64")
    most = {"int32": 2**31 - 1, "int64": 2**63 - 1}[config.token]
    read = _reader(target)
    has_requests, has_mapping = config.req_id, config.request_rows
    has_limits, has_workspace, shared = config.token_limits, config.workspace, config.dcp_size > 1

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
        if has_limits:
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
            if has_requests:
                request = read(requests, row * request_step, request_wide)
            if has_mapping:
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


def _translators(config: RemapConfig, target: Target) -> tuple[Callable[..., Columns], ...]:
    """`paged` and `gathered` for a group of four tokens."""
    paged, gathered = _paged(config, target), _gathered(config, target)

    def paged_group(
        t0: int, t1: int, t2: int, t3: int, last: int, last_local: int, rank: int, table: Pointer,
        base: int, step: int, stride: int, last_slot: int, last_block: int, last_offset: int,
        pad: int,
    ) -> Columns:  # fmt: skip
        s0, v0 = paged(
            t0, last, last_local, rank, table, base, step, stride, last_slot, last_block,
            last_offset, pad,
        )  # fmt: skip
        s1, v1 = paged(
            t1, last, last_local, rank, table, base, step, stride, last_slot, last_block,
            last_offset, pad,
        )  # fmt: skip
        s2, v2 = paged(
            t2, last, last_local, rank, table, base, step, stride, last_slot, last_block,
            last_offset, pad,
        )  # fmt: skip
        s3, v3 = paged(
            t3, last, last_local, rank, table, base, step, stride, last_slot, last_block,
            last_offset, pad,
        )  # fmt: skip
        return s0, s1, s2, s3, v0, v1, v2, v3

    def gathered_group(
        t0: int, t1: int, t2: int, t3: int, last: int, last_local: int, start: int,
        rank_stride: int, last_row: int, pad: int,
    ) -> Columns:  # fmt: skip
        s0, v0 = gathered(t0, last, last_local, start, rank_stride, last_row, pad)
        s1, v1 = gathered(t1, last, last_local, start, rank_stride, last_row, pad)
        s2, v2 = gathered(t2, last, last_local, start, rank_stride, last_row, pad)
        s3, v3 = gathered(t3, last, last_local, start, rank_stride, last_row, pad)
        return s0, s1, s2, s3, v0, v1, v2, v3

    return target.function(paged_group), target.function(gathered_group)


def _compactor(config: RemapConfig, target: Target) -> tuple[Callable[..., Any], ...]:
    """`place` a group's valid slots in shared memory, and `flush` from there to the row."""
    int32 = target.cast("int32")
    unsigned = target.cast("uint32")
    load4_shared = target.load4_shared
    store = _group_storer(target)

    def place(
        shared: Any, at: int, a: int, b: int, c: int, d: int, va: bool, vb: bool, vc: bool,
        vd: bool,
    ) -> None:  # fmt: skip
        if va:
            shared[unsigned(at)] = a
        at = int32(at + int32(va))
        if vb:
            shared[unsigned(at)] = b
        at = int32(at + int32(vb))
        if vc:
            shared[unsigned(at)] = c
        at = int32(at + int32(vc))
        if vd:
            shared[unsigned(at)] = d

    def flush(
        shared: Any, out: Pointer, base: int, first: int, end: int, filled: int, width: int,
        thread: int, threads: int, filler: int,
    ) -> None:  # fmt: skip
        """Columns `[first, end)` of a row of `width`: up to `filled` gathered slots, then pad."""
        at = int32(thread * GROUP)
        column = int32(first + at)
        while column < end:
            a = b = c = d = filler
            if column < filled:
                a, b, c, d = load4_shared(shared, TOTALS + at)
                b = b if column + 1 < filled else filler
                c = c if column + 2 < filled else filler
                d = d if column + 3 < filled else filler
            store(out, base, column, width, True, a, b, c, d)
            at = int32(at + threads * GROUP)
            column = int32(first + at)

    return target.function(place), target.function(flush)


def remap_kernel(config: RemapConfig, target: Target) -> Callable[..., None]:
    """One block a row; without counts, several where the row is wide (y of the grid)."""
    int32, int64 = target.cast("int32"), target.cast("int64")
    unsigned = target.cast("uint32")
    number, slot_type = target.cast(config.token), target.cast(config.slot)
    shared_type = target.dtype(config.slot)
    lanes, two_groups = target.lanes, config.groups == 2
    span = lanes * GROUP * config.groups
    compact, safe, has_counts = config.compact, config.safe_lengths, config.counts
    has_workspace = config.workspace
    warp_scan, warp_last = target.warp_scan, target.warp_last
    load, store = _group_loader(config, target), _group_storer(target)
    read_row = _row_reader(config, target)
    paged, gathered = _translators(config, target)
    place, flush = _compactor(config, target)

    def remap(
        tokens: Pointer, token_row: int, token_step: int, token_phase: int,
        out: Pointer, out_row: int, out_phase: int, topk: int,
        table: Pointer, table_row: int, table_step: int, table_rows: int, last_local: int,
        stride: int, last_slot: int, last_block: int, last_offset: int, pad: int,
        requests: Pointer, request_step: int, request_wide: int, rank: int,
        counts: Pointer, counts_step: int, lengths: Pointer, lengths_step: int,
        mapping: Pointer, mapping_step: int, mapping_wide: int, mapping_size: int,
        limits: Pointer, limit_step: int, limit_wide: int,
        gathers: Pointer, gather_step: int, gather_wide: int,
        starts: Pointer, start_step: int, start_wide: int, starts_size: int,
        rank_stride: int, last_ws_row: int,
    ) -> None:  # fmt: skip
        row = int64(cuda.blockIdx.x)
        thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        lane = int32(unsigned(thread) % unsigned(lanes))
        warp = int32(unsigned(thread) // unsigned(lanes))
        warps = int32(unsigned(threads) // unsigned(lanes))
        shared = cuda.shared.array(0, shared_type)

        token_base, out_base = row * token_row, row * out_row
        out_shift = int32((out_phase + out_base) & 3)
        shift = int32((token_phase + token_base) & 3) if token_step == 1 else out_shift
        width, base, last, start, in_workspace = read_row(
            row, topk, table_row, table_rows, last_local, last_slot,
            requests, request_step, request_wide, mapping, mapping_step, mapping_wide, mapping_size,
            limits, limit_step, limit_wide, gathers, gather_step, gather_wide,
            starts, start_step, start_wide, starts_size, last_ws_row,
        )  # fmt: skip
        columns, readable = int32(topk), int32(width)
        last_token, last_here = number(last), number(last_local)
        highest = max(last_slot, int64(0))  # known not to be negative: one comparison less
        filler = slot_type(pad)

        tile = int32(warps * span)
        at = int32(cuda.blockIdx.y * tile)
        end = int32((readable if compact else columns) + shift)
        done = int32(0)
        more = compact or at < end
        while more:
            column = int32(at + warp * span + lane * GROUP - shift)
            column_b = int32(column + lanes * GROUP)
            t0, t1, t2, t3 = load(tokens, token_base, token_step, column, readable)
            u0 = u1 = u2 = u3 = number(-1)
            if two_groups:
                u0, u1, u2, u3 = load(tokens, token_base, token_step, column_b, readable)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = filler
            va0 = va1 = va2 = va3 = vb0 = vb1 = vb2 = vb3 = False
            if readable > 0:
                if has_workspace and in_workspace:
                    a0, a1, a2, a3, va0, va1, va2, va3 = gathered(
                        t0, t1, t2, t3, last_token, last_here, start, rank_stride, last_ws_row,
                        filler,
                    )  # fmt: skip
                    if two_groups:
                        b0, b1, b2, b3, vb0, vb1, vb2, vb3 = gathered(
                            u0, u1, u2, u3, last_token, last_here, start, rank_stride, last_ws_row,
                            filler,
                        )  # fmt: skip
                else:
                    a0, a1, a2, a3, va0, va1, va2, va3 = paged(
                        t0, t1, t2, t3, last_token, last_here, rank, table, base, table_step,
                        stride, highest, last_block, last_offset, filler,
                    )  # fmt: skip
                    if two_groups:
                        b0, b1, b2, b3, vb0, vb1, vb2, vb3 = paged(
                            u0, u1, u2, u3, last_token, last_here, rank, table, base, table_step,
                            stride, highest, last_block, last_offset, filler,
                        )  # fmt: skip
            in_a = int32(int32(va0) + int32(va1) + int32(va2) + int32(va3))
            in_b = int32(int32(vb0) + int32(vb1) + int32(vb2) + int32(vb3))
            last_tile = at + tile >= end
            if compact:
                # Both groups' counts in one scan: a tile holds fewer than 2**16 of either.
                upto = warp_scan(int32(in_a | (in_b << 16)), lane)
                total = warp_last(upto)
                total_a = int32(total & 0xFFFF)
                if lane == 0:
                    shared[unsigned(warp)] = slot_type(total_a + (total >> 16))
                cuda.syncthreads()
                first = int32((done + out_shift) & ~3)  # the row is written up to here
                before = done
                for other in range(warps):
                    valid = int32(shared[unsigned(other)])
                    done = int32(done + valid)
                    before = int32(before + valid) if other < warp else before
                before = int32(before + TOTALS + out_shift - first)
                place(
                    shared, int32(before + (upto & 0xFFFF) - in_a),
                    a0, a1, a2, a3, va0, va1, va2, va3,
                )  # fmt: skip
                if two_groups:
                    place(
                        shared, int32(before + total_a + (upto >> 16) - in_b),
                        b0, b1, b2, b3, vb0, vb1, vb2, vb3,
                    )  # fmt: skip
                filled = done
                if safe and last_tile and done == 0:
                    filled = int32(1)
                    if thread == 0:
                        shared[unsigned(TOTALS + out_shift)] = slot_type(0)
                cuda.syncthreads()
                full = int32((done + out_shift) & ~3)
                flush(
                    shared, out, out_base, int32(first - out_shift),
                    columns if last_tile else int32(full - out_shift), filled, columns,
                    thread, threads, filler,
                )  # fmt: skip
                if not last_tile:
                    # What does not fill a group goes first in the next tile.
                    left = int32(done + out_shift - full)
                    carried = filler
                    if thread < left:
                        carried = shared[unsigned(TOTALS + full - first + thread)]
                    cuda.syncthreads()
                    if thread < left:
                        shared[unsigned(TOTALS + thread)] = carried
            else:
                aligned = shift == out_shift
                store(out, out_base, column, columns, aligned, a0, a1, a2, a3)
                if two_groups:
                    store(out, out_base, column_b, columns, aligned, b0, b1, b2, b3)
                done = int32(done + in_a + in_b)
            at = int32(at + cuda.gridDim.y * tile)
            more = at < end

        if has_counts and not compact:
            upto = warp_scan(done, lane)
            total = warp_last(upto)
            if lane == 0:
                shared[unsigned(warp)] = slot_type(total)
            cuda.syncthreads()
            done = int32(0)
            for other in range(warps):
                done = int32(done + int32(shared[unsigned(other)]))
        if has_counts and thread == 0:
            counts[row * counts_step] = done
            if safe:
                lengths[row * lengths_step] = max(done, int32(1))

    return remap
