"""Backends with one planted fault each, and the cases that must catch it.

A fault is the reference with one step replaced, and the tag of the cases that name what is broken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mla_index.specs import DTYPE_MAX
from planted_faults.reference import (
    ReferenceBackend,
    Steps,
    compacted,
    count,
    fit,
    offset_1d,
    offset_2d,
    share,
    store,
)

__all__ = ["FAULTS", "Fault", "ReferenceBackend", "Steps"]


@dataclass(frozen=True)
class Fault:
    """A broken backend. `caught_by`: a tag, or the beginning of a case id, that names the fault."""

    name: str
    caught_by: str
    steps: Steps

    @property
    def backend(self) -> ReferenceBackend:
        return ReferenceBackend(self.name, self.steps)


def _trunc(number: int, by: int) -> int:
    return -(-number // by) if number < 0 else number // by


def _wrap(number: int, bits: int) -> int:
    return (number + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def _wrapped_fit(slot, last, dtype):
    return fit(_wrap(slot, 32 if DTYPE_MAX[dtype] < 2**32 else 64) & (2**63 - 1), last, dtype)


def _narrow_fit(slot, last, dtype):
    return fit(_wrap(slot, 32), max(last, 2**31 - 1), dtype)


def _xor_compacted(slots, pad):
    row, place = [pad] * len(slots), 0
    for slot in slots:
        place ^= slot is not None
        if slot is not None:
            row[place - 1] = slot
    return row


def _swapped(slots, pad):
    row, number = compacted(slots, pad), sum(slot is not None for slot in slots)
    for k in range(0, number - 1, 2):
        row[k], row[k + 1] = row[k + 1], row[k]
    return row


def _reversed(slots, pad):
    number = sum(slot is not None for slot in slots)
    row = compacted(slots, pad)
    return row[:number][::-1] + row[number:]


def _store_past(x, s, t, row):
    store(x, s, t, [*row, s.pad(x)])


def _store_valid_only(x, s, t, row):
    for k, slot in enumerate(row):
        if slot != x.pad:
            x.memory.write(x.out, offset_2d(x.out, t, k), slot)


def _touch(name):
    def after(x):
        if x.a[name] is not x.out and x.a[name] is not None and x.a[name].numel():
            x.memory.write(x.a[name], 0, 0)

    return after


def _touch_after_the_end(x):
    if x.counts is not None:
        x.memory.write(x.counts, x.counts.shape[0] * x.counts.stride(0), 0)


def _dummy_last(row, pad):
    row[-1] = 0


def _dummy_pad(row, pad):
    row[0] = pad


def _power_of_two_share(tok, size, interleave):
    return share(tok, size, 1 << (interleave.bit_length() - 1))


def _count_tokens(x, t, slots):
    return sum(
        x.read("token_indices", offset_2d(x.token_indices, t, k)) >= 0 for k in range(len(slots))
    )


def _count_first_tile(x, t, slots):
    return count(x, t, slots[:32])


def _limit_off_by_one(x, t, tok):
    limits = x.token_limits
    return limits is not None and tok > x.read("token_limits", offset_1d(limits, t))


_FIRST: dict[str, int] = {}


def _remembered_pad(x):
    return _FIRST.setdefault("pad", x.pad)


_STEPS: tuple[tuple[str, str, dict], ...] = (
    # name, the tag or id that must catch it, the steps that are broken
    ("owner-ignores-interleave", "owner", {
        "share": lambda tok, size, inter: (tok % size, share(tok, size, inter)[1])}),
    ("owner-is-always-this-rank", "owner", {"owned": lambda owner, rank: True}),
    ("rank-0-for-all", "owner", {"owned": lambda owner, rank: owner == 0}),
    ("local-not-interleaved", "local", {
        "share": lambda tok, size, inter: (share(tok, size, inter)[0], tok // size)}),
    ("local-is-global", "local", {
        "share": lambda tok, size, inter: (share(tok, size, inter)[0], tok)}),
    ("interleave-rounded-to-a-power-of-two", "fr21", {"share": _power_of_two_share}),
    ("no-sign-test-truncating", "negative-token", {
        "token_ok": lambda tok: True, "divide": _trunc}),
    ("no-sign-test-flooring", "negative-token", {"token_ok": lambda tok: True}),
    ("only-minus-one-is-invalid", "fr03", {"token_ok": lambda tok: tok != -1}),
    ("tokens-cut-to-32-bits", "fr26c-int64-tokens", {"token": lambda tok: _wrap(tok, 32)}),
    ("no-table-width-guard", "table-width", {"block_ok": lambda block, width: True}),
    ("table-width-off-by-one", "table-width", {"block_ok": lambda block, width: block <= width}),
    ("no-row-guard", "row-guard", {"row_ok": lambda r, rows: True}),
    ("no-row-guard-below", "fr02", {"row_ok": lambda r, rows: r < rows}),
    ("no-row-guard-above", "fr09", {"row_ok": lambda r, rows: r >= 0}),
    ("rows-clamped-to-0", "row-guard", {"row_ok": lambda r, rows: r < rows, "table_offset":
        lambda tensor, r, block: offset_2d(tensor, max(r, 0), block)}),
    ("request-rows-unchecked", "request_rows", {"request_ok": lambda r, count: True}),
    ("no-request-id-is-request-0", "no_req_id", {"implied_id": lambda t: 0}),
    ("unallocated-is-valid", "unallocated", {"allocated": lambda b: True,
        "fit": lambda slot, last, dtype: slot if slot <= last else None}),
    ("unallocated-counted", "unallocated", {"count": lambda x, t, slots: sum(
        s is not None for s in slots) + (x.block_table.numel() > 1 and x.block_table[0, 1] == -1)}),
    ("limits-ignored", "token_limits", {"limited": lambda x, t, tok: False}),
    ("limits-off-by-one", "token_limits", {"limited": _limit_off_by_one}),
    ("workspace-ignored", "workspace", {"workspace_id": lambda x, t: -1}),
    ("workspace-only-of-this-rank", "workspace-ranks", {
        "gathers": lambda owner, rank: owner == rank}),
    ("workspace-rank-stride-ignored", "workspace-ranks", {"rank_stride": lambda x: 0}),
    ("workspace-ids-unchecked", "workspace", {"workspace_id_ok": lambda p, starts: True}),
    ("workspace-bound-ignored", "workspace-num-rows", {
        "last_ws_row": lambda x: DTYPE_MAX[x.spec.slot_dtype]}),
    ("workspace-bounded-by-num-slots", "workspace-num-slots", {
        "last_ws_row": lambda x: x.last_slot}),
    ("num-slots-ignored", "num-slots", {"last_slot": lambda x: DTYPE_MAX[x.spec.slot_dtype]}),
    ("num-slots-off-by-one", "num-slots", {"last_slot": lambda x: x.last_slot + 1}),
    ("pad-ignored", "pad", {"pad": lambda x: -1}),
    ("pad-remembered-from-the-first-call", "pad", {"pad": _remembered_pad}),
    ("block-stride-ignored", "block-stride", {"stride": lambda x: x.spec.block_size}),
    ("slot-wraps", "wrap", {"fit": _wrapped_fit}),
    ("slots-cut-to-32-bits", "out-dtype", {"fit": _narrow_fit}),
    ("product-wraps", "fr26c-entry-2-62", {"product": lambda b, stride: _wrap(b * stride, 64)}),
    ("compaction-missing", "compaction", {"compacted":
        lambda slots, pad: [pad if slot is None else slot for slot in slots]}),
    ("order-reversed", "order", {"compacted": _reversed}),
    ("order-swapped", "order", {"compacted": _swapped}),
    ("prefix-sum-of-booleans", "prefix-sum", {"compacted": _xor_compacted}),
    ("tail-not-padded", "compaction", {"store": _store_valid_only}),
    ("counts-before-guards", "counts", {"count": _count_tokens}),
    ("counts-of-the-first-tile", "tile", {"count": _count_first_tile}),
    ("counts-made-safe", "safe", {"stored_count": lambda n, safe: max(n, 1) if safe else n}),
    ("lengths-raw", "empty-row", {"length": lambda n: n}),
    ("dummy-slot-in-the-last-column", "empty-row", {"dummy": _dummy_last}),
    ("dummy-slot-is-pad", "empty-row", {"dummy": _dummy_pad}),
    ("writes-past-the-row", "strides", {"store": _store_past}),
    ("writes-past-the-counts", "counts", {"after": _touch_after_the_end}),
    ("changes-token-indices", "negative-token", {"after": _touch("token_indices")}),
    ("changes-block-table", "table-width", {"after": _touch("block_table")}),
    ("changes-req-id", "row-guard", {"after": _touch("req_id")}),
    ("token-pitch-ignored", "strides", {"token_offset": lambda tensor, t, k:
        t * tensor.shape[1] + k * tensor.stride(1)}),
    ("token-column-stride-ignored", "strides", {"token_offset": lambda tensor, t, k:
        t * tensor.stride(0) + k}),
    ("table-pitch-ignored", "pitched", {"table_offset": lambda tensor, r, block:
        r * tensor.shape[1] + block * tensor.stride(1)}),
    ("table-column-stride-ignored", "strides", {"table_offset": lambda tensor, r, block:
        r * tensor.stride(0) + block}),
    ("req-id-stride-ignored", "strides", {"id_offset": lambda tensor, t: t}),
    ("out-pitch-ignored", "strides", {"out_offset": lambda tensor, t, k: t * tensor.shape[1] + k}),
    ("counts-stride-ignored", "strides", {"count_offset": lambda tensor, t: t}),
    ("row-offset-in-32-bits", "fr26b", {
        "token_offset": lambda tensor, t, k: _wrap(offset_2d(tensor, t, k), 32)}),
    ("out-offset-in-32-bits", "fr26b", {
        "out_offset": lambda tensor, t, k: _wrap(offset_2d(tensor, t, k), 32)}),
    ("last-column-of-a-tile-missing", "tile", {"column_done": lambda k, topk: k % 32 != 31}),
    ("columns-beyond-the-tiles-missing", "tile", {
        "column_done": lambda k, topk: topk < 32 or k < topk // 32 * 32}),
    ("last-row-of-a-tile-missing", "rows", {"row_done": lambda t, rows: t % 32 != 31}),
    ("rows-beyond-the-tiles-missing", "rows", {"row_done": lambda t, rows: t < 32}),
    ("safe-lengths-only-for-0", "fr16", {"safe_row": lambda n: n == 0}),
    ("safe-lengths-in-the-last-column", "safe-lengths", {"safe_column": lambda topk: topk - 1}),
    ("safe-lengths-change-counts", "safe-lengths", {"safe_count": lambda n: max(n, 1)}),
)  # fmt: skip

FAULTS = tuple(Fault(name, by, replace(Steps(), **steps)) for name, by, steps in _STEPS)
