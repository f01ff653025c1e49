"""Each kernel of the paged cache compared with its reference, as ``kernel_accuracy`` shows it.

To add an op: a function of its name with an underscore, from a case to how the op is compared, and
a line in ``kernel_accuracy.KERNELS`` that tells on what cases.  TRITON_INTERPRET must be set before
this is imported, for it imports ``kernels``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import kernels
from kernels import reference
from kernels.testing.accuracy import Accuracy, compare_with_reference
from kernels.testing.inputs import random_paged_batch, random_scales, random_shared_prefix_args

if TYPE_CHECKING:
    from experiments.kernel_accuracy import KernelAccuracy

_CONTEXT_LENS = (1, 37, 290)
_QUERY_LENS = (1, 37, 20)
_PREFIX_LENS = (150, 0)
_GROUP_SIZES = (2, 1)
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
        return torch.float8_e4m3fn if self.fp8_cache else self.dtype

    @property
    def scales(self) -> dict[str, Any]:
        """k_scale and v_scale of an fp8 cache."""
        return random_scales("per head", _NUM_KV_HEADS, self.device) if self.fp8_cache else {}

    @property
    def heads(self) -> dict[str, Any]:
        """As ``random_paged_batch`` takes them."""
        return {
            "num_q_heads": _NUM_Q_HEADS,
            "num_kv_heads": _NUM_KV_HEADS,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "dtype": self.dtype,
            "kv_dtype": self.cache_dtype,
            "device": self.device,
            "seed": self.seed,
        }

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def zeros(self, shape: tuple[int, ...], *, like: torch.Tensor) -> torch.Tensor:
        """Caches beside new keys ``like`` these."""
        dtype = self.cache_dtype if self.fp8_cache else like.dtype
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def layers(self, num_blocks: int, generator: torch.Generator) -> torch.Tensor:
        """K and V of two layers, random."""
        shape = (2, 2, num_blocks, self.block_size, _NUM_KV_HEADS, self.head_dim)
        return torch.randn(shape, generator=generator).to(self.device, self.cache_dtype)


class Comparison(NamedTuple):
    """How an op and its reference are compared."""

    results: tuple[str, ...]
    """Names of what is compared."""
    inputs: Sequence[Any]
    run: Callable | None = None
    """Calls either on the inputs and returns what is compared; None: what the call returns."""
    options: dict[str, Any] = {}  # noqa: RUF012  never changed


def check(cell: KernelAccuracy, device: str) -> dict[str, Accuracy]:
    """The accuracy of each result of the kernel of ``cell`` by name, the output first."""
    fp8 = cell.dtype == "fp8"
    case = Case(
        **cell.columns("block_size", "head_dim", "feature", "seed"),
        dtype=torch.bfloat16 if fp8 else getattr(torch, cell.dtype),
        device=torch.device(device),
        fp8_cache=fp8,
    )
    results, inputs, run, options = globals()[f"_{cell.kernel}"](case)

    def called(module: ModuleType) -> Callable:
        function = getattr(module, cell.kernel)
        return functools.partial(run, function) if run else function

    inputs = [x.to(case.device) if hasattr(x, "to") else x for x in inputs]
    judged = compare_with_reference(called(kernels), called(reference), inputs, **options)
    return dict(zip(results, judged, strict=True))


def _tokens_to_store(case: Case, num_tokens: int, generator: torch.Generator) -> tuple:
    """Slots of new tokens, some to be skipped, and the shape of the caches that they are in."""
    num_blocks = -(-num_tokens // case.block_size) + 3
    slots = torch.randperm(num_blocks * case.block_size, generator=generator)[:num_tokens]
    slots[::5] = -1
    return slots, (2, num_blocks, case.block_size, _NUM_KV_HEADS, case.head_dim)


def _store_kvcache(case: Case) -> Comparison:
    generator = case.generator()
    num_tokens = sum(_CONTEXT_LENS)
    heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    qkv = torch.randn(num_tokens, heads, case.head_dim, generator=generator)
    key, value = qkv.to(case.device, case.dtype)[:, _NUM_Q_HEADS:].split(_NUM_KV_HEADS, dim=1)
    slots, shape = _tokens_to_store(case, num_tokens, generator)

    def stored(op: Callable, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor):
        caches = case.zeros(shape, like=key)
        op(key, value, *caches, slots, **case.scales)
        return caches

    return Comparison(("K and V cache",), (key, value, slots), stored)


def _copy_blocks(case: Case) -> Comparison:
    generator = case.generator()
    caches, pairs = case.layers(9, generator), torch.randperm(9, generator=generator)[:8]

    def copied(op: Callable, caches: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        caches = caches.clone()
        op(caches, pairs)
        return caches

    return Comparison(("K and V cache",), (caches, pairs.view(4, 2)), copied)


def _swap_blocks(case: Case) -> Comparison:
    generator = case.generator()
    caches = case.layers(3, generator)
    pairs = torch.stack([torch.randperm(3, generator=generator) for _ in range(2)], 1)

    def swapped(op: Callable, caches: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        pinned = {"pin_memory": caches.device.type == "cuda"}
        host = torch.zeros(caches.shape, dtype=caches.dtype, **pinned)
        back = torch.zeros_like(caches)
        op(caches, host, pairs)
        op(host, back, pairs.flip(1)[:2].contiguous())
        return back

    return Comparison(("K and V cache",), (caches, pairs), swapped)


def _rotary_inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """A fused QKV projection, positions, and fp32 tables of their cosines and sines."""
    generator = case.generator()
    heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    qkv = torch.randn(_ROTARY_TOKENS, heads, case.head_dim, generator=generator)
    positions = torch.randint(0, 500, (_ROTARY_TOKENS,), generator=generator)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, case.head_dim // 2)
    angles = torch.arange(500)[:, None] * frequencies
    return qkv.to(case.device, case.dtype), positions, angles.cos(), angles.sin()


def _apply_rotary_embedding(case: Case) -> Comparison:
    qkv, *rotary = _rotary_inputs(case)
    return Comparison(("output",), (qkv[:, :_NUM_Q_HEADS], *rotary))


def _rope_store_kvcache(case: Case) -> Comparison:
    qkv, *rotary = _rotary_inputs(case)
    generator = case.generator()
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
    return Comparison(("K and V cache", "query"), (qkv, slots, *rotary, *weights), stored)


def _add_rms_norm(case: Case) -> Comparison:
    """Rows as wide as the query heads together."""
    generator = case.generator()
    hidden_size = _NUM_Q_HEADS * case.head_dim
    rows = torch.randn(2, _NORM_TOKENS, hidden_size, generator=generator).to(case.dtype)
    weight = torch.randn(hidden_size, generator=generator).to(case.dtype)

    def added(op: Callable, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor):
        residual = residual.clone()
        return op(x, residual, weight, offset=float(case.feature == "offset")), residual

    return Comparison(("output", "residual"), (*rows, weight), added)


def _gated_activation(case: Case) -> Comparison:
    generator = case.generator()
    width = 2 * _NUM_Q_HEADS * case.head_dim
    gate_up = torch.randn(_NORM_TOKENS, 2 * width, generator=generator).to(case.dtype)
    activation = "gelu_pytorch_tanh" if case.feature == "gelu" else "silu"
    inputs = gate_up.to(case.device).chunk(2, dim=1)
    return Comparison(("output",), inputs, options={"activation": activation})


def _merge_attention_states(case: Case) -> Comparison:
    generator = case.generator()
    parts = []
    for _ in range(2):
        out = torch.randn(23, _NUM_Q_HEADS, case.head_dim, generator=generator)
        lse = torch.randn(23, _NUM_Q_HEADS, generator=generator)
        lse[torch.rand(23, _NUM_Q_HEADS, generator=generator) < 0.2] = -torch.inf  # no keys
        parts += [out.to(case.dtype), lse]
    return Comparison(("output", "LSE"), parts)


def _slot_mapping_from_positions(case: Case) -> Comparison:
    batch = random_paged_batch(_CONTEXT_LENS, **case.heads)
    positions = torch.cat([torch.arange(length) for length in _CONTEXT_LENS])
    positions[::7] = -1  # padding, to be skipped
    seq_ids = torch.arange(len(_CONTEXT_LENS)).repeat_interleave(torch.tensor(_CONTEXT_LENS))
    inputs = (positions, batch.block_tables, seq_ids, case.block_size)
    return Comparison(("slots",), inputs)


def _sample_tokens(case: Case) -> Comparison:
    generator = case.generator()
    logits = torch.randn(7, 5000, generator=generator).to(case.device, case.dtype)
    temperatures = torch.arange(7) / 4  # the first row is greedy
    return Comparison(("tokens",), (logits, temperatures, torch.arange(7)))


def _paged_decode_attention(case: Case) -> Comparison:
    hidden = _outside_window(case, (1, 1, 1))
    batch = random_paged_batch(_CONTEXT_LENS, hidden_tokens=hidden, **case.heads)
    return _attention(case, batch.decode_args)


def _paged_prefill_attention(case: Case) -> Comparison:
    hidden = _outside_window(case, _QUERY_LENS)
    batch = random_paged_batch(
        _CONTEXT_LENS, query_lens=_QUERY_LENS, hidden_tokens=hidden, **case.heads
    )
    return _attention(case, batch.prefill_args, max_seqlen_q=max(_QUERY_LENS))


def _shared_prefix_decode_attention(case: Case) -> Comparison:
    window = _WINDOW if case.feature == "window" else None
    inputs = random_shared_prefix_args(
        _GROUP_SIZES, _PREFIX_LENS, _CONTEXT_LENS, window_size=window, **case.heads
    )
    return _attention(case, inputs)


def _outside_window(case: Case, query_lens: tuple[int, ...]) -> list[int] | None:
    """Leading tokens of each sequence that no query sees, to be poisoned; None without a window."""
    if case.feature != "window":
        return None
    lengths = zip(_CONTEXT_LENS, query_lens, strict=True)
    return [max(0, context - query + 1 - _WINDOW) for context, query in lengths]


def _attention(case: Case, inputs: Sequence[torch.Tensor], **options: Any) -> Comparison:
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
    return Comparison(("output", "LSE"), inputs, options=options)
