"""Attention in parts equals attention at once; nothing leaks out of empty rows."""

import torch

from mla_index.simulation.attention import SCALE, attend, merge, neutralise, sparse_attention
from mla_index.simulation.indexer import INDEX_HEADS, index_scores, select_topk
from mla_index.simulation.tokens import HEAD_DIM, LATENT, ROPE

HEADS = 3


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_attend_is_softmax_of_scaled_products_over_the_latent_part():
    query, rows = normal(HEADS, HEAD_DIM), normal(9, HEAD_DIM, seed=1)
    output, lse = attend(query, rows)
    weights = (query @ rows.T / HEAD_DIM**0.5).softmax(dim=-1)
    torch.testing.assert_close(output, weights @ rows[:, :LATENT])
    torch.testing.assert_close(lse, (query @ rows.T * SCALE).exp().sum(dim=-1).log())


def test_only_the_first_slots_are_read():
    queries, rows = normal(2, HEADS, HEAD_DIM), normal(6, HEAD_DIM, seed=1)
    rows[5] = torch.nan
    slots = torch.tensor([[3, 1, 5], [2, 5, 5]], dtype=torch.int32)
    output, lse = sparse_attention(queries, rows, slots, torch.tensor([2, 1]))
    wanted = attend(queries[0], rows[[3, 1]])
    torch.testing.assert_close(output[0], wanted.output)
    torch.testing.assert_close(lse[0], wanted.lse)
    torch.testing.assert_close(output[1], rows[2, :LATENT].expand(HEADS, LATENT))


def test_parts_merge_to_the_whole_and_empty_ones_weigh_nothing():
    queries, rows = normal(2, HEADS, HEAD_DIM), normal(8, HEAD_DIM, seed=1)
    rows[0] = torch.nan  # what the dummy slot reads
    slots = torch.tensor([[3, 1, 7, 2], [4, 5, -1, -1]])
    whole = sparse_attention(queries, rows, slots, torch.tensor([4, 2]))
    parts = []
    for share, counts in (
        ([[3, 1], [0, -1]], [2, 0]),
        ([[7, -1], [4, 5]], [1, 2]),
        ([[2, -1], [0, -1]], [1, 0]),
    ):
        counts = torch.tensor(counts)
        part = sparse_attention(queries, rows, torch.tensor(share), counts.clamp_min(1))
        parts.append(neutralise(part, counts))
    merged = merge(parts)
    torch.testing.assert_close(merged.output, whole.output)
    torch.testing.assert_close(merged.lse, whole.lse)


def test_a_row_that_is_empty_everywhere_is_zero():
    queries, rows = normal(1, HEADS, HEAD_DIM), torch.full((1, HEAD_DIM), torch.nan).double()
    none = torch.tensor([0])
    part = sparse_attention(queries, rows, torch.tensor([[0, -1]]), torch.tensor([1]))
    assert part.output.isnan().all()
    merged = merge([neutralise(part, none)] * 2)
    assert (merged.output == 0).all()
    assert (merged.lse == -torch.inf).all()


def test_index_scores_by_hand():
    queries, weights = normal(2, INDEX_HEADS, ROPE), normal(2, INDEX_HEADS, seed=1)
    rows = normal(5, HEAD_DIM, seed=2)
    scores = index_scores(queries, weights, rows)
    wanted = sum(
        weights[1, head] * max(float(queries[1, head] @ rows[3, LATENT:]), 0.0)
        for head in range(INDEX_HEADS)
    )
    assert scores.shape == (2, 5)
    torch.testing.assert_close(scores[1, 3], wanted)


def test_select_topk_keeps_the_best_below_the_limit_and_pads():
    generator = torch.Generator().manual_seed(0)
    scores = torch.arange(100.0)
    best = select_topk(scores, 80, 20, generator)
    assert best.dtype == torch.int32
    assert sorted(best.tolist()) == list(range(60, 80))
    assert best.tolist() != sorted(best.tolist(), reverse=True)
    short = select_topk(scores, 3, 5, generator)
    assert sorted(short[:3].tolist()) == [0, 1, 2]
    assert short[3:].tolist() == [-1, -1]
