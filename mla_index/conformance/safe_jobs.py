"""The cases of `safe_lengths`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

from mla_index.conformance.checks import Run, check_safe_lengths
from mla_index.conformance.layouts import Layout
from mla_index.conformance.modes import I32, I64
from mla_index.conformance.target import Job

LOOKS = {
    "dense": {},
    "pitched": {"slots": Layout(gap=5), "counts": Layout(step=3), "out": Layout(step=2)},
    "transposed": {"slots": Layout(transposed=True, gap=2)},
    "odd-pointers": {n: Layout(offset=1) for n in ("slots", "counts", "out")},
    "expanded-counts": {"counts": Layout(expanded=(0,))},
}


def _cases(full: bool) -> Iterator[tuple[str, list[list[int]], list[int]]]:
    random = Random(15)  # noqa: S311 (test data)
    yield "fr15-safe-lengths", [[-1, -1], [5, -1]], [0, 1]
    yield "fr16-negative-counts", [[9, 9], [8, 8], [7, 7]], [-1, 0, 3]
    yield "one-column", [[-1], [4], [-1]], [0, 1, 0]
    yield "no-rows", [], []
    yield "ends", [[-1, 3]] * 6, [-(2**31), -1, 0, 1, 2, 2**31 - 1]
    rows, topk = (65_536, 3) if full else (67, 3)
    counts = [random.choice((-1, 0, 0, 1, 2, 3)) for _ in range(rows)]
    yield "many-rows", [[random.randrange(100) for _ in range(topk)] for _ in counts], counts


def jobs(full: bool) -> Iterator[Job]:
    """Every case in every mix of dtypes, the lengths given and allocated; and every layout."""
    for name, slots, counts in _cases(full):
        for slot_dtype in (I32, I64):
            for count_dtype in (I32, I64):
                outputs = "given" if slot_dtype == count_dtype else "allocated"
                dtypes = {"slots": slot_dtype, "counts": count_dtype}
                bits = "-".join(str(d).removeprefix("torch.int") for d in (slot_dtype, count_dtype))
                run = Run(dtypes=dtypes, outputs=outputs)
                check = partial(check_safe_lengths, slots, counts, run)
                yield Job(f"{name}:{bits}", "safe_lengths", ("safe-lengths", "counts"), check)
    for look, layouts in LOOKS.items():
        slots, counts = [[9, 8, -1], [-1, -1, -1], [7, -1, -1], [6, 6, 6]], [2, 0, -4, 3]
        if look == "expanded-counts":
            counts = [0] * 4
        check = partial(check_safe_lengths, slots, counts, Run(layouts=layouts))
        yield Job(f"safe-layout-{look}", "safe_lengths", ("strides", look), check)
