"""The launcher of the cupy backend, on a runtime that records instead of a device."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import string_at
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import mla_index
from mla_index.backends import cupy
from mla_index.backends.cupy import launch
from mla_index.backends.cupy.launch import geometry, remap_kernel, safe_lengths_kernel, token_ends
from mla_index.backends.cupy.runtime import Function, HasPtr, Runtime
from mla_index.backends.cupy.variants import MAX_PARTS, Variant, few_rows, remap_layouts
from mla_index.registry import Kernel, beyond
from mla_index.specs import RemapSpec, SafeLengthsSpec

PARAMS = struct.Struct("=" + "q" * len(launch.REMAP_FIELDS.split()))
DEVICE = torch.device("cuda", 1)


@dataclass
class Recorder:
    """A runtime with two devices; what it was asked to do."""

    current: int = 1
    stream: int = 0xAB
    capturing: bool = False
    breaks: bool = False
    compiled: list[tuple[Variant, int]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)

    def function(self, variant: Variant, device: int) -> Function:
        self.compiled.append((variant, device))

        def run(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[object, ...],
            shared: int,
            stream: HasPtr,
        ) -> None:
            packed = string_at(args[0], PARAMS.size)  # type: ignore[arg-type]
            self.launches.append(
                {
                    "variant": variant, "on": self.current, "grid": grid, "block": block,
                    "shared": shared, "stream": stream.ptr, "packed": packed,
                }
            )  # fmt: skip
            if self.breaks:
                raise RuntimeError("the launch failed")

        return run

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def runtime(self) -> Runtime:
        return Runtime(
            function=self.function,
            by_value=lambda address: address,
            stream=lambda device: self.stream,
            current_device=lambda: self.current,
            on_device=self.on_device,
            capturing=lambda device: self.capturing,
        )


def remap_call(kernel: Kernel, rows: int = 2, topk: int = 8, *, last_slot: int = 999) -> None:
    """The tensors are on the CPU: the launcher asks them for addresses and strides alone."""
    tokens = torch.zeros((rows, topk), dtype=torch.int32)
    kernel.launch(
        None, torch.zeros((1, 4), dtype=torch.int32), tokens, torch.empty_like(tokens), None, None,
        None, None, None, None, 0, 64, 0, last_slot, 0, -1,
    )  # fmt: skip


SPEC = RemapSpec(64, 8, req_id=False)


def test_the_stream_is_read_at_each_launch() -> None:
    recorder = Recorder()
    kernel = remap_kernel(SPEC, DEVICE, recorder.runtime())
    for recorder.stream in (0xAB, 0xCD, 0):
        remap_call(kernel)
    # torch's stream 0 goes by the name that means the same in every build of CuPy.
    assert [call["stream"] for call in recorder.launches] == [0xAB, 0xCD, 1]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("current", [0, 1])
def test_launched_on_the_tensors_device_and_left_as_it_was(current: int, breaks: bool) -> None:
    recorder = Recorder(current=current, breaks=breaks)
    slots = torch.zeros((1, 2), dtype=torch.int32)
    counts = torch.zeros(1, dtype=torch.int32)
    calls: tuple[Callable[[], object], ...] = (
        lambda: remap_call(remap_kernel(SPEC, DEVICE, recorder.runtime())),
        lambda: safe_lengths_kernel(SafeLengthsSpec(), DEVICE, recorder.runtime()).launch(
            slots, counts, counts.clone()
        ),
    )
    for call in calls:
        if breaks:
            with pytest.raises(RuntimeError, match="the launch failed"):
                call()
        else:
            call()
        assert recorder.current == current
    assert [entry["on"] for entry in recorder.launches] == [1, 1]


def test_a_first_use_in_a_capture_names_warmup() -> None:
    recorder = Recorder(capturing=True)
    kernel = remap_kernel(SPEC, DEVICE, recorder.runtime())
    with pytest.raises(mla_index.NotWarm, match=r"warmup\('remap', spec, device='cuda:1'"):
        remap_call(kernel)
    assert not recorder.compiled
    assert not recorder.launches
    recorder.capturing = False
    assert kernel.warm is not None
    assert kernel.warm() == 2
    recorder.capturing = True
    remap_call(kernel, topk=8)
    remap_call(kernel, topk=7)
    assert len(recorder.compiled) == 2
    assert [dict(call["variant"].defines)["VECTOR"] for call in recorder.launches] == [1, 0]


def test_warm_compiles_once_and_counts() -> None:
    recorder = Recorder()
    for spec, kernels in ((SPEC, 2), (RemapSpec(64, 2), 1)):
        kernel = remap_kernel(spec, DEVICE, recorder.runtime())
        assert kernel.warm is not None
        assert (kernel.warm(), kernel.warm()) == (kernels, kernels)
    kernel = safe_lengths_kernel(SafeLengthsSpec(), DEVICE, recorder.runtime())
    assert kernel.warm is not None
    assert kernel.warm() == 1
    assert len(recorder.compiled) == 4
    assert {device for _, device in recorder.compiled} == {1}


def test_numbers_of_an_earlier_call_are_not_kept_for_another() -> None:
    recorder = Recorder()
    kernel = remap_kernel(SPEC, DEVICE, recorder.runtime())
    for last_slot in (999, 64, 999):
        remap_call(kernel, last_slot=last_slot)
    fields = launch.REMAP_FIELDS.split()
    packed = [
        dict(zip(fields, PARAMS.unpack(call["packed"]), strict=True)) for call in recorder.launches
    ]
    bounds = [(p["*entry_end"], p["last_slot"]) for p in packed]
    assert bounds == [(16, 999), (2, 64), (16, 999)]
    assert {p["pad"] for p in packed} == {-1}


def test_more_columns_than_32_bits_count_are_refused() -> None:
    assert beyond(cupy.limits, DEVICE, RemapSpec(64, 2**30)) is None
    reason = beyond(cupy.limits, DEVICE, RemapSpec(64, 2**30 + 1))
    assert reason == f"K of the class {2**31} is too wide; it takes K up to {2**30}"


def test_threads_do_not_share_what_they_pack() -> None:
    """Each thread's rows are its own number, whatever others pack at the same time."""
    seen: dict[int, set[int]] = {}
    rows_at = 8 * launch.REMAP_FIELDS.split().index("rows")

    def function(variant: Variant, device: int) -> Function:
        def run(*arguments: Any) -> None:
            packed = string_at(arguments[2][0], PARAMS.size)
            rows = struct.unpack_from("=q", packed, rows_at)[0]
            seen.setdefault(threading.get_ident(), set()).add(rows)

        return run

    kernel = remap_kernel(SPEC, DEVICE, Recorder().runtime()._replace(function=function))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    start = threading.Barrier(4)

    def work(rows: int) -> None:
        start.wait()
        for _ in range(300):
            remap_call(kernel, rows=rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3, 4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(map(sorted, seen.values())) == [[1], [2], [3], [4]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"counts": True}, {"compact": True}])
