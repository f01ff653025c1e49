"""Triton kernels of the paged KV cache data path.

    store_kvcache            write new keys and values into their slots
    paged_decode_attention   one query per sequence over its paged cache, split-KV

Every op has a plain PyTorch twin of the same signature in `kernels.reference`. Ops run on a GPU, or
on CPU tensors in Triton's interpreter when TRITON_INTERPRET=1 is in the environment before this
package is first imported.
"""

from kernels.paged_decode_attention import paged_decode_attention
from kernels.store_kvcache import store_kvcache

__all__ = ["paged_decode_attention", "store_kvcache"]
