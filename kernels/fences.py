"""The fence that Triton before 3.7.1 leaves out on sm_90 and sm_100, see docs/kernel-tuning.md."""

import re
from dataclasses import replace
from typing import Any

import triton
from triton.backends import backends


def fence_copies(ptx: str) -> str:
    """PTX with a fence after each wait for asynchronous copies, if its products are asynchronous.

    Such products read shared memory through the async proxy, copies write it through the generic
    proxy. Each thread fences its own copies before the barrier that hands them to the products.
    """
    if not re.search(r"\b(wgmma\.mma_async|tcgen05\.mma)\b", ptx):
        return ptx
    wait = r"^([ \t]*)(cp\.async\.wait_(?:group\s+\d+|all);)"
    return re.sub(wait, r"\1\2\n\1fence.proxy.async.shared::cta;", ptx, flags=re.M)


def add_fences() -> None:
    """Make Triton before 3.7.1 add the fence to all that this process compiles for NVIDIA GPUs."""
    version = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))
    nvidia: Any = backends.get("nvidia")
    if version >= (3, 7, 1) or not nvidia or nvidia.compiler.__name__ == "FencedBackend":
        return

    class FencedBackend(nvidia.compiler):
        def make_ptx(self, *arguments):
            return fence_copies(super().make_ptx(*arguments))

        def hash(self) -> str:  # part of the key of Triton's cache
            return f"{super().hash()}-fence_copies"

    backends["nvidia"] = replace(nvidia, compiler=FencedBackend)
