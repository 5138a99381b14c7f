"""vLLM's functions and ours on random inputs: equal, in order where vLLM's are ordered.

Inputs are of the kinds that vLLM's call sites pass: slices of larger buffers, block tables with a
row pitch, garbage beyond the table. What is deliberately different stays out: every table entry
is allocated, every request has a row, and no slot leaves int32.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CANARY = -77
CHUNK = 2**24
"""Entries that are sorted at once."""


class Unequal(Exception):
    """vLLM and we disagree; the message says about what."""


def ordered(topk: int, compact: bool) -> bool:
    """Whether vLLM 0.33.0 gives the slots of a row in order: it does unless several programs race.

    One program takes a whole row of a power of two, or of up to 4,096 columns.
    """
    return not compact or topk <= 4096 or topk & (topk - 1) == 0


def check_equal(theirs: Tensor, ours: Tensor, what: str, *, in_order: bool = True) -> None:
    """Refuse tensors that differ; without `in_order`, rows that are not the same multiset.

    Raises:
        Unequal: with the number of values that differ.
    """
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        raise Unequal(
            f"{what}: {theirs.dtype} {tuple(theirs.shape)} and {ours.dtype} {tuple(ours.shape)}"
        )
    step = len(theirs) if in_order else max(1, CHUNK // max(1, theirs.shape[1]))
    for start in range(0, len(theirs), max(1, step)):
        one, other = theirs[start : start + step], ours[start : start + step]
        if not in_order:
            one, other = one.sort(dim=1).values, other.sort(dim=1).values
        differing = int((one != other).sum())
        if differing:
            raise Unequal(f"{what}: {differing} of {one.numel()} values differ")


# --- configurations ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """What is fixed for a call: vLLM compiles a kernel for nearly every one.

    Args:
        mode: the function, and what it is given.
        topk, block_size, block_stride_rows, counts, compact, size, rank, interleave: of the call.
    """

    mode: str
    topk: int
    block_size: int
    block_stride_rows: int | None
    counts: bool
    compact: bool
    size: int
    rank: int
    interleave: int


MODES = ("convert", "mapping", "workspace", "gathered", "filter", "one rank", "lengths", "view")
"""Convert as it is, with `idx_mapping`, with a workspace, with one gathered from all ranks; the
filter, on one rank too; safe lengths after a filter; a cache's view and request bounds."""


def configurations(
    number: int, widths: tuple[int, ...], draw: random.Random
) -> list[Configuration]:
    """So many configurations, the modes in turn."""
    return [_configuration(MODES[i % len(MODES)], widths, draw) for i in range(number)]


