"""The kernels of the paged cache, each with how ``kernel_accuracy`` compares it with its reference.

To add a kernel: a function from a case to the accuracy of its results, and a line in ``KERNELS``.
``kernels`` is imported inside, because TRITON_INTERPRET must be set before it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kernels.testing.accuracy import Accuracy
    from kernels.testing.inputs import PagedBatch

FEATURES = ("none", "window", "softcap", "alibi", "sinks", "split")
"""Options of the attention kernels, taken one at a time."""

_CONTEXT_LENS = (1, 37, 290)
_QUERY_LENS = (1, 37, 20)
_PREFIX_LENS = (150, 0)
_GROUP_OFFSETS = (0, 2, 3)
_ROTARY_TOKENS = 29
_NUM_KV_HEADS = 2
_NUM_Q_HEADS = 6
_WINDOW = 33


@dataclass(frozen=True)
class Case:
    """What a kernel is to be compared on."""

    block_size: int
    dtype: torch.dtype
    """Of queries, new keys and values, and the cache unless that is fp8."""
    head_dim: int
    feature: str
    seed: int
    device: torch.device
    fp8_cache: bool = False
    """Whether the cache is fp8 (e4m3) with a scale per head.  The attention kernels are judged on
    what it holds, the store on what PyTorch's own conversion makes of the same numbers."""

    @property
    def cache_dtype(self) -> torch.dtype:
        import torch

        return torch.float8_e4m3fn if self.fp8_cache else self.dtype

    @property
    def scales(self) -> dict[str, Any]:
        """k_scale and v_scale of an fp8 cache."""
        from kernels.testing.inputs import random_scales

        return random_scales("per head", _NUM_KV_HEADS, self.device) if self.fp8_cache else {}


@dataclass(frozen=True)
class Kernel:
    """How a kernel is compared."""

    check: Callable[[Case], dict[str, Accuracy]]
    """The accuracy of each result by name, the output first."""
    features: tuple[str, ...] = ("none",)
    """Those of ``FEATURES`` that it has."""
    touches_cache: bool = True
    """Whether the dtype of the cache matters to it."""
    knows_blocks: bool = True
    """Whether the block size matters to it."""


