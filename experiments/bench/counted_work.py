"""Work small enough to be executed instruction by instruction: inputs, the call, what is right.

A function for each op of ``kernel_counters.COUNTED`` makes its inputs and returns a call and a
judge of its result, by the rule of ``kernels/testing/accuracy.py``.  Decode is split in two, so
that merging is counted too.  The sequences of a skewed batch have as many tokens together as those
of the even one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import kernels
from kernels import reference
from kernels.testing.accuracy import Accuracy, accuracy
from kernels.testing.inputs import random_paged_batch, random_shared_prefix_args

_TOKENS = 64
_SPLITS = 2
_DECODE_LENGTHS = {"even": [128] * 8, "skewed": [576] + [64] * 7}
_PREFILL_LENGTHS = {"even": [128] * 2, "skewed": [208, 48]}
_QUERIES = {"even": [64] * 2, "skewed": [112, 16]}
_GROUP, _PREFIX, _SUFFIX = 8, 256, 32
_PAIRS = [[0, 5], [1, 6], [2, 7]]


@dataclass(frozen=True)
class Size:
    """What the inputs depend on."""

    block_size: int = 16
    kv_dtype: str = "bfloat16"
    """Of the cache; everything else is bfloat16."""
    lengths: str = "even"
    """"even" or "skewed"."""
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    seed: int = 0

    def heads(self) -> dict[str, Any]:
        """As ``random_paged_batch`` takes them."""
        names = ("block_size", "num_q_heads", "num_kv_heads", "head_dim", "seed")
        same = {name: getattr(self, name) for name in names}
        kv_dtype = getattr(torch, self.kv_dtype)
        return {**same, "dtype": torch.bfloat16, "kv_dtype": kv_dtype, "device": "cpu"}

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normally distributed numbers, the same at every call."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(dtype)


class Counted(NamedTuple):
    """A call to be counted."""

    call: Callable[[], Any]
    judge: Callable[[Any], Accuracy]
    """How right what it returned is."""


def _computed(
    op: str,
    args: tuple,
    *,
    call: Callable | None = None,
    ours: dict[str, Any] | None = None,
    **options: Any,
) -> Counted:
    """An op whose first result is judged, by its reference on ``args`` and on them in fp64.

    call: another way to compute it.  ours: options of our op alone.
    """
    call = call or functools.partial(getattr(kernels, op), *args, **options, **(ours or {}))
    wide = tuple(map(_widened, args))

    def first(result: Any) -> torch.Tensor:
        return result[0] if isinstance(result, tuple) else result

    def judge(result: Any) -> Accuracy:
        low, ref = (first(getattr(reference, op)(*x, **options)) for x in (args, wide))
        return accuracy(first(result), low, ref)

    return Counted(call, judge)


def _widened(arg: Any) -> Any:
    return arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg


def _decode(size: Size, other: Callable | None = None) -> Counted:
    batch = random_paged_batch(_DECODE_LENGTHS[size.lengths], **size.heads())
    call = other and functools.partial(other, batch, _SPLITS)
    ours = {"num_splits": _SPLITS}
    return _computed("paged_decode_attention", batch.decode_args, call=call, ours=ours)


def _prefill(size: Size, other: Callable | None = None) -> Counted:
    queries = _QUERIES[size.lengths]
    lengths = _PREFILL_LENGTHS[size.lengths]
    batch = random_paged_batch(lengths, query_lens=queries, **size.heads())
    call = other and functools.partial(other, batch, 1)
    options = {"ours": {"num_splits": 1}, "max_seqlen_q": max(queries)}
    return _computed("paged_prefill_attention", batch.prefill_args, call=call, **options)


def _cascade(size: Size) -> Counted:
    args = random_shared_prefix_args([_GROUP], [_PREFIX], [_SUFFIX] * _GROUP, **size.heads())
    return _computed("shared_prefix_decode_attention", args)


def _moved(
    op: str, arguments: Callable[[], tuple], results: slice, step: float = 0.0, **options: Any
) -> Counted:
    """An op that writes to `arguments`: those of `results` are compared with the reference's, from
    which the largest may be off by `step` of itself."""
    ours, expected = arguments(), arguments()
    getattr(reference, op)(*expected, **options)

    def flat(args: tuple) -> torch.Tensor:
        return torch.cat([arg.double().flatten() for arg in args[results]])

    def judge(_: object) -> Accuracy:
        right = flat(expected)
        return accuracy(flat(ours), right * (1 + step / 2), right)

    return Counted(functools.partial(getattr(kernels, op), *ours, **options), judge)


def _tokens(size: Size) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, list[torch.Tensor]]:
    """Query, key and value of one projection, slots, and K and V caches of zeros."""
    generator = torch.Generator().manual_seed(size.seed)
    heads = (size.num_q_heads, size.num_kv_heads, size.num_kv_heads)
    qkv = torch.randn(_TOKENS, sum(heads), size.head_dim, generator=generator).bfloat16()
    num_blocks = 2 * -(-_TOKENS // size.block_size)
    slots = torch.randperm(num_blocks * size.block_size, generator=generator)[:_TOKENS]
    shape = (num_blocks, size.block_size, size.num_kv_heads, size.head_dim)
    caches = [torch.zeros(shape, dtype=getattr(torch, size.kv_dtype)) for _ in range(2)]
    return qkv.split(heads, dim=1), slots, caches


def _rotation(size: Size) -> tuple[torch.Tensor, ...]:
    """Positions, cosines and sines."""
    angles = torch.arange(_TOKENS)[:, None] * 10_000.0 ** -torch.linspace(0, 1, size.head_dim // 2)
    return torch.arange(_TOKENS).flip(0), angles.cos(), angles.sin()


def _store(size: Size) -> Counted:
    def arguments() -> tuple:
        (_, key, value), slots, caches = _tokens(size)
        return key, value, *caches, slots

    return _moved("store_kvcache", arguments, slice(2, 4))


def _rope_store(size: Size, **norms: torch.Tensor) -> Counted:
    def arguments() -> tuple:
        qkv, slots, caches = _tokens(size)
        return *qkv, *caches, slots, *_rotation(size)

    # Rotations may be rounded elsewhere, to the next number of the cache's format.
    step = 2**-3 if size.kv_dtype.startswith("float8") else 2**-7
    return _moved("rope_store_kvcache", arguments, slice(3, 5), step, **norms)


def _norm_rope_store(size: Size) -> Counted:
    weight = torch.linspace(0.5, 1.5, size.head_dim).bfloat16()
    return _rope_store(size, q_norm_weight=weight, k_norm_weight=weight)


def _rotary(size: Size) -> Counted:
    (query, _, _), _, _ = _tokens(size)
    return _computed("apply_rotary_embedding", (query, *_rotation(size)))


def _norm(size: Size) -> Counted:
    """With a residual, of the hidden size that the query heads have together."""
    hidden_size = size.num_q_heads * size.head_dim
    x, residual = size.normal(_TOKENS, 2 * hidden_size).chunk(2, dim=1)
    weight = torch.linspace(0.5, 1.5, hidden_size).bfloat16()
    call = functools.partial(kernels.add_rms_norm, x, residual.clone(), weight)
    return _computed("add_rms_norm", (x, residual, weight), call=call)


def _gate(size: Size) -> Counted:
    """Three times as wide as the query heads together, as in Qwen3 8B."""
    width = 3 * size.num_q_heads * size.head_dim
    gate_and_up = size.normal(_TOKENS, 2 * width).chunk(2, dim=1)
    return _computed("gated_activation", gate_and_up, activation="silu")


def _layers(size: Size) -> torch.Tensor:
    """K and V of two layers, eight blocks each."""
    shape = (2, 2, 8, size.block_size, size.num_kv_heads, size.head_dim)
    return size.normal(*shape, dtype=getattr(torch, size.kv_dtype))


def _copy(size: Size) -> Counted:
    return _moved("copy_blocks", lambda: (_layers(size), torch.tensor(_PAIRS)), slice(0, 1))


def _swap(size: Size) -> Counted:
    def arguments() -> tuple:
        caches = _layers(size)
        return caches, torch.zeros_like(caches), torch.tensor(_PAIRS)

    return _moved("swap_blocks", arguments, slice(1, 2))


def _merge(size: Size) -> Counted:
    generator = torch.Generator().manual_seed(size.seed)
    shape = (_TOKENS, size.num_q_heads)
    outs = torch.randn(2, *shape, size.head_dim, generator=generator).bfloat16()
    lses = torch.randn(2, *shape, generator=generator)
    return _computed("merge_attention_states", (outs[0], lses[0], outs[1], lses[1]))


def _slot_mapping(size: Size) -> Counted:
    tokens = torch.arange(_TOKENS, dtype=torch.int32)
    tables = torch.randperm(4 * _TOKENS).int().view(4, -1)
    args = (tokens // 4, tables, tokens % 4, size.block_size)
    return _computed("slot_mapping_from_positions", args)


def _sample(size: Size) -> Counted:
    return _computed("sample_tokens", (size.normal(4, 8192), torch.ones(4), torch.arange(4)))


def counted(op: str, size: Size, other: Callable | None) -> Counted:
    """``op`` at a size, by ours or by the call of another implementation (of ``OTHERS``)."""
    make = globals()[f"_{op}"]
    return make(size, other) if other else make(size)
