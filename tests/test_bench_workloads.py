"""What the benchmark times: batches, selections, and that every provider computes the same."""

import pytest
import torch

from mla_index.bench.contenders import COMPOSED, COMPOSITION, OPERATIONS, bind, bind_copy
from mla_index.bench.plan import Contender
from mla_index.bench.verify import Differs, verify
from mla_index.bench.workloads import (
    CONTEXT,
    decode_batch,
    make_inputs,
    prefill_batch,
    rotated,
    trace_batches,
    uniform_batch,
    why_no_step,
)
from mla_index.simulation.trace import Request, read_trace


@pytest.mark.parametrize("valid", [0.5, 0.9, 1.0])
def test_a_uniform_selection_has_the_asked_share_of_valid_entries(valid):
    inputs = make_inputs(uniform_batch(64, valid=valid), 1024)
    share = (inputs.tokens >= 0).float().mean().item()
    assert share == pytest.approx(valid, abs=0.01)
    assert inputs.tokens.max() < CONTEXT
    assert inputs.tokens[inputs.tokens >= 0].unique().numel() > 10_000  # random, not zeros
    assert 0 < (inputs.given_counts == 0).sum() < 64


def test_the_dtype_is_that_of_every_big_tensor():
    inputs = make_inputs(uniform_batch(3, dcp=(4,), dtype=torch.int64), 16)
    assert inputs.tokens.dtype == inputs.out.dtype == torch.int64
    assert {table.dtype for table in inputs.batch.tables.values()} == {torch.int64}
    assert inputs.batch.tables[4].shape[1] * 4 == inputs.batch.tables[1].shape[1]


def test_a_decode_step_has_rows_for_drafted_tokens():
    requests = read_trace()[:5]
    batch = decode_batch(requests, 2)
    assert batch.req_id.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    length = requests[1].input_length
    assert batch.token_limits[3:6].tolist() == [length - 2, length - 1, length]
    tokens = make_inputs(batch, 512).tokens
    assert bool((tokens < batch.token_limits[:, None]).all())
    short = batch.token_limits < 512
    assert short.any()
    assert not short.all()
    assert ((tokens >= 0).sum(1)[short] == batch.token_limits[short]).all()
    assert (tokens[~short] >= 0).all()


def test_a_prefill_chunk_walks_the_prompts_in_order():
    requests = read_trace()
    first = requests[0].input_length
    batch = prefill_batch(requests, rows=first + 10)
    assert batch.rows == first + 10
    assert batch.token_limits.tolist() == [*range(1, first + 1), *range(1, 11)]
    assert batch.req_id[-10:].unique().tolist() == [1]


def test_requests_of_a_trace_share_blocks():
    table = decode_batch(read_trace(), 0).tables[1]
    used = table[table >= 0]
    assert used.unique().numel() < used.numel()


REQUEST = Request(0.0, 600, 1, (1, 2))


def test_batches_of_a_trace_are_as_large_as_it_allows():
    batches = trace_batches([REQUEST] * 3, (1, 4, 512), 1)
    assert [(b.name, b.rows) for b in batches] == [
        ("trace decode", 2), ("trace decode", 4), ("trace decode", 6), ("trace prefill", 1800),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "rows", "mtp", "why"),
    [
        (200, 256, 1, None),
        (200, 257, 1, "each request has 2 rows, so T = 256 instead"),
        (200, 258, 1, "a decode step takes at most 128 requests of 2 rows, so T = 256 instead"),
        (128, 512, 0, "a decode step takes at most 128 requests of 1 row, so T = 128 instead"),
        (3, 7, 1, "each request has 2 rows, so T = 6 instead"),
        (3, 8, 1, "the trace has 3 requests of 2 rows, so T = 6 instead"),
        (3, 6, 1, None),
        (3, 1, 3, "each request has 4 rows, so T = 4 instead"),
    ],
)
def test_rows_that_no_decode_step_has_have_a_reason(requests, rows, mtp, why):
    assert why_no_step([REQUEST] * requests, rows, mtp) == why
    *steps, _ = trace_batches([REQUEST] * requests, (rows,), mtp)
    taken = rows if why is None else int(why.split("T = ")[1].split()[0])
    assert [step.rows for step in steps] == [taken]


