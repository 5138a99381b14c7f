"""Launching on the card: by the driver's own call, with raw addresses.

A launch packs numbers into memory of its thread and makes one call. Neither Numba's dispatcher nor
an array object is on that way, and no context of Numba's is ever made.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mla_index.backends.numba import compile as compiler
from mla_index.backends.numba.arguments import Shape, remap_launcher
from mla_index.backends.numba.kernels import REMAP_PARAMETERS, RemapConfig
from mla_index.errors import NotWarm
from mla_index.registry import Kernel
from mla_index.specs import RemapSpec, SafeLengthsSpec

Start = Callable[[int, int, int, int, Sequence[Any]], None]
"""`(blocks, blocks along a row, threads, bytes of shared memory, parameters)`: launches."""

MANY_COLUMNS = 7_500
"""Columns of a call for each multiprocessor from which on there are many rows; lanes that take one
group of columns would fill it almost twice over. Measured on an H200: see docs/performance.md."""


def build(spec: RemapSpec | SafeLengthsSpec, device: torch.device) -> Kernel:
    """Compile and load what a first call needs; the kernel for many rows follows on demand."""
    if isinstance(spec, SafeLengthsSpec):
        return Kernel(safe_lengths_launcher(_starter(spec, device), Tensor.data_ptr), lambda: 1)
    variants = _Variants(spec, device)
    pointer = Tensor.data_ptr
    return Kernel(remap_launcher(spec, pointer, pointer, variants.launch), variants.warm)


def safe_lengths_launcher(start: Start, pointer: Callable[[Tensor], Any]) -> Callable[..., None]:
    """The launcher of safe_lengths, on the card or in the simulator."""

    def launch(slots: Tensor, counts: Tensor, lengths: Tensor) -> None:
        rows, threads = slots.shape[0], compiler.SAFE_LENGTHS_THREADS
        start(
            -(-rows // threads), 1, threads, 0,
            (
                pointer(slots), slots.stride(0), pointer(counts), counts.stride(0),
                pointer(lengths), lengths.stride(0), rows,
            ),
        )  # fmt: skip

    return launch


class _Variants:
    """The kernels of one configuration: for few rows, and for many (built when there are)."""

    def __init__(self, spec: RemapSpec, device: torch.device) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.many_from = MANY_COLUMNS * processors
        self._spec, self._device = spec, device
        self._lock = threading.Lock()
        self._config = self._of(many=False)
        self.few = self._built(self._config)
        self.many: tuple[Start, Shape] | None = None

    def launch(self, rows: int, topk: int, parameters: tuple[Any, ...]) -> None:
        """Launch whichever kernel suits so many rows."""
        if rows * topk < self.many_from:
            start, shape = self.few
        else:
            start, shape = self.many or self.build_many()
        start(rows, *shape(topk), parameters)

    def build_many(self) -> tuple[Start, Shape]:
        """The kernel for many rows; the first call of it compiles."""
        with self._lock:
            if self.many is None:
                config = self._of(many=True)
                self.many = self.few if config == self._config else self._built(config)
            return self.many

    def warm(self) -> int:
        """Compile what is left; how many kernels there are."""
        return 1 if self.build_many() is self.few else 2

    def _of(self, *, many: bool) -> RemapConfig:
        return compiler.remap_config(self._spec, compiler.remap_block(self._spec, many=many))

    def _built(self, config: RemapConfig) -> tuple[Start, Shape]:
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise NotWarm(
                    f"first use of numba's remap for this configuration on {self._device} inside "
                    "a CUDA graph capture: call mla_index.warmup before the capture"
                )
        return _starter(config, self._device), Shape(config, 32)


# --- the driver ---------------------------------------------------------------------------------

_CONFIGURATION = "<7I4xQQI4x"  # CUlaunchConfig: grid, block, shared bytes, stream, attributes
_PACKERS = tuple(struct.Struct(f"{_CONFIGURATION}{n}q") for n in range(len(REMAP_PARAMETERS) + 1))
_INVALID_CONTEXT = 201


class _Memory(threading.local):
    """Where a thread puts a launch's configuration and parameters; the driver copies both."""

    def __init__(self) -> None:
        start = struct.calcsize(_CONFIGURATION)
        buffer = ctypes.create_string_buffer(_PACKERS[-1].size)
        at = ctypes.addressof(buffer)
        addresses = (ctypes.c_void_p * len(REMAP_PARAMETERS))(
            *(at + start + 8 * i for i in range(len(REMAP_PARAMETERS)))
        )
        self.launch = (buffer, at, addresses)


_memory = _Memory()


def _starter(config: compiler.Config, device: torch.device) -> Start:
    """Compile and load a kernel; a function that launches it on torch's current stream."""
    index = device.index
    code = compiler.compiled(config, torch.cuda.get_device_capability(device))
    function, context = _load(code, index)
    enqueue, use_context = _driver_calls()
    current_stream = torch._C._cuda_getCurrentRawStream
    current_device, exchange = torch._C._cuda_getDevice, torch._C._cuda_exchangeDevice
    # Going back by `exchange` would make a context on a device that has none yet.
    back_to = torch._C._cuda_maybeExchangeDevice

    def start(
        blocks: int, along: int, threads: int, shared: int, parameters: Sequence[Any]
    ) -> None:
        buffer, configuration, addresses = _memory.launch
        _PACKERS[len(parameters)].pack_into(
            buffer, 0, blocks, along, 1, threads, 1, 1, shared, current_stream(index), 0, 0,
            *parameters,
        )  # fmt: skip
        if current_device() == index:
            status = enqueue(configuration, function, addresses, None)
            if status == _INVALID_CONTEXT:  # a thread that has called nothing of CUDA's yet
                use_context(context)
                status = enqueue(configuration, function, addresses, None)
        else:
            previous = exchange(index)
            status = enqueue(configuration, function, addresses, None)
            back_to(previous)
        if status:
            raise RuntimeError(f"CUDA refused the launch: {_error_name(status)}")

    return start


@cache
def _driver_calls() -> tuple[Any, Any]:
    """`cuLaunchKernelEx` and `cuCtxSetCurrent`: through ctypes they cost half of the bindings."""
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return driver.cuLaunchKernelEx, driver.cuCtxSetCurrent


def _load(compiled: compiler.Compiled, index: int) -> tuple[int, int]:
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
