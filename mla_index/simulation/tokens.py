"""What a token's row in the cache holds: a function of its hash id and offset alone.

So any part of any request can be made again at any time, and the unpaged tokens of all requests
never have to be in memory together with the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_index.simulation.trace import HASH_BLOCK, Request

LATENT = 512
"""Columns of the compressed key and value; the value is these alone."""
ROPE = 64
"""Columns of the key's rotary part, which follow the latent ones."""
HEAD_DIM = LATENT + ROPE
"""Columns of a cache row."""

_HASH_IDS = 1 << 40  # below this many, no two pairs of a seed and a hash id meet


def token_rows(request: Request, *, seed: int = 0) -> Tensor:
    """The rows of a request's tokens, float32 `[input_length, HEAD_DIM]`, standard normal."""
    generator = torch.Generator()
    rows = torch.empty(len(request.hash_ids), HASH_BLOCK, HEAD_DIM)
    for block, hash_id in zip(rows, request.hash_ids, strict=True):
        # Odd, so that no query, whose seeds are even, is the image of a token.
        generator.manual_seed((2 * (seed * _HASH_IDS + hash_id) + 1) % 2**63)
        block.normal_(generator=generator)
    return rows.view(-1, HEAD_DIM)[: request.input_length]
