"""The same kernels in Numba's simulator, on CPU tensors: for tests, and to step through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numba import cuda
from torch import Tensor

from mla_index.backends.numba import compile as compiler
from mla_index.backends.numba import kernels
from mla_index.backends.numba.arguments import Shape, remap_launcher
from mla_index.backends.numba.compile import Block
from mla_index.backends.numba.launch import Start, safe_lengths_launcher
from mla_index.backends.numba.target import SimulatedPointer, in_simulator
from mla_index.registry import Kernel
from mla_index.specs import RemapSpec, SafeLengthsSpec

BLOCKS = {1: Block(1, 4, 1), 64: Block(2, 4, 1), 128: Block(4, 4, 1)}
"""Every number of groups that the card knows, by width class. Each warp is one thread here; rows
longer than a tile of four are walked, as on the card. Fewer than four would not carry a begun group
from one tile to the next, since each has one lane."""

_one_at_a_time = threading.Lock()


def build(spec: RemapSpec | SafeLengthsSpec) -> Kernel:
    """A kernel that runs in the simulator; nothing is compiled."""
    target = in_simulator()
    if isinstance(spec, SafeLengthsSpec):
        kernel = cuda.jit(kernels.safe_lengths_kernel(target, "int64"))
        start = _starter(kernel, kernels.SAFE_LENGTHS_PARAMETERS)
        return Kernel(safe_lengths_launcher(start, SimulatedPointer))
    config = compiler.remap_config(spec, compiler.of_class(spec.topk, BLOCKS))
    shape = Shape(config, target.lanes)
    start = _starter(cuda.jit(kernels.remap_kernel(config, target)), kernels.REMAP_PARAMETERS)

    def words(tensor: Tensor) -> SimulatedPointer:
        return SimulatedPointer(tensor, words=True)

    def finish(rows: int, topk: int, parameters: tuple[Any, ...]) -> None:
        start(rows, *shape(topk), parameters)

    return Kernel(remap_launcher(spec, SimulatedPointer, words, finish))


def _starter(kernel: Any, names: Sequence[str]) -> Start:
    """A function that runs a kernel to its end."""

    def start(
        blocks: int, along: int, threads: int, shared: int, parameters: Sequence[Any]
    ) -> None:
        left_out = (0,) * (len(names) - len(parameters))
        with _one_at_a_time, _eager_threads():
            kernel[(blocks, along), threads, 0, shared](*parameters, *left_out)

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
