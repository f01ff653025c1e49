"""The fence that Triton before 3.7.1 leaves out on sm_90 and sm_100, see docs/kernel-tuning.md.

Products of prefill read keys and values from shared memory through the async proxy. Asynchronous
copies wrote them there through the generic proxy, so a `fence.proxy.async` must come in between.
"""

from __future__ import annotations

import re
from dataclasses import replace

import triton
from triton.backends import backends


def fence_copies(ptx: str) -> str:
    """PTX with a fence after each wait for asynchronous copies, if its products are asynchronous.

    Each thread fences its own copies before the barrier that hands them to the products.
    """
    if not re.search(r"\b(wgmma\.mma_async|tcgen05\.mma)\b", ptx):
        return ptx
    wait = r"^([ \t]*)(cp\.async\.wait_(?:group\s+\d+|all);)"
    return re.sub(wait, r"\1\2\n\1fence.proxy.async.shared::cta;", ptx, flags=re.M)


def add_fences() -> None:
    """Add the fence to all kernels that this process compiles for NVIDIA GPUs from now on.

    Does nothing from Triton 3.7.1 on. Fenced and other kernels have different keys in Triton's
    cache.
    """
    version = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))
    if version >= (3, 7, 1) or "nvidia" not in backends:
        return
    nvidia = backends["nvidia"]
    if hasattr(nvidia.compiler, "has_fences"):
        return

    class FencedBackend(nvidia.compiler):
        has_fences = True

        def make_ptx(self, *arguments):
            return fence_copies(super().make_ptx(*arguments))

        def hash(self) -> str:
            return f"{super().hash()}-fence_copies"

    backends["nvidia"] = replace(nvidia, compiler=FencedBackend)
