"""What the public functions promise beyond values: plans, allocation, temporaries, kernels.

Values, refusals and strides are the conformance suite's.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mla_index
from mla_index import Dcp, PrefillWorkspace, operations
from mla_index.registry import CONTRACT_VERSION, Kernel, Limits
from mla_index.specs import width_class


def inputs(rows=64, topk=256, requests=8, width=32, dtype=torch.int32):
    generator = torch.Generator().manual_seed(rows * topk)
    table = torch.randperm(requests * width, generator=generator).view(requests, width)
    tokens = torch.randint(-64, width * 64 + 64, (rows, topk), generator=generator)
    request = torch.randint(0, requests, (rows,), generator=generator)
    return request.to(dtype), table.to(dtype), tokens.to(dtype)


def everything(request, rows):
    return {
        "request_rows": torch.arange(8, dtype=torch.int32).flip(0),
        "token_limits": torch.full((rows,), 1500, dtype=torch.int32),
        "workspace": PrefillWorkspace(
            torch.arange(rows, dtype=torch.int32) % 3 - 1,
            torch.tensor([5, 700], dtype=torch.int32),
            rank_stride=2000,
            num_rows=8000,
        ),
        "dcp": Dcp(4, 1, 48),
    }


def test_a_plan_is_kept_for_a_configuration_and_for_nothing_else():
    operations._plans.clear()
    request, table, tokens = inputs()
    for rows in range(1, 40):
        for start in range(3):
            mla_index.remap(
                request[start : start + rows],
                table[:, : rows % 30 + 1],
                tokens[start : start + rows, ::1],
                block_size=64,
                block_stride_rows=64 + rows,
                num_slots=rows * 100,
                pad=-rows,
            )
            mla_index.safe_lengths(tokens[:rows].clone(), request[:rows])
    assert len(operations._plans) == 2
    for topk in range(1, 257):
        mla_index.remap(request, table, tokens[:, :topk], block_size=64)
    assert len(operations._plans) <= 2 + 9


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 5, 64, 65])
def test_a_kernel_is_built_for_the_width_class_of_its_call(first):
    """Whichever width comes first: K = 0 must not decide what K = 2 is built for."""
    specs = []

    def build(op, spec, device):
        specs.append(spec)
        return Kernel(lambda *arguments: None)

    mla_index.register(
        SimpleNamespace(
            name="widths",
            contract_version=CONTRACT_VERSION,
            limits=Limits(("remap",), None),
            unavailable=lambda device, *, probe: None,
            unsupported=lambda op, spec: None,
            build=build,
        )
    )
    table = torch.zeros((1, 1), dtype=torch.int32)
    for topk in (first, 0, 1, 2, 3, 4, 5, 8, 9, 64, 65):
        tokens = torch.zeros((1, topk), dtype=torch.int32)
        before = len(specs)
        mla_index.remap(None, table, tokens, block_size=64, backend="widths")
        if len(specs) > before:
            assert specs[-1].topk == width_class(topk)
    assert sorted(spec.topk for spec in specs) == [1, 2, 4, 8, 16, 64, 128]


def test_given_outputs_are_returned_as_themselves():
    request, table, tokens = inputs()
    out = torch.empty_like(tokens)
    counts, lengths = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    result = mla_index.remap(
        request, table, tokens, block_size=64, compact=True, out=out, counts_out=counts,
        lengths_out=lengths,
    )  # fmt: skip
    assert result.slots is out
    assert result.counts is counts
    assert result.lengths is lengths


@pytest.mark.parametrize("integer", [np.int64(64), np.uint8(64), torch.tensor(64)])
def test_integers_are_what_has_an_index(integer):
    request, table, tokens = inputs()
    plain = mla_index.remap(request, table, tokens, block_size=64)
    told = mla_index.remap(request, table, tokens, block_size=integer, block_stride_rows=integer)
    assert torch.equal(plain.slots, told.slots)


@pytest.mark.parametrize("wrong", [True, 64.0, "64", None, torch.tensor(True), torch.tensor(6.0)])
def test_an_equal_number_of_another_type_does_not_pass_for_an_integer(wrong):
    request, table, tokens = inputs()
    mla_index.remap(request, table, tokens, block_size=64)
    mla_index.remap(request, table, tokens, block_size=1)
    for name in ("block_size", "block_stride_rows", "num_slots", "pad"):
        if wrong is None and name in ("block_stride_rows", "num_slots"):
            continue
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            mla_index.remap(request, table, tokens, **{"block_size": 64, name: wrong})


def test_flags_are_bools():
    request, table, tokens = inputs()
    mla_index.remap(request, table, tokens, block_size=64, compact=True)
    for name in ("compact", "counts", "safe_lengths"):
        with pytest.raises(TypeError, match=f"{name} must be a bool, got int"):
            mla_index.remap(request, table, tokens, block_size=64, **{name: 1})


class Temporaries(TorchDispatchMode):
    """Counts kernels (operations that make or change elements) and the bytes alive at once."""

    VIEWS = ("view", "slice", "select", "unsqueeze", "expand", "alias", "detach", "as_strided")
    MAKES_NO_KERNEL = ("empty", "scalar_tensor")  # a scalar stays on the host

    def __init__(self):
        super().__init__()
        self.kernels, self.alive, self.peak, self._seen = 0, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.kernels += name not in self.MAKES_NO_KERNEL
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self._track(tensor, [*args, *(kwargs or {}).values()])
        return result

    def _track(self, tensor, given):
        storage = tensor.untyped_storage()
        known = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}
        if storage._cdata in known or storage._cdata in self._seen:
            return
        size, key = storage.nbytes(), storage._cdata
        self._seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def freed():
            self.alive -= size
            self._seen.discard(key)

        weakref.finalize(tensor, freed)


@pytest.mark.parametrize(
    ("keywords", "most"),
    [
        ({}, 25),
        ({"counts": True, "compact": True}, 30),
        ({"counts": True}, 30),
        ({"counts": True, "compact": True, "dcp": Dcp(8, 3, 16)}, 38),
        ({"everything": True, "compact": True, "safe_lengths": True}, 55),
    ],
    ids=["plain", "compact", "counts", "dcp", "everything"],
)
def test_torch_keeps_to_its_kernels_and_its_memory(keywords, most):
    rows, topk = 128, 2048
    request, table, tokens = inputs(rows, topk)
    keywords = dict(keywords)
    if keywords.pop("everything", False):
        keywords |= everything(request, rows)
    out = torch.empty_like(tokens)
    call = {"block_size": 64, "backend": "torch", "out": out, **keywords}
    mla_index.remap(request, table, tokens, **call)
    with Temporaries() as seen:
        mla_index.remap(request, table, tokens, **call)
    assert 0 < seen.kernels <= most
    assert 0 < seen.peak <= 6 * out.nbytes


def test_importing_brings_no_kernel_language_and_little_time():
    """At most 50 ms more than torch, in processor time (others may use the machine too)."""
    program = (
        "import torch, time, sys; before = set(sys.modules); t = time.process_time()\n"
        "import mla_index\n"
        "print(time.process_time() - t, *sorted(set(sys.modules) - before))"
    )
    best, brought = 1.0, []
    for _ in range(3):
        told = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout.split()
        best, brought = min(best, float(told[0])), told[1:]
    heavy = {"triton", "cupy", "numba", "typer", "rich", "pytest", "numpy"}
    assert heavy.isdisjoint(name.split(".")[0] for name in brought)
    assert best <= 0.050


def test_request_row_bounds_takes_arrays_sequences_and_tensors():
    for ids in ([3, 3, 5, 5, 5, 2], np.array([3, 3, 5, 5, 5, 2]), torch.tensor([3, 3, 5, 5, 5, 2])):
        assert mla_index.request_row_bounds(ids).tolist() == [0, 2, 5, 6]
    assert mla_index.request_row_bounds((7,)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ids", "error", "told"),
    [
        ([], ValueError, "at least one row"),
        ([[1, 2]], ValueError, r"got shape \(1, 2\)"),
        ([0, 1, 0], ValueError, "request 0 returns at row 2"),
        ([4, 4, 9, 9, 4, 9], ValueError, "request 4 returns at row 4"),
        ([0.5, 1.0], TypeError, "integers, got float64"),
        (np.array([1, 2], dtype="m8[s]"), TypeError, "integers, got timedelta64"),
        ((i for i in (1, 2)), TypeError, "a sequence or a CPU tensor, got generator"),
        (torch.empty(2, device="meta", dtype=torch.int64), TypeError, "tensor on meta"),
    ],
)
def test_request_row_bounds_refuses(ids, error, told):
    with pytest.raises(error, match=told):
        mla_index.request_row_bounds(ids)


def test_diagnose_accounts_for_every_entry_and_reads_as_a_table():
    request, table, tokens = inputs()
    table[2, 3] = -5
    request[:4] = torch.tensor([-1, 8, 100, 2])
    table = table[:, :5]
    keywords = everything(request, 64)
    keywords["workspace"].request_ids[5] = 2
    diagnosis = mla_index.diagnose(
        request, table, tokens, block_size=64, num_slots=5000, **keywords
    )
    assert diagnosis.valid + sum(diagnosis.counts.values()) == tokens.numel()
    assert set(diagnosis.counts) == set(mla_index.Reason)
    assert all(count > 0 for count in diagnosis.counts.values()), diagnosis.counts
    for reason, examples in diagnosis.examples.items():
        assert 0 < len(examples) <= 5
        assert all(int(tokens[r, c]) == token for r, c, token in examples), reason
    text = str(diagnosis)
    assert f"{diagnosis.valid} of {tokens.numel()} entries are valid" in text
    assert all(reason.value in text for reason in mla_index.Reason)


def test_strides_of_what_has_one_element_say_nothing():
    request, _, tokens = inputs()
    table = torch.full((9,), 7, dtype=torch.int32).as_strided((1, 1), (2**40, 2**31 + 8))
    slots = mla_index.remap(request * 0, table, tokens.clamp(max=63), block_size=64).slots
    assert torch.equal(slots, torch.where(tokens < 0, -1, 448 + tokens.clamp(max=63)))


def test_a_bound_beyond_every_slot_bounds_nothing():
    request, table, tokens = inputs()
    free = mla_index.remap(request, table, tokens, block_size=64).slots
    for bound in (2**63, 2**70):
        bounded = mla_index.remap(request, table, tokens, block_size=64, num_slots=bound).slots
        assert torch.equal(free, bounded)
    ids = torch.zeros(64, dtype=torch.int32)
    PrefillWorkspace(ids, ids, num_rows=2**70)


@pytest.mark.parametrize("pad", [np.array([1, 2]), torch.tensor([1, 2]), "x", None])
def test_what_is_no_pad_is_named(pad):
    request, table, tokens = inputs()
    with pytest.raises(TypeError, match="pad must be an integer"):
        mla_index.remap(request, table, tokens, block_size=64, pad=pad)


def test_meta_tensors_give_shapes():
    request, table, tokens = (tensor.to("meta") for tensor in inputs())
    out = torch.empty_like(tokens)
    result = mla_index.remap(request, table, tokens, block_size=64, counts=True, out=out)
    assert result.slots is out
    assert result.counts.shape == (64,)
    with pytest.raises(ValueError, match="out must not overlap token_indices"):
        mla_index.remap(request, table, tokens, block_size=64, compact=True, out=tokens)


def test_a_spec_keeps_numbers_and_bools_only():
    spec = mla_index.RemapSpec(np.int64(64), np.int32(3), dcp_size=torch.tensor(2))
    assert spec == mla_index.RemapSpec(64, 3, dcp_size=2)
    assert hash(spec) == hash(mla_index.RemapSpec(64, 3, dcp_size=2))
    with pytest.raises(TypeError, match="compact must be a bool, got str"):
        mla_index.RemapSpec(64, 3, compact="no")


def test_tensors_without_strides_are_refused():
    request, _, tokens = inputs()
    with pytest.raises(TypeError, match="slots must be a strided tensor"):
        mla_index.safe_lengths(tokens.to_sparse(), request)
    with pytest.raises(TypeError, match="kv_cache must be a strided tensor"):
        mla_index.flat_row_view(torch.zeros((2, 2, 2)).to_sparse(), 1)


SPARSE = (
    "req_id", "block_table", "token_indices", "request_rows", "token_limits", "out", "counts_out",
)  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
def test_tensors_without_strides_are_refused_by_a_plan_that_exists(name):
    """Nothing of a layout is in a plan's key, and nothing is written."""

    def made() -> dict[str, torch.Tensor]:
        ones = torch.ones(2, dtype=torch.int32)
        return {
            "req_id": ones.clone(), "block_table": torch.ones((2, 3), dtype=torch.int32),
            "token_indices": torch.ones((2, 4), dtype=torch.int32), "request_rows": ones.clone(),
            "token_limits": 9 * ones, "out": torch.full((2, 4), 7, dtype=torch.int32),
            "counts_out": 7 * ones,
        }  # fmt: skip

    mla_index.remap(**made(), block_size=4, compact=True)
    wrong = made()
    wrong[name] = wrong[name].to_sparse()
    with pytest.raises(TypeError, match=f"^{name} must be a strided tensor"):
        mla_index.remap(**wrong, block_size=4, compact=True)
    for output in {"out", "counts_out"} - {name}:
        assert torch.all(wrong[output] == 7)


@pytest.mark.parametrize("name", ["out", "counts_out", "lengths_out"])
def test_torch_refuses_what_inference_mode_froze_before_it_writes(name):
    tokens = torch.zeros((2, 4), dtype=torch.int32)
    with torch.inference_mode():
        frozen = {
            "out": torch.full((2, 4), 7, dtype=torch.int32),
            "counts_out": torch.full((2,), 7, dtype=torch.int32),
            "lengths_out": torch.full((2,), 7, dtype=torch.int32),
        }
    outputs = {key: frozen[key] if key == name else frozen[key].clone() for key in frozen}
    call = {"block_size": 4, "compact": True, "backend": "torch", **outputs}
    with pytest.raises(ValueError, match=f"^{name} was made in inference mode"):
        mla_index.remap(None, tokens, tokens, **call)
    assert all(torch.all(tensor == 7) for tensor in outputs.values())
    with torch.inference_mode():
        mla_index.remap(None, tokens, tokens, **call)
    assert torch.all(outputs["counts_out"] == 4)
