"""The cases of `flat_row_view`: numbers and addresses of the view, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

import mla_index
from mla_index import selector
from mla_index.conformance import oracle
from mla_index.conformance.target import Failure, Job, Target


@dataclass(frozen=True, slots=True)
class Cache:
    """A paged cache as a view of a flat buffer; strides and offset in elements."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    block_size: int
    offset: int = 0
    dtype: torch.dtype = torch.float32


VIEWS: dict[str, tuple[Cache, tuple[int, int]]] = {
    # the cache, and its (number of rows, block stride) written down
    "fr25-layer-in-pool": (
        Cache((3, 64, 576), (192 * 576, 576, 1), 64, 64 * 576, torch.bfloat16),
        (448, 192),
    ),
    "dense": (Cache((4, 8, 6), (48, 6, 1), 8), (32, 8)),
    "block-size-below-page": (Cache((4, 8, 6), (48, 6, 1), 5), (29, 8)),
    "one-block": (Cache((1, 8, 6), (7, 6, 1), 8), (8, 8)),
    "no-block": (Cache((0, 8, 6), (48, 6, 1), 8), (0, 8)),
    "one-row": (Cache((3, 1, 6), (18, 1, 1), 1), (7, 3)),
    "head-dim-1": (Cache((3, 4, 1), (5, 1, 9), 4), (14, 5)),
    "pages-overlap-beyond-block": (Cache((3, 8, 6), (30, 6, 1), 5), (15, 5)),
    "uint8": (Cache((3, 4, 656), (8 * 656, 656, 1), 4, 3, torch.uint8), (20, 8)),
}

REFUSED: dict[str, tuple[Cache, tuple[str, ...]]] = {
    # the cache, and what the message must name
    "fr24-rows-not-dense": (Cache((4, 64, 512), (65536, 1024, 1), 64), ("kv_cache", "1024", "512")),
    "columns-not-dense": (Cache((4, 8, 6), (96, 12, 2), 8), ("kv_cache", "12", "2")),
    "transposed": (Cache((4, 8, 6), (48, 1, 8), 8), ("kv_cache", "8")),
    "not-whole-rows": (Cache((4, 8, 6), (50, 6, 1), 8), ("kv_cache", "50", "6")),
    "blocks-overlap": (Cache((4, 8, 6), (42, 6, 1), 8), ("kv_cache", "42", "48")),
    "expanded-blocks": (Cache((4, 8, 6), (0, 6, 1), 8), ("kv_cache", "48")),
    "expanded-rows": (Cache((4, 8, 6), (48, 0, 1), 8), ("kv_cache", "6")),
    "no-head-dim": (Cache((4, 8, 0), (8, 1, 1), 8), ("head_dim",)),
    "block-size-0": (Cache((4, 8, 6), (48, 6, 1), 0), ("block_size", "8", "0")),
    "block-size-above-page": (Cache((4, 8, 6), (48, 6, 1), 9), ("block_size", "8", "9")),
}


def _tensor(cache: Cache, device: torch.device) -> torch.Tensor:
    span = sum((n - 1) * s for n, s in zip(cache.shape, cache.strides, strict=True) if n)
    numbers = torch.arange(cache.offset + max(span, 0) + 1, device=device)
    return numbers.to(cache.dtype).as_strided(cache.shape, cache.strides, cache.offset)


def check_view(cache: Cache, numbers: tuple[int, int], target: Target) -> None:
    """Row count, block stride, and every row of every block at its own address."""
    if oracle.flat_rows(cache.shape, cache.strides, cache.block_size) != numbers:
        raise RuntimeError(f"the oracle disagrees with the case: {numbers}")
    target.choose("flat_row_view", None)
    kv_cache = _tensor(cache, target.device)
    with selector.record_launches() as launches:
        rows, stride = mla_index.flat_row_view(kv_cache, cache.block_size, backend=target.backend)
    if [launch.op for launch in launches] != ["flat_row_view"]:
        raise Failure(f"launched {launches}, must be one flat_row_view")
    if launches[0].backend not in (target.backend, "torch"):
        raise Failure(f"{launches[0].backend} served it, must be {target.backend} or torch")
    if (rows.shape[0], stride) != numbers or rows.shape[1] != cache.shape[2]:
        raise Failure(f"rows {tuple(rows.shape)} with stride {stride}, must be {numbers}")
    if rows.dtype != kv_cache.dtype or rows.device != kv_cache.device:
        raise Failure(f"the view is {rows.dtype} on {rows.device}")
    for block in range(cache.shape[0]):
        for i in range(cache.block_size):
            row, own = rows[block * stride + i], kv_cache[block, i]
            if row.data_ptr() != own.data_ptr() or not torch.equal(row, own):
                raise Failure(f"row {block * stride + i} is not token {i} of block {block}")


def check_refused(cache: Cache, named: tuple[str, ...], target: Target) -> None:
    """A cache without a flat view is refused, with the numbers in the message."""
    if oracle.flat_rows(cache.shape, cache.strides, cache.block_size) is not None:
        raise RuntimeError("the oracle has a view for it")
    kv_cache = _tensor(cache, target.device)
    try:
        mla_index.flat_row_view(kv_cache, cache.block_size, backend=target.backend)
    except ValueError as error:
        missing = [word for word in named if word not in str(error)]
        if missing:
            raise Failure(f"the message must name {missing}, got: {error}") from None
    else:
        raise Failure("must be refused with ValueError, but passed")


def _id(kind: str, name: str) -> str:
    return name if name.startswith("fr") else f"{kind}-{name}"


def jobs() -> Iterator[Job]:
    """All views and refusals."""
    for name, (cache, numbers) in VIEWS.items():
        yield Job(
            _id("view", name), "flat_row_view", ("view",), partial(check_view, cache, numbers)
        )
    for name, (cache, named) in REFUSED.items():
        yield Job(
            _id("view-refused", name),
            "flat_row_view",
            ("view",),
            partial(check_refused, cache, named),
        )
