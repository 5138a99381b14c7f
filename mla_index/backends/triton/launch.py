"""Compiling and launching the kernels.

Triton's own launch path binds and inspects every argument at each call. Here all that a kernel
specialises on is in its `Variant`, so that a launch is: pick the variant, pass the arguments on.
Addresses go as integers. A configuration has few variants, known beforehand, and `warm` compiles
them all: nothing is compiled later, whatever T, W, strides or alignments come.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from mla_index.backends.triton import kernels, variants
from mla_index.backends.triton.variants import Variant
from mla_index.errors import NotWarm
from mla_index.registry import Kernel
from mla_index.specs import DTYPE_MAX, RemapSpec, SafeLengthsSpec

INTERPRETED = not isinstance(kernels.remap, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when the kernels were defined."""

INT64 = torch.int64

MAX_PROGRAMS = 2**31 - 1
"""What the first axis of a grid takes."""

# --- compiled kernels on a device ---------------------------------------------------------------

_lock = threading.Lock()
_compiled = 0


def compiled_kernels() -> int:
    """Kernels compiled, or read from Triton's cache on disk, so far in this process."""
    return _compiled


class Ready(NamedTuple):
    """A compiled kernel, taken apart for launching. Keeping it keeps the device's code loaded.

    `run` is called with the grid, the stream, `head`, the arguments and `constants`.
    """

    kernel: Any
    run: Callable[..., None]
    head: tuple[object, ...]
    constants: tuple[object, ...]


def _taken_apart(kernel: Any, constants: tuple[object, ...]) -> Ready:
    """The kernel with the shortest way to launch it.

    Triton 3.6's launcher for CUDA is a Python object around a C function; what it does for kernels
    with scratch memory ours do not need, and going past it saves 1.4 µs of 6. Every other launcher
    is called as it is.
    """
    run, metadata = kernel.run, kernel.packed_metadata  # the first loads the code
    head: tuple[object, ...] = (kernel.function, metadata, None, None, None)
    around_c = (
        triton.__version__.startswith("3.6.")
        and type(run).__name__ == "CudaLauncher"
        and run.global_scratch_size == run.profile_scratch_size == 0
    )
    if around_c:
        no_scratch = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        run, head = run.launch, (kernel.function, *no_scratch, metadata, None, None, None)
    return Ready(kernel, run, head, constants)


