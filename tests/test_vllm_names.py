"""`mla_index.integrations.vllm`: the calls that vLLM makes, the differences, the refusals."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import PROJECT

import mla_index
from mla_index.conformance import oracle
from mla_index.conformance.oracle import Problem
from mla_index.integrations import vllm
from mla_index.integrations.vllm import (
    flat_kv_row_view,
    prepare_sparse_mla_safe_lengths,
    request_row_bounds,
    triton_convert_req_index_to_global_index,
    triton_filter_and_convert_dcp_index,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = (128, 2176, 4224)
I32 = torch.int32


def int32(*values):
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=I32, device=DEVICE)


# --- what vLLM's call sites have in their hands --------------------------------------------------


@dataclass
class Step:
    """Metadata of a step, as slices of buffers that are larger than it.

    Args:
        topk: `[T, K]`, a slice of rows and columns of the indexer's buffer.
        req_id: `[T + 3]`, of the whole batch.
        table: `[R, W]`, with a row pitch.
        block_size, stride: of the cache.
    """

    topk: torch.Tensor
    req_id: torch.Tensor
    table: torch.Tensor
    block_size: int = 64
    stride: int = 192

    @property
    def rows(self):
        return self.topk.shape[0]

    def problem(self, **changes):
        given = {
            "tokens": self.topk.tolist(),
            "table": self.table.tolist(),
            "req_id": self.req_id[: self.rows].tolist(),
            "block_size": self.block_size,
            "block_stride_rows": self.stride,
        }
        return Problem(**{**given, **changes})


def step(topk, rows=6):
    torch.manual_seed(topk)
    requests, width = 3, 6
    last = width * 64 * 4
    buffer = torch.randint(-40, last, (rows + 4, topk + 64), dtype=I32)
    buffer[0, topk // 2 :] = -1  # a short context
    buffer[1] = -1  # nothing selected
    blocks = torch.randperm(100, dtype=I32)[: requests * (width + 2)].view(requests, width + 2)
    req_id = torch.tensor([0, 0, 1, 2, 2, 1, 0, 1, 2], dtype=I32)
    return Step(buffer.to(DEVICE)[:rows, :topk], req_id.to(DEVICE), blocks.to(DEVICE)[:, :width])


# --- the call sites: what each passes, and what must come of it ----------------------------------
# Each returns (result, problem, compact). Names are those of the table in the documentation.


def flashmla_bf16(s):
    got = triton_convert_req_index_to_global_index(
        s.req_id[: s.rows], s.table, s.topk, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=192,
        NUM_TOPK_TOKENS=s.topk.shape[1], return_valid_counts=True,
    )  # fmt: skip
    return got, s.problem(), True


def flashmla_gathered_prefill(s):
    tokens = slice(1, 5)
    ids = int32([-1, 0, 0, 1, 1, 1, 1, 1, 1])
    got = triton_convert_req_index_to_global_index(
        s.req_id[tokens], s.table, s.topk[tokens], BLOCK_SIZE=64,
        NUM_TOPK_TOKENS=s.topk.shape[1], HAS_PREFILL_WORKSPACE=True,
        prefill_workspace_request_ids=ids[tokens], prefill_workspace_starts=int32([0, 700]),
        prefill_workspace_rank_stride=5000, dcp_size=4, dcp_rank=2,
        cp_kv_cache_interleave_size=16, return_valid_counts=True,
    )  # fmt: skip
    problem = s.problem(
        tokens=s.topk[tokens].tolist(), req_id=s.req_id[tokens].tolist(), block_stride_rows=64,
        ws_ids=ids[tokens].tolist(), ws_starts=[0, 700], rank_stride=5000, dcp=(4, 2, 16),
    )  # fmt: skip
    return got, problem, True


def flashmla_fp8_prefill(s):
    """The workspace's request ids cover the whole batch, the selection only its first rows."""
    ids = int32([-1, -1, 0, 1, 1, 0, 0, 0])
    got = triton_convert_req_index_to_global_index(
        s.req_id[: s.rows], s.table, s.topk, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=None,
        NUM_TOPK_TOKENS=s.topk.shape[1], HAS_PREFILL_WORKSPACE=True,
        prefill_workspace_request_ids=ids, prefill_workspace_starts=int32([11, 900]),
        return_valid_counts=True,
    )  # fmt: skip
    problem = s.problem(block_stride_rows=64, ws_ids=ids[: s.rows].tolist(), ws_starts=[11, 900])
    return got, problem, True


