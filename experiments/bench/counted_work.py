"""Work small enough to be executed instruction by instruction: inputs, the call, what is right.

A function for each op of ``kernel_counters.COUNTED`` makes its inputs and returns a call and a
judge of its result, by the rule of ``kernels/testing/accuracy.py``.  Decode is split in two, so
that merging is counted too.  The sequences of a skewed batch have as many tokens together as those
of the even one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import kernels
from kernels import reference
from kernels.testing.accuracy import Accuracy, accuracy
from kernels.testing.inputs import random_paged_batch, random_shared_prefix_args

if TYPE_CHECKING:
    from experiments.kernel_counters import KernelCountersCell

_TOKENS = 64
_SPLITS = 2
_DECODE_LENGTHS = {"even": [128] * 8, "skewed": [576] + [64] * 7}
_PREFILL_LENGTHS = {"even": [128] * 2, "skewed": [208, 48]}
_QUERIES = {"even": [64] * 2, "skewed": [112, 16]}
_GROUP, _PREFIX, _SUFFIX = 8, 256, 32
_PAIRS = [[0, 5], [1, 6], [2, 7]]


class Counted(NamedTuple):
    """A call to be counted."""

    call: Callable[[], Any]
    judge: Callable[[Any], Accuracy]
    """How right what it returned is."""


def _heads(cell: KernelCountersCell) -> dict[str, Any]:
    """As ``random_paged_batch`` takes them; all but the cache is bfloat16."""
    sizes = cell.columns("block_size", "num_q_heads", "num_kv_heads", "head_dim", "seed")
    kv_dtype = getattr(torch, cell.kv_dtype)
    return {**sizes, "dtype": torch.bfloat16, "kv_dtype": kv_dtype, "device": "cpu"}


def _normal(
    cell: KernelCountersCell, *shape: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Normally distributed numbers, the same at every call."""
    generator = torch.Generator().manual_seed(cell.seed)
    return torch.randn(shape, generator=generator).to(dtype)


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


def _decode(cell: KernelCountersCell, other: Callable | None = None) -> Counted:
    batch = random_paged_batch(_DECODE_LENGTHS[cell.lengths], **_heads(cell))
    call = other and functools.partial(other, batch, _SPLITS)
    ours = {"num_splits": _SPLITS}
    return _computed("paged_decode_attention", batch.decode_args, call=call, ours=ours)


def _prefill(cell: KernelCountersCell, other: Callable | None = None) -> Counted:
    queries = _QUERIES[cell.lengths]
    lengths = _PREFILL_LENGTHS[cell.lengths]
    batch = random_paged_batch(lengths, query_lens=queries, **_heads(cell))
    call = other and functools.partial(other, batch, 1)
    options = {"ours": {"num_splits": 1}, "max_seqlen_q": max(queries)}
    return _computed("paged_prefill_attention", batch.prefill_args, call=call, **options)


def _cascade(cell: KernelCountersCell) -> Counted:
    args = random_shared_prefix_args([_GROUP], [_PREFIX], [_SUFFIX] * _GROUP, **_heads(cell))
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


