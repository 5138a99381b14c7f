"""On a machine with two NVIDIA GPUs: the suite on the second one, and attention over both.

    PYTHONPATH=. python benchmarks/two_gpus.py benchmarks/results
    PYTHONPATH=. python benchmarks/two_gpus.py out --backend torch -k two_devices

1. The conformance suite on each backend, every tensor on cuda:1 while cuda:0 is current:
   `conformance-NAME-two-gpus.json`. It has the tests of test_two_devices.py in it: 10,000 calls in
   each of two threads, captures, and that nothing comes to be on cuda:0.
2. `examples/dcp_attention.py` with two ranks over NCCL, for each interleave:
   `dcp-attention-two-gpus-interleave-N.json`.

Exits with 1 if anything failed. Suites of several backends may run at once (`--at-once`); at full
scale each takes up to 115 GiB of the card for a while. A case that finds no memory waits up to a
minute for what others hold, and then is skipped with that reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mla_index.conformance.run import run_suite, versions
from mla_index.conformance.source import source_hash

PROJECT = Path(__file__).resolve().parent.parent
EXAMPLE = PROJECT / "examples" / "dcp_attention.py"
BACKENDS = ("triton", "cupy", "numba", "torch")
DEVICE = "cuda:1"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    devices = torch.cuda.device_count()
    if devices < 2:
        print(f"needs two CUDA devices, there is {devices}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    # The processes started here need the package whether or not it is installed.
    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    passed: dict[str, bool] = {}
    if "dcp" not in options.skip:  # first: it is short, and wants both devices for itself
        for interleave in options.interleave or (1, 64):
            passed[f"dcp, interleave {interleave}"] = attention(options.folder, interleave)
    if "suite" not in options.skip:
        names = options.backend or BACKENDS
        with ThreadPoolExecutor(options.at_once) as pool:
            passed |= dict(zip(names, pool.map(partial(suite, options), names), strict=True))
    for what, right in passed.items():
        print(f"{what}: {'passed' if right else 'FAILED'}")
    return 0 if passed and all(passed.values()) else 1


def suite(options: argparse.Namespace, name: str) -> bool:
    """The suite on one backend, in a process of its own; whether it passed."""
    start = time.perf_counter()
    record = run_suite(
        [name],
        DEVICE,
        json_path=options.folder / f"conformance-{name}-two-gpus.json",
        scale=options.scale,
        pytest_args=["-k", options.select] if options.select else [],
        timeout=options.timeout,
        workers=options.workers,
    )
    print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return bool(record["passed"])


def attention(folder: Path, interleave: int) -> bool:
    """The example with two ranks; whether both found the result right."""
    file = folder / f"dcp-attention-two-gpus-interleave-{interleave}.json"
    file.unlink(missing_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"),
            *(str(EXAMPLE), "--device", "cuda", "--requests", "24"),
            *("--interleave", str(interleave), "--json", str(file)),
        ],
        timeout=300,
        check=False,
    )
    if not file.exists():
        return False
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "source_hash": source_hash(),
        "cards": [torch.cuda.get_device_name(i) for i in range(2)],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "versions": versions(),
        "exit_status": done.returncode,
        **report,
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return done.returncode == 0 and report["passed"] and report["rows_empty_on_some_rank"] > 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the records go")
    parser.add_argument("--backend", action="append", help="repeat it (default: all four)")
    parser.add_argument("--interleave", action="append", type=int, help="repeat it (1 and 64)")
    parser.add_argument("--at-once", type=int, default=1, help="suites that run together (1)")
    parser.add_argument("--workers", type=int, default=1, help="processes a suite (1)")
    parser.add_argument("--scale", choices=("small", "full"), help="(full)")
    parser.add_argument("-k", dest="select", help="tests of the suite, as pytest takes it (all)")
    parser.add_argument("--timeout", type=float, help="seconds for the suite of one backend")
    parser.add_argument("--skip", action="append", default=[], choices=("suite", "dcp"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
