"""A whole run: checked first, then measured, shape by shape; what comes of it is a record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from mla_index.bench import importing, measure, noise, warming
from mla_index.bench.contenders import COPY, OPERATIONS, bind, bind_copy
from mla_index.bench.measure import Sample
from mla_index.bench.plan import (
    MOST_EAGER_ENTRIES,
    Contender,
    Plan,
    contenders,
    dtype_name,
    eager,
    too_large,
    usable_backends,
)
from mla_index.bench.record import Row, head
from mla_index.bench.verify import verify
from mla_index.bench.workloads import (
    DECODE,
    VALID,
    Batch,
    Inputs,
    make_inputs,
    rotated,
    trace_batches,
    uniform_batch,
    why_no_step,
)
from mla_index.simulation.memory import is_exhausted
from mla_index.simulation.setting import Progress
from mla_index.simulation.trace import Request, read_trace

SMALL_ROWS = 32
"""T where the host is measured: of a decode step, and short enough never to fill a queue."""
MEMORY_ROWS = {"cpu": 256, "cuda": 2048}
"""T where memory is measured, by device type."""
HOST_CALLS, HOST_ROUNDS = 500, 9
"""Calls in a loop on the host, fewer than a device's queue holds; and such loops of each call."""


@dataclass
class Run:
    """A run on its way.

    Args:
        plan: what was asked for.
        backends: that are measured.
        deadline: on `time.monotonic`'s clock; no shape is begun later.
        progress: told of every step.
    """

    plan: Plan
    backends: tuple[str, ...]
    deadline: float
    progress: Progress | None = None
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def on_cuda(self) -> bool:
        """Whether there is a device apart from the host."""
        return self.plan.device.type == "cuda"

    @property
    def stopped(self) -> str:
        """Why a shape is left out when it is late."""
        return f"stopped after {self.plan.seconds:g} s"

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def add(self, metric: str, found: Sample | float, who: Contender, inputs: Inputs) -> None:
        """Keep a measurement of a contender."""
        self.note(metric, found, who.operation.name, who.provider, inputs, who.dcp)

    def note(
        self,
        metric: str,
        found: Sample | float,
        operation: str,
        provider: str,
        inputs: Inputs,
        dcp: int = 1,
    ) -> None:
        """Keep a measurement."""
        sample = found if isinstance(found, Sample) else Sample(float(found))
        rows, topk = inputs.tokens.shape
        self.rows.append(
            Row(
                metric, sample.median, operation, provider,
                inputs.batch.name, rows, topk, dcp, inputs.valid,
                dtype_name(inputs.tokens.dtype),
                sample.low, sample.high,
            )
        )  # fmt: skip

    def attempt(self, what: object, work: Callable[[], object]) -> bool:
        """Whether the work could be done; what went wrong is kept, and the run goes on."""
        try:
            work()
        except Exception as error:  # one broken backend does not take the others' numbers away
            if is_exhausted(error):
                self.left_out.append(f"{what}: the device's memory is too small")
            else:
                self.wrong.append(f"{what}: {type(error).__name__}: {error}")
            return False
        return True


def run(plan: Plan, progress: Progress | None = None) -> dict[str, Any]:
    """Measure, and return the record.

    Its `rows` are the measurements, `left_out` what was not measured and why, and `wrong` the
    contenders whose results were not those of the torch backend, or that failed; those have no
    times. `interrupted`: a KeyboardInterrupt ended it, and the record is of what came before.

    Raises:
        BackendUnavailable: a backend that was named cannot run, or none can.
        TraceError: the trace cannot be read.
    """
    started = time.monotonic()
    load = noise.load()  # before the run adds its own
    backends = usable_backends(plan)
    torch.manual_seed(plan.seed)
    state = Run(plan, backends, started + (plan.seconds or 0.0), progress)
    requests = [] if plan.trace is None else read_trace(plan.trace)
    shapes = list(_of_trace(plan, requests) if requests else _uniform(plan))
    state.left_out += _without_step(plan, requests)
    interrupted = False
    try:
        _measure(state, shapes)
    except KeyboardInterrupt:
        interrupted = True
        state.left_out.append("what was to follow: interrupted")
    return {
        **head("bench", plan.device),
        "plan": plan.as_dict(),
        "backends": list(backends),
        "load": load,
        "seconds": round(time.monotonic() - started, 1),
        "interrupted": interrupted,
        "left_out": state.left_out,
        "wrong": state.wrong,
        "rows": [row.as_dict() for row in state.rows],
    }


