"""What the kernel text needs beyond Numba's common ground, for the card and for the simulator.

The kernels are one text. They run compiled on the card, or as plain Python in Numba's simulator
(`NUMBA_ENABLE_CUDASIM=1`), where there are no pointers and no warps. Everything in which the two
differ is a member of `Target`; `on_card` and `in_simulator` make one each.

A warp of the simulator has one lane. Its arithmetic is that of Python's integers, so it shows what
a kernel means; that nothing wraps on the card where it matters is shown on the card.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from numba import cuda, types
from torch import Tensor


class Pointer(Protocol):
    """An address of int32 or int64 elements, indexed in elements."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    # Only the simulator's has these; kernels come to them by `Target`.
    address: int

    def moved(self, elements: int, /) -> Pointer:
        """The pointer so many elements on."""

    def at_byte(self, offset: int, /) -> int:
        """The element that begins so many bytes on."""


Four = tuple[int, int, int, int]


class Target(NamedTuple):
    """The differences between the card and the simulator.

    Args:
        lanes: threads of a warp.
        function: decorates a function that a kernel calls.
        cast: the integer type of a name such as `int32`; called, it converts.
        constant: a number that Numba takes for one of the type of that name.
        dtype: the element type of a shared array.
        address: of a pointer, in bytes.
        moved: the pointer so many elements on.
        load_at: `(pointer, index, step)` to the element `index * step` bytes on.
        multiply_wide: the int64 product of two int32.
        load4, store4: four adjacent elements from an index that is a multiple of four elements
            from an aligned address, as 16-byte accesses.
        shared_pointer: of a shared array.
        warp_scan: `(value, lane)` to the sum over the lanes up to and including this one.
        warp_last: the last lane's value.
        over_warps: `(shared, warp, warps, lane)`, where `shared` begins with a number for each
            warp, to their sums over the warps before this one and over all.
    """

    lanes: int
    function: Callable[[Callable[..., Any]], Callable[..., Any]]
    cast: Callable[[str], Callable[[int], int]]
    constant: Callable[[str, int], int]
    dtype: Callable[[str], Any]
    address: Callable[[Pointer], int]
    moved: Callable[[Pointer, int], Pointer]
    load_at: Callable[[Pointer, int, int], int]
    multiply_wide: Callable[[int, int], int]
    load4: Callable[[Pointer, int], Four]
    store4: Callable[[Pointer, int, int, int, int, int], None]
    shared_pointer: Callable[[Any], Any]
    warp_scan: Callable[[int, int], int]
    warp_last: Callable[[int], int]
    over_warps: Callable[[Any, int, int, int], tuple[int, int]]


def on_card() -> Target:
    """The target that is compiled."""
    import numpy as np

    from mla_index.backends.numba import intrinsics

    return Target(
        lanes=32,
        # Inlined into the caller before typing: a called function would be compiled for Numba's
        # current device, which initialises it.
        function=cuda.jit(device=True, inline="always"),
        cast=lambda name: getattr(types, name),
        constant=lambda name, value: getattr(np, name)(value),
        dtype=lambda name: getattr(types, name),
        address=intrinsics.address,
        moved=intrinsics.moved,
        load_at=intrinsics.load_at,
        multiply_wide=intrinsics.multiply_wide,
        load4=intrinsics.load4,
        store4=intrinsics.store4,
        shared_pointer=intrinsics.shared_pointer,
        warp_scan=intrinsics.warp_scan,
        warp_last=intrinsics.warp_last,
        over_warps=intrinsics.over_warps,
    )


def in_simulator() -> Target:
    """The target that Numba's simulator runs."""
    return Target(
        lanes=1,
        function=lambda function: function,
        cast=lambda _: int,
        constant=lambda _, value: value,
        dtype=lambda name: getattr(types, name),
        address=lambda pointer: pointer.address,
        moved=lambda pointer, elements: pointer.moved(elements),
        load_at=lambda pointer, index, step: pointer.at_byte(index * step),
        multiply_wide=operator.mul,
        load4=_load4,
        store4=_store4,
        shared_pointer=lambda array: array,
        warp_scan=lambda value, _: value,
        warp_last=lambda value: value,
        over_warps=lambda shared, warp, warps, _: (
            int(shared[:warp].sum()),
            int(shared[:warps].sum()),
        ),
    )


class SimulatedPointer:
    """A tensor's memory as the simulator's kernels see it: it refuses what lies outside the view.

    Args:
        tensor: a view on the CPU, kept alive.
        words: read int64 elements as pairs of int32.
    """

    def __init__(self, tensor: Tensor, words: bool = False) -> None:
        import ctypes

        wide = tensor.dtype == torch.int64
        per_element = 2 if wide and words else 1
        element = ctypes.c_int64 if wide and not words else ctypes.c_int32
        self._tensor = tensor
        self.address = tensor.data_ptr()
        self._element_bytes = ctypes.sizeof(element)
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        self._start = 0
        self._end = (last + 1) * per_element if tensor.numel() else 0
        # ctypes has no bounds of its own and, unlike an array, spans views of any size at no cost.
        self._memory = ctypes.cast(self.address, ctypes.POINTER(element))

    def moved(self, elements: int) -> SimulatedPointer:
        """The pointer so many elements on, within the same bounds."""
        pointer = copy.copy(self)
        pointer._start += elements
        pointer.address += elements * self._element_bytes
        return pointer

    def _check(self, index: int) -> int:
        index += self._start
        if not 0 <= index < self._end:
            raise IndexError(f"element {index} is outside a view that ends at {self._end}")
        return int(index)

    def __getitem__(self, index: int) -> int:
        return int(self._memory[self._check(index)])

    def at_byte(self, offset: int) -> int:
        """The element that begins so many bytes on."""
        return self[offset // self._element_bytes]

    def __setitem__(self, index: int, value: int) -> None:
        self._memory[self._check(index)] = int(value)


def _load4(pointer: Pointer, index: int) -> Four:
    return (
        int(pointer[index]),
        int(pointer[index + 1]),
        int(pointer[index + 2]),
        int(pointer[index + 3]),
    )


def _store4(pointer: Pointer, index: int, a: int, b: int, c: int, d: int) -> None:
    for place, value in enumerate((a, b, c, d), index):
        pointer[place] = value
