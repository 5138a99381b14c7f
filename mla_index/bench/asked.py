"""The targets of this project, as data, and how far records reach them.

Each target names a way to compute what was reached (`Measure`), a bound to stay under (`ask`) and
one to be proud of (`stretch`). Where the records lack what it takes, the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mla_index.bench.contenders import ALLOCATED, COMPOSITION, NAMES
from mla_index.bench.noise import steady
from mla_index.bench.record import Row, Table, rows_of

LARGE_ROWS = 2048
"""T from which on time is compared with the copy's."""
MAIN_TOPK = 2048
"""K of the figures that the targets were set by."""
KERNEL_BACKENDS = ("triton", "cupy", "numba")
COMPACTED = ("remap_counts", "dcp_filter")
SLACK_SHARE, SLACK_US = 0.03, 0.15
"""Slower than vLLM by the larger of these is still as fast."""
NOTICEABLE_US = 3.0
"""Below, the launch itself is most of a kernel's time, and no ratio is asked for."""


class Point(NamedTuple):
    """A value, and where it was measured."""

    value: float
    where: str


Measure = Callable[[Table], Iterable[Point]]
"""What was reached, everywhere; the largest value is the one that counts."""


@dataclass(frozen=True)
class Target:
    """What is asked.

    Args:
        name: for people.
        measure: what was reached.
        ask, stretch: what the largest value must not exceed; None: nothing is asked.
        unit: of the values.
        stretch_measure: for a stretch that measures something else.
    """

    name: str
    measure: Measure
    ask: float | None
    stretch: float | None = None
    unit: str = "× copy"
    stretch_measure: Measure | None = None


@dataclass(frozen=True)
class Answer:
    """What was reached of a target; None where nothing was measured that would tell."""

    target: Target
    reached: Point | None
    stretch_reached: Point | None
    points: int
    unsteady: int
    """Values that are left out, since one of their times is unsteady."""

    @property
    def ask_met(self) -> bool | None:
        """Whether the ask is met."""
        return _met(self.reached, self.target.ask)

    @property
    def stretch_met(self) -> bool | None:
        """Whether the stretch is."""
        return _met(self.stretch_reached, self.target.stretch)


def answers(*records: Mapping[str, Any]) -> list[Answer]:
    """The targets, answered from the rows of all records.

    Ratios are taken within one record alone, as figures of two runs do not compare. Times on the
    device and on the CPU that are unsteady are left out; those on the host are taken as they are.
    """
    everything = [Table(rows_of(record)) for record in records]
    tables = [Table(steady(table.rows)) for table in everything]
    found = []
    for target in TARGETS:
        points = _points(target.measure, tables)
        stretched = points
        if target.stretch_measure is not None:
            stretched = _points(target.stretch_measure, tables)
        left_out = len(_points(target.measure, everything)) - len(points)
        found.append(Answer(target, _largest(points), _largest(stretched), len(points), left_out))
    return found


# --- measures ------------------------------------------------------------------------------------


def against_copy(
    provider: str, operations: tuple[str, ...], topk: int | None = MAIN_TOPK
) -> Measure:
    """Time of operations over the copy's, for T of at least `LARGE_ROWS`; None: for every K."""

    def measure(table: Table) -> Iterator[Point]:
        for row in table.find("gpu_us", provider=provider, workload="uniform"):
            wanted = row.operation in operations and row.rows >= LARGE_ROWS
            if wanted and topk in (None, row.topk):
                copied = table.value("gpu_us", operation="copy", **_shape(row))
                if copied:
                    yield Point(row.value / copied, _where(row))

    return measure


def against_provider(provider: str, other: str, metric: str = "gpu_us") -> Measure:
    """Time of every operation over the same of another provider."""

    def measure(table: Table) -> Iterator[Point]:
        for row, value in _pairs(table, provider, other, metric):
            yield Point(row.value / value, _where(row))

    return measure


def slower_than_vllm(provider: str) -> Measure:
    """How much slower than vLLM, over what is allowed: above 1 is too slow."""

    def measure(table: Table) -> Iterator[Point]:
        for row, value in _pairs(table, provider, vllm_in(table), "gpu_us"):
            yield Point(_over_slack(row.value, value), _where(row))

    return measure


def _over_slack(mine: float, theirs: float) -> float:
    return (mine - theirs) / max(SLACK_SHARE * theirs, SLACK_US)


class VllmTally(NamedTuple):
    """Of the shapes at which both were timed on the device: how many, and who is slower where."""

    shapes: int
    unsteady: int
    """Of these, not to be compared."""
    slower: int
    """Of these, by more than the slack."""
    worst: Point
    """The largest ratio to vLLM's time."""


