"""vLLM's sparse MLA utilities, under its names and signatures, on every backend and on the CPU.

The names, parameters, defaults and return types are those of vLLM 0.33.0,
`vllm/v1/attention/backends/mla/sparse_utils.py`. Results are vLLM's wherever those are defined and
in bounds; `docs/integrations/vllm.md` lists the deliberate differences. As there, bad arguments
raise `AssertionError`; here it is raised, not asserted, so that `python -O` keeps it.

Everything is passed on to the operations of `mla_index`. What costs time at every call is only
what vLLM refuses and they take: index tensors of another dtype, outputs that are not contiguous.
"""

# No `from __future__ import annotations`: the signatures must equal vLLM's, annotations included.

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from mla_index import operations, rows
from mla_index.errors import BackendError
from mla_index.specs import Dcp, PrefillWorkspace

if TYPE_CHECKING:
    import numpy as np

INT32 = torch.int32


def triton_convert_req_index_to_global_index(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    BLOCK_SIZE: int = 64,  # noqa: N803
    BLOCK_STRIDE_ROWS: int | None = None,  # noqa: N803
    NUM_TOPK_TOKENS: int = 2048,  # noqa: N803
    BLOCK_N: int = 128,  # noqa: N803
    HAS_PREFILL_WORKSPACE: bool = False,  # noqa: N803
    prefill_workspace_request_ids: torch.Tensor | None = None,
    prefill_workspace_starts: torch.Tensor | None = None,
    prefill_workspace_rank_stride: int | None = None,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    return_valid_counts: bool = False,
    out: torch.Tensor | None = None,
    valid_counts_out: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Slots of the selected tokens; `mla_index.remap` under vLLM's name.

    Args:
        req_id: int32 `[T]`, the request of each row.
        block_table: int32 `[R, W]`.
        token_indices: int32 `[T, NUM_TOPK_TOKENS]`, request-local token numbers.
        BLOCK_SIZE: tokens in a block.
        BLOCK_STRIDE_ROWS: rows from one block to the next; by default `BLOCK_SIZE`.
        NUM_TOPK_TOKENS: columns of `token_indices`.
        BLOCK_N: must divide `NUM_TOPK_TOKENS`; has no other effect.
        HAS_PREFILL_WORKSPACE: whether the three that follow are looked at.
        prefill_workspace_request_ids: int32, at least `[T]`; negative for rows of the paged cache.
        prefill_workspace_starts: int32 `[P]`.
        prefill_workspace_rank_stride: rows of one rank's part of the workspace; None: 0.
        dcp_size: ranks of decode context parallelism.
        dcp_rank: this one.
        cp_kv_cache_interleave_size: adjacent tokens that stay on one rank.
        return_valid_counts: compact each row, in order, and count its valid slots.
        out: int32 `[T, NUM_TOPK_TOKENS]`, contiguous.
        valid_counts_out: int32 `[T]`, contiguous; not looked at without `return_valid_counts`.
        idx_mapping: int32, contiguous; maps a request id to its row of the table.

    Returns:
        The slots, int32 `[T, NUM_TOPK_TOKENS]`; with `return_valid_counts`, also int32 `[T]`.

    Raises:
        AssertionError: a bad argument.
        BackendError: as `mla_index.remap`.
    """
    shape = token_indices.shape
    if (
        token_indices.dtype is not INT32
        or req_id.dtype is not INT32
        or block_table.dtype is not INT32
        or len(shape) != 2
        or shape[1] != NUM_TOPK_TOKENS
        or BLOCK_N < 1
        or NUM_TOPK_TOKENS % BLOCK_N
    ):
        _refuse_indices(req_id, block_table, token_indices, NUM_TOPK_TOKENS, BLOCK_N)
    # `_check_plain` written out for what most calls give: asking it costs 0.1 µs each.
    if out is not None and (out.dtype is not INT32 or not out.is_contiguous()):
        _check_plain(out, "out")
    if not return_valid_counts:
        valid_counts_out = None
    elif valid_counts_out is not None and (
        valid_counts_out.dtype is not INT32 or not valid_counts_out.is_contiguous()
    ):
        _check_plain(valid_counts_out, "valid_counts_out")
    if idx_mapping is not None:
        _check_plain(idx_mapping, "idx_mapping")
    try:
        dcp = None
        if dcp_size != 1 or dcp_rank:
            dcp = _dcp(dcp_size, dcp_rank, cp_kv_cache_interleave_size)
        workspace = None
        if HAS_PREFILL_WORKSPACE:
            workspace = _workspace(
                prefill_workspace_request_ids,
                prefill_workspace_starts,
                prefill_workspace_rank_stride,
                shape[0],
            )
        slots, counts, _ = operations.remap(
            req_id,
            block_table,
            token_indices,
            block_size=BLOCK_SIZE,
            block_stride_rows=BLOCK_STRIDE_ROWS,
            request_rows=idx_mapping,
            workspace=workspace,
            dcp=dcp,
            compact=return_valid_counts,
            counts=return_valid_counts,
            out=out,
            counts_out=valid_counts_out,
        )
    except BackendError:
        raise
    except (TypeError, ValueError) as error:
        raise AssertionError(_renamed(error, _REMAP_NAMES)) from error
    return slots if counts is None else (slots, counts)


def triton_filter_and_convert_dcp_index(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    BLOCK_SIZE: int = 64,  # noqa: N803
    BLOCK_STRIDE_ROWS: int | None = None,  # noqa: N803
    NUM_TOPK_TOKENS: int = 2048,  # noqa: N803
    BLOCK_N: int = 128,  # noqa: N803
    return_valid_counts: bool = False,
    compact_valid_to_front: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """This rank's slots of a global selection; `mla_index.dcp_filter` under vLLM's name.

    One rank (`dcp_size == 1`) hands over to `triton_convert_req_index_to_global_index`, and so
    compacts only when counts are asked for.

    The arguments, the result and the errors are those of the other function, but for these:
    `cp_kv_cache_interleave_size` must divide `BLOCK_SIZE`; `return_valid_counts` asks for the
    number of this rank's slots in each row alone; `compact_valid_to_front` puts them first, in the
    order in which they came.
    """
    shape = token_indices.shape
    if (
        not 0 <= dcp_rank < dcp_size
        or cp_kv_cache_interleave_size < 1
        or BLOCK_SIZE % cp_kv_cache_interleave_size
    ):
        _refuse_ranks(dcp_size, dcp_rank, cp_kv_cache_interleave_size, BLOCK_SIZE)
    if (
        token_indices.dtype is not INT32
        or req_id.dtype is not INT32
        or block_table.dtype is not INT32
        or len(shape) != 2
        or shape[1] != NUM_TOPK_TOKENS
        or BLOCK_N < 1
        or NUM_TOPK_TOKENS % BLOCK_N
    ):
        _refuse_indices(req_id, block_table, token_indices, NUM_TOPK_TOKENS, BLOCK_N)
    try:
        if dcp_size == 1:
            slots, counts, _ = operations.remap(
                req_id,
                block_table,
                token_indices,
                block_size=BLOCK_SIZE,
                block_stride_rows=BLOCK_STRIDE_ROWS,
                compact=return_valid_counts,
                counts=return_valid_counts,
            )
        else:
            slots, counts, _ = operations.dcp_filter(
                req_id,
                block_table,
                token_indices,
                _dcp(dcp_size, dcp_rank, cp_kv_cache_interleave_size),
                block_size=BLOCK_SIZE,
                block_stride_rows=BLOCK_STRIDE_ROWS,
                compact=compact_valid_to_front,
                counts=return_valid_counts,
            )
    except BackendError:
        raise
    except (TypeError, ValueError) as error:
        names = _REMAP_NAMES if dcp_size == 1 else _FILTER_NAMES
        raise AssertionError(_renamed(error, names)) from error
    return slots if counts is None else (slots, counts)


def prepare_sparse_mla_safe_lengths(
    physical_indices: torch.Tensor, valid_counts: torch.Tensor
) -> torch.Tensor:
    """Lengths of at least 1, with a dummy slot in empty rows; `mla_index.safe_lengths`.

    Args:
        physical_indices: int32 or int64, at least `[T, K]`; changed in place where a count is 0 or
            less.
        valid_counts: int32 or int64 `[T]`; kept as it is.

    Returns:
        The lengths `[T]`, in the dtype of `valid_counts`.

    Raises:
        AssertionError: a bad argument.
        BackendError: as `mla_index.safe_lengths`.
    """
    try:
        num_tokens = valid_counts.shape[0]
        if physical_indices.shape[0] > num_tokens:  # the counts tell which rows are meant
            physical_indices = physical_indices[:num_tokens]
        return operations.safe_lengths(physical_indices, valid_counts)
    except BackendError:
        raise
    except (TypeError, ValueError) as error:
        raise AssertionError(_renamed(error, _LENGTH_NAMES)) from error


def flat_kv_row_view(kv_cache: torch.Tensor, block_size: int) -> tuple[torch.Tensor, int]:
    """The paged cache as rows, and the rows from one block to the next; `mla_index.flat_row_view`.

    Args:
        kv_cache: `[num_blocks, rows_per_block, head_dim]` with dense rows.
        block_size: rows of a block that hold tokens.

    Returns:
        `(rows, block_stride_rows)`; `rows` is a view `[num_rows, head_dim]`.

    Raises:
        AssertionError: the cache has no flat row view; the message has the numbers.
    """
    try:
        view, block_stride_rows = operations.flat_row_view(kv_cache, block_size)
    except BackendError:
        raise
    except (TypeError, ValueError) as error:
        raise AssertionError(str(error)) from error
    num_blocks, _, head_dim = kv_cache.shape
    if num_blocks == 1:
        # There is no next block; vLLM takes the stride for its distance all the same.
        whole, rest = divmod(kv_cache.stride(0), head_dim)
        if not rest and whole >= block_size:
            block_stride_rows = whole
    return view, block_stride_rows


def request_row_bounds(req_idx: "np.ndarray") -> "np.ndarray":
    """Bounds of the runs of adjacent equal request ids; `mla_index.request_row_bounds`.

    Raises:
        AssertionError: empty, not 1-D, or one request in two runs.
    """
    try:
        return rows.request_row_bounds(req_idx)
    except (TypeError, ValueError) as error:
        raise AssertionError(str(error)) from error


# --- refusals, and what is made of vLLM's arguments ---------------------------------------------

# As in `operations`, a constant to a compiler.
_compiling = torch.compiler.is_dynamo_compiling

_kept_dcp = lru_cache(maxsize=256)(Dcp)
"""A description is checked when it is made, which costs more than the rest of a call."""


def _dcp(size: int, rank: int, interleave: int) -> Dcp:
    if _compiling() or not type(size) is type(rank) is type(interleave) is int:
        # A compiler sees through no cache, and of numbers some may change: a tensor's.
        return Dcp(size, rank, interleave)
    return _kept_dcp(size, rank, interleave)


class _Made(NamedTuple):
    """A workspace and what else it was made of."""

    starts: torch.Tensor
    rank_stride: int | None
    rows: int
    workspace: PrefillWorkspace


_latest: _Made | None = None
"""The last one, kept for a caller that passes the same in every layer of a step."""


def _workspace(
    request_ids: torch.Tensor | None,
    starts: torch.Tensor | None,
    rank_stride: int | None,
    num_tokens: int,
) -> PrefillWorkspace:
    global _latest
    if type(request_ids) is not torch.Tensor or _compiling():
        # What is traced has no address, and must not be kept.
        return _made_workspace(request_ids, starts, rank_stride, num_tokens)
    if _latest is not None:
        of, stride, rows, workspace = _latest
        if (
            of is starts
            and stride == rank_stride
            and type(stride) is type(rank_stride)
            and rows == num_tokens
        ):
            mine = workspace.request_ids
            if mine is request_ids:  # whatever has become of it in place is what is meant
                if mine.shape[0] == rows:
                    return workspace
            elif _begins_with(request_ids, mine, rows):
                return workspace
    workspace = _made_workspace(request_ids, starts, rank_stride, num_tokens)
    if starts is not None and (rank_stride is None or type(rank_stride) is int):
        _latest = _Made(starts, rank_stride, num_tokens, workspace)
    return workspace


def _begins_with(ids: torch.Tensor, kept: torch.Tensor, rows: int) -> bool:
    """Whether `kept` is the first `rows` elements of `ids`, in the same memory."""
    return (
        ids.data_ptr() == kept.data_ptr()
        and ids.shape[0] >= rows == kept.shape[0]
        and ids.stride() == kept.stride()
        and ids.dtype is kept.dtype
        and ids.device == kept.device
    )


def _made_workspace(
    request_ids: torch.Tensor | None,
    starts: torch.Tensor | None,
    rank_stride: int | None,
    num_tokens: int,
) -> PrefillWorkspace:
    if request_ids is None or starts is None:
        raise ValueError(
            "HAS_PREFILL_WORKSPACE=True needs prefill_workspace_request_ids and "
            "prefill_workspace_starts, got None"
        )
    _check_plain(request_ids, "prefill_workspace_request_ids")
    _check_plain(starts, "prefill_workspace_starts")
    if request_ids.shape[0] > num_tokens:  # made for the whole batch, of which these rows are part
        request_ids = request_ids[:num_tokens]
    return PrefillWorkspace(request_ids, starts, rank_stride or 0)


def _check_plain(tensor: torch.Tensor, name: str) -> None:
    """Refuse what vLLM's kernels, which are not told these strides, could not take either."""
    if tensor.dtype is not INT32 or not tensor.is_contiguous():
        raise AssertionError(
            f"{name} must be torch.int32 and contiguous, got {tensor.dtype} with shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}"
        )


def _refuse_indices(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    topk: int,
    block_n: int,
) -> NoReturn:
    given = {"req_id": req_id, "block_table": block_table, "token_indices": token_indices}
    for name, tensor in given.items():
        if tensor.dtype is not INT32:
            raise AssertionError(f"{name} must be torch.int32, got {tensor.dtype}")
    if token_indices.dim() != 2 or token_indices.shape[1] != topk:
        raise AssertionError(
            f"NUM_TOPK_TOKENS ({topk}) must be the number of columns of token_indices, "
            f"got shape {tuple(token_indices.shape)}"
        )
    raise AssertionError(f"NUM_TOPK_TOKENS ({topk}) must be divisible by BLOCK_N ({block_n})")


def _refuse_ranks(size: int, rank: int, interleave: int, block_size: int) -> NoReturn:
    if size < 1:
        raise AssertionError(f"dcp_size must be at least 1, got {size}")
    if not 0 <= rank < size:
        raise AssertionError(f"dcp_rank must be in [0, {size}), got {rank}")
    raise AssertionError(
        f"BLOCK_SIZE ({block_size}) must be divisible by cp_kv_cache_interleave_size ({interleave})"
    )


_REMAP_NAMES = {
    "block_size": "BLOCK_SIZE",
    "block_stride_rows": "BLOCK_STRIDE_ROWS",
    "compact": "return_valid_counts",
    "counts": "return_valid_counts",
    "counts_out": "valid_counts_out",
    "request_rows": "idx_mapping",
    "workspace.rank_stride": "prefill_workspace_rank_stride",
    "workspace.request_ids": "prefill_workspace_request_ids",
    "workspace.starts": "prefill_workspace_starts",
    "Dcp.interleave": "cp_kv_cache_interleave_size",
    "Dcp.rank": "dcp_rank",
    "Dcp.size": "dcp_size",
}
_FILTER_NAMES = {**_REMAP_NAMES, "compact": "compact_valid_to_front"}
_LENGTH_NAMES = {"counts": "valid_counts", "slots": "physical_indices"}
"""vLLM's names of what the operations name in their errors."""


def _renamed(error: Exception, names: dict[str, str]) -> str:
    """The message of an error with vLLM's names of the arguments."""
    named = rf"(?<![\w.])(?:{'|'.join(map(re.escape, names))})(?!\w)"
    return re.sub(named, lambda match: names[match[0]], str(error))
