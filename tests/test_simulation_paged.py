"""Blocks shared by content, and a cache that holds what the tokens are."""

import pytest
import torch

from mla_index.operations import flat_row_view
from mla_index.simulation.paged import (
    NULL_BLOCK,
    WHOLE,
    PagedCache,
    plan_blocks,
    shard_length,
    shard_tokens,
)
from mla_index.simulation.tokens import HEAD_DIM, token_rows
from mla_index.simulation.trace import HASH_BLOCK, Request
from mla_index.specs import Dcp

SHARDS = [WHOLE, Dcp(2, 1), Dcp(4, 3, 64), Dcp(4, 0, 128), Dcp(3, 1, 48), Dcp(2, 0, 600)]


def request(length, *ids):
    assert len(ids) == -(-length // HASH_BLOCK)
    return Request(0, length, 0, ids)


BATCH = (
    request(1200, 1, 2, 3),
    request(1300, 1, 2, 4),  # shares two hash blocks
    request(1200, 1, 2, 3),  # the same prompt again
    request(5, 9),
    request(1024, 2, 1),  # the same content in another order
)


@pytest.mark.parametrize("dcp", SHARDS, ids=str)
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 511, 1200])
def test_a_shard_is_what_the_definition_gives_the_rank(length, dcp):
    owned = [t for t in range(length) if (t // dcp.interleave) % dcp.size == dcp.rank]
    local = [t // (dcp.size * dcp.interleave) * dcp.interleave + t % dcp.interleave for t in owned]
    assert shard_tokens(length, dcp).tolist() == owned
    assert local == list(range(len(owned)))
    assert shard_length(length, dcp) == len(owned)


def test_tokens_are_a_function_of_hash_id_and_offset():
    one, other = token_rows(request(700, 5, 6)), token_rows(request(1030, 8, 5, 6))
    assert one.shape == (700, HEAD_DIM)
    torch.testing.assert_close(other[512:1024], one[:512], rtol=0, atol=0)
    torch.testing.assert_close(other[1024:], one[512:518], rtol=0, atol=0)
    assert not torch.equal(one[:188], one[512:])
    assert not torch.equal(token_rows(request(5, 5), seed=1), one[:5])


def test_only_full_blocks_of_equal_content_are_shared():
    plan = plan_blocks(BATCH, block_size=64)
    tables = plan.tables
    assert tables[0][:16] == tables[1][:16]
    assert not set(tables[0][16:]) & set(tables[1][16:])
    # 1200 = 18 full blocks and a partial one, which stays its own although its content is equal.
    assert tables[2][:18] == tables[0][:18]
    assert tables[2][18] != tables[0][18]
    assert tables[4] == tables[0][8:16] + tables[0][:8]
    assert plan.saved == 16 + 18 + 16
    assert plan.num_blocks == 1 + plan.entries - plan.saved
    assert NULL_BLOCK not in {block for table in tables for block in table}


def test_context_parallelism_makes_shared_blocks_longer():
    # A block of one of 16 ranks spans 1,024 tokens; these agree over 512, then over 1,024.
    pair = (request(1536, 1, 2, 3), request(1536, 1, 4, 5))
    assert plan_blocks(pair, block_size=64).saved == 8
    assert plan_blocks(pair, block_size=64, dcp=Dcp(16, 0)).saved == 0
    pair = (request(1536, 1, 2, 3), request(1536, 1, 2, 5))
    assert plan_blocks(pair, block_size=64, dcp=Dcp(16, 0)).saved == 1


def test_blocks_are_scattered():
    table = plan_blocks([request(6144, *range(12))], block_size=64).tables[0]
    assert sorted(table) == list(range(1, 97))
    assert list(table) != sorted(table)


@pytest.mark.parametrize("block_size", [64, 48])
@pytest.mark.parametrize("dcp", SHARDS, ids=str)
def test_the_cache_holds_every_token_where_the_table_says(dcp, block_size):
    plan = plan_blocks(BATCH, block_size=block_size, dcp=dcp)
    cache = PagedCache(plan)
    for number, one in enumerate(BATCH):
        cache.write(number, token_rows(one))
    rows, stride = flat_row_view(cache.kv, block_size)
    assert stride == 2 * block_size
    table = plan.block_table()
    assert table.dtype == torch.int32
    for number, one in enumerate(BATCH):
        wanted = token_rows(one)[shard_tokens(one.input_length, dcp)]
        local = torch.arange(len(wanted))
        slots = table[number][local // block_size].long() * stride + local % block_size
        torch.testing.assert_close(rows[slots], wanted, rtol=0, atol=0)
        assert (table[number][-(-len(wanted) // block_size) :] == -1).all()


def test_wrong_addresses_read_nan():
    plan = plan_blocks(BATCH, block_size=64)
    cache = PagedCache(plan)
    for number, one in enumerate(BATCH):
        cache.write(number, token_rows(one))
    rows = flat_row_view(cache.kv, 64).rows
    assert rows[:64].isnan().all()  # the null block, with the dummy slot
    partial = plan.tables[0][18] * 128 + 1200 % 64
    assert rows[partial].isnan().all()  # behind the last token
    for block in plan.tables[0][:17]:
        assert rows[block * 128 - 1].isnan().all()  # the other layer's page before
        if block < plan.num_blocks - 1:
            assert rows[block * 128 + 64].isnan().all()  # and behind
