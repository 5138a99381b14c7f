"""Why entries of a selection are invalid: for people, not for the hot path."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from mla_index.backends.torch import kernels
from mla_index.operations import remap
from mla_index.specs import Dcp, PrefillWorkspace, RemapSpec

EXAMPLES = 5
"""Entries shown for each reason."""


class Reason(Enum):
    """The first step of the definition that makes an entry invalid, in the order of the steps."""

    PADDING = "padding"
    BEYOND_LIMIT = "beyond the row's limit"
    BEYOND_TABLE = "block beyond the table"
    BAD_WORKSPACE_ID = "bad workspace id"
    OTHER_RANK = "other rank's"
    BAD_REQUEST_ROW = "bad request row"
    NOT_ALLOCATED = "block not allocated"
    OUT_OF_BOUNDS = "slot out of bounds"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `diagnose` found. Prints as a small table.

    Args:
        valid: number of valid entries.
        counts: number of invalid entries by reason, every reason present; with `valid` they sum
            to `T * K`.
        examples: the first few `(row, column, token)` by reason.
    """

    valid: int
    counts: dict[Reason, int]
    examples: dict[Reason, tuple[tuple[int, int, int], ...]]

    def __str__(self) -> str:
        total = self.valid + sum(self.counts.values())
        lines = [f"{self.valid} of {total} entries are valid"]
        for reason, count in self.counts.items():
            if count:
                shown = ", ".join(f"[{r}, {c}]={token}" for r, c, token in self.examples[reason])
                more = ", …" if count > len(self.examples[reason]) else ""
                lines.append(f"  {reason.value:<24} {count:>12}  {shown}{more}")
        return "\n".join(lines)


def diagnose(
    req_id: Tensor | None,
    block_table: Tensor,
    token_indices: Tensor,
    *,
    block_size: int,
    block_stride_rows: int | None = None,
    request_rows: Tensor | None = None,
    token_limits: Tensor | None = None,
    workspace: PrefillWorkspace | None = None,
    dcp: Dcp | None = None,
    num_slots: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Diagnosis:
    """Say for each entry of a selection why `remap` would not take it.

    Runs on torch whatever backend is set, and waits for the device.

    Args, raises: as `remap`, whose inputs these are.
    """
    slots = remap(
        req_id,
        block_table,
        token_indices,
        block_size=block_size,
        block_stride_rows=block_stride_rows,
        request_rows=request_rows,
        token_limits=token_limits,
        workspace=workspace,
        dcp=dcp,
        num_slots=num_slots,
        out_dtype=out_dtype,
        backend="torch",
    ).slots
    size, interleave = (1, 1) if dcp is None else (dcp.size, dcp.interleave)
    spec = RemapSpec(
        block_size,
        token_indices.shape[1],
        token_dtype=token_indices.dtype,
        dcp_size=size,
        dcp_interleave=interleave,
    )
    owner, local = kernels.share(token_indices, spec)
    block = kernels.floor_divide(local, spec.block_size)
    row, row_exists = kernels.table_rows(req_id, block_table, request_rows, token_indices.shape[0])
    no = torch.zeros_like(row_exists)
    gathered = no if workspace is None else workspace.request_ids >= 0
    known = no if workspace is None else workspace.request_ids < workspace.starts.shape[0]
    allocated = torch.ones_like(slots, dtype=torch.bool)
    if 0 not in block_table.shape:
        within = (block >= 0) & (block < block_table.shape[1])
        allocated = block_table[row.long()[:, None], block.masked_fill(~within, 0)] >= 0

    paged = ~gathered[:, None]
    steps = {
        Reason.PADDING: token_indices < 0,
        Reason.BEYOND_LIMIT: no[:, None]
        if token_limits is None
        else token_indices >= token_limits[:, None],
        Reason.BEYOND_TABLE: block >= block_table.shape[1],
        Reason.BAD_WORKSPACE_ID: (gathered & ~known)[:, None],
        Reason.OTHER_RANK: no[:, None]
        if owner is None or dcp is None
        else paged & (owner != dcp.rank),
        Reason.BAD_REQUEST_ROW: paged & ~row_exists[:, None],
        Reason.NOT_ALLOCATED: paged & ~allocated,
    }
    left = slots < 0  # pad is -1, and no slot is negative
    valid = left.numel() - int(left.sum())
    counts, examples = {}, {}
    for reason in Reason:
        # Whatever none of the earlier steps explains is the last one.
        here = left & steps[reason] if reason in steps else left
        left = left & ~here
        counts[reason] = int(here.sum())
        examples[reason] = tuple(
            (r, c, int(token_indices[r, c])) for r, c in _first_positions(here)
        )
    return Diagnosis(valid, counts, examples)


def _first_positions(mask: Tensor) -> list[tuple[int, int]]:
    positions = mask.flatten().nonzero()[:EXAMPLES, 0].tolist()
    return [divmod(int(position), mask.shape[1]) for position in positions]
