"""A stranger's backend, installed as a package in an environment of its own.

The wheel is made by hand and installed by pip into a new virtual environment, so that discovery
goes through real package metadata.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

STRANGER = Path(__file__).parent / "stranger" / "stranger_backend.py"


def wheel(folder: Path, name: str, files: dict[str, str], entry_points: str) -> Path:
    info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    contents[f"{info}/RECORD"] = "".join(f"{n},,\n" for n in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in contents.items():
            archive.writestr(member, text)
    return path


class Environment:
    """A virtual environment that sees our packages through PYTHONPATH and has its own plugins."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"

    def install(self, name: str, files: dict[str, str], entry_points: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        offline = ["--no-index", "--no-deps", "--disable-pip-version-check"]
        path = wheel(self.folder, name, files, entry_points)
        subprocess.run([*pip, *offline, str(path)], check=True, cwd=self.folder)

    def run(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLA_INDEX_")}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        return subprocess.run(
            [str(self.python), *arguments],
            env={**environment, **settings},
            capture_output=True,
            text=True,
            cwd=self.folder,
        )

    def json(self, program: str, **settings: str) -> dict[str, object]:
        done = self.run("-c", textwrap.dedent(program), **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("stranger"))
    made.install(
        "stranger",
        {"stranger_backend.py": STRANGER.read_text()},
        "[mla_index.backends]\nstranger = stranger_backend\n",
    )
    made.install(
        "broken_plugins",
        {
            "broken_import.py": "import a_library_that_is_not_installed",
            "broken_exit.py": "raise SystemExit('no licence')",
            "broken_contract.py": "name = 'halfdone'\ncontract_version = 1",
            "other_stranger.py": "",
        },
        "[mla_index.backends]\n"
        "importless = broken_import\nexiting = broken_exit\nhalfdone = broken_contract\n"
        "cupy = other_stranger\n",
    )
    return made


ASK = """
    import json, logging, torch, mla_index
    table = torch.tensor([[7, 3]]); tokens = torch.tensor([[0, 64, -1]])
    explanation = mla_index.explain("remap", device="cpu")
    slots = mla_index.remap(None, table, tokens, block_size=64).slots.tolist()
    rows = {row.name: [row.accepted, row.reason] for row in explanation.rows}
    print(json.dumps({"chosen": explanation.chosen, "rows": rows, "slots": slots}))
"""


def test_it_is_found_and_never_chosen_by_auto(environment: Environment) -> None:
    told = environment.json(ASK)
    assert told["chosen"] == "torch"
    assert told["slots"] == [[448, 192, -1]]
    assert told["rows"]["stranger"] == [True, "can run, but auto does not ask for it"]


def test_it_runs_by_name(environment: Environment) -> None:
    told = environment.json(ASK, MLA_INDEX_BACKEND="stranger")
    assert told["chosen"] == "stranger"
    assert told["slots"] == [[448, 192, -1]]


def test_auto_on_the_cpu_does_not_even_import_it(environment: Environment) -> None:
    told = environment.json("""
        import json, sys, torch, mla_index
        tokens = torch.zeros((1, 1), dtype=torch.int32)
        mla_index.remap(None, tokens, tokens, block_size=64)
        print(json.dumps({"imported": "stranger_backend" in sys.modules}))
    """)
    assert told == {"imported": False}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("importless", "ModuleNotFoundError: No module named 'a_library_that_is_not_installed'"),
        ("exiting", "SystemExit: no licence"),
        ("halfdone", "does not keep the contract: limits must be"),
    ],
)
def test_a_broken_plugin_becomes_a_reason(environment: Environment, name: str, told: str) -> None:
    rows = environment.json(ASK)["rows"]
    assert rows[name][0] is False
    assert told in rows[name][1]
    done = environment.run("-c", textwrap.dedent(ASK), MLA_INDEX_BACKEND=name)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "BackendUnavailable" in last
    assert told in last


def test_a_plugin_does_not_take_the_name_of_a_built_in_one(environment: Environment) -> None:
    program = "import logging; logging.basicConfig()\n" + textwrap.dedent(ASK)
    done = environment.run("-c", program)
    assert done.returncode == 0, done.stderr
    assert "other_stranger is ignored: 'cupy' is the name of a built-in one" in done.stderr


def test_two_packages_that_offer_one_name_are_refused(tmp_path: Path) -> None:
    made = Environment(tmp_path)
    for package in ("first", "second"):
        made.install(package, {}, f"[mla_index.backends]\nshared = {package}_module\n")
    rows = made.json(ASK)["rows"]
    assert rows["shared"] == [False, "several installed packages offer a backend named 'shared'"]


def test_the_suite_runs_on_it_unedited(environment: Environment) -> None:
    done = environment.run(
        "-m", "pytest", "--pyargs", "mla_index.conformance", "-q", "-p", "no:cacheprovider",
        "--mla-backend", "stranger", "--mla-require", "stranger",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stranger" in done.stdout
