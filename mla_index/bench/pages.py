"""The tables of README and documentation, made from records.

`python -m mla_index.bench.pages` in the checkout writes them, between a pair of comments for each::

    <!-- speed:begin -->
    <!-- speed:end -->

Records are `benchmarks/results/bench-*.json` (from `mla-index bench --json FILE`) and
`benchmarks/results/compare-*.json` (the comparison with vLLM). Of several on one type of device the
latest counts. It also draws `docs/images/times-*.png`, for which it needs matplotlib.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_index.bench import noise, wording
from mla_index.bench.asked import (
    SLACK_SHARE,
    SLACK_US,
    Answer,
    Point,
    answers,
    vllm_in,
    vllm_tally,
)
from mla_index.bench.contenders import COPY
from mla_index.bench.plot import plot
from mla_index.bench.record import Row, Table, read, rows_of

Record = Mapping[str, Any]

SHOWN_ROWS = (1, 32, 128, 512, 2048, 8192, 32768)
"""T of the README's table."""
SUMMARY = (
    ("remap", 1, "remap"),
    ("remap_counts", 1, "remap, compacted, counts"),
    ("remap_safe_lengths", 1, "… and safe lengths, one launch"),
    ("dcp_filter", 8, "dcp_filter, 8 ranks"),
)
"""Operations of the README's table, with the number of ranks."""
SUMMARY_PROVIDERS = ("triton",)
TOPK = 2048


def records(folder: Path) -> dict[str, Record]:
    """The latest record by what it is about: `bench cuda`, `bench cpu`, `compare cuda` …"""
    found: dict[str, Record] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith(("bench-", "compare-")):
            record = {**read(path), "file": path.name}
            about = f"{path.name.partition('-')[0]} {record['device']['type']}"
            if about not in found or found[about]["date"] < record["date"]:
                found[about] = record
    return found


def sections(found: Mapping[str, Record]) -> dict[tuple[str, str], str]:
    """By file and marker, what stands between the markers."""
    made = {}
    if "bench cuda" in found:
        made["README.md", "speed"] = summary(found["bench cuda"], found.get("compare cuda"))
    made["docs/performance.md", "asked"] = asked(list(found.values()))
    made["docs/performance.md", "host-vllm"] = beside_vllm(found.get("compare cuda"))
    for kind in ("cuda", "cpu"):
        made["docs/performance.md", f"times-{kind}"] = times(found.get(f"bench {kind}"))
    return made


def pictures(found: Mapping[str, Record]) -> dict[str, Record]:
    """By file, the record that `plot` draws there; `times` shows it."""
    return {
        _picture(about.removeprefix("bench ")): record
        for about, record in found.items()
        if about.startswith("bench ")
    }


def _picture(kind: str) -> str:
    return f"docs/images/times-{kind}.png"


def replace_section(text: str, marker: str, content: str) -> str:
    """The text with other content between a marker's comments.

    Raises:
        ValueError: the comments are not there, once each and in their order.
    """
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"{begin} and {end} must stand there once")
    return pattern.sub(lambda _: f"{begin}\n{content.rstrip()}\n{end}", text)


# --- the README ----------------------------------------------------------------------------------


def summary(record: Record, comparison: Record | None = None) -> str:
    """Device time by T, with the copy of the same bytes, and the cost on the host."""
    table = Table(rows_of(record))
    shown = [t for t in SHOWN_ROWS if t in _times(table, COPY, "torch", 1, TOPK)]
    lines = [("copy of the same bytes", _times(table, COPY, "torch", 1, TOPK))]
    for operation, ranks, title in SUMMARY:
        for provider in SUMMARY_PROVIDERS:
            lines.append((f"{title}, {provider}", _times(table, operation, provider, ranks, TOPK)))
        if comparison is not None:
            theirs = Table(rows_of(comparison))
            vllm = vllm_in(theirs)
            lines.append((f"{title}, {vllm}", _times(theirs, operation, vllm, ranks, TOPK)))
    body = _table(
        ["µs on the device, T =", *map(str, shown)],
        ([title, *(_time(of.get(t)) for t in shown)] for title, of in lines if of),
    )
    told = _legend(row for _, of in lines for row in of.values() if row.rows in shown)
    told += [f"{_where(record)}; K = {TOPK}, {_valid(table)}; by graph replay, median."]
    if comparison is not None:
        told += [*_elsewhere(table, comparison), *_host_beside(comparison), *_beside(comparison)]
    return "\n".join([*body, "", *told])


