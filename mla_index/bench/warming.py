"""Whether anything is compiled after `warmup`, by calls of every shape and alignment."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_index import registry
from mla_index.bench.record import Row
from mla_index.bench.workloads import BLOCK_SIZE
from mla_index.operations import remap
from mla_index.specs import Dcp, PrefillWorkspace, RemapSpec
from mla_index.warming import warmup

WIDTHS = (2048, 2051)
"""An even and an odd K: of two width classes, and of different alignment from row to row."""
MOST_ROWS = 5000
"""T is any up to this, small ones as often as large ones: backends change kernels with T."""
MOST_REQUESTS = 130
MOST_COLUMNS = 513
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "remap": {},
    "remap_counts": {"compact": True, "counts": True},
    "dcp_filter": {"compact": True, "counts": True, "dcp_size": 2},
    "workspace": {"compact": True, "counts": True, "workspace": True},
}
"""By the operation's name in a record, what its spec says besides block size and width."""


def after_warmup(backend: str, device: torch.device, calls: int = 1000) -> Iterator[Row]:
    """For each configuration, the kernels that `calls` random calls compiled.

    Nothing for a backend that does not count its kernels.
    """
    count = getattr(registry.load(backend), "compiled_kernels", None)
    if count is None:
        return
    memory = torch.randint(-1, 4096, (MOST_ROWS * (WIDTHS[1] + 8),), device=device).int()
    written = torch.empty_like(memory)
    for name, asked in CONFIGURATIONS.items():
        specs = [RemapSpec(BLOCK_SIZE, width, **asked) for width in WIDTHS]
        for spec in specs:
            warmup("remap", spec, device=device, backend=backend)
        before = count()
        source = random.Random(0)  # noqa: S311 (shapes, not secrets)
        for number in range(calls):
            which = number % len(WIDTHS)
            _call(source, backend, specs[which], WIDTHS[which], memory, written)
        yield Row(
            "compiled_after_warmup", count() - before, name, backend, dcp=specs[0].dcp_size,
            note=f"{calls} random calls, T up to {MOST_ROWS}",
        )  # fmt: skip


def _call(
    source: random.Random, backend: str, spec: RemapSpec, topk: int, memory: Tensor, written: Tensor
) -> None:
    """One call of random T, R, W, row pitches and alignments."""
    rows = int(2 ** source.uniform(0, math.log2(MOST_ROWS + 1)))

    def matrix(of: Tensor, rows: int, columns: int) -> Tensor:
        pitch = columns + source.randrange(4)
        return of.as_strided((rows, columns), (pitch, 1), source.randrange(5))

    def vector() -> Tensor:
        return memory.as_strided((rows,), (source.randint(1, 2),), source.randrange(5))

    counts = torch.empty(rows + 4, dtype=torch.int32, device=memory.device)
    remap(
        vector(),
        matrix(memory, source.randint(1, MOST_REQUESTS), source.randint(1, MOST_COLUMNS)),
        matrix(memory, rows, topk),
        block_size=BLOCK_SIZE,
        block_stride_rows=BLOCK_SIZE + source.randrange(3),
        workspace=PrefillWorkspace(vector(), memory[:50]) if spec.workspace else None,
        dcp=Dcp(spec.dcp_size, 0) if spec.dcp_size > 1 else None,
        compact=spec.compact,
        out=matrix(written, rows, topk),
        counts_out=counts[source.randrange(4) :][:rows] if spec.counts else None,
        backend=backend,
    )
