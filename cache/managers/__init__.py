"""Cache managers.  To add one: a class in a file of its own and its name in ``MANAGERS``."""

from __future__ import annotations

import inspect

from cache.checks import true_or_false
from cache.managers.base import (
    AllocStatus,
    CacheManager,
    CacheStats,
    InterruptedChange,
    UnsupportedByDesign,
)
from cache.managers.contiguous import Contiguous
from cache.managers.nano_vllm import NanoVLLM
from cache.managers.paged import Paged
from cache.managers.radix import Radix
from cache.managers.vllm_v0 import VLLMv0
from cache.managers.vllm_v1 import VLLMv1
from cache.policies.base import EvictionPolicy

MANAGERS: dict[str, type[CacheManager]] = {
    manager.name: manager for manager in (Contiguous, Paged, NanoVLLM, VLLMv0, VLLMv1, Radix)
}
"""Cache managers by name."""


def make_manager(
    name: str,
    *,
    num_blocks: int,
    block_size: int,
    policy: str | EvictionPolicy = "lru",
    hash_algorithm: str = "xxh3_128",
    enable_prefix_caching: bool = True,
    **design_options,
) -> CacheManager:
    """Make the cache manager ``name`` for ``num_blocks`` blocks of ``block_size`` tokens.

    Args:
        policy: name of an eviction policy (or ``"file.py:Class"``), or a policy object, which
            then belongs to the manager.
        hash_algorithm: a key of ``cache.blocks.hashing.HASH_ALGORITHMS``.  The default depends on
            the design: xxh64 for Nano-vLLM, none where no block is hashed.
        enable_prefix_caching: False stores equal prefixes separately.
        design_options: passed to the manager's class.

    Raises ValueError for an unknown manager, policy, algorithm or option (with the choices) and for
    other bad values, and UnsupportedByDesign for a policy or an algorithm that the design does not
    use.
    """
    manager_class = MANAGERS.get(name) if isinstance(name, str) else None
    if manager_class is None:
        raise ValueError(f"manager={name!r} is unknown; choose from {', '.join(sorted(MANAGERS))}")
    accepted = list(inspect.signature(manager_class).parameters)[2:]
    unknown = sorted(set(design_options) - set(accepted))
    if unknown:
        raise ValueError(
            f"manager {name!r} has no option {', '.join(unknown)}; "
            f"its options: {', '.join(accepted) or 'none'}"
        )
    true_or_false("enable_prefix_caching", enable_prefix_caching)
    if manager_class.prefix_caching:
        design_options |= {"policy": policy, "enable_prefix_caching": enable_prefix_caching}
        if hash_algorithm != "xxh3_128":
            design_options["hash_algorithm"] = hash_algorithm
    elif policy != "lru":
        raise UnsupportedByDesign(name, f"a policy ({policy!r})")
    elif hash_algorithm != "xxh3_128":
        raise UnsupportedByDesign(name, f"a hash_algorithm ({hash_algorithm!r})")
    return manager_class(num_blocks, block_size, **design_options)


__all__ = [
    "MANAGERS",
    "AllocStatus",
    "CacheManager",
    "CacheStats",
    "InterruptedChange",
    "UnsupportedByDesign",
    "make_manager",
]
