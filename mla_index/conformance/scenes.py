"""The configurations that the tests on CUDA devices go through, laid out on a device."""

from __future__ import annotations

from mla_index.conformance.checks import Run, Scene, prepare
from mla_index.conformance.generate import random_problem
from mla_index.conformance.modes import MODES
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Target

CONFIGURATIONS: dict[str, tuple[Run, tuple[str, ...], tuple[int, int, int] | None]] = {
    **{mode: (run, (), None) for mode, run in MODES.items()},
    "filter": (Run(op="dcp_filter", compact=True, counts=True), (), (4, 2, 16)),
    "everything": (
        Run(compact=True, safe=True),
        ("request_rows", "token_limits", "workspace"),
        (4, 1, 16),
    ),
}
"""By name: what is asked for, features of the problem, and its ranks."""


def problem(
    seed: int, name: str, rows: int = 64, topk: int = 512, *, block_size: int = 64
) -> Problem:
    """A problem of a configuration."""
    _, features, dcp = CONFIGURATIONS[name]
    return random_problem(
        seed, rows, topk, features=features, dcp=dcp, width=9, block_size=block_size
    )


def scene(target: Target, name: str, seed: int = 290, *, block_size: int = 64) -> Scene:
    """The same on the target's device, ready to be called."""
    run, _, _ = CONFIGURATIONS[name]
    return prepare(problem(seed, name, block_size=block_size), run, target)
