"""How many kernels are compiled: a serving process must not compile again for what it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from mla_index.conformance.checks import Run, Scene, prepare
from mla_index.conformance.generate import random_problem
from mla_index.conformance.layouts import Layout
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Failure, Job, NotTaken, Target

CONFIGURATIONS = {
    "plain": (Run(), (), None),
    "counts": (Run(counts=True), (), None),
    "compact": (Run(compact=True, counts=True), (), None),
    "filter": (Run(op="dcp_filter", compact=True, counts=True), (), (4, 2, 16)),
    "everything": (
        Run(compact=True, safe=True),
        ("request_rows", "token_limits", "workspace"),
        (4, 1, 16),
    ),
}

TALL = 30
"""At full scale the largest call's rows are given so often: backends change kernels with T."""

MOVED = ("token_indices", "out", "block_table", "req_id", "counts_out", "lengths_out")


def jobs() -> Iterator[Job]:
    """Every configuration at an even and an odd width, and calls with nothing to do."""
    tags = ("compiling", "alignment")
    for name, (run, _, _) in CONFIGURATIONS.items():
        for width in ("even", "odd"):
            check = partial(check_nothing_compiles_after_warm, name, width)
            yield Job(f"fr27-nothing-compiles-{name}-{width}", run.op, tags, check)
    yield Job("fr07-nothing-compiles", "remap", (*tags, "empty"), check_no_kernel_for_nothing)


def _compiled(target: Target) -> int:
    count = target.compiled_kernels()
    if count is None:
        raise NotTaken(f"{target.backend} has no compiled_kernels() to count by")
    return count


def check_nothing_compiles_after_warm(name: str, width: str, target: Target) -> None:
    """Widths × row counts × alignments after `warm`: right, and not one kernel more."""
    _compiled(target)
    run, features, dcp = CONFIGURATIONS[name]
    topk = {"even": 2048, "odd": 2051}[width] if target.full else {"even": 32, "odd": 35}[width]
    sides = range(1, 51) if target.full else (1, 3, 5)
    largest = random_problem(2700, sides[-1], topk, width=sides[-1], features=features, dcp=dcp)
    warmed = _warm(target, prepare(_part(largest, 1, 1), run, target, answer=False))
    for columns in sides:
        for offset, rows in enumerate(sides):
            if target.full and (columns + rows) % 5:
                continue  # every fifth pair: all widths, all row counts, all alignments
            problem = replace(
                _part(largest, rows, columns),
                pad=-1 - offset % 3,
                num_slots=None if offset % 2 else 64 * 30 + columns,
                block_stride_rows=64 + columns,
            )
            look = {n: Layout(offset=(offset + i) % 5) for i, n in enumerate(MOVED)}
            look["out"] = Layout(offset=offset % 5, gap=columns % 3)
            scene = prepare(problem, replace(run, layouts=look), target, answer=rows < 4)
            scene.call(target.backend)
            if rows < 4:
                scene.verify()
    if target.full:
        _check_repeated(largest, run, target)
    if _compiled(target) != warmed:
        raise Failure(f"{_compiled(target) - warmed} kernels were compiled after warm()")


def _part(problem: Problem, rows: int, columns: int) -> Problem:
    """The first rows, and the first columns of the table."""
    return replace(
        problem,
        tokens=problem.tokens[:rows],
        table=[row[:columns] for row in problem.table],
        req_id=problem.req_id and problem.req_id[:rows],
        token_limits=problem.token_limits and problem.token_limits[:rows],
        ws_ids=problem.ws_ids and problem.ws_ids[:rows],
    )


def _check_repeated(problem: Problem, run: Run, target: Target) -> None:
    """The problem `TALL` times over in one call."""
    once = prepare(problem, run, target).expected
    over = {
        name: None if values is None else values.repeat(TALL, *[1] * (values.dim() - 1))
        for name, values in once.items()
    }
    scene = replace(prepare(_repeated(problem, TALL), run, target, answer=False), expected=over)
    scene.call(target.backend)
    scene.verify()


def _repeated(problem: Problem, times: int) -> Problem:
    """The same rows over and over."""

    def over(values: Sequence[int] | None) -> list[int] | None:
        return None if values is None else [*values] * times

    return replace(
        problem,
        tokens=[*problem.tokens] * times,
        req_id=over(problem.req_id),
        token_limits=over(problem.token_limits),
        ws_ids=over(problem.ws_ids),
    )


def _warm(target: Target, scene: Scene) -> int:
    """Warm the configuration, check what `warm` tells, and count the kernels there are now."""
    before = _compiled(target)
    warm = target.choose(scene.run.op, scene.spec).kernel.warm
    told = warm() if warm else 0
    warmed = _compiled(target)
    if told < warmed - before:
        raise Failure(f"warm() says {told} kernels, but {warmed - before} were compiled")
    if warm is not None and warm() != told:
        raise Failure("a second warm() tells another number")
    if _compiled(target) != warmed:
        raise Failure(f"a second warm() compiled {_compiled(target) - warmed} more")
    return warmed


def check_no_kernel_for_nothing(target: Target) -> None:
    """`T = 0` and `K = 0` compile nothing, of a configuration never seen before."""
    before = _compiled(target)
    for rows, topk in ((0, 2048), (3, 0), (0, 0)):
        problem = random_problem(27, rows, topk, block_size=77)
        scene = prepare(problem, Run(compact=True, counts=True), target)
        scene.call(target.backend)
        scene.verify()
    if _compiled(target) != before:
        raise Failure(f"{_compiled(target) - before} kernels were compiled for empty calls")
