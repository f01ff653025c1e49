"""Sizes in bytes of blocks, pools and KV tensors, computed from the shape of a model.

``num_kv_heads`` is the number of KV heads of the whole model.  With tensor parallelism each rank
stores its share of the heads in its own blocks.  All results are for one rank.

The functions raise ValueError, with the argument's name, for a size in bytes above 2**63 - 1 and
for any other integer above 2**31 - 1.
"""

import math
from fractions import Fraction
from numbers import Real

from cache.checks import at_least

_MAX_BYTES = 2**63 - 1


def kv_heads_per_rank(num_kv_heads: int, tensor_parallel_size: int = 1) -> int:
    """Number of KV heads that one rank stores.

    Heads are divided among the ranks.  With more ranks than heads, several ranks store the same
    head (as in Megatron-LM and vLLM).  Raises ValueError if neither number divides the other.
    """
    heads = at_least(1, "num_kv_heads", num_kv_heads)
    ranks = at_least(1, "tensor_parallel_size", tensor_parallel_size)
    if heads % ranks and ranks % heads:
        raise ValueError(
            f"tensor_parallel_size={ranks} does not fit num_kv_heads={heads}: "
            "one must be a multiple of the other"
        )
    return max(1, heads // ranks)


def slot_bytes(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
    tensor_parallel_size: int = 1,
) -> int:
    """Bytes of one token's K and V in all layers on one rank.

    ``dtype_bytes``: bytes of a cache element: 2 for float16 and bfloat16.
    """
    return (
        2
        * at_least(1, "num_layers", num_layers)
        * kv_heads_per_rank(num_kv_heads, tensor_parallel_size)
        * at_least(1, "head_dim", head_dim)
        * at_least(1, "dtype_bytes", dtype_bytes)
    )


def latent_slot_bytes(
    *, num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype_bytes: int = 2
) -> int:
    """Bytes of one token's rows in all layers of a latent cache (multi-head latent attention).

    All heads read the same row.  So each rank of tensor parallelism stores all rows.
    """
    row = at_least(1, "kv_lora_rank", kv_lora_rank)
    row += at_least(1, "qk_rope_head_dim", qk_rope_head_dim)
    return at_least(1, "num_layers", num_layers) * row * at_least(1, "dtype_bytes", dtype_bytes)


def block_bytes(*, block_size: int, **shape: int) -> int:
    """Bytes of the K and V of one block of ``block_size`` tokens in all layers on one rank.

    ``shape``: the arguments of ``slot_bytes``.  For example, block_size 4, 4 layers, 8 heads,
    head_dim 128 and float16 give 65,536 bytes.
    """
    return at_least(1, "block_size", block_size) * slot_bytes(**shape)


def num_gpu_blocks(
    *, total_bytes: int, gpu_memory_utilization: float, peak_bytes: int, block_bytes: int
) -> int:
    """Number of blocks that fit into the memory of a GPU beside the model.

    It is ``floor((total_bytes * gpu_memory_utilization - peak_bytes) / block_bytes)``.
    ``peak_bytes`` is the peak memory of a profiling run with the largest batch and no cache.  The
    utilization is read as an exact decimal number, so that binary rounding never costs a block.
    Raises ValueError if no block fits, and for bad arguments.
    """
    total = at_least(1, "total_bytes", total_bytes, _MAX_BYTES)
    peak = at_least(0, "peak_bytes", peak_bytes, _MAX_BYTES)
    size = at_least(1, "block_bytes", block_bytes, _MAX_BYTES)
    usable = total * utilization_share(gpu_memory_utilization)
    count = math.floor((usable - peak) / size)
    if count < 1:
        raise ValueError(
            f"not one block fits: gpu_memory_utilization={gpu_memory_utilization} of "
            f"total_bytes={total} are {math.floor(usable)} bytes, the model takes "
            f"peak_bytes={peak} at most, and a block needs block_bytes={size}; raise the "
            "utilization or choose a smaller model or block"
        )
    return count


def utilization_share(gpu_memory_utilization: float) -> Fraction:
    """Return the utilization as an exact decimal number.  ValueError unless it is in (0, 1]."""
    utilization = gpu_memory_utilization
    is_number = isinstance(utilization, Real) and not isinstance(utilization, bool)
    if not is_number or not 0 < utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization={utilization!r}: needs a number above 0 and at most 1"
        )
    return Fraction(repr(float(utilization)))


def num_cpu_blocks(*, swap_space_bytes: int, block_bytes: int) -> int:
    """Number of blocks that fit into the swap space in host memory; may be 0."""
    space = at_least(0, "swap_space_bytes", swap_space_bytes, _MAX_BYTES)
    return space // at_least(1, "block_bytes", block_bytes, _MAX_BYTES)


def kv_cache_shape(
    *,
    num_blocks: int,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    tensor_parallel_size: int = 1,
) -> tuple[int, int, int, int, int, int]:
    """Shape of one rank's KV tensor: ``(2, layers, blocks, block_size, heads, head_dim)``.

    ``kv[0, layer]`` is the ``k_cache`` argument of the kernels, ``kv[1, layer]`` the ``v_cache``.
    """
    return (
        2,
        at_least(1, "num_layers", num_layers),
        at_least(1, "num_blocks", num_blocks),
        at_least(1, "block_size", block_size),
        kv_heads_per_rank(num_kv_heads, tensor_parallel_size),
        at_least(1, "head_dim", head_dim),
    )


def reservation_waste(reserved_tokens: int, used_tokens: int) -> float:
    """Unused share of a reservation: 0.903 if 792 of 8192 reserved tokens are used."""
    reserved = at_least(1, "reserved_tokens", reserved_tokens)
    used = at_least(0, "used_tokens", used_tokens)
    if used > reserved:
        raise ValueError(f"used_tokens={used} exceeds reserved_tokens={reserved}")
    return 1 - used / reserved
