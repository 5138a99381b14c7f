"""Calls that must be refused, as data: what is wrong, the error, and what its message must name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

import mla_index
from mla_index import selector
from mla_index.conformance.checks import CANARY
from mla_index.conformance.modes import I32, I64
from mla_index.conformance.target import Failure, Job, Target
from mla_index.specs import Dcp, PrefillWorkspace

Make = Callable[[torch.device], dict[str, object]]
"""Changes to the arguments of a good call, made on the device under test."""

LIMIT = 2**31
SHAPES: dict[str, tuple[int, ...]] = {
    "out": (2, 4),
    "token_indices": (2, 4),
    "block_table": (2, 2),
}
"""Shapes of the good call that is changed; everything else is [2]."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One bad call: `named` is what the message must name; empty: its own constructor refuses."""

    make: Make
    error: type[Exception]
    named: tuple[str, ...]
    ops: tuple[str, ...] = field(default=("remap", "dcp_filter"))


def ints(*shape: int, dtype: torch.dtype = I32) -> Callable[[torch.device], Tensor]:
    """Zeros of this shape."""
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def _values(**values: object) -> Make:
    """Keyword arguments as they are; callables are given the device."""

    def make(device: torch.device) -> dict[str, object]:
        return {k: v(device) if callable(v) else v for k, v in values.items()}

    return make


def _value(message: str, **values: object) -> Refusal:
    return Refusal(_values(**values), ValueError, tuple(message.split("|")))


def _type(message: str, **values: object) -> Refusal:
    return Refusal(_values(**values), TypeError, tuple(message.split("|")))


def _workspace(device: torch.device, rows: int = 2, **values: int) -> PrefillWorkspace:
    ids, starts = (torch.zeros(n, dtype=I32, device=device) for n in (rows, 1))
    return PrefillWorkspace(ids, starts, **values)


def _overlapping(**shapes: tuple[int, ...]) -> Make:
    """Tensors of these shapes in one buffer, each starting one element after the one before."""

    def make(device: torch.device) -> dict[str, object]:
        buffer = torch.zeros(32, dtype=I32, device=device)
        return {
            name: buffer[at : at + prod(shape)].view(shape)
            for at, (name, shape) in enumerate(shapes.items())
        }

    return make


def _in_place_compact(device: torch.device) -> dict[str, object]:
    tokens = torch.zeros(2, 4, dtype=I32, device=device)
    return {"token_indices": tokens, "out": tokens, "compact": True}


def _in_place_other_pitch(device: torch.device) -> dict[str, object]:
    buffer = torch.zeros(16, dtype=I32, device=device)
    return {
        "token_indices": buffer.as_strided((2, 4), (4, 1)),
        "out": buffer.as_strided((2, 4), (5, 1)),
        "compact": False,
    }