def vllm_tally(table: Table, provider: str) -> VllmTally | None:
    """How a provider does beside vLLM; None where no shape has both."""
    steadily = Table(steady(table.rows))
    pairs = list(_pairs(steadily, provider, vllm_in(table), "gpu_us"))
    if not pairs:
        return None
    shapes = sum(1 for _ in _pairs(table, provider, vllm_in(table), "gpu_us"))
    slower = sum(_over_slack(row.value, value) > 1 for row, value in pairs)
    row, value = max(pairs, key=lambda pair: pair[0].value / pair[1])
    return VllmTally(shapes, shapes - len(pairs), slower, Point(row.value / value, _where(row)))


def against_vllm(provider: str) -> Measure:
    """Time over vLLM's, wherever vLLM takes a noticeable time."""

    def measure(table: Table) -> Iterator[Point]:
        for row, value in _pairs(table, provider, vllm_in(table), "gpu_us"):
            if value > NOTICEABLE_US:
                yield Point(row.value / value, _where(row))

    return measure


def fused_over_counts(provider: str) -> Measure:
    """Time of remap with counts and safe lengths over the same without the lengths."""

    def measure(table: Table) -> Iterator[Point]:
        for row in table.find("gpu_us", operation="remap_safe_lengths", provider=provider):
            without = table.value(
                "gpu_us", operation="remap_counts", provider=provider, **_shape(row)
            )
            if without:
                yield Point(row.value / without, _where(row))

    return measure


def host_over_vllm(table: Table) -> Iterator[Point]:
    """Host time of `auto` over that of vLLM's convert, both with counts and outputs given."""
    for row, value in _pairs(table, "auto", vllm_in(table), "host_us"):
        if row.operation == "remap_counts":
            yield Point(row.value / value, _where(row))


def host_against_figure(table: Table) -> Iterator[Point]:
    """The same over the 104 µs that vLLM 0.33.0 was measured to take on an H200's host."""
    for row in table.find("host_us", operation="remap_counts", provider="auto"):
        yield Point(row.value / 104.0, _where(row))


def names_over_native(statistic: Callable[[Row], float | None]) -> Measure:
    """Host time by vLLM's names less that of the operation, with outputs given or allocated alike.

    The two functions that launch nothing return what they make, and so allocate in either form.

    Args:
        statistic: of each time: its median, or another, None where a record has none.
    """

    def measure(table: Table) -> Iterator[Point]:
        for ending in ("", ALLOCATED):
            native = {_what(row): row for row in table.find("host_us", provider="auto" + ending)}
            for row in table.find("host_us", provider=NAMES + ending):
                ours, other = statistic(row), native.get(_what(row))
                theirs = None if other is None else statistic(other)
                if ours is not None and theirs is not None:
                    yield Point(ours - theirs, _where(row))

    return measure


def plainly(metric: str, provider: str | None = None, *operations: str) -> Measure:
    """A metric as it is, of a provider or of all, of some operations or of all."""

    def measure(table: Table) -> Iterator[Point]:
        for row in table.find(metric):
            if provider in (None, row.provider) and (not operations or row.operation in operations):
                yield Point(row.value, _where(row))

    return measure


def memory_over_output(provider: str) -> Measure:
    """Peak memory over the bytes of the slots."""

    def measure(table: Table) -> Iterator[Point]:
        for row in table.find("peak_bytes", provider=provider):
            size = 8 if row.dtype == "int64" else 4
            yield Point(row.value / (row.rows * row.topk * size), _where(row))

    return measure


def over(measure: Measure, *others: Measure) -> Measure:
    """The points of several measures."""
    return lambda table: (point for one in (measure, *others) for point in one(table))


# --- the targets ---------------------------------------------------------------------------------

