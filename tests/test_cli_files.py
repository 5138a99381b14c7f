"""Files that a command writes: refused before the work where they cannot be, and written whole."""

import errno
import os
import resource
import sys
from pathlib import Path

import pytest
import typer

from mla_index.cli import files, streams


def refused(path):
    with pytest.raises(typer.Exit) as ended:
        files.check("--json", path)
    return ended.value.exit_code


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such/folder.json", "error: --json no/such/folder.json: there is no such folder\n"),
        (".", "error: --json .: that is a folder\n"),
        ("--all", "error: --json takes a file, got --all, which looks like an option (or write "),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, path, message):
    assert refused(Path(path)) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.fixture
def closed(monkeypatch):
    """No folder takes a new file. Permissions would not do: they do not bind the superuser."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "NamedTemporaryFile", refuse)


@pytest.mark.usefixtures("closed")
def test_a_folder_that_takes_no_new_file(capsys, tmp_path):
    assert refused(tmp_path / "x.json") == 2
    assert capsys.readouterr().err == f"error: --json {tmp_path / 'x.json'}: Permission denied\n"


@pytest.mark.usefixtures("closed")
def test_a_file_in_a_folder_that_takes_no_new_one_is_written_in_place(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("first\n")
    files.check("--json", path)
    assert path.read_text() == "first\n"
    files.write("--json", path, "second\n")
    assert path.read_text() == "second\n"


def test_a_file_that_may_not_be_written_is_refused(capsys, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "x.json"
    path.write_text("kept\n")
    monkeypatch.setattr(Path, "open", refuse)
    assert refused(path) == 2
    assert capsys.readouterr().err == f"error: --json {path}: Permission denied\n"


def test_a_check_leaves_everything_as_it_is(tmp_path):
    for name in ("x.json", "x.json.part", "y.json.part"):
        (tmp_path / name).write_text(name)
    for name in ("x.json", "y.json"):
        files.check("--json", tmp_path / name)
    files.check("--json", files.STDOUT)
    files.check("--json", Path(os.devnull))
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {name: name for name in ("x.json", "x.json.part", "y.json.part")}


def test_a_neighbour_with_a_like_name_is_left_alone(tmp_path):
    neighbour = tmp_path / "x.json.part"
    neighbour.write_text("mine")
    files.write("--json", tmp_path / "x.json", "{}\n")
    assert neighbour.read_text() == "mine"
    assert (tmp_path / "x.json").read_text() == "{}\n"


@pytest.mark.parametrize("content", ["old", None], ids=["there", "missing"])
def test_behind_a_link_the_target_is_written(tmp_path, content):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link = folder / "x.json", tmp_path / "link.json"
    if content is not None:
        target.write_text(content)
    link.symlink_to(target)
    files.check("--json", link)
    files.write("--json", link, "new\n")
    assert link.is_symlink()
    assert target.read_text() == "new\n"
    assert [*folder.iterdir()] == [target]


def test_a_link_that_leads_to_itself_is_refused(capsys, tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(link)
    assert refused(link) == 2
    assert capsys.readouterr().err.startswith(f"error: --json {link}: ")


def test_permissions_are_those_of_the_file_or_of_a_new_one(tmp_path):
    old, new, plain = (tmp_path / name for name in ("old.json", "new.json", "plain"))
    old.write_text("first")
    old.chmod(0o640)
    plain.touch()
    for path in (old, new):
        files.write("--json", path, "second")
    assert old.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode == plain.stat().st_mode


def test_a_file_is_written_whole_or_not_at_all(capsys, tmp_path):
    path = tmp_path / "x.json"
    files.write("--json", path, "first\n")
    assert path.read_text() == "first\n"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(typer.Exit) as ended:
            files.write("--json", path, "second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.value.exit_code == 2
    told = f"error: --json {path}: File too large; it was not written\n"
    assert capsys.readouterr().err == told
    assert path.read_text() == "first\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_replaced_is_written(monkeypatch, tmp_path):
    def busy(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    path = tmp_path / "x.json"
    monkeypatch.setattr(Path, "replace", busy)
    files.write("--json", path, "mounted alone\n")
    assert path.read_text() == "mounted alone\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_dash_is_refused_where_standard_output_is_closed(capsys, monkeypatch):
    files.check("--json", files.STDOUT)
    monkeypatch.setattr(sys, "stdout", None)
    assert refused(files.STDOUT) == 2
    streams.open_closed()
    assert refused(files.STDOUT) == 2
    sys.stdout.close()
    assert capsys.readouterr().err == "error: --json -: standard output is closed\n" * 2


def test_a_dash_is_standard_output(capsys):
    files.write("--json", files.STDOUT, "{}\n")
    assert capsys.readouterr().out == "{}\n"
