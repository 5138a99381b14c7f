"""Running one call on a backend and comparing every bit of memory that it could have touched.

Each tensor lies inside a larger buffer. Inputs are surrounded by values that would look right if
they were read, outputs by a canary; after the call whole buffers are compared, so that a write
beside an output, or into an input, is seen as well as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

import mla_index
from mla_index import selector
from mla_index.conformance import oracle
from mla_index.conformance.layouts import DENSE, Layout, Placed, place
from mla_index.conformance.oracle import Problem
from mla_index.conformance.target import Failure, Target
from mla_index.specs import DTYPE_MAX, Dcp, PrefillWorkspace, RemapSpec, SafeLengthsSpec

CANARY = {torch.int32: -0x5A5A5A5B, torch.int64: -0x5A5A5A5A5A5A5A5B}
"""What outputs and their surroundings hold before a call; no case computes it."""

PLAUSIBLE = {
    "token_indices": 5,
    "block_table": 3,
    "req_id": 0,
    "request_rows": 0,
    "token_limits": 1 << 30,
    "ws_request_ids": 0,
    "ws_starts": 7,
}
"""What surrounds each input: read by mistake, it would give a slot."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a problem is put to a backend.

    Args:
        op: `remap` or `dcp_filter`.
        compact, counts, safe: what is asked for.
        dtypes: by tensor name; int32 where nothing is said, int64 wherever values need it. `out`
            without an entry has the tokens' dtype.
        layouts: by tensor name; dense where nothing is said.
        outputs: `given`, `allocated` (by the call) or `in_place` (`out` is `token_indices`).
        repeats: calls, each with the outputs poisoned again.
    """

    op: str = "remap"
    compact: bool = False
    counts: bool = False
    safe: bool = False
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    outputs: str = "given"
    repeats: int = 1

    def layout(self, name: str) -> Layout:
        """The layout of a tensor."""
        return self.layouts.get(name, DENSE)


@dataclass(frozen=True, slots=True)
class Literal:
    """Expected values written down by hand: they check the oracle as well as the backend."""

    slots: Sequence[Sequence[int]]
    counts: Sequence[int]
    compacted: Sequence[Sequence[int]] | None = None


# --- remap and dcp_filter -----------------------------------------------------------------------


@dataclass(slots=True)
class Scene:
    """A problem laid out on the device, ready to be called again and again.

    Args:
        tensors, outputs: inputs and given outputs by name, in their buffers.
        expected: what each result must be, on the host; None where it is not asked for.
    """

    problem: Problem
    run: Run
    spec: RemapSpec
    tensors: dict[str, Placed]
    outputs: dict[str, Placed]
    expected: dict[str, Tensor | None]

    def call(self, backend: str) -> mla_index.Remapped:
        """The call through the public operation."""
        return call(self.problem, self.run, self.spec, self.tensors, self.outputs, backend)

    def poison(self) -> None:
        """Canaries in every output again."""
        for placed in self.outputs.values():
            if self.tensors.get("token_indices") is not placed:
                placed.buffer.fill_(CANARY[placed.buffer.dtype])

    def verify(self) -> None:
        """Every given output holds what it must, and its surroundings their canaries."""
        for name, placed in self.outputs.items():
            expected = self.expected[name]
            if expected is not None:
                canaries = torch.full_like(placed.buffer, CANARY[placed.buffer.dtype])
                check_buffer(name, placed, canaries, expected)


def prepare(problem: Problem, run: Run, target: Target, *, answer: bool = True) -> Scene:
    """Lay a problem out on the device and compute what must come of it (unless not wanted).

    Raises:
        NotTaken: the backend declares that it does not serve the configuration.
    """
    tensors = place_inputs(problem, run, target.device)
    spec = spec_of(problem, run, tensors)
    if problem.shape[0] and problem.shape[1]:
        target.choose(run.op, spec)
    expected = _answer(problem, run, spec) if answer else {}
    outputs = place_outputs(problem, run, spec, tensors, target.device)
    return Scene(problem, run, spec, tensors, outputs, expected)


def _answer(problem: Problem, run: Run, spec: RemapSpec) -> dict[str, Tensor | None]:
    """The oracle's answer by the names of the outputs."""
    slots, counts, lengths = oracle.remap(
        problem,
        compact=run.compact,
        safe_lengths=run.safe,
        slot_max=DTYPE_MAX[spec.slot_dtype],
    )
    return {
        "out": torch.tensor(slots, dtype=spec.slot_dtype).reshape(problem.shape),
        "counts_out": torch.tensor(counts, dtype=torch.int32) if spec.counts else None,
        "lengths_out": torch.tensor(lengths, dtype=torch.int32) if run.safe else None,
    }


