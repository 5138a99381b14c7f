"""`mla-index conformance`: what it runs, what it tells, and how it ends."""

import json

import pytest
from typer.testing import CliRunner

from mla_index import registry
from mla_index.cli import conformance
from mla_index.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["conformance", *map(str, arguments)])


def line(operation, passed=0, failed=0, skipped=0, **reasons):
    counts = {"passed": passed, "failed": failed, "skipped": skipped}
    return {"backend": "x", "operation": operation, **counts, "skip_reasons": reasons}


PASSED = {"status": "passed", "problems": [], "results": [line("remap", 3), line("view", 1)]}
FAILED = {"status": "failed", "problems": [], "results": [line("remap", 2, 1)]}
ABSENT = {
    "status": "did not run",
    "problems": ["nothing ran"],
    "results": [line("a", 0, 0, 2, no=2)],
}
BROKEN = {"status": "failed", "problems": ["the run ended without a report"], "results": []}


@pytest.fixture
def suite(monkeypatch):
    """Stands for the suite: results by backend, and what it was called with."""
    results, calls = {}, []

    def run_suite(names, device, **how):
        calls.append((list(names), device, how))
        return {"device": device, "backends": {name: results.get(name, PASSED) for name in names}}

    monkeypatch.setattr("mla_index.conformance.run.run_suite", run_suite)
    run_suite.results, run_suite.calls = results, calls
    return run_suite


def test_by_default_what_can_run_on_the_device(suite):
    assert run().exit_code == 0
    names, device, how = suite.calls[0]
    assert "torch" in names
    assert "cupy" not in names
    assert (device, how["scale"], how["json_path"], how["pytest_args"]) == ("cpu", None, None, [])


def test_all_is_every_backend_and_one_that_cannot_run_fails_nothing(suite):
    suite.results["cupy"] = ABSENT
    result = run("--all")
    assert result.exit_code == 0
    assert suite.calls[0][0] == list(registry.names())
    assert "did not run" in result.stdout
    assert "2 × no" in result.stdout


def test_named_ones_alone_and_how(suite, tmp_path):
    path = tmp_path / "record.json"
    result = run("--backend", "torch", "--scale", "full", "--only", "fr05", "--json", path)
    assert result.exit_code == 0
    names, _, how = suite.calls[0]
    assert names == ["torch"]
    assert (how["scale"], how["json_path"], how["pytest_args"]) == ("full", path, ["-k", "fr05"])


def test_required_ones_are_added(suite):
    assert run("--require", "cupy").exit_code == 0
    assert suite.calls[0][0][-1] == "cupy"


@pytest.mark.parametrize(
    ("arguments", "results", "code", "message"),
    [
        (["--backend", "torch"], {"torch": FAILED}, 1, ""),
        (["--backend", "torch"], {"torch": BROKEN}, 1, ""),
        (["--backend", "cupy"], {"cupy": ABSENT}, 3, "error: cupy had to run and did not\n"),
        (["--all", "--require", "cupy"], {"cupy": ABSENT}, 3, "error: cupy had to run"),
        (["--all", "--require", "cupy"], {"cupy": ABSENT, "torch": FAILED}, 1, ""),
        (["--backend", "abacus"], {}, 2, "error: no backend is named 'abacus'"),
        (["--scale", "huge"], {}, 2, "error: --scale must be small or full, got huge"),
        (["--json", "no/such/folder.json"], {}, 2, "error: --json no/such/folder.json: there is"),
        (["--device", "abacus"], {}, 2, "error: --device abacus"),
    ],
    ids=str,
)
def test_how_it_ends(suite, arguments, results, code, message):
    suite.results.update(results)
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    if not message:
        assert "failed" in result.stdout


def test_nothing_that_ran_is_no_success(suite):
    suite.results.update(dict.fromkeys(registry.names(), ABSENT))
    assert run("--all").exit_code == 3


def test_without_pytest_it_says_what_to_install(suite, monkeypatch):
    monkeypatch.setattr(conformance, "NEEDED", ("pytest", "abacus_test"))
    result = run()
    assert result.exit_code == 3
    assert result.stderr == (
        "error: conformance needs abacus_test: pip install 'mla_index[test]'\n"
    )
    assert suite.calls == []


def test_the_suite_itself_on_one_case(tmp_path):
    path = tmp_path / "record.json"
    result = run("--backend", "torch", "--only", "fr05", "--json", path)
    assert result.exit_code == 0, result.output
    assert "remap" in result.stdout
    record = json.loads(path.read_text())
    assert record["backends"]["torch"]["status"] == "passed"
    assert sum(line["passed"] for line in record["backends"]["torch"]["results"]) > 0
