"""How a problem is put to a backend, as data: results asked for, dtypes, layouts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mla_index.conformance.checks import Run
from mla_index.conformance.layouts import Layout

I32, I64 = torch.int32, torch.int64

PLAIN = {"plain": Run()}
MODES: dict[str, Run] = {
    "plain": Run(),
    "counts": Run(counts=True),
    "compact": Run(compact=True, counts=True),
    "safe": Run(compact=True, safe=True),
}
"""What every backend must do with every problem."""

ALL_MODES: dict[str, Run] = {**MODES, "compact-only": Run(compact=True)}

MIXES: dict[str, Mapping[str, torch.dtype]] = {
    "i64-tokens": {"token_indices": I64, "req_id": I64},
    "i64-table": {"block_table": I64, "token_limits": I64},
    "i64-slots": {"out": I64, "request_rows": I64},
    "i64-rows": {"req_id": I64, "ws_request_ids": I64, "ws_starts": I64},
    "i64-in-i32-out": {"token_indices": I64, "block_table": I64, "out": I32, "req_id": I64},
    "i64-all": dict.fromkeys(
        (
            "token_indices",
            "block_table",
            "out",
            "req_id",
            "request_rows",
            "token_limits",
            "ws_request_ids",
            "ws_starts",
        ),
        I64,
    ),
}
"""Dtypes that differ from int32; the cases walk through them."""

BIG_DTYPES: dict[str, Mapping[str, torch.dtype]] = {
    f"{token}-{table}-{out}": {
        "token_indices": {"i32": I32, "i64": I64}[token],
        "block_table": {"i32": I32, "i64": I64}[table],
        "out": {"i32": I32, "i64": I64}[out],
    }
    for token in ("i32", "i64")
    for table in ("i32", "i64")
    for out in ("i32", "i64")
}
"""All combinations of the three dtypes that kernels are compiled for."""

ROW_TENSORS = ("req_id", "request_rows", "token_limits", "ws_request_ids", "ws_starts")

PITCHED = Layout(gap=6)
STEP = Layout(step=2, gap=3)
TRANSPOSED = Layout(transposed=True)
ODD = Layout(offset=1)

LOOKS: dict[str, Mapping[str, Layout]] = {
    "pitched": {"token_indices": PITCHED, "block_table": PITCHED, "out": Layout(gap=5)},
    "step": {
        **dict.fromkeys(("token_indices", "block_table", *ROW_TENSORS), STEP),
        "counts_out": Layout(step=3),
        "lengths_out": Layout(step=2, offset=1),
    },
    "transposed": dict.fromkeys(("token_indices", "block_table"), TRANSPOSED),
    "odd-pointers": {
        **dict.fromkeys(("token_indices", "block_table", *ROW_TENSORS), ODD),
        "out": Layout(offset=3),
        "counts_out": Layout(offset=1),
        "lengths_out": Layout(offset=2),
    },
    "odd-pitch": {
        "token_indices": Layout(offset=2, gap=1),
        "block_table": Layout(offset=1, gap=1),
        "out": Layout(offset=1, gap=3),
    },
}
"""Layouts that every input or output may have."""


def dtypes_that_fit(mix: Mapping[str, torch.dtype], pad: int) -> Mapping[str, torch.dtype]:
    """`mix`, with slots that hold `pad`."""
    return mix if -(2**31) <= pad < 2**31 else {**mix, "out": I64}
