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
    import itertools, json
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

    def compare(rows, width, column_stride, dtype, **wants):
        tokens = torch.randint(
            -40, 400, (rows, width * column_stride), generator=generator, dtype=dtype
        )[:, ::column_stride]
        table = torch.randint(-1, 50, (3, 6), generator=generator, dtype=torch.int32)
        request = torch.randint(-1, 4, (rows,), generator=generator, dtype=torch.int64)
        tokens[rows // 2] = -1
        results = [
            mla_index.remap(request, table, tokens, backend=backend, **{"block_size": 64, **wants})
            for backend in ("triton", "torch")
        ]
        for name, ours, theirs in zip(mla_index.Remapped._fields, *results):
            if theirs is not None and not torch.equal(ours, theirs):
                wrong.append([rows, width, column_stride, str(dtype), str(wants), name])

    wants = ({}, {"counts": True}, {"compact": True}, {"compact": True, "safe_lengths": True})
    for want in wants:
        for width in (1, 31, 64, 512, 1024, 2048, 2051, 2176, 4096):
            compare(2, width, 1, torch.int32, **want)
        for width in (5, 512, 4112):
            compare(3, width, 2, torch.int64, **want)
        for width in (4224, 6144, 6200):
            compare(2, width, 1, torch.int32, **want)
    usual = variants.steps
    for size, step in enumerate((-3, -2, -1)):  # as if two rows were more
        variants.steps = lambda spec: (usual(spec)[step:] or usual(spec))[:1]
        for want in wants:
            for width in (1024, 2048, 2176, 4000, 4224, 4500, 6144, 8200, 12288):
                compare(2, width, 1, torch.int64, block_size=32 + size, **want)
            compare(2, 4200, 2, torch.int32, block_size=32 + size, **want)
    for want in wants:
        compare(2, 16400, 1, torch.int32, block_size=32, **want)
    print(json.dumps({"wrong": wrong, "seen": seen}))
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


def test_every_plan_was_taken(sweep: dict[str, list[list[object]]]) -> None:
    """Masked and not, dense and not, compacting and not, as far as a plan has them."""
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
    assert taken == masked | whole | {("tile", "whole", True, False)}
