"""The flat row view of a paged cache: one implementation for every stack with strided views."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class FlatRows(NamedTuple):
    """A paged cache as rows.

    Args:
        rows: `[num_rows, head_dim]`, a view.
        block_stride_rows: rows from one block to the next, what `remap` takes under this name.
    """

    rows: Tensor
    block_stride_rows: int


def flat_row_view(kv_cache: Tensor, block_size: int) -> FlatRows:
    """The view, by strides alone. The caller has checked that the rows are dense."""
    num_blocks, rows_per_block, head_dim = kv_cache.shape
    block_stride_rows = kv_cache.stride(0) // head_dim if num_blocks > 1 else rows_per_block
    num_rows = (num_blocks - 1) * block_stride_rows + block_size if num_blocks else 0
    rows = kv_cache.as_strided((num_rows, head_dim), (head_dim, 1))
    return FlatRows(rows, block_stride_rows)
