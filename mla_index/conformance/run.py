"""The suite on several backends, each in a process of its own, as one record of evidence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import mla_index
from mla_index import installed, registry
from mla_index.conformance.source import source_hash

EMULATION = {
    # backend: what makes it run on the CPU; read by its library at import, so set per process
    "triton": {"TRITON_INTERPRET": "1"},
    "numba": {"NUMBA_ENABLE_CUDASIM": "1"},
}

_INSTALLED = Path(mla_index.__file__).parent.parent
"""What pytest names the tests relative to: not the folder of the run, which is soon gone."""

_INI = "[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n"


def run_suite(
    names: Sequence[str],
    device: str = "cpu",
    *,
    json_path: str | Path | None = None,
    scale: str | None = None,
    pytest_args: Sequence[str] = (),
    timeout: float | None = None,
    workers: int = 1,
    output: int | None = None,
) -> dict[str, Any]:
    """Run the suite on each backend and gather what happened.

    On the CPU, Triton runs in its interpreter and Numba in its simulator.

    Args:
        names: backends, in the order in which they run.
        device: a torch device.
        json_path: a file for the record.
        scale: `small` or `full`; by default full on a device other than the CPU.
        pytest_args: more arguments for pytest, such as `["-k", "fr05"]`.
        timeout: seconds that one backend may take.
        workers: processes that share the tests of a backend (more than one needs pytest-xdist).
        output: a file descriptor for what pytest prints; by default standard output.

    Returns:
        The record; `passed` says whether every backend ran and passed. Each failure has the name of
        its test, the message, and the command that runs this test again.

    Raises:
        UnknownBackend: a name that no backend has.
    """
    for name in names:
        registry.load(name)
    if workers > 1:
        pytest_args = ["-n", str(workers), "--dist", "loadgroup", *pytest_args]
    place = torch.device(device)
    backends = {name: _run_one(name, place, scale, pytest_args, timeout, output) for name in names}
    record = {
        "mla_index": mla_index.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "source_hash": source_hash(),
        "device": device,
        "card": _card(place),
        "driver": installed.nvidia_driver() if place.type == "cuda" else None,
        "versions": versions(),
        "passed": bool(backends) and all(b["status"] == "passed" for b in backends.values()),
        "backends": backends,
    }
    if json_path is not None:
        Path(json_path).write_text(as_text(record), encoding="utf-8")
    return record


def as_text(record: dict[str, Any]) -> str:
    """A record as JSON."""
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _run_one(
    name: str,
    device: torch.device,
    scale: str | None,
    pytest_args: Sequence[str],
    timeout: float | None,
    output: int | None,
) -> dict[str, Any]:
    """One backend in a process of its own."""
    environment = dict(os.environ)
    if device.type == "cpu":
        environment.update(EMULATION.get(name, {}))
    with tempfile.TemporaryDirectory() as folder:
        ini, report = Path(folder, "pytest.ini"), Path(folder, "report.json")
        ini.write_text(_INI, encoding="utf-8")
        command = [
            *(sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(_INSTALLED)),
            # pytest-benchmark, where it is installed, warns when several processes run
            *("-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "mla_index_pytest", "-q"),
            *("--pyargs", "mla_index.conformance"),
            *("--mla-backend", name, "--mla-device", str(device), "--mla-json", str(report)),
            *(("--mla-scale", scale) if scale else ()),
            *pytest_args,
        ]
        try:
            code = subprocess.run(
                command, env=environment, timeout=timeout, stdout=output, check=False
            ).returncode
            ended = f"exit status {code}"
        except subprocess.TimeoutExpired:
            code, ended = -1, f"did not end within {timeout} s"
        if not report.exists():
            problem = f"the run ended without a report: {ended}"
            return {
                "status": "failed",
                "exit_status": code,
                "problems": [problem],
                "results": [],
            }
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    # `diagnose` runs on torch whichever backend is tested, and says nothing about this one.
    ran = any(
        line["passed"] + line["failed"] for line in found["results"] if line["backend"] == name
    )
    status = "passed" if code == 0 else "failed" if ran else "did not run"
    compiled = found["compiled_kernels"].get(name)
    return {
        "status": status,
        "exit_status": code,
        "emulated_by": EMULATION.get(name, {}) if device.type == "cpu" else {},
        "scale": found["scale"],
        "problems": found["problems"],
        "compiled_kernels": compiled,
        "results": found["results"],
    }


def versions() -> dict[str, str]:
    """What is installed, and what torch says of itself, which is more than its metadata."""
    return installed.versions() | {"cuda": str(torch.version.cuda), "torch": torch.__version__}


def _card(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(device)
