"""Launching: on the card by the driver's own call with raw addresses, in the simulator by Numba.

A launch packs numbers into memory of its thread and makes one call. Neither Numba's dispatcher nor
an array object is on that way.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mla_index.backends.numba import kernels
from mla_index.backends.numba.arguments import Shape, remap_arguments
from mla_index.registry import Kernel
from mla_index.specs import RemapSpec, SafeLengthsSpec

# --- on the card --------------------------------------------------------------------------------

_CONFIGURATION = "<7I4xQQI4x"  # CUlaunchConfig: grid, block, shared bytes, stream, attributes
_MOST_PARAMETERS = len(kernels.REMAP_PARAMETERS)
_PACKERS = tuple(struct.Struct(f"{_CONFIGURATION}{n}q") for n in range(_MOST_PARAMETERS + 1))
_INVALID_CONTEXT = 201
_SAFE_LENGTHS_THREADS = 128


class _Memory(threading.local):
    """Where a thread puts a launch's configuration and parameters; the driver copies both."""

    def __init__(self) -> None:
        start = struct.calcsize(_CONFIGURATION)
        buffer = ctypes.create_string_buffer(_PACKERS[-1].size)
        at = ctypes.addressof(buffer)
        addresses = (ctypes.c_void_p * _MOST_PARAMETERS)(
            *(at + start + 8 * i for i in range(_MOST_PARAMETERS))
        )
        self.launch = (buffer, at, addresses)


_memory = _Memory()


def card_kernel(spec: RemapSpec | SafeLengthsSpec, device: torch.device) -> Kernel:
    """Compile and load the one kernel that serves a spec on a device."""
    from mla_index.backends.numba import compile as compiler

    capability = torch.cuda.get_device_capability(device)
    pointer = Tensor.data_ptr
    if isinstance(spec, SafeLengthsSpec):
        start = _starter(compiler.compiled(spec, capability), device.index)
        return Kernel(_safe_lengths(start, pointer), warm=lambda: 1)
    config = compiler.remap_config(spec)
    start = _starter(compiler.compiled(config, capability), device.index)
    shape = Shape(spec, config.groups, 32, compiler.MAX_WARPS)
    launch = _remap(start, shape, remap_arguments(spec, pointer, pointer))
    return Kernel(launch, warm=lambda: 1)


def _starter(compiled: Any, index: int) -> Callable[..., None]:
    """A function that launches a kernel on torch's current stream of device `index`."""
    function, context = _load(compiled, index)
    enqueue = _driver().cuLaunchKernelEx
    current_stream = torch._C._cuda_getCurrentRawStream
    current_device, exchange = torch._C._cuda_getDevice, torch._C._cuda_exchangeDevice

    def start(blocks: int, along: int, threads: int, shared: int, parameters: Any) -> None:
        buffer, configuration, addresses = _memory.launch
        _PACKERS[len(parameters)].pack_into(
            buffer, 0, blocks, along, 1, threads, 1, 1, shared, current_stream(index), 0, 0,
            *parameters,
        )  # fmt: skip
        if current_device() == index:
            status = enqueue(configuration, function, addresses, None)
            if status == _INVALID_CONTEXT:  # a thread that has called nothing of CUDA's yet
                _driver().cuCtxSetCurrent(context)
                status = enqueue(configuration, function, addresses, None)
        else:
            previous = exchange(index)
            status = enqueue(configuration, function, addresses, None)
            exchange(previous)
        if status:
            raise RuntimeError(f"CUDA refused the launch: {_error_name(status)}")

    return start


