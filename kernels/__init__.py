"""Triton kernels of the paged KV cache data path.

    store_kvcache                   write new keys and values into their slots
    rope_store_kvcache              normalise and rotate queries and keys, write keys and values
    apply_rotary_embedding          rotary position embedding of queries or keys
    slot_mapping_from_positions     token positions to slots, on the device
    paged_decode_attention          one query per sequence over its paged cache, split-KV
    paged_prefill_attention         many queries per sequence: prefill, prefix hits, mixed batches
    concat_and_cache_mla            write new latents into their slots (MLA)
    paged_mla_decode_attention      decode over a paged cache of latents (MLA), split-KV
    shared_prefix_decode_attention  decode that reads a shared prefix once for its group
    merge_attention_states          combine two partial attentions by their LSE
    copy_blocks                     copy whole blocks inside a cache (copy-on-write)
    swap_blocks                     copy whole blocks between GPU and pinned host memory
    add_rms_norm                    residual addition and RMSNorm
    gated_activation                SwiGLU or GeGLU
    sample_tokens                   sample next tokens from logits, or take the likeliest

Caches are fp16, bf16, fp32 or fp8 (e4m3) with scales, see `kernels.fp8_cache`.

`kernels.reference` has every op in plain PyTorch, with the same signature. Ops run on a GPU, or
on CPU tensors in Triton's interpreter when TRITON_INTERPRET=1 is in the environment before this
package is first imported. They are for inference: no result requires gradients.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import triton
from triton.runtime.jit import JITFunction

from kernels.add_rms_norm import add_rms_norm
from kernels.apply_rotary_embedding import apply_rotary_embedding
from kernels.concat_and_cache_mla import concat_and_cache_mla
from kernels.copy_blocks import copy_blocks
from kernels.fences import add_fences
from kernels.gated_activation import gated_activation
from kernels.merge_attention_states import merge_attention_states
from kernels.paged_decode_attention import paged_decode_attention
from kernels.paged_mla_decode_attention import paged_mla_decode_attention
from kernels.paged_prefill_attention import paged_prefill_attention
from kernels.primitives import INTERPRETED
from kernels.rope_store_kvcache import rope_store_kvcache
from kernels.sample_tokens import sample_tokens
from kernels.shared_prefix_decode_attention import shared_prefix_decode_attention
from kernels.slot_mapping_from_positions import slot_mapping_from_positions
from kernels.store_kvcache import store_kvcache
from kernels.swap_blocks import swap_blocks

add_fences()
if INTERPRETED:
    from kernels.interpreter import hasten

    hasten()
else:
    # Triton 3.7.1 includes a callee's globals in a function's hash only if the callee was hashed
    # before. Hash in a fixed order, so that all processes find the same compile-cache entries.
    for _name in sorted(name for name in sys.modules if name.startswith("kernels.")):
        for _kernel in list(vars(sys.modules[_name]).values()):
            if isinstance(_kernel, JITFunction):
                _ = _kernel.cache_key

# If Triton's folder cannot be written: one in the temporary folder that another user did not make,
# because Triton runs what it finds. Child processes use it, too.
_cache = Path(triton.knobs.cache.dir).absolute()
if not os.access(next(filter(os.path.exists, (_cache, *_cache.parents))), os.W_OK | os.X_OK):
    with suppress(OSError):
        _cache = Path(tempfile.gettempdir(), f"pagelab-{os.geteuid()}")
        _cache.mkdir(0o700, exist_ok=True)
        if _cache.lstat().st_uid == os.geteuid():
            os.environ["TRITON_CACHE_DIR"] = str(_cache)

__all__ = [
    "add_rms_norm", "apply_rotary_embedding", "concat_and_cache_mla", "copy_blocks",
    "gated_activation", "merge_attention_states", "paged_decode_attention",
    "paged_mla_decode_attention", "paged_prefill_attention", "rope_store_kvcache", "sample_tokens",
    "shared_prefix_decode_attention", "slot_mapping_from_positions", "store_kvcache", "swap_blocks",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        line = f"module 'kernels' has no attribute {name!r}"
        if not name.startswith("_"):
            with suppress(ImportError):  # cache may not be there
                from cache.retired import advice

                line = advice(f"kernels.{name}") or line
        raise AttributeError(line)
