"""Add the fence that Triton before 3.7.1 omits on sm_90 and sm_100, see docs/kernel-tuning.md."""

import re
from dataclasses import replace
from typing import Any

import triton
from triton.backends import backends


def fence_copies(ptx: str) -> str:
    """If PTX has asynchronous products, add a fence after each wait for asynchronous copies.

    These products read shared memory through the async proxy, but copies write it through the
    generic proxy. Each thread fences its copies before the barrier that precedes the products.
    """
    if not re.search(r"\b(wgmma\.mma_async|tcgen05\.mma)\b", ptx):
        return ptx
    wait = r"^([ \t]*)(cp\.async\.wait_(?:group\s+\d+|all);)"
    return re.sub(wait, r"\1\2\n\1fence.proxy.async.shared::cta;", ptx, flags=re.M)


def add_fences() -> None:
    """Make Triton before 3.7.1 add the fence to all kernels compiled for NVIDIA GPUs."""
    version = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))
    nvidia: Any = backends.get("nvidia")
    if version >= (3, 7, 1) or not nvidia or nvidia.compiler.__name__ == "FencedBackend":
        return

    class FencedBackend(nvidia.compiler):
        def make_ptx(self, *arguments: Any) -> str:
            return fence_copies(super().make_ptx(*arguments))

        def hash(self) -> str:  # part of the key of Triton's cache
            return f"{super().hash()}-fence_copies"

    backends["nvidia"] = replace(nvidia, compiler=FencedBackend)