REFUSALS: dict[str, Refusal] = {
    "fr04-rows-differ": Refusal(
        _values(
            req_id=ints(3), token_indices=ints(1, 128), out=None, counts_out=None, lengths_out=None
        ),
        ValueError,
        ("req_id", "must cover the same tokens", "3", "1"),
    ),
    "block-size-0": _value("block_size|0", block_size=0),
    "block-size-negative": _value("block_size|-64", block_size=-64),
    "block-size-above": _value(f"block_size|{LIMIT}", block_size=LIMIT),
    "block-size-bool": _type("block_size|bool", block_size=True),
    "block-size-float": _type("block_size|float", block_size=64.0),
    "block-stride-below-block": _value("block_stride_rows|63|64", block_stride_rows=63),
    "block-stride-above": _value(f"block_stride_rows|{LIMIT}", block_stride_rows=LIMIT),
    "block-stride-bool": _type("block_stride_rows|bool", block_stride_rows=True),
    "num-slots-negative": _value("num_slots|-1", num_slots=-1),
    "num-slots-float": _type("num_slots|float", num_slots=1.5),
    "pad-beyond-int32": _value(f"pad|{LIMIT}|int32", pad=LIMIT),
    "pad-below-int32": _value(f"pad|{-LIMIT - 1}|int32", pad=-LIMIT - 1),
    "pad-bool": _type("pad|bool", pad=True),
    "compact-not-bool": _type("compact|int", compact=1),
    "counts-not-bool": _type("counts|Tensor", counts=ints(2)),
    "safe-lengths-not-bool": _type("safe_lengths|int", safe_lengths=1),
    "safe-lengths-without-compact": _value(
        "safe_lengths|compact", safe_lengths=True, compact=False
    ),
    "lengths-out-without-compact": _value(
        "safe_lengths|compact", lengths_out=ints(2), compact=False
    ),
    "safe-lengths-no-column": _value(
        "token_indices|column", safe_lengths=True, compact=True, token_indices=ints(2, 0), out=None
    ),
    "token-indices-1d": _value("token_indices|(2,)", token_indices=ints(2), out=None),
    "token-indices-3d": _value("token_indices|(2, 4, 1)", token_indices=ints(2, 4, 1), out=None),
    "token-indices-float": _type(
        "token_indices|float32", token_indices=ints(2, 4, dtype=torch.float32)
    ),
    "token-indices-int16": _type(
        "token_indices|int16", token_indices=ints(2, 4, dtype=torch.int16)
    ),
    "token-indices-list": _type("token_indices|list", token_indices=[[0] * 4] * 2),
    "block-table-1d": _value("block_table|(2,)", block_table=ints(2)),
    "block-table-uint8": _type("block_table|uint8", block_table=ints(2, 2, dtype=torch.uint8)),
    "block-table-none": _type("block_table|None", block_table=None),
    "req-id-2d": _value("req_id|(2, 1)", req_id=ints(2, 1)),
    "req-id-bool": _type("req_id|bool", req_id=ints(2, dtype=torch.bool)),
    "req-id-list": _type("req_id|list", req_id=[0, 0]),
    "request-rows-2d": _value("request_rows|(2, 2)", request_rows=ints(2, 2)),
    "request-rows-float": _type("request_rows|float", request_rows=ints(2, dtype=torch.float64)),
    "token-limits-length": _value("token_limits|3|2", token_limits=ints(3)),
    "token-limits-2d": _value("token_limits|(2, 1)", token_limits=ints(2, 1)),
    "token-limits-float": _type("token_limits|float", token_limits=ints(2, dtype=torch.float16)),
    "workspace-not-one": _type("workspace|tuple", workspace=(1, 2)),
    "workspace-length": _value(
        "workspace.request_ids|3|2", workspace=lambda d: _workspace(d, rows=3)
    ),
    "workspace-rank-stride-limit": _value(
        f"rank_stride|{2**62}", workspace=lambda d: _workspace(d, rank_stride=2**62), dcp=Dcp(2, 0)
    ),
    "dcp-tuple": _type("dcp|tuple", dcp=(2, 0)),
    "out-shape": _value("out|(2, 4)|(2, 5)", out=ints(2, 5)),
    "out-rows": _value("out|(2, 4)|(3, 4)", out=ints(3, 4)),
    "out-1d": _value("out|(8,)", out=ints(8)),
    "out-float": _type("out|float32", out=ints(2, 4, dtype=torch.float32)),
    "out-dtype-differs": _type("out_dtype|out|int64|int32", out_dtype=I64),
    "out-dtype-float": _type("out_dtype|float32", out=None, out_dtype=torch.float32),
    "out-column-stride": _value(
        "out|stride", out=lambda d: torch.zeros(2, 8, dtype=I32, device=d)[:, ::2]
    ),
    "out-pitch-below-k": _value(
        "out|pitch", out=lambda d: torch.zeros(8, dtype=I32, device=d).as_strided((2, 4), (3, 1))
    ),
    "out-expanded": _value("out|", out=lambda d: torch.zeros(4, dtype=I32, device=d).expand(2, 4)),
    "counts-out-shape": _value("counts_out|(3,)|(2,)", counts_out=ints(3)),
    "counts-out-int64": _type("counts_out|int64|int32", counts_out=ints(2, dtype=I64)),
    "counts-out-expanded": _value(
        "counts_out|stride 0", counts_out=lambda d: torch.zeros(1, dtype=I32, device=d).expand(2)
    ),
    "lengths-out-shape": _value("lengths_out|(2, 1)", lengths_out=ints(2, 1)),
    "lengths-out-int64": _type("lengths_out|int64|int32", lengths_out=ints(2, dtype=I64)),
    "out-is-tokens-compact": Refusal(
        _in_place_compact, ValueError, ("out", "overlap", "token_indices", "compact")
    ),
    "out-on-tokens-other-pitch": Refusal(
        _in_place_other_pitch, ValueError, ("out", "overlap", "token_indices")
    ),
    **{
        f"{name.replace('_', '-')}-overlaps-{other.replace('_', '-')}": Refusal(
            _overlapping(**{name: SHAPES.get(name, (2,)), other: SHAPES.get(other, (2,))}),
            ValueError,
            (name, "overlap", other),
        )
        for name, other in (
            ("out", "token_indices"),
            ("out", "block_table"),
            ("out", "req_id"),
            ("out", "token_limits"),
            ("out", "request_rows"),
            ("counts_out", "req_id"),
            ("counts_out", "token_indices"),
            ("counts_out", "out"),
            ("lengths_out", "block_table"),
            ("lengths_out", "counts_out"),
        )
    },
}
"""Refusals of `remap` and `dcp_filter`: changes to a good call with every output given."""

