"""Other projects' Triton attention, from a file of theirs, on inputs of ours.

A file is loaded by its path without the package that it belongs to: the few names that it imports
from there get stand-ins. Tried with SGLang 0.5.3 and vLLM 0.32.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.harness import Unavailable

if TYPE_CHECKING:
    import torch

    from kernels.testing.inputs import PagedBatch


def sglang_decode(path: Path) -> Callable[..., torch.Tensor]:
    """SGLang's grouped decode: ``sglang/srt/layers/attention/triton_ops/decode_attention.py``.

    It takes the slot of every token, whatever the block size.
    """
    module = _load(path, {"sglang.srt.utils": {"is_hip": lambda: False}})

    def call(batch: PagedBatch, num_splits: int) -> torch.Tensor:
        import torch

        q, k_cache, v_cache, tables, lens = batch.decode_args
        block_size = k_cache.shape[1]
        slots = [
            tables[row, torch.arange(n) // block_size] * block_size + torch.arange(n) % block_size
            for row, n in enumerate(lens.tolist())
        ]
        starts = torch.tensor([0, *lens.tolist()]).cumsum(0).int()
        states = (*q.shape[:2], num_splits)
        out = torch.empty_like(q)
        module.decode_attention_fwd_grouped(
            q,
            k_cache.flatten(0, 1),
            v_cache.flatten(0, 1),
            out,
            starts,
            torch.cat(slots).long(),
            torch.empty(*states, q.shape[2]),
            torch.empty(states),
            torch.full((len(q),), num_splits, dtype=torch.int32),
            num_splits,
            q.shape[2] ** -0.5,
        )
        return out

    return call


_QUANT_MODES = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"


def vllm_attention(path: Path) -> Callable[..., torch.Tensor]:
    """vLLM's unified attention: ``vllm/v1/attention/ops/triton_unified_attention.py``, with
    ``triton_attention_helpers.py`` beside it."""
    import torch
    import triton
    import triton.language as tl

    modes = enum.IntEnum("KVQuantMode", _QUANT_MODES, start=0)
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda _: False
    )
    stand_ins = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": modes},
        "vllm.v1.attention.ops": {"__path__": [str(path.parent)]},
    }
    module = _load(path, stand_ins)

    def call(batch: PagedBatch, num_splits: int) -> torch.Tensor:
        fp8 = batch.k_cache.itemsize == 1
        out, one = torch.empty_like(batch.q), torch.ones(1)
        states = (*batch.q.shape[:2], num_splits)
        module.unified_attention(
            q=batch.q,
            k=batch.k_cache,
            v=batch.v_cache,
            out=out,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            seqused_k=batch.context_lens,
            max_seqlen_k=int(batch.context_lens.max()),
            softmax_scale=batch.q.shape[2] ** -0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.block_tables,
            softcap=0,
            q_descale=None,
            k_descale=one if fp8 else None,
            v_descale=one if fp8 else None,
            kv_quant_mode=modes.FP8_PER_TENSOR if fp8 else modes.NONE,
            seq_threshold_3D=len(batch.context_lens) if num_splits > 1 else None,
            num_par_softmax_segments=num_splits,
            softmax_segm_output=torch.empty(*states, batch.q.shape[2]),
            softmax_segm_max=torch.empty(states),
            softmax_segm_expsum=torch.empty(states),
        )
        return out

    return call


@functools.cache
def _loaded(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load(path: Path, stand_ins: dict[str, dict[str, Any]]) -> types.ModuleType:
    """The module in a file, where its imports from its own package find the stand-ins.

    Raises Unavailable if it imports more than these.
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
    """An implementation that a file holds."""

    load: Callable[[Path], Callable[..., torch.Tensor]]
    """To a call that takes a PagedBatch and how many parts to split each sequence into."""
    ops: tuple[str, ...]


OTHERS = {
    "sglang": Other(sglang_decode, ("decode",)),
    "vllm": Other(vllm_attention, ("decode", "prefill")),
}
