"""One decode step over the requests of a trace: which rows there are, and their queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mla_index.rows import request_row_bounds
from mla_index.simulation.indexer import INDEX_HEADS, index_scores, select_topk
from mla_index.simulation.tokens import HEAD_DIM, ROPE, stream
from mla_index.simulation.trace import Request


@dataclass(frozen=True)
class Workload:
    """A batch of query rows, those of a request adjacent.

    Args:
        requests: of the batch.
        req_id: int32 `[T]`, the request of each row.
        limits: int32 `[T]`; the row sees the tokens of its request below this.
        queries: float32 `[T, H, HEAD_DIM]`.
        index_queries: float32 `[T, INDEX_HEADS, ROPE]`.
        index_weights: float32 `[T, INDEX_HEADS]`.
    """

    requests: tuple[Request, ...]
    req_id: Tensor
    limits: Tensor
    queries: Tensor
    index_queries: Tensor
    index_weights: Tensor

    def rows_by_request(self) -> Iterator[tuple[int, slice]]:
        """Each request with its query rows."""
        bounds = request_row_bounds(self.req_id.cpu()).tolist()
        for start, stop in pairwise(bounds):
            yield int(self.req_id[start]), slice(start, stop)


def make_workload(
    requests: Sequence[Request],
    *,
    heads: int,
    rows_per_request: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Workload:
    """The step after the prompts: each request's last `rows_per_request` tokens ask.

    More than one row a request is what speculative decoding makes: row `j` of `n` sees
    `n - 1 - j` tokens less than the whole prompt, and at least one.
    """
    generator = stream("queries", seed)
    limits = [
        max(request.input_length - missing, 1)
        for request in requests
        for missing in reversed(range(rows_per_request))
    ]
    count = len(limits)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    req_id = torch.arange(len(requests), dtype=torch.int32).repeat_interleave(rows_per_request)
    return Workload(
        tuple(requests),
        req_id.to(device),
        torch.tensor(limits, dtype=torch.int32, device=device),
        normal(count, heads, HEAD_DIM),
        normal(count, INDEX_HEADS, ROPE),
        normal(count, INDEX_HEADS),
    )


def select(workload: Workload, rows: slice, tokens: Tensor, topk: int, seed: int) -> Tensor:
    """The top-k of some rows of one request, int32 `[rows, topk]`; `tokens` are the request's."""
    scores = index_scores(workload.index_queries[rows], workload.index_weights[rows], tokens)
    generator = stream("order", seed, rows.start)
    limits = workload.limits[rows].tolist()
    selected = [
        select_topk(row, limit, topk, generator) for row, limit in zip(scores, limits, strict=True)
    ]
    return torch.stack(selected).to(tokens.device)
