"""What launching needs from CuPy and torch, and the kernels compiled so far.

A kernel is launched by addresses on torch's stream. Its one parameter is a struct, handed over as
the address of packed bytes: CuPy takes 0.2 µs for each Python integer among the arguments, and a
call has forty.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import NamedTuple, Protocol

import torch

from mla_index.backends.cupy.variants import Variant


class HasPtr(Protocol):
    """What CuPy takes for a stream."""

    ptr: int


Function = Callable[[tuple[int, ...], tuple[int, ...], tuple[object, ...], int, HasPtr], object]
"""A loaded kernel: grid, thread block, arguments, bytes of shared memory, stream."""


class Runtime(NamedTuple):
    """What the launchers call. Devices are indices.

    Args:
        function: the kernel of a variant on a device, compiled if this is its first use.
        by_value: a kernel argument whose bytes are read at an address when it is launched.
        stream: handle of torch's current stream on a device.
        current_device: torch's.
        on_device: makes a device current, and the one before it again.
        capturing: whether torch's current stream on a device is in a graph capture.
    """

    function: Callable[[Variant, int], Function]
    by_value: Callable[[int], object]
    stream: Callable[[int], int]
    current_device: Callable[[], int]
    on_device: Callable[[int], AbstractContextManager[object]]
    capturing: Callable[[int], bool]


_lock = threading.Lock()
_functions: dict[tuple[Variant, int], Function] = {}


def compiled_kernels() -> int:
    """How many kernels this process has compiled or loaded, each device counted."""
    return len(_functions)


def _function(variant: Variant, device: int) -> Function:
    """Compiled once, and kept: a captured graph may hold on to it."""
    with _lock:
        function = _functions.get((variant, device))
        if function is None:
            function = _functions[variant, device] = _compile(variant, device)
        return function


def _compile(variant: Variant, device: int) -> Function:
    import cupy

    with _on_device(device):
        kernel = cupy.RawKernel(variant.source, variant.function, variant.options)
        function: Function = kernel.kernel  # this compiles, for the current device
        return function


@contextmanager
def _on_device(device: int) -> Iterator[None]:
    """Both torch and CuPy keep the current device, and each restores its own."""
    import cupy

    with torch.cuda.device(device), cupy.cuda.Device(device):
        yield


def _capturing(device: int) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _stream(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


@cache
def cupy_runtime() -> Runtime:
    """The real one. Imports CuPy."""
    from cupy.cuda.function import CPointer

    return Runtime(
        function=_function,
        by_value=CPointer,
        # The private ones cost a tenth of a microsecond, the public ones one to two.
        stream=getattr(torch._C, "_cuda_getCurrentRawStream", _stream),
        current_device=getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device),
        on_device=_on_device,
        capturing=_capturing,
    )