def flashmla_fp8_dcp(s):
    got = triton_filter_and_convert_dcp_index(
        s.req_id[: s.rows], s.table, s.topk, dcp_size=4, dcp_rank=1,
        cp_kv_cache_interleave_size=1, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=192,
        NUM_TOPK_TOKENS=s.topk.shape[1], compact_valid_to_front=False,
    )  # fmt: skip
    return got, s.problem(dcp=(4, 1, 1)), False


def flashmla_fp8(s):
    got = triton_convert_req_index_to_global_index(
        s.req_id[: s.rows], s.table, s.topk, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=192,
        NUM_TOPK_TOKENS=s.topk.shape[1],
    )  # fmt: skip
    return got, s.problem(), False


def index_group_prefill(s):
    """More rows than the group's buffers have, by way of the states of the requests."""
    got = triton_convert_req_index_to_global_index(
        s.req_id[: s.rows], s.table, s.topk, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=192,
        NUM_TOPK_TOKENS=s.topk.shape[1], return_valid_counts=True, idx_mapping=int32([2, 0, 1]),
    )  # fmt: skip
    return got, s.problem(request_rows=[2, 0, 1]), True


def index_group_decode(s):
    """Into the first rows of buffers that all layers of the group share."""
    out = torch.full((s.rows + 3, s.topk.shape[1]), -9, dtype=I32, device=DEVICE)
    counts = torch.full((s.rows + 3,), -9, dtype=I32, device=DEVICE)
    got = triton_convert_req_index_to_global_index(
        s.req_id[: s.rows], s.table, s.topk, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=192,
        NUM_TOPK_TOKENS=s.topk.shape[1], return_valid_counts=True, out=out[: s.rows],
        valid_counts_out=counts[: s.rows], idx_mapping=None,
    )  # fmt: skip
    assert got[0].data_ptr() == out.data_ptr()
    assert got[1].data_ptr() == counts.data_ptr()
    assert (out[s.rows :] == -9).all()
    assert (counts[s.rows :] == -9).all()
    return got, s.problem(), True


def index_group_decode_plain(s):
    out = torch.empty((s.rows, s.topk.shape[1]), dtype=I32, device=DEVICE)
    got = triton_convert_req_index_to_global_index(
        s.req_id[: s.rows], s.table, s.topk, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=None,
        NUM_TOPK_TOKENS=s.topk.shape[1], return_valid_counts=False, out=out,
        valid_counts_out=None, idx_mapping=int32([1, 2, 0]),
    )  # fmt: skip
    assert got is out
    return got, s.problem(block_stride_rows=64, request_rows=[1, 2, 0]), False


def without_stride(s):
    """A staged or padded cache, whose blocks are adjacent."""
    rows = slice(2, s.rows)  # behind the decode rows
    got = triton_convert_req_index_to_global_index(
        s.req_id[rows], s.table, s.topk[rows], BLOCK_SIZE=64, NUM_TOPK_TOKENS=s.topk.shape[1],
        return_valid_counts=True,
    )  # fmt: skip
    problem = s.problem(
        tokens=s.topk[rows].tolist(), req_id=s.req_id[rows].tolist(), block_stride_rows=64
    )
    return got, problem, True


def without_stride_plain(s):
    rows = slice(2, s.rows)
    got = triton_convert_req_index_to_global_index(
        s.req_id[rows], s.table, s.topk[rows], BLOCK_SIZE=64, NUM_TOPK_TOKENS=s.topk.shape[1]
    )
    problem = s.problem(
        tokens=s.topk[rows].tolist(), req_id=s.req_id[rows].tolist(), block_stride_rows=64
    )
    return got, problem, False


