"""`mla-index vllm`."""

from __future__ import annotations

import json
import sys

import pytest
import vllm_stand_in
from typer.testing import CliRunner
from vllm_stand_in import CONVERT, SIGNATURES

from mla_index.cli.app import app
from mla_index.integrations import vllm_forms


def run(*arguments):
    return CliRunner().invoke(app, ["vllm", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _clean():
    path = list(sys.path)
    vllm_stand_in.forget()
    yield
    sys.path[:] = path
    vllm_stand_in.forget()


def test_a_vllm_that_fits(tmp_path):
    sys.path.insert(0, str(vllm_stand_in.write(tmp_path)))
    result = run("--check")
    assert result.exit_code == 0
    told = "vLLM of unknown version fits; kernels are warmed as vLLM's warm-up asks"
    assert told in result.stdout
    for name in SIGNATURES:
        assert name in result.stdout
    assert "vllm" not in sys.modules


def test_a_vllm_that_does_not_fit(tmp_path):
    vllm_stand_in.write(tmp_path, changed={CONVERT: SIGNATURES[CONVERT] + ", scale=1"})
    result = run("--check", "--source", tmp_path)
    assert result.exit_code == 1
    assert f"{CONVERT} has the unknown parameter scale" in result.stdout
    assert run("--source", tmp_path).exit_code == 0  # a question, not a check


def test_no_vllm(monkeypatch):
    monkeypatch.setattr("mla_index.integrations.vllm_forms.installed", lambda: None)
    result = run("--check")
    assert result.exit_code == 3
    assert "vLLM is not installed" in result.stdout
    assert run().exit_code == 0


def test_a_vllm_without_the_module(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    result = run("--check")
    assert result.exit_code == 1
    assert "has no vllm.v1.attention.backends.mla.sparse_utils" in result.stdout


def test_a_folder_without_vllm(tmp_path):
    result = run("--source", tmp_path)
    assert result.exit_code == 2
    file = vllm_forms.source_in(tmp_path)
    assert result.stderr == f"error: --source {tmp_path}: {file}: No such file or directory\n"


@pytest.mark.parametrize("content", [b"def f(:\n", b"\xff\xfe", b"\x00"], ids=repr)
def test_a_source_that_is_no_python(tmp_path, content):
    file = vllm_forms.source_in(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    result = run("--check", "--source", tmp_path)
    assert result.exit_code == 1
    assert f"{file} is not Python: " in result.stdout


def test_for_scripts(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_INDEX_VLLM", "1")
    vllm_stand_in.write(tmp_path)
    facts = json.loads(run("--json", "--source", tmp_path).stdout)
    assert facts["fits"] is True
    assert facts["differences"] == []
    assert facts["replaced"] == list(SIGNATURES)
    assert facts["MLA_INDEX_VLLM"] is True


def test_a_wrong_setting(monkeypatch):
    monkeypatch.setenv("MLA_INDEX_VLLM", "true")
    result = run("--check")
    assert result.exit_code == 2
    assert "MLA_INDEX_VLLM must be 0 or 1" in result.stderr
