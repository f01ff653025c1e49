"""The kernels of the paged cache, each with how ``kernel_accuracy`` compares it with its reference.

To add a kernel: a function from a case to the accuracy of its results, and a line in ``KERNELS``.
``kernels`` is imported inside, because TRITON_INTERPRET must be set before it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kernels.testing.accuracy import Accuracy
    from kernels.testing.inputs import PagedBatch

FEATURES = ("none", "window", "softcap", "alibi", "sinks", "split", "norms", "offset", "gelu")
"""Options of the kernels, taken one at a time: of attention, of RoPE and store, of the rest of a
layer."""
ATTENTION_FEATURES = FEATURES[:6]

_CONTEXT_LENS = (1, 37, 290)
_QUERY_LENS = (1, 37, 20)
_PREFIX_LENS = (150, 0)
_GROUP_OFFSETS = (0, 2, 3)
_ROTARY_TOKENS = 29
_NORM_TOKENS = 13
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

    def zeros(self, shape: tuple[int, ...], *, like: torch.Tensor) -> torch.Tensor:
        """Caches beside new keys ``like`` these."""
        import torch

        dtype = self.cache_dtype if self.fp8_cache else like.dtype
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def layers(self, num_blocks: int, generator: torch.Generator) -> torch.Tensor:
        """K and V of two layers, random."""
        import torch

        shape = (2, 2, num_blocks, self.block_size, _NUM_KV_HEADS, self.head_dim)
        return torch.randn(shape, generator=generator).to(self.device, self.cache_dtype)


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


def _judge(
    case: Case, op: str, inputs: Sequence[Any], run: Callable | None = None, **options: Any
) -> list[Accuracy]:
    """The results of an op and of its reference compared.  run: calls either on the inputs and
    returns what is to be compared; None: what the call returns."""
    import kernels
    from kernels import reference
    from kernels.testing.accuracy import compare_with_reference

    def called(module: ModuleType) -> Callable:
        function = getattr(module, op)
        return functools.partial(run, function) if run else function

    inputs = [x.to(case.device) if hasattr(x, "to") else x for x in inputs]
    return list(compare_with_reference(called(kernels), called(reference), inputs, **options))


def _tokens_to_store(case: Case, num_tokens: int, generator: torch.Generator) -> tuple:
    """Slots of new tokens, some to be skipped, and the shape of the caches that they are in."""
    import torch

    num_blocks = -(-num_tokens // case.block_size) + 3
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[:num_tokens]
    slots[::5] = -1
    return slots, (2, num_blocks, case.block_size, _NUM_KV_HEADS, case.head_dim)


def _store_kvcache(case: Case) -> dict[str, Accuracy]:
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    num_tokens = sum(_CONTEXT_LENS)
    heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    qkv = torch.randn(num_tokens, heads, case.head_dim, generator=generator)
    key, value = qkv.to(case.device, case.dtype)[:, _NUM_Q_HEADS:].split(_NUM_KV_HEADS, dim=1)
    slots, shape = _tokens_to_store(case, num_tokens, generator)

    def stored(op: Callable, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor):
        caches = case.zeros(shape, like=key)
        op(key, value, *caches, slots, **case.scales)
        return caches

    (caches,) = _judge(case, "store_kvcache", (key, value, slots), stored)
    return {"K and V cache": caches}


def _copy_blocks(case: Case) -> dict[str, Accuracy]:
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    caches, pairs = case.layers(9, generator), torch.randperm(9, generator=generator)[:8]

    def copied(op: Callable, caches: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        caches = caches.clone()
        op(caches, pairs)
        return caches

    (result,) = _judge(case, "copy_blocks", (caches, pairs.view(4, 2)), copied)
    return {"K and V cache": result}


def _swap_blocks(case: Case) -> dict[str, Accuracy]:
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    caches = case.layers(3, generator)
    pairs = torch.stack([torch.randperm(3, generator=generator) for _ in range(2)], 1)

    def swapped(op: Callable, caches: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        pinned = {"pin_memory": caches.device.type == "cuda"}
        host = torch.zeros(caches.shape, dtype=caches.dtype, **pinned)
        back = torch.zeros_like(caches)
        op(caches, host, pairs)
        op(host, back, pairs.flip(1)[:2].contiguous())
        return back

    (result,) = _judge(case, "swap_blocks", (caches, pairs), swapped)
    return {"K and V cache": result}


def _rotary_inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """A fused QKV projection, positions, and fp32 tables of their cosines and sines."""
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    qkv = torch.randn(_ROTARY_TOKENS, heads, case.head_dim, generator=generator)
    positions = torch.randint(0, 500, (_ROTARY_TOKENS,), generator=generator)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, case.head_dim // 2)
    angles = torch.arange(500)[:, None] * frequencies
    return qkv.to(case.device, case.dtype), positions, angles.cos(), angles.sin()


def _apply_rotary_embedding(case: Case) -> dict[str, Accuracy]:
    qkv, *rotary = _rotary_inputs(case)
    (rotated,) = _judge(case, "apply_rotary_embedding", (qkv[:, :_NUM_Q_HEADS], *rotary))
    return {"output": rotated}


def _rope_store_kvcache(case: Case) -> dict[str, Accuracy]:
    import torch

    qkv, *rotary = _rotary_inputs(case)
    generator = torch.Generator().manual_seed(case.seed)
    slots, shape = _tokens_to_store(case, len(qkv), generator)

    def stored(op: Callable, qkv: torch.Tensor, slots: torch.Tensor, *rotary: torch.Tensor):
        caches = case.zeros(shape, like=qkv)
        heads = (_NUM_Q_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS)
        query, key, value = qkv.clone().split(heads, dim=1)
        *rotary, q_weight, k_weight = rotary
        norms = {"q_norm_weight": q_weight, "k_norm_weight": k_weight}
        options = case.scales | (norms if case.feature == "norms" else {})
        op(query, key, value, *caches, slots, *rotary, **options)
        return caches, query

    weights = torch.randn(2, case.head_dim, generator=generator).to(case.dtype)
    caches, query = _judge(case, "rope_store_kvcache", (qkv, slots, *rotary, *weights), stored)
    return {"K and V cache": caches, "query": query}


def _add_rms_norm(case: Case) -> dict[str, Accuracy]:
    """Rows as wide as the query heads together."""
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    hidden_size = _NUM_Q_HEADS * case.head_dim
    rows = torch.randn(2, _NORM_TOKENS, hidden_size, generator=generator).to(case.dtype)
    weight = torch.randn(hidden_size, generator=generator).to(case.dtype)

    def added(op: Callable, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor):
        residual = residual.clone()
        return op(x, residual, weight, offset=float(case.feature == "offset")), residual

    output, residual = _judge(case, "add_rms_norm", (*rows, weight), added)
    return {"output": output, "residual": residual}


def _gated_activation(case: Case) -> dict[str, Accuracy]:
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    width = 2 * _NUM_Q_HEADS * case.head_dim
    gate_up = torch.randn(_NORM_TOKENS, 2 * width, generator=generator).to(case.dtype)
    activation = "gelu_pytorch_tanh" if case.feature == "gelu" else "silu"
    inputs = gate_up.to(case.device).chunk(2, dim=1)
    (output,) = _judge(case, "gated_activation", inputs, activation=activation)
    return {"output": output}


def _merge_attention_states(case: Case) -> dict[str, Accuracy]:
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    parts = []
    for _ in range(2):
        out = torch.randn(23, _NUM_Q_HEADS, case.head_dim, generator=generator)
        lse = torch.randn(23, _NUM_Q_HEADS, generator=generator)
        lse[torch.rand(23, _NUM_Q_HEADS, generator=generator) < 0.2] = -torch.inf  # no keys
        parts += [out.to(case.dtype), lse]
    output, lse = _judge(case, "merge_attention_states", parts)
    return {"output": output, "LSE": lse}


def _slot_mapping_from_positions(case: Case) -> dict[str, Accuracy]:
    import torch

    batch = _batch(case, _CONTEXT_LENS)
    positions = torch.cat([torch.arange(length) for length in _CONTEXT_LENS])
    positions[::7] = -1  # padding, to be skipped
    seq_ids = torch.arange(len(_CONTEXT_LENS)).repeat_interleave(torch.tensor(_CONTEXT_LENS))
    inputs = (positions, batch.block_tables, seq_ids, case.block_size)
    (slots,) = _judge(case, "slot_mapping_from_positions", inputs)
    return {"slots": slots}


def _sample_tokens(case: Case) -> dict[str, Accuracy]:
    import torch

    generator = torch.Generator().manual_seed(case.seed)
    logits = torch.randn(7, 5000, generator=generator).to(case.device, case.dtype)
    temperatures = torch.arange(7) / 4  # the first row is greedy
    (tokens,) = _judge(case, "sample_tokens", (logits, temperatures, torch.arange(7)))
    return {"tokens": tokens}


def _paged_decode_attention(case: Case) -> dict[str, Accuracy]:
    batch = _batch(case, _CONTEXT_LENS, hidden_tokens=_outside_window(case, (1, 1, 1)))
    return _judge_attention(case, "paged_decode_attention", batch.decode_args)


def _paged_prefill_attention(case: Case) -> dict[str, Accuracy]:
    hidden = _outside_window(case, _QUERY_LENS)
    batch = _batch(case, _CONTEXT_LENS, query_lens=_QUERY_LENS, hidden_tokens=hidden)
    longest = {"max_seqlen_q": max(_QUERY_LENS)}
    return _judge_attention(case, "paged_prefill_attention", batch.prefill_args, **longest)


def _shared_prefix_decode_attention(case: Case) -> dict[str, Accuracy]:
    import torch

    parts = len(_PREFIX_LENS), len(_CONTEXT_LENS)
    queries = (0,) * parts[0] + (1,) * parts[1]
    batch = _batch(case, (*_PREFIX_LENS, *_CONTEXT_LENS), query_lens=queries)
    prefix_tables, suffix_tables = batch.block_tables.split(parts)
    prefix_lens, suffix_lens = batch.context_lens.split(parts)
    groups = torch.tensor(_GROUP_OFFSETS, dtype=torch.int32)
    shared = (prefix_tables, prefix_lens, groups, suffix_tables, suffix_lens)
    inputs = (batch.q, batch.k_cache, batch.v_cache, *shared)
    return _judge_attention(case, "shared_prefix_decode_attention", inputs)


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


def _judge_attention(
    case: Case, op: str, inputs: Sequence[torch.Tensor], **options: Any
) -> dict[str, Accuracy]:
    import torch

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
    output, lse = _judge(case, op, inputs, **options)
    return {"output": output, "LSE": lse}


KERNELS = {
    "store_kvcache": Kernel(_store_kvcache),
    "rope_store_kvcache": Kernel(_rope_store_kvcache, ("none", "norms")),
    "add_rms_norm": Kernel(
        _add_rms_norm, ("none", "offset"), touches_cache=False, knows_blocks=False
    ),
    "gated_activation": Kernel(
        _gated_activation, ("none", "gelu"), touches_cache=False, knows_blocks=False
    ),
    "apply_rotary_embedding": Kernel(
        _apply_rotary_embedding, touches_cache=False, knows_blocks=False
    ),
    "slot_mapping_from_positions": Kernel(_slot_mapping_from_positions, touches_cache=False),
    "sample_tokens": Kernel(_sample_tokens, touches_cache=False, knows_blocks=False),
    "copy_blocks": Kernel(_copy_blocks),
    "swap_blocks": Kernel(_swap_blocks),
    "merge_attention_states": Kernel(
        _merge_attention_states, touches_cache=False, knows_blocks=False
    ),
    "paged_decode_attention": Kernel(_paged_decode_attention, ATTENTION_FEATURES),
    "shared_prefix_decode_attention": Kernel(_shared_prefix_decode_attention, ATTENTION_FEATURES),
    "paged_prefill_attention": Kernel(_paged_prefill_attention, ATTENTION_FEATURES),
}