def _tokens(
    cell: KernelCountersCell,
) -> tuple[Sequence[torch.Tensor], torch.Tensor, list]:
    """Query, key and value of one projection, slots, and K and V caches of zeros."""
    generator = torch.Generator().manual_seed(cell.seed)
    heads = (cell.num_q_heads, cell.num_kv_heads, cell.num_kv_heads)
    qkv = torch.randn(_TOKENS, sum(heads), cell.head_dim, generator=generator).bfloat16()
    num_blocks = 2 * -(-_TOKENS // cell.block_size)
    slots = torch.randperm(num_blocks * cell.block_size, generator=generator)[:_TOKENS]
    shape = (num_blocks, cell.block_size, cell.num_kv_heads, cell.head_dim)
    caches = [torch.zeros(shape, dtype=getattr(torch, cell.kv_dtype)) for _ in range(2)]
    return qkv.split(heads, dim=1), slots, caches


def _rotation(cell: KernelCountersCell) -> tuple[torch.Tensor, ...]:
    """Positions, cosines and sines."""
    angles = torch.arange(_TOKENS)[:, None] * 10_000.0 ** -torch.linspace(0, 1, cell.head_dim // 2)
    return torch.arange(_TOKENS).flip(0), angles.cos(), angles.sin()


def _store(cell: KernelCountersCell) -> Counted:
    def arguments() -> tuple:
        (_, key, value), slots, caches = _tokens(cell)
        return key, value, *caches, slots

    return _moved("store_kvcache", arguments, slice(2, 4))


def _rope_store(cell: KernelCountersCell, **norms: torch.Tensor) -> Counted:
    def arguments() -> tuple:
        qkv, slots, caches = _tokens(cell)
        return *qkv, *caches, slots, *_rotation(cell)

    # Rotations may be rounded elsewhere, to the next number of the cache's format.
    step = 2**-3 if cell.kv_dtype.startswith("float8") else 2**-7
    return _moved("rope_store_kvcache", arguments, slice(3, 5), step, **norms)


def _norm_rope_store(cell: KernelCountersCell) -> Counted:
    weight = torch.linspace(0.5, 1.5, cell.head_dim).bfloat16()
    return _rope_store(cell, q_norm_weight=weight, k_norm_weight=weight)


def _rotary(cell: KernelCountersCell) -> Counted:
    (query, _, _), _, _ = _tokens(cell)
    return _computed("apply_rotary_embedding", (query, *_rotation(cell)))


def _norm(cell: KernelCountersCell) -> Counted:
    """With a residual, of the hidden size that the query heads have together."""
    hidden_size = cell.num_q_heads * cell.head_dim
    x, residual = _normal(cell, _TOKENS, 2 * hidden_size).chunk(2, dim=1)
    weight = torch.linspace(0.5, 1.5, hidden_size).bfloat16()
    call = functools.partial(kernels.add_rms_norm, x, residual.clone(), weight)
    return _computed("add_rms_norm", (x, residual, weight), call=call)


def _gate(cell: KernelCountersCell) -> Counted:
    """Three times as wide as the query heads together, as in Qwen3 8B."""
    width = 3 * cell.num_q_heads * cell.head_dim
    gate_and_up = _normal(cell, _TOKENS, 2 * width).chunk(2, dim=1)
    return _computed("gated_activation", gate_and_up, activation="silu")


def _layers(cell: KernelCountersCell) -> torch.Tensor:
    """K and V of two layers, eight blocks each."""
    shape = (2, 2, 8, cell.block_size, cell.num_kv_heads, cell.head_dim)
    return _normal(cell, *shape, dtype=getattr(torch, cell.kv_dtype))


def _copy(cell: KernelCountersCell) -> Counted:
    return _moved("copy_blocks", lambda: (_layers(cell), torch.tensor(_PAIRS)), slice(0, 1))


def _swap(cell: KernelCountersCell) -> Counted:
    def arguments() -> tuple:
        caches = _layers(cell)
        return caches, torch.zeros_like(caches), torch.tensor(_PAIRS)

    return _moved("swap_blocks", arguments, slice(1, 2))


def _merge(cell: KernelCountersCell) -> Counted:
    generator = torch.Generator().manual_seed(cell.seed)
    shape = (_TOKENS, cell.num_q_heads)
    outs = torch.randn(2, *shape, cell.head_dim, generator=generator).bfloat16()
    lses = torch.randn(2, *shape, generator=generator)
    return _computed("merge_attention_states", (outs[0], lses[0], outs[1], lses[1]))


def _slot_mapping(cell: KernelCountersCell) -> Counted:
    tokens = torch.arange(_TOKENS, dtype=torch.int32)
    tables = torch.randperm(4 * _TOKENS).int().view(4, -1)
    args = (tokens // 4, tables, tokens % 4, cell.block_size)
    return _computed("slot_mapping_from_positions", args)


def _sample(cell: KernelCountersCell) -> Counted:
    return _computed("sample_tokens", (_normal(cell, 4, 8192), torch.ones(4), torch.arange(4)))


def counted(cell: KernelCountersCell, other: Callable | None) -> Counted:
    """The op of ``cell``, by ours or by the call of another implementation (of ``OTHERS``)."""
    make = globals()[f"_{cell.op}"]
    return make(cell, other) if other else make(cell)