def _driver() -> Any:
    """The CUDA driver's library, with the two calls of the hot path described to ctypes."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return driver


def _load(compiled: Any, index: int) -> tuple[int, int]:
    """The kernel's function in the device's primary context, and that context."""
    from cuda.bindings import driver

    _checked(driver.cuInit(0))
    context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(index))))
    _checked(driver.cuCtxPushCurrent(context))
    try:
        # Never unloaded: a captured graph may outlive whatever holds the kernel here.
        library = _checked(driver.cuLibraryLoadData(compiled.code, [], [], 0, [], [], 0))
        kernel = _checked(driver.cuLibraryGetKernel(library, compiled.name.encode()))
        function = _checked(driver.cuKernelGetFunction(kernel))
        # The driver may put loading off to the first launch, which a capture would not survive.
        _checked(driver.cuFuncLoad(function))
    finally:
        driver.cuCtxPopCurrent()
    return int(function), int(context)


def _checked(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise RuntimeError(f"the CUDA driver answered {_error_name(int(result[0]))}")
    return result[1] if len(result) > 1 else None


def _error_name(status: int) -> str:
    from cuda.bindings import driver

    try:
        return str(driver.CUresult(status).name)
    except ValueError:
        return f"CUresult {status}"


# --- in the simulator ---------------------------------------------------------------------------

_SIMULATED_WARPS = 4
_simulation = threading.Lock()


def simulated_kernel(spec: RemapSpec | SafeLengthsSpec) -> Kernel:
    """The same kernel, run by Numba's simulator on CPU tensors."""
    from numba import cuda

    from mla_index.backends.numba.target import SimulatedPointer, in_simulator

    def words(tensor: Tensor) -> SimulatedPointer:
        return SimulatedPointer(tensor, words=True)

    target = in_simulator()
    if isinstance(spec, SafeLengthsSpec):
        kernel = cuda.jit(kernels.safe_lengths_kernel(target, "int64"))
        return Kernel(_safe_lengths(_simulator(kernel, 0), SimulatedPointer), warm=lambda: 0)
    from mla_index.backends.numba.compile import remap_config

    config = remap_config(spec)
    kernel = cuda.jit(kernels.remap_kernel(config, target))
    shape = Shape(spec, config.groups, target.lanes, _SIMULATED_WARPS)
    start = _simulator(kernel, len(kernels.REMAP_PARAMETERS))
    launch = _remap(start, shape, remap_arguments(spec, SimulatedPointer, words))
    return Kernel(launch, warm=lambda: 0)


def _simulator(kernel: Any, count: int) -> Callable[..., None]:
    """A function that runs a simulated kernel to its end."""

    def start(blocks: int, along: int, threads: int, shared: int, parameters: Any) -> None:
        absent = (0,) * (count - len(parameters))
        with _simulation, _eager_threads():
            kernel[(blocks, along), threads, 0, shared](*parameters, *absent)

    return start


@contextmanager
def _eager_threads() -> Iterator[None]:
    """Threads hand over at once: the simulator waits for its own by asking them in a loop."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# --- both ---------------------------------------------------------------------------------------


def _remap(
    start: Callable[..., None], shape: Shape, arguments: Callable[..., list[Any]]
) -> Callable[..., None]:
    def launch(
        req_id: Tensor | None, block_table: Tensor, token_indices: Tensor, out: Tensor,
        counts: Tensor | None, lengths: Tensor | None, request_rows: Tensor | None,
        token_limits: Tensor | None, ws_request_ids: Tensor | None, ws_starts: Tensor | None,
        rank: int, block_stride_rows: int, rank_stride: int, last_slot: int, last_ws_row: int,
        pad: int,
    ) -> None:  # fmt: skip
        rows, topk = token_indices.shape
        along, threads, shared = shape(topk)
        parameters = arguments(
            req_id, block_table, token_indices, out, counts, lengths, request_rows, token_limits,
            ws_request_ids, ws_starts, rank, block_stride_rows, rank_stride, last_slot,
            last_ws_row, pad,
        )  # fmt: skip
        start(rows, along, threads, shared, parameters)

    return launch


def _safe_lengths(start: Callable[..., None], pointer: Callable[[Tensor], Any]) -> Any:
    def launch(slots: Tensor, counts: Tensor, lengths: Tensor) -> None:
        rows = slots.shape[0]
        start(
            -(-rows // _SAFE_LENGTHS_THREADS), 1, _SAFE_LENGTHS_THREADS, 0,
            (
                pointer(slots), slots.stride(0), pointer(counts), counts.stride(0),
                pointer(lengths), lengths.stride(0), rows,
            ),
        )  # fmt: skip

    return launch
