"""A backend as a stranger would write it: one module, plain loops, only the registry of ours.

It is installed as a package of its own by `test_plugins.py`, and registered by other tests.
"""

from __future__ import annotations

import torch

from mla_index.registry import CONTRACT_VERSION, Kernel, Limits

name = "stranger"
contract_version = CONTRACT_VERSION
limits = Limits(operations=("remap", "safe_lengths"), devices=("cpu", "privateuseone"))


def unavailable(device, *, probe):
    return None


def unsupported(op, spec):
    return None


def build(op, spec, device):
    if op == "safe_lengths":
        return Kernel(safe_lengths)

    def launch(
        req_id, block_table, token_indices, out, counts, lengths, request_rows, token_limits,
        ws_request_ids, ws_starts, rank, block_stride_rows, rank_stride, last_slot, last_ws_row,
        pad,
    ):  # fmt: skip
        num_rows, num_columns = block_table.shape

        def table_row(t):
            r = t if req_id is None else int(req_id[t])
            if request_rows is not None:
                if not 0 <= r < len(request_rows):
                    return None
                r = int(request_rows[r])
            return r if 0 <= r < num_rows else None

        def slot_of(t, token):
            if token < 0 or (token_limits is not None and token >= int(token_limits[t])):
                return None
            group, rest = divmod(token, spec.dcp_interleave)
            turn, owner = divmod(group, spec.dcp_size)
            local = turn * spec.dcp_interleave + rest
            block, offset = divmod(local, spec.block_size)
            if block >= num_columns:
                return None
            if ws_request_ids is not None and (p := int(ws_request_ids[t])) >= 0:
                if p >= len(ws_starts):
                    return None
                slot = owner * rank_stride + int(ws_starts[p]) + local
                return slot if 0 <= slot <= last_ws_row else None
            r = table_row(t)
            if owner != rank or r is None:
                return None
            entry = int(block_table[r, block])
            slot = entry * block_stride_rows + offset
            return slot if entry >= 0 and slot <= last_slot else None

        for t, row in enumerate(token_indices.tolist()):
            slots = [slot_of(t, token) for token in row]
            valid = [slot for slot in slots if slot is not None]
            if spec.compact:
                slots = valid + [None] * (len(slots) - len(valid))
            filled = [pad if slot is None else slot for slot in slots]
            if lengths is not None:
                lengths[t] = max(len(valid), 1)
                filled[0] = filled[0] if valid else 0
            if counts is not None:
                counts[t] = len(valid)
            out[t] = torch.tensor(filled, dtype=out.dtype)

    return Kernel(launch)


def safe_lengths(slots, counts, lengths):
    for t, count in enumerate(counts.tolist()):
        lengths[t] = max(count, 1)
        if count <= 0:
            slots[t, 0] = 0