def test_geometry_covers_every_column_within_the_limits(
    options: dict[str, bool], dtype: torch.dtype
) -> None:
    for topk in (1, 4, 63, 128, 129, 512, 516, 1000, 2048, 2176, 4224, 8192, 8196, 16384, 100_000):
        spec = RemapSpec(64, topk, slot_dtype=dtype, **options)
        for (_, many), shape in remap_layouts(spec).items():
            few = few_rows(spec)
            for rows in (few + 1, 65_537, 2**31 + 5) if many else (1, 7, few):
                (across, parts), (threads,), shared = geometry(
                    shape, spec.compact, dtype.itemsize, rows, topk
                )
                assert 1 <= across <= 2**31 - 1
                assert 1 <= parts <= MAX_PARTS
                assert threads % 32 == 0
                assert threads <= 1024
                assert shared <= 48 * 1024
                assert bool(shared) == spec.compact
                if shape.warp_rows:
                    assert topk <= shape.segment
                    assert across * (threads // 32) >= min(rows, 2**31 - 1)
                    continue
                tile = threads * shape.items
                if shape.one_tile:
                    assert tile * parts >= topk
                assert tile * (parts - 1) < topk, "a block has nothing to do"
                assert parts == 1 or not (spec.compact or spec.counts)


def test_token_ends_say_what_the_width_of_the_table_says() -> None:
    """Against the definition, token by token."""
    for size, interleave, block_size, width in (
        (1, 1, 4, 3), (2, 1, 4, 3), (3, 5, 4, 3), (2, 3, 1, 7), (4, 8, 4, 1), (2, 2, 4, 0),
    ):  # fmt: skip
        spec = RemapSpec(block_size, 8, dcp_size=size, dcp_interleave=interleave)
        for rank in range(size):
            end, _ = token_ends(spec, width, rank)
            for token in range(200):
                if token // interleave % size != rank:
                    continue
                local = token // (size * interleave) * interleave + token % interleave
                assert (token < end) == (local // block_size < width), (spec, rank, token)


def test_token_ends_stay_within_the_tokens_dtype() -> None:
    for dtype, cap in ((torch.int32, 2**31), (torch.int64, 2**63)):
        for workspace in (False, True):
            spec = RemapSpec(2**31 - 1, 8, token_dtype=dtype, dcp_size=2, workspace=workspace)
            assert token_ends(spec, 2**62, 1) == (cap, 2**63 if workspace else 0)
