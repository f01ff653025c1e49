"""Loads SGLang's and vLLM's Triton attention from their files and calls it on our inputs.

A file is loaded without its package: stand-ins replace the few names that it imports from the
package. Tested with SGLang 0.5.3 and 0.5.23, vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.harness import Unavailable

if TYPE_CHECKING:
    import torch

Prepare = Callable[[dict[str, Any], int], "Callable[[], torch.Tensor]"]
"""Function of our op's inputs (by name) and the number of splits; it returns the call to count."""


def sglang_decode(path: Path) -> Prepare:
    """SGLang's grouped decode: ``sglang/kernels/ops/attention/decode_attention.py``, in older
    versions in ``sglang/srt/layers/attention/triton_ops``.

    SGLang's kernel gets the slot of every token, so it does not depend on the block size.
    """
    module = load_sglang(path)
    grouped = module.decode_attention_fwd_grouped
    v_scale = (1.0,) if "v_scale" in inspect.signature(grouped).parameters else ()

    def prepare(inputs: dict[str, Any], num_splits: int) -> Callable[[], torch.Tensor]:
        import torch

        q, k_cache, v_cache = (inputs[name] for name in ("q", "k_cache", "v_cache"))
        tables, lens = inputs["block_tables"], inputs["context_lens"]
        block_size, out = k_cache.shape[1], torch.empty_like(q)
        with torch.device(q.device):
            tokens = [torch.arange(n) for n in lens.tolist()]
            slots = [
                tables[row, some // block_size] * block_size + some % block_size
                for row, some in enumerate(tokens)
            ]
            states = torch.empty(*q.shape[:2], num_splits, q.shape[2])
            arguments = (
                q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), out,
                torch.tensor([0, *lens.tolist()]).cumsum(0).int(), torch.cat(slots).long(),
                states, torch.empty(states.shape[:3]),
                torch.full((len(q),), num_splits, dtype=torch.int32), num_splits,
                q.shape[2] ** -0.5, *v_scale,
            )  # fmt: skip

        def call() -> torch.Tensor:
            grouped(*arguments)
            return out

        return call

    return prepare


_SGLANG_CHECKS = "get_device_core_count is_cuda is_gfx95_supported is_gfx1250_supported is_hip"


def load_sglang(path: Path) -> types.ModuleType:
    """Load a file of SGLang's Triton attention, with helpers from the same folder."""
    prefill = "sglang.srt.layers.attention.triton_ops.prefill_attention"
    stand_ins: dict[str, dict[str, Any]] = {
        "sglang.srt.utils": dict.fromkeys(_SGLANG_CHECKS.split(), lambda: False),
        "sglang.srt.environ": {"envs": None},
        "sglang.kernels.ops.attention": {"__path__": [str(path.parent)]},
        prefill: {"context_attention_fwd": None},
    }
    return _load(path, stand_ins)


class KVQuantMode(enum.IntEnum):
    """vLLM's."""

    NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD = range(5)


def load_vllm(path: Path) -> types.ModuleType:
    """Load ``triton_unified_attention.py``, with helpers from the same folder."""
    import torch
    import triton
    import triton.language as tl

    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda _: False
    )
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
        "vllm.v1.attention.ops": {"__path__": [str(path.parent)]},
    }
    return _load(path, stand_ins)


def vllm_attention(path: Path) -> Prepare:
    """vLLM's unified attention: ``vllm/v1/attention/ops/triton_unified_attention.py``, with
    ``triton_attention_helpers.py`` beside it."""
    import torch

    module = load_vllm(path)

    def prepare(inputs: dict[str, Any], num_splits: int) -> Callable[[], torch.Tensor]:
        q, lens = inputs["q"], inputs["context_lens"]
        is_fp8 = inputs["k_cache"].itemsize == 1
        out, states = torch.empty_like(q), (*q.shape[:2], num_splits)
        with torch.device(q.device):
            starts = inputs.get("cu_seqlens_q", torch.arange(len(lens) + 1, dtype=torch.int32))
            descale = torch.ones(1) if is_fp8 else None
            arguments = {
                "q": q, "k": inputs["k_cache"], "v": inputs["v_cache"], "out": out,
                "cu_seqlens_q": starts, "max_seqlen_q": int(starts.diff().max()),
                "seqused_k": lens, "max_seqlen_k": int(lens.max()),
                "block_table": inputs["block_tables"], "softmax_scale": q.shape[2] ** -0.5,
                "causal": True, "window_size": (-1, -1), "softcap": 0,
                "q_descale": None, "k_descale": descale, "v_descale": descale,
                "kv_quant_mode": KVQuantMode(is_fp8),  # FP8_PER_TENSOR is 1
                "seq_threshold_3D": len(lens) if num_splits > 1 else None,
                "num_par_softmax_segments": num_splits,
                "softmax_segm_output": torch.empty(*states, q.shape[2]),
                "softmax_segm_max": torch.empty(states), "softmax_segm_expsum": torch.empty(states),
            }  # fmt: skip

        def call() -> torch.Tensor:
            module.unified_attention(**arguments)
            return out

        return call

    return prepare


@functools.cache
def _loaded(path: Path, name: str) -> types.ModuleType:
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load(path: Path, stand_ins: dict[str, dict[str, Any]]) -> types.ModuleType:
    """Load the module in a file.  Its imports from its own package find the stand-ins. Raises
    Unavailable if it imports other names.
    """
    for name, names in stand_ins.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            module = sys.modules.setdefault(package, types.ModuleType(package))
            module.__dict__.setdefault("__path__", [])
        module.__dict__.update(names)
    try:
        return _loaded(path, f"_other_kernels_{path.stem}")
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{path.name} of this version cannot be loaded alone: {error}") from error


class Other(NamedTuple):
    """Another project's implementation."""

    load: Callable[[Path], Prepare]
    """Loads a file."""
    ops: tuple[str, ...]


OTHERS = {
    "sglang": Other(sglang_decode, ("decode",)),
    "vllm": Other(vllm_attention, ("decode", "prefill")),
}
