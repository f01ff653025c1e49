"""Control path of a paged KV cache: blocks, hashes, policies, managers, replay.  No PyTorch."""

from cache import retired
from cache.blocks.groups import Group, layer_groups
from cache.blocks.memory_usage import MemoryUsage
from cache.blocks.pool import OutOfBlocks
from cache.blocks.sequence import MultiModalInput, Sequence
from cache.blocks.session_hint import SessionHint
from cache.managers import (
    MANAGERS,
    AllocStatus,
    CacheManager,
    CacheStats,
    InterruptedChange,
    UnsupportedByDesign,
    make_manager,
)
from cache.policies import POLICIES, ClassPolicy, EvictionPolicy, PriorityPolicy, make_policy
from cache.replay.overlapping import ServingReplayResult, prompt_token_ids, simulate_serving
from cache.replay.serial import SimulationResult, simulate
from cache.serving.open_loop import Clock, ServiceModel
from cache.sizing import (
    block_bytes,
    kv_cache_shape,
    kv_heads_per_rank,
    latent_slot_bytes,
    num_cpu_blocks,
    num_gpu_blocks,
    reservation_waste,
    slot_bytes,
)
from cache.traces.trace import Trace, TraceError, load_trace, save_trace
from cache.traces.workloads import WORKLOADS, make_workload

retired.install()

__all__ = [
    "MANAGERS", "POLICIES", "WORKLOADS", "AllocStatus", "CacheManager", "CacheStats", "ClassPolicy",
    "Clock", "EvictionPolicy", "Group", "InterruptedChange", "MemoryUsage", "MultiModalInput",
    "OutOfBlocks", "PriorityPolicy", "Sequence", "ServiceModel", "ServingReplayResult",
    "SessionHint", "SimulationResult", "Trace", "TraceError", "UnsupportedByDesign", "block_bytes",
    "kv_cache_shape", "kv_heads_per_rank", "latent_slot_bytes", "layer_groups", "load_trace",
    "make_manager", "make_policy", "make_workload", "num_cpu_blocks", "num_gpu_blocks",
    "prompt_token_ids", "reservation_waste", "save_trace", "simulate", "simulate_serving",
    "slot_bytes",
]  # fmt: skip
