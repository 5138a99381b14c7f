"""Every Python block of the README and the documentation runs, top to bottom, page by page."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
from conftest import PROJECT

from mla_index.conformance.cases import jobs

PAGES = sorted([PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run_and_print_what_the_page_shows(page):
    """A `text` block after a Python block is what it prints; `…` stands for what differs."""
    namespace: dict[str, object] = {"__name__": page.stem}
    printed = ""
    for match in BLOCK.finditer(page.read_text()):
        language, code = match.groups()
        if language == "python":
            line = page.read_text()[: match.start()].count("\n") + 1
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(compile("\n" * line + code, str(page), "exec"), namespace)  # noqa: S102
            printed = stream.getvalue()
        elif language == "text" and printed:
            for part in code.split("…"):
                assert part.strip() in printed, f"{page.name} shows what is not printed"
            printed = ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


SUITE = PROJECT / "mla_index" / "conformance"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_cases_and_tests_that_a_page_names_exist(page):
    """Ids like `fr05-all-invalid-row` are the suite's, names like `test_capture` anybody's."""
    ids = {job.id.split(":")[0] for job in jobs(full=False)}
    sources = [*(PROJECT / "tests").glob("*.py"), *SUITE.glob("*.py")]
    tests = {name for path in sources for name in re.findall(r"def (test_\w+)", path.read_text())}
    tests |= {path.stem for path in sources}
    named = re.findall(r"`([^`\s]+)`", page.read_text())
    assert {name for name in named if re.fullmatch(r"fr\d\d-[\w-]+", name)} <= ids
    assert {name for name in named if re.fullmatch(r"test_\w+", name)} <= tests
