"""Generated calls on every backend under test, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_index.conformance import strategies
from mla_index.conformance.checks import check_remap, check_safe_lengths
from mla_index.conformance.target import NotTaken, Target


def _for_all(target: Target, calls: st.SearchStrategy[Any], check: Callable[..., None]) -> None:
    """Run `check` on generated calls: the same ones every time, without a deadline."""
    ran: list[bool] = []
    declined: list[NotTaken] = []

    @settings(
        max_examples=target.examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls)
    def each(arguments: tuple[Any, ...]) -> None:
        try:
            check(*arguments)
            ran.append(True)
        except NotTaken as reason:
            declined.append(reason)

    each()
    if not ran:
        raise declined[0]


@pytest.mark.mla_op("remap")
def test_remap(target: Target) -> None:
    """Both remap and dcp_filter, whatever is given."""
    _for_all(
        target,
        strategies.remap_calls(),
        lambda problem, run: check_remap(problem, run, None, target),
    )


@pytest.mark.mla_op("safe_lengths")
def test_safe_lengths(target: Target) -> None:
    """The operation of its own, whatever is given."""
    _for_all(
        target,
        strategies.safe_calls(),
        lambda slots, counts, run: check_safe_lengths(slots, counts, run, target),
    )
