"""Frozen descriptions of what is fixed for a configuration.

Everything here is a value: hashable (but for the tensors of `PrefillWorkspace`), checked when
it is made, and free of any choice of backend.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

INDEX_DTYPES = (torch.int32, torch.int64)
"""The dtypes that every index tensor may have, each on its own."""

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
DTYPE_MAX = {torch.int32: INT32_MAX, torch.int64: INT64_MAX}


def integer(value: object, name: str) -> int:
    """`value` as an int: anything with `__index__` is taken, but no bool.

    A tensor on a device is refused although it has `__index__`: reading it would wait for the
    device, and no call ever synchronises.
    """
    if type(value) is int:  # to a compiler also one that it keeps as a symbol
        return value
    on_device = isinstance(value, Tensor) and value.device.type != "cpu"
    boolean = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
    if not (on_device or boolean):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    kind = f"a tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"{name} must be an integer (anything with __index__, no bool), got {kind}")


def index_dtype(value: object, name: str) -> torch.dtype:
    """`value` if it is one of `INDEX_DTYPES`, else `TypeError`."""
    if not isinstance(value, torch.dtype) or value not in INDEX_DTYPES:
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Dcp:
    """Decode context parallelism: token `t` of a request lives on rank `(t // interleave) % size`.

    Args:
        size: number of ranks, at least 1.
        rank: this rank, in `[0, size)`.
        interleave: adjacent tokens that stay on one rank, at least 1; any value is exact, whether
            or not it divides the block size.

    Raises:
        ValueError: a value out of its range, or `size * interleave` above 2**31 - 1.
        TypeError: a value that is no integer.
    """

    size: int
    rank: int
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "rank", "interleave"):
            object.__setattr__(self, name, integer(getattr(self, name), f"Dcp.{name}"))
        if self.size < 1:
            raise ValueError(f"Dcp.size must be at least 1, got {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"Dcp.rank must be in [0, {self.size}), got {self.rank}")
        if self.interleave < 1:
            raise ValueError(f"Dcp.interleave must be at least 1, got {self.interleave}")
        if self.size * self.interleave > INT32_MAX:
            raise ValueError(
                f"Dcp.size * Dcp.interleave must be at most {INT32_MAX}, "
                f"got {self.size} * {self.interleave} = {self.size * self.interleave}"
            )

    @classmethod
    def from_group(cls, group: ProcessGroup | None = None, interleave: int = 1) -> Dcp:
        """This process in a process group whose ranks share the cache.

        Communicates nothing; make it once, and keep it.

        Args:
            group: a group that this process is in; `None` for the default group, of all processes.
            interleave: adjacent tokens that stay on one rank.

        Raises:
            RuntimeError: `None`, and torch.distributed is not initialised; or torch has none.
            ValueError: this process is not in the group; or as `Dcp`.
            TypeError: no process group.
        """
        from mla_index import distributed

        return cls(*distributed.of_group(group), interleave)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, mesh_dim: str | int | None = None, interleave: int = 1
    ) -> Dcp:
        """This process along the dimension of a device mesh over which the cache is shared.

        Args:
            mesh: a `torch.distributed.device_mesh.DeviceMesh` that holds this process.
            mesh_dim: name or number of the dimension; `None` for the only one.
            interleave: adjacent tokens that stay on one rank.

        Raises:
            ValueError: no such dimension, a mesh without this process; or as `Dcp`.
            TypeError: no mesh, or a dimension that is neither a name nor a number.
        """
        from mla_index import distributed

        if mesh_dim is not None and not isinstance(mesh_dim, str):
            mesh_dim = integer(mesh_dim, "mesh_dim")
        return cls(*distributed.of_mesh(mesh, mesh_dim), interleave)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillWorkspace:
    """The rank-major gather of all ranks' shards that prefill rows read instead of the paged cache.

    Args:
        request_ids: int32 or int64 `[T]`; the row's entry in `starts`, or negative for a row that
            reads the paged cache.
        starts: int32 or int64 `[P]`; first workspace row of each request, within a rank's part.
        rank_stride: rows from one rank's part to the next, at least 0.
        num_rows: rows of the workspace; a slot at or beyond it is invalid. `None`: unbounded.

    Raises:
        ValueError: `rank_stride` or `num_rows` negative.
        TypeError: a value of the wrong type.
    """

    request_ids: Tensor
    starts: Tensor
    rank_stride: int = 0
    num_rows: int | None = None

    def __post_init__(self) -> None:
        # An engine may make one a call.
        if not (isinstance(self.request_ids, Tensor) and isinstance(self.starts, Tensor)):
            name = "starts" if isinstance(self.request_ids, Tensor) else "request_ids"
            kind = type(getattr(self, name)).__name__
            raise TypeError(f"workspace.{name} must be a torch.Tensor, got {kind}")
        stride = self.rank_stride
        if type(stride) is not int:
            stride = integer(stride, "workspace.rank_stride")
            object.__setattr__(self, "rank_stride", stride)
        if stride < 0:
            raise ValueError(f"workspace.rank_stride must be at least 0, got {stride}")
        if self.num_rows is not None:
            rows = integer(self.num_rows, "workspace.num_rows")
            object.__setattr__(self, "num_rows", rows)
            if rows < 0:
                raise ValueError(f"workspace.num_rows must be at least 0, got {rows}")


FLAGS = (
    "compact", "counts", "safe_lengths", "req_id", "request_rows", "token_limits", "workspace"
)  # fmt: skip
"""The fields of `RemapSpec` that are bools."""


@dataclass(frozen=True, slots=True)
class RemapSpec:
    """What is fixed for a configuration of `remap` and `dcp_filter`; a kernel is built for one.

    Everything else (T, W, R, strides, rank, block stride, pad, bounds, workspace stride) is read at
    run time. `topk` is kept as its width class, the next power of two, so that every K in
    `(topk / 2, topk]` shares one configuration: `RemapSpec(64, 2051) == RemapSpec(64, 4096)`.

    Args:
        block_size: tokens in a KV-cache block.
        topk: K, any width from 0 up.
        token_dtype, table_dtype, slot_dtype: of `token_indices`, `block_table` and the result.
        dcp_size, dcp_interleave: decode context parallelism; 1 and 1 without.
        compact, counts, safe_lengths: what the call asks for.
        req_id: whether request ids are given (`False`: row `t` is request `t`).
        request_rows, token_limits, workspace: whether these are given.
    """

    block_size: int
    topk: int
    token_dtype: torch.dtype = torch.int32
    table_dtype: torch.dtype = torch.int32
    slot_dtype: torch.dtype = torch.int32
    dcp_size: int = 1
    dcp_interleave: int = 1
    compact: bool = False
    counts: bool = False
    safe_lengths: bool = False
    req_id: bool = True
    request_rows: bool = False
    token_limits: bool = False
    workspace: bool = False

    def __post_init__(self) -> None:
        block_size = integer(self.block_size, "block_size")
        if not 1 <= block_size <= INT32_MAX:
            raise ValueError(f"block_size must be in [1, {INT32_MAX}], got {block_size}")
        topk = integer(self.topk, "topk")
        if topk < 0:
            raise ValueError(f"topk must be at least 0, got {topk}")
        dcp = Dcp(self.dcp_size, 0, self.dcp_interleave)
        for name in ("token_dtype", "table_dtype", "slot_dtype"):
            index_dtype(getattr(self, name), name)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        if self.safe_lengths and not self.compact:
            raise ValueError("safe_lengths=True needs compact=True, got compact=False")
        object.__setattr__(self, "block_size", block_size)
        object.__setattr__(self, "topk", width_class(topk))
        object.__setattr__(self, "dcp_size", dcp.size)
        # A second name for one kernel would be built and kept twice.
        object.__setattr__(self, "dcp_interleave", 1 if dcp.size == 1 else dcp.interleave)
        if self.safe_lengths:
            object.__setattr__(self, "counts", True)


@dataclass(frozen=True, slots=True)
class SafeLengthsSpec:
    """What is fixed for a configuration of `safe_lengths`.

    Args:
        slot_dtype: of `slots`.
        count_dtype: of `counts`, and so of the result.
    """

    slot_dtype: torch.dtype = torch.int32
    count_dtype: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        for name in ("slot_dtype", "count_dtype"):
            index_dtype(getattr(self, name), name)


Spec: TypeAlias = RemapSpec | SafeLengthsSpec | None
"""The spec of an operation; `None` for `flat_row_view`, which has nothing to fix."""


def shown(spec: Spec) -> str:
    """The spec as it can be written in a call of `warmup`: what is not the default."""
    if spec is None:
        return "None"
    parts = [
        f"{field.name}={getattr(spec, field.name)!r}"
        for field in fields(spec)
        if getattr(spec, field.name) != field.default
    ]
    return f"mla_index.{type(spec).__name__}({', '.join(parts)})"


def width_class(topk: int) -> int:
    """The smallest power of two that is at least `topk` (1 for 0 and 1)."""
    return 1 << (topk - 1).bit_length() if topk > 1 else 1
