"""Load single modules of an unpacked vLLM, without installing it or what it needs.

The modules that are asked for run from their real sources; every other module of vLLM is a stub
that is made on demand and that takes whatever an import statement, a base class, a decorator or an
annotation does to it. What the real ones compute with is given by value in `GIVEN`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SPARSE_UTILS = "vllm.v1.attention.backends.mla.sparse_utils"

NEEDED = (
    SPARSE_UTILS,
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
)
"""The functions, and what launches their kernels."""


class _Anything(ABCMeta):
    """The metaclass of stubs: classes that can be called, subscripted, combined and inherited."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if cls.__dict__.get("_stub"):
            # A decorator gives back what it decorates, a factory of decorators itself.
            if len(arguments) == 1 and not keywords and callable(arguments[0]):
                return arguments[0]
            return cls
        return super().__call__(*arguments, **keywords)

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __bool__(cls) -> bool:
        return not cls.__dict__.get("_stub")


def stub(name: str) -> Any:
    """A class that stands for anything."""
    return _Anything(name, (), {"_stub": True, "__init_subclass__": _subclassed})


@classmethod  # type: ignore[misc]
def _subclassed(cls: type, **_: object) -> None:
    """Keywords of a class statement are let pass."""


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def given() -> dict[str, dict[str, Any]]:
    """Names that the real modules compute with, by module."""
    import torch
    import triton
    import triton.language as tl

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    platform = SimpleNamespace(
        device_type=device_type,
        is_cuda=lambda: device_type == "cuda",
        is_rocm=lambda: False,
        is_xpu=lambda: False,
    )
    return {
        "vllm.envs": {"VLLM_TRITON_JIT_WARMUP_NUM_THREADS": 1},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"HAS_TRITON": True, "tl": tl, "triton": triton},
        "vllm.utils.math_utils": {"cdiv": _cdiv},
        "vllm.v1.worker.block_table": {"get_block_table_width": lambda blocks, _: blocks},
    }


class _BlockMasks(ast.NodeTransformer):
    """Makes the complement of one mask as wide as the tiles that it is combined with.

    The mask is a Python bool or a scalar. The compiler broadcasts its complement; Triton's
    interpreter takes `~False` for an integer, and so gets the type of every later mask wrong.
    """

    mask, tile = "is_prefill", "tok"

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.UnaryOp:
        if isinstance(node.op, ast.Invert) and getattr(node.operand, "id", None) == self.mask:
            wide = f"tl.where({self.tile} == {self.tile}, {self.mask}, False)"
            node.operand = ast.parse(wide, mode="eval").body
        return node


def _for_interpreter(file: Path, folder: Path) -> Path:
    """A copy of a source, in another folder, that Triton's interpreter runs rightly."""
    tree = ast.fix_missing_locations(_BlockMasks().visit(ast.parse(file.read_text())))
    copy = folder / file.name
    copy.write_text(ast.unparse(tree))
    return copy


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the real modules in their folder and stubs for all others of vLLM."""

    def __init__(self, folder: Path, real: Iterable[str]) -> None:
        self.folder = folder
        self.real = set(real)
        self.given = given()
        self.temporary = tempfile.TemporaryDirectory(prefix="vllm-for-interpreter-")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "vllm":
            return None
        if fullname in self.real:
            file = self.folder.joinpath(*fullname.split(".")).with_suffix(".py")
            if not file.is_file():
                raise ModuleNotFoundError(f"{file} is not there", name=fullname)
            if fullname == SPARSE_UTILS and os.environ.get("TRITON_INTERPRET") == "1":
                file = _for_interpreter(file, Path(self.temporary.name))
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module).update(self.given.get(spec.name, {}))
        vars(module)["__getattr__"] = partial(self._attribute, spec.name)
        return module

    def _attribute(self, module: str, name: str) -> Any:
        """What `from module import name` gets where the module has no such name (PEP 562)."""
        if name.startswith("__"):  # asked for by the import system
            raise AttributeError(name)
        submodule = f"{module}.{name}"
        if submodule in self.real or submodule in self.given:
            return importlib.import_module(submodule)
        return stub(name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def version_in(folder: Path) -> str:
    """The version that an unpacked vLLM says it is."""
    file = folder / "vllm" / "_version.py"
    names: dict[str, object] = {}
    if file.is_file():
        exec(compile(file.read_text(), str(file), "exec"), names)  # noqa: S102
    return str(names.get("__version__", "of unknown version"))


@contextmanager
def unpacked(folder: Path, real: Iterable[str] = NEEDED) -> Iterator[None]:
    """Inside the block `vllm` is the one unpacked in `folder`; afterwards none is imported."""
    finder = _Stubs(folder, real)
    before = {name: module for name, module in sys.modules.items() if _of_vllm(name)}
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _of_vllm(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        finder.temporary.cleanup()


def _of_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"
