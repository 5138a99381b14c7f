"""Side by side with vLLM: its functions and ours, in one process, in turn, on the same inputs.

    python benchmarks/compare_vllm.py                             # an installed vLLM
    python benchmarks/compare_vllm.py --vllm-src DIR --json FILE  # an unpacked wheel
    python benchmarks/compare_vllm.py --vllm-src DIR --equality 500
    TRITON_INTERPRET=1 python benchmarks/compare_vllm.py --vllm-src DIR --rows 1 4 --topk 512

On a CPU vLLM's kernels need TRITON_INTERPRET=1, as in the last line: Triton's interpreter runs
them. It says nothing about time, so only equality is found out, and the host's time of the two
functions that launch nothing.

Results are checked for equality before anything is timed: in order where vLLM's are ordered, as
sets of each row where its programs race. Rows of a record are those of `mla-index bench`. A
record also has `names_hash`, the SHA-256 of `mla_index/integrations/vllm.py` in hexadecimal: what
is timed by vLLM's names, and what `source_hash` does not cover.

On the device, time is by replay of graphs with the same number of launches, in turn: the provider
is `vllm <version>`, ours is the backend.

On the host, all ways to make a call are timed in turn, in short loops over several rounds:
`vllm <version>`, `auto` (the operation) and `auto by vLLM's names`, each with outputs given and,
as `…, outputs allocated`, without. What a function has no parameter for is left out.

Kernels are compiled beforehand, by several processes, into Triton's cache on disk.
Exit codes: 0 all is equal; 1 something is not, or failed; 2 nothing was compared: an argument is
wrong, something needed is not there, or the seconds were over before the first shape.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm_arguments
import vllm_equality
import vllm_source
from vllm_arguments import CannotBegin
from vllm_timing import Comparison, configurations, launches, on_the_device, on_the_host, tell

from mla_index import selector
from mla_index.bench import record
from mla_index.bench.asked import SLACK_SHARE, SLACK_US
from mla_index.bench.contenders import COPY
from mla_index.bench.workloads import make_inputs, uniform_batch
from mla_index.integrations import vllm as ours
from mla_index.integrations import vllm_forms

TOPK = (2048, 512, 2176, 4224, 16384)
MANY_ROWS = 8192
"""Every larger T runs the same kernels."""


@contextmanager
def their_functions(folder: Path | None) -> Iterator[tuple[ModuleType, str]]:
    """vLLM's module and its version.

    Raises:
        CannotBegin: it cannot be imported, lacks a function, or tells no version.
    """
    if folder is None:
        installed = "without --vllm-src the installed vLLM is taken"
        module = _module(installed)
        try:
            version = importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError as error:
            raise CannotBegin(f"{installed}, but it tells no version: {error}") from error
        yield module, version
        return
    with vllm_source.unpacked(folder):
        yield _module(f"--vllm-src {folder}"), vllm_source.version_in(folder)


def _module(where: str) -> ModuleType:
    """The module of vLLM's functions, all of them there."""
    try:
        module = importlib.import_module(vllm_source.SPARSE_UTILS)
    except ImportError as error:
        raise CannotBegin(
            f"{where}: {error} (--vllm-src takes a folder that holds an unpacked vllm/)"
        ) from error
    missing = [name for name in vllm_forms.FUNCTIONS if not hasattr(module, name)]
    if missing:
        raise CannotBegin(f"{where}: {module.__name__} has no {', '.join(missing)}")
    return module


# --- in several processes ------------------------------------------------------------------------


def shared_out(
    function: Callable[..., Any], arguments: argparse.Namespace, backend: str
) -> list[Any]:
    """What `function(arguments, backend, share)` returns for each share, a process each."""
    number = arguments.processes
    shares = [(part, number) for part in range(number)]
    if number == 1:
        return [function(arguments, backend, shares[0])]
    # Spawned: the device may have been started here.
    with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(function, arguments, backend), shares))


def compile_share(arguments: argparse.Namespace, backend: str, share: tuple[int, int]) -> int:
    """Call what is to be compared, at few rows and at many, so that it is compiled."""
    part, number = share
    few = min(arguments.rows)
    many = max((rows for rows in arguments.rows if rows <= MANY_ROWS), default=few)
    with their_functions(arguments.vllm_src) as (theirs, version):
        state = Comparison(theirs, version, backend, arguments.device, 0.0)
        every = [(topk, *what) for topk in arguments.topk for what in configurations(arguments)]
        for topk, operation, dcp in every[part::number]:
            for rows in (few, many):
                batch = uniform_batch(rows, dcp=arguments.dcp, device=state.device)
                state.agree(state.shape_group(operation, make_inputs(batch, topk), dcp))
    return sum(per.total() for per in state.compiled.values())


def equality_share(
    arguments: argparse.Namespace, backend: str, share: tuple[int, int]
) -> dict[str, Any]:
    """Compare on a share of the random inputs."""
    on_cpu = arguments.device.type == "cpu"
    widths = arguments.topk or ((128, 384) if on_cpu else (512, 2048, 2176, 4224))
    with their_functions(arguments.vllm_src) as (theirs, _), selector.use_backend(backend):
        return vllm_equality.run(
            theirs, ours, number=arguments.equality, kinds=arguments.kinds,
            widths=tuple(widths), rows=3 if on_cpu else 300, device=arguments.device,
            seed=arguments.seed, share=share,
        )  # fmt: skip


