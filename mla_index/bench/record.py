"""Records: what was measured, where, and with which sources; as rows that JSON holds.

A record of another programme (the comparison with vLLM, whose rows have the provider
`vllm <version>`) has the same form, so rows of several records can be read as one list. Write its
rows with `Row`, its head with `head`, and give its `kind` another name.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mla_index import installed
from mla_index.conformance.source import source_hash

FORMAT = 1

METRICS = {
    "gpu_us": "microseconds on the device, by replay of a CUDA graph",
    "cpu_us": "microseconds on the CPU, with all of torch's threads",
    "host_us": "microseconds on the host, in a loop without synchronisation",
    "peak_bytes": "bytes of torch's allocator at the peak of a call with outputs given",
    "kernels": "kernels that a call launches, copies and fills included",
    "synchronises": "1 where a call makes torch wait for the device, else 0",
    "compiled_after_warmup": "kernels compiled by random calls after `warmup`",
    "import_ms": "milliseconds of `import mla_index` from bytecode, where torch is imported",
    "imported_kernel_packages": "kernel packages that this import brought along",
}


class RecordError(ValueError):
    """A file that is no record; the message names it."""


@dataclass(frozen=True)
class Row:
    """One measurement with its parameters.

    Args:
        metric: a key of `METRICS`.
        value: what was measured; of repeated measurements the median.
        operation: as `--op` names it; `copy`; or what else was measured (`import`).
        provider: a backend, `auto`, `torch` for `copy`, `composition`, or `vllm <version>`; in the
            comparison with vLLM also `auto by vLLM's names`, and on its host each of these with
            `, outputs allocated` behind, where the call is given none.
        workload: `uniform`, `trace decode` or `trace prefill`; empty where there is none.
        rows, topk, dcp: T, K and the number of DCP ranks; 0 where they play no part.
        valid: share of entries that are not -1.
        dtype: of the index tensors.
        low, high: quartiles of repeated measurements.
        note: what else should be known.
    """

    metric: str
    value: float
    operation: str
    provider: str
    workload: str = ""
    rows: int = 0
    topk: int = 0
    dcp: int = 0
    valid: float = 0.0
    dtype: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """The same without what it lacks."""
        return {
            name: value for name, value in asdict(self).items() if value not in ("", None, 0.0)
        } | {"value": self.value}


def head(kind: str, device: torch.device) -> dict[str, Any]:
    """Where and with what was measured; `kind` is `bench` or another programme's name."""
    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "source_hash": source_hash(),
        "device": device_facts(device),
        "versions": installed.versions(),
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """Type, model and driver of the device, and the host's processor and threads."""
    facts: dict[str, Any] = {
        "type": device.type,
        "host": _processor(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "driver": installed.nvidia_driver(),
            "built_for": torch.version.hip or torch.version.cuda,
        }
    return facts


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """The measurements of a record."""
    names = {field.name for field in fields(Row)}
    return [
        Row(**{name: value for name, value in row.items() if name in names})
        for row in record["rows"]
    ]


def as_text(record: Mapping[str, Any]) -> str:
    """A record as JSON, a row a line, so that two of them can be compared by eye."""
    lines = [json.dumps(row, ensure_ascii=False) for row in record["rows"]]
    rest = json.dumps(
        {name: value for name, value in record.items() if name != "rows"},
        indent=1, ensure_ascii=False,
    )  # fmt: skip
    body = ",\n  ".join(lines)
    return f'{rest[:-2]},\n "rows": [\n  {body}\n ]\n}}\n'


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record to a file."""
    path.write_text(as_text(record), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A record that was written.

    Raises:
        RecordError: the file cannot be read, or is no record of this format.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise RecordError(f"{path} has format {record['format']}, and {FORMAT} is read")
        rows_of(record)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path} is no record: {type(error).__name__}: {error}") from error
    return dict(record)


class Table:
    """Rows to be looked up by what was measured, those of several records together."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def find(self, metric: str, **parameters: object) -> Iterator[Row]:
        """The rows of a metric with these parameters."""
        for row in self.rows:
            if row.metric == metric and all(
                getattr(row, name) == value for name, value in parameters.items()
            ):
                yield row

    def value(self, metric: str, **parameters: object) -> float | None:
        """The value of the first such row, or None."""
        row = next(self.find(metric, **parameters), None)
        return None if row is None else row.value


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
