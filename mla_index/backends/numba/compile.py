"""From a kernel's text to machine code, without a device: Numba to PTX, nvJitLink to a cubin.

Going around Numba's own launcher means that Numba never makes or selects a device context, and
that a machine without a GPU compiles exactly what a card would run.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from numba import cuda, types

from mla_index.backends.numba import kernels
from mla_index.backends.numba.target import on_card
from mla_index.specs import RemapSpec, SafeLengthsSpec


class Block(NamedTuple):
    """How the columns of a row are dealt to threads.

    Args:
        groups: groups of four columns of a lane.
        warps: of a thread block at most.
        resident: thread blocks of the most warps that shall fit a multiprocessor's registers, where
            nothing is int64 and there is no workspace; those need more, and get what they need.
    """

    groups: int
    warps: int
    resident: int


FEW_ROWS = {1: Block(1, 32, 2), 2048: Block(2, 32, 1), 16384: Block(4, 16, 2)}
"""By the smallest width class that is dealt so: few groups, and the row in one tile, since a card
with multiprocessors to spare waits for the longest row; with a second group half as many warps add
up their counts. Measured on an H200, as are those below."""

MANY_ROWS = {1: Block(1, 32, 2), 256: Block(2, 32, 1), 512: Block(4, 16, 2)}
"""The same where rows wait for multiprocessors: a lane's other work is shared by more columns."""

NOT_COUNTED = {1: Block(1, 4, 16), 256: Block(2, 4, 9)}
"""The same for any number of rows that are neither compacted nor counted: the blocks of a row need
nothing from each other, and small ones find room sooner."""

SAFE_LENGTHS_THREADS = 128
"""Threads of a block of safe_lengths; one takes a row."""

Config = kernels.RemapConfig | SafeLengthsSpec


class Compiled(NamedTuple):
    """One kernel's code.

    Args:
        name: of the entry point.
        code: a cubin; PTX where nvJitLink would not take Numba's PTX (an older release of it than
            of the compiler), for the driver to try.
        log: what ptxas had to say: registers, stack, spills.
    """

    name: str
    code: bytes
    log: str


_lock = threading.Lock()


def remap_block(spec: RemapSpec, *, many: bool) -> Block:
    """The block of a configuration, for few rows or for many."""
    counted = spec.compact or spec.counts
    return of_class(spec.topk, NOT_COUNTED if not counted else MANY_ROWS if many else FEW_ROWS)


def of_class(topk: int, classes: dict[int, Block]) -> Block:
    """The entry of the largest class that is at most `topk`."""
    return classes[max(width for width in classes if width <= topk)]


def remap_config(spec: RemapSpec, block: Block) -> kernels.RemapConfig:
    """The kernel that serves a spec; specs that differ in what is told by arguments share one."""
    name = {torch.int32: "int32", torch.int64: "int64"}
    wide = torch.int64 in (spec.token_dtype, spec.table_dtype, spec.slot_dtype)
    return kernels.RemapConfig(
        token=name[spec.token_dtype],
        table=name[spec.table_dtype],
        slot=name[spec.slot_dtype],
        block_size=spec.block_size,
        dcp_size=spec.dcp_size,
        dcp_interleave=spec.dcp_interleave,
        compact=spec.compact,
        counts=spec.compact or spec.counts,
        workspace=spec.workspace,
        groups=block.groups,
        warps=block.warps,
        resident=1 if wide or spec.workspace else block.resident,
    )


@cache
def compiled(config: Config, capability: tuple[int, int]) -> Compiled:
    """The code of a kernel for a compute capability, compiled once a process."""
    name, ptx = to_ptx(config, capability)
    try:
        code, log = link(ptx, capability)
    except Exception as error:
        code, log = ptx.encode() + b"\0", f"not linked: {error}"
    return Compiled(name, code, log)


def compiled_kernels() -> int:
    """Kernels compiled so far in this process."""
    return compiled.cache_info().currsize


def to_ptx(config: Config, capability: tuple[int, int]) -> tuple[str, str]:
    """The name of a kernel's entry point and its PTX."""
    # Numba's warnings are about the speed of launches that it does not make here.
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, parameters, pointers = _source(config)
        signature = types.void(
            *(
                types.CPointer(getattr(types, pointers[name])) if name in pointers else types.int64
                for name in parameters
            )
        )
        ptx, _ = cuda.compile(
            function, signature, device=False, abi="numba", cc=capability, output="ptx",
            debug=False, opt=True, launch_bounds=_launch_bounds(config),
        )  # fmt: skip
    entry = re.search(r"\.entry\s+(\w+)\(", ptx)
    if entry is None:
        raise RuntimeError("Numba's PTX has no kernel in it")
    return entry[1], ptx


def _launch_bounds(config: Config) -> tuple[int, int]:
    """Threads of a block at most, and blocks of a multiprocessor at least."""
    if isinstance(config, SafeLengthsSpec):
        return SAFE_LENGTHS_THREADS, 1
    return 32 * config.warps, config.resident


def _source(config: Config) -> tuple[Callable[..., None], tuple[str, ...], dict[str, str]]:
    if isinstance(config, kernels.RemapConfig):
        function = kernels.remap_kernel(config, on_card())
        return function, kernels.REMAP_PARAMETERS, kernels.remap_pointers(config)
    slot, count = (str(d).removeprefix("torch.") for d in (config.slot_dtype, config.count_dtype))
    return (
        kernels.safe_lengths_kernel(on_card(), count),
        kernels.SAFE_LENGTHS_PARAMETERS,
        kernels.safe_lengths_pointers(slot, count),
    )


def link(ptx: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """The cubin of a PTX text, and the log of making it."""
    from cuda.bindings import nvjitlink

    text = ptx.encode()
    options = [f"-arch=sm_{capability[0]}{capability[1]}", "-verbose"]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "mla_index")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin), log.rstrip(b"\0").decode()
