"""The indexer of sparse attention: scores every token of a request cheaply, keeps the best K."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_index.simulation.tokens import LATENT, ROPE

INDEX_HEADS = 4


def index_scores(queries: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """`sum over heads of weight * relu(query · key)`; the key is the rotary part of a cache row.

    Args:
        queries: `[T, INDEX_HEADS, ROPE]`.
        weights: `[T, INDEX_HEADS]`.
        rows: `[L, HEAD_DIM]`, the tokens of one request.

    Returns:
        Scores `[T, L]`.
    """
    keys = rows[:, LATENT : LATENT + ROPE]
    similarity = torch.relu(queries.flatten(0, 1) @ keys.T).view(*weights.shape, len(rows))
    return torch.einsum("th,thl->tl", weights, similarity)


def select_topk(scores: Tensor, limit: int, topk: int, generator: torch.Generator) -> Tensor:
    """The tokens below `limit` with the best scores, int32 `[topk]`, in no order.

    A request with fewer than `topk` tokens gets all of them, then -1.
    """
    best = scores[:limit].topk(min(topk, limit), sorted=False).indices.cpu()
    best = best[torch.randperm(len(best), generator=generator)]  # kernels promise no order
    return torch.nn.functional.pad(best, (0, topk - len(best)), value=-1).to(torch.int32)
