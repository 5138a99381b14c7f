"""`mla-index` itself: help, version, info, explain, and what is missing."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import mla_index
from mla_index import settings
from mla_index.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def words(text):
    return " ".join(text.replace("│", " ").split())


def test_help_teaches():
    result = run("--help")
    assert result.exit_code == 0
    for told in ("demo", "info", "explain", "Exit codes", "bug report"):
        assert told in words(result.stdout)


@pytest.mark.parametrize("command", [c.callback.__name__ for c in app.registered_commands])
def test_every_command_has_examples_and_exit_codes(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    text = words(result.stdout)
    assert f"mla-index {command}" in text
    assert "Examples" in text
    assert "3 no backend can serve" in text


def test_no_arguments_show_the_help():
    result = run()
    assert result.exit_code == 2
    assert "Usage: mla-index" in words(result.output)


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"mla-index {mla_index.__version__}\n"


def test_a_wrong_number_is_exit_code_2():
    result = run("demo", "--dcp", "many")
    assert result.exit_code == 2
    assert "Invalid value for '--dcp'" in words(result.stderr)


# --- info ----------------------------------------------------------------------------------------


def test_info_for_people():
    result = run("info", "--device", "cpu")
    assert result.exit_code == 0
    text = words(result.stdout)
    for told in (
        f"torch {torch.__version__}",
        "MLA_INDEX_BACKEND not set",
        "backends on cpu",
        "torch accepted chosen (by auto)",
        "cupy rejected",
    ):
        assert told in text
    for op in mla_index.OPERATIONS:
        assert op in text


def test_info_for_scripts(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BLOCK", "triton")
    result = run("info", "--json", "--device", "cpu", "--device", "meta")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["versions"]["mla_index"] == mla_index.__version__
    assert told["versions"]["torch"] == torch.__version__
    assert told["settings"].keys() == settings.KNOWN.keys()
    assert told["settings"]["MLA_INDEX_BACKEND"] is None
    assert told["settings"]["MLA_INDEX_BLOCK"] == "triton"
    assert set(told["backends"]) == set(told["devices"]) == {"cpu", "meta"}
    cpu = {answer["op"]: answer for answer in told["backends"]["cpu"]}
    assert set(cpu) == set(mla_index.OPERATIONS)
    for answer in cpu.values():
        assert answer["chosen"] == "torch"
        rejected = [c for c in answer["candidates"] if not c["accepted"]]
        assert rejected
        assert all(c["reason"] for c in rejected)


def test_info_with_a_setting_that_names_nobody(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BACKEND", "abacus")
    result = run("info")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: MLA_INDEX_BACKEND asks for 'abacus', but no backend is named 'abacus'"
    )


def test_info_starts_no_device():
    code = """
import torch
from typer.testing import CliRunner
from mla_index.cli.app import app

def refuse(*arguments):
    raise SystemExit("a device was started")

torch.cuda._lazy_init = torch.cuda.init = refuse
result = CliRunner().invoke(app, ["info", "--device", "cuda"])
assert "not asked (use --probe)" in result.output, result.output
raise SystemExit(result.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


# --- explain -------------------------------------------------------------------------------------


def test_explain_a_configuration():
    result = run("explain", "dcp_filter", "--dcp", 8, "--compact", "--safe-lengths", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["op"] == "dcp_filter"
    assert "dcp_size=8" in told["spec"]
    assert "safe_lengths=True" in told["spec"]
    assert told["chosen"] == "torch"


@pytest.mark.parametrize("op", mla_index.OPERATIONS)
def test_explain_every_operation(op):
    result = run("explain", op, "--dtype", "int64", "--backend", "cupy,torch")
    assert result.exit_code == 0
    assert "torch accepted chosen (by the argument backend=)" in words(result.stdout)


def test_explain_where_nothing_can_run_is_exit_code_3():
    result = run("explain", "remap", "--backend", "cupy")
    assert result.exit_code == 3
    assert "cupy rejected" in words(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abacus"], "op must be one of remap, dcp_filter"),
        (["remap", "--safe-lengths"], "safe_lengths=True needs compact=True"),
        (["remap", "--dtype", "int8"], "dtype must be one of int32, int64, got 'int8'"),
        (["remap", "--dcp", "0"], "Dcp.size must be at least 1"),
        (["remap", "--backend", "abacus"], "no backend is named 'abacus'"),
        (["remap", "--device", "hpu"], "--device hpu: torch.hpu is not installed"),
    ],
    ids=str,
)
def test_explain_refuses(arguments, message):
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# --- the program ---------------------------------------------------------------------------------


def test_python_m():
    done = subprocess.run(
        [sys.executable, "-m", "mla_index", "--version"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == f"mla-index {mla_index.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(tmp_path, missing):
    (tmp_path / f"{missing}.py").write_text(
        f"raise ModuleNotFoundError('gone', name={missing!r})\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mla_index.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 3
    assert done.stderr == (
        f"error: the command line needs {missing}: pip install 'mla_index[cli]'\n"
    )
    assert done.stdout == ""
