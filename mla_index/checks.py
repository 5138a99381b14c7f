"""Refusing bad arguments, in one place: which argument, what it was, what is taken.

`operations.py` calls the functions here; no backend checks anything. What every call needs is
written for speed there; this file may take its time, since it runs once for a configuration or on
the way to an error.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from mla_index.overlap import overlaps
from mla_index.specs import DTYPE_MAX, INT32_MAX, INT64_MAX, index_dtype, integer


def index_tensor(value: object, name: str) -> None:
    """Refuse what is not an int32 or int64 tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    index_dtype(value.dtype, f"{name}.dtype")


def flag(value: object, name: str) -> None:
    """Refuse what is not a bool: `counts=buffer` instead of `counts_out=buffer` is a mistake."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def dimensions(tensor: Tensor, count: int, name: str, shape: str) -> None:
    """Refuse a tensor of another number of dimensions."""
    if tensor.dim() != count:
        raise ValueError(f"{name} must be {count}-D {shape}, got shape {tuple(tensor.shape)}")


def integer_in(value: object, name: str, low: int, high: int) -> int:
    """`value` as an int within `[low, high]`."""
    number = integer(value, name)
    if not low <= number <= high:
        taken = f"in [{low}, {high}]" if high < INT64_MAX else f"at least {low}"
        raise ValueError(f"{name} must be {taken}, got {number}")
    return number


def block_stride(value: object, block_size: int) -> int:
    """`block_stride_rows` as an int."""
    stride = integer(value, "block_stride_rows")
    if stride < block_size:
        raise ValueError(
            f"block_stride_rows must be at least block_size = {block_size}, got {stride}"
        )
    return integer_in(stride, "block_stride_rows", 1, INT32_MAX)


def pad_value(value: object, dtype: torch.dtype) -> int:
    """`pad` as an int that `dtype` holds."""
    limit = DTYPE_MAX[dtype]
    number = integer(value, "pad")
    if not -limit - 1 <= number <= limit:
        raise ValueError(f"pad must fit the slots' dtype {dtype}, got {number}")
    return number


def last_row(value: object, name: str, dtype: torch.dtype) -> int:
    """The largest slot that a bound (or None) leaves in `dtype`."""
    if value is None:
        return DTYPE_MAX[dtype]
    return min(integer_in(value, name, 0, INT64_MAX) - 1, DTYPE_MAX[dtype])


def same_device(tensors: dict[str, Tensor | None], device: torch.device) -> None:
    """Refuse a tensor that is not on `device`, where token_indices are."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} must be on {device}, where token_indices are, got {tensor.device}"
            )


def output(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse an output of another shape or dtype, or whose elements could fall together."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must have exactly the shape {shape}, got {tuple(tensor.shape)}; "
            "pass a slice of a larger buffer"
        )
    strides = tensor.stride()
    if len(shape) == 1:
        if shape[0] > 1 and strides[0] == 0:
            raise ValueError(f"{name} must not be expanded, got stride 0")
    elif shape[1] > 1 and strides[1] != 1:
        raise ValueError(f"{name} must have last stride 1, got strides {strides}")
    elif shape[0] > 1 and strides[0] < shape[1]:
        raise ValueError(
            f"{name} must have a row pitch of at least {shape[1]}, got strides {strides}"
        )


def refuse_overlap(
    outputs: dict[str, Tensor | None], inputs: dict[str, Tensor | None], in_place: bool
) -> None:
    """Refuse an output that shares memory with an input or with another output.

    With `in_place`, `out` may be `token_indices` itself: same start, strides and dtype.
    """
    given = [(name, tensor) for name, tensor in outputs.items() if tensor is not None]
    for i, (name, tensor) in enumerate(given):
        for other_name, other in [*inputs.items(), *given[:i]]:
            if other is None or not overlaps(tensor, other):
                continue
            pair = (name, other_name) == ("out", "token_indices")
            if pair and in_place and _same_view(tensor, other):
                continue
            raise ValueError(
                f"{name} must not overlap {other_name}, but they share memory"
                + (" (out may be token_indices itself only with compact=False)" if pair else "")
            )


def _same_view(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and all(
            size < 2 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
        )
    )


def dense_rows(kv_cache: object, block_size: object) -> int:
    """`block_size` as an int, if `kv_cache` can be viewed as flat rows.

    A dimension of size one or less has no next element, so its stride says nothing.
    """
    if not isinstance(kv_cache, Tensor):
        raise TypeError(f"kv_cache must be a torch.Tensor, got {type(kv_cache).__name__}")
    dimensions(kv_cache, 3, "kv_cache", "[num_blocks, rows_per_block, head_dim]")
    num_blocks, rows_per_block, head_dim = kv_cache.shape
    strides = kv_cache.stride()
    size = integer(block_size, "block_size")
    if head_dim == 0:
        raise ValueError(f"kv_cache must have head_dim of at least 1, got {tuple(kv_cache.shape)}")
    if not 1 <= size <= rows_per_block:
        raise ValueError(
            f"block_size must be in [1, rows_per_block = {rows_per_block}], got {size}"
        )
    if num_blocks == 0:
        return size
    if (head_dim > 1 and strides[2] != 1) or (rows_per_block > 1 and strides[1] != head_dim):
        _not_dense(kv_cache, f"its rows must be dense: strides (…, {head_dim}, 1)")
    if num_blocks > 1 and strides[0] % head_dim:
        _not_dense(kv_cache, f"stride(0) must be a whole number of rows of {head_dim}")
    if num_blocks > 1 and strides[0] < size * head_dim:
        _not_dense(
            kv_cache,
            f"its blocks overlap: stride(0) must be at least block_size * head_dim = "
            f"{size} * {head_dim} = {size * head_dim}",
        )
    return size


def _not_dense(kv_cache: Tensor, why: str) -> NoReturn:
    raise ValueError(
        f"kv_cache of shape {tuple(kv_cache.shape)} and strides {kv_cache.stride()} "
        f"has no flat row view: {why}"
    )
