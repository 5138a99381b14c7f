"""A small package that looks to the plugin as vLLM does, and holds the functions in vLLM's ways.

The functions answer with the name `vLLM`, so that a test sees who was called.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

MLA = "vllm.v1.attention.backends.mla"
SPARSE_UTILS = f"{MLA}.sparse_utils"

CONVERT = "triton_convert_req_index_to_global_index"
FILTER = "triton_filter_and_convert_dcp_index"

SIGNATURES = {
    CONVERT: "req_id, block_table, token_indices, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=None, "
    "NUM_TOPK_TOKENS=2048, BLOCK_N=128, HAS_PREFILL_WORKSPACE=False, "
    "prefill_workspace_request_ids=None, prefill_workspace_starts=None, "
    "prefill_workspace_rank_stride=None, dcp_size=1, dcp_rank=0, "
    "cp_kv_cache_interleave_size=1, return_valid_counts=False, out=None, "
    "valid_counts_out=None, idx_mapping=None",
    FILTER: "req_id, block_table, token_indices, dcp_size, dcp_rank, "
    "cp_kv_cache_interleave_size=1, BLOCK_SIZE=64, BLOCK_STRIDE_ROWS=None, "
    "NUM_TOPK_TOKENS=2048, BLOCK_N=128, return_valid_counts=False, compact_valid_to_front=True",
    "prepare_sparse_mla_safe_lengths": "physical_indices, valid_counts",
    "flat_kv_row_view": "kv_cache, block_size",
    "request_row_bounds": "req_idx",
}

KEY_FIELDS = (
    "block_size", "num_topk_tokens", "count_valid", "compact_to_front", "dcp_size", "dcp_rank",
    "dcp_interleave", "has_prefill_workspace", "has_idx_mapping",
)  # fmt: skip

OWNER = """
from dataclasses import dataclass

class ConvertKernel:
    @dataclass(frozen=True)
    class CompileKey:
{fields}

    def __init__(self):
        self.compiled = []

    def compile(self, compile_key):
        self.compiled.append(compile_key)

    def compile_many(self, compile_keys):
        for compile_key in compile_keys:
            self.compile(compile_key)

_CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL = ConvertKernel()
"""

SITES = {
    # A name, and the same under another.
    f"{MLA}.flashmla_sparse": f"from {SPARSE_UTILS} import {CONVERT}, {FILTER} as keep_mine\n"
    f"def call(): return {CONVERT}\n"
    "def call_filter(): return keep_mine\n",
    # The module, looked into at each call.
    f"{MLA}.index_group": f"from {MLA} import sparse_utils\n"
    f"def call(): return sparse_utils.{CONVERT}\n",
    # At each call.
    "vllm.model_executor.layers.attention.sparse_mla_attention": "def call():\n"
    f"    from {SPARSE_UTILS} import {CONVERT}\n"
    f"    return {CONVERT}\n",
    # A name taken while `sparse_utils` is still being imported.
    f"{MLA}.cyclic": f"from {SPARSE_UTILS} import {CONVERT}\ndef call(): return {CONVERT}\n",
    # Another function of the same name.
    f"{MLA}.rocm_aiter_mla_sparse": f"def {CONVERT}(req_id, cu_seqlens): return 'ROCm'\n"
    f"def call(): return {CONVERT}\n",
}

CALLERS = [name for name in SITES if not name.endswith("rocm_aiter_mla_sparse")]


def write(
    folder: Path,
    *,
    changed: dict[str, str | None] | None = None,
    fields: tuple[str, ...] | None = KEY_FIELDS,
    tail: str = f"import {MLA}.cyclic\n",
) -> Path:
    """Write the package below `folder`, and return the folder.

    Args:
        folder: where.
        changed: other parameters of a function; None: it is not there.
        fields: of the warm-up's keys; None: there is no warm-up.
        tail: the end of `sparse_utils`.
    """
    signatures = {**SIGNATURES, **(changed or {})}
    text = "".join(
        f"def {name}({parameters}):\n    return 'vLLM'\n\n"
        for name, parameters in signatures.items()
        if parameters is not None
    )
    if fields is not None:
        text += OWNER.format(fields="\n".join(f"        {field}: int = 0" for field in fields))
    for name, source in {"vllm.__init__": "", SPARSE_UTILS: text + tail, **SITES}.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def load(name: str):
    """A module of the stand-in."""
    return importlib.import_module(name)


def forget() -> None:
    """Nothing of vLLM is imported afterwards."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    importlib.invalidate_caches()
