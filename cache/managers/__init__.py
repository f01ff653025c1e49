"""Cache managers.  To add a manager, write its class in a new file and list it in ``MANAGERS``."""

import inspect
from typing import Any

from cache.checks import shown
from cache.managers.base import (
    AllocStatus,
    CacheManager,
    CacheOptions,
    InterruptedChange,
    UnsupportedByDesign,
)
from cache.managers.contiguous import Contiguous
from cache.managers.nano_vllm import NanoVLLM
from cache.managers.paged import Paged
from cache.managers.radix import Radix
from cache.managers.stats import CacheStats
from cache.managers.tiered import TIER_OPTIONS, with_tier
from cache.managers.vllm_v0 import VLLMv0
from cache.managers.vllm_v1 import VLLMv1
from cache.policies.base import EvictionPolicy
from cache.user_classes import defined, load_class

MANAGERS: dict[str, type[CacheManager]] = {
    manager.name: manager for manager in (Contiguous, Paged, NanoVLLM, VLLMv0, VLLMv1, Radix)
}
"""Cache managers: name -> class."""


def manager_class(manager: str | type[CacheManager]) -> type[CacheManager]:
    """The class of a manager by name or as ``"path/to/file.py:ClassName"``, or a class itself.

    Raises ValueError for anything else, for a file that cannot be imported, and for a class that
    lacks a method.
    """
    if isinstance(manager, str) and manager in MANAGERS:
        return MANAGERS[manager]
    if inspect.isclass(manager) and issubclass(manager, CacheManager):
        found = defined(f"manager={manager.__name__}", manager)
    elif isinstance(manager, str) and ".py:" in manager:
        found = load_class(manager, "cache manager", CacheManager)
    elif isinstance(manager, CacheManager):
        raise ValueError(f"manager={manager!r}: needs its class, as the object has its num_blocks")
    else:
        raise ValueError(
            f"manager={shown(manager)} is unknown; choose from {', '.join(sorted(MANAGERS))}, "
            "or give a class of your own, also as file.py:ClassName"
        )
    needs = {"can_fork": "_share", "can_reset": "_forget", "prefix_caching": "_match"}
    for offer, method in needs.items():
        own, inherited = (getattr(cls, method, None) for cls in (found, CacheManager))
        if getattr(found, offer) and own is inherited:
            raise ValueError(f"manager={shown(manager)}: {offer} is True, so define {method}")
    return found


def make_manager(
    name: str | type[CacheManager],
    *,
    num_blocks: int,
    block_size: int,
    policy: str | EvictionPolicy = "lru",
    hash_algorithm: str = "xxh3_128",
    enable_prefix_caching: bool = True,
    host_blocks: int = 0,
    host_policy: str | EvictionPolicy = "lru",
    store: str = "through",
    store_threshold: int = 2,
    inclusive: bool = True,
    **design_options: Any,
) -> CacheManager:
    """Make the cache manager ``name`` for ``num_blocks`` blocks of ``block_size`` tokens.

    Args:
        name: a key of ``MANAGERS``, ``"file.py:Class"``, or a subclass of ``CacheManager``.
        policy: name of an eviction policy (or ``"file.py:Class"``), or a policy object.  The
            manager owns the object.
        hash_algorithm: a key of ``cache.blocks.hashing.HASH_ALGORITHMS``.  For Nano-vLLM the
            default means xxh64.  Designs that hash no block accept only the default.
        enable_prefix_caching: False stores equal prefixes separately.
        host_blocks: number of blocks in host memory that keep cached prefixes, see
            ``CacheManager.take_transfers``.  0: no tier.  Needs a design with prefix caching.
        host_policy: policy of these blocks.
        store, store_threshold, inclusive: when a block is stored there, and whether it stays there
            when it is loaded, see ``cache.blocks.host_tier.HostTier``.
        design_options: further arguments of the manager's class.

    Raises ValueError for bad values and for a class that cannot be made.  The error lists the known
    managers, policies, algorithms or options.  Raises UnsupportedByDesign for a policy or
    an algorithm that the design does not use.
    """
    design = manager_class(name)
    accepted = list(inspect.signature(design).parameters)[1:]
    unknown = sorted(set(design_options) - set(accepted))
    if unknown:
        shared = ["policy", "enable_prefix_caching", *TIER_OPTIONS] * design.prefix_caching
        shared += ["hash_algorithm"] * bool(design.own_hash)
        raise ValueError(
            f"manager {design.name!r} has no option {', '.join(unknown)}; "
            f"its options: {', '.join(shared + accepted) or 'none'}"
        )
    options = CacheOptions(
        num_blocks=num_blocks,
        block_size=block_size,
        policy=policy,
        hash_algorithm=hash_algorithm,
        enable_prefix_caching=enable_prefix_caching,
        host_blocks=host_blocks,
        host_policy=host_policy,
        store=store,
        store_threshold=store_threshold,
        inclusive=inclusive,
    )
    try:
        manager = with_tier(design, options)(options, **design_options)
    except (ValueError, UnsupportedByDesign, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"manager {design.name!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(manager, "interruption"):
        raise ValueError(f"manager {design.name!r}: __init__ must call super().__init__(options)")
    return manager


__all__ = [
    "MANAGERS", "AllocStatus", "CacheManager", "CacheStats", "InterruptedChange",
    "UnsupportedByDesign", "make_manager", "manager_class",
]  # fmt: skip