def test_the_share_of_valid_entries_is_that_of_the_selection():
    for batch in (uniform_batch(64, valid=0.5), prefill_batch([REQUEST] * 2)):
        inputs = make_inputs(batch, 512)
        share = (inputs.tokens >= 0).float().mean().item()
        assert inputs.valid == pytest.approx(share, abs=0.01)
    assert make_inputs(uniform_batch(4), 16).valid == 0.9


@pytest.mark.parametrize("source", ["uniform", "trace"])
@pytest.mark.parametrize("name", COMPOSED)
def test_the_composition_computes_the_same(name, source):
    if source == "uniform":
        batch = uniform_batch(33, dcp=(2, 8))
    else:
        batch = decode_batch(read_trace()[:8], 1, dcp=(2, 8))
    (inputs,) = rotated(batch, 133)
    for ranks in OPERATIONS[name].ranks((2, 8)):
        verify(Contender(OPERATIONS[name], COMPOSITION, ranks), inputs)
        bind(OPERATIONS[name], "torch", inputs, ranks)()
        assert (inputs.out >= 0).any()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_every_operation_can_be_called(operation):
    inputs = make_inputs(uniform_batch(9, dcp=(2, 4)), 64).blank()
    for ranks in operation.ranks((2, 4)):
        bind(operation, "auto", inputs, ranks)()
    if operation.name not in ("safe_lengths", "flat_row_view"):
        assert (inputs.out != -7).all()
    if operation.compact:
        assert ((inputs.counts > 0) & (inputs.counts <= 64)).any()
    if operation.lengths or operation.name == "safe_lengths":
        assert (inputs.lengths >= 1).all()


@pytest.mark.parametrize("name", [n for n in OPERATIONS if n != "flat_row_view"])
def test_a_call_that_allocates_returns_what_the_other_writes(name):
    operation, inputs = OPERATIONS[name], make_inputs(uniform_batch(9, dcp=(2,)), 64)
    (ranks,) = operation.ranks((2,))
    inputs.blank()
    given = bind(operation, "torch", inputs, ranks)()
    written = (inputs.out.clone(), inputs.counts.clone(), inputs.lengths.clone())
    inputs.blank()
    made = bind(operation, "torch", inputs, ranks, allocate=True)()
    if name == "safe_lengths":
        assert torch.equal(made, written[2])
        assert given.data_ptr() == inputs.lengths.data_ptr() != made.data_ptr()
        return
    assert (inputs.out == -7).all()
    assert (inputs.counts == inputs.lengths).all()  # both are as they were
    for one, other, right in zip(made, given, written, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, right)


def test_everything_is_measured_for_the_largest_number_of_ranks():
    assert OPERATIONS["everything"].ranks((2, 4)) == (4,)
    assert OPERATIONS["everything"].ranks(()) == (1,)
    assert OPERATIONS["dcp_filter"].ranks((2, 4)) == (2, 4)
    assert OPERATIONS["remap"].ranks((2, 4)) == (1,)


def test_the_copy_copies():
    inputs = make_inputs(uniform_batch(2), 8)
    bind_copy(inputs)()
    assert torch.equal(inputs.out, inputs.tokens)


def test_verify_sees_a_wrong_value(monkeypatch):
    inputs = make_inputs(uniform_batch(20), 64)
    who = Contender(OPERATIONS["remap"], COMPOSITION, 1)
    monkeypatch.setattr("mla_index.bench.verify.CHUNK", 64 * 7)  # in several parts
    verify(who, inputs)

    def lame(*arguments):
        inputs.out.copy_(inputs.tokens)

    monkeypatch.setattr("mla_index.bench.contenders.compose", lame)
    with pytest.raises(Differs, match=r"out is not torch's in \d+ of \d+ values"):
        verify(who, inputs)
