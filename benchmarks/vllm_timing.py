"""Checking and timing vLLM's functions and ours: on the device, and on the host."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
import vllm_calls
import vllm_equality
from vllm_calls import Group, Results

from mla_index import registry, selector
from mla_index.bench import measure, record
from mla_index.bench.contenders import (
    COPY,
    NAMES,
    OPERATIONS,
    Call,
    Operation,
    bind,
    bind_copy,
)
from mla_index.bench.workloads import Inputs, make_inputs, rotated, uniform_batch
from mla_index.integrations import vllm as ours

MOST_ENTRIES = 2**29
HOST_ROWS = 32
ROUNDS, REPLAYS = 3, 5
MORE_ROUNDS, WIDE = 12, 0.1
"""A shape where anyone's quartiles lie further apart than this share of the median is timed for so
many rounds more, all contenders alike: some times have two values, and few samples find either."""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Comparison:
    """A run under way: what was asked for, and what was found.

    `checked` counts the operations, each at each shape, whose results were compared, and `equal`
    those of them that were; what is timed on the host alone is not among them.
    """

    theirs: ModuleType
    version: str
    backend: str
    device: torch.device
    deadline: float
    rows: list[record.Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    compiled: dict[str, Counter[str]] = field(default_factory=dict)
    checked: int = 0
    equal: int = 0

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

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Note what breaks, so that it does not take the other numbers away."""
        try:
            yield
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")

    def calls(self, operation: Operation, inputs: Inputs, dcp: int) -> dict[str, Call]:
        """The contenders on the device."""
        return {
            self.provider: vllm_calls.bind_names(self.theirs, operation, inputs, dcp),
            self.backend: bind(operation, self.backend, inputs, dcp),
        }

    def shape_group(self, operation: Operation, inputs: Inputs, dcp: int) -> Group:
        """The contenders on the device, and our function by its name."""
        calls = self.calls(operation, inputs, dcp)
        calls[NAMES] = vllm_calls.bind_names(ours, operation, inputs, dcp)
        return vllm_calls.group(operation, inputs, dcp, calls)

    def agree(self, group: Group) -> bool:
        """Whether all contenders' results are equal; counts compilations. No error leaves here."""
        what = f"{group.operation}, dcp {group.dcp}, T = {group.rows}, K = {group.topk}"
        with self.going_on(what):
            with selector.use_backend(self.backend):
                found = {name: self._run(group, name) for name in group.calls}
            _check_equal(found, group)
            return True
        return False

    def _run(self, group: Group, name: str) -> Results:
        who = self.provider if name.startswith(self.provider) else self.backend
        before = self._kernels(who)
        found = group.results(group.calls[name])
        self.compiled.setdefault(who, Counter())[group.operation] += self._kernels(who) - before
        return found

    def _kernels(self, who: str) -> int:
        """Kernels that vLLM or our backend has compiled, or read from a cache on disk, so far."""
        if who != self.provider:
            count = getattr(registry.load(self.backend), "compiled_kernels", lambda: 0)
            return int(count())
        held = [getattr(value, "kernel", None) or value for value in vars(self.theirs).values()]
        return sum(map(_cached, {id(kernel): kernel for kernel in held}.values()))


def _check_equal(found: dict[str, Results], group: Group) -> None:
    """Ours with one another in order, and one of them with vLLM's as vLLM's order allows."""
    theirs = [name for name in found if name.startswith("vllm ")]
    mine = [name for name in found if name not in theirs]
    operation = OPERATIONS.get(group.operation)
    in_order = vllm_equality.ordered(group.topk, operation is not None and operation.compact)
    pairs = [(mine[0], name, in_order) for name in theirs]
    pairs += [(mine[0], name, True) for name in mine[1:]]
    for one, other, same_order in pairs:
        for label, result in found[one].items():
            vllm_equality.check_equal(
                found[other][label], result, f"{label} of {other} and of {one}",
                in_order=same_order or result.dim() == 1,
            )  # fmt: skip


def _cached(kernel: object) -> int:
    """Kernels in the caches of a Triton function; 0 of anything else."""
    caches = getattr(kernel, "device_caches", None)
    return sum(len(cache[0]) for cache in caches.values()) if caches else 0