def check_remap(
    problem: Problem | Callable[[], Problem],
    run: Run,
    literal: Literal | None,
    target: Target,
) -> None:
    """Put `problem` to the backend as `run` says and compare all memory with the oracle's."""
    problem = problem() if callable(problem) else problem
    scene = prepare(problem, run, target)
    if literal is not None:
        _check_oracle(scene, literal)
    launched = bool(problem.shape[0] and problem.shape[1])
    inputs = {name: placed.buffer.clone() for name, placed in scene.tensors.items()}
    for _ in range(run.repeats):
        scene.poison()
        before = {name: placed.buffer.clone() for name, placed in scene.outputs.items()}
        with selector.record_launches() as launches:
            result = scene.call(target.backend)
        launch = selector.Launch(target.backend, run.op, scene.spec)
        expect_launches(launches, [launch] * launched)
        for (name, values), tensor in zip(scene.expected.items(), result, strict=True):
            _check_result(name, tensor, values, scene.outputs, before)
        for name, before_call in inputs.items():
            if not (run.outputs == "in_place" and name == "token_indices"):
                check_unchanged(name, scene.tensors[name], before_call)
        if run.outputs == "in_place":
            scene.tensors["token_indices"].buffer.copy_(inputs["token_indices"])


def _check_result(
    name: str,
    tensor: Tensor | None,
    expected: Tensor | None,
    outputs: Mapping[str, Placed],
    before: Mapping[str, Tensor],
) -> None:
    """One of the three results: there or None, itself if it was given, with the right bits."""
    if expected is None:
        if tensor is not None:
            raise Failure(f"{name} was not asked for, got a tensor")
        return
    if tensor is None:
        raise Failure(f"{name} was asked for, got None")
    if name in outputs:
        if tensor is not outputs[name].view:
            raise Failure(f"{name} was given, but another tensor came back")
        check_buffer(name, outputs[name], before[name], expected)
        return
    if tensor.dtype != expected.dtype:
        raise Failure(f"{name} must be {expected.dtype}, got {tensor.dtype}")
    differences(name, tensor.cpu(), expected)


def _check_oracle(scene: Scene, literal: Literal) -> None:
    """The oracle against the values written down by hand (padded to the problem's width)."""
    run, pad, topk = scene.run, scene.problem.pad, scene.problem.shape[1]
    rows = literal.slots
    if run.compact:
        valid = [[slot for slot in row if slot != pad] for row in rows]
        rows = valid if literal.compacted is None else literal.compacted
    slots = [list(row) + [pad] * (topk - len(row)) for row in rows]
    if run.safe:
        for row, count in zip(slots, literal.counts, strict=True):
            row[0] = row[0] if count else 0
    found, counts = scene.expected["out"], scene.expected["counts_out"]
    if found is None or found.tolist() != slots:
        raise RuntimeError(f"the oracle says {found}, the case {slots}")
    if counts is not None and counts.tolist() != list(literal.counts):
        raise RuntimeError(f"the oracle counts {counts}, the case {literal.counts}")


def place_inputs(problem: Problem, run: Run, device: torch.device) -> dict[str, Placed]:
    """Every input that the problem has, in memory as `run` says."""
    rows, topk = problem.shape
    table_rows, width = problem.table_shape
    content: dict[str, tuple[Sequence[object] | None, tuple[int, ...]]] = {
        "token_indices": (problem.tokens, (rows, topk)),
        "block_table": (problem.table, (table_rows, width)),
    }
    for name, values in (
        ("req_id", problem.req_id),
        ("request_rows", problem.request_rows),
        ("token_limits", problem.token_limits),
        ("ws_request_ids", problem.ws_ids),
        ("ws_starts", problem.ws_starts),
    ):
        if values is not None:
            content[name] = (values, (len(values),))
    return {
        name: place(
            values,
            shape,
            _wide_enough(values, run.dtypes.get(name, torch.int32)),
            device,
            run.layout(name),
            PLAUSIBLE[name],
        )
        for name, (values, shape) in content.items()
    }


