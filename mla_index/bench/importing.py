"""What `import mla_index` costs in a process that has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import mla_index
from mla_index.bench.measure import summary
from mla_index.bench.record import Row

PROCESSES = 5
KERNEL_PACKAGES = ("triton", "cupy", "numba", "numba_cuda")
PROGRAM = f"""
import json, sys, time, torch
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
before = set(sys.modules)
start = time.perf_counter()
import mla_index
seconds = time.perf_counter() - start
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps([seconds * 1e3, sorted(new & set({KERNEL_PACKAGES!r}))]))
"""


def cost(processes: int = PROCESSES) -> Iterator[Row]:
    """Milliseconds of the import, and how many kernel packages it brought along.

    From bytecode, as where it is installed: a process before compiles it to a folder of its own,
    since a checkout may be new, or not to be written to.
    """
    root = str(Path(mla_index.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    times, brought = [], set()
    with TemporaryDirectory() as bytecode:
        for _ in range(1 + processes):
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, bytecode],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True, text=True, check=True, timeout=120,
            )  # fmt: skip
            milliseconds, packages = json.loads(done.stdout.splitlines()[-1])
            times.append(milliseconds)
            brought.update(packages)
    found = summary(times[1:])
    yield Row(
        "import_ms", found.median, "import", "mla_index", low=found.low, high=found.high,
        note=f"median of {processes} processes",
    )  # fmt: skip
    yield Row(
        "imported_kernel_packages", len(brought), "import", "mla_index",
        note=", ".join(sorted(brought)),
    )  # fmt: skip
