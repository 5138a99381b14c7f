"""What is installed, as records and reports tell it."""

import platform
from importlib import metadata

import pytest
import torch

import mla_index
from mla_index import installed
from mla_index.bench import record
from mla_index.conformance import run


def test_versions_are_of_what_is_installed_alone(monkeypatch):
    monkeypatch.setattr(installed, "PACKAGES", ("torch", "an-abacus"))
    assert installed.versions() == {
        "mla_index": mla_index.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": metadata.version("torch"),
    }


def test_records_tell_the_same_versions():
    told = installed.versions()
    assert record.head("bench", torch.device("cpu"))["versions"] == told
    assert run.versions() == told | {
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
    }


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 580.1; echo 580.1", "580.1"), ("echo no driver; exit 9", None), (":", None)],
)
def test_the_driver_is_what_its_tool_tells(monkeypatch, tmp_path, script, version):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed.nvidia_driver() == version


def test_without_the_tool_no_driver_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed.nvidia_driver() is None
