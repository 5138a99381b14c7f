"""What a simulation will take, what there is, and the refusal of one that is too large.

The machine would not refuse it: some systems promise memory that they do not have, and end the
process when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from mla_index.simulation.indexer import INDEX_HEADS
from mla_index.simulation.paged import BlockPlan, pool_bytes
from mla_index.simulation.setting import Config, ConfigError
from mla_index.simulation.tokens import HEAD_DIM, LATENT
from mla_index.simulation.trace import HASH_BLOCK, Request

SINGLE, DOUBLE = torch.float32.itemsize, torch.float64.itemsize

ENTRY_BYTES = 60
"""An entry of the selection at the peak: it, the slots twice, and what torch and `diagnose` need.
Measured with the torch backend, whose temporaries are the largest."""

CAUSES = {
    "the cache": ("requests",),
    "the tokens of the longest prompt": (),
    "the indexer's scores": ("rows",),
    "the queries": ("rows", "heads", "requests"),
    "the selection and its slots": ("rows", "topk", "requests"),
    "the results of attention": ("rows", "heads", "dcp", "requests"),
}
"""What memory goes to, and the parameters of `Config` that decide how much, beside the trace."""

ON_HOST = ("the tokens of the longest prompt", "the queries")
"""What is made on the host, wherever it is used."""

MALLOC_FAILED = "can't allocate memory"
"""In the `RuntimeError` of torch's allocator on the CPU, which has no type of its own."""


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, or None where nobody says."""
    if device.type == "cuda":
        there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        return torch.cuda.mem_get_info(device)[0] if there else None
    if device.type != "cpu":
        return None
    known = [count for count in (_machine(), _container()) if count is not None]
    return min(known, default=None)


def _machine() -> int | None:
    """What the system would give: free, or in use for what can be read again from a disk."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None


def _container() -> int | None:
    """What the limit of a container (cgroup v2) leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (
            int((folder / name).read_text(encoding="ascii"))
            for name in ("memory.max", "memory.current")
        )
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        reclaimable = {key: int(count) for key, count in map(str.split, lines)}["inactive_file"]
    except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        return None
    return max(0, limit - used + reclaimable)


def needed(config: Config, requests: Sequence[Request], pool: int) -> dict[str, int]:
    """Bytes by what they are for, each at its largest; not all of these fall together.

    Args:
        config: what is to be simulated.
        requests: of the trace, those that take part.
        pool: bytes of the caches that are alive at a time.
    """
    rows = len(requests) * config.rows
    longest = max(len(request.hash_ids) for request in requests) * HASH_BLOCK
    heads = rows * config.heads
    # Float64 when compared with what unpaged tokens give; the ranks' parts are stacked to merge.
    compared, merged = 6 * DOUBLE + config.dcp * SINGLE, (3 * config.dcp + 4) * SINGLE
    return {
        "the cache": pool,
        "the tokens of the longest prompt": longest * HEAD_DIM * SINGLE,
        # By index head before and behind the relu, then their sum; twice while they are moved.
        "the indexer's scores": config.rows * longest * (2 * INDEX_HEADS + 1) * SINGLE,
        "the queries": heads * HEAD_DIM * (SINGLE + DOUBLE),
        "the selection and its slots": rows * config.topk * ENTRY_BYTES,
        "the results of attention": heads * LATENT * max(compared, merged),
    }


def refuse_too_large(
    config: Config, requests: Sequence[Request], plans: Sequence[BlockPlan], device: torch.device
) -> None:
    """Raise `ConfigError` for what the device, or the host beside it, cannot hold.

    Caches are counted with the other layer's pages: a device really allocates them, and a host that
    gives out huge pages fills them as well.
    """
    parts = needed(config, requests, sum(map(pool_bytes, plans)))
    _refuse(config, len(requests), parts, device)
    if device.type != "cpu":
        on_host = {part: parts[part] for part in ON_HOST}
        _refuse(config, len(requests), on_host, torch.device("cpu"))


def _refuse(config: Config, count: int, parts: Mapping[str, int], device: torch.device) -> None:
    there, total = available(device), sum(parts.values())
    if there is None or total <= there:
        return
    largest = max(parts, key=lambda part: parts[part])
    raise ConfigError(
        f"{_remedy(config, count, largest)}: the run would take about {shown(total)} of memory, "
        f"{shown(parts[largest])} of it for {largest}, and {device} has {shown(there)} free"
    )


def _remedy(config: Config, count: int, part: str) -> str:
    """What to lower for a part: the parameter furthest above its default, of those above 1."""
    defaults = {field.name: field.default for field in fields(config)}
    given = {name: getattr(config, name) for name in CAUSES[part]} | {"requests": count}
    able = [name for name in CAUSES[part] if given[name] > 1]
    if not able:
        return "the trace must have shorter prompts"
    name = max(able, key=lambda name: given[name] / defaults[name])
    return f"{name} must be lower than {given[name]}"


def shown(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    if isinstance(error, RuntimeError) and MALLOC_FAILED in str(error):
        return True
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))
