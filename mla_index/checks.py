"""Refusing bad arguments, in one place: which argument, what it was, what is taken.

`operations.py` calls the functions here. Backends check nothing but what concerns them alone: the
torch backend, that torch's operations may write the outputs. Two kinds: `…_fits` runs at
every call, answers the common case in a microsecond and names nothing; the rest may take its time,
since it runs once for a configuration, or where something is unusual or wrong.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from mla_index.overlap import overlaps
from mla_index.specs import DTYPE_MAX, INT32_MAX, INT64_MAX, index_dtype, integer

Inputs: TypeAlias = tuple[
    Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]
INPUT_NAMES = (
    "token_indices",
    "block_table",
    "req_id",
    "request_rows",
    "token_limits",
    "workspace.request_ids",
    "workspace.starts",
)
Outputs: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
OUTPUT_NAMES = ("out", "counts_out", "lengths_out")


def index_tensor(value: object, name: str) -> None:
    """Refuse what is not an int32 or int64 tensor."""
    index_dtype(_strided(value, name).dtype, f"{name}.dtype")


def _strided(value: object, name: str) -> Tensor:
    """The tensor, if it is one and its elements have strides."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got the layout {value.layout}")
    return value


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
        raise ValueError(f"{name} must be in [{low}, {high}], got {number}")
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


def rank_stride(stride: int, size: int) -> int:
    """`workspace.rank_stride`, if every rank's part has an address in 64 bits."""
    if size * stride > INT64_MAX:
        raise ValueError(
            f"dcp.size * workspace.rank_stride must be below 2**63, got {size} * {stride}"
        )
    return stride


def last_row(value: object, name: str, dtype: torch.dtype) -> int:
    """The largest slot that a bound (or None) leaves in `dtype`."""
    if value is None:
        return DTYPE_MAX[dtype]
    bound = integer(value, name)
    if bound < 0:
        raise ValueError(f"{name} must be at least 0, got {bound}")
    return min(bound - 1, DTYPE_MAX[dtype])


def remap_fits(
    inputs: Inputs, outputs: Outputs, rows: int, topk: int, device: torch.device
) -> bool:
    """Whether shapes, devices, strides and storages are plainly right.

    False says only that `remap_tensors` must look closer: at a storage that an output shares with
    another tensor, for example, which it may well allow.
    """
    _, block_table, req_id, request_rows, token_limits, ws_request_ids, ws_starts = inputs
    shape = (rows,)
    if block_table.dim() != 2 or block_table.device != device:
        return False
    if req_id is not None and (req_id.shape != shape or req_id.device != device):
        return False
    if request_rows is not None or token_limits is not None or ws_request_ids is not None:
        for vector in (token_limits, ws_request_ids):
            if vector is not None and (vector.shape != shape or vector.device != device):
                return False
        for vector in (request_rows, ws_starts):
            if vector is not None and (vector.dim() != 1 or vector.device != device):
                return False
    out, counts_out, lengths_out = outputs
    if out is None and counts_out is None and lengths_out is None:
        return True
    taken = [tensor.untyped_storage().data_ptr() for tensor in inputs if tensor is not None]
    if out is not None:
        if out.shape != (rows, topk) or out.device != device:
            return False
        pitch, step = out.stride()
        start = out.untyped_storage().data_ptr()
        if step != 1 or pitch < topk or start in taken:
            return False
        taken.append(start)
    for vector in (counts_out, lengths_out):
        if vector is not None:
            if vector.shape != shape or vector.device != device or vector.stride() == (0,):
                return False
            start = vector.untyped_storage().data_ptr()
            if start in taken:
                return False
            taken.append(start)
    return True


def remap_tensors(inputs: Inputs, outputs: Outputs, in_place: bool) -> None:
    """Refuse wrong shapes, devices, strides and overlaps of the tensors of `remap`.

    With `in_place`, `out` may be `token_indices` itself.
    """
    given, written = remap_shapes(inputs, outputs)
    refuse_overlap(written, given, in_place)


