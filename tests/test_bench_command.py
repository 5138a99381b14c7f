"""`mla-index bench`."""

import io
import json
import signal
from pathlib import Path

import pytest
from conftest import needed
from rich.console import Console
from typer.testing import CliRunner

from mla_index import simulation
from mla_index.bench import run as run_module
from mla_index.bench.record import Row
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
    assert found["load"]["threads"] >= 1
    assert {row["operation"] for row in found["rows"]} == {"copy", "remap", "dcp_filter"}
    assert result.stderr == ""


def test_a_plot(tmp_path):
    needed("matplotlib")
    path = tmp_path / "bench.png"
    result = bench(*TINY, "--plot", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_any_time_there_is_no_picture_and_no_verdict(tmp_path):
    needed("matplotlib")
    path = tmp_path / "bench.png"
    result = bench("--quick", "--op", "remap", "--seconds", "0", "--plot", path)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no time was measured, and nothing drawn: ")
    assert not path.exists()
    assert "left out: 3\n" in result.stdout
    assert "targets" not in result.stdout


def record(*rows, **more):
    return {"rows": [row.as_dict() for row in rows], "left_out": [], "wrong": [], **more}


def shown(found):
    screen = io.StringIO()
    command.show(found, Console(file=screen, width=200))
    return screen.getvalue()


def at(provider, value, metric="cpu_us", **more):
    return Row(metric, value, "remap", provider, "uniform", 8, 8, 1, **more)


@pytest.mark.parametrize(("value", "verdict"), [(20.0, "not reached"), (5.0, "stretch met")])
def test_a_stretch_alone_has_a_verdict(value, verdict):
    told = shown(record(at("torch", value), at("composition", 10.0)))
    line = next(line for line in told.splitlines() if line.startswith("torch over the plain"))
    assert line.rstrip().endswith(f"1  {verdict}")


def test_the_words_of_the_tables_are_explained():
    told = shown(record(at("torch", 1.0), at("composition", 10.0)))
    assert "composition: the same by torch's gather and where; copy: moving the same bytes" in told
    assert "ask: what must be reached, stretch: " in told
    assert "ask:" not in shown(record(at("torch", 1.0)))


WIDE, NARROW = {"low": 8.0, "high": 11.0}, {"low": 9.9, "high": 10.1}
FEW = [at("x", 10.0, **WIDE), *[at("y", 10.0, **NARROW)] * 3]


def test_noise_on_the_host_is_warned_of():
    disturbed = "warning: 2 of 5 times on the host or the CPU have quartiles more than 25% "
    assert disturbed in shown(record(*FEW, at("x", 10.0, "host_us", **WIDE)))
    assert "on the host or the CPU" not in shown(record(*FEW))
    assert "on the host or the CPU" not in shown(record(*[at("x", 10.0, "gpu_us", **WIDE)] * 2))
    busy = {"average": 4.5, "threads": 4}
    assert "warning: the load was 4.5 on 4 threads" in shown(record(*FEW, load=busy))
    assert "the load" not in shown(record(*FEW, load=busy | {"average": 4.0}))


def test_an_unsteady_time_is_marked_and_answers_no_target():
    told = shown(record(*FEW))
    assert "~10.0" in told
    assert "~: the quartiles are more than 25% of the median apart" in told
    assert "warning: too unsteady (~) to answer a target: 1 of 4 times, of remap" in told
    steady = shown(record(*FEW[1:]))
    assert "~" not in steady
    assert "warning" not in steady


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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_early_writes_what_it_has(how, tmp_path, monkeypatch):
    real, begun = run_module._time_shape, []

    def timed_once(state, batch, topk):
        if begun:
            signal.raise_signal(how)
        begun.append(topk)
        real(state, batch, topk)

    monkeypatch.setattr(run_module, "_time_shape", timed_once)
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "bench.json"
    result = bench("--quick", "--op", "remap", "--rows", "1,4", "--topk", "8", "--json", path)
    assert result.exit_code == 130
    assert result.stderr.endswith("error: interrupted: what was measured before is all there is\n")
    written = json.loads(path.read_text())
    assert written["interrupted"] is True
    assert {row["rows"] for row in written["rows"] if row["metric"] == "cpu_us"} == {1}
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_was_left_out_is_said():
    result = bench("--quick", "--op", "remap", "--rows", "1", "--topk", "9,8,7,6,5,4,3,2",
                   "--seconds", "0")  # fmt: skip
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
        (["--seconds", "nan"], 2, "error: --seconds must be at least 0, got nan"),
        (["--mtp", "1"], 2, "error: --mtp needs --trace"),
        (["--valid", "0.5", "--trace", "any.jsonl"], 2, "error: --valid goes without --trace: a "),
        (["--op", "remap,"], 2, "error: --op must be names with commas, and one is empty"),
        (["--json", "."], 2, "error: --json .: that is a folder"),
        (["--json", "--plot"], 2, "error: --json takes a file, got --plot, which looks"),
        (["--plot", "-"], 2, "error: --plot takes a file, got -"),
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


@pytest.mark.parametrize(
    ("width", "sizes"), [(200, [16]), (80, [8, 8]), (60, [8, 8]), (40, [6, 6, 4]), (10, [2] * 8)]
)
def test_row_counts_that_have_no_room_beside_each_other_stand_below(width, sizes):
    rows = [Row("gpu_us", 1.0, "copy", "torch", "uniform", 2**n, 8, 1) for n in range(16)]
    drawn = command._times(rows, Console(width=width))
    headings = [[column.header for column in table.columns] for table in drawn]
    assert [len(heading) - 1 for heading in headings] == sizes
    assert {heading[0] for heading in headings} == {"T ="}
    assert [count for heading in headings for count in heading[1:]] == [
        str(2**n) for n in range(16)
    ]


def test_one_row_count_is_one_table():
    rows = [Row("gpu_us", 1.0, "copy", "torch", "uniform", 4, 8, 1)]
    (drawn,) = command._times(rows, Console(width=5))
    assert [column.header for column in drawn.columns] == ["T =", "4"]


def test_names_and_numbers_stay_whole():
    rows = ",".join(str(2**n) for n in range(10))
    arguments = ("--op", "remap_safe_lengths,safe_lengths", "--rows", rows, "--topk", "16")
    found = json.loads(bench("--quick", *arguments, "--json", "-").stdout)
    for columns in (60, 80):
        screen = io.StringIO()
        command.show(found, Console(file=screen, width=columns))
        text = screen.getvalue()
        assert max(map(len, text.splitlines())) <= columns
        assert "…" not in text
        shown = {"remap_safe_lengths,", "safe_lengths,", "torch", *rows.split(",")}
        assert shown <= set(text.split())


def test_rows_that_no_decode_step_of_a_trace_has_are_told():
    small = Path(simulation.__file__).parent / "small_trace.jsonl"
    result = bench("--quick", "--op", "remap", "--trace", small, "--rows", "4,4096", "--topk", "16")
    assert result.exit_code == 0, result.output
    assert "left out: 1\n" in result.stdout
    assert (
        "trace decode, T = 4096, K = 16: the trace has 24 requests of 2 rows, so T = 48 instead"
    ) in result.stdout


def test_the_help_says_how_large_a_decode_step_is():
    told = " ".join(bench("--help").stdout.replace("│", " ").split())
    assert "a decode step, which takes at most 128 requests: T up to 128 * (1 + MTP)" in told
    assert "decode steps of T rows, of at most 128 requests" in told


def test_a_record_to_standard_output_is_alone_there():
    result = bench(*TINY, "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan"]["topk"] == [32]
    assert "remap, torch" in result.stderr


def test_several_with_commas():
    result = bench(
        "--quick", "--op", "remap, safe_lengths", "--rows", "1", "--topk", "8", "--json", "-"
    )
    found = json.loads(result.stdout)
    assert found["plan"]["operations"] == ["remap", "safe_lengths"]


def test_what_no_machine_can_hold_is_left_out_before_it_is_made():
    result = bench("--quick", "--op", "remap", "--rows", 10**9, "--topk", 10**11, "--json", "-")
    assert result.exit_code == 2
    assert "error: no time was measured: ask for more --seconds, or for smaller" in result.stderr
    told = json.loads(result.stdout)["left_out"]
    assert [line.partition(": T * K")[0] for line in told] == [
        f"host, memory, kernels, K = {10**11}",
        f"uniform, T = {10**9}, K = {10**11}",
    ]
