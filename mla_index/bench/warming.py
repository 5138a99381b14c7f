"""Whether anything is compiled after `warmup`, by calls of every shape and alignment."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from mla_index import registry
from mla_index.bench.record import Row
from mla_index.bench.workloads import BLOCK_SIZE
from mla_index.operations import remap
from mla_index.specs import RemapSpec
from mla_index.warming import warmup

WIDTHS = (2048, 2051)
"""An even and an odd K: of one width class, and of different alignment from row to row."""
MOST_ROWS = 300
MOST_REQUESTS = 130
MOST_COLUMNS = 513


def after_warmup(backend: str, device: torch.device, calls: int = 1000) -> Iterator[Row]:
    """For each of two configurations, the kernels that `calls` random calls compiled.

    Nothing for a backend that does not count its kernels.
    """
    count = getattr(registry.load(backend), "compiled_kernels", None)
    if count is None:
        return
    for compact, name in ((False, "remap"), (True, "remap_counts")):
        for width in WIDTHS:
            spec = RemapSpec(BLOCK_SIZE, width, compact=compact, counts=compact)
            warmup("remap", spec, device=device, backend=backend)
        before = count()
        source = random.Random(0)  # noqa: S311 (shapes, not secrets)
        memory = torch.randint(-1, 4096, (MOST_ROWS * (WIDTHS[1] + 8),), device=device).int()
        written = torch.empty_like(memory)
        for number in range(calls):
            _call(source, backend, WIDTHS[number % 2], compact, memory, written)
        yield Row(
            "compiled_after_warmup", count() - before, name, backend, note=f"{calls} random calls"
        )


def _call(
    source: random.Random, backend: str, topk: int, compact: bool, memory: Tensor, written: Tensor
) -> None:
    """One call of random T, R, W, row pitches and alignments."""

    def matrix(of: Tensor, rows: int, columns: int) -> Tensor:
        pitch = columns + source.randrange(4)
        return of.as_strided((rows, columns), (pitch, 1), source.randrange(5))

    rows = source.randint(1, MOST_ROWS)
    table = matrix(memory, source.randint(1, MOST_REQUESTS), source.randint(1, MOST_COLUMNS))
    counts = torch.empty(rows + 4, dtype=torch.int32, device=memory.device)
    remap(
        memory.as_strided((rows,), (source.randint(1, 2),), source.randrange(5)),
        table,
        matrix(memory, rows, topk),
        block_size=BLOCK_SIZE,
        block_stride_rows=BLOCK_SIZE + source.randrange(3),
        compact=compact,
        out=matrix(written, rows, topk),
        counts_out=counts[source.randrange(4) :][:rows] if compact else None,
        backend=backend,
    )
