"""Measuring one call: time on a device and on the host, memory, kernels, synchronisation.

`triton.testing.do_bench_cudagraph` replays graphs too, but puts as many launches into one as the
host's cost suggests: whoever launches slowly gets a shorter graph, and more of the graph's own
start in each call. Here all contenders get the same number, and their graphs are replayed in turn,
so that a change of clocks meets all of them. Time on the host and on the CPU is
`torch.utils.benchmark`'s.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from statistics import quantiles
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from mla_index.bench.contenders import Call

Late = Callable[[], bool]

GRAPH_US = 400.0
"""Microseconds that a graph should take, so that its own start does not count."""
FEWEST_LAUNCHES, MOST_LAUNCHES = 4, 256
MARKER = "spin_kernel"
"""In the name of the kernel of `torch.cuda._sleep`."""
BYTES_A_US = 3e6
"""Bytes that a device is assumed to move in a microsecond, to choose the number of launches."""


@dataclass(frozen=True)
class Sample:
    """What repeated measurements of one call gave, in one unit.

    Args:
        median: of all of them.
        low, high: quartiles; None of a single measurement.
    """

    median: float
    low: float | None = None
    high: float | None = None


def summary(values: Sequence[float]) -> Sample:
    """Median and quartiles."""
    if len(values) == 1:
        return Sample(values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Sample(middle, low, high)


# --- on a CUDA device ----------------------------------------------------------------------------


class Graph:
    """Calls of one contender, captured: the inputs are walked in turn.

    Args:
        calls: the same operation on each set of inputs; has run before.
        launches: calls in the graph.
        pool: memory of temporaries, shared with graphs that never run at the same time.
        replays: that count, each time it is this graph's turn.
    """

    def __init__(self, calls: Sequence[Call], launches: int, pool: Any, replays: int) -> None:
        self.launches = launches
        self.replays = replays
        self.samples: list[float] = []
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        # Not `torch.cuda.graph`: it collects garbage and empties the allocator each time. But
        # a collection in the middle of a capture could free what must not be freed there.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                self._graph.capture_begin(pool=pool)
                try:
                    for call in islice(cycle(calls), launches):
                        call()
                finally:
                    self._graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        """Replay, and keep the microseconds that a call takes.

        All replays are queued before any is waited for, so that the device never waits for the
        host between them; the first, which does, is dropped.
        """
        marks = [_mark() for _ in range(self.replays + 2)]
        for mark in marks[:-1]:
            mark.record()
            self._graph.replay()
        marks[-1].record()
        marks[-1].synchronize()
        spans = [one.elapsed_time(other) for one, other in pairwise(marks)]
        self.samples += [span * 1e3 / self.launches for span in spans[1:]]


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def launches_for(moved: int, sets: int) -> int:
    """Launches in a graph of calls that move so many bytes."""
    expected = 1.5 + moved / BYTES_A_US
    return max(sets, FEWEST_LAUNCHES, min(MOST_LAUNCHES, round(GRAPH_US / expected)))


def graph_times(graphs: Sequence[Graph], rounds: int, late: Late) -> list[Sample]:
    """Replay the graphs in turn, `rounds` times, or until it is late."""
    for number in range(rounds):
        if number and late():
            break
        for graph in graphs:
            graph.replay()
    return [summary(graph.samples) for graph in graphs]


def host_times(
    calls: Sequence[Call], device: torch.device, *, number: int, rounds: int
) -> list[Sample]:
    """Microseconds that each call keeps the host, in loops without synchronisation.

    In each round each call has a loop of its own, in an order that changes from round to round, so
    that neither the host's clock nor a neighbour falls on one call alone; the samples are over the
    rounds. Between the loops the device is waited for, so that its queue never fills.

    Args:
        calls: of the contenders; have run before.
        device: where they launch.
        number: calls in a loop.
        rounds: loops of each call.
    """
    timers = [Timer("call()", globals={"call": call}, timer=time.perf_counter) for call in calls]
    values: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for index in _order(len(calls), turn):
            values[index].append(timers[index].timeit(number).median * 1e6)
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
    return [summary(found) for found in values]


def _order(count: int, turn: int) -> list[int]:
    """So many indices, forwards in one turn and backwards in the next; then rotated by one.

    After twice as many turns each has stood at every place twice.
    """
    start = turn // 2 % count
    indices = [*range(start, count), *range(start)]
    return indices[::-1] if turn % 2 else indices


# --- on the CPU ----------------------------------------------------------------------------------


def cpu_times(calls: Sequence[Call], rounds: int, seconds: float, late: Late) -> list[Sample]:
    """Time of calls on the CPU with all of torch's threads, in turn, `rounds` times.

    Args:
        calls: of the contenders.
        rounds: how often each is measured.
        seconds: that each measurement takes at least.
        late: whether to leave it at the rounds that were made.
    """
    threads = torch.get_num_threads()
    timers = [Timer("call()", globals={"call": call}, num_threads=threads) for call in calls]
    values: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        if number and late():
            break
        for timer, found in zip(timers, values, strict=True):
            found += [t * 1e6 for t in timer.blocked_autorange(min_run_time=seconds).times]
    return [summary(found) for found in values]


# --- memory, kernels, synchronisation ------------------------------------------------------------


def peak_bytes(call: Call, device: torch.device) -> int:
    """Bytes of torch's allocator that a call takes at its peak, beyond what there was."""
    if device.type == "cpu":
        return _peak_on_cpu(call)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(call: Call) -> int:
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    held = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def kernels(call: Call) -> int:
    """Kernels that a call launches on a CUDA device, copies and fills included."""
    torch.cuda.synchronize()
    with _quiet(), profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return len(_on_device(found))


def kernels_each(calls: Sequence[Call]) -> list[int] | None:
    """The same of several calls, in one run of the profiler; None where it does not see them all.

    Between the calls a kernel that sleeps tells them apart, as all are launched on one stream.
    """
    torch.cuda.synchronize()
    with _quiet(), profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in calls:
            call()
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    counts = counted(_on_device(found), MARKER)
    return counts if len(counts) == len(calls) else None


def counted(names: Iterable[str], marker: str) -> list[int]:
    """How many names stand before each that contains the marker, since the one before."""
    counts, since = [], 0
    for name in names:
        if marker in name:
            counts.append(since)
            since = 0
        else:
            since += 1
    return counts


def _on_device(found: profile) -> list[str]:
    """Names of what a profile saw on the device, in the order in which it began."""
    seen = found.events() or ()  # type: ignore[no-untyped-call]
    events = [event for event in seen if event.device_type == DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def synchronises(call: Call) -> bool:
    """Whether a call on a CUDA device makes torch wait for it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that some builds of the profiler write to the standard error stream."""
    kept = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)