def _store_kvcache(case: Case) -> dict[str, Accuracy]:
    import torch

    from kernels import reference, store_kvcache
    from kernels.testing.accuracy import compare_with_reference

    generator = torch.Generator().manual_seed(case.seed)
    num_tokens = sum(_CONTEXT_LENS)
    num_blocks = -(-num_tokens // case.block_size) + 3
    qkv = torch.randn(
        num_tokens, _NUM_Q_HEADS + 2 * _NUM_KV_HEADS, case.head_dim, generator=generator
    ).to(case.device, case.dtype)
    key, value = qkv[:, _NUM_Q_HEADS:].split(_NUM_KV_HEADS, dim=1)
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[:num_tokens]
    slots[::5] = -1  # padding, to be skipped
    shape = (2, num_blocks, case.block_size, _NUM_KV_HEADS, case.head_dim)

    def stored_by(op: Callable) -> Callable:
        def stored(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            dtype = case.cache_dtype if case.fp8_cache else key.dtype
            caches = torch.zeros(shape, dtype=dtype, device=key.device)
            op(key, value, *caches, slots, **case.scales)
            return caches

        return stored

    (caches,) = compare_with_reference(
        stored_by(store_kvcache),
        stored_by(reference.store_kvcache),
        (key, value, slots.to(case.device)),
    )
    return {"K and V cache": caches}


def _copy_blocks(case: Case) -> dict[str, Accuracy]:
    import torch

    from kernels import copy_blocks, reference
    from kernels.testing.accuracy import compare_with_reference

    generator = torch.Generator().manual_seed(case.seed)
    num_layers, num_blocks = 2, 9
    shape = (2, num_layers, num_blocks, case.block_size, _NUM_KV_HEADS, case.head_dim)
    caches = torch.randn(shape, generator=generator).to(case.device, case.cache_dtype)
    pairs = torch.randperm(num_blocks, generator=generator)[:8].view(4, 2)

    def copied_by(op: Callable) -> Callable:
        def copied(caches: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
            caches = caches.clone()
            op(caches, pairs)
            return caches

        return copied

    (copied,) = compare_with_reference(
        copied_by(copy_blocks),
        copied_by(reference.copy_blocks),
        (caches, pairs.to(case.device)),
    )
    return {"K and V cache": copied}


def _swap_blocks(case: Case) -> dict[str, Accuracy]:
    import torch

    from kernels import reference, swap_blocks
    from kernels.testing.accuracy import compare_with_reference

    generator = torch.Generator().manual_seed(case.seed)
    num_layers, num_blocks = 2, 3
    shape = (2, num_layers, num_blocks, case.block_size, _NUM_KV_HEADS, case.head_dim)
    caches = torch.randn(shape, generator=generator).to(case.device, case.cache_dtype)
    pairs = torch.stack([torch.randperm(num_blocks, generator=generator) for _ in range(2)], 1)

    def through_the_host(op: Callable) -> Callable:
        def swapped(caches: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
            pinned = {"pin_memory": caches.device.type == "cuda"}
            host = torch.zeros(shape, dtype=caches.dtype, **pinned)
            back = torch.zeros_like(caches)
            op(caches, host, pairs)
            op(host, back, pairs.flip(1)[:2].contiguous())
            return back

        return swapped

    (swapped,) = compare_with_reference(
        through_the_host(swap_blocks),
        through_the_host(reference.swap_blocks),
        (caches, pairs.to(case.device)),
    )
    return {"K and V cache": swapped}


def _rotary_inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """A fused QKV projection, positions, and fp32 tables of their cosines and sines."""
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    qkv = torch.randn(_ROTARY_TOKENS, heads, case.head_dim, generator=generator)
    positions = torch.randint(0, 500, (_ROTARY_TOKENS,), generator=generator)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, case.head_dim // 2)
    angles = torch.arange(500)[:, None] * frequencies
    tables = angles.cos().to(case.device), angles.sin().to(case.device)
    return qkv.to(case.device, case.dtype), positions.to(case.device), *tables


def _apply_rotary_embedding(case: Case) -> dict[str, Accuracy]:
    from kernels import apply_rotary_embedding, reference
    from kernels.testing.accuracy import compare_with_reference

    qkv, positions, cos, sin = _rotary_inputs(case)
    (rotated,) = compare_with_reference(
        apply_rotary_embedding,
        reference.apply_rotary_embedding,
        (qkv[:, :_NUM_Q_HEADS], positions, cos, sin),
    )
    return {"output": rotated}


def _rope_store_kvcache(case: Case) -> dict[str, Accuracy]:
    import torch

    from kernels import reference, rope_store_kvcache
    from kernels.testing.accuracy import compare_with_reference

    qkv, positions, cos, sin = _rotary_inputs(case)
    num_tokens = len(qkv)
    num_blocks = -(-num_tokens // case.block_size) + 3
    generator = torch.Generator().manual_seed(case.seed)
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[:num_tokens]
    slots[::5] = -1  # padding, to be skipped
    sizes = (2, num_blocks, case.block_size, _NUM_KV_HEADS, case.head_dim)

    def stored_by(op: Callable) -> Callable:
        def stored(qkv: torch.Tensor, slots: torch.Tensor, *rotary: torch.Tensor) -> tuple:
            dtype = case.cache_dtype if case.fp8_cache else qkv.dtype
            caches = torch.zeros(sizes, dtype=dtype, device=qkv.device)
            heads = (_NUM_Q_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS)
            query, key, value = qkv.clone().split(heads, dim=1)
            op(query, key, value, *caches, slots, *rotary, **case.scales)
            return caches, query

        return stored

    caches, query = compare_with_reference(
        stored_by(rope_store_kvcache),
        stored_by(reference.rope_store_kvcache),
        (qkv, slots.to(case.device), positions, cos, sin),
    )
    return {"K and V cache": caches, "query": query}


def _merge_attention_states(case: Case) -> dict[str, Accuracy]:
    import torch

    from kernels import merge_attention_states, reference
    from kernels.testing.accuracy import compare_with_reference

    generator = torch.Generator().manual_seed(case.seed)
    parts = []
    for _ in range(2):
        out = torch.randn(23, _NUM_Q_HEADS, case.head_dim, generator=generator)
        lse = torch.randn(23, _NUM_Q_HEADS, generator=generator)
        lse[torch.rand(23, _NUM_Q_HEADS, generator=generator) < 0.2] = -torch.inf  # no keys
        parts += [out.to(case.device, case.dtype), lse.to(case.device)]
    output, lse = compare_with_reference(
        merge_attention_states, reference.merge_attention_states, parts
    )
    return {"output": output, "LSE": lse}


def _slot_mapping_from_positions(case: Case) -> dict[str, Accuracy]:
    import torch

    from kernels import reference, slot_mapping_from_positions
    from kernels.testing.accuracy import compare_with_reference

    batch = _batch(case, _CONTEXT_LENS)
    positions = torch.cat([torch.arange(length) for length in _CONTEXT_LENS])
    positions[::7] = -1  # padding, to be skipped
    seq_ids = torch.arange(len(_CONTEXT_LENS)).repeat_interleave(torch.tensor(_CONTEXT_LENS))
    arguments = (positions.to(case.device), batch.block_tables, seq_ids.to(case.device))
    (slots,) = compare_with_reference(
        slot_mapping_from_positions,
        reference.slot_mapping_from_positions,
        (*arguments, case.block_size),
    )
    return {"slots": slots}


def _paged_decode_attention(case: Case) -> dict[str, Accuracy]:
    from kernels import paged_decode_attention, reference

    batch = _batch(case, _CONTEXT_LENS, hidden_tokens=_outside_window(case, (1, 1, 1)))
    return _compare_attention(
        case, paged_decode_attention, reference.paged_decode_attention, batch.decode_args
    )


def _paged_prefill_attention(case: Case) -> dict[str, Accuracy]:
    from kernels import paged_prefill_attention, reference

    batch = _batch(
        case,
        _CONTEXT_LENS,
        query_lens=_QUERY_LENS,
        hidden_tokens=_outside_window(case, _QUERY_LENS),
    )
    return _compare_attention(
        case,
        paged_prefill_attention,
        reference.paged_prefill_attention,
        batch.prefill_args,
        max_seqlen_q=max(_QUERY_LENS),
    )


def _shared_prefix_decode_attention(case: Case) -> dict[str, Accuracy]:
    import torch

    from kernels import reference, shared_prefix_decode_attention

    num_groups, num_sequences = len(_PREFIX_LENS), len(_CONTEXT_LENS)
    batch = _batch(
        case,
        (*_PREFIX_LENS, *_CONTEXT_LENS),
        query_lens=(0,) * num_groups + (1,) * num_sequences,
    )
    prefix_tables, suffix_tables = batch.block_tables.split((num_groups, num_sequences))
    prefix_lens, suffix_lens = batch.context_lens.split((num_groups, num_sequences))
    group_offsets = torch.tensor(_GROUP_OFFSETS, dtype=torch.int32, device=case.device)
    return _compare_attention(
        case,
        shared_prefix_decode_attention,
        reference.shared_prefix_decode_attention,
        (
            batch.q,
            batch.k_cache,
            batch.v_cache,
            prefix_tables,
            prefix_lens,
            group_offsets,
            suffix_tables,
            suffix_lens,
        ),
    )


def _batch(case: Case, context_lens: tuple[int, ...], **options: Any) -> PagedBatch:
    from kernels.testing.inputs import random_paged_batch

    return random_paged_batch(
        context_lens,
        num_q_heads=_NUM_Q_HEADS,
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=case.dtype,
        kv_dtype=case.cache_dtype,
        device=case.device,
        seed=case.seed,
        **options,
    )


def _outside_window(case: Case, query_lens: tuple[int, ...]) -> list[int] | None:
    """Leading tokens of each sequence that no query sees, to be poisoned; None without a window."""
    if case.feature != "window":
        return None
    lengths = zip(_CONTEXT_LENS, query_lens, strict=True)
    return [max(0, context - query + 1 - _WINDOW) for context, query in lengths]


def _compare_attention(
    case: Case, op: Callable, reference_op: Callable, arguments: tuple, **options: Any
) -> dict[str, Accuracy]:
    import torch

    from kernels.testing.accuracy import compare_with_reference

    heads = torch.arange(1, _NUM_Q_HEADS + 1, device=case.device) / _NUM_Q_HEADS
    feature = {
        "none": {},
        "window": {"window_size": _WINDOW},
        "softcap": {"softcap": 5.0},
        "alibi": {"alibi_slopes": 2.0 ** (-8 * heads)},
        "sinks": {"sinks": heads},
        "split": {"num_splits": 3},
    }[case.feature]
    options |= {"return_lse": True, **feature, **case.scales}
    output, lse = compare_with_reference(op, reference_op, arguments, **options)
    return {"output": output, "LSE": lse}


KERNELS = {
    "store_kvcache": Kernel(_store_kvcache),
    "rope_store_kvcache": Kernel(_rope_store_kvcache),
    "apply_rotary_embedding": Kernel(
        _apply_rotary_embedding, touches_cache=False, knows_blocks=False
    ),
    "slot_mapping_from_positions": Kernel(_slot_mapping_from_positions, touches_cache=False),
    "copy_blocks": Kernel(_copy_blocks),
    "swap_blocks": Kernel(_swap_blocks),
    "merge_attention_states": Kernel(
        _merge_attention_states, touches_cache=False, knows_blocks=False
    ),
    "paged_decode_attention": Kernel(_paged_decode_attention, FEATURES),
    "shared_prefix_decode_attention": Kernel(_shared_prefix_decode_attention, FEATURES),
    "paged_prefill_attention": Kernel(_paged_prefill_attention, FEATURES),
}