def equality(state: Comparison, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare on random inputs; what was compared."""
    shares = shared_out(equality_share, arguments, state.backend)
    found = shares[0]
    for share in shares[1:]:
        found["by_mode"] = dict(Counter(found["by_mode"]) + Counter(share["by_mode"]))
        found["unequal"] += share["unequal"]
    state.wrong += found.pop("unequal")
    found["inputs"] = sum(found["by_mode"].values())
    print(f"{found['inputs']} inputs, {len(state.wrong)} unequal: {found}")
    return found


def compare(state: Comparison, arguments: argparse.Namespace) -> None:
    """Compile, then everything that is timed; the host first, before there is a profiler."""
    if arguments.processes > 1:
        tell(f"compiling in {arguments.processes} processes")
        started = time.monotonic()
        with state.going_on("compiling"):
            shared_out(compile_share, arguments, state.backend)
        tell(f"compiled in {time.monotonic() - started:.0f} s")
    timed = on_the_host(state, arguments)
    on_the_device(state, arguments)
    if state.device.type == "cuda":
        with state.going_on("launches"):
            launches(state, timed)
    print_table(state)


# --- telling -------------------------------------------------------------------------------------


def print_table(state: Comparison) -> None:
    """Time on the device by shape, ours over vLLM's, or how much was equal; then the host's."""
    table = record.Table(state.rows)
    if any(table.find("gpu_us")):
        print_device_times(state, table)
    elif state.checked:
        print(
            f"{state.provider} and {state.backend}: {state.equal} of {state.checked} equal, "
            "each an operation at one T, K and number of ranks"
        )
    for metric in ("host_us", "kernels"):
        for row in table.find(metric):
            print(
                f"{metric} T {row.rows} K {row.topk} {row.operation} dcp {row.dcp} "
                f"{row.provider}: {row.value:.2f}"
            )
    compiled = state.compiled if state.device.type == "cuda" else {}
    for name, per in compiled.items():
        print(f"compiled by {name}: {per.total()} ({dict(per)})")


def print_device_times(state: Comparison, table: record.Table) -> None:
    """Of each operation at each shape, beside the copy of the same bytes."""
    print(f"GPU µs a call: {state.provider} / {state.backend} = ratio")
    for row in table.find("gpu_us", provider=state.provider):
        shape = {"operation": row.operation, "rows": row.rows, "topk": row.topk, "dcp": row.dcp}
        mine = table.value("gpu_us", provider=state.backend, **shape)
        copy = table.value("gpu_us", operation=COPY, rows=row.rows, topk=row.topk)
        if mine is not None and copy is not None:
            slow = mine - row.value > max(SLACK_SHARE * row.value, SLACK_US)
            print(
                f"T {row.rows:>5} K {row.topk:>5} {row.operation:>12} dcp {row.dcp}: "
                f"{row.value:8.2f} / {mine:8.2f} = {mine / row.value:5.2f}   "
                f"copy {copy:7.2f}{'   SLOWER' if slow else ''}"
            )


def main(command_line: list[str] | None = None) -> int:
    arguments = vllm_arguments.parse(command_line, __doc__)
    started = time.monotonic()
    deadline = started + arguments.seconds
    extra: dict[str, Any] = {}
    try:
        backend = vllm_arguments.usable_backend(arguments)
        torch.manual_seed(arguments.seed)
        with their_functions(arguments.vllm_src) as (theirs, version):
            state = Comparison(theirs, version, backend, arguments.device, deadline)
            if arguments.equality is not None:
                extra["equality"] = equality(state, arguments)
            else:
                arguments.topk = arguments.topk or TOPK
                compare(state, arguments)
    except CannotBegin as error:
        tell(f"error: {error}")
        return vllm_arguments.REFUSED
    for line in state.left_out:
        print(f"left out: {line}")
    for line in state.wrong:
        print(f"WRONG: {line}")
    if arguments.json:
        write(state, extra, time.monotonic() - started, arguments)
    return exit_code(state, extra)


def exit_code(state: Comparison, extra: dict[str, Any]) -> int:
    """0, or 1 where something is wrong, or 2 where no shape was reached, after saying so."""
    if state.wrong:
        return 1
    if not (state.checked or extra):
        tell("error: no shape was compared: ask for more --seconds, or for smaller shapes")
        return vllm_arguments.REFUSED
    return 0


def write(
    state: Comparison, extra: dict[str, Any], seconds: float, arguments: argparse.Namespace
) -> None:
    """Write the record."""
    record.write(
        {
            **record.head("compare_vllm", state.device),
            "names_hash": names_hash(),
            "vllm": state.version,
            "backend": state.backend,
            "seconds": round(seconds, 1),
            **_host_method(state, arguments),
            "compiled": state.compiled,
            "left_out": state.left_out,
            "wrong": state.wrong,
            **extra,
            "rows": [row.as_dict() for row in state.rows],
        },
        arguments.json,
    )  # fmt: skip


def names_hash() -> str:
    """Which functions by vLLM's names were timed."""
    source = Path(str(ours.__file__)).read_bytes().replace(b"\r\n", b"\n")
    return hashlib.sha256(source).hexdigest()


def _host_method(state: Comparison, arguments: argparse.Namespace) -> dict[str, str]:
    """How the host was timed, if it was."""
    if not any(record.Table(state.rows).find("host_us")):
        return {}
    method = (
        f"in {arguments.host_rounds} rounds; in each all ways to make a call in turn, in changing "
        f"order, a loop of {arguments.host_calls} calls of each; median and quartiles of the rounds"
    )
    return {"host_method": method}


if __name__ == "__main__":
    sys.exit(main())
