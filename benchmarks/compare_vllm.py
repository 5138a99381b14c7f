"""Side by side with vLLM: its functions and ours, in one process, in turn, on the same inputs.

    python benchmarks/compare_vllm.py                             # an installed vLLM
    python benchmarks/compare_vllm.py --vllm-src DIR --json FILE  # an unpacked wheel
    python benchmarks/compare_vllm.py --vllm-src DIR --equality 500

Results are checked for equality before anything is timed: in order where vLLM's are ordered, as
sets of each row where its programs race. Rows of a record are those of `mla-index bench`.

On the device, time is by replay of graphs with the same number of launches, in turn: the provider
is `vllm <version>`, ours is the backend.

On the host, all ways to make a call are timed in turn, in short loops over several rounds:
`vllm <version>`, `auto` (the operation) and `auto by vLLM's names`, each with outputs given and,
as `…, outputs allocated`, without. What a function has no parameter for is left out.

Kernels are compiled beforehand, by several processes, into Triton's cache on disk.
Exit code 1: not equal, or something failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
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
import vllm_equality
import vllm_source
from vllm_timing import Comparison, configurations, launches, on_the_device, on_the_host, tell

from mla_index import selector
from mla_index.bench import record
from mla_index.bench.contenders import COPY
from mla_index.bench.workloads import make_inputs, uniform_batch
from mla_index.explanation import explain
from mla_index.integrations import vllm as ours

OPERATION_NAMES = (
    "remap", "remap_counts", "dcp_filter", "workspace", "request_rows", "safe_lengths"
)  # fmt: skip
ROWS = (1, 32, 128, 512, 2048, 8192, 32768)
TOPK = (2048, 512, 2176, 4224, 16384)
DCP = (2, 4, 8)
HOST_TOPK = (2048, 4224)
HOST_ROUNDS, HOST_CALLS = 49, 80
MOST_PROCESSES = 8
MANY_ROWS = 8192
"""Every larger T runs the same kernels."""


@contextmanager
def their_functions(folder: Path | None) -> Iterator[tuple[ModuleType, str]]:
    """vLLM's module and its version."""
    if folder is None:
        module = importlib.import_module(vllm_source.SPARSE_UTILS)
        yield module, importlib.metadata.version("vllm")
        return
    with vllm_source.unpacked(folder):
        yield importlib.import_module(vllm_source.SPARSE_UTILS), vllm_source.version_in(folder)


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
    """Time on the device by shape, ours over vLLM's; then the host's."""
    table = record.Table(state.rows)
    print(f"GPU µs a call: {state.provider} / {state.backend} = ratio")
    for row in table.find("gpu_us", provider=state.provider):
        shape = {"operation": row.operation, "rows": row.rows, "topk": row.topk, "dcp": row.dcp}
        mine = table.value("gpu_us", provider=state.backend, **shape)
        copy = table.value("gpu_us", operation=COPY, rows=row.rows, topk=row.topk)
        if mine is not None and copy is not None:
            slow = mine - row.value > max(0.03 * row.value, 0.15)
            print(
                f"T {row.rows:>5} K {row.topk:>5} {row.operation:>12} dcp {row.dcp}: "
                f"{row.value:8.2f} / {mine:8.2f} = {mine / row.value:5.2f}   "
                f"copy {copy:7.2f}{'   SLOWER' if slow else ''}"
            )
    for metric in ("host_us", "kernels"):
        for row in table.find(metric):
            print(
                f"{metric} T {row.rows} K {row.topk} {row.operation} dcp {row.dcp} "
                f"{row.provider}: {row.value:.2f}"
            )
    for name, per in state.compiled.items():
        print(f"compiled by {name}: {per.total()} ({dict(per)})")


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-src", type=Path, help="folder that holds an unpacked vllm/")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--equality", type=int, help="compare on so many random inputs, and stop")
    parser.add_argument("--kinds", type=int, default=64, help="configurations of --equality")
    parser.add_argument("--backend", default="auto", help="ours on the device")
    parser.add_argument("--operations", nargs="+", default=OPERATION_NAMES, choices=OPERATION_NAMES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--topk", nargs="+", type=int, help="widths; the kernels' defaults")
    parser.add_argument("--dcp", nargs="+", type=int, default=DCP)
    parser.add_argument("--host-topk", nargs="*", type=int, help="widths timed on the host")
    parser.add_argument("--host-rounds", type=int, default=HOST_ROUNDS)
    parser.add_argument("--host-calls", type=int, default=HOST_CALLS, help="calls in a round")
    parser.add_argument("--seconds", type=float, default=210.0, help="start no shape after these")
    parser.add_argument("--processes", type=int, help="that compile, or compare random inputs")
    parser.add_argument("--device", type=torch.device)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(command_line)
    if arguments.device is None:
        arguments.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    on_cpu = arguments.device.type == "cpu"
    if arguments.processes is None:  # on the CPU nothing is compiled
        processors = os.cpu_count() or 1
        arguments.processes = 1 if on_cpu else max(1, min(MOST_PROCESSES, processors // 2))
    if arguments.host_topk is None:
        arguments.host_topk = () if on_cpu else HOST_TOPK
    return arguments


def main(command_line: list[str] | None = None) -> int:
    arguments = parse(command_line)
    started = time.monotonic()
    device = arguments.device
    backend = explain("remap", device=device, backend=arguments.backend, probe=True).chosen
    if backend is None:
        tell(f"backend {arguments.backend} cannot run on {device}")
        return 1
    torch.manual_seed(arguments.seed)
    with their_functions(arguments.vllm_src) as (theirs, version):
        state = Comparison(theirs, version, backend, device, started + arguments.seconds)
        extra: dict[str, Any] = {}
        if arguments.equality is not None:
            extra["equality"] = equality(state, arguments)
        else:
            arguments.topk = arguments.topk or TOPK
            compare(state, arguments)
    for line in state.left_out:
        print(f"left out: {line}")
    for line in state.wrong:
        print(f"WRONG: {line}")
    if arguments.json:
        write(state, extra, time.monotonic() - started, arguments)
    return 1 if state.wrong else 0


def write(
    state: Comparison, extra: dict[str, Any], seconds: float, arguments: argparse.Namespace
) -> None:
    """Write the record."""
    record.write(
        {
            **record.head("compare_vllm", state.device),
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