TARGETS: tuple[Target, ...] = (
    Target(
        "Triton, remap without counts, T ≥ 2048, K = 2048",
        against_copy("triton", ("remap",)), 1.15, 1.08,
    ),
    Target(
        "Triton, remap with counts or dcp_filter, T ≥ 2048, K = 2048",
        against_copy("triton", COMPACTED), 1.45, 1.25,
    ),
    Target(
        "CuPy, remap with counts or dcp_filter, T ≥ 2048, K = 2048",
        against_copy("cupy", COMPACTED), 1.20, 1.12,
    ),
    Target(
        "CuPy, remap without counts, T ≥ 2048, K = 2048", against_copy("cupy", ("remap",)), None
    ),
    *(
        Target(f"{title}, T ≥ 2048, every K", against_copy(name, operations, topk=None), None)
        for name, title, operations in (
            ("triton", "Triton, remap without counts", ("remap",)),
            ("triton", "Triton, remap with counts or dcp_filter", COMPACTED),
            ("cupy", "CuPy, remap without counts", ("remap",)),
            ("cupy", "CuPy, remap with counts or dcp_filter", COMPACTED),
        )
    ),
    Target(
        "Triton, every operation, T and K: slower than vLLM by at most the larger of 3 % and "
        "0.15 µs; stretch: time over vLLM's where that is above 3 µs",
        slower_than_vllm("triton"), 1.0, 0.8, "× the slack (stretch: × vLLM)",
        against_vllm("triton"),
    ),
    Target(
        "counts and safe lengths: launches",
        over(*(plainly("kernels", name, "remap_safe_lengths") for name in KERNEL_BACKENDS)),
        1, unit="launches",
    ),
    *(
        Target(
            f"{name}: counts and safe lengths over counts alone",
            fused_over_counts(name), 1.05, unit="× without lengths",
        )
        for name in KERNEL_BACKENDS
    ),
    Target("Numba, every operation", against_provider("numba", "cupy"), 2.0, 1.3, "× CuPy"),
    Target(
        "host cost of `auto` with counts, outputs given, over vLLM's convert in the same process",
        host_over_vllm, 1 / 8, 1 / 10, "× vLLM",
    ),
    Target(
        "the same over the 104 µs measured for vLLM 0.33.0 on an H200's host",
        host_against_figure, 1 / 8, 1 / 10, "× 104 µs",
    ),
    Target(
        "host cost of vLLM's names over the native function, outputs alike",
        names_over_native(lambda row: row.value), 2.0, unit="µs",
    ),
    Target(
        "the same by lower quartiles: a neighbour on the host only adds",
        names_over_native(lambda row: row.low), None, unit="µs",
    ),
    Target(
        "kernels compiled after `warmup` by random calls",
        plainly("compiled_after_warmup"), 0, unit="kernels",
    ),
    Target("import beside torch, from bytecode", plainly("import_ms"), 50, unit="ms"),
    Target(
        "kernel packages that the import brings along",
        plainly("imported_kernel_packages"), 0, unit="packages",
    ),
    Target("torch: synchronisation", plainly("synchronises", "torch"), 0, unit="(1: it waits)"),
    Target("torch: kernels, plain", plainly("kernels", "torch", "remap"), 25, unit="kernels"),
    Target(
        "torch: kernels with counts", plainly("kernels", "torch", "remap_counts"), 30,
        unit="kernels",
    ),
    Target(
        "torch: kernels with dcp", plainly("kernels", "torch", "dcp_filter"), 38, unit="kernels"
    ),
    Target(
        "torch: kernels with everything", plainly("kernels", "torch", "everything"), 55,
        unit="kernels",
    ),
    Target("torch: memory", memory_over_output("torch"), 6, unit="× the output"),
    Target(
        "torch over the plain composition of gather and where",
        over(
            against_provider("torch", COMPOSITION),
            against_provider("torch", COMPOSITION, "cpu_us"),
        ),
        None, 1.0, "× composition",
    ),
    *(
        Target(
            f"{name}: memory of a call with outputs given",
            plainly("peak_bytes", name), 0, unit="bytes",
        )
        for name in KERNEL_BACKENDS
    ),
)  # fmt: skip


def _met(point: Point | None, bound: float | None) -> bool | None:
    if point is None or bound is None:
        return None
    return point.value <= bound


def _points(measure: Measure, tables: Iterable[Table]) -> list[Point]:
    return [point for table in tables for point in measure(table)]


def _largest(points: Iterable[Point]) -> Point | None:
    return max(points, key=lambda point: point.value, default=None)


def _pairs(table: Table, provider: str, other: str, metric: str) -> Iterator[tuple[Row, float]]:
    """Rows of a provider, each with the value of the same measurement of another provider."""
    theirs = {_what(row): row.value for row in table.find(metric, provider=other)}
    for row in table.find(metric, provider=provider):
        value = theirs.get(_what(row))
        if value:
            yield row, value


def _shape(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in ("workload", "rows", "topk", "valid", "dtype")}


def _what(row: Row) -> tuple[object, ...]:
    return (row.operation, row.dcp, *_shape(row).values())


def vllm_in(table: Table) -> str:
    """The provider that is vLLM, whatever its version, with outputs given where that can be."""
    names = (row.provider for row in table.rows if row.provider.startswith("vllm"))
    return next(names, "vllm").removesuffix(ALLOCATED)


def _where(row: Row) -> str:
    ranks = f", {row.dcp} ranks" if row.dcp > 1 else ""
    at = f" at T = {row.rows}, K = {row.topk}" if row.rows else ""
    workload = f", {row.workload}" if row.workload not in ("", "uniform") else ""
    return f"{row.provider} {row.operation}{ranks}{at}{workload}"
