"""`mla-index` itself: help, version, info, explain, and what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import needed
from typer.testing import CliRunner

import mla_index
from mla_index import settings
from mla_index.cli import screen
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


def test_help_teaches_both_forms_of_json():
    """A switch where a question is answered, a file where a record is made; each says which."""
    assert "--json is a switch" in words(run("--help").stdout)
    forms = {"switch": "A switch: to keep it, redirect", "record": "- is standard output"}
    for command in app.registered_commands:
        name = command.callback.__name__
        form = "record" if name in ("bench", "conformance") else "switch"
        assert forms[form] in words(run(name, "--help").stdout), name


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
    assert told["errors"] == []
    assert set(told["backends"]) == set(told["devices"]) == {"cpu", "meta"}
    cpu = {answer["op"]: answer for answer in told["backends"]["cpu"]}
    assert set(cpu) == set(mla_index.OPERATIONS)
    for answer in cpu.values():
        assert answer["chosen"] == "torch"
        rejected = [c for c in answer["candidates"] if not c["accepted"]]
        assert rejected
        assert all(c["reason"] for c in rejected)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"MLA_INDEX_BACKEND": "tritn"},
            "MLA_INDEX_BACKEND asks for 'tritn', but no backend is named 'tritn'",
        ),
        ({"MLA_INDEX_BACKEND": "torch, abacus"}, "no backend is named 'abacus'"),
        ({"MLA_INDEX_BLOCK": "tritn"}, "MLA_INDEX_BLOCK asks for 'tritn'"),
        ({"MLA_INDEX_BLOCK": "auto"}, "MLA_INDEX_BLOCK asks for 'auto', which is no backend"),
        ({"MLA_INDEX_VLLM": "yes"}, "MLA_INDEX_VLLM must be 0 or 1, got 'yes'"),
    ],
    ids=str,
)
def test_info_with_a_wrong_setting_tells_all_it_can_and_what_is_wrong(
    monkeypatch, variables, message
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    mla_index.reload_environment()
    result = run("info", "--device", "cpu")
    assert result.exit_code == 2
    text = words(result.stdout)
    for told in (f"torch {torch.__version__}", *variables, "backends on cpu", "cupy rejected"):
        assert told in text
    for op in mla_index.OPERATIONS:
        assert op in text
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1

    result = run("info", "--json", "--device", "cpu")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert len(told["errors"]) == 1
    assert message in told["errors"][0]
    answers = {answer["op"]: answer for answer in told["backends"]["cpu"]}
    assert answers.keys() == set(mla_index.OPERATIONS)
    served = {c["name"]: c["accepted"] for c in answers["remap"]["candidates"]}
    assert served.keys() == {"triton", "cupy", "numba", "torch"}
    assert served["torch"] is True
    chosen = {answer["chosen"] for answer in answers.values()}
    assert chosen == ({"torch"} if "MLA_INDEX_VLLM" in variables else {None})


def test_info_shows_a_variable_that_means_nothing(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_BACKND", "torch")
    mla_index.reload_environment()
    with pytest.warns(RuntimeWarning, match="did you mean MLA_INDEX_BACKEND"):
        result = run("info", "--device", "cpu")
    assert result.exit_code == 0
    assert "MLA_INDEX_BACKND 'torch' (no such setting)" in words(result.stdout)


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


def test_operations_that_share_an_answer_stand_above_its_backends(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = run("info", "--device", "cpu").stdout.splitlines()
    first = lines.index("backends on cpu") + 1
    found = [line.lstrip(" →").split(" ")[0] for line in lines[first:]]
    names = ["torch", "triton", "cupy", "numba"]
    assert lines[first] == "  remap, dcp_filter, safe_lengths"
    assert found == ["remap,", *names, "flat_row_view", *names, ""]
    for line in lines[first:-1]:
        if any(line.lstrip(" →").startswith(name) for name in names):
            assert "accepted   chosen (by auto)" in line or "rejected   " in line


# --- explain -------------------------------------------------------------------------------------


def test_explain_a_configuration():
    result = run("explain", "dcp_filter", "--dcp", 8, "--compact", "--safe-lengths", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["op"] == "dcp_filter"
    assert told["spec"]["dcp_size"] == 8
    assert told["spec"]["safe_lengths"] is True
    assert told["spec"].items() >= {"token_dtype": "int32", "slot_dtype": "int32"}.items()
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
        (["remap", "--backend", "torch,,cupy"], "--backend must be names with commas, and one"),
        (["remap", "--backend", ""], "--backend must be names with commas, and one is empty"),
        (["remap", "--device", "hpu"], "--device hpu: torch.hpu is not installed"),
    ],
    ids=str,
)
def test_explain_refuses(arguments, message):
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


# --- how wide it is -------------------------------------------------------------------------------


def cells(text):
    """The words of what was printed, each whole as it stands in a line."""
    return set(text.replace(",", " ").replace(";", " ").split())


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("arguments", [["info"], ["explain", "flat_row_view"]], ids=str)
def test_names_stay_whole_and_nothing_is_cut(monkeypatch, columns, arguments):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run(*arguments)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "…" not in result.stdout
    assert {"flat_row_view", "triton", "cupy", "numba", "torch", "rejected"} <= cells(result.stdout)
    if arguments == ["info"]:
        assert {"safe_lengths", "MLA_INDEX_BACKEND", "pytorch-triton-rocm"} <= cells(result.stdout)


def test_in_a_narrow_terminal_a_reason_has_lines_of_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    lines = run("explain", "remap").stdout.splitlines()
    assert lines[:4] == [
        "remap on cpu",
        "→ torch   accepted",
        "    chosen (by auto)",
        "  triton  rejected",
    ]
    assert all(line.startswith("    ") for line in lines[4:6])
    assert max(map(len, lines)) <= 50


@pytest.mark.parametrize("columns", [None, "80"])
def test_piped_lines_are_whole_and_end_where_their_text_does(monkeypatch, columns):
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    lines = run("info", "--device", "cpu").stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    reason = next(row.reason for row in mla_index.explain("remap", device="cpu").rows
                  if row.name == "numba")  # fmt: skip
    assert len(reason) > 60
    assert any(line.endswith(reason) for line in lines) == (columns is None)


def test_colours_stay_where_blanks_go():
    kept = screen.TRAILING.sub(lambda found: found[0].replace(" ", ""), "\x1b[1ma b  \x1b[0m  \n\n")
    assert kept == "\x1b[1ma b\x1b[0m\n\n"


@pytest.mark.parametrize("command", ["demo", "explain"])
def test_the_help_says_who_decides_without_a_backend(command):
    told = words(run(command, "--help").stdout)
    assert "as a call without it: MLA_INDEX_BACKEND, else auto" in told
    assert "[default: auto]" not in told


# --- what goes wrong on the way -------------------------------------------------------------------


def test_ctrl_c_is_a_line_and_exit_code_130(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mla_index.cli.demo.simulate", interrupted)
    result = run("demo")
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "CUDA out of memory. Tried"),
        (
            RuntimeError("[x.cpp:1] . DefaultCPUAllocator: can't allocate memory: 8 bytes.\nmore"),
            "can't allocate memory: 8 bytes.",
        ),
    ],
    ids=lambda given: type(given).__name__,
)
def test_memory_that_runs_out_is_a_line(monkeypatch, error, message):
    def exhausted(*_, **__):
        raise error

    monkeypatch.setattr("mla_index.cli.demo.simulate", exhausted)
    result = run("demo")
    assert result.exit_code == 2
    assert result.stderr == f"error: memory ran out, ask for less ({message})\n"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a fault")

    monkeypatch.setattr("mla_index.cli.demo.simulate", broken)
    result = run("demo")
    assert isinstance(result.exception, RuntimeError)
    assert result.stderr == ""


# --- the program ---------------------------------------------------------------------------------


def program(*arguments, **how):
    done = [sys.executable, "-m", "mla_index", *arguments]
    return subprocess.run(done, stderr=subprocess.PIPE, text=True, check=False, timeout=120, **how)


def test_a_warning_is_a_line():
    variables = {**os.environ, "MLA_INDEX_BACKND": "torch"}
    done = program("explain", "remap", env=variables, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert done.stderr == (
        "warning: unknown environment variable MLA_INDEX_BACKND; did you mean MLA_INDEX_BACKEND? "
        "There are MLA_INDEX_BACKEND, MLA_INDEX_BLOCK, MLA_INDEX_VLLM\n"
    )


def test_a_sign_that_the_terminal_cannot_show_is_no_error():
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = program("explain", "remap", env=variables, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "? torch" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]], ids=str)
def test_a_full_disk_behind_standard_output_is_a_line(arguments):
    with Path("/dev/full").open("w") as full:
        done = program(*arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "error: standard output: No space left on device\n"


CLOSED = {"stdout": ">&-", "stderr": "2>&-", "both": ">&- 2>&-", "all": "<&- >&- 2>&-"}


def closed(streams, *arguments):
    """The programme, started with these streams closed."""
    started = f'exec "$@" {CLOSED[streams]}'
    done = ["sh", "-c", started, "sh", sys.executable, "-m", "mla_index", *map(str, arguments)]
    return subprocess.run(done, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("streams", "arguments", "code"),
    [
        *((streams, ["info"], 0) for streams in CLOSED),
        ("stdout", ["explain", "remap", "--json"], 0),
        ("all", ["demo", "--requests", 2, "--topk", 64], 0),
        ("stdout", ["explain", "abacus"], 2),
        ("stderr", ["explain", "abacus"], 2),
    ],
    ids=str,
)
def test_closed_streams_are_no_error(streams, arguments, code):
    done = closed(streams, *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (code == 2 and streams == "stdout")
    assert bool(done.stdout) == (code == 0 and streams == "stderr")


@pytest.mark.parametrize("streams", ["stdout", "all"])
def test_with_closed_streams_a_record_is_alone_in_its_file(tmp_path, streams):
    """No file gets the number of a standard stream, and what is said there with it."""
    path = tmp_path / "bench.json"
    tiny = ("--quick", "--op", "remap", "--rows", 1, "--topk", 8)
    done = closed(streams, "bench", *tiny, "--json", path)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["plan"]["rows"] == [1]


@pytest.mark.parametrize("streams", ["stdout", "all"])
def test_with_closed_streams_other_programmes_can_be_started(streams):
    """`conformance` starts a test run, which writes to them."""
    needed("pytest")
    done = closed(streams, "conformance", "--backend", "torch", "--only", "view")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


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