def _configuration(mode: str, widths: tuple[int, ...], draw: random.Random) -> Configuration:
    block_size = draw.choice((16, 32, 64, 128))
    stride = draw.choice((None, block_size, 3 * block_size, block_size + 8))
    size = draw.choice((2, 4, 8)) if mode in ("gathered", "filter", "lengths") else 1
    lengths = mode == "lengths"
    return Configuration(
        mode, draw.choice(widths), block_size, stride,
        lengths or draw.random() < 0.7, lengths or draw.random() < 0.7,
        size, draw.randrange(size), draw.choice((1, 4, block_size)),
    )  # fmt: skip


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """Random tensors for a configuration, as slices of what is larger.

    Args:
        given: the configuration.
        rows: the most rows.
        draw: of sizes and layouts.
        device: where the tensors are.
    """

    def __init__(
        self, given: Configuration, rows: int, draw: random.Random, device: torch.device
    ) -> None:
        self.draw, self.device = draw, device
        self.rows = draw.randint(1, rows)
        requests, width = draw.randint(1, 7), draw.randint(1, 40)
        self.req_id = self._vector(0, requests)
        pitch = width + draw.choice((0, 3))
        blocks = torch.randint(0, 5000, (requests, pitch), dtype=torch.int32)
        self.block_table = blocks.to(device)[:, :width]
        self.tokens = self._tokens(given, width)
        self.mapping = torch.randperm(requests).to(device, torch.int32)
        self.workspace_ids = self._vector(-1, 3, extra=draw.choice((0, 5)))
        self.starts = torch.randint(0, 10**6, (3,), dtype=torch.int32).to(device)
        self.rank_stride = draw.choice((None, 0, 4096))

    def _vector(self, low: int, high: int, extra: int = 0) -> Tensor:
        start = self.draw.choice((0, 1, 4))
        size = (start + self.rows + extra,)
        return torch.randint(low, high, size, dtype=torch.int32).to(self.device)[start:]

    def _tokens(self, given: Configuration, width: int) -> Tensor:
        """A slice of rows, or of columns too, of a buffer; some tokens beyond the table."""
        last = width * given.block_size * given.size
        wide = given.topk + self.draw.choice((0, 0, 64))
        buffer = torch.randint(-last // 5, last + last // 5, (self.rows + 3, wide))
        buffer[torch.rand(buffer.shape) < 0.05] = 2**31 - 1
        buffer[torch.rand(buffer.shape) < 0.1] = -1
        for row in range(0, self.rows, 4):  # a short context: a prefix, and padding behind
            buffer[row, self.draw.randrange(wide) :] = -1
        return buffer.to(self.device, torch.int32)[: self.rows, : given.topk]

    def outputs(self, given: Configuration) -> tuple[Tensor, Tensor]:
        """Buffers larger than the outputs, filled."""
        rows = self.rows + 2
        out = torch.full((rows, given.topk), CANARY, dtype=torch.int32, device=self.device)
        return out, torch.full((rows,), CANARY, dtype=torch.int32, device=self.device)


# --- calls ---------------------------------------------------------------------------------------


def results(functions: ModuleType, given: Configuration, inputs: Inputs, place: bool) -> list[Any]:
    """What a call of one module's functions returns and leaves behind."""
    tensors = (inputs.req_id[: inputs.rows], inputs.block_table, inputs.tokens)
    common: dict[str, Any] = {
        "BLOCK_SIZE": given.block_size,
        "BLOCK_STRIDE_ROWS": given.block_stride_rows,
        "NUM_TOPK_TOKENS": given.topk,
        "return_valid_counts": given.counts,
    }
    if given.mode in ("filter", "one rank", "lengths"):
        found = functions.triton_filter_and_convert_dcp_index(
            *tensors, given.size, given.rank, given.interleave,
            compact_valid_to_front=given.compact, **common,
        )  # fmt: skip
        if given.mode != "lengths":
            return list(found) if given.counts else [found]
        slots, counts = found
        return [slots, counts, functions.prepare_sparse_mla_safe_lengths(slots, counts)]
    if given.mode == "mapping":
        common["idx_mapping"] = inputs.mapping
    if given.mode in ("workspace", "gathered"):
        common |= {
            "HAS_PREFILL_WORKSPACE": True,
            "prefill_workspace_request_ids": inputs.workspace_ids,
            "prefill_workspace_starts": inputs.starts,
        }
    if given.mode == "gathered":
        common |= {
            "prefill_workspace_rank_stride": inputs.rank_stride,
            "dcp_size": given.size,
            "dcp_rank": given.rank,
            "cp_kv_cache_interleave_size": given.interleave,
        }
    out, counts = inputs.outputs(given)
    if place:
        common |= {"out": out[: inputs.rows], "valid_counts_out": counts[: inputs.rows]}
    found = functions.triton_convert_req_index_to_global_index(*tensors, **common)
    return [*(found if given.counts else (found,)), out, counts]


def _compare(
    theirs: ModuleType, ours: ModuleType, given: Configuration, inputs: Inputs, place: bool
) -> None:
    one, other = (results(functions, given, inputs, place) for functions in (theirs, ours))
    compact = given.compact if given.mode in ("filter", "lengths") else given.counts
    in_order = ordered(given.topk, compact or given.mode == "lengths")
    if len(one) != len(other):
        raise Unequal(f"{len(one)} and {len(other)} results")
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        check_equal(a, b, f"result {index}", in_order=in_order or a.dim() == 1)


def _compare_views(
    theirs: ModuleType, ours: ModuleType, given: Configuration, draw: random.Random
) -> None:
    """A cache with other layers' pages between its blocks, and bounds of requests."""
    pages = draw.choice((1, 3))
    pool = torch.arange(4 * pages * given.block_size * 8).view(4, pages, given.block_size, 8)
    cache = pool[:, draw.randrange(pages)]
    one, other = (f.flat_kv_row_view(cache, given.block_size) for f in (theirs, ours))
    if one[1] != other[1] or one[0].data_ptr() != other[0].data_ptr():
        raise Unequal(f"block_stride_rows {one[1]} and {other[1]}")
    check_equal(one[0], other[0], "rows")
    runs = draw.sample(range(100), draw.randint(1, 9))
    ids = torch.tensor([r for r in runs for _ in range(draw.randint(1, 4))]).numpy()
    bounds = [f.request_row_bounds(ids) for f in (theirs, ours)]
    if bounds[0].dtype != bounds[1].dtype or (bounds[0] != bounds[1]).any():
        raise Unequal(f"bounds {bounds[0]} and {bounds[1]}")


def run(
    theirs: ModuleType,
    ours: ModuleType,
    *,
    number: int,
    kinds: int,
    widths: tuple[int, ...],
    rows: int,
    device: torch.device,
    seed: int,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Compare on `number` random inputs of `kinds` configurations; what was compared, as data.

    Each failure is kept in `unequal`, with its configuration. Of `share = (part, number)` only a
    part's configurations are compared; an input is the same whoever compares it.
    """
    chosen = configurations(kinds, widths, random.Random(seed))  # noqa: S311 - inputs of a test
    done: Counter[str] = Counter()
    unequal = []
    for index, given in _in_turn(chosen, number, *share):
        draw = random.Random(f"{seed}, input {index}")  # noqa: S311
        torch.manual_seed(draw.getrandbits(63))
        try:
            if given.mode == "view":
                _compare_views(theirs, ours, given, draw)
            else:
                inputs = Inputs(given, rows, draw, device)
                _compare(theirs, ours, given, inputs, place=draw.random() < 0.5)
        except Unequal as error:
            unequal.append(f"input {index}, {given}: {error}")
        done[given.mode] += 1
    return {
        "inputs": number,
        "configurations": len(set(chosen)),
        "seed": seed,
        "widths": list(widths),
        "by_mode": dict(done),
        "unequal": unequal,
    }


def _in_turn(
    chosen: list[Configuration], number: int, part: int, parts: int
) -> Iterator[tuple[int, Configuration]]:
    """The inputs of a part: whole configurations, and as many of each mode as of another."""
    for index in range(number):
        kind = index % len(chosen)
        if kind // len(MODES) % parts == part:
            yield index, chosen[kind]
