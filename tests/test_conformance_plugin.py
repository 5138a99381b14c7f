"""The suite as strangers run it: a pytest of their own, its exit status, its table, its record."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROJECT
from planted_faults import ReferenceBackend

import mla_index
from mla_index.conformance import run

PLANT = """
import mla_index
from mla_index.conformance.run import EMULATION
from planted_faults import FAULTS, ReferenceBackend
EMULATION["order-swapped"] = {"PLANTED": "1"}
mla_index.register(ReferenceBackend("reference"))
for fault in FAULTS:
    if fault.name in ("counts-before-guards", "owner-ignores-interleave", "order-swapped"):
        mla_index.register(fault.backend)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Run pytest on the suite in a folder of its own; planted backends are there by name."""
    (tmp_path / "plant.py").write_text(PLANT)
    paths = [str(tmp_path), str(PROJECT), str(PROJECT / "tests")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def suite(*arguments, target=("--pyargs", "mla_index.conformance"), plant=True, **environment):
        planted = ["-p", "plant"] if plant else []
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *("-p", "mla_index_pytest", *planted, *target, *arguments),
            ],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return suite


def line(output, backend, op):
    """The numbers of one line of the table: ran, failed, skipped."""
    for text in output.splitlines():
        words = text.split()
        if words[:2] == [backend, op]:
            return [int(word) for word in words[2:5]]
    raise AssertionError(f"no line for {backend} {op} in:\n{output}")


def test_a_right_and_a_broken_backend(suite, tmp_path):
    record = tmp_path / "record.json"
    done = suite(
        *("--mla-backend", "reference,counts-before-guards", "--mla-backend", "torch"),
        *("-k", "fr05 or fr15", "--mla-json", str(record)),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert line(done.stdout, "reference", "remap") == [8, 0, 0]
    ran, failed, skipped = line(done.stdout, "counts-before-guards", "remap")
    assert (ran, skipped) == (8, 0)
    assert 0 < failed < ran
    assert line(done.stdout, "torch", "safe_lengths") == [4, 0, 0]
    assert (
        "fr05-unallocated-block:counts on counts-before-guards: counts_out[0] is 2, must be 1"
        in (done.stdout)
    )
    results = json.loads(record.read_text())["results"]
    broken = next(r for r in results if r["backend"] == "counts-before-guards" and r["failed"])
    assert broken["operation"] == "remap"
    assert any("fr05-unallocated-block:counts" in test for test in broken["failures"])
    assert "the first failure again: python -m pytest " in done.stdout
    assert "During handling" not in done.stdout


def test_a_fault_on_the_whole_suite(suite):
    done = suite("--mla-backend", "owner-ignores-interleave", "-x", "--mla-examples", "1")
    assert done.returncode == 1
    assert "fr14-empty-rank" in done.stdout


def test_nothing_ran_is_a_failure(suite):
    done = suite("--mla-backend", "cupy", "-k", "fr01", plant=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert line(done.stdout, "cupy", "remap") == [0, 0, 8]
    assert "    8 × cupy: device type cpu is not served" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "FAILED: no conformance test ran" in done.stdout


def test_a_required_backend_that_did_not_run_is_a_failure(suite):
    done = suite("--mla-backend", "torch", "--mla-require", "cupy", "-k", "fr01", plant=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert line(done.stdout, "torch", "remap") == [8, 0, 0]
    assert "FAILED: required backend cupy did not run remap" in done.stdout


def test_an_unknown_backend_is_a_usage_error(suite):
    done = suite("--mla-backend", "tritno", plant=False)
    assert done.returncode == 4
    assert "no backend is named 'tritno'" in done.stdout + done.stderr


def test_without_options_all_that_can_run_do(suite):
    done = suite("-k", "fr01 and plain")
    ran = {words.split()[0] for words in done.stdout.splitlines() if " remap " in words}
    assert {"torch", "reference", "order-swapped"} <= ran
    assert "cupy" not in ran


def test_a_test_named_by_its_address_that_no_backend_has_a_part_in(suite):
    address = "mla_index.conformance.test_any::test_diagnose[fr01-table-view]"
    done = suite(target=("--pyargs", address), plant=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert line(done.stdout, "(any)", "diagnose") == [1, 0, 0]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no/such/folder.json", "must be a file in a folder that is there"),
        (".", "must be a file in a folder that is there"),
    ],
)
def test_a_record_that_cannot_be_written_is_refused(suite, path, told):
    done = suite("--mla-backend", "torch", "-k", "fr01", "--mla-json", path, plant=False)
    assert done.returncode == 4
    assert f"--mla-json {path}: {told}" in done.stdout + done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_record_that_was_not_written_is_a_failure(suite):
    done = suite("--mla-backend", "torch", "-k", "fr01", "--mla-json", "/dev/full", plant=False)
    assert done.returncode == 1
    assert "FAILED: --mla-json /dev/full: No space left on device; it was not" in done.stdout


def test_a_device_that_is_not_there_is_a_reason_not_a_traceback(suite):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    arguments = ("--mla-backend", "torch", "--mla-device", "cuda", "-k", "fr01")
    done = suite(*arguments, plant=False)
    assert done.returncode == 1
    assert "8 × torch: torch" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_variables_instead_of_options(suite):
    done = suite("-k", "fr01", plant=False, MLA_CONFORMANCE_BACKEND="torch")
    assert done.returncode == 0, done.stdout + done.stderr
    assert line(done.stdout, "torch", "remap") == [8, 0, 0]


def test_other_peoples_pytest_imports_nothing(suite, tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_other():\n    assert not {'torch', 'mla_index'} & set(sys.modules)\n"
    )
    done = suite(target=("test_other.py",), plant=False)
    assert done.returncode == 0, done.stdout
    assert "mla_index conformance" not in done.stdout


def test_evidence_of_several_processes(suite, tmp_path):
    for backend in ("reference", "order-swapped"):
        mla_index.register(ReferenceBackend(backend))
    path = tmp_path / "evidence.json"
    record = run.run_suite(
        ["torch", "order-swapped", "cupy"],
        json_path=path,
        pytest_args=["-p", "plant", "-k", "fr10 and compact"],
    )
    assert json.loads(path.read_text()) == record
    assert record["passed"] is False
    assert {name: b["status"] for name, b in record["backends"].items()} == {
        "torch": "passed",
        "order-swapped": "failed",
        "cupy": "did not run",
    }
    assert record["versions"]["torch"]
    assert record["source_hash"]
    reasons = record["backends"]["cupy"]["results"][0]["skip_reasons"]
    assert any("cpu is not served" in reason for reason in reasons)


def test_a_failure_is_named_and_repeated_from_any_folder(suite, monkeypatch, tmp_path):
    """By an address and a command that outlive the run's own folder."""
    mla_index.register(ReferenceBackend("order-swapped"))
    monkeypatch.setitem(run.EMULATION, "order-swapped", {"PLANTED": "1"})
    arguments = ["-p", "plant", "-k", "fr10-inner-padding and compact"]
    record = run.run_suite(["order-swapped"], pytest_args=arguments)
    results = record["backends"]["order-swapped"]["results"]
    failures = next(line["failures"] for line in results if line["operation"] == "remap")
    case = "fr10-inner-padding:compact"
    assert f"mla_index.conformance.test_cases::test_case[order-swapped-{case}]" in failures
    for test, failure in failures.items():
        assert failure["message"].startswith(case)
        assert failure["message"].count(" on order-swapped: ") == 1
        assert failure["rerun"] == (
            f"PLANTED=1 python -m pytest -p mla_index_pytest -p plant --pyargs '{test}' "
            "--mla-device cpu --mla-backend order-swapped --mla-scale small"
        )

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    test, failure = next(iter(failures.items()))
    variable, _, *words = shlex.split(failure["rerun"])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=elsewhere,
        env={**os.environ, **dict([variable.split("=")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed in" in done.stdout
    assert failure["message"] in done.stdout
    assert f"--pyargs '{test}'" in done.stdout


def test_what_pytest_prints_can_go_elsewhere(suite, tmp_path):
    with (tmp_path / "printed").open("w+") as printed:
        run.run_suite(["torch"], pytest_args=["-k", "fr01 and plain"], output=printed.fileno())
        printed.seek(0)
        assert "mla_index conformance on cpu" in printed.read()


def test_a_process_that_dies_is_a_failure(suite, tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    record = run.run_suite(["torch"], pytest_args=["-p", "dies"])
    assert record["passed"] is False
    assert record["backends"]["torch"]["problems"] == [
        "the run ended without a report: exit status 3"
    ]


def test_the_suite_names_only_known_backends():
    with pytest.raises(mla_index.UnknownBackend, match="tritno"):
        run.run_suite(["tritno"])


def test_the_message_of_a_failure_is_its_error():
    """Not the end of a long traceback, which begins anywhere."""
    try:
        raise RuntimeError("value cannot be converted")
    except RuntimeError as error:
        shown = pytest.ExceptionInfo.from_exception(error).getrepr()
    plugin = importlib.import_module("mla_index.conformance.plugin")
    assert plugin._message(shown) == "RuntimeError: value cannot be converted"
    assert plugin._message("told without an error") == "told without an error"