def remap_shapes(inputs: Inputs, outputs: Outputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Refuse wrong shapes, devices and strides; the tensors that there are, read and written."""
    given = {name: t for name, t in zip(INPUT_NAMES, inputs, strict=True) if t is not None}
    written = {name: t for name, t in zip(OUTPUT_NAMES, outputs, strict=True) if t is not None}
    for name, tensor in (*given.items(), *written.items()):
        _strided(tensor, name)
    rows, topk = given["token_indices"].shape
    dimensions(given["block_table"], 2, "block_table", "[R, W]")
    for name in ("req_id", "token_limits", "workspace.request_ids"):
        if name in given:
            dimensions(given[name], 1, name, "[T]")
            if given[name].shape[0] != rows:
                raise ValueError(
                    f"{name} and token_indices must cover the same tokens, "
                    f"got {given[name].shape[0]} and {rows} rows"
                )
    for name in ("request_rows", "workspace.starts"):
        if name in given:
            dimensions(given[name], 1, name, "[n]")
    for name, tensor in written.items():
        output(tensor, name, (rows, topk) if name == "out" else (rows,))
    same_device({**given, **written}, "token_indices")
    return given, written


def safe_lengths_fit(slots: Tensor, counts: Tensor, out: Tensor | None) -> bool:
    """Whether shapes, devices, strides and storages are plainly right, as `remap_fits`."""
    device, shape = slots.device, counts.shape
    if slots.dim() != 2 or counts.dim() != 1 or counts.device != device:
        return False
    rows, topk = slots.shape
    if shape != (rows,) or topk == 0 or 0 in slots.stride():
        return False
    start, other = slots.untyped_storage().data_ptr(), counts.untyped_storage().data_ptr()
    if start == other:
        return False
    if out is None:
        return True
    return (
        out.shape == shape
        and out.device == device
        and out.stride() != (0,)
        and out.untyped_storage().data_ptr() not in (start, other)
    )


def safe_lengths_tensors(slots: Tensor, counts: Tensor, out: Tensor | None) -> None:
    """Refuse wrong shapes, devices, strides and overlaps of the tensors of `safe_lengths`."""
    written = safe_lengths_shapes(slots, counts, out)
    refuse_overlap(written, {"counts": counts}, in_place=False)


def safe_lengths_shapes(slots: Tensor, counts: Tensor, out: Tensor | None) -> dict[str, Tensor]:
    """Refuse wrong shapes, devices and strides; the tensors that are written."""
    for name, tensor in (("slots", slots), ("counts", counts), ("out", out)):
        if tensor is not None:
            _strided(tensor, name)
    dimensions(slots, 2, "slots", "[T, K]")
    dimensions(counts, 1, "counts", "[T]")
    rows, topk = slots.shape
    if counts.shape[0] != rows:
        raise ValueError(
            f"counts and slots must cover the same rows, got {counts.shape[0]} and {rows}"
        )
    if topk == 0 and rows:
        raise ValueError(
            f"slots must have at least one column for the dummy slot, got {tuple(slots.shape)}"
        )
    strides = slots.stride()
    if any(size > 1 and not step for size, step in zip(slots.shape, strides, strict=True)):
        raise ValueError(f"slots must not be expanded, got strides {strides}")
    written = {"slots": slots}
    if out is not None:
        output(out, "out", (rows,))
        written["out"] = out
    same_device({**written, "counts": counts}, "slots")
    return written


def same_device(tensors: dict[str, Tensor], reference: str) -> None:
    """Refuse a tensor that is not where the reference is."""
    device = tensors[reference].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on {device}, where {reference} is, got {tensor.device}"
            )


def output_dtype(value: object, name: str, dtype: torch.dtype) -> None:
    """Refuse an output that is not a tensor of `dtype`."""
    found = _strided(value, name).dtype
    if found != dtype:
        raise TypeError(f"{name} must be {dtype}, got {found}")


def output(tensor: Tensor, name: str, shape: tuple[int, ...]) -> None:
    """Refuse an output of another shape, or whose elements could fall together."""
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


def refuse_overlap(outputs: dict[str, Tensor], inputs: dict[str, Tensor], in_place: bool) -> None:
    """Refuse an output that shares memory with an input or with another output.

    With `in_place`, `out` may be `token_indices` itself: same start, strides and dtype.
    """
    seen = dict(inputs)
    for name, tensor in outputs.items():
        for other_name, other in seen.items():
            if not overlaps(tensor, other):
                continue
            pair = (name, other_name) == ("out", "token_indices")
            if pair and in_place and _same_view(tensor, other):
                continue
            raise ValueError(
                f"{name} must not overlap {other_name}, but they share memory"
                + (" (out may be token_indices itself only with compact=False)" if pair else "")
            )
        seen[name] = tensor


def _same_view(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and all(
            size < 2 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
        )
    )


def dense_rows(cache: object, block_size: object) -> int:
    """`block_size` as an int, if `kv_cache` can be viewed as flat rows.

    A dimension of size one or less has no next element, so its stride says nothing.
    """
    kv_cache = _strided(cache, "kv_cache")
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
