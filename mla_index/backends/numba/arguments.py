"""From the contract's tensors to the kernels' parameters, and to the shape of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_index.backends.numba import kernels
from mla_index.specs import DTYPE_MAX, RemapSpec

Make = Callable[[Tensor], Any]
"""Makes a kernel's pointer of a tensor."""


def remap_arguments(spec: RemapSpec, pointer: Make, words: Make) -> Callable[..., list[Any]]:
    """A function from the launch parameters to `REMAP_PARAMETERS`, as far as the spec needs them.

    Args:
        spec: the configuration.
        pointer: makes a pointer to a tensor's elements.
        words: makes a pointer to the int32 words of an int32 or int64 tensor.
    """
    token_shift = 3 if spec.token_dtype is torch.int64 else 2
    out_shift = 3 if spec.slot_dtype is torch.int64 else 2
    block_size = spec.block_size
    token_max = DTYPE_MAX[spec.token_dtype]
    wide_table = spec.table_dtype is torch.int64
    basic = not (spec.request_rows or spec.token_limits or spec.workspace)
    int64 = torch.int64

    def scalars(tensor: Tensor | None) -> tuple[Any, int, int]:
        if tensor is None:
            return 0, 0, 0
        return words(tensor), tensor.stride(0), 1 if tensor.dtype is int64 else 0

    def vector(tensor: Tensor | None) -> tuple[Any, int]:
        return (0, 0) if tensor is None else (words(tensor), tensor.stride(0))

    def arguments(
        req_id: Tensor | None, block_table: Tensor, token_indices: Tensor, out: Tensor,
        counts: Tensor | None, lengths: Tensor | None, request_rows: Tensor | None,
        token_limits: Tensor | None, ws_request_ids: Tensor | None, ws_starts: Tensor | None,
        rank: int, block_stride_rows: int, rank_stride: int, last_slot: int, last_ws_row: int,
        pad: int,
    ) -> list[Any]:  # fmt: skip
        token_row, token_step = token_indices.stride()
        table_row, table_step = block_table.stride()
        table_rows, width = block_table.shape
        last_local = width * block_size - 1
        if last_local > token_max:
            last_local = token_max
        # Only int64 entries are held against the block and the offset of the last slot.
        block, offset = divmod(last_slot, block_stride_rows) if wide_table else (0, 0)
        parameters: list[Any] = [
            pointer(token_indices), token_row, token_step,
            token_indices.data_ptr() >> token_shift & 3,
            pointer(out), out.stride(0), out.data_ptr() >> out_shift & 3, token_indices.shape[1],
            pointer(block_table), table_row, table_step, table_rows, last_local,
            block_stride_rows, last_slot, block, offset, pad,
            *scalars(req_id), rank,
        ]  # fmt: skip
        if counts is not None or not basic:
            parameters += vector(counts)
            parameters += vector(lengths)
        if not basic:
            parameters += (
                *scalars(request_rows), 0 if request_rows is None else request_rows.shape[0],
                *scalars(token_limits), *scalars(ws_request_ids), *scalars(ws_starts),
                0 if ws_starts is None else ws_starts.shape[0], rank_stride, last_ws_row,
            )  # fmt: skip
        return parameters

    return arguments


class Shape:
    """Blocks, threads and shared memory of a launch of remap.

    Args:
        spec: the configuration.
        groups: groups of columns that a lane takes.
        lanes: threads of a warp.
        max_warps: warps of a block at most.
    """

    def __init__(self, spec: RemapSpec, groups: int, lanes: int, max_warps: int) -> None:
        self.lanes = lanes
        self.max_warps = max_warps
        self.span = lanes * kernels.GROUP * groups
        slot_bytes = 8 if spec.slot_dtype is torch.int64 else 4
        # A row that is counted is walked by one block; otherwise several share it.
        self.whole_rows = spec.compact or spec.counts
        self.shared_bytes = kernels.TOTALS * slot_bytes if self.whole_rows else 0
        self.warp_bytes = self.span * slot_bytes if spec.compact else 0
        if spec.compact:
            self.shared_bytes += kernels.MARGIN * slot_bytes

    def __call__(self, topk: int) -> tuple[int, int, int]:
        """Blocks along a row, threads of a block, and its bytes of shared memory."""
        warps = -(-topk // self.span)
        blocks = 1
        if warps > self.max_warps:
            tiles = -(-warps // self.max_warps)
            warps = -(-warps // tiles)
            if not self.whole_rows:
                blocks = min(tiles, MAX_GRID_Y)
        return blocks, warps * self.lanes, self.shared_bytes + warps * self.warp_bytes


MAX_GRID_Y = 65_535