def dcp_counted(s):
    got = triton_filter_and_convert_dcp_index(
        s.req_id[: s.rows], s.table, s.topk, dcp_size=4, dcp_rank=3,
        cp_kv_cache_interleave_size=64, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=192,
        NUM_TOPK_TOKENS=s.topk.shape[1], return_valid_counts=True,
    )  # fmt: skip
    return got, s.problem(dcp=(4, 3, 64)), True


CONVERSIONS = {
    site.__name__: site
    for site in (
        flashmla_bf16,
        flashmla_gathered_prefill,
        flashmla_fp8_prefill,
        flashmla_fp8_dcp,
        flashmla_fp8,
        index_group_prefill,
        index_group_decode,
        index_group_decode_plain,
        without_stride,
        without_stride_plain,
        dcp_counted,
    )
}


@pytest.mark.parametrize("topk", WIDTHS)
@pytest.mark.parametrize("site", CONVERSIONS)
def test_conversion(site, topk):
    got, problem, compact = CONVERSIONS[site](step(topk))
    right = oracle.remap(problem, compact=compact)
    slots = got[0] if isinstance(got, tuple) else got
    assert slots.dtype == I32
    assert slots.tolist() == right.slots
    if isinstance(got, tuple):
        assert type(got) is tuple
        assert got[1].dtype == I32
        assert got[1].tolist() == right.counts


PAGES = {
    "whole": ((5, 64, 576), lambda c: c, 64),
    "between_other_layers": ((5, 3, 64, 576), lambda c: c[:, 1], 64),
    "fp8_bytes": ((5, 2, 128, 656), lambda c: c[:, 0], 128),
    "one_block": ((1, 3, 64, 576), lambda c: c[:, 2], 64),
}


@pytest.mark.parametrize("name", PAGES)
def test_view(name):
    shape, layer, block_size = PAGES[name]
    cache = layer(torch.arange(np.prod(shape), dtype=torch.int32).view(shape))
    rows, stride = flat_kv_row_view(cache, block_size)
    assert stride == cache.stride(0) // cache.shape[2]
    assert rows.shape == ((cache.shape[0] - 1) * stride + block_size, cache.shape[2])
    assert rows.data_ptr() == cache.data_ptr()
    for block in range(cache.shape[0]):
        first = block * stride
        assert torch.equal(rows[first : first + block_size], cache[block])


def test_safe_lengths():
    """Of the first rows of a wider buffer: as many as there are counts."""
    slots = int32([[-1, -1], [5, -1], [7, 8], [3, 3]])
    counts = int32([0, 1, 2])
    assert prepare_sparse_mla_safe_lengths(slots, counts).tolist() == [1, 1, 2]
    assert counts.tolist() == [0, 1, 2]
    assert slots.tolist() == [[0, -1], [5, -1], [7, 8], [3, 3]]


def test_request_bounds():
    bounds = request_row_bounds(np.array([3, 3, 5, 5, 5, 2], dtype=np.int32))
    assert bounds.tolist() == [0, 2, 5, 6]
    assert bounds.dtype == np.flatnonzero([1]).dtype


# --- a table of the documentation ----------------------------------------------------------------

PAGE = PROJECT / "docs" / "integrations" / "vllm.md"
SITE = re.compile(
    r"^\| `(\S+?\.py)` (\d+(?:, \d+)*) \| (.*) \| `(test_\w+)(?:\[(\w+)\])?` \|$", re.M
)


def documented_sites():
    """(file, line, test, its parameter) of the table of call sites."""
    return [
        (file, int(line), test, parameter)
        for file, lines, _, test, parameter in SITE.findall(PAGE.read_text())
        for line in lines.split(", ")
    ]


def test_the_table_of_call_sites_names_tests_that_there_are():
    parameters = {"test_conversion": set(CONVERSIONS), "test_view": set(PAGES)}
    named = {(test, parameter) for _, _, test, parameter in documented_sites()}
    assert len(named) > 10
    for test, parameter in named:
        assert callable(globals()[test]), test
        assert not parameter or parameter in parameters[test]
    assert {p for t, p in named if t == "test_conversion"} == set(CONVERSIONS)


# --- signatures ----------------------------------------------------------------------------------