def _measure(state: Run, shapes: Sequence[Shape]) -> None:
    """The host first, then every shape until it is late, then what is measured once a process."""
    plan = state.plan
    _on_host(state)
    for number, shape in enumerate(shapes):
        _tell(state, f"T = {shape.rows}, K = {shape.topk}", number, len(shapes))
        reason = too_large(plan, shape.rows, shape.topk)
        if reason is None and state.late():
            reason = state.stopped
        if reason is None:
            _time_shape(state, shape.batch(), shape.topk)
        else:
            state.left_out.append(f"{shape.workload}, T = {shape.rows}, K = {shape.topk}: {reason}")
    if not plan.quick:
        _once_a_process(state)


class Shape(NamedTuple):
    """What is measured at a time; the batch is made when it is wanted, as it may be too large."""

    workload: str
    rows: int
    topk: int
    batch: Callable[[], Batch]


def _of_trace(plan: Plan, requests: Sequence[Request]) -> Iterator[Shape]:
    """Every width whole, in turn."""
    batches = trace_batches(
        requests, plan.rows or (), plan.mtp,
        dcp=plan.dcp or (), dtype=plan.dtype, device=plan.device,
    )  # fmt: skip
    for width in plan.topk or ():
        for batch in batches:
            yield Shape(batch.name, batch.rows, width, partial(_itself, batch))


def _without_step(plan: Plan, requests: Sequence[Request]) -> Iterator[str]:
    """The rows that no decode step of a trace has, each with its reason."""
    if not requests:
        return
    for width in plan.topk or ():
        for rows in plan.rows or ():
            reason = why_no_step(requests, rows, plan.mtp)
            if reason is not None:
                yield f"{DECODE}, T = {rows}, K = {width}: {reason}"


def _uniform(plan: Plan) -> Iterator[Shape]:
    """The first width whole, then the others, coarse before fine."""
    uniform = cache(partial(_uniform_batch, plan))
    counts, topk = plan.rows or (), plan.topk or ()
    pairs = [(rows, topk[0]) for rows in counts]
    for part in (counts[::4], counts[2::4], counts[1::2]):
        pairs += [(rows, width) for rows in part for width in topk[1:]]
    for rows, width in pairs:
        yield Shape("uniform", rows, width, partial(uniform, rows))


def _uniform_batch(plan: Plan, rows: int) -> Batch:
    valid = VALID if plan.valid is None else plan.valid
    return uniform_batch(
        rows, dcp=plan.dcp or (), valid=valid, dtype=plan.dtype, device=plan.device
    )


def _itself(batch: Batch) -> Batch:
    return batch


def _tell(state: Run, stage: str, done: int, total: int) -> None:
    if state.progress is not None:
        state.progress(stage, done, total)


# --- time on the device --------------------------------------------------------------------------


def _time_shape(state: Run, batch: Batch, topk: int) -> None:
    """Check every contender at one shape, then time those that are right, in turn."""
    ready: list[Contender] = []
    sets: list[Inputs] = []
    where = f"{batch.name}, T = {batch.rows}, K = {topk}"
    if not state.attempt(where, lambda: sets.extend(rotated(batch, topk))):
        return
    skipped = set()
    for who in contenders(state.plan, state.backends, on_device=True):
        if state.on_cuda and eager(who.provider) and batch.rows * topk > MOST_EAGER_ENTRIES:
            skipped.add(who.provider)
        elif state.late():
            state.left_out.append(f"{where}: {who}: {state.stopped}")
        elif state.attempt(f"{where}: {who}", partial(verify, who, sets[0])):
            ready.append(who)
    if skipped:
        state.left_out.append(
            f"{where}: {', '.join(sorted(skipped))}: T * K is above {MOST_EAGER_ENTRIES}"
        )
    timed = _by_graphs if state.on_cuda else _by_timer
    state.attempt(where, lambda: timed(state, ready, sets))


