"""Work small enough to be executed instruction by instruction: inputs, the call, what is right.

Each function makes the inputs of an op and returns a call and a judge of its result, by the rule of
``kernels/testing/accuracy.py``.  Decode is split in two, so that merging is counted too.  The
sequences of a skewed batch have as many tokens together as those of the even one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.bench.other_kernels import OTHERS

if TYPE_CHECKING:
    import torch

    from kernels.testing.accuracy import Accuracy

_TOKENS = 64
_SPLITS = 2
_LENGTHS = {
    "decode": {"even": [128] * 8, "skewed": [576] + [64] * 7},
    "prefill": {"even": [128] * 2, "skewed": [208, 48]},
}
_QUERIES = {"even": [64] * 2, "skewed": [112, 16]}
_GROUP, _PREFIX, _SUFFIX = 8, 256, 32


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
        import torch

        names = ("block_size", "num_q_heads", "num_kv_heads", "head_dim", "seed")
        same = {name: getattr(self, name) for name in names}
        kv_dtype = getattr(torch, self.kv_dtype)
        return {**same, "dtype": torch.bfloat16, "kv_dtype": kv_dtype, "device": "cpu"}


class Counted(NamedTuple):
    """A call to be counted."""

    call: Callable[[], Any]
    judge: Callable[[Any], Accuracy]
    """How right what it returned is."""


def _attention(op: str, args: tuple, wide: tuple, call: Callable, **options: Any) -> Counted:
    """Judged is the first result, as by the reference of ``op`` in the dtype of ``args``."""
    from kernels import reference
    from kernels.testing.accuracy import accuracy

    def right(arguments: tuple) -> torch.Tensor:
        result = getattr(reference, op)(*arguments, **options)
        return result[0] if isinstance(result, tuple) else result

    return Counted(call, lambda out: accuracy(out, right(args), right(wide)))


def decode(size: Size, other: Callable | None = None) -> Counted:
    from kernels import paged_decode_attention
    from kernels.testing.inputs import random_paged_batch

    batch = random_paged_batch(_LENGTHS["decode"][size.lengths], **size.heads())
    ours = functools.partial(paged_decode_attention, *batch.decode_args, num_splits=_SPLITS)
    call = functools.partial(other, batch, _SPLITS) if other else ours
    wide = batch.double().decode_args
    return _attention("paged_decode_attention", batch.decode_args, wide, call)


def prefill(size: Size, other: Callable | None = None) -> Counted:
    from kernels import paged_prefill_attention
    from kernels.testing.inputs import random_paged_batch

    lengths, queries = _LENGTHS["prefill"][size.lengths], _QUERIES[size.lengths]
    batch = random_paged_batch(lengths, query_lens=queries, **size.heads())
    args, longest = batch.prefill_args, {"max_seqlen_q": max(queries)}
    ours = functools.partial(paged_prefill_attention, *args, num_splits=1, **longest)
    call = functools.partial(other, batch, 1) if other else ours
    wide = batch.double().prefill_args
    return _attention("paged_prefill_attention", args, wide, call, **longest)


def cascade(size: Size) -> Counted:
    from kernels import shared_prefix_decode_attention
    from kernels.testing.inputs import random_shared_prefix_args

    args = random_shared_prefix_args([_GROUP], [_PREFIX], [_SUFFIX] * _GROUP, **size.heads())
    wide = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
    call = functools.partial(shared_prefix_decode_attention, *args)
    return _attention("shared_prefix_decode_attention", args, wide, call)


def _moved(
    op: str, arguments: Callable[[], tuple], results: slice, step: float = 0.0, **options: Any
) -> Counted:
    """An op that writes to `arguments`: those of `results` are compared with the reference's, from
    which the largest may be off by `step` of itself."""
    import torch

    import kernels
    from kernels import reference
    from kernels.testing.accuracy import accuracy

    ours, expected = arguments(), arguments()
    getattr(reference, op)(*expected, **options)

    def flat(args: tuple) -> torch.Tensor:
        return torch.cat([arg.double().flatten() for arg in args[results]])

    def judge(_: object) -> Accuracy:
        right = flat(expected)
        return accuracy(flat(ours), right * (1 + step / 2), right)

    return Counted(functools.partial(getattr(kernels, op), *ours, **options), judge)


def _tokens(size: Size) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Query, key and value as one projection, slots, and K and V caches of zeros."""
    import torch

    generator = torch.Generator().manual_seed(size.seed)
    heads = size.num_q_heads + 2 * size.num_kv_heads
    qkv = torch.randn(_TOKENS, heads, size.head_dim, generator=generator).bfloat16()
    num_blocks = 2 * -(-_TOKENS // size.block_size)
    slots = torch.randperm(num_blocks * size.block_size, generator=generator)[:_TOKENS]
    shape = (num_blocks, size.block_size, size.num_kv_heads, size.head_dim)
    caches = [torch.zeros(shape, dtype=getattr(torch, size.kv_dtype)) for _ in range(2)]
    return qkv, slots, tuple(caches)


def _rotation(size: Size) -> tuple[torch.Tensor, ...]:
    """Positions, cosines and sines."""
    import torch

    angles = torch.arange(_TOKENS)[:, None] * 10_000.0 ** -torch.linspace(0, 1, size.head_dim // 2)
    return torch.arange(_TOKENS).flip(0), angles.cos(), angles.sin()


def store(size: Size) -> Counted:
    def arguments() -> tuple:
        qkv, slots, caches = _tokens(size)
        key, value = qkv[:, size.num_q_heads :].chunk(2, dim=1)
        return key, value, *caches, slots

    return _moved("store_kvcache", arguments, slice(2, 4))


def rope_store(size: Size, *, norms: bool = False) -> Counted:
    import torch

    def arguments() -> tuple:
        qkv, slots, caches = _tokens(size)
        parts = qkv.split((size.num_q_heads, size.num_kv_heads, size.num_kv_heads), dim=1)
        return *parts, *caches, slots, *_rotation(size)

    # Rotations may be rounded elsewhere, to the next number of the cache's format.
    step = 2**-3 if size.kv_dtype.startswith("float8") else 2**-7
    weight = torch.linspace(0.5, 1.5, size.head_dim).bfloat16()
    weights = {"q_norm_weight": weight, "k_norm_weight": weight} if norms else {}
    return _moved("rope_store_kvcache", arguments, slice(3, 5), step, **weights)


def rotary(size: Size) -> Counted:
    from kernels import apply_rotary_embedding

    args = (_tokens(size)[0][:, : size.num_q_heads], *_rotation(size))
    wide = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
    call = functools.partial(apply_rotary_embedding, *args)
    return _attention("apply_rotary_embedding", args, wide, call)


def _rows(size: Size, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two halves of the rows of a product, (tokens, width) each."""
    import torch

    generator = torch.Generator().manual_seed(size.seed)
    return torch.randn(_TOKENS, 2 * width, generator=generator).bfloat16().chunk(2, dim=1)


def norm(size: Size) -> Counted:
    """With a residual, of the hidden size that the query heads have together."""
    import torch

    from kernels import add_rms_norm

    hidden_size = size.num_q_heads * size.head_dim
    x, residual = _rows(size, hidden_size)
    weight = torch.linspace(0.5, 1.5, hidden_size).bfloat16()
    wide = tuple(arg.double() for arg in (x, residual, weight))
    call = functools.partial(add_rms_norm, x, residual.clone(), weight)
    return _attention("add_rms_norm", (x, residual, weight), wide, call)


def gate(size: Size) -> Counted:
    """Three times as wide as the query heads together, as in Qwen3 8B."""
    from kernels import gated_activation

    args = _rows(size, 3 * size.num_q_heads * size.head_dim)
    call = functools.partial(gated_activation, *args, "silu")
    wide = tuple(arg.double() for arg in args)
    return _attention("gated_activation", args, wide, call, activation="silu")


def _layers(size: Size) -> torch.Tensor:
    """K and V of two layers, eight blocks each."""
    import torch

    generator = torch.Generator().manual_seed(size.seed)
    shape = (2, 2, 8, size.block_size, size.num_kv_heads, size.head_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, size.kv_dtype))


def copy(size: Size) -> Counted:
    def arguments() -> tuple:
        import torch

        return _layers(size), torch.tensor([[0, 5], [1, 6], [2, 7]])

    return _moved("copy_blocks", arguments, slice(0, 1))


def swap(size: Size) -> Counted:
    def arguments() -> tuple:
        import torch

        caches, pairs = _layers(size), torch.tensor([[0, 5], [1, 6], [2, 7]])
        return caches, torch.zeros_like(caches), pairs

    return _moved("swap_blocks", arguments, slice(1, 2))


def merge(size: Size) -> Counted:
    import torch

    from kernels import merge_attention_states

    generator = torch.Generator().manual_seed(size.seed)
    shape = (_TOKENS, size.num_q_heads)
    outs = torch.randn(2, *shape, size.head_dim, generator=generator).bfloat16()
    lses = torch.randn(2, *shape, generator=generator)
    args = (outs[0], lses[0], outs[1], lses[1])
    call = functools.partial(merge_attention_states, *args)
    wide = tuple(arg.double() for arg in args)
    return _attention("merge_attention_states", args, wide, lambda: call()[0])


def slot_mapping(size: Size) -> Counted:
    import torch

    from kernels import slot_mapping_from_positions

    tokens = torch.arange(_TOKENS, dtype=torch.int32)
    tables = torch.randperm(4 * _TOKENS).int().view(4, -1)
    args = (tokens // 4, tables, tokens % 4, size.block_size)
    call = functools.partial(slot_mapping_from_positions, *args)
    return _attention("slot_mapping_from_positions", args, args, call)


def sample(size: Size) -> Counted:
    import torch

    from kernels import sample_tokens

    generator = torch.Generator().manual_seed(size.seed)
    logits = torch.randn(4, 8192, generator=generator).bfloat16()
    args = (logits, torch.ones(4), torch.arange(4))
    return _attention("sample_tokens", args, args, functools.partial(sample_tokens, *args))


@dataclass(frozen=True)
class CountedOp:
    """How an op is counted."""

    make: Callable[..., Counted]
    skewed: bool = False
    """Whether it has a skewed batch too."""
    in_cache: bool = True
    """Whether the cache's dtype and block size matter to it."""


COUNTED: dict[str, CountedOp] = {
    "decode": CountedOp(decode, skewed=True),
    "prefill": CountedOp(prefill, skewed=True),
    "cascade": CountedOp(cascade),
    "store": CountedOp(store),
    "rope_store": CountedOp(rope_store),
    "norm_rope_store": CountedOp(functools.partial(rope_store, norms=True)),
    "rotary": CountedOp(rotary, in_cache=False),
    "norm": CountedOp(norm, in_cache=False),
    "gate": CountedOp(gate, in_cache=False),
    "copy": CountedOp(copy),
    "swap": CountedOp(swap),
    "merge": CountedOp(merge, in_cache=False),
    "slot_mapping": CountedOp(slot_mapping, in_cache=False),
    "sample": CountedOp(sample, in_cache=False),
}
"""Ops by name."""


def counted(op: str, size: Size, implementation: str, path: Path | None) -> Counted:
    """``op`` at a size, by ours or by what ``path`` holds (of ``OTHERS``)."""
    make = COUNTED[op].make
    if path is None:
        return make(size)
    return make(size, OTHERS[implementation].load(path))