SIGNATURES = {
    "triton_convert_req_index_to_global_index": "req_id, block_table, token_indices, "
    "BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=None, NUM_TOPK_TOKENS=2048, BLOCK_N=128, "
    "HAS_PREFILL_WORKSPACE=False, "
    "prefill_workspace_request_ids=None, prefill_workspace_starts=None, "
    "prefill_workspace_rank_stride=None, dcp_size=1, dcp_rank=0, cp_kv_cache_interleave_size=1, "
    "return_valid_counts=False, out=None, valid_counts_out=None, idx_mapping=None",
    "triton_filter_and_convert_dcp_index": "req_id, block_table, token_indices, "
    "dcp_size, dcp_rank, cp_kv_cache_interleave_size=1, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=None, "
    "NUM_TOPK_TOKENS=2048, BLOCK_N=128, return_valid_counts=False, compact_valid_to_front=True",
    "prepare_sparse_mla_safe_lengths": "physical_indices, valid_counts",
    "flat_kv_row_view": "kv_cache, block_size",
    "request_row_bounds": "req_idx",
}
"""Of vLLM 0.33.0, vllm/v1/attention/backends/mla/sparse_utils.py."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(vllm, name)).parameters.values()
    shown = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    assert shown == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_everything_by_position():
    s = step(128)
    out = torch.empty((6, 128), dtype=I32, device=DEVICE)
    counts = torch.empty(6, dtype=I32, device=DEVICE)
    got = triton_convert_req_index_to_global_index(
        s.req_id[:6], s.table, s.topk, 64, 192, 128, 64, False, None, None, None, 1, 0, 1, True,
        out, counts, int32([0, 1, 2]),
    )  # fmt: skip
    assert got[0] is out
    assert got[1] is counts
    assert out.tolist() == oracle.remap(s.problem(request_rows=[0, 1, 2]), compact=True).slots
    one = triton_filter_and_convert_dcp_index(
        s.req_id[:6], s.table, s.topk, 2, 1, 1, 64, 192, 128, 128, True, False
    )
    right = oracle.remap(s.problem(dcp=(2, 1, 1)))
    assert one[0].tolist() == right.slots
    assert one[1].tolist() == right.counts


# --- what is vLLM's, and easily gets lost ---------------------------------------------------------


def call(tokens, table=((7, 3),), req=None, **keywords):
    """Convert rows of few tokens, padded with -1 to 128 columns; returns the first columns."""
    width = len(tokens[0])
    padded = int32([[*row, *[-1] * (128 - width)] for row in tokens])
    req = int32([0] * len(tokens) if req is None else req)
    got = triton_convert_req_index_to_global_index(
        req, int32(list(map(list, table))), padded, NUM_TOPK_TOKENS=128, **keywords
    )
    if isinstance(got, tuple):
        return got[0][:, :width].tolist(), got[1].tolist()
    return got[:, :width].tolist()


def test_counting_compacts():
    tokens = [[64, -1, 0]]
    assert call(tokens) == [[192, -1, 448]]
    assert call(tokens, return_valid_counts=True) == ([[192, 448, -1]], [2])


def filtered(**keywords):
    tokens = int32([[-1, 1, 0, 3, *[-1] * 124]])
    got = triton_filter_and_convert_dcp_index(
        int32([0]), int32([[10]]), tokens, NUM_TOPK_TOKENS=128, **keywords
    )
    return got[0][0, :4].tolist() if isinstance(got, tuple) else got[0, :4].tolist()


def test_one_rank_compacts_only_when_it_counts():
    assert filtered(dcp_size=1, dcp_rank=0) == [-1, 641, 640, 643]
    assert filtered(dcp_size=1, dcp_rank=0, return_valid_counts=True) == [641, 640, 643, -1]
    assert filtered(dcp_size=2, dcp_rank=1) == [640, 641, -1, -1]
    assert filtered(dcp_size=2, dcp_rank=1, compact_valid_to_front=False) == [-1, 640, -1, 641]


def test_without_counts_a_buffer_for_them_is_not_looked_at():
    buffer = int32([5, 5])
    assert call([[0], [1]], valid_counts_out=buffer) == [[448], [449]]
    assert buffer.tolist() == [5, 5]


def test_without_a_workspace_its_tensors_are_not_looked_at():
    ids, starts = int32([0]), int32([99])
    got = call([[1]], prefill_workspace_request_ids=ids, prefill_workspace_starts=starts)
    assert got == [[449]]


def test_no_rows():
    empty = torch.empty((0, 128), dtype=I32, device=DEVICE)
    slots, counts = triton_convert_req_index_to_global_index(
        int32([]), int32([[1]]), empty, NUM_TOPK_TOKENS=128, return_valid_counts=True
    )
    assert slots.shape == (0, 128)
    assert counts.shape == (0,)


@pytest.mark.parametrize("block_n", [1, 64, 128])
def test_block_n_has_no_other_effect(block_n):
    assert call([[64, -1, 0]], BLOCK_N=block_n) == [[192, -1, 448]]


def test_settings_choose_the_backend():
    with mla_index.use_backend("torch"):
        assert call([[0]]) == [[448]]


def test_an_unknown_backend_is_not_a_bad_argument(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BACKEND", "tritn")
    mla_index.reload_environment()
    with pytest.raises(mla_index.UnknownBackend, match="tritn"):
        call([[0]])


# --- the deliberate differences -------------------------------------------------------------------

COUNTED = {"return_valid_counts": True}


def test_an_unallocated_block_is_invalid():
    assert call([[0, 64]], table=((7, -1),), **COUNTED) == ([[448, -1]], [1])


@pytest.mark.parametrize("row", [-1, 1, 2**31 - 1])
def test_a_request_out_of_range_has_no_slots(row):
    assert call([[0], [0]], req=[row, 0], **COUNTED) == ([[-1], [448]], [0, 1])


@pytest.mark.parametrize("mapping", [-1, 1])
def test_a_mapping_out_of_range_is_not_row_0(mapping):
    got = call([[0], [0]], req=[0, 1], idx_mapping=int32([mapping, 0]), **COUNTED)
    assert got == ([[-1], [448]], [0, 1])


def test_a_request_beyond_the_mapping_has_no_slots():
    assert call([[0]], req=[1], idx_mapping=int32([0]), **COUNTED) == ([[-1]], [0])


def test_a_workspace_is_kept_for_the_layers_of_a_step_and_never_longer():
    """The same tensors again, of which something has changed: contents, memory, rows, stride."""
    ids, starts, stride = int32([0, 0, -1]), int32([50]), int("1000")

    def slots(rows, **changed):
        keywords = {
            "HAS_PREFILL_WORKSPACE": True, "prefill_workspace_request_ids": ids,
            "prefill_workspace_starts": starts, "prefill_workspace_rank_stride": stride, **changed,
        }  # fmt: skip
        return [row[0] for row in call([[3]] * rows, **keywords)]

    ((paged,),) = call([[3]])
    assert slots(2) == slots(2) == [53, 53]
    assert slots(3) == [53, 53, paged]
    starts.fill_(70)
    assert slots(2) == [73, 73]
    ids.set_(int32([-1, 0, 0]))
    assert slots(2) == [paged, 73]
    assert slots(2, dcp_size=2, dcp_rank=0) == [-1, 70 + 1000 + 1]
    assert slots(3, prefill_workspace_rank_stride=0) == [paged, 73, 73]
    for rows in (2, 3):
        kept = vllm._workspace(ids, starts, stride, rows)
        assert vllm._workspace(ids, starts, stride, rows) is kept
        assert vllm._workspace(ids, starts, stride + 1, rows) is not kept
    ids.set_(int32([0, -1, 0]))
    assert slots(3) == [73, paged, 73]
    ids.set_(int32([0, -1, 0, 0]))
    assert slots(3) == [73, paged, 73]
    first, second = (vllm._workspace(ids[:rows], starts, int("1000"), 2) for rows in (2, 3))
    assert second is first  # made anew by the caller, of the same memory
    assert vllm._workspace(ids[1:], starts, stride, 2) is not first
    ids.set_(int32([0, -1]))
    with pytest.raises(AssertionError, match="must cover the same tokens, got 2 and 3 rows"):
        slots(3)
    assert slots(2) == [73, paged]
    with pytest.raises(AssertionError, match="prefill_workspace_rank_stride must be an integer"):
        slots(2, prefill_workspace_rank_stride=True)


def test_a_rank_that_is_a_tensor_counts_as_it_is_now():
    rank = torch.tensor(0)

    def slots():
        tokens = int32([[0, 3] + [-1] * 126])
        found = triton_filter_and_convert_dcp_index(
            int32([0]), int32([[7]]), tokens, 2, rank, NUM_TOPK_TOKENS=128
        )
        return found[0, 0].item()

    assert slots() == 448
    rank.fill_(1)
    assert slots() == 449


class Gathers(torch.nn.Module):
    """A call with a workspace, as a compiler sees it."""

    def forward(self, req_id, table, tokens, ids, starts):
        return triton_convert_req_index_to_global_index(
            req_id, table, tokens, NUM_TOPK_TOKENS=128, return_valid_counts=True,
            HAS_PREFILL_WORKSPACE=True, prefill_workspace_request_ids=ids,
            prefill_workspace_starts=starts, dcp_size=2, dcp_rank=1,
        )  # fmt: skip


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not-strict"])
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_a_workspace_can_be_exported(strict):
    """And nothing that was traced is kept for the eager call after it."""
    tokens = int32(range(256)).view(2, 128)
    arguments = (int32([0, 1]), int32([[5, 6], [8, 9]]), tokens, int32([0, -1]), int32([400]))
    slots, counts = Gathers()(*arguments)
    program = torch.export.export(Gathers(), arguments, strict=strict)
    exported = program.module()(*arguments)
    assert torch.equal(exported[0], slots)
    assert torch.equal(exported[1], counts)
    again = Gathers()(*arguments)
    assert torch.equal(again[0], slots)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_a_share_of_ranks_compiles_whole():
    def share(req_id, table, tokens):
        return triton_filter_and_convert_dcp_index(
            req_id, table, tokens, 2, 1, NUM_TOPK_TOKENS=128, return_valid_counts=True
        )

    arguments = (int32([0, 0]), int32([[5, 6]]), int32(range(256)).view(2, 128))
    compiled = torch.compile(share, fullgraph=True, backend="eager")(*arguments)
    for ours, eager in zip(compiled, share(*arguments), strict=True):
        assert torch.equal(ours, eager)


def test_a_negative_workspace_start_gives_no_negative_slot():
    got = call(
        [[0, 7]], HAS_PREFILL_WORKSPACE=True, prefill_workspace_request_ids=int32([0]),
        prefill_workspace_starts=int32([-5]), **COUNTED,
    )  # fmt: skip
    assert got == ([[2, -1]], [1])


def test_a_slot_that_would_wrap_is_invalid():
    got = call([[0, 64]], table=((550_073, 1),), BLOCK_STRIDE_ROWS=3904, **COUNTED)
    assert got == ([[3904, -1]], [1])


def test_a_negative_count_gets_the_dummy_slot():
    slots = int32([[-1, -1], [-1, -1], [1, 2]])
    assert prepare_sparse_mla_safe_lengths(slots, int32([-1, 0, 3])).tolist() == [1, 1, 3]
    assert slots.tolist() == [[0, -1], [0, -1], [1, 2]]


# --- refusals ------------------------------------------------------------------------------------

REFUSED = {
    "req_id dtype": ({"req_id": "int64"}, "req_id must be torch.int32"),
    "table dtype": ({"block_table": "int64"}, "block_table must be torch.int32"),
    "token dtype": ({"token_indices": "int64"}, "token_indices must be torch.int32"),
    "rows": ({"req_id": "longer"}, "req_id and token_indices must cover the same tokens"),
    "columns": ({"NUM_TOPK_TOKENS": 256}, "NUM_TOPK_TOKENS"),
    "one dimension": ({"token_indices": "flat"}, "NUM_TOPK_TOKENS"),
    "tiles": ({"BLOCK_N": 100}, r"NUM_TOPK_TOKENS \(128\) must be divisible by BLOCK_N \(100\)"),
    "tile": ({"BLOCK_N": 0}, "must be divisible by BLOCK_N"),
    "block size": ({"BLOCK_SIZE": 0}, "BLOCK_SIZE must be"),
    "block stride": ({"BLOCK_STRIDE_ROWS": 8}, "BLOCK_STRIDE_ROWS must be at least BLOCK_SIZE"),
}
CONVERT_REFUSED = {
    "rank": ({"dcp_size": 2, "dcp_rank": 2}, r"dcp_rank must be in \[0, 2\), got 2"),
    "rank of one": ({"dcp_rank": 1}, r"dcp_rank must be in \[0, 1\)"),
    "negative rank": ({"dcp_size": 2, "dcp_rank": -1}, "dcp_rank must be in"),
    "ranks": ({"dcp_size": 0}, "dcp_size must be at least 1"),
    "no workspace": ({"HAS_PREFILL_WORKSPACE": True}, "prefill_workspace_request_ids"),
    "out dtype": ({"out": torch.empty(2, 128, dtype=torch.int64)}, "out must be torch.int32"),
    "out shape": ({"out": torch.empty(3, 128, dtype=I32)}, "out must have exactly the shape"),
    "out pitch": ({"out": torch.empty(2, 256, dtype=I32)[:, :128]}, "contiguous"),
    "counts": (
        {"return_valid_counts": True, "valid_counts_out": torch.empty(4, dtype=I32)[::2]},
        "valid_counts_out must be torch.int32 and contiguous",
    ),
    "mapping": ({"idx_mapping": torch.zeros(4, dtype=I32)[::2]}, "idx_mapping must be"),
    "workspace ids": (
        {
            "HAS_PREFILL_WORKSPACE": True,
            "prefill_workspace_request_ids": torch.zeros(1, dtype=I32),
            "prefill_workspace_starts": torch.zeros(1, dtype=I32),
        },
        "prefill_workspace_request_ids and token_indices must cover the same tokens",
    ),
}  # fmt: skip
FILTER_REFUSED = {
    "rank": ({"dcp_rank": 2}, r"dcp_rank must be in \[0, 2\), got 2"),
    "ranks": ({"dcp_size": 0}, "dcp_size must be at least 1"),
    "interleave": (
        {"cp_kv_cache_interleave_size": 48},
        r"BLOCK_SIZE \(64\) must be divisible by cp_kv_cache_interleave_size \(48\)",
    ),
    "no interleave": ({"cp_kv_cache_interleave_size": 0}, "cp_kv_cache_interleave_size"),
}


def refused(function, changes, message, **keywords):
    tensors = {
        "req_id": torch.zeros(2, dtype=I32),
        "block_table": torch.ones((1, 2), dtype=I32),
        "token_indices": torch.zeros((2, 128), dtype=I32),
    }
    given = {"NUM_TOPK_TOKENS": 128, **keywords, **changes}
    for name, tensor in tensors.items():
        change = given.pop(name, None)
        if change == "int64":
            tensors[name] = tensor.long()
        if change == "flat":
            tensors[name] = tensor[:, 0]
        if change == "longer":
            tensors[name] = torch.zeros(3, dtype=I32)
    with pytest.raises(AssertionError, match=message):
        function(**tensors, **given)


@pytest.mark.parametrize("case", [*REFUSED, *CONVERT_REFUSED])
def test_convert_refuses(case):
    changes, message = {**REFUSED, **CONVERT_REFUSED}[case]
    refused(triton_convert_req_index_to_global_index, changes, message)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [*REFUSED, *FILTER_REFUSED])
def test_filter_refuses(case, size):
    changes, message = {**REFUSED, **FILTER_REFUSED}[case]
    if size == 1 and case == "rank":
        message = r"dcp_rank must be in \[0, 1\)"
    refused(
        triton_filter_and_convert_dcp_index, {"dcp_size": size, "dcp_rank": 0, **changes}, message
    )


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.empty(4, 64, 1024)[..., :512], "rows must be dense"),
        (torch.empty(4 * 64 * 512 + 3 * 100).as_strided((4, 64, 512), (32868, 512, 1)), "whole"),
        (torch.empty(4, 512), "3-D"),
        (torch.empty(4, 32, 512), "block_size must be in"),
    ],
)
def test_view_refuses(cache, message):
    with pytest.raises(AssertionError, match=message):
        flat_kv_row_view(cache, 64)


@pytest.mark.parametrize("ids", [[], [0, 1, 0], [[1]]])
def test_request_bounds_refuse(ids):
    with pytest.raises(AssertionError, match="req_idx"):
        request_row_bounds(np.array(ids, dtype=np.int32))


def test_safe_lengths_refuse():
    slots = torch.zeros((2, 3), dtype=I32)
    with pytest.raises(AssertionError, match="valid_counts and physical_indices must cover"):
        prepare_sparse_mla_safe_lengths(slots, torch.zeros(3, dtype=I32))
    with pytest.raises(AssertionError, match="physical_indices"):
        prepare_sparse_mla_safe_lengths(slots[:1].expand(2, 3), torch.zeros(2, dtype=I32))


def test_refusals_survive_optimisation():
    """`python -O` drops `assert`; these are raised."""
    code = (
        "import torch; from mla_index.integrations.vllm import *\n"
        "z = torch.zeros(2, 128, dtype=torch.int32)\n"
        "try: triton_convert_req_index_to_global_index(z[:, 0], z, z.long())\n"
        "except AssertionError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    assert "token_indices must be torch.int32" in result.stdout, result.stderr


# --- streams and graphs --------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: streams and graphs")
def test_side_stream_in_a_captured_graph():
    """As the index group converts: on a stream of its own, between two events, in a capture."""
    s = step(2176)
    out = torch.empty((6, 2176), dtype=I32, device=DEVICE)
    counts = torch.empty(6, dtype=I32, device=DEVICE)
    side = torch.Stream(device=DEVICE)

    def convert():
        side.wait_stream(torch.cuda.current_stream())
        with side:
            triton_convert_req_index_to_global_index(
                s.req_id[:6], s.table, s.topk, BLOCK_STRIDE_ROWS=192, NUM_TOPK_TOKENS=2176,
                return_valid_counts=True, out=out, valid_counts_out=counts,
            )  # fmt: skip
        torch.cuda.current_stream().wait_stream(side)

    convert()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        convert()
    s.topk.copy_(s.topk.flip(0))
    graph.replay()
    right = oracle.remap(s.problem(), compact=True)
    assert out.tolist() == right.slots
    assert counts.tolist() == right.counts


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: streams and graphs")
@pytest.mark.parametrize("converted", ["between", "captured"])
def test_pieces_of_a_step_captured_apart(converted):
    """As piecewise capture runs a step: graphs of one pool, the conversion between them or one."""
    s = step(2176)
    selected = torch.empty_like(s.topk)
    out = torch.full((9, 2176), 7, dtype=I32, device=DEVICE)
    counts = torch.full((9,), 7, dtype=I32, device=DEVICE)
    total = torch.zeros((), dtype=torch.int64, device=DEVICE)
    pool = torch.cuda.graph_pool_handle()

    def convert():
        triton_convert_req_index_to_global_index(
            s.req_id[:6], s.table, selected, BLOCK_STRIDE_ROWS=192, NUM_TOPK_TOKENS=2176,
            return_valid_counts=True, out=out[:6], valid_counts_out=counts[:6],
        )  # fmt: skip

    def captured(work):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay

    pieces = [
        captured(lambda: selected.copy_(s.topk)),
        captured(convert) if converted == "captured" else convert,
        captured(lambda: total.copy_(counts[:6].sum())),
    ]
    for _ in range(3):
        s.topk.copy_(s.topk.roll(1, 0))
        for piece in pieces:
            piece()
        right = oracle.remap(s.problem(), compact=True)
        assert out[:6].tolist() == right.slots
        assert counts[:6].tolist() == right.counts
        assert total.item() == sum(right.counts)
    assert out[6:].unique().tolist() == counts[6:].unique().tolist() == [7]
