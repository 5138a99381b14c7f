"""Who is timed at what: the operations on a backend, and what a user would compare them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_index.bench.workloads import BLOCK_SIZE, Inputs, measured_rank
from mla_index.operations import dcp_filter, flat_row_view, remap, safe_lengths
from mla_index.specs import Dcp

Call = Callable[[], object]

COPY = "copy"
"""`out.copy_(token_indices)`: the least that must move."""
COMPOSITION = "composition"
"""The provider of what a user would write in plain torch."""
NAMES = "auto by vLLM's names"
"""The provider of the operations called by vLLM's names, in the comparison with vLLM."""
ALLOCATED = ", outputs allocated"
"""Ends the name of a provider whose calls are given no outputs, in the comparison with vLLM."""

CACHE_SHAPE = (1024, BLOCK_SIZE, 576)
"""Of the cache of which `flat_row_view` makes a view."""


@dataclass(frozen=True)
class Operation:
    """An operation as it is timed.

    Args:
        name: what `--op` takes and records hold.
        compact: valid slots first, and counted.
        lengths: with safe lengths, in the same launch.
        inputs: which of `request_rows`, `token_limits` and `workspace` it is given.
        ranked: one rank's share: timed for each number of DCP ranks ...
        most_ranks: ... or for the largest alone.
        on_device: there is time on the device; otherwise on the host alone.
    """

    name: str
    compact: bool = True
    lengths: bool = False
    inputs: tuple[str, ...] = ()
    ranked: bool = False
    most_ranks: bool = False
    on_device: bool = True

    def ranks(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of DCP ranks that it is timed for."""
        if self.most_ranks:
            return (max(asked, default=1),)
        return asked if self.ranked else (1,)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("remap", compact=False),
        Operation("remap_counts"),
        Operation("remap_safe_lengths", lengths=True),
        Operation("dcp_filter", ranked=True),
        Operation("workspace", inputs=("workspace",)),
        Operation("request_rows", inputs=("request_rows",)),
        Operation("token_limits", inputs=("token_limits",)),
        Operation(
            "everything",
            lengths=True,
            inputs=("request_rows", "token_limits", "workspace"),
            most_ranks=True,
        ),
        Operation("safe_lengths", compact=False),
        Operation("flat_row_view", compact=False, on_device=False),
    )
}

COMPOSED = ("remap", "remap_counts", "dcp_filter")
"""Operations that are also timed as a plain composition."""


def bind(
    operation: Operation, provider: str, inputs: Inputs, dcp: int = 1, *, allocate: bool = False
) -> Call:
    """The call of an operation on one set of inputs, by a backend or `COMPOSITION`.

    Args:
        operation: which.
        provider: whose.
        inputs: with the outputs, all of which the call is given ...
        dcp: the number of ranks.
        allocate: ... or none, so that it allocates them; not for `COMPOSITION`.
    """
    batch = inputs.batch
    if operation.name == "safe_lengths":
        out = None if allocate else inputs.lengths
        return partial(safe_lengths, inputs.out, inputs.given_counts, out=out, backend=provider)
    if operation.name == "flat_row_view":
        device = inputs.tokens.device
        cache = torch.empty(CACHE_SHAPE, dtype=torch.bfloat16, device=device)
        return partial(flat_row_view, cache, BLOCK_SIZE, backend=provider)
    arguments = (batch.req_id, batch.tables[dcp], inputs.tokens)
    share = Dcp(dcp, measured_rank(dcp)) if dcp > 1 else None
    if provider == COMPOSITION:
        return partial(compose, *arguments, inputs.out, inputs.counts, share, operation.compact)
    keywords: dict[str, Any] = {"block_size": BLOCK_SIZE, "backend": provider}
    keywords |= {name: getattr(batch, name) for name in operation.inputs}
    if operation.compact:
        keywords["compact"] = True
    if allocate:
        keywords |= {"counts": operation.compact, "safe_lengths": operation.lengths}
    else:
        keywords["out"] = inputs.out
        keywords |= {"counts_out": inputs.counts} if operation.compact else {}
        keywords |= {"lengths_out": inputs.lengths} if operation.lengths else {}
    if operation.name == "dcp_filter" and share is not None:
        return partial(dcp_filter, *arguments, share, **keywords)
    return partial(remap, *arguments, dcp=share, **keywords)


def bind_copy(inputs: Inputs) -> Call:
    """The copy of the selection to the slots."""
    return partial(inputs.out.copy_, inputs.tokens)


def compose(
    req_id: Tensor,
    block_table: Tensor,
    tokens: Tensor,
    out: Tensor,
    counts: Tensor,
    dcp: Dcp | None,
    compact: bool,
) -> None:
    """The same as a user would write it: floor-divide, gather and where; a stable sort to compact.

    With `Dcp.interleave` of 1. Right for in-range requests alone, which is all that it is given.
    """
    local, valid = tokens, tokens >= 0
    if dcp is not None:
        valid &= tokens % dcp.size == dcp.rank
        local = tokens // dcp.size
    block = local // BLOCK_SIZE
    valid &= block < block_table.shape[1]
    column = torch.where(valid, block, 0).long()
    entry = torch.gather(block_table[req_id.long()], 1, column)
    valid &= entry >= 0
    slots = torch.where(valid, entry * BLOCK_SIZE + local % BLOCK_SIZE, -1)
    if compact:
        order = valid.int().argsort(dim=1, descending=True, stable=True)
        slots = slots.gather(1, order)
        counts.copy_(valid.sum(1))
    out.copy_(slots)
