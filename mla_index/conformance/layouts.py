"""How a tensor lies in memory: as data, always inside a larger buffer that is watched as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MARGIN = 16
"""Elements around each view; a multiple of 16 bytes, so that `offset=0` is aligned."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Strides and start of a tensor within its buffer.

    Args:
        step: elements from one column (of the last dimension) to the next.
        gap: elements between the end of a row and the next row.
        offset: elements by which the start is off its alignment.
        transposed: the first dimension runs fastest.
        expanded: dimensions with stride 0 (their values must be equal).
    """

    step: int = 1
    gap: int = 0
    offset: int = 0
    transposed: bool = False
    expanded: tuple[int, ...] = ()

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides in elements."""
        order = range(len(shape)) if self.transposed else range(len(shape) - 1, -1, -1)
        strides, reach = [0] * len(shape), self.step
        for dim in order:
            strides[dim] = reach
            reach = reach * max(shape[dim], 1) + self.gap
        return tuple(0 if dim in self.expanded else s for dim, s in enumerate(strides))


DENSE = Layout()


class Placed(NamedTuple):
    """A view, and the whole buffer that it lies in."""

    buffer: Tensor
    view: Tensor

    def view_of(self, buffer: Tensor) -> Tensor:
        """The same view of another buffer of this size."""
        return buffer.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


def place(
    values: Sequence[object] | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    layout: Layout,
    fill: int,
) -> Placed:
    """A view of `shape` that holds `values` (None: only `fill`), in a buffer filled with `fill`."""
    strides = layout.strides(shape)
    start = MARGIN + layout.offset
    reach = sum((size - 1) * s for size, s in zip(shape, strides, strict=True) if size)
    length = start + max(reach, 0) + 1 + MARGIN
    if values is None:
        buffer = torch.full((length,), fill, dtype=dtype, device=device)
        return Placed(buffer, buffer.as_strided(shape, strides, start))
    buffer = torch.full((length,), fill, dtype=dtype)
    view = buffer.as_strided(shape, strides, start)
    if view.numel():
        content = torch.tensor(values, dtype=dtype).reshape(shape)
        # An expanded dimension is written through its first element.
        first = tuple(
            slice(0, 1) if dim in layout.expanded else slice(None) for dim in range(len(shape))
        )
        view[first].copy_(content[first])
        if not torch.equal(view, content):
            raise ValueError(f"the values are not equal along {layout.expanded}")
    buffer = buffer.to(device)
    return Placed(buffer, buffer.as_strided(shape, strides, start))