def configurations(arguments: argparse.Namespace) -> list[tuple[Operation, int]]:
    """The operations, each with its numbers of ranks."""
    return [
        (OPERATIONS[name], dcp)
        for name in arguments.operations
        for dcp in OPERATIONS[name].ranks(tuple(arguments.dcp))
    ]


# --- on the device -------------------------------------------------------------------------------


def on_the_device(state: Comparison, arguments: argparse.Namespace) -> None:
    """Check at every shape, and time what is right there."""
    for topk in arguments.topk:
        for rows in arguments.rows:
            where = f"T = {rows}, K = {topk}"
            if rows * topk > MOST_ENTRIES:
                state.left_out.append(f"{where}: T * K is above 2**29")
            elif state.late():
                state.left_out.append(f"{where}: the {arguments.seconds:g} seconds were over")
            else:
                tell(where)
                with state.going_on(where):
                    batch = uniform_batch(rows, dcp=arguments.dcp, device=state.device)
                    one_shape(state, rotated(batch, topk), arguments)


def one_shape(state: Comparison, sets: list[Inputs], arguments: argparse.Namespace) -> None:
    """Check at one shape, then time what is right, all in turn."""
    first = sets[0]
    asked = configurations(arguments)
    ready = [
        (operation, dcp)
        for operation, dcp in asked
        if state.agree(state.shape_group(operation, first, dcp))
    ]
    state.checked += len(asked)
    state.equal += len(ready)
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
        settled_times([graph for _, graph in named], state.late),
        strict=True,
    ):
        state.note("gpu_us", sample, name, provider, first, dcp)


def settled_times(graphs: list[measure.Graph], late: measure.Late) -> list[measure.Sample]:
    """Replay the graphs in turn, and for longer where their times vary."""
    samples = measure.graph_times(graphs, ROUNDS, late)
    if any(s.low and s.high and s.high - s.low > WIDE * s.median for s in samples):
        samples = measure.graph_times(graphs, MORE_ROUNDS, late)
    return samples


# --- on the host ---------------------------------------------------------------------------------


def host_groups(state: Comparison, arguments: argparse.Namespace) -> Iterator[Group]:
    """Every function, with all ways to call it, at the shapes that the host is timed at."""
    yield from vllm_calls.host_alone(state.theirs, state.provider, state.device)
    for topk in arguments.host_topk:
        batch = uniform_batch(HOST_ROWS, dcp=arguments.dcp, device=state.device)
        for operation, dcp in configurations(arguments):
            inputs = make_inputs(batch, topk)
            yield vllm_calls.host_group(state.theirs, state.provider, operation, inputs, dcp)


def on_the_host(state: Comparison, arguments: argparse.Namespace) -> list[Group]:
    """Check every function at one shape, and time what is right; returns what was timed."""
    timed = []
    for group in host_groups(state, arguments):
        what = f"host: {group.operation}, dcp {group.dcp}, K = {group.topk}"
        if state.late():
            state.left_out.append(f"{what}: the {arguments.seconds:g} seconds were over")
        elif state.agree(group):
            tell(what)
            calls = list(group.calls.values())
            for call in calls:
                call()  # once as it is timed, with what is chosen outside of the check
            samples = measure.host_times(
                calls, state.device,
                number=arguments.host_calls, rounds=arguments.host_rounds,
            )  # fmt: skip
            for provider, sample in zip(group.calls, samples, strict=True):
                state.rows.append(host_row("host_us", sample, provider, group))
            timed.append(group)
    return timed


def launches(state: Comparison, groups: list[Group]) -> None:
    """Kernels that each call launches. Last of all: a profiler that was there slows the host."""
    calls = [call for group in groups for call in group.calls.values()]
    found = measure.kernels_each(calls)
    if found is None or not any(found):
        state.left_out.append("launches: the profiler does not see them")
        return
    named = [(provider, group) for group in groups for provider in group.calls]
    for (provider, group), number in zip(named, found, strict=True):
        state.rows.append(host_row("kernels", measure.Sample(float(number)), provider, group))


def host_row(metric: str, sample: measure.Sample, provider: str, group: Group) -> record.Row:
    """A row of what is measured at the host's shapes."""
    return record.Row(
        metric, sample.median, group.operation, provider, "uniform", group.rows, group.topk,
        group.dcp, group.valid, "int32", sample.low, sample.high,
    )  # fmt: skip
