"""Kernels under compute-sanitizer: no access out of bounds, no race, nothing uninitialised.

    PYTHONPATH=. python benchmarks/sanitize.py --json benchmarks/results/sanitizer-h200.json

Each backend runs part of the conformance suite under memcheck, racecheck and initcheck, with
PyTorch's caching allocator off, so that every tensor is an allocation of its own and a step beyond
it is seen. To know that it would be seen, one more run writes beyond its view on purpose: counts
for one row too few. Exits with 1 if a check found something, or did not find what was planted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import mla_index
from mla_index import selector
from mla_index.conformance import cases
from mla_index.conformance.run import versions
from mla_index.conformance.source import source_hash
from mla_index.conformance.target import Target

PROJECT = Path(__file__).resolve().parent.parent
BACKENDS = ("triton", "cupy", "numba")
TOOLS = ("memcheck", "racecheck", "initcheck")
FAMILIES = ("fr0", "fr1", "fr2", "width-", "workspace", "everything", "layout-", "empty-")
"""What is run: the first case of each name, in every mode; see `mla_index.conformance.cases`."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        return child(options.child, options.plant, options.cases)
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on the path", file=sys.stderr)
        return 2
    wanted = [
        (check, backend, plant)
        for backend in options.backend or BACKENDS
        for check, plant in [*((check, False) for check in TOOLS), ("memcheck", True)]
    ]
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = list(pool.map(lambda one: run(tool, *one, options), wanted))
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "source_hash": source_hash(),
        "card": torch.cuda.get_device_name(),
        "versions": versions(),
        "tool": subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
        .stdout.strip()
        .splitlines()[-1],
        "runs": runs,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(r["as_it_should_be"] for r in runs) else 1


def run(
    tool: str, check: str, backend: str, plant: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """One backend under one tool."""
    command = [
        # API errors are the loaders' questions for symbols that a driver lacks, not the kernels'.
        *(tool, "--tool", check, "--print-limit", "5", "--report-api-errors", "no"),
        *(sys.executable, __file__, "--child", backend, "--cases", str(options.cases)),
        *(["--plant"] if plant else []),
    ]
    paths = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = done.stdout + done.stderr
    summary = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", said)
    found = int("".join(summary[-1])) if summary else None
    ran = re.search(r"ran (\d+) cases", said)
    right = found == 0 and ran is not None and done.returncode == 0
    if plant:
        right = bool(found) and re.search(r"Invalid __global__ write", said) is not None
    result = {
        "backend": backend,
        "check": check,
        "planted": plant,
        "cases": int(ran.group(1)) if ran else 0,
        "errors": found,
        "as_it_should_be": right,
    }
    print(result, flush=True)
    if not right:
        print(said[-3000:], flush=True)
    return result


def child(backend: str, plant: bool, most: int) -> int:
    """Run cases, or the planted fault, in this process."""
    device = torch.device("cuda", torch.cuda.current_device())
    if plant:
        write_beyond(backend, device)
        return 0
    target = Target(backend, device)
    seen: dict[str, int] = {}
    jobs = []
    for job in cases.jobs(False):
        family = next((f for f in FAMILIES if job.id.startswith(f)), None)
        # each family has its share, spread over its modes
        if family and not job.id.startswith("fr26") and seen.get(family, 0) < most:
            seen[family] = seen.get(family, 0) + 1
            jobs.append(job)
    for job in jobs:
        job.run(target)
    torch.cuda.synchronize()
    print(f"ran {len(jobs)} cases")
    return 0


def write_beyond(backend: str, device: torch.device) -> None:
    """A launch that believes a caller who gave counts for one row too few."""
    spec = mla_index.RemapSpec(64, 64, compact=True, counts=True, req_id=False)
    tokens = torch.zeros((512, 64), dtype=torch.int32, device=device)
    counts = torch.zeros(511, dtype=torch.int32, device=device)
    launch = selector.choose("remap", spec, device, backend).kernel.launch
    last = 2**31 - 1
    launch(
        None, tokens, tokens, torch.empty_like(tokens), counts, None, None, None, None, None,
        0, 64, 0, last, last, -1,
    )  # fmt: skip
    torch.cuda.synchronize()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", action="append", help="repeat it (triton, cupy, numba)")
    parser.add_argument("--cases", type=int, default=4, help="cases of each family (4)")
    parser.add_argument("--at-once", type=int, default=1, help="runs that go on together (1)")
    parser.add_argument("--json", type=Path, help="file for the record")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--plant", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
