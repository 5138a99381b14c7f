"""The same call of vLLM's functions, of ours by vLLM's names, and of the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mla_index.bench.contenders import (
    ALLOCATED,
    CACHE_SHAPE,
    NAMES,
    Call,
    Operation,
    bind,
)
from mla_index.bench.workloads import BLOCK_SIZE, Inputs, measured_rank
from mla_index.integrations import vllm as ours
from mla_index.operations import flat_row_view
from mla_index.rows import request_row_bounds

Results = dict[str, torch.Tensor]
TAKE_OUTPUTS = ("remap", "remap_counts", "workspace", "request_rows")
"""Operations whose function takes outputs under vLLM's names; the others allocate theirs."""


def bind_names(
    functions: ModuleType, operation: Operation, inputs: Inputs, dcp: int, *, allocate: bool = False
) -> Call:
    """The call of an operation by vLLM's names.

    With every output that it can be given, or without any (`allocate`).
    """
    batch = inputs.batch
    if operation.name == "safe_lengths":
        return partial(functions.prepare_sparse_mla_safe_lengths, inputs.out, inputs.given_counts)
    tensors = (batch.req_id, batch.tables[dcp], inputs.tokens)
    keywords: dict[str, Any] = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "NUM_TOPK_TOKENS": inputs.tokens.shape[1],
        "return_valid_counts": operation.compact,
    }
    if operation.name == "dcp_filter":
        return partial(
            functions.triton_filter_and_convert_dcp_index,
            *tensors, dcp, measured_rank(dcp), **keywords,
        )  # fmt: skip
    if not allocate:
        keywords["out"] = inputs.out
        keywords |= {"valid_counts_out": inputs.counts} if operation.compact else {}
    if operation.name == "workspace":
        keywords |= {
            "HAS_PREFILL_WORKSPACE": True,
            "prefill_workspace_request_ids": batch.workspace.request_ids,
            "prefill_workspace_starts": batch.workspace.starts,
        }
    if operation.name == "request_rows":
        keywords["idx_mapping"] = batch.request_rows
    return partial(functions.triton_convert_req_index_to_global_index, *tensors, **keywords)


def results(operation: Operation, inputs: Inputs, call: Call) -> Results:
    """One call's results, wherever it leaves them, in tensors of their own."""
    inputs.blank()
    returned = call()
    if operation.name == "safe_lengths":
        assert isinstance(returned, torch.Tensor)
        return {"slots": inputs.out.clone(), "lengths": returned.clone()}
    slots, counts = (returned if isinstance(returned, tuple) else (returned, None))[:2]
    found = {"slots": slots.clone()}
    return found | ({"counts": counts.clone()} if operation.compact else {})


# --- on the host ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Contenders that do the same and are timed in turn.

    Args:
        operation: what they do, for records.
        dcp: number of ranks.
        rows, topk, valid: of the call, as in a record; 0 where they play no part.
        calls: by provider, one of vLLM's among them.
        results: of one of the calls.
    """

    operation: str
    dcp: int
    rows: int
    topk: int
    valid: float
    calls: dict[str, Call]
    results: Callable[[Call], Results]


def host_group(
    theirs: ModuleType, provider: str, operation: Operation, inputs: Inputs, dcp: int
) -> Group:
    """All ways to call an operation: outputs given where that can be, and outputs allocated.

    Ours choose the backend by `auto`.
    """
    calls: dict[str, Call] = {}
    for allocate in (False, True):
        ending = ALLOCATED if allocate else ""
        named = allocate or operation.name in TAKE_OUTPUTS
        if named:
            calls[provider + ending] = bind_names(theirs, operation, inputs, dcp, allocate=allocate)
        calls["auto" + ending] = bind(operation, "auto", inputs, dcp, allocate=allocate)
        if named:
            calls[NAMES + ending] = bind_names(ours, operation, inputs, dcp, allocate=allocate)
    return group(operation, inputs, dcp, calls)


def group(operation: Operation, inputs: Inputs, dcp: int, calls: dict[str, Call]) -> Group:
    """Contenders that do an operation on the same inputs."""
    rows, topk = inputs.tokens.shape
    found = partial(results, operation, inputs)
    return Group(operation.name, dcp, rows, topk, inputs.batch.valid, calls, found)


def host_alone(theirs: ModuleType, provider: str, device: torch.device) -> Iterator[Group]:
    """The two functions that launch nothing: they make what they return, so outputs are not given.

    A cache of `CACHE_SHAPE`; the request ids of 32 rows of 8 requests.
    """
    cache = torch.empty(CACHE_SHAPE, dtype=torch.bfloat16, device=device)
    ids = np.repeat(np.arange(8), 4)
    calls: dict[str, Call] = {
        provider + ALLOCATED: partial(theirs.flat_kv_row_view, cache, BLOCK_SIZE),
        "auto" + ALLOCATED: partial(flat_row_view, cache, BLOCK_SIZE),
        NAMES + ALLOCATED: partial(ours.flat_kv_row_view, cache, BLOCK_SIZE),
    }
    yield Group("flat_row_view", 1, 0, 0, 0.0, calls, _view)
    calls = {
        provider + ALLOCATED: partial(theirs.request_row_bounds, ids),
        "auto" + ALLOCATED: partial(request_row_bounds, ids),
        NAMES + ALLOCATED: partial(ours.request_row_bounds, ids),
    }
    yield Group("request_row_bounds", 1, len(ids), 0, 0.0, calls, _bounds)


def _view(call: Call) -> Results:
    rows, block_stride_rows = call()  # type: ignore[misc]
    told = (rows.data_ptr(), *rows.shape, *rows.stride(), block_stride_rows)
    return {"address, shape, strides": torch.tensor(told)}


def _bounds(call: Call) -> Results:
    return {"bounds": torch.from_numpy(call())}