class Launcher:
    """The variants of one configuration on one device: compiled when first needed, or by `warm`."""

    def __init__(self, op: str, variants: tuple[Variant, ...], device: torch.device) -> None:
        self.op = op
        self.variants = variants
        self.device = device
        self.ready: list[Ready | None] = [None] * len(variants)
        self.module = torch.get_device_module(device)
        self.index = device.index
        self.several = self.module.device_count() > 1
        driver = triton.runtime.driver.active
        self.current_stream = driver.get_current_stream
        self.current_device = driver.get_current_device
        if device.type == "cuda":  # without asking first whether CUDA is initialised
            self.current_device = getattr(torch._C, "_cuda_getDevice", self.current_device)

    def warm(self) -> int:
        """Compile every variant; returns how many there are."""
        for index in range(len(self.variants)):
            self.compile(index)
        return len(self.variants)

    def compile(self, index: int) -> Ready:
        """The variant, compiled and loaded on the device if it was not before."""
        global _compiled
        with _lock:
            ready = self.ready[index]
            if ready is None:
                with self.module.device(self.device):
                    self._refuse_in_capture()
                    variant = self.variants[index]
                    kernel = triton.compile(variant.source(), options=variant.options())
                    ready = _taken_apart(kernel, variant.trailing())
                self.ready[index] = ready
                _compiled += 1
            return ready

    def _refuse_in_capture(self) -> None:
        capturing = getattr(self.module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            raise NotWarm(
                f"a kernel of {self.op} for {self.device} is not compiled yet, and nothing can be "
                "compiled inside a graph capture: call mla_index.warmup(op, spec, "
                f"device={str(self.device)!r}) before the capture"
            )

    def __call__(self, index: int, programs: int, arguments: tuple[object, ...]) -> None:
        """Launch a variant on the current stream of the device, with that device current."""
        ready = self.ready[index]
        if ready is None or _hooked() or (self.several and self.current_device() != self.index):
            self._launch_with_care(index, programs, arguments)
            return
        _, run, head, constants = ready
        run(programs, 1, 1, self.current_stream(self.index), *head, *arguments, *constants)

    def _launch_with_care(self, index: int, programs: int, arguments: tuple[object, ...]) -> None:
        """Compile first, change the device, or let profilers see the launch."""
        kernel, _, _, constants = self.ready[index] or self.compile(index)
        with self.module.device(self.device):
            stream = self.current_stream(self.index)
            kernel[programs, 1, 1](*arguments, *constants, stream=stream)


_knobs = triton.knobs.runtime


def _hooked() -> bool:
    """Whether a profiler wants to see launches; then they go through Triton's own path."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Interpreter:
    """Runs the variants in Triton's interpreter, on the CPU. It has no stream and no lock."""

    def __init__(self, variants: tuple[Variant, ...]) -> None:
        self.variants = variants

    def __call__(self, index: int, programs: int, arguments: tuple[object, ...]) -> None:
        """Run a variant; tensors stand where a device takes addresses."""
        variant = self.variants[index]
        kinds = variant.signature.values()
        given = [
            # Rows' scalars are read as 32-bit words, whatever their dtype.
            triton.reinterpret(argument, triton.language.int32)
            if isinstance(argument, Tensor) and kind == "*i32" and argument.dtype != torch.int32
            else argument
            for argument, kind in zip(arguments, kinds, strict=False)
        ]
        with _lock:
            variant.function[(programs,)](*given, *variant.trailing())


# --- the two operations -------------------------------------------------------------------------


def _launcher(op: str, kinds: tuple[Variant, ...], device: torch.device) -> Any:
    return Interpreter(kinds) if INTERPRETED else Launcher(op, kinds, device)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


ADDRESS: Callable[[Tensor], Any] = _itself if INTERPRETED else Tensor.data_ptr
"""What stands for a tensor in a launch: its address, but the interpreter wants the tensor."""


def _words(array: Tensor, bit: int) -> tuple[Any, int, int]:
    """How a kernel reads an array as 32-bit words: address, stride in words, `bit` if int64."""
    (stride,) = array.stride()
    if array.dtype is INT64:
        return ADDRESS(array), 2 * stride, bit
    return ADDRESS(array), stride, 0


class _Numbers(NamedTuple):
    """What follows from the numbers of a call: mostly those of the call before."""

    variant: int
    programs: int
    pieces: int
    pieces_inverse: int
    pieces_shift: int
    last_local: int
    last_block: int


class _Cuts:
    """Which variant serves a call of a configuration, and what else its numbers decide."""

    def __init__(self, spec: RemapSpec) -> None:
        self.spec = spec
        self.steps = variants.steps(spec)
        self.most_rows = [step.most_rows for step in self.steps]
        self.place = {cut: index for index, cut in enumerate(variants.cuts(spec))}

    def numbers(
        self,
        dense: bool,
        rows: int,
        topk: int,
        columns: int,
        block_stride_rows: int,
        last_slot: int,
    ) -> _Numbers:
        """For `dense` see `variants.remap_variant`; `columns` of the table."""
        shape = self.steps[-1].general
        if dense:
            _, shape, even = self.steps[bisect_left(self.most_rows, rows)]
            if even is not None and topk % even.tile <= even.tail:
                shape = even
        pieces = -(-topk // shape.tile) if shape.plan == "split" else 1
        programs = rows * pieces
        if programs > MAX_PROGRAMS:
            raise ValueError(
                f"triton launches up to {MAX_PROGRAMS} programs a call, and {rows} rows of "
                f"{topk} columns need {programs}: split the call by rows"
            )
        return _Numbers(
            self.place[dense, shape],
            programs,
            pieces,
            *variants.inverse(pieces),
            min(columns * self.spec.block_size - 1, DTYPE_MAX[self.spec.token_dtype]),
            min(last_slot // block_stride_rows, DTYPE_MAX[self.spec.table_dtype]),
        )


def remap(spec: RemapSpec, device: torch.device) -> Kernel:
    """The launcher of one configuration of remap and dcp_filter on one device."""
    launcher = _launcher("remap", variants.remap_variants(spec), device)
    cuts, in_vectors = _Cuts(spec), variants.vectors(spec)
    # The last call's numbers and what follows from them, in one object: threads may race for it.
    latest: list[tuple[tuple[object, ...], _Numbers | None]] = [((), None)]

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
        token_row, token_step = token_indices.stride()
        table_rows, table_columns = block_table.shape
        table_row, table_step = block_table.stride()
        slot_row, _ = out.stride()
        dense = token_step == 1 and table_step == 1
        if in_vectors and dense:
            pitches = token_row | slot_row if rows > 1 else 0
            dense = not (token_indices.data_ptr() | out.data_ptr() | pitches | topk) & 15

        key = (dense, rows, topk, table_columns, block_stride_rows, last_slot)
        known, numbers = latest[0]
        if numbers is None or known != key:
            numbers = cuts.numbers(*key)
            latest[0] = (key, numbers)
        variant, programs, pieces, inverse, shift, last_local, last_block = numbers

        counts_at = lengths_at = req_at = map_at = limits_at = ws_at = starts_at = None
        count_step = length_step = req_step = map_step = limit_step = ws_step = start_step = 0
        map_size = ws_size = wide = 0
        if counts is not None:
            counts_at, (count_step,) = ADDRESS(counts), counts.stride()
        if lengths is not None:
            lengths_at, (length_step,) = ADDRESS(lengths), lengths.stride()
        if req_id is not None:
            req_at, req_step, wide = _words(req_id, 1)
        if request_rows is not None:
            map_at, map_step, bit = _words(request_rows, 2)
            map_size, wide = request_rows.shape[0], wide | bit
        if token_limits is not None:
            limits_at, limit_step, bit = _words(token_limits, 4)
            wide |= bit
        if ws_request_ids is not None and ws_starts is not None:
            ws_at, ws_step, bit = _words(ws_request_ids, 8)
            starts_at, start_step, start_bit = _words(ws_starts, 16)
            ws_size, wide = ws_starts.shape[0], wide | bit | start_bit

        launcher(
            variant,
            programs,
            (
                ADDRESS(token_indices), ADDRESS(block_table), ADDRESS(out), req_at, counts_at,
                lengths_at, map_at, limits_at, ws_at, starts_at,
                wide, topk, req_step, token_row, table_row, slot_row, count_step,
                table_rows, last_local, block_stride_rows, last_block, last_slot, pad, rank,
                pieces, inverse, shift, token_step, table_step, length_step,
                map_step, map_size, limit_step, ws_step, start_step, ws_size, rank_stride,
                last_ws_row,
            ),
        )  # fmt: skip

    return Kernel(launch, None if INTERPRETED else launcher.warm)


def safe_lengths(spec: SafeLengthsSpec, device: torch.device) -> Kernel:
    """The launcher of one configuration of safe_lengths on one device."""
    launcher = _launcher("safe_lengths", (variants.safe_lengths_variant(spec),), device)

    def launch(slots: Tensor, counts: Tensor, lengths: Tensor) -> None:
        rows = slots.shape[0]
        (count_step,), (length_step,) = counts.stride(), lengths.stride()
        launcher(
            0,
            -(-rows // variants.SAFE_LENGTHS_ROWS),
            (
                ADDRESS(slots), ADDRESS(counts), ADDRESS(lengths),
                slots.stride()[0], count_step, length_step, rows,
            ),
        )  # fmt: skip

    return Kernel(launch, None if INTERPRETED else launcher.warm)
