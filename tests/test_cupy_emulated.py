"""The CUDA C and its launcher on the CPU, by a C++ compiler and emulated threads.

This is the same source text, the same choice of variants, the same packing and geometry as on a
device. What it cannot show is speed and a device's memory model; a missing barrier shows, because
the threads run in step and also in an order drawn by lot.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mla_index
from mla_index.backends.cupy import launch, variants
from mla_index.backends.cupy.runtime import Function, HasPtr, Runtime
from mla_index.backends.cupy.variants import Variant
from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.specs import RemapSpec, Spec

HERE = Path(__file__).parent
SOURCES = Path(variants.__file__).parent
STREAM = 0x5EED
SEEDS = (0, 1, 2)
COMPILER = shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(
    COMPILER is None and not os.environ.get("CI"),
    reason="no C++ compiler (g++ or clang++) to run the CUDA C on the CPU with",
)


class Emulator:
    """Compiles variants for the CPU and runs them, as CuPy does for a device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seed = 0
        self.launches: list[tuple[Variant, tuple[int, ...], tuple[int, ...], int]] = []
        self._functions: dict[Variant, Function] = {}
        self._lock = threading.Lock()

    def function(self, variant: Variant, device: int) -> Function:
        with self._lock:
            if variant not in self._functions:
                self._functions[variant] = self._load(variant)
            return self._functions[variant]

    def _load(self, variant: Variant) -> Function:
        library = self.folder / f"{len(self._functions)}.so"
        macros = [f"-D{name}={value}" for name, value in variant.defines]
        assert COMPILER is not None, "CI must have a C++ compiler"
        subprocess.run(
            [
                COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-w",
                "-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan",
                f'-DKERNEL="{SOURCES / (variant.function + ".cu")}"',
                f"-DFUNCTION={variant.function}", *macros,
                str(HERE / "test_cupy_emulated.cpp"), "-o", str(library),
            ],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        loaded = ctypes.CDLL(str(library))

        def run(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: tuple[object, ...],
            shared: int,
            stream: HasPtr,
        ) -> None:
            assert stream.ptr == STREAM
            assert shared <= 48 * 1024, "more shared memory than a kernel gets without asking"
            (address,) = args
            with self._lock:
                self.launches.append((variant, grid, block, shared))
                loaded.emulate(
                    ctypes.c_void_p(address),  # type: ignore[arg-type]
                    grid[0], grid[1] if len(grid) > 1 else 1, block[0], shared, self.seed,
                )  # fmt: skip

        return run

    def runtime(self) -> Runtime:
        return Runtime(
            function=self.function,
            by_value=lambda address: address,
            stream=lambda device: STREAM,
            current_device=lambda: None,  # type: ignore[arg-type, return-value]
            on_device=_no_device,
            capturing=lambda device: False,
        )


def _no_device(device: int) -> AbstractContextManager[object]:
    return nullcontext()


class Emulated:
    """The backend, on the CPU."""

    name = "emulated"
    contract_version = CONTRACT_VERSION
    limits = Limits(operations=("remap", "safe_lengths"), devices=("cpu",))

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def unavailable(self, device: torch.device, *, probe: bool) -> str | None:
        return None

    def unsupported(self, op: str, spec: Spec) -> str | None:
        return None

    def build(self, op: str, spec: Spec, device: torch.device) -> Kernel:
        if isinstance(spec, RemapSpec):
            return launch.remap_kernel(spec, device, self.runtime)
        assert isinstance(spec, mla_index.SafeLengthsSpec)
        return launch.safe_lengths_kernel(spec, device, self.runtime)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def _registered(emulator: Emulator) -> Iterator[None]:
    mla_index.register(Emulated(emulator.runtime()))
    emulator.launches.clear()
    emulator.seed = 0
    yield
    mla_index.unregister("emulated")


# --- inputs ---------------------------------------------------------------------------------------

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_maps: list[mmap.mmap] = []  # never unmapped: a tensor may outlive the test that made it


def guarded(tensor: Tensor) -> Tensor:
    """The same values right before a page that may not be touched: reading on is a crash."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    _maps.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _libc.mprotect(ctypes.c_void_p(start + pages * PAGE), PAGE, 0) == 0
    flat = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * PAGE - size
    )
    flat.copy_(tensor.flatten())
    return flat.view(tensor.shape)


def tokens_of(rng: random.Random, rows: int, topk: int, reach: int, dtype: torch.dtype) -> Tensor:
    """Mostly valid tokens, with padding, garbage and numbers beyond the table between."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tokens = torch.randint(0, max(1, reach), (rows, topk), generator=generator, dtype=dtype)
    draw = torch.rand((rows, topk), generator=generator)
    tokens[draw < 0.1] = -1
    extremes = torch.iinfo(dtype)
    tokens[(draw > 0.95) & (draw < 0.97)] = extremes.max
    tokens[(draw >= 0.97) & (draw < 0.98)] = extremes.min
    tokens[(draw >= 0.98) & (draw < 0.99)] = min(reach * 2, extremes.max)
    tokens[draw >= 0.99] = reach
    return tokens


def both(call: Callable[[str], mla_index.Remapped], emulator: Emulator) -> mla_index.Remapped:
    """The results of the emulated kernel, under several orders of its threads, and torch's."""
    expected = call("torch")
    for emulator.seed in SEEDS:
        got = call("emulated")
        for name in ("slots", "counts", "lengths"):
            a, b = getattr(got, name), getattr(expected, name)
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                assert torch.equal(a, b), f"{name} differ"
    return expected


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_any_configuration_is_what_torch_computes(emulator: Emulator, seed: int) -> None:
    compare_random(emulator, seed)


def compare_random(emulator: Emulator, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    i32, i64 = torch.int32, torch.int64
    wide = rng.random() < 0.4
    dtype = {n: rng.choice((i32, i64)) if wide else i32 for n in ("token", "table", "slot")}
    any_int = lambda: rng.choice((i32, i64))  # noqa: E731
    topk = rng.choice([1, 3, 7, 64, 100, 133, 200, 256, 300, 512, 1000, 1024, 1028, 2048, 2051,
                       2176, 4100, 8448])  # fmt: skip
    rows = rng.choice([1, 3, 9]) if topk < 2000 else rng.choice([1, 2])
    block_size = rng.choice([1, 16, 60, 64])
    requests, width = rng.choice([1, 4]), rng.choice([1, 5, 40])
    compact = rng.random() < 0.7
    safe = compact and rng.random() < 0.4
    dcp = (
        mla_index.Dcp(rng.choice([2, 3, 8]), 1, rng.choice([1, 16, 48]))
        if rng.random() < 0.5
        else None
    )
    reach = width * block_size * (dcp.size if dcp else 1)

    tokens = tokens_of(rng, rows, topk, reach, dtype["token"])
    if rng.random() < 0.2:
        tokens[rng.randrange(rows)] = -1
    table = torch.randint(0, 1000, (requests, width), dtype=dtype["table"])
    table[torch.rand(table.shape) < 0.1] = -3
    table[torch.rand(table.shape) < 0.1] = torch.iinfo(dtype["table"]).max
    req_id = torch.randint(-1, requests + 1, (rows,), dtype=any_int())
    options = {
        "block_size": block_size,
        "block_stride_rows": rng.choice([None, block_size + 5]),
        "dcp": dcp,
        "compact": compact,
        "counts": rng.random() < 0.5,
        "safe_lengths": safe,
        "pad": rng.choice([-1, 0, 7]),
        "out_dtype": dtype["slot"],
        "num_slots": rng.choice([None, 0, 500 * block_size + 3]),
    }
    if rng.random() < 0.3:
        options["request_rows"] = guarded(
            torch.randint(-1, requests + 1, (requests,), dtype=any_int())
        )
    if rng.random() < 0.3:
        options["token_limits"] = guarded(torch.randint(-2, reach + 2, (rows,), dtype=any_int()))
    if rng.random() < 0.3:
        options["workspace"] = mla_index.PrefillWorkspace(
            guarded(torch.randint(-1, 4, (rows,), dtype=any_int())),
            guarded(torch.tensor([0, 100, -5], dtype=any_int())),
            rng.choice([0, 1000, 2**40]),
            rng.choice([None, 900]),
        )
    layout = rng.choice(["plain", "plain", "odd", "columns", "expanded"])
    if layout == "plain":
        tokens, table = guarded(tokens), guarded(table)
    elif layout == "odd":
        buffer = torch.empty(rows * topk + 1, dtype=tokens.dtype)
        tokens = buffer[1:].view(rows, topk).copy_(tokens)
    elif layout == "columns":
        tokens = tokens.t().contiguous().t()
        table = table.t().contiguous().t()
    else:
        tokens = tokens[:1].expand(rows, topk)
        table = table[:, :1].expand(requests, width)
    if rng.random() < 0.2:
        req_id_or_none: Tensor | None = None
    else:
        req_id_or_none = guarded(req_id)
    both(
        lambda backend: mla_index.remap(
            req_id_or_none,
            table,
            tokens,
            **options,
            backend=backend,  # type: ignore[arg-type]
        ),
        emulator,
    )
    assert emulator.launches


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("topk", [64, 512, 1024, 2176, 16384])
def test_both_layouts_in_memory(emulator: Emulator, topk: int, compact: bool) -> None:
    """Aligned rows take the vectorised kernel, any others the other; canaries stay whole."""
    rng = random.Random(topk)  # noqa: S311
    table = guarded(torch.randint(0, 1000, (3, 40), dtype=torch.int32))
    tokens = tokens_of(rng, 3, topk, 2560, torch.int32)
    req_id = torch.tensor([2, 0, 1], dtype=torch.int32)
    for shift, pitch in itertools.product((0, 1), (topk, topk + 4, topk + 1)):
        source = torch.full((4 * pitch,), 3, dtype=torch.int32)
        place = torch.full((4 * pitch,), -77, dtype=torch.int32)
        assert place.data_ptr() % 16 == source.data_ptr() % 16 == 0
        view = source.as_strided((3, topk), (pitch, 1), shift).copy_(tokens)
        out = place.as_strided((3, topk), (pitch, 1), shift)
        emulator.launches.clear()
        both(
            lambda backend, view=view, out=out: mla_index.remap(
                req_id, table, view, block_size=64, compact=compact, counts=compact, out=out,
                backend=backend,
            ),
            emulator,
        )  # fmt: skip
        vectors = {dict(variant.defines)["VECTOR"] for variant, *_ in emulator.launches}
        assert vectors == {int(shift == 0 and pitch % 4 == 0)}
        touched = torch.zeros_like(place, dtype=torch.bool)
        touched.as_strided((3, topk), (pitch, 1), shift).fill_(True)
        assert (place[~touched] == -77).all()


def test_out_may_be_the_tokens(emulator: Emulator) -> None:
    rng = random.Random(5)  # noqa: S311
    table = torch.randint(0, 1000, (2, 40), dtype=torch.int32)
    for topk in (133, 4224):
        tokens = tokens_of(rng, 2, topk, 2560, torch.int32)
        expected = mla_index.remap(None, table, tokens, block_size=64, backend="torch").slots
        for emulator.seed in SEEDS:
            buffer = tokens.clone()
            mla_index.remap(None, table, buffer, block_size=64, out=buffer, backend="emulated")
            assert torch.equal(buffer, expected)


def test_safe_lengths(emulator: Emulator) -> None:
    for slot_dtype, count_dtype in itertools.product((torch.int32, torch.int64), repeat=2):
        slots = torch.arange(5 * 8, dtype=slot_dtype).view(5, 8)[:, ::2]
        counts = torch.tensor([0, 9, -1, 9, 3, 9, 1, 9, 0, 9], dtype=count_dtype)[::2]
        mine, other = slots.clone(), slots.clone()
        lengths = mla_index.safe_lengths(mine, counts, backend="emulated")
        assert torch.equal(lengths, mla_index.safe_lengths(other, counts, backend="torch"))
        assert torch.equal(mine, other)
    (_, grid, block, _), *_ = emulator.launches
    assert (grid, block) == ((1,), (256,))


def test_rows_beyond_one_grid_are_walked(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a grid of 3 in place of 2**31 - 1."""
    monkeypatch.setattr(launch, "MAX_GRID", 3)
    rng = random.Random(9)  # noqa: S311
    table = torch.randint(0, 1000, (11, 40), dtype=torch.int32)
    for topk, options in itertools.product(
        (64, 1024), ({}, {"counts": True}, {"compact": True, "safe_lengths": True})
    ):
        tokens = tokens_of(rng, 11, topk, 2560, torch.int32)
        tokens[4] = -1
        both(
            lambda backend, tokens=tokens, options=options: mla_index.remap(
                None, table, tokens, block_size=64, backend=backend, **options
            ),
            emulator,
        )
    assert {grid[0] for _, grid, *_ in emulator.launches} == {3}


def test_bounds_to_the_very_token(emulator: Emulator) -> None:
    """Limits and the width of the table end rows at any column of any lane."""
    tokens = torch.arange(300, dtype=torch.int32).expand(60, 300)
    limits = torch.arange(60, dtype=torch.int64) * 5 + 1
    for table_width in (1, 4, 5):
        table = guarded(torch.arange(table_width, dtype=torch.int32)[None])
        for given in (None, guarded(limits)):
            got = both(
                lambda backend, table=table, given=given: mla_index.remap(
                    torch.zeros(60, dtype=torch.int32), table, tokens, block_size=64,
                    token_limits=given, counts=True, backend=backend,
                ),
                emulator,
            )  # fmt: skip
            ends = torch.full((60,), 64 * table_width) if given is None else limits
            assert got.counts is not None
            assert got.counts.tolist() == ends.clamp(max=min(300, 64 * table_width)).tolist()


def test_several_narrow_rows_in_a_block(emulator: Emulator) -> None:
    rng = random.Random(3)  # noqa: S311
    table = guarded(torch.randint(0, 1000, (1, 40), dtype=torch.int32))
    for topk in (20, 21):
        tokens = guarded(tokens_of(rng, 600, topk, 2560, torch.int32))
        both(
            lambda backend, tokens=tokens: mla_index.remap(
                torch.zeros(600, dtype=torch.int32), table, tokens, block_size=64,
                safe_lengths=True, compact=True, backend=backend,
            ),
            emulator,
        )  # fmt: skip
    assert {block for *_, block, _ in emulator.launches} == {(96,)}


def test_tiles_of_a_wide_row_join_at_any_entry(emulator: Emulator) -> None:
    """What a tile leaves over for the next vector: 0 to 3 entries, also from nearly empty tiles."""
    topk = 16384
    table = torch.randint(0, 1000, (1, 40), dtype=torch.int32)
    tokens = torch.randint(0, 2560, (8, topk), dtype=torch.int32)
    for row in range(4):
        tokens[row, :row] = -1
        tokens[4 + row, row:-2] = -1
    got = both(
        lambda backend: mla_index.remap(
            torch.zeros(8, dtype=torch.int32), table, tokens, block_size=64, compact=True,
            counts=True, backend=backend,
        ),
        emulator,
    )  # fmt: skip
    assert got.counts is not None
    assert got.counts.tolist() == [topk, topk - 1, topk - 2, topk - 3, 2, 3, 4, 5]
    assert {dict(variant.defines)["ONE_TILE"] for variant, *_ in emulator.launches} == {0}


def test_sums_of_a_workspace_that_leave_64_bits(emulator: Emulator) -> None:
    """Starts and strides at the ends of int64: invalid, never a wrapped number."""
    top = 2**63 - 1
    starts = torch.tensor([top, -top - 1, top - 3, -7, 0], dtype=torch.int64)
    tokens = torch.tensor([[0, 1, 2, 7, 8, 2**40, top, top - 1]], dtype=torch.int64).expand(5, 8)
    table = torch.zeros((1, 1), dtype=torch.int32).expand(1, 2**40)
    for rank_stride, out_dtype in itertools.product(
        (0, 3, (top - 1) // 2), (torch.int32, torch.int64)
    ):
        both(
            lambda backend, rank_stride=rank_stride, out_dtype=out_dtype: mla_index.remap(
                None, table, tokens, block_size=2**23, dcp=mla_index.Dcp(2, 0), counts=True,
                workspace=mla_index.PrefillWorkspace(torch.arange(5), starts, rank_stride),
                out_dtype=out_dtype, backend=backend,
            ),
            emulator,
        )  # fmt: skip
