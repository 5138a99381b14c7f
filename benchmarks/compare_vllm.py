"""Side by side with vLLM: its functions and ours, in one process, in turn, on the same inputs.

    python benchmarks/compare_vllm.py                             # an installed vLLM
    python benchmarks/compare_vllm.py --vllm-src DIR --json FILE  # an unpacked wheel
    python benchmarks/compare_vllm.py --vllm-src DIR --equality 500

Results are checked for equality before anything is timed: in order where vLLM's are ordered, as
sets of each row where its programs race. Time on the device is by replay of graphs with the same
number of launches, in turn, and rows of a record are those of `mla-index bench`: the provider is
`vllm <version>`, ours is the backend; on the host ours are `auto` (the operations, outputs given)
and `auto, vLLM's names`. Exit code 1: not equal, or something failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm_equality
import vllm_source

from mla_index import registry, selector
from mla_index.bench import measure, record
from mla_index.bench.contenders import (
    BLOCK_SIZE,
    COPY,
    OPERATIONS,
    Call,
    Operation,
    bind,
    bind_copy,
)
from mla_index.bench.workloads import Inputs, measured_rank, rotated, uniform_batch
from mla_index.explanation import explain
from mla_index.integrations import vllm as ours

OPERATION_NAMES = (
    "remap", "remap_counts", "dcp_filter", "workspace", "request_rows", "safe_lengths"
)  # fmt: skip
ROWS = (1, 32, 128, 512, 2048, 8192, 32768)
TOPK = (2048, 512, 2176, 4224, 16384)
DCP = (2, 4, 8)
MOST_ENTRIES = 2**27
HOST_ROWS, HOST_TOPK = 32, (2048, 4224)
HOST_CALLS = 300
ROUNDS, REPLAYS = 3, 5
NAMES = "auto, vLLM's names"


@contextmanager
def their_functions(folder: Path | None) -> Iterator[tuple[ModuleType, str]]:
    """vLLM's module and its version."""
    if folder is None:
        module = importlib.import_module(vllm_source.SPARSE_UTILS)
        yield module, importlib.metadata.version("vllm")
        return
    with vllm_source.unpacked(folder):
        yield importlib.import_module(vllm_source.SPARSE_UTILS), vllm_source.version_in(folder)


def bind_names(functions: ModuleType, operation: Operation, inputs: Inputs, dcp: int) -> Call:
    """The call of an operation by vLLM's names, with every output that it can be given."""
    batch = inputs.batch
    if operation.name == "safe_lengths":
        return partial(functions.prepare_sparse_mla_safe_lengths, inputs.out, inputs.given_counts)
    tensors = (batch.req_id, batch.tables[dcp], inputs.tokens)
    keywords: dict[str, Any] = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "NUM_TOPK_TOKENS": inputs.tokens.shape[1],
        "return_valid_counts": operation.compact,
    }
    if operation.name == "dcp_filter":
        return partial(
            functions.triton_filter_and_convert_dcp_index,
            *tensors, dcp, measured_rank(dcp), **keywords,
        )  # fmt: skip
    keywords["out"] = inputs.out
    if operation.compact:
        keywords["valid_counts_out"] = inputs.counts
    if operation.name == "workspace":
        keywords |= {
            "HAS_PREFILL_WORKSPACE": True,
            "prefill_workspace_request_ids": batch.workspace.request_ids,
            "prefill_workspace_starts": batch.workspace.starts,
        }
    if operation.name == "request_rows":
        keywords["idx_mapping"] = batch.request_rows
    return partial(functions.triton_convert_req_index_to_global_index, *tensors, **keywords)