def _elsewhere(table: Table, comparison: Record) -> Iterator[str]:
    """How far what both records have differs, since the rows of one stand beside the other's."""
    theirs = Table(rows_of(comparison))
    off = []
    for operation, ranks, _ in SUMMARY:
        here = _times(table, operation, "triton", ranks, TOPK)
        there = _times(theirs, operation, "triton", ranks, TOPK)
        shown = here.keys() & there.keys() & set(SHOWN_ROWS)
        off += [abs(there[rows].value / here[rows].value - 1) for rows in shown]
    if off:
        yield (
            f"The rows of {vllm_in(theirs)} are from the comparison, in whose process Triton's "
            f"times were within {max(off):.0%} of these."
        )


def _host_beside(comparison: Record) -> Iterator[str]:
    """What a call costs the host; from the comparison, where many rounds take turns."""
    table = Table(rows_of(comparison))
    vllm = vllm_in(table)
    ours, theirs = (
        table.value("host_us", operation="remap_counts", provider=provider, topk=TOPK)
        for provider in ("auto", vllm)
    )
    if ours and theirs:
        yield (
            f"A call of `remap` with counts, outputs given, costs the host {ours:.1f} µs; "
            f"{vllm}'s own, in turn with it, {theirs:.1f} µs."
        )


def _beside(comparison: Record) -> Iterator[str]:
    """How often Triton is slower than vLLM, and how much at worst."""
    table = Table(rows_of(comparison))
    found = vllm_tally(table, "triton")
    if found is not None:
        unsteady = f"{found.unsteady} are too unsteady to compare; " if found.unsteady else ""
        yield (
            f"Of {found.shapes} shapes timed beside {vllm_in(table)}, Triton is slower at "
            f"{found.slower} by more than the larger of {SLACK_SHARE * 100:.0f} % and "
            f"{SLACK_US:g} µs; {unsteady}its worst time is {found.worst.value:.2f} × vLLM's "
            f"({found.worst.where})."
        )


# --- the documentation ---------------------------------------------------------------------------


def asked(found: Sequence[Record]) -> str:
    """Every target with what was reached, and the shapes that this was reached over."""
    if not found:
        return "Not measured yet."
    body = _table(
        ["target", "ask", "stretch", "reached (worst)", "where", "ask", "stretch"],
        (_answer(answer) for answer in answers(*found)),
    )
    timed = ((record["file"], _timed(Table(rows_of(record)))) for record in found)
    told = [f"- `{name}`: {wording.measured(rows)}" for name, rows in timed if rows]
    parts = [*body, "", "Shapes that were timed, by record:", "", *told]
    noted = [(record["file"], noise.unsteady(record)) for record in found]
    if any(text for _, text in noted):
        parts += ["", *(f"- `{name}`: {text}." for name, text in noted if text)]
    return "\n".join(parts)


def beside_vllm(record: Record | None) -> str:
    """Host time of every way to make a call, from the comparison with vLLM."""
    if record is None or "host_method" not in record:  # older records compare unlike calls
        return "Not measured yet."
    where = f"{_where(record)}. Record: `benchmarks/results/{record['file']}`."
    method = f"Timed {record['host_method']}."
    kernels = ", ".join(f"{who}: {sum(of.values())}" for who, of in record["compiled"].items())
    if kernels:
        method += f" Kernels compiled for it: {kernels}."
    table = Table(rows_of(record))
    lines = _host_lines(table)
    return "\n".join([where, method, *lines, *_noise(record, table.find("host_us"))])


def _noise(record: Record, shown: Iterable[Row]) -> list[str]:
    told = _legend(shown) + [f"Beware: {warning}." for warning in noise.warnings(record)]
    return [line for text in told for line in ("", text)]


def _legend(shown: Iterable[Row]) -> list[str]:
    return [f"{noise.LEGEND}."] if any(map(noise.is_wide, shown)) else []


