"""`benchmarks/compare_vllm.py` as a command: what it refuses, what it says, how it ends.

Without vLLM: ours stand for its functions. `test_vllm_source.py` has the comparison itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import PROJECT, needed

from mla_index.bench import asked, record
from mla_index.integrations import vllm as ours
from mla_index.integrations import vllm_forms

BENCHMARKS = PROJECT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
compare_vllm = importlib.import_module("compare_vllm")
vllm_arguments = importlib.import_module("vllm_arguments")
vllm_source = importlib.import_module("vllm_source")
vllm_timing = importlib.import_module("vllm_timing")
sys.path.remove(str(BENCHMARKS))

SHAPE = ("--device", "cpu", "--rows", "1", "4", "--topk", "128", "--dcp", "2", "--host-rounds", "1")
EACH_SHAPE = len(vllm_arguments.OPERATION_NAMES)
TIMES = ("--host-calls", "1")


def stand_in(folder, *names):
    """Sources of a vLLM that has these of its functions, and they are ours."""
    file = folder.joinpath(*vllm_source.SPARSE_UTILS.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(f"from mla_index.integrations.vllm import {', '.join(names)}\n")
    (folder / "vllm" / "_version.py").write_text("__version__ = '0.0'\n")
    return folder


def command(*arguments, **environment):
    """Run as people do: Triton's interpreter cannot be turned on in this process alone."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "compare_vllm.py"), *arguments],
        env={**kept, "PYTHONPATH": str(PROJECT), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def in_process(monkeypatch):
    """`main` with ours in the place of vLLM's, and without Triton."""

    @contextmanager
    def functions(_):
        yield SimpleNamespace(**{**vllm_forms.FUNCTIONS, **changed}), "0.0"

    changed = {}
    monkeypatch.setattr(compare_vllm, "their_functions", functions)
    monkeypatch.setattr(vllm_arguments, "usable_backend", lambda _: "torch")
    return changed


# --- what is refused while the arguments are read ------------------------------------------------


@pytest.mark.parametrize("option", ["--rows", "--equality", "--kinds", "--host-rounds"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_numbers_that_are_none_to_run_with(capsys, option, value):
    refused(capsys, f"{option}: must be an integer of at least 1, got {value}", option, value)


@pytest.mark.parametrize(
    ("option", "value", "taken"),
    [
        ("--host-calls", "0", "an integer of at least 1"),
        ("--processes", "0", "an integer of at least 1"),
        ("--dcp", "1", "an integer of at least 2"),
        ("--topk", "0", "a multiple of 128, the columns of vLLM's tile"),
        ("--topk", "-128", "a multiple of 128, the columns of vLLM's tile"),
        ("--host-topk", "100", "a multiple of 128, the columns of vLLM's tile"),
        ("--seconds", "-1", "a number of at least 0"),
        ("--seconds", "nan", "a number of at least 0"),
        ("--seconds", "soon", "a number of at least 0"),
        ("--seed", "-1", "an integer of at least 0 and at most 9223372036854775807"),
        ("--seed", str(2**63), "an integer of at least 0 and at most 9223372036854775807"),
        ("--device", "gpu", "cpu or cuda"),
        ("--device", "meta", "cpu or cuda"),
    ],
)
def test_values_that_are_not_taken(capsys, option, value, taken):
    refused(capsys, f"{option}: must be {taken}, got {value}", option, value)


def test_one_of_several_values_is_enough(capsys):
    told = "--rows: must be an integer of at least 1, got 0"
    refused(capsys, told, "--rows", "4", "0", "8")


def test_a_record_that_could_not_be_written(capsys, monkeypatch, tmp_path):
    file = tmp_path / "none" / "x.json"
    told = f"must be a file in a folder that is there, got {file}: there is no {file.parent}"
    refused(capsys, f"--json: {told}", "--json", str(file))
    refused(capsys, f"--json: must be a file, got the folder '{tmp_path}'", "--json", str(tmp_path))
    # Permissions would not do: they do not bind the superuser.
    monkeypatch.setattr(vllm_arguments.os, "access", lambda *_: False)
    file = tmp_path / "x.json"
    refused(capsys, f"--json: must be a file that can be written, got {file}", "--json", str(file))
    assert list(tmp_path.iterdir()) == []


def refused(capsys, told, *arguments):
    with pytest.raises(SystemExit) as ended:
        compare_vllm.main(list(arguments))
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: argument {told}\n"


def test_values_that_are_taken():
    least = ["--rows", "1", "--topk", "128", "--dcp", "2", "--seconds", "0", "--host-topk"]
    found = vllm_arguments.parse([*least, "--device", "cuda:1"])
    assert (found.rows, found.topk, found.dcp, found.host_topk) == ([1], [128], [2], [])
    assert found.seconds == 0
    assert found.device == torch.device("cuda", 1)
    on_cpu = vllm_arguments.parse(["--device", "cpu"])
    assert (on_cpu.processes, on_cpu.host_topk, on_cpu.json) == (1, (), None)


# --- what is refused before anything runs --------------------------------------------------------


def ended(capsys, *arguments):
    """What `main` says where it cannot begin."""
    assert compare_vllm.main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_cpu_needs_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda _: "there")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    told = ended(capsys, "--device", "cpu", "--backend", "torch")
    assert told == (
        "error: on a CPU vLLM's kernels run in Triton's interpreter alone: set TRITON_INTERPRET=1 "
        "in the environment of this command\n"
    )
    assert "TRITON_INTERPRET=1" in compare_vllm.__doc__


def test_triton_is_needed(capsys, monkeypatch):
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda _: None)
    told = ended(capsys, "--device", "cpu", "--backend", "torch")
    assert told == "error: vLLM's kernels need Triton, and it is not installed\n"


def test_a_vllm_without_a_version(monkeypatch):
    there = SimpleNamespace(__name__="there", **dict.fromkeys(vllm_forms.FUNCTIONS))
    monkeypatch.setattr(compare_vllm, "_module", lambda _: there)

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with (
        pytest.raises(vllm_arguments.CannotBegin, match="vLLM is taken, but it tells no version: "),
        compare_vllm.their_functions(None),
    ):
        pass


def test_an_unknown_backend(capsys):
    told = ended(capsys, "--device", "cpu", "--backend", "tritn")
    assert told.startswith("error: no backend is named 'tritn'; there are ")
    assert told.count("\n") == 1


def test_a_backend_that_cannot_run(capsys):
    told = ended(capsys, "--device", "cpu", "--backend", "cupy")
    assert told.startswith("error: backend cupy cannot run on cpu: cupy: ")
    assert "torch:" not in told


def test_vllm_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(vllm_arguments.CannotBegin) as found, compare_vllm.their_functions(None):
        pass
    assert str(found.value).startswith("without --vllm-src the installed vLLM is taken: ")
    assert str(found.value).endswith("(--vllm-src takes a folder that holds an unpacked vllm/)")


def test_a_folder_without_vllm(tmp_path):
    needed("triton")
    told = (
        f"--vllm-src {tmp_path}: {tmp_path}/vllm/v1/attention/backends/mla/sparse_utils.py is not"
    )
    with pytest.raises(vllm_arguments.CannotBegin) as found, compare_vllm.their_functions(tmp_path):
        pass
    assert str(found.value).startswith(told)


def test_a_vllm_that_lacks_functions(tmp_path):
    needed("triton")
    *others, last = vllm_forms.FUNCTIONS
    folder = stand_in(tmp_path, *others)
    with pytest.raises(vllm_arguments.CannotBegin) as found, compare_vllm.their_functions(folder):
        pass
    assert str(found.value) == f"--vllm-src {folder}: {vllm_source.SPARSE_UTILS} has no {last}"


# --- what is said, and how it ends ---------------------------------------------------------------


def test_on_a_cpu_as_people_run_it(tmp_path):
    needed("triton")
    folder, file = stand_in(tmp_path, *vllm_forms.FUNCTIONS), tmp_path / "record.json"
    asked_for = ("--vllm-src", str(folder), *SHAPE, *TIMES, "--json", str(file))
    without = command(*asked_for)
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr.startswith("error: on a CPU ")
    assert not file.exists()
    found = command(*asked_for, TRITON_INTERPRET="1")
    assert found.returncode == 0, found.stdout + found.stderr
    assert f": {2 * EACH_SHAPE} of {2 * EACH_SHAPE} equal" in found.stdout
    assert record.read(file)["vllm"] == "0.0"
    wrong = command("--vllm-src", str(tmp_path / "none"), *SHAPE, TRITON_INTERPRET="1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith(f"error: --vllm-src {tmp_path / 'none'}: ")


def test_on_a_cpu_there_is_no_table_of_the_device(in_process, capsys):
    assert compare_vllm.main([*SHAPE, *TIMES]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    number = 2 * EACH_SHAPE
    assert first == (
        f"vllm 0.0 and torch: {number} of {number} equal, each an operation at one T, K and number "
        "of ranks"
    )
    assert len(others) == 6
    assert all(line.startswith("host_us ") for line in others)


def test_what_is_not_equal_is_not_counted(in_process, capsys):
    right = ours.prepare_sparse_mla_safe_lengths
    in_process["prepare_sparse_mla_safe_lengths"] = lambda *given: right(*given) + 1
    assert compare_vllm.main([*SHAPE, *TIMES]) == 1
    out = capsys.readouterr().out
    assert f"torch: {2 * EACH_SHAPE - 2} of {2 * EACH_SHAPE} equal" in out
    assert out.count("WRONG: safe_lengths") == 2


@pytest.mark.parametrize(
    "arguments",
    [("--seconds", "0", *SHAPE), (*SHAPE, *TIMES, "--rows", str(2**22 + 1))],
    ids=["no time", "too large"],
)
def test_where_no_shape_was_reached(in_process, capsys, tmp_path, arguments):
    file = tmp_path / "record.json"
    assert compare_vllm.main([*arguments, "--json", str(file)]) == 2
    said = capsys.readouterr()
    assert "equal" not in said.out
    assert "left out: T = " in said.out
    assert said.err.endswith(
        "error: no shape was compared: ask for more --seconds, or for smaller shapes\n"
    )
    assert record.read(file)["left_out"]


def test_random_inputs_end_well(in_process, capsys):
    assert compare_vllm.main(["--device", "cpu", "--equality", "8", "--kinds", "8"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("8 inputs, 0 unequal")
    assert said.err == ""


def timed(mine, theirs=10.0):
    """A comparison as a GPU would leave it, with one time of each."""
    state = vllm_timing.Comparison(None, "0.0", "triton", torch.device("cuda"), 0.0)
    named = {"vllm 0.0": ("remap", theirs), "triton": ("remap", mine), "torch": ("copy", 1.0)}
    state.rows += [
        record.Row("gpu_us", value, operation, provider, "uniform", 32, 2048, 1)
        for provider, (operation, value) in named.items()
    ]
    state.checked = state.equal = 1
    return state


@pytest.mark.parametrize(("theirs", "slack"), [(10.0, "share"), (1.0, "time")])
def test_slower_is_by_more_than_the_slack_of_the_targets(capsys, monkeypatch, theirs, slack):
    allowed = {"share": asked.SLACK_SHARE * theirs, "time": asked.SLACK_US}[slack]
    assert allowed == max(asked.SLACK_SHARE * theirs, asked.SLACK_US)
    for over, told in ((0.99, False), (1.01, True)):
        compare_vllm.print_table(timed(theirs + over * allowed, theirs))
        out = capsys.readouterr().out
        assert out.startswith("GPU µs a call: vllm 0.0 / triton = ratio\n")
        assert out.rstrip().endswith("SLOWER") is told
    monkeypatch.setattr(compare_vllm, "SLACK_SHARE", 1.0)
    compare_vllm.print_table(timed(theirs + 1.01 * allowed, theirs))
    assert "SLOWER" not in capsys.readouterr().out


def test_the_record_says_which_functions_were_timed(in_process, capsys, monkeypatch, tmp_path):
    file = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--equality", "1", "--kinds", "1", "--json", str(file)]
    assert compare_vllm.main(arguments) == 0
    content = Path(ours.__file__).read_bytes().replace(b"\r\n", b"\n")
    assert json.loads(file.read_text())["names_hash"] == hashlib.sha256(content).hexdigest()
    other = tmp_path / "vllm.py"
    monkeypatch.setattr(ours, "__file__", str(other))
    other.write_bytes(content.replace(b"\n", b"\r\n"))
    assert compare_vllm.names_hash() == hashlib.sha256(content).hexdigest()
    other.write_bytes(content + b"#")
    assert compare_vllm.names_hash() != hashlib.sha256(content).hexdigest()
    assert "names_hash" in compare_vllm.__doc__