@dataclass
class Comparison:
    """A run under way: what was asked for, and what was found."""

    theirs: ModuleType
    version: str
    backend: str
    device: torch.device
    deadline: float
    rows: list[record.Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    compiled: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def provider(self) -> str:
        return f"vllm {self.version}"

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def note(
        self, metric: str, found: measure.Sample | float, operation: str, provider: str,
        inputs: Inputs, dcp: int = 1,
    ) -> None:  # fmt: skip
        sample = found if isinstance(found, measure.Sample) else measure.Sample(float(found))
        rows, topk = inputs.tokens.shape
        self.rows.append(
            record.Row(
                metric, sample.median, operation, provider, inputs.batch.name, rows, topk,
                dcp, inputs.batch.valid, str(inputs.tokens.dtype).removeprefix("torch."),
                sample.low, sample.high,
            )
        )  # fmt: skip

    def calls(self, operation: Operation, inputs: Inputs, dcp: int) -> dict[str, Call]:
        """The contenders on the device."""
        return {
            self.provider: bind_names(self.theirs, operation, inputs, dcp),
            self.backend: bind(operation, self.backend, inputs, dcp),
        }

    def checked(self, operation: Operation, inputs: Inputs, dcp: int) -> bool:
        """Whether vLLM, our operation and our function by its name agree; counts compilations."""
        what = (
            f"{operation.name}, dcp {dcp}, T = {len(inputs.tokens)}, K = {inputs.tokens.shape[1]}"
        )
        contenders = self.calls(operation, inputs, dcp)
        contenders[NAMES] = bind_names(ours, operation, inputs, dcp)
        with selector.use_backend(self.backend):
            found = {
                name: self._run(name, operation, call, inputs) for name, call in contenders.items()
            }
        in_order = vllm_equality.ordered(inputs.tokens.shape[1], operation.compact)
        right = found.pop(self.provider)
        for name, results in found.items():
            for label, result in results.items():
                flat = in_order or result.dim() == 1
                try:
                    vllm_equality.check_equal(
                        right[label], result, f"{what}: {label} of {name}", in_order=flat
                    )
                except vllm_equality.Unequal as error:
                    self.wrong.append(str(error))
                    return False
        return True

    def _run(self, name: str, operation: Operation, call: Call, inputs: Inputs) -> dict[str, Any]:
        """One call's outputs, wherever it leaves them."""
        inputs.blank()
        before = self._kernels(name)
        returned = call()
        per = self.compiled.setdefault(name, {})
        per[operation.name] = per.get(operation.name, 0) + self._kernels(name) - before
        if operation.name == "safe_lengths":
            lengths = returned if isinstance(returned, torch.Tensor) else inputs.lengths
            return {"slots": inputs.out.clone(), "lengths": lengths.clone()}
        slots, counts = (returned if isinstance(returned, tuple) else (returned, None))[:2]
        found = {"slots": slots.clone()}
        return found | ({"counts": counts.clone()} if operation.compact else {})

    def _kernels(self, name: str) -> int:
        """Kernels compiled so far by whoever has this name."""
        if name != self.provider:
            count = getattr(registry.load(self.backend), "compiled_kernels", lambda: 0)
            return int(count())
        held = [getattr(value, "kernel", value) for value in vars(self.theirs).values()]
        return sum(map(_cached, {id(kernel): kernel for kernel in held}.values()))


def _cached(kernel: object) -> int:
    """Kernels in the caches of a Triton function; 0 of anything else."""
    caches = getattr(kernel, "device_caches", None)
    return sum(len(cache[0]) for cache in caches.values()) if caches else 0


# --- measuring -----------------------------------------------------------------------------------


def compare(state: Comparison, arguments: argparse.Namespace) -> None:
    shapes = [(rows, topk) for topk in arguments.topk for rows in arguments.rows]
    for rows, topk in shapes:
        where = f"T = {rows}, K = {topk}"
        if rows * topk > MOST_ENTRIES:
            state.left_out.append(f"{where}: T * K is above 2**27")
        elif state.late():
            state.left_out.append(f"{where}: the {arguments.seconds:g} seconds were over")
        else:
            tell(where)
            batch = uniform_batch(rows, dcp=arguments.dcp, device=state.device)
            one_shape(state, rotated(batch, topk), arguments)


def one_shape(state: Comparison, sets: list[Inputs], arguments: argparse.Namespace) -> None:
    """Check at one shape, then time what is right: on the device all in turn, then on the host."""
    first = sets[0]
    ready = [
        (OPERATIONS[name], dcp)
        for name in arguments.operations
        for dcp in OPERATIONS[name].ranks(tuple(arguments.dcp))
        if attempt(state, OPERATIONS[name], first, dcp)
    ]
    if state.device.type != "cuda":
        return
    number = measure.launches_for(first.moved, len(sets))
    pool = torch.cuda.graph_pool_handle()

    def graph(calls: list[Call]) -> measure.Graph:
        return measure.Graph(calls, number, pool, REPLAYS)

    named = [((COPY, "torch", 1), graph([bind_copy(inputs) for inputs in sets]))]
    for operation, dcp in ready:
        each = [state.calls(operation, inputs, dcp) for inputs in sets]
        for provider in each[0]:
            key = (operation.name, provider, dcp)
            named.append((key, graph([calls[provider] for calls in each])))
    for (name, provider, dcp), sample in zip(
        (key for key, _ in named),
        measure.graph_times([graph for _, graph in named], ROUNDS, state.late),
        strict=True,
    ):
        state.note("gpu_us", sample, name, provider, first, dcp)
    if len(first.tokens) == HOST_ROWS and first.tokens.shape[1] in HOST_TOPK:
        for operation, dcp in ready:
            on_the_host(state, operation, first, dcp)


def on_the_host(state: Comparison, operation: Operation, inputs: Inputs, dcp: int) -> None:
    """Host time and launches of a call."""
    calls = {
        state.provider: bind_names(state.theirs, operation, inputs, dcp),
        "auto": bind(operation, "auto", inputs, dcp),
        NAMES: bind_names(ours, operation, inputs, dcp),
    }
    for provider, call in calls.items():
        call()
        sample = measure.host_time(call, state.device, number=HOST_CALLS)
        state.note("host_us", sample, operation.name, provider, inputs, dcp)
        launched = measure.kernels(call)
        if launched:  # the profiler sees none where it may not look
            state.note("kernels", launched, operation.name, provider, inputs, dcp)


def attempt(state: Comparison, operation: Operation, inputs: Inputs, dcp: int) -> bool:
    try:
        return state.checked(operation, inputs, dcp)
    except Exception as error:  # what breaks at one shape does not take the others' numbers away
        state.wrong.append(f"{operation.name}, dcp {dcp}: {type(error).__name__}: {error}")
        return False


# --- telling -------------------------------------------------------------------------------------


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
        print(f"compiled by {name}: {sum(per.values())} ({per})")


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
    parser.add_argument("--seconds", type=float, default=210.0, help="start no shape after these")
    parser.add_argument("--device", type=torch.device)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(command_line)


def equality(state: Comparison, arguments: argparse.Namespace) -> dict[str, Any]:
    on_cpu = state.device.type == "cpu"
    widths = arguments.topk or ((128, 384) if on_cpu else (512, 2048, 2176, 4224))
    with selector.use_backend(state.backend):
        found = vllm_equality.run(
            state.theirs, ours, number=arguments.equality, kinds=arguments.kinds,
            widths=tuple(widths), rows=3 if on_cpu else 300, device=state.device,
            seed=arguments.seed,
        )  # fmt: skip
    state.wrong += found.pop("unequal")
    print(f"{found['inputs']} inputs, {len(state.wrong)} unequal: {found}")
    return found


def main(command_line: list[str] | None = None) -> int:
    arguments = parse(command_line)
    started = time.monotonic()
    device = arguments.device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
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
            print_table(state)
    for line in state.left_out:
        print(f"left out: {line}")
    for line in state.wrong:
        print(f"WRONG: {line}")
    if arguments.json:
        record.write(
            {
                **record.head("compare_vllm", device),
                "vllm": state.version,
                "backend": backend,
                "seconds": round(time.monotonic() - started, 1),
                "compiled": state.compiled,
                "left_out": state.left_out,
                "wrong": state.wrong,
                **extra,
                "rows": [row.as_dict() for row in state.rows],
            },
            arguments.json,
        )  # fmt: skip
    return 1 if state.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
