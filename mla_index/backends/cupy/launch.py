"""The hot path: one launch by addresses on torch's current stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from mla_index.backends.cupy.runtime import Function, Runtime
from mla_index.backends.cupy.variants import (
    BYTES,
    MAX_PARTS,
    Layout,
    Variant,
    few_rows,
    remap_layouts,
    remap_variants,
    safe_lengths_variants,
)
from mla_index.errors import NotWarm
from mla_index.registry import Kernel
from mla_index.specs import DTYPE_MAX, RemapSpec, SafeLengthsSpec

# The fields of the kernels' `Params`, in order; each has 8 bytes. `*` marks unsigned numbers.
REMAP_FIELDS = """
tokens token_pitch token_step out out_pitch table table_pitch table_step table_rows rows topk
req_id.data req_id.stride req_id.bytes counts counts_stride lengths lengths_stride
*token_end *entry_end rank block_stride_rows last_slot pad
"""
REMAP_EXTRA_FIELDS = """
request_rows.data request_rows.stride request_rows.bytes num_request_rows
token_limits.data token_limits.stride token_limits.bytes
ws_request_ids.data ws_request_ids.stride ws_request_ids.bytes
ws_starts.data ws_starts.stride ws_starts.bytes num_ws_starts
*local_end rank_stride last_ws_row
"""
SAFE_LENGTHS_FIELDS = "slots slot_pitch counts counts_stride lengths lengths_stride rows"
MAX_GRID = 2**31 - 1
LEGACY_STREAM = 1
"""CUDA's name for the stream 0 that torch means, also where CuPy takes 0 for a thread's own."""
TOKEN_END = 2**63
"""No token has this number; as a bound it lets every token pass."""


def _packer(fields: str) -> struct.Struct:
    return struct.Struct("=" + "".join("Q" if name[0] == "*" else "q" for name in fields.split()))


_REMAP = _packer(REMAP_FIELDS)
_REMAP_EXTRA = _packer(REMAP_EXTRA_FIELDS)
_SAFE_LENGTHS = _packer(SAFE_LENGTHS_FIELDS)


class _Stream:
    """What CuPy takes for a stream."""

    __slots__ = ("ptr",)
    ptr: int


class _Arguments(threading.local):
    """Where a thread packs the parameters of its next launch, which reads them before it returns.

    Nothing comes between packing and launching, so that one buffer a thread is enough.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.buffer = bytearray(_REMAP.size + _REMAP_EXTRA.size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.by_value = (runtime.by_value(address),)
        self.stream = _Stream()


class _Functions:
    """The kernels of a configuration on one device, by variant, each compiled at its first use."""

    def __init__(
        self, op: str, variants: tuple[Variant, ...], device: torch.device, runtime: Runtime
    ) -> None:
        self.variants = variants
        self.loaded: list[Function | None] = [None] * len(variants)
        self._op = op
        self._device = device
        self._runtime = runtime

    def load(self, which: int) -> Function:
        """Compile it, which a graph capture would not survive."""
        index = self._device.index
        if self._runtime.capturing(index):
            raise NotWarm(
                f"{self._op} of this configuration is compiled at its first use, and that falls "
                f"into a CUDA graph capture: call mla_index.warmup({self._op!r}, spec, "
                f"device={str(self._device)!r}, backend='cupy') before the capture"
            )
        function = self.loaded[which] = self._runtime.function(self.variants[which], index)
        return function

    def warm(self) -> int:
        """Compile all of them; their number."""
        for which, function in enumerate(self.loaded):
            if function is None:
                self.load(which)
        return len(self.loaded)


# --- remap ----------------------------------------------------------------------------------------


class _Numbers(NamedTuple):
    """What follows from the numbers of a call: mostly those of the call before."""

    place: int  # of the kernel
    grid: tuple[int, int]
    block: tuple[int]
    shared: int
    token_end: int
    local_end: int
    entry_end: int


def remap_kernel(spec: RemapSpec, device: torch.device, runtime: Runtime) -> Kernel:
    """The launcher of one configuration on one device."""
    variants, layouts = remap_variants(spec), remap_layouts(spec)
    functions = _Functions("remap", tuple(dict.fromkeys(variants.values())), device, runtime)
    places = {kind: functions.variants.index(variant) for kind, variant in variants.items()}
    loaded, most_few = functions.loaded, few_rows(spec)
    arguments = _Arguments(runtime)
    pack, pack_extra, extra_at = _REMAP.pack_into, _REMAP_EXTRA.pack_into, _REMAP.size
    index = device.index
    extra = spec.request_rows or spec.token_limits or spec.workspace
    token_bytes, slot_bytes = BYTES[spec.token_dtype], BYTES[spec.slot_dtype]
    # The last call's numbers and what follows from them, in one object: threads may race for it.
    latest: list[tuple[tuple[int, ...], _Numbers | None]] = [((), None)]

    def launch(
        req_id: Tensor | None,
        block_table: Tensor,
        token_indices: Tensor,
        out: Tensor,
        counts: Tensor | None,
        lengths: Tensor | None,
        request_rows: Tensor | None,
        token_limits: Tensor | None,
        ws_request_ids: Tensor | None,
        ws_starts: Tensor | None,
        rank: int,
        block_stride_rows: int,
        rank_stride: int,
        last_slot: int,
        last_ws_row: int,
        pad: int,
    ) -> None:
        rows, topk = token_indices.shape
        token_pitch, token_step = token_indices.stride()
        out_pitch, _ = out.stride()
        table_rows, table_width = block_table.shape
        table_pitch, table_step = block_table.stride()
        tokens_at, out_at = token_indices.data_ptr(), out.data_ptr()
        unaligned = tokens_at | out_at | token_pitch * token_bytes | out_pitch * slot_bytes
        vector = token_step == table_step == 1 and not (topk & 3 or unaligned & 15)

        key = (vector, rows, topk, table_width, rank, block_stride_rows, last_slot)
        known, numbers = latest[0]
        if numbers is None or known != key:
            kind = (vector, rows > most_few)
            numbers = _numbers(spec, places[kind], layouts[kind], *key[1:])
            latest[0] = (key, numbers)
        place, grid, block, shared, token_end, local_end, entry_end = numbers
        function = loaded[place] or functions.load(place)
        req_at, req_stride, req_bytes = (0, 0, 4) if req_id is None else _column(req_id)
        counts_at, counts_stride = (0, 0) if counts is None else _result(counts)
        lengths_at, lengths_stride = (0, 0) if lengths is None else _result(lengths)
        buffer = arguments.buffer
        if extra:
            pack_extra(
                buffer, extra_at,
                *_sized_column(request_rows), *_column(token_limits),
                *_column(ws_request_ids), *_sized_column(ws_starts),
                local_end, rank_stride, last_ws_row,
            )  # fmt: skip
        pack(
            buffer, 0,
            tokens_at, token_pitch, token_step, out_at, out_pitch,
            block_table.data_ptr(), table_pitch, table_step, table_rows, rows, topk,
            req_at, req_stride, req_bytes, counts_at, counts_stride, lengths_at, lengths_stride,
            token_end, entry_end, rank, block_stride_rows, last_slot, pad,
        )  # fmt: skip
        _launch(runtime, function, grid, block, shared, arguments, index)

    return Kernel(launch, functions.warm)


def _numbers(
    spec: RemapSpec,
    place: int,
    shape: Layout,
    rows: int,
    topk: int,
    table_width: int,
    rank: int,
    block_stride_rows: int,
    last_slot: int,
) -> _Numbers:
    return _Numbers(
        place,
        *geometry(shape, spec.compact, BYTES[spec.slot_dtype], rows, topk),
        *token_ends(spec, table_width, rank),
        min(last_slot // block_stride_rows, DTYPE_MAX[spec.table_dtype]) + 1,
    )


def token_ends(spec: RemapSpec, table_width: int, rank: int) -> tuple[int, int]:
    """Bounds that stand for "the token's block is within the table's width".

    Token numbers within this rank are below the second. Without a workspace only this rank's tokens
    count, and those ascend with their number within the rank: one bound on the token says all.
    """
    local_end = table_width * spec.block_size
    token_cap = DTYPE_MAX[spec.token_dtype] + 1  # makes a negative token, read as unsigned, invalid
    if spec.workspace:
        return token_cap, min(local_end, TOKEN_END)
    if spec.dcp_size == 1:
        return min(local_end, token_cap), 0
    turn, within = divmod(local_end, spec.dcp_interleave)
    return min((turn * spec.dcp_size + rank) * spec.dcp_interleave + within, token_cap), 0


def geometry(
    shape: Layout, compact: bool, slot_bytes: int, rows: int, topk: int
) -> tuple[tuple[int, int], tuple[int], int]:
    """Grid, thread block and bytes of shared memory of a launch; rows are on grid.x."""
    if shape.warp_rows:
        a_block = min(8, rows // 256 + 1)
        shared = a_block * _spread(shape.segment, slot_bytes) if compact else 0
        return (min(-(-rows // a_block), MAX_GRID), 1), (32 * a_block,), shared
    segments = -(-topk // shape.segment)
    tiles = -(-segments // shape.max_warps)
    warps = -(-segments // tiles)
    # A compacted row also has up to three entries of the tile before.
    shared = _spread(warps * shape.segment + 3, slot_bytes) if compact else 0
    parts = min(tiles, MAX_PARTS) if shape.parted else 1
    return (min(rows, MAX_GRID), parts), (32 * warps,), shared


def _spread(entries: int, slot_bytes: int) -> int:
    """Bytes for so many entries in shared memory, as `spread` in remap.cu places them."""
    return (entries + entries // (128 // slot_bytes)) * slot_bytes


def _column(tensor: Tensor | None) -> tuple[int, int, int]:
    if tensor is None:
        return 0, 0, 4
    return tensor.data_ptr(), tensor.stride()[0], tensor.element_size()


def _sized_column(tensor: Tensor | None) -> tuple[int, int, int, int]:
    return (*_column(tensor), 0 if tensor is None else tensor.shape[0])


def _result(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.stride()[0]


def _launch(
    runtime: Runtime,
    function: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    shared: int,
    arguments: _Arguments,
    index: int,
) -> None:
    stream = arguments.stream
    stream.ptr = runtime.stream(index) or LEGACY_STREAM
    if runtime.current_device() == index:
        function(grid, block, arguments.by_value, shared, stream)
    else:
        with runtime.on_device(index):
            function(grid, block, arguments.by_value, shared, stream)


# --- safe_lengths ---------------------------------------------------------------------------------

_ROWS_A_BLOCK = 256


def safe_lengths_kernel(spec: SafeLengthsSpec, device: torch.device, runtime: Runtime) -> Kernel:
    """The launcher of one configuration on one device."""
    functions = _Functions("safe_lengths", safe_lengths_variants(spec), device, runtime)
    loaded = functions.loaded
    arguments = _Arguments(runtime)
    pack = _SAFE_LENGTHS.pack_into

    def launch(slots: Tensor, counts: Tensor, lengths: Tensor) -> None:
        rows = slots.shape[0]
        function = loaded[0] or functions.load(0)
        pack(
            arguments.buffer, 0, slots.data_ptr(), slots.stride()[0],
            *_result(counts), *_result(lengths), rows,
        )  # fmt: skip
        grid = (-(-rows // _ROWS_A_BLOCK),)
        _launch(runtime, function, grid, (_ROWS_A_BLOCK,), 0, arguments, device.index)

    return Kernel(launch, functions.warm)