def _by_graphs(state: Run, ready: list[Contender], sets: list[Inputs]) -> None:
    number = measure.launches_for(sets[0].moved, len(sets))
    pool = torch.cuda.graph_pool_handle()
    rounds, replays = (2, 3) if state.plan.quick else (3, 5)
    graphs = [measure.Graph([bind_copy(inputs) for inputs in sets], number, pool, replays)]
    timed: list[Contender] = []

    def capture(who: Contender) -> None:
        calls = [bind(who.operation, who.provider, inputs, who.dcp) for inputs in sets]
        # Many kernels a call: the graph's own start counts for little, and its making for much.
        graphs.append(
            measure.Graph(calls, max(2, number // 8), pool, replays=2)
            if eager(who.provider)
            else measure.Graph(calls, number, pool, replays)
        )
        timed.append(who)

    for who in ready:
        state.attempt(who, partial(capture, who))
    copied, *found = measure.graph_times(graphs, rounds, state.late)
    state.note("gpu_us", copied, COPY, "torch", sets[0])
    for who, sample in zip(timed, found, strict=True):
        state.add("gpu_us", sample, who, sets[0])


def _by_timer(state: Run, ready: list[Contender], sets: list[Inputs]) -> None:
    calls = [bind(who.operation, who.provider, sets[0], who.dcp) for who in ready]
    rounds, seconds = (2, 0.02) if state.plan.quick else (3, 0.03)
    copied, *found = measure.cpu_times([bind_copy(sets[0]), *calls], rounds, seconds, state.late)
    state.note("cpu_us", copied, COPY, "torch", sets[0])
    for who, sample in zip(ready, found, strict=True):
        state.add("cpu_us", sample, who, sets[0])


# --- what does not depend on the shape -----------------------------------------------------------


def _on_host(state: Run) -> None:
    """Host time, kernels, synchronisation and memory of every contender, at one shape each."""
    plan = state.plan
    topk = min(plan.topk or (1,)) if state.on_cuda is False else (plan.topk or (1,))[0]
    reason = too_large(plan, MEMORY_ROWS[plan.device.type], topk)
    if reason is not None:
        state.left_out.append(f"host, memory, kernels, K = {topk}: {reason}")
        return
    small, large = (
        make_inputs(_uniform_batch(plan, rows), topk)
        for rows in (SMALL_ROWS, MEMORY_ROWS[plan.device.type])
    )
    everyone = list(contenders(plan, state.backends, on_device=False))
    if plan.backends is None:
        everyone += [
            Contender(OPERATIONS[name], "auto", dcp)
            for name in plan.operations or ()
            for dcp in OPERATIONS[name].ranks(plan.dcp or ())
        ]
    right = [who for who in everyone if state.attempt(who, partial(verify, who, small))]
    _host_times(state, right, small)
    for number, who in enumerate(right):
        _tell(state, "memory, kernels", number, len(right))
        if who.provider != "auto" and who.operation.on_device:
            state.attempt(who, partial(_small_facts, state, who, small, large))


def _host_times(state: Run, everyone: list[Contender], small: Inputs) -> None:
    """The host's time of all that call an operation, in turn.

    Before the kernels are counted: where a profiler has been, the host stays slower.
    """
    groups: dict[tuple[str, int, bool], list[Contender]] = {}
    for who in everyone:
        if state.on_cuda or not who.operation.on_device:
            key = (who.operation.name, who.dcp, eager(who.provider))
            groups.setdefault(key, []).append(who)

    def time_group(group: list[Contender], number: int) -> None:
        calls = [bind(who.operation, who.provider, small, who.dcp) for who in group]
        samples = measure.host_times(calls, state.plan.device, number=number, rounds=HOST_ROUNDS)
        for who, sample in zip(group, samples, strict=True):
            state.add("host_us", sample, who, small)

    for number, ((name, dcp, is_eager), group) in enumerate(groups.items()):
        _tell(state, "host", number, len(groups))
        calls = HOST_CALLS // 5 if is_eager else HOST_CALLS
        if not state.attempt(
            f"{name} of {dcp} ranks on the host", partial(time_group, group, calls)
        ):
            for who in group:  # apart, so that one alone is without a time, and named
                state.attempt(f"{who} on the host", partial(time_group, [who], calls))
    if state.on_cuda:
        (copied,) = measure.host_times(
            [bind_copy(small)], state.plan.device, number=HOST_CALLS, rounds=HOST_ROUNDS
        )
        state.note("host_us", copied, COPY, "torch", small)


def _small_facts(state: Run, who: Contender, small: Inputs, large: Inputs) -> None:
    call = bind(who.operation, who.provider, small, who.dcp)
    big = bind(who.operation, who.provider, large, who.dcp)
    big()
    state.add("peak_bytes", measure.peak_bytes(big, state.plan.device), who, large)
    if state.on_cuda:
        seen = measure.kernels(call)
        if seen:  # the profiler sees none where it may not look
            state.add("kernels", seen, who, small)
        state.add("synchronises", measure.synchronises(call), who, small)


def _once_a_process(state: Run) -> None:
    """Kernels compiled after `warmup`, and the cost of the import."""
    if state.on_cuda:
        for backend in state.backends:
            state.attempt(
                f"kernels that {backend} compiles after warmup",
                partial(_keep, state, partial(warming.after_warmup, backend, state.plan.device)),
            )
    state.attempt("the import", partial(_keep, state, importing.cost))


def _keep(state: Run, measured: Callable[[], Iterable[Row]]) -> None:
    state.rows.extend(measured())
