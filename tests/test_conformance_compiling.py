"""The counting of compiled kernels, proven on backends that pretend to compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from planted_faults.reference import LIMITS, Steps, remap

import mla_index
from mla_index.conformance import compile_jobs as suite
from mla_index.conformance.target import Failure, NotTaken, Target
from mla_index.registry import CONTRACT_VERSION, Kernel

CPU = torch.device("cpu")


@dataclass
class Compiler:
    """The reference, with a kernel compiled for each new `key(block_table, out)`."""

    name: str
    key: Callable[[torch.Tensor, torch.Tensor], object]
    variants: tuple[object, ...]
    tells: int | None = None
    kernels: set[object] = field(default_factory=set)
    contract_version: int = CONTRACT_VERSION
    limits = LIMITS

    def unavailable(self, device, *, probe):
        return None

    def unsupported(self, op, spec):
        return None

    def build(self, op, spec, device):
        def launch(*arguments):
            self.kernels.add((spec, self.key(arguments[1], arguments[3])))
            return partial(remap, Steps(), spec)(*arguments)

        def warm():
            self.kernels |= {(spec, variant) for variant in self.variants}
            return len(self.variants) if self.tells is None else self.tells

        return Kernel(launch, warm)

    def compiled_kernels(self):
        return len(self.kernels)


def aligned(table, out):
    return out.data_ptr() % 16 == 0


@pytest.fixture
def check():
    def check(compiler, name="compact", width="odd"):
        mla_index.register(compiler)
        suite.check_nothing_compiles_after_warm(name, width, Target(compiler.name, CPU))

    return check


@pytest.mark.parametrize("name", suite.CONFIGURATIONS)
@pytest.mark.parametrize("width", ["even", "odd"])
def test_a_kernel_for_each_alignment_passes(check, name, width):
    check(Compiler("by-alignment", aligned, (True, False)), name, width)


@pytest.mark.parametrize(
    ("key", "variants"),
    [
        (lambda table, out: table.shape[1], (1,)),  # the table's width as a constant
        (lambda table, out: out.shape[0], (1,)),  # the number of rows
        (aligned, (True,)),  # one alignment forgotten
    ],
    ids=["table-width", "rows", "alignment"],
)
def test_a_kernel_too_many_is_found(check, key, variants):
    with pytest.raises(Failure, match="kernels were compiled after warm"):
        check(Compiler("too-many", key, variants))


def test_warm_tells_how_many(check):
    with pytest.raises(Failure, match=r"warm\(\) says 1 kernels, but 2 were compiled"):
        check(Compiler("modest", aligned, (True, False), tells=1))


def test_a_backend_that_does_not_count_is_skipped(check):
    silent = Compiler("silent", aligned, (True, False))
    mla_index.register(SimpleNamespace(
        name="silent", contract_version=silent.contract_version, limits=silent.limits,
        unavailable=silent.unavailable, unsupported=silent.unsupported, build=silent.build,
    ))  # fmt: skip
    with pytest.raises(NotTaken, match=r"silent has no compiled_kernels\(\)"):
        suite.check_no_kernel_for_nothing(Target("silent", CPU))


def test_empty_calls_compile_nothing():
    compiler = Compiler("by-alignment", aligned, (True, False))
    mla_index.register(compiler)
    suite.check_no_kernel_for_nothing(Target("by-alignment", CPU))
    assert compiler.compiled_kernels() == 0
