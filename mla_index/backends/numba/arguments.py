"""From the contract's tensors to the kernels' parameters, and to the shape of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_index.backends.numba.kernels import ABSENT, GROUP, MARGIN, TOTALS, RemapConfig
from mla_index.specs import DTYPE_MAX, RemapSpec

MAX_GRID_X, MAX_GRID_Y = 2**31 - 1, 65_535

MAX_SHARED_BYTES = 48 * 1024
"""What a block may have of shared memory without asking the driver for more."""

Make = Callable[[Tensor], Any]
"""Makes a kernel's pointer of a tensor."""

Finish = Callable[[int, int, tuple[Any, ...]], None]
"""`(rows, topk, parameters)`: launches."""


def remap_launcher(
    spec: RemapSpec, pointer: Make, words: Make, finish: Finish
) -> Callable[..., None]:
    """The launcher of remap, from the contract's launch parameters to `REMAP_PARAMETERS`.

    Args:
        spec: the configuration.
        pointer: makes a pointer to a tensor's elements.
        words: makes a pointer to the int32 words of an int32 or int64 tensor.
        finish: launches; it is given as many parameters as the spec needs.
    """
    block_size = spec.block_size
    token_max = DTYPE_MAX[spec.token_dtype]
    wide_table = spec.table_dtype is torch.int64
    entry_bytes = 8 if wide_table else 4
    mapped, limited = spec.request_rows, spec.token_limits
    basic = not (mapped or limited or spec.workspace or wide_table)
    int64 = torch.int64

    def launch(
        req_id: Tensor | None, block_table: Tensor, token_indices: Tensor, out: Tensor,
        counts: Tensor | None, lengths: Tensor | None, request_rows: Tensor | None,
        token_limits: Tensor | None, ws_request_ids: Tensor | None, ws_starts: Tensor | None,
        rank: int, block_stride_rows: int, rank_stride: int, last_slot: int, last_ws_row: int,
        pad: int,
    ) -> None:  # fmt: skip
        rows, topk = token_indices.shape
        if rows > MAX_GRID_X:
            raise ValueError(
                f"numba launches up to {MAX_GRID_X} rows a call, got {rows}: split the call by rows"
            )
        token_row, token_step = token_indices.stride()
        table_row, table_step = block_table.stride()
        table_rows, width = block_table.shape
        last_local = width * block_size - 1
        request_wide = counts_step = lengths_step = mapping_wide = limit_wide = ABSENT
        requests = counted = lengthened = request_step = 0
        if req_id is not None:
            request_wide = 1 if req_id.dtype is int64 else 0
            requests, request_step = words(req_id), req_id.stride(0)
        if counts is not None:
            counted, counts_step = words(counts), counts.stride(0)
        if mapped or limited:
            mapping_wide, limit_wide = _wide(request_rows), _wide(token_limits)
        if lengths is not None:
            lengthened, lengths_step = words(lengths), lengths.stride(0)
        # The order of REMAP_PARAMETERS; written out, since every call passes here.
        parameters: tuple[Any, ...] = (
            pointer(token_indices), token_row, token_step, pointer(out), out.stride(0), topk,
            pointer(block_table), table_row, table_step * entry_bytes, table_rows,
            last_local if last_local <= token_max else token_max, block_stride_rows, last_slot,
            pad, rank, request_wide, requests, request_step, counted, counts_step,
            lengthened, lengths_step, mapping_wide, limit_wide,
        )  # fmt: skip
        if not basic:
            parameters += (
                *_vector(request_rows, words), 0 if request_rows is None else request_rows.shape[0],
                *_vector(token_limits, words), *divmod(last_slot, block_stride_rows),
                *_workspace(ws_request_ids, ws_starts, rank_stride, last_ws_row, words),
            )  # fmt: skip
        finish(rows, topk, parameters)

    return launch


def _workspace(
    request_ids: Tensor | None, starts: Tensor | None, rank_stride: int, last_row: int, words: Make
) -> tuple[Any, ...]:
    if request_ids is None or starts is None:
        return ()
    return (
        *_vector(request_ids, words), _wide(request_ids), *_vector(starts, words), _wide(starts),
        starts.shape[0], rank_stride, last_row,
    )  # fmt: skip


def _wide(tensor: Tensor | None) -> int:
    return ABSENT if tensor is None else 1 if tensor.dtype is torch.int64 else 0


def _vector(tensor: Tensor | None, words: Make) -> tuple[Any, int]:
    return (0, ABSENT) if tensor is None else (words(tensor), tensor.stride(0))


class Shape:
    """Blocks, threads and shared memory of a launch of remap.

    Args:
        config: what is compiled in.
        lanes: threads of a warp.
    """

    def __init__(self, config: RemapConfig, lanes: int) -> None:
        self.lanes = lanes
        self.span = lanes * GROUP * config.groups
        slot_bytes = 8 if config.slot == "int64" else 4
        # A row that is counted is walked by one block; otherwise several share it.
        self.whole_rows = config.counts
        self.shared_bytes = TOTALS * slot_bytes if self.whole_rows else 0
        self.warp_bytes = 0
        self.max_warps = config.warps
        self.min_warps = GROUP // lanes  # threads that carry a begun group to the next tile
        if config.compact:
            self.shared_bytes += MARGIN * slot_bytes
            self.warp_bytes = self.span * slot_bytes
            most = (MAX_SHARED_BYTES - self.shared_bytes) // self.warp_bytes
            self.max_warps = min(config.warps, most)

    def __call__(self, topk: int) -> tuple[int, int, int]:
        """Blocks along a row, threads of a block, and its bytes of shared memory."""
        warps = max(-(-topk // self.span), self.min_warps)
        blocks = 1
        if warps > self.max_warps:
            tiles = -(-warps // self.max_warps)
            warps = -(-warps // tiles)
            if not self.whole_rows:
                blocks = min(tiles, MAX_GRID_Y)
        return blocks, warps * self.lanes, self.shared_bytes + warps * self.warp_bytes
