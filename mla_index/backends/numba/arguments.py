"""From the contract's tensors to the kernels' parameters, and to the shape of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_index.backends.numba.kernels import ABSENT, GROUP, MARGIN, TOTALS, RemapConfig
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
    entry_bytes = 8 if spec.table_dtype is torch.int64 else 4
    wide_table = spec.table_dtype is torch.int64
    mapped, limited, gathered = spec.request_rows, spec.token_limits, spec.workspace
    int64 = torch.int64

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
            pointer(block_table), table_row * entry_bytes, table_step * entry_bytes, table_rows,
            last_local, block_stride_rows, last_slot, block, offset, pad, rank,
        ]  # fmt: skip
        if req_id is None:
            parameters += (ABSENT, 0, 0)
        else:
            parameters += (1 if req_id.dtype is int64 else 0, words(req_id), req_id.stride(0))
        parameters += _vector(counts, words)
        parameters += _vector(lengths, words)
        parameters += (_wide(request_rows), _wide(token_limits))
        # What no flag above announces is not read, so the end may be left out.
        if mapped or limited or gathered:
            parameters += _vector(request_rows, words)
            parameters.append(0 if request_rows is None else request_rows.shape[0])
            parameters += _vector(token_limits, words)
        if ws_request_ids is not None and ws_starts is not None:
            parameters += (
                *_vector(ws_request_ids, words), _wide(ws_request_ids), *_vector(ws_starts, words),
                _wide(ws_starts), ws_starts.shape[0], rank_stride, last_ws_row,
            )  # fmt: skip
        return parameters

    return arguments


def _wide(tensor: Tensor | None) -> int:
    return ABSENT if tensor is None else 1 if tensor.dtype is torch.int64 else 0


def _vector(tensor: Tensor | None, words: Make) -> tuple[Any, int]:
    return (0, ABSENT) if tensor is None else (words(tensor), tensor.stride(0))


class Shape:
    """Blocks, threads and shared memory of a launch of remap.

    Args:
        config: what is compiled in.
        lanes: threads of a warp.
        max_warps: warps of a block at most.
    """

    def __init__(self, config: RemapConfig, lanes: int, max_warps: int) -> None:
        self.lanes = lanes
        self.max_warps = max_warps
        self.span = lanes * GROUP * config.groups
        slot_bytes = 8 if config.slot == "int64" else 4
        # A row that is counted is walked by one block; otherwise several share it.
        self.whole_rows = config.counts
        self.shared_bytes = TOTALS * slot_bytes if self.whole_rows else 0
        self.warp_bytes = self.span * slot_bytes if config.compact else 0
        if config.compact:
            self.shared_bytes += MARGIN * slot_bytes

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