def times(record: Record | None) -> str:
    """Every time of a record, a table for each workload and K."""
    if record is None:
        return "Not measured yet."
    table = Table(rows_of(record))
    timed = _timed(table)
    parts = [f"{_where(record)}. Record: `benchmarks/results/{record['file']}`."]
    picture = _picture(record["device"]["type"]).removeprefix("docs/")
    parts += ["", f"![Time against the number of rows, and the host's cost]({picture})"]
    for workload, topk in dict.fromkeys((row.workload, row.topk) for row in timed):
        rows = [row for row in timed if (row.workload, row.topk) == (workload, topk)]
        counts = sorted({row.rows for row in rows})
        heading = "µs on the device" if rows[0].metric == "gpu_us" else "µs on the CPU"
        parts += ["", f"**{workload}, K = {topk}**", ""]
        parts += _table([f"{heading}, T =", *map(str, counts)], _time_lines(rows, counts))
    parts += [*_host_lines(table), *_noise(record, [*timed, *table.find("host_us")])]
    left_out = wording.left_out(record["left_out"], {row.rows for row in timed})
    if left_out:
        parts += ["", "Left out:", "", *(f"- {text}" for text in left_out)]
    if record["wrong"]:
        parts += ["", "**Wrong or failed:**", "", *(f"- {text}" for text in record["wrong"])]
    return "\n".join(parts)


def _timed(table: Table) -> list[Row]:
    """The times of the operations: on the device, or of a record without any, on the CPU."""
    return list(table.find("gpu_us")) or list(table.find("cpu_us"))


def _time_lines(rows: Sequence[Row], counts: Sequence[int]) -> Iterator[list[str]]:
    for who in dict.fromkeys((row.operation, row.dcp, row.provider) for row in rows):
        own = {r.rows: r for r in rows if (r.operation, r.dcp, r.provider) == who}
        operation, ranks, provider = who
        title = f"{operation}, {ranks} ranks" if ranks > 1 else operation
        yield [f"{title}, {provider}", *(_time(own.get(count)) for count in counts)]


def _host_lines(table: Table) -> list[str]:
    rows = list(table.find("host_us"))
    if not rows:
        return []
    providers = list(dict.fromkeys(row.provider for row in rows))
    lines = []
    several = len({row.topk for row in rows if row.topk}) > 1
    for what in dict.fromkeys((row.operation, row.dcp, row.topk) for row in rows):
        own = {r.provider: r for r in rows if (r.operation, r.dcp, r.topk) == what}
        operation, ranks, topk = what
        title = f"{operation}, {ranks} ranks" if ranks > 1 else operation
        title += f", K = {topk}" if several and topk else ""
        lines.append([title, *(_time(own.get(provider)) for provider in providers)])
    return ["", *_table(["µs on the host", *providers], lines)]


def _time(row: Row | None) -> str:
    return "–" if row is None else "~" * noise.is_wide(row) + _number(row.value)


def _answer(answer: Answer) -> list[str]:
    target, reached, stretched = answer.target, answer.reached, answer.stretch_reached
    value = "not steady" if answer.unsteady else "not measured"
    if reached is not None:
        value = f"{_bound(reached.value)} {target.unit}"
        if target.stretch_measure is not None and stretched is not None:
            value += f"; {_bound(stretched.value)}"
    return [
        target.name, _limit(target.ask), _limit(target.stretch), value, _place(reached),
        _verdict(answer.ask_met), _verdict(answer.stretch_met),
    ]  # fmt: skip


def _place(point: Point | None) -> str:
    return "" if point is None else point.where


def _verdict(met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: "–"}[met]


def _limit(bound: float | None) -> str:
    return "–" if bound is None else f"≤ {_bound(bound)}"


def _bound(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.3g}"


def _times(table: Table, operation: str, provider: str, ranks: int, topk: int) -> dict[int, Row]:
    found = table.find(
        "gpu_us", operation=operation, provider=provider, dcp=ranks, topk=topk, workload="uniform"
    )
    return {row.rows: row for row in found}


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _valid(table: Table) -> str:
    shares = {row.valid for row in table.rows if row.workload == "uniform"}
    return " and ".join(f"{1 - share:.0%} of the entries −1" for share in sorted(shares))


def _where(record: Record) -> str:
    device, versions = record["device"], record["versions"]
    name = device.get("name") or f"{device['host']}, {device['threads']} threads"
    packages = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda")
    told = ", ".join(
        f"{package} {versions[package]}" for package in packages if package in versions
    )
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    return f"{name}{driver}; {told}; {record['date'][:10]}; sources `{record['source_hash'][:12]}`"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(head), "|" + "---|" * len(head), *(line(cells) for cells in lines)]


def main() -> None:
    """Write every section and picture into the files of the checkout in the current folder."""
    found = records(Path("benchmarks/results"))
    for (name, marker), content in sections(found).items():
        path = Path(name)
        try:
            text = replace_section(path.read_text(encoding="utf-8"), marker, content)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {name}: {error}")
        path.write_text(text, encoding="utf-8")
    for name, record in pictures(found).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        plot(record, Path(name))


if __name__ == "__main__":
    main()
