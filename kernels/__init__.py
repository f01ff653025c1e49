"""Triton kernels of the paged KV cache data path.

    store_kvcache            write new keys and values into their slots

Every op has a plain PyTorch twin of the same signature in `kernels.reference`. Ops run on a GPU, or
on CPU tensors in Triton's interpreter when TRITON_INTERPRET=1 is in the environment before this
package is first imported.
"""

from kernels.store_kvcache import store_kvcache

__all__ = ["store_kvcache"]
