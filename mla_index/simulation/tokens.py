"""What a token's row in the cache holds: a function of its hash id and offset alone.

So any part of any request can be made again at any time, and the unpaged tokens of all requests
never have to be in memory together with the cache.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from mla_index.simulation.trace import HASH_BLOCK, Request

LATENT = 512
"""Columns of the compressed key and value; the value is these alone."""
ROPE = 64
"""Columns of the key's rotary part, which follow the latent ones."""
HEAD_DIM = LATENT + ROPE
"""Columns of a cache row."""


def stream(*key: object) -> torch.Generator:
    """Random numbers that `key` determines, and that have nothing to do with another key's."""
    # Hashed, because the generator takes 32 bits of its seed alone.
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def token_rows(request: Request, *, seed: int = 0) -> Tensor:
    """The rows of a request's tokens, float32 `[input_length, HEAD_DIM]`, standard normal."""
    rows = torch.empty(len(request.hash_ids), HASH_BLOCK, HEAD_DIM)
    for block, hash_id in zip(rows, request.hash_ids, strict=True):
        block.normal_(generator=stream("token", seed, hash_id))
    return rows.view(-1, HEAD_DIM)[: request.input_length]
