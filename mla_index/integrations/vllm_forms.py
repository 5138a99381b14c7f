"""What a vLLM must look like for its functions to be replaced, told from its code or its source.

Checked against vLLM 0.33.0. The older form of one function, without `idx_mapping`, fits as well;
a function that a vLLM does not have yet is not missed, but for the first.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_index.integrations import vllm

CHECKED = "0.33.0"
"""The version whose signatures `mla_index.integrations.vllm` has."""

MODULE = "vllm.v1.attention.backends.mla.sparse_utils"
"""Where vLLM defines the functions."""

FUNCTIONS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (
        vllm.triton_convert_req_index_to_global_index,
        vllm.triton_filter_and_convert_dcp_index,
        vllm.prepare_sparse_mla_safe_lengths,
        vllm.flat_kv_row_view,
        vllm.request_row_bounds,
    )
}
"""What is replaced, and by what."""

NEEDED = "triton_convert_req_index_to_global_index"

OPTIONAL = {NEEDED: ("idx_mapping",)}
"""Parameters that an older form lacks."""

WARMUP_KERNEL = "_CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL"
"""The object in `MODULE` whose `compile(key)` vLLM calls for each key before it captures graphs."""

WARMUP_FIELDS = (
    "block_size",
    "compact_to_front",
    "count_valid",
    "dcp_interleave",
    "dcp_size",
    "has_prefill_workspace",
    "num_topk_tokens",
)
"""Fields of such a key that the warm-up of our kernels reads; `has_idx_mapping` may be missing."""


@dataclass(frozen=True)
class Form:
    """What was found in one vLLM.

    Args:
        parameters: of each function of `FUNCTIONS` that is there, by its name; None where Python
            cannot tell them.
        key_fields: of the warm-up's keys, or None where there is no such warm-up.
    """

    parameters: Mapping[str, tuple[Parameter, ...] | None]
    key_fields: frozenset[str] | None

    def differences(self) -> list[str]:
        """Each point in which it is not what was checked; empty when it fits."""
        found = []
        if NEEDED not in self.parameters:
            found.append(f"{MODULE} has no {NEEDED}")
        for name, parameters in self.parameters.items():
            difference = _difference(name, parameters)
            if difference:
                found.append(f"{name} {difference}")
        missing = sorted(set(WARMUP_FIELDS) - (self.key_fields or set(WARMUP_FIELDS)))
        if missing:
            found.append(f"the keys of {WARMUP_KERNEL} have no {', '.join(missing)}")
        return found


def _difference(name: str, parameters: tuple[Parameter, ...] | None) -> str | None:
    """How the parameters of a function differ from what was checked, or None."""
    if parameters is None:
        return "does not tell its parameters"
    wanted = {p.name: p for p in _bare(FUNCTIONS[name]) or ()}
    given = {p.name: p for p in parameters}
    lacking = [p for p in wanted if p not in given and p not in OPTIONAL.get(name, ())]
    unknown = [p for p in given if p not in wanted]
    if lacking:
        return f"has no parameter {', '.join(lacking)}"
    if unknown:
        return f"has the unknown parameter {', '.join(unknown)}"
    if list(given) != [p for p in wanted if p in given]:
        return f"takes its parameters in another order: {', '.join(given)}"
    for parameter, mine in ((given[p], wanted[p]) for p in given):
        if parameter.kind is not mine.kind:
            return f"takes {parameter.name} as {parameter.kind.description}"
        if (type(parameter.default), parameter.default) != (type(mine.default), mine.default):
            return f"has {parameter}, not {mine}"
    return None


def _bare(function: Callable[..., object]) -> tuple[Parameter, ...] | None:
    """The parameters without annotations, which bind nobody; None where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return tuple(parameter.replace(annotation=Parameter.empty) for parameter in parameters)


def form_of_module(module: ModuleType) -> Form:
    """The form of an imported `MODULE`."""
    parameters = {
        name: _bare(getattr(module, name))
        for name in FUNCTIONS
        if callable(getattr(module, name, None))
    }
    kernel = getattr(module, WARMUP_KERNEL, None)
    if kernel is None:
        return Form(parameters, None)
    key: Any = getattr(kernel, "CompileKey", None)
    return Form(parameters, frozenset(getattr(key, "__dataclass_fields__", ())))


# --- without importing it ------------------------------------------------------------------------


def installed() -> tuple[str, Path] | None:
    """Version and source of `MODULE` of the installed vLLM, which is not imported, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        number = version("vllm")
    except PackageNotFoundError:
        number = "of unknown version"
    return number, source_in(Path(next(iter(spec.submodule_search_locations))).parent)


def source_in(folder: Path) -> Path:
    """The source of `MODULE` under the folder that holds the package `vllm`."""
    return folder.joinpath(*MODULE.split(".")).with_suffix(".py")


def form_of_source(text: str) -> Form:
    """The form of the source text of `MODULE`; nothing of it is executed."""
    tree = ast.parse(text)
    parameters = {
        node.name: tuple(_parameters(node.args))
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS
    }
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    kernels = {
        target.id: node.value for node in assigned for target in node.targets
        if isinstance(target, ast.Name)
    }  # fmt: skip
    kernel = kernels.get(WARMUP_KERNEL)
    if kernel is None:
        return Form(parameters, None)
    made_of = getattr(getattr(kernel, "func", None), "id", None)
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == made_of]
    keys = [n for c in classes for n in c.body if isinstance(n, ast.ClassDef)]
    return Form(
        parameters,
        frozenset(
            field.target.id
            for key in keys
            if key.name == "CompileKey"
            for field in key.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ),
    )


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    """The parameters of a definition; a default that is no literal stays an `ast` node."""
    named = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(named) - len(arguments.defaults)) + list(arguments.defaults)
    found = []
    for index, (argument, default) in enumerate(zip(named, defaults, strict=True)):
        first = index < len(arguments.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if first else Parameter.POSITIONAL_OR_KEYWORD
        found.append(Parameter(argument.arg, kind, default=_value(default)))
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=_value(default)))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return found


def _value(default: ast.expr | None) -> object:
    if default is None:
        return Parameter.empty
    try:
        return ast.literal_eval(default)
    except ValueError:
        return default