def _wide_enough(values: Sequence[object] | None, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or int64 if some value needs it."""
    if not values:
        return dtype
    flat: list[int] = []
    for value in values:
        flat.extend(value) if isinstance(value, Sequence) else flat.append(value)  # type: ignore[arg-type]
    limit = DTYPE_MAX[dtype]
    fits = not flat or (max(flat) <= limit and min(flat) >= -limit - 1)
    return dtype if fits else torch.int64


def spec_of(problem: Problem, run: Run, tensors: Mapping[str, Placed]) -> RemapSpec:
    """The configuration that the call will ask for."""
    token_dtype = tensors["token_indices"].view.dtype
    size, _, interleave = problem.dcp or (1, 0, 1)
    return RemapSpec(
        problem.block_size,
        problem.shape[1],
        token_dtype=token_dtype,
        table_dtype=tensors["block_table"].view.dtype,
        slot_dtype=run.dtypes.get("out", token_dtype),
        dcp_size=size,
        dcp_interleave=interleave,
        compact=run.compact,
        counts=run.counts,
        safe_lengths=run.safe,
        req_id=problem.req_id is not None,
        request_rows=problem.request_rows is not None,
        token_limits=problem.token_limits is not None,
        workspace=problem.ws_ids is not None,
    )


def place_outputs(
    problem: Problem,
    run: Run,
    spec: RemapSpec,
    tensors: Mapping[str, Placed],
    device: torch.device,
) -> dict[str, Placed]:
    """The outputs that the call is given, full of canaries."""
    if run.outputs == "allocated":
        return {}
    rows, topk = problem.shape

    def poisoned(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Placed:
        return place(None, shape, dtype, device, run.layout(name), CANARY[dtype])

    in_place = run.outputs == "in_place"
    given = {
        "out": tensors["token_indices"]
        if in_place
        else poisoned("out", (rows, topk), spec.slot_dtype)
    }
    if spec.counts:
        given["counts_out"] = poisoned("counts_out", (rows,), torch.int32)
    if spec.safe_lengths:
        given["lengths_out"] = poisoned("lengths_out", (rows,), torch.int32)
    return given


def call(
    problem: Problem,
    run: Run,
    spec: RemapSpec,
    tensors: Mapping[str, Placed],
    outputs: Mapping[str, Placed],
    backend: str,
) -> mla_index.Remapped:
    """The call through the public operation."""
    views = {name: placed.view for name, placed in tensors.items()}
    given = {name: placed.view for name, placed in outputs.items()}
    dcp = None if problem.dcp is None else Dcp(*problem.dcp)
    keywords: dict[str, object] = {
        "block_size": problem.block_size,
        "block_stride_rows": problem.block_stride_rows,
        "request_rows": views.get("request_rows"),
        "token_limits": views.get("token_limits"),
        "num_slots": problem.num_slots,
        "compact": run.compact,
        "counts": run.counts,
        "safe_lengths": run.safe,
        "pad": problem.pad,
        "backend": backend,
        **given,
    }
    if problem.ws_ids is not None:
        keywords["workspace"] = PrefillWorkspace(
            views["ws_request_ids"], views["ws_starts"], problem.rank_stride, problem.ws_num_rows
        )
    if "out" not in given and spec.slot_dtype != spec.token_dtype:
        keywords["out_dtype"] = spec.slot_dtype
    arguments = [views.get("req_id"), views["block_table"], views["token_indices"]]
    with current_device_unchanged(views["token_indices"].device):
        if run.op == "dcp_filter":
            return mla_index.dcp_filter(*arguments, dcp, **keywords)  # type: ignore
        return mla_index.remap(*arguments, dcp=dcp, **keywords)  # type: ignore


@contextmanager
def current_device_unchanged(device: torch.device) -> Iterator[None]:
    """Fail if the block leaves another device current, of the type of `device`, than it found."""
    if device.type == "cpu":
        yield
        return
    current = torch.get_device_module(device).current_device
    before = current()
    yield
    if current() != before:
        raise Failure(f"the current device was {before} before the call, and is {current()} now")


# --- safe_lengths -------------------------------------------------------------------------------


def check_safe_lengths(
    slots: Sequence[Sequence[int]], counts: Sequence[int], run: Run, target: Target
) -> None:
    """The operation of its own: lengths, the dummy slot in place, counts untouched."""
    shape = (len(slots), len(slots[0]) if slots else 3)
    slot_dtype, count_dtype = (run.dtypes.get(n, torch.int32) for n in ("slots", "counts"))
    spec = SafeLengthsSpec(slot_dtype, count_dtype)
    if slots:
        target.choose("safe_lengths", spec)
    canary = CANARY[slot_dtype]
    placed = place(slots, shape, slot_dtype, target.device, run.layout("slots"), canary)
    counted = place(counts, shape[:1], count_dtype, target.device, run.layout("counts"), 0)
    lengths = place(
        None, shape[:1], count_dtype, target.device, run.layout("out"), CANARY[count_dtype]
    )
    before = placed.buffer.clone(), counted.buffer.clone(), lengths.buffer.clone()
    answer = oracle.safe_lengths(slots, counts)
    rows = torch.tensor(answer[0], dtype=slot_dtype).reshape(shape)
    expected = torch.tensor(answer[1], dtype=count_dtype)
    out = lengths.view if run.outputs == "given" else None
    unchanged = current_device_unchanged(target.device)
    with selector.record_launches() as launches, unchanged:
        result = mla_index.safe_lengths(placed.view, counted.view, out=out, backend=target.backend)
    launch = selector.Launch(target.backend, "safe_lengths", spec)
    expect_launches(launches, [launch] if slots else [])
    if out is None:
        if result.dtype != count_dtype:
            raise Failure(f"lengths must be {count_dtype}, got {result.dtype}")
        differences("lengths", result.cpu(), expected)
    else:
        if result is not out:
            raise Failure("out was given, but another tensor came back")
        check_buffer("lengths", lengths, before[2], expected)
    check_buffer("slots", placed, before[0], rows)
    check_unchanged("counts", counted, before[1])


# --- comparing memory ---------------------------------------------------------------------------


def expect_launches(seen: Sequence[selector.Launch], expected: Sequence[selector.Launch]) -> None:
    """The launches that were recorded: one, of the backend under test, or none for empty shapes."""
    if list(seen) != list(expected):
        shown = ", ".join(f"{launch.backend}'s {launch.op}" for launch in seen)
        raise Failure(f"launched {shown or 'nothing'}: {list(seen)}, must be {list(expected)}")


def check_buffer(name: str, placed: Placed, before: Tensor, values: Tensor) -> None:
    """The view holds `values` (on the host), and its surroundings what they held before."""
    expected = before.clone()
    view = placed.view_of(expected)
    if view.numel():
        view.copy_(values)
    if torch.equal(placed.buffer, expected):
        return
    differences(name, placed.view.cpu(), view.cpu())
    at = int((placed.buffer != expected).nonzero()[0, 0])
    raise Failure(
        f"{name}: wrote outside its view, at element {at - int(placed.view.storage_offset())} "
        f"from its start (shape {tuple(view.shape)}, strides {view.stride()})"
    )


def check_unchanged(name: str, placed: Placed, before: Tensor) -> None:
    """An input, with its surroundings, is as it was."""
    if not torch.equal(placed.buffer, before):
        at = int((placed.buffer != before).nonzero()[0, 0])
        raise Failure(
            f"{name} is an input and was changed, at element "
            f"{at - int(placed.view.storage_offset())} from its start"
        )


def differences(name: str, got: Tensor, expected: Tensor) -> None:
    """Raise with the first element that differs, and how many do."""
    if got.shape != expected.shape:
        raise Failure(f"{name} must have shape {tuple(expected.shape)}, got {tuple(got.shape)}")
    wrong = (got != expected).nonzero()
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise Failure(
            f"{name}{list(at)} is {int(got[at])}, must be {int(expected[at])} "
            f"({len(wrong)} of {got.numel()} differ)"
        )
