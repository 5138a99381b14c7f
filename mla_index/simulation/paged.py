"""A paged MLA cache: blocks shared by content, scattered in memory, other layers' pages between.

`plan_blocks` decides who gets which block, `PagedCache` holds the rows. Both know decode context
parallelism: the cache of one rank holds that rank's tokens, packed, and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_index.simulation.tokens import HEAD_DIM
from mla_index.simulation.trace import HASH_BLOCK, Request
from mla_index.specs import Dcp

WHOLE = Dcp(size=1, rank=0)
"""No decode context parallelism: one rank has every token."""

NULL_BLOCK = 0
"""No request gets this block. Slot 0, the dummy of empty rows, lies in it, and holds NaN."""

PAGES = 2
"""Pages from one block to the next: another layer's, then this layer's."""


def shard_tokens(length: int, dcp: Dcp) -> Tensor:
    """The tokens of a request of `length` that live on `dcp.rank`: entry `l` is local token `l`."""
    tokens = torch.arange(length)
    return tokens[(tokens // dcp.interleave) % dcp.size == dcp.rank]


def shard_length(length: int, dcp: Dcp) -> int:
    """How many tokens of a request of `length` live on `dcp.rank`."""
    cycle = dcp.size * dcp.interleave
    rest = length % cycle - dcp.rank * dcp.interleave
    return length // cycle * dcp.interleave + min(max(rest, 0), dcp.interleave)


@dataclass(frozen=True)
class BlockPlan:
    """Which physical block holds which part of which request.

    Args:
        block_size: tokens in a block.
        dcp: whose tokens the blocks hold.
        tables: for each request its block numbers, in the order of its tokens.
        fresh: for each request the columns of its table that no earlier request has filled.
        num_blocks: physical blocks, the null block included.
    """

    block_size: int
    dcp: Dcp
    tables: tuple[tuple[int, ...], ...]
    fresh: tuple[tuple[int, ...], ...]
    num_blocks: int

    @property
    def entries(self) -> int:
        """Blocks that there would be if nothing were shared."""
        return sum(len(table) for table in self.tables)

    @property
    def saved(self) -> int:
        """Blocks that sharing saves."""
        return self.entries - sum(len(columns) for columns in self.fresh)

    def block_table(self, device: torch.device | str = "cpu") -> Tensor:
        """Int32 `[R, W]` for the operations; -1 beyond a request's last block."""
        width = max(len(table) for table in self.tables)
        rows = [[*table, *[-1] * (width - len(table))] for table in self.tables]
        return torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), width)


def plan_blocks(
    requests: Sequence[Request], *, block_size: int, dcp: Dcp = WHOLE, seed: int = 0
) -> BlockPlan:
    """Give every request its blocks; a full block with the content of an earlier one is that one.

    Under `dcp` a block of `block_size` local tokens spans `block_size * size` tokens of the
    request, so two requests must agree over that much to share it.
    """
    logical: dict[object, int] = {}
    tables, fresh = [], []
    for number, request in enumerate(requests):
        table, first = [], []
        length = shard_length(request.input_length, dcp)
        for column in range(-(-length // block_size)):
            full = (column + 1) * block_size <= length
            key: object = (number, column)
            if full:
                key = _content(request, column * block_size, block_size, dcp)
            if key not in logical:
                logical[key] = len(logical)
                first.append(column)
            table.append(logical[key])
        tables.append(table)
        fresh.append(tuple(first))
    # A pool that has served for a while hands out its blocks in no order.
    physical = list(range(NULL_BLOCK + 1, NULL_BLOCK + 1 + len(logical)))
    random.Random(seed).shuffle(physical)  # noqa: S311 (a simulation, not a secret)
    return BlockPlan(
        block_size,
        dcp,
        tuple(tuple(physical[block] for block in table) for table in tables),
        tuple(fresh),
        NULL_BLOCK + 1 + len(logical),
    )


def _content(request: Request, start: int, count: int, dcp: Dcp) -> object:
    """A key that two runs of `count` local tokens share only if they hold the same rows."""
    first, last = (_global_token(local, dcp) for local in (start, start + count - 1))
    ids = request.hash_ids[first // HASH_BLOCK : last // HASH_BLOCK + 1]
    return first % HASH_BLOCK, start % dcp.interleave, ids


def _global_token(local: int, dcp: Dcp) -> int:
    cycles, offset = divmod(local, dcp.interleave)
    return (cycles * dcp.size + dcp.rank) * dcp.interleave + offset


def pool_bytes(plan: BlockPlan) -> int:
    """Bytes that the pool of a plan's blocks takes, the other layer's pages included."""
    return plan.num_blocks * PAGES * block_bytes(plan)


def block_bytes(plan: BlockPlan) -> int:
    """Bytes of one block of one layer."""
    return plan.block_size * HEAD_DIM * torch.float32.itemsize


class PagedCache:
    """The cache of one rank, as blocks of a pool that it shares with another layer.

    Whatever is not a token of a request is NaN where a wrong address is likely to fall (the null
    block, the rest of a block behind its last token, the edges of the other layer's pages), so that
    reading it shows.

    Args:
        plan: who has which block.
        device: where the pool lives.

    Attributes:
        kv: float32 `[num_blocks, block_size, HEAD_DIM]`, a view with `PAGES * block_size` rows
            from one block to the next.
    """

    def __init__(self, plan: BlockPlan, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        # Not filled: the other layer's pages cost address space, but hardly any memory.
        pool = torch.empty(plan.num_blocks, PAGES, plan.block_size, HEAD_DIM, device=device)
        self.kv = pool[:, PAGES - 1]
        self.kv[NULL_BLOCK] = torch.nan
        pool[:, : PAGES - 1, 0] = torch.nan
        pool[:, : PAGES - 1, -1] = torch.nan

    def write(self, request: int, rows: Tensor) -> None:
        """Fill the blocks that this request is the first to have; `rows` are its own, unpaged."""
        plan = self.plan
        columns = plan.fresh[request]
        if not columns:
            return
        if plan.dcp.size > 1:
            rows = rows[shard_tokens(len(rows), plan.dcp)]
        table = plan.tables[request]
        full, rest = divmod(len(rows), plan.block_size)
        whole = [column for column in columns if column < full]
        if whole:
            blocks = rows[: full * plan.block_size].view(full, plan.block_size, HEAD_DIM)
            if len(whole) < full:
                blocks = blocks[torch.tensor(whole, device=rows.device)]
            places = torch.tensor([table[column] for column in whole], device=rows.device)
            self.kv.index_copy_(0, places, blocks)
        if rest:
            tail = self.kv[table[full]]
            tail[:rest].copy_(rows[full * plan.block_size :])
            tail[rest:] = torch.nan