OTHER_DEVICE = ("block_table", "req_id", "request_rows", "token_limits", "out", "counts_out")
"""Arguments that must be on the tokens' device."""

SAFE_REFUSALS: dict[str, Refusal] = {
    "slots-1d": _value("slots|(4,)", slots=ints(4)),
    "slots-float": _type("slots|float32", slots=ints(2, 4, dtype=torch.float32)),
    "slots-list": _type("slots|list", slots=[[0]]),
    "counts-2d": _value("counts|(2, 1)", counts=ints(2, 1)),
    "counts-uint8": _type("counts|uint8", counts=ints(2, dtype=torch.uint8)),
    "rows-differ": _value("counts|slots|3|2", counts=ints(3), out=None),
    "no-column": _value("slots|column", slots=ints(2, 0)),
    "slots-expanded": _value(
        "slots|expanded", slots=lambda d: torch.zeros(1, 4, dtype=I32, device=d).expand(2, 4)
    ),
    "out-shape": _value("out|(3,)|(2,)", out=ints(3)),
    "out-dtype": _type("out|int64|int32", out=ints(2, dtype=I64)),
    "out-expanded": _value("out|0", out=lambda d: torch.zeros(1, dtype=I32, device=d).expand(2)),
    "out-is-counts": Refusal(_overlapping(out=(2,), counts=(2,)), ValueError, ("out", "overlap")),
    "counts-in-slots": Refusal(
        _overlapping(counts=(2,), slots=(2, 4)), ValueError, ("overlap", "counts")
    ),
}
"""Refusals of `safe_lengths`."""


def _good(op: str, device: torch.device) -> dict[str, object]:
    """A good call with every output given, poisoned."""
    canary = CANARY[I32]
    if op == "safe_lengths":
        return {
            "slots": torch.full((2, 4), canary, dtype=I32, device=device),
            "counts": torch.zeros(2, dtype=I32, device=device),
            "out": torch.full((2,), canary, dtype=I32, device=device),
        }
    return {
        "req_id": torch.zeros(2, dtype=I32, device=device),
        "block_table": torch.zeros(2, 2, dtype=I32, device=device),
        "token_indices": torch.zeros(2, 4, dtype=I32, device=device),
        "dcp": Dcp(2, 0) if op == "dcp_filter" else None,
        "block_size": 64,
        "compact": True,
        "out": torch.full((2, 4), canary, dtype=I32, device=device),
        "counts_out": torch.full((2,), canary, dtype=I32, device=device),
        "lengths_out": torch.full((2,), canary, dtype=I32, device=device),
    }


def check_refusal(op: str, refusal: Refusal, target: Target) -> None:
    """The call is refused with its error and message, nothing launched, nothing written."""
    arguments = _good(op, target.device)
    changes = refusal.make(target.device)
    arguments.update(changes)
    if arguments.get("compact") is False and "lengths_out" not in changes:
        arguments.pop("lengths_out")
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    call: Callable[..., object] = getattr(mla_index, op)
    with selector.record_launches() as launches:
        try:
            call(**arguments, backend=target.backend)
        except refusal.error as error:
            missing = [word for word in refusal.named if word not in str(error)]
            if missing:
                raise Failure(f"the message must name {missing}, got: {error}") from None
        except Exception as error:
            raise Failure(f"must be {refusal.error.__name__}, got {error!r}") from None
        else:
            raise Failure(f"must be refused with {refusal.error.__name__}, but passed")
    if launches:
        raise Failure(f"launched {launches} before refusing")
    for name, tensor in tensors.items():
        if not torch.equal(tensor, before[name]):
            raise Failure(f"{name} was written before the call was refused")


