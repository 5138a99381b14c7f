"""Sparse MLA attention over the flat rows of a cache, and the merge of partial results.

The query attends to cache rows by all `HEAD_DIM` columns, and the value is a row's first `LATENT`
columns, as in multi-head latent attention after the projections are absorbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mla_index.simulation.tokens import HEAD_DIM, LATENT

SCALE = HEAD_DIM**-0.5


class Attended(NamedTuple):
    """A result of attention, or a part of one.

    Args:
        output: `[T, H, LATENT]`.
        lse: `[T, H]`, log of the sum of the exponentiated scores: the weight of the part.
    """

    output: Tensor
    lse: Tensor


def room_for(queries: Tensor) -> Attended:
    """Results of queries `[T, H, HEAD_DIM]`, to be filled row by row.

    Rows that are made one by one, and kept, would each stand among large temporaries that go, and
    leave the host's allocator holes that it cannot use: several times the memory that is needed.
    """
    shape = queries.shape[:2]
    return Attended(queries.new_empty(*shape, LATENT), queries.new_empty(shape))


def attend(queries: Tensor, rows: Tensor) -> Attended:
    """Attention of one token's queries `[H, HEAD_DIM]` to cache rows `[n, HEAD_DIM]`, n at least 1.

    Returns `output [H, LATENT]` and `lse [H]`.
    """
    scores = queries @ rows.T * SCALE
    lse = scores.logsumexp(dim=-1)
    return Attended(torch.exp(scores - lse[:, None]) @ rows[:, :LATENT], lse)


def sparse_attention(queries: Tensor, rows: Tensor, slots: Tensor, lengths: Tensor) -> Attended:
    """Each row's attention to the first `lengths[t]` slots of its row, as a kernel would read them.

    Args:
        queries: `[T, H, HEAD_DIM]`.
        rows: `[num_rows, HEAD_DIM]`, the cache as flat rows.
        slots: `[T, K]`, compacted.
        lengths: `[T]`, at least 1: safe lengths. An empty row reads its dummy slot, and what that
            gives means nothing; see `neutralise`.
    """
    found = room_for(queries)
    for row, (query, length) in enumerate(zip(queries, lengths.tolist(), strict=True)):
        part = attend(query, rows[slots[row, :length].long()])
        found.output[row], found.lse[row] = part
    return found


def neutralise(part: Attended, counts: Tensor) -> Attended:
    """Give rows without a single valid entry no output and no weight.

    By `where`, never by multiplying with 0: the dummy slot may hold NaN, and 0 · NaN is NaN.
    """
    filled = counts[:, None] > 0
    return Attended(
        torch.where(filled[..., None], part.output, 0.0),
        torch.where(filled, part.lse, -torch.inf),
    )


def merge(parts: Sequence[Attended]) -> Attended:
    """The attention over all parts' entries: their outputs, weighted by `exp(lse)`.

    A row that is empty in every part comes out as 0 with `lse` of minus infinity.
    """
    lses = torch.stack([part.lse for part in parts])
    total = lses.logsumexp(dim=0)
    weights = torch.exp(lses - torch.where(total.isneginf(), 0.0, total))
    outputs = torch.stack([part.output for part in parts])
    return Attended((weights[..., None] * outputs).sum(dim=0), total)
