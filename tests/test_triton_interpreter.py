"""Every kernel of the triton backend, run in Triton's interpreter, against the torch backend.

The conformance suite fixes what the operations compute; here the ways in which a row can be cut
are each taken once, at widths and numbers of rows that reach them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from conftest import needed

needed("triton")

SWEEP = """
    import json
    import torch
    import mla_index
    from mla_index.backends.triton import launch, variants

    seen = []
    run = launch.Interpreter.__call__

    def recorded(self, index, programs, arguments):
        constants = self.variants[index].constants
        if "PLAN" in constants:
            seen.append([constants[k] for k in ("PLAN", "TILE", "TAIL", "DENSE", "COMPACT")])
        run(self, index, programs, arguments)

    launch.Interpreter.__call__ = recorded
    wrong = []
    generator = torch.Generator().manual_seed(0)

    def random(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    def compare(width, column_stride, dtype, block_size=64, **wants):
        tokens = random(-40, 400, 3, width * column_stride, dtype=dtype)[:, ::column_stride]
        table, request = random(-1, 50, 3, 6), random(-1, 4, 3, dtype=torch.int64)
        tokens[1] = -1  # no entry is valid, and in the last row every one
        tokens[2] = random(0, 6 * block_size, width, dtype=dtype)
        request[2], table[2] = 2, random(0, 50, 6)
        results = [
            mla_index.remap(
                request, table, tokens, backend=backend, block_size=block_size, **wants
            )
            for backend in ("triton", "torch")
        ]
        for name, ours, theirs in zip(mla_index.Remapped._fields, *results):
            if theirs is not None and not torch.equal(ours, theirs):
                wrong.append([width, column_stride, str(dtype), block_size, str(wants), name])

    wants = ({}, {"counts": True}, {"compact": True}, {"compact": True, "safe_lengths": True})
    for want in wants:
        for width in (1, 31, 64, 512, 1024, 2048, 2051, 2176, 4096, 4224, 6200):
            compare(width, 1, torch.int32, **want)
        for width in (5, 512, 4112):
            compare(width, 2, torch.int64, **want)

    # Every step of every table, as if these rows were so many: the widest row of the class, one
    # that leaves over a tail, one that leaves over more.
    usual, tables = variants.steps, []
    for table, dtype, want in (
        (variants.PLAIN, torch.int32, {}),
        (variants.COMPACT, torch.int32, {"compact": True, "counts": True}),
        (variants.COMPACT_WIDE, torch.int64, {"compact": True, "safe_lengths": True}),
    ):
        for topk, steps in table.items():
            for number, step in enumerate(steps):
                variants.steps = lambda spec: (step,)
                for width in (topk, topk // 2 + 128, topk // 2 + 129):
                    compare(width, 1, dtype, block_size=32 + number, **want)
                shapes = filter(None, (step.general, step.even))
                tables += [[s.plan, s.tile, s.tail, True, bool(want)] for s in shapes]
    variants.steps = usual
    print(json.dumps({"wrong": wrong, "seen": seen, "tables": tables}))
"""


@pytest.fixture(scope="module")
def sweep() -> dict[str, list[list[object]]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SWEEP)],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_every_plan_gives_the_bits_of_torch(sweep: dict[str, list[list[object]]]) -> None:
    assert sweep["wrong"] == []


def test_every_shape_of_the_tables_was_taken(sweep: dict[str, list[list[object]]]) -> None:
    tables = {tuple(shape) for shape in sweep["tables"]}
    assert {plan for plan, *_ in tables} == {"tile", "walk", "split"}
    assert tables <= {tuple(shape) for shape in sweep["seen"]}


def test_every_plan_was_taken(sweep: dict[str, list[list[object]]]) -> None:
    """By rows of any strides, which the last step's general shape serves, as well."""
    taken = {
        (plan, "masked" if tail == tile else "whole", bool(dense), bool(compact))
        for plan, tile, tail, dense, compact in sweep["seen"]
    }
    masked = {
        (plan, "masked", dense, compact)
        for plan in ("tile", "walk", "split")
        for dense in (False, True)
        for compact in (False, True)
    }
    whole = {(plan, "whole", True, True) for plan in ("tile", "walk", "split")}
    never = {("split", "masked", False, True)}  # compacted, the last step walks, or is one tile
    assert taken == (masked - never) | whole | {("tile", "whole", True, False)}