def check_other_device(op: str, name: str, target: Target) -> None:
    """A tensor elsewhere is refused by name."""
    elsewhere = torch.device("meta" if target.device.type == "cpu" else "cpu")
    good = _good(op, target.device)
    like = good.get(name)
    shape = tuple(like.shape) if isinstance(like, Tensor) else (2,)
    moved = torch.zeros(shape, dtype=I32, device=elsewhere)
    refusal = Refusal(lambda _: {name: moved}, ValueError, (name, str(elsewhere)))
    if elsewhere.type == "meta":  # a meta tensor has no content that could be compared
        try:
            getattr(mla_index, op)(**{**good, name: moved}, backend=target.backend)
        except ValueError as error:
            if name not in str(error) or "meta" not in str(error):
                raise Failure(f"the message must name {name} and meta, got: {error}") from None
        else:
            raise Failure("must be refused with ValueError, but passed")
    else:
        check_refusal(op, refusal, target)


def check_constructor(make: Callable[[], object], error: type[Exception], named: str) -> None:
    """A description that refuses its own values."""
    try:
        made = make()
    except error as refused:
        if named not in str(refused):
            raise Failure(f"the message must name {named}, got: {refused}") from None
    else:
        raise Failure(f"must be refused with {error.__name__}, but made {made}")


def _constructors() -> Iterator[tuple[str, Callable[[], object], type[Exception], str]]:
    ids = torch.zeros(2, dtype=I32)
    for size, rank, interleave, name in (
        (0, 0, 1, "size"),
        (-1, 0, 1, "size"),
        (2, 2, 1, "rank"),
        (2, -1, 1, "rank"),
        (2, 0, 0, "interleave"),
        (2**16, 0, 2**15, "interleave"),
    ):
        label = f"dcp-{size}-{rank}-{interleave}"
        yield label, partial(Dcp, size, rank, interleave), ValueError, name
    yield "dcp-bool", partial(Dcp, True, 0), TypeError, "size"
    yield "dcp-float", partial(Dcp, 2, 0.0), TypeError, "rank"  # type: ignore[arg-type]
    yield (
        "workspace-rank-stride",
        partial(PrefillWorkspace, ids, ids, -1),
        ValueError,
        "rank_stride",
    )
    yield "workspace-num-rows", partial(PrefillWorkspace, ids, ids, 0, -1), ValueError, "num_rows"
    yield "workspace-list", partial(PrefillWorkspace, [0], ids), TypeError, "request_ids"  # type: ignore[arg-type]


def jobs() -> Iterator[Job]:
    """Every refusal of every operation."""
    tags = ("refusal",)
    for name, refusal in REFUSALS.items():
        for op in refusal.ops:
            label = name if name.startswith("fr") else f"refuse-{name}"
            yield Job(f"{label}:{op}", op, tags, partial(check_refusal, op, refusal))
    for name in OTHER_DEVICE:
        check = partial(check_other_device, "remap", name)
        yield Job(f"refuse-{name.replace('_', '-')}-elsewhere", "remap", tags, check)
    for name, refusal in SAFE_REFUSALS.items():
        check = partial(check_refusal, "safe_lengths", refusal)
        yield Job(f"refuse-safe-{name}", "safe_lengths", tags, check)
    for name in ("counts", "out"):
        check = partial(check_other_device, "safe_lengths", name)
        yield Job(f"refuse-safe-{name}-elsewhere", "safe_lengths", tags, check)
    for label, make, error, word in _constructors():

        def check_made(
            target: Target,
            make: Callable[[], object] = make,
            error: type[Exception] = error,
            word: str = word,
        ) -> None:
            check_constructor(make, error, word)

        yield Job(f"refuse-{label}", "remap", tags, check_made)
