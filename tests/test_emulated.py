"""The GPU backends without a GPU: the whole suite in Triton's interpreter and Numba's simulator.

Each runs in a process of its own, since both are switched on by a variable that is read at import.
These must run: a missing package is a failure here, not a skip.
"""

from __future__ import annotations

import pytest

from mla_index.conformance.run import run_suite

ONLY_WITH_A_CARD = {"needs a CUDA device, runs on cpu"}


@pytest.mark.parametrize("name", ["torch", "triton", "numba"])
def test_the_suite_passes(name: str) -> None:
    record = run_suite([name], "cpu")
    result = record["backends"][name]
    assert result["status"] == "passed", result
    lines = {line["operation"]: line for line in result["results"] if line["backend"] == name}
    assert set(lines) == {"remap", "dcp_filter", "safe_lengths", "flat_row_view"}
    for line in lines.values():
        assert line["passed"] > 0
        assert line["failed"] == 0
        assert set(line["skip_reasons"]) <= ONLY_WITH_A_CARD
