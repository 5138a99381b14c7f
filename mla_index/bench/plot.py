"""Plots of a record: time against T with the copy's line, and the host's cost as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mla_index.bench.contenders import COMPOSITION, COPY
from mla_index.bench.record import Row, Table, rows_of
from mla_index.bench.workloads import PREFILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "triton": "#1f77b4",
    "cupy": "#2ca02c",
    "numba": "#9467bd",
    "torch": "#ff7f0e",
    COMPOSITION: "#8c564b",
    "auto": "#17becf",
}
VLLM_COLOUR, OTHER_COLOUR = "#d62728", "#7f7f7f"

LOOKS: dict[str, dict[str, Any]] = {
    PREFILL: {"marker": "D", "markersize": 6, "linestyle": ":", "markerfacecolor": "none"},
}
LOOK: dict[str, Any] = {"marker": "o", "markersize": 3, "linestyle": "-"}
"""Of lines: of a workload that stands beside another one, and of every other."""
MOST_BESIDE = 4
"""Entries of a legend's line below a panel."""

PANELS = (
    ("remap", "remap"),
    ("remap_counts", "compacted and counted"),
    ("remap_safe_lengths", "… with safe lengths"),
    ("dcp_filter", "one rank's share"),
)
"""Operations that get a plot of time against T, and their titles."""


def plot(record: Mapping[str, Any], path: Path | BinaryIO) -> None:
    """Write the plots of a record as one picture, in PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    draw(record).savefig(path, format="png", dpi=110, metadata={"Source": origin(record)})


def draw(record: Mapping[str, Any]) -> Figure:
    """The plots of a record as one figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = Table(rows_of(record))
    metric = "gpu_us" if any(table.find("gpu_us")) else "cpu_us"
    topk = main_topk(table, metric)
    panels = [panel for panel in PANELS if any(table.find(metric, operation=panel[0], topk=topk))]
    hosts = list(table.find("host_us"))
    if all(row.operation == "flat_row_view" for row in hosts):
        hosts = []
    count = len(panels) + bool(hosts)
    columns = min(2, max(1, count))
    lines = -(-max(1, count) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (operation, title) in zip(axes, panels, strict=False):
        _time(axis, table, metric, operation, title, topk)
    if hosts:
        _bars(axes[len(panels)], hosts)
    for axis in axes[count:]:
        axis.set_axis_off()
    device = record["device"]
    name = device.get("name") or device["host"]
    figure.suptitle(f"mla_index on {name}, {record['date'][:10]}")
    return figure


def origin(record: Mapping[str, Any]) -> str:
    """What a picture tells of its record, so that one can be held against the other."""
    return f"{record['date']} {record['source_hash']}"


def main_topk(table: Table, metric: str) -> int:
    """The K that was measured first: the one that who measured cares most for."""
    return next((row.topk for row in table.find(metric)), 0)


def _time(axis: Axes, table: Table, metric: str, operation: str, title: str, topk: int) -> None:
    rows = list(table.find(metric, operation=operation, topk=topk))
    ranks = max(row.dcp for row in rows)
    rows = [row for row in rows if row.dcp == ranks]
    workloads = list(dict.fromkeys(row.workload for row in rows))
    for workload in workloads:
        for provider in dict.fromkeys(row.provider for row in rows):
            own = [r for r in rows if (r.provider, r.workload) == (provider, workload)]
            _line(axis, own, provider, color=_colour(provider))
        copied = list(table.find(metric, operation=COPY, topk=topk, workload=workload))
        bare = {"marker": ""} if len(copied) > 1 else {}  # a point without a marker is nothing
        _line(axis, copied, COPY, color="black", linestyle="--", **bare)
    if workloads != ["uniform"]:
        for workload in workloads:
            axis.plot([], [], label=workload, color=OTHER_COLOUR, **LOOKS.get(workload, LOOK))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel("T, query rows")
    axis.set_ylabel("µs on the device" if metric == "gpu_us" else "µs on the CPU")
    of = f", {ranks} ranks" if ranks > 1 else ""
    axis.set_title(f"{title}{of}, K = {topk}")
    axis.grid(visible=True, which="major", alpha=0.3)
    _legend(axis)


def _line(axis: Axes, rows: Sequence[Row], label: str, **look: Any) -> None:
    if rows:
        rows = sorted(rows, key=lambda row: row.rows)
        look = {**LOOKS.get(rows[0].workload, LOOK), **look}
        axis.plot(
            [row.rows for row in rows], [row.value for row in rows],
            label=label, linewidth=1.3, **look,
        )  # fmt: skip


def _bars(axis: Axes, rows: Sequence[Row]) -> None:
    """Host time by operation; what is made of eager operations is off the scale, and left out."""
    rows = [row for row in rows if row.provider not in ("torch", COMPOSITION)] or list(rows)
    operations = list(dict.fromkeys(_operation(row) for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows))
    height = 0.8 / len(providers)
    for number, provider in enumerate(providers):
        own = [row for row in rows if row.provider == provider]
        places = [operations.index(_operation(row)) + number * height for row in own]
        axis.barh(
            places, [row.value for row in own], height, label=provider, color=_colour(provider)
        )
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(operations))], operations)
    axis.invert_yaxis()
    axis.set_xlabel("µs on the host, outputs given")
    axis.set_title("cost of a call")
    axis.grid(visible=True, axis="x", alpha=0.3)
    _legend(axis)


def _legend(axis: Axes) -> None:
    """Below the panel, where it covers nothing; what several lines are called stands there once."""
    named: dict[str, Any] = {}
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        named.setdefault(label, handle)
    axis.legend(
        list(named.values()), list(named),
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=min(len(named), MOST_BESIDE),
        fontsize="small",
    )  # fmt: skip


def _operation(row: Row) -> str:
    return f"{row.operation}, {row.dcp} ranks" if row.dcp > 1 else row.operation


def _colour(provider: str) -> str:
    return COLOURS.get(provider, VLLM_COLOUR if provider.startswith("vllm") else OTHER_COLOUR)
