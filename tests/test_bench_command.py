"""`mla-index bench`."""

import json

import pytest
from conftest import needed
from typer.testing import CliRunner

from mla_index.cli import bench as command
from mla_index.cli.app import app

TINY = ("--quick", "--op", "remap", "--rows", "1,4", "--topk", "32", "--seconds", "60")


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_tables_for_people_and_a_record(tmp_path):
    path = tmp_path / "bench.json"
    result = bench(*TINY, "--op", "dcp_filter", "--dcp", "2", "--valid", "0.5", "--json", path)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for told in ("uniform, K = 32", "copy", "remap, torch", "dcp_filter, 2 ranks, composition",
                 "torch: memory"):  # fmt: skip
        assert told in text
    found = json.loads(path.read_text())
    assert found["plan"]["valid"] == 0.5
    assert {row["operation"] for row in found["rows"]} == {"copy", "remap", "dcp_filter"}
    assert result.stderr == ""


def test_a_plot(tmp_path):
    needed("matplotlib")
    path = tmp_path / "bench.png"
    result = bench(*TINY, "--plot", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = bench(*TINY, "--plot", tmp_path / "bench.png")
    assert result.exit_code == 3
    assert result.stderr == "error: --plot needs matplotlib: pip install 'mla_index[plot]'\n"


def test_a_wrong_result_is_exit_code_1(monkeypatch):
    monkeypatch.setattr("mla_index.bench.contenders.compose", lambda *a: a[3].fill_(3))
    result = bench(*TINY)
    assert result.exit_code == 1
    assert "wrong, or failed: " in result.stdout
    assert "Differs" in result.stdout


def test_what_was_left_out_is_said():
    result = bench("--quick", "--op", "remap", "--rows", "1", "--topk", "9,8,7,6,5,4,3,2",
                   "--seconds", "0")  # fmt: skip
    assert result.exit_code == 0
    assert "left out: 8" in result.stdout
    assert "and 3 more" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--rows", "many"], 2, "error: --rows must be integers with commas, got 'many'"),
        (["--rows", "0"], 2, "error: rows must be at least 1, got 0"),
        (["--op", "abacus"], 2, "error: op must be one of remap"),
        (["--backend", "abacus"], 2, "error: no backend is named 'abacus'"),
        (["--dtype", "int8"], 2, "error: dtype must be one of int32, int64, got 'int8'"),
        (["--device", "meta"], 2, "error: device must be one of cpu, cuda, got meta"),
        (["--trace", "absent.jsonl"], 2, "error: cannot read the trace absent.jsonl"),
        (["--json", "no/such/bench.json"], 2, "error: --json no/such/bench.json: there is no"),
        (["--backend", "cupy"], 3, "error: cupy cannot run on cpu"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(arguments, code, message):
    result = bench("--quick", *arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_many_row_counts_are_thinned():
    from mla_index.bench.record import Row

    rows = [Row("gpu_us", 1.0, "copy", "torch", "uniform", 2**n, 8, 1) for n in range(16)]
    headings = [column.header for column in command._times("", rows).columns]
    assert headings == ["T =", "2", "8", "32", "128", "512", "2048", "8192", "32768"]
