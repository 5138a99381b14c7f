"""The page of evidence, made from the records of conformance and sanitizer runs.

`python -m mla_index.conformance.evidence benchmarks/results docs/evidence.md` writes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import Any

from mla_index import registry

HEAD = """# Evidence

What the conformance suite was seen to do on real devices. This page is generated from the records
`benchmarks/results/conformance-*.json` (`mla-index conformance --all --json FILE`) and
`sanitizer-*.json` (`benchmarks/sanitize.py`), by

```console
$ python -m mla_index.conformance.evidence benchmarks/results docs/evidence.md
```

A test fails when page and records disagree, and warns when the kernel and launch sources are no
longer those of a record (their hash is in it).
"""


def records(folder: Path, kind: str = "conformance") -> dict[str, dict[str, Any]]:
    """The records of a folder by file name, in the order of their names."""
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob(f"{kind}-*.json"))
    }


def passed_on_a_card(found: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """For each built-in backend the conformance records in which it passed, whole, on a card."""
    return {
        name: [
            file
            for file, record in found.items()
            if record["card"]
            and record["backends"].get(name, {}).get("status") == "passed"
            and record["backends"][name]["scale"] == "full"
        ]
        for name in registry.BUILT_IN
    }


def page(folder: Path) -> str:
    """The page in Markdown."""
    found = records(folder)
    lines = [HEAD, "| backend | whole suite passed on a card, at full scale |", "|---|---|"]
    for name, files in passed_on_a_card(found).items():
        told = ", ".join(f"`{file}`" for file in files) or "**not recorded yet**"
        lines.append(f"| {name} | {told} |")
    lines.append("")
    for name, record in found.items():
        lines += _section(name, record)
    for name, record in records(folder, "sanitizer").items():
        lines += _sanitizer(name, record)
    return "\n".join(lines)


def _section(name: str, record: dict[str, Any]) -> Iterable[str]:
    versions = record["versions"]
    packages = ", ".join(f"{key} {value}" for key, value in versions.items() if key != "platform")
    yield f"## {record['card'] or record['device']}, {record['date'][:10]}\n"
    yield f"- record: `benchmarks/results/{name}`"
    yield f"- device: `{record['device']}`, driver {record['driver'] or 'none'}"
    yield f"- versions: {packages}"
    yield f"- sources: `{record['source_hash'][:16]}`"
    yield f"- every backend ran and passed: **{'yes' if record['passed'] else 'no'}**\n"
    yield "| backend | operation | passed | failed | skipped | why skipped |"
    yield "|---|---|---:|---:|---:|---|"
    for backend, result in record["backends"].items():
        for problem in result["problems"]:
            yield f"| {backend} | {problem} | | | | |"
        for line in result["results"]:
            why = "; ".join(
                f"{count} × {shorten(text, 120, placeholder=' …')}"
                for text, count in line["skip_reasons"].items()
            )
            numbers = " | ".join(str(line[key]) for key in ("passed", "failed", "skipped"))
            # Tests of no backend run beside each, and say so.
            shown = backend if line["backend"] == backend else f"beside {backend}"
            yield f"| {shown} | {line['operation']} | {numbers} | {why} |"
    yield "\n| backend | scale | kernels compiled |"
    yield "|---|---|---:|"
    for backend, result in record["backends"].items():
        compiled = result.get("compiled_kernels")
        yield f"| {backend} | {result.get('scale', '')} | {'–' if compiled is None else compiled} |"
    yield ""


def _sanitizer(name: str, record: dict[str, Any]) -> Iterable[str]:
    yield f"## compute-sanitizer, {record['card']}, {record['date'][:10]}\n"
    yield f"- record: `benchmarks/results/{name}`, sources `{record['source_hash'][:16]}`"
    yield "- `planted`: a write beyond its view, made on purpose, which must be found\n"
    if "note" in record:
        yield f"{record['note']}\n"
    yield "| backend | check | cases | errors | as it should be |"
    yield "|---|---|---:|---:|---|"
    for run in record["runs"]:
        what = f"{run['check']}, planted" if run["planted"] else run["check"]
        right = "yes" if run["as_it_should_be"] else "**no**"
        yield f"| {run['backend']} | {what} | {run['cases']} | {run['errors']} | {right} |"
    yield ""


def main() -> None:
    """Write the page: arguments are the folder of the records and the file of the page."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {Path(sys.argv[0]).name} FOLDER PAGE")
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.write_text(page(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
