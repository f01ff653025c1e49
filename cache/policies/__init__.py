"""Eviction policies.  A new policy is a class in its own file, and an entry in ``_BUILT_IN``."""

import inspect

from cache.policies.arc import ARC
from cache.policies.base import EvictionPolicy, RequestInfo
from cache.policies.belady import Belady
from cache.policies.classes import ClassPolicy
from cache.policies.fifo import FIFO
from cache.policies.filo import FILO
from cache.policies.frequency_cost import FrequencyCost
from cache.policies.gdsf import GDSF
from cache.policies.gittins import Gittins
from cache.policies.leaves import LeafPolicy
from cache.policies.lfu import LFU
from cache.policies.lru import LRU
from cache.policies.lru_k import LRUK
from cache.policies.marconi import Marconi
from cache.policies.mq import MQ
from cache.policies.mru import MRU
from cache.policies.priority import BlockHistory, PriorityPolicy, record
from cache.policies.queue_informed import QueueInformed
from cache.policies.queues import QueuePolicy
from cache.policies.random import Random
from cache.policies.random_leaf import RandomLeaf
from cache.policies.retention import Retained, Retention
from cache.policies.reuse_oracle import ReuseOracle
from cache.policies.s3fifo import S3FIFO
from cache.policies.safeguarded import Safeguarded
from cache.policies.session_end import SessionEnd
from cache.policies.session_gap import SessionGap
from cache.policies.sglang_slru import SGLangSLRU
from cache.policies.sieve import Sieve
from cache.policies.slru import SLRU
from cache.policies.tail_optimized_lru import TailOptimizedLRU
from cache.policies.time_to_live import TimeToLive
from cache.policies.two_q import TwoQ
from cache.policies.workload_aware import WorkloadAware
from cache.policies.wrapping import WrappingPolicy
from cache.retired import advice
from cache.user_classes import load_class

_BUILT_IN: tuple[type[EvictionPolicy], ...] = (
    LRU, FIFO, LFU, SLRU, LRUK, TwoQ, ARC, S3FIFO, Sieve, MQ, GDSF, Random, MRU, FILO,
    TailOptimizedLRU, WorkloadAware, RandomLeaf, Marconi, Retention,
    SGLangSLRU, FrequencyCost, SessionEnd, SessionGap, TimeToLive, QueueInformed, Gittins,
    Safeguarded, ReuseOracle, Belady,
)  # fmt: skip

POLICIES: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in _BUILT_IN}
"""Built-in policies by name."""


def make_policy(name: str, **options: object) -> EvictionPolicy:
    """Make a policy from its name, or from ``"path/to/file.py:ClassName"``.

    ``options`` are the arguments of the class.  Raises ValueError that names the policy for an
    unknown name or option, a missing option, a file that cannot be imported, a class that is not an
    ``EvictionPolicy``, and a constructor that raises.  An unknown name lists the choices.
    """
    policy_class = (
        load_class(name, "eviction policy", EvictionPolicy)
        if ".py:" in name
        else POLICIES.get(name)
    )
    if policy_class is None:
        if line := advice(f"policy {name}"):
            raise ValueError(line)
        raise ValueError(
            f"policy={name!r} is unknown; choose from {', '.join(sorted(POLICIES))}, "
            "or name a class of your own as file.py:ClassName"
        )
    accepted = inspect.signature(policy_class).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    unknown = sorted(set(options) - set(accepted))
    if unknown and not takes_any:
        raise ValueError(
            f"policy {name!r} has no option {', '.join(unknown)}; "
            f"its options: {', '.join(accepted) or 'none'}"
        )
    try:
        return policy_class(**options)
    except (Exception, SystemExit) as error:
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"policy {name!r} cannot be made: {what}{error}") from error


def as_policy(policy: str | EvictionPolicy, **options: object) -> EvictionPolicy:
    """Return ``make_policy(policy, **options)`` for a name, or a policy object itself.

    Raises ValueError for anything else, and for options together with a policy object.
    """
    if isinstance(policy, str):
        return make_policy(policy, **options)
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(f"policy={policy!r}: needs a name or an EvictionPolicy object")
    if options:
        raise ValueError(
            f"options {', '.join(options)} were given with a policy object; set them on the object"
        )
    return policy


__all__ = [
    "POLICIES", "BlockHistory", "ClassPolicy", "EvictionPolicy", "LeafPolicy", "PriorityPolicy",
    "QueueInformed", "QueuePolicy", "RequestInfo", "Retained", "Safeguarded", "WrappingPolicy",
    "as_policy", "make_policy", "record",
]  # fmt: skip
