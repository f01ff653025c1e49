"""A valid call of every op at a tiny size, from which tests make invalid ones."""

from collections.abc import Callable

import torch
from torch import ones, zeros
from torch.utils._pytree import tree_leaves, tree_map_only

import kernels
from kernels import flash_attn_compat
from kernels.testing.accuracy import bits
from kernels.testing.cases import OPS, make_case
from kernels.testing.inputs import i32, kv

ATTENTION = ("paged_decode_attention", "paged_prefill_attention", "shared_prefix_decode_attention")


def tensors_of(*values: object) -> list[torch.Tensor]:
    """All tensors in containers but meta tensors, which have no values."""
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]


def copied(values):
    """Containers with copies of their tensors."""
    return tree_map_only(torch.Tensor, torch.clone, values)


def same(values: object, others: object) -> bool:
    """Whether all tensors in two containers agree bit for bit."""
    pairs = zip(tensors_of(values), tensors_of(others), strict=True)
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


def labelled(data) -> Callable:
    """Hypothesis' draw with the label of a value before its strategy."""
    return lambda label, strategy: data.draw(strategy, label=label)


def function(op: str) -> Callable:
    """The public function of this name."""
    return getattr(kernels, op, None) or getattr(flash_attn_compat, op)


_TINY = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4, "num_tokens": 4}
_TINY |= {"num_positions": 9, "padded": False, "dtype": torch.float32}


def good_call(op: str, **changes: object) -> dict[str, object]:
    """Arguments of an op by name, in host memory: 2 sequences or 4 tokens, 4 query heads and 2 KV
    heads of 16, 5 blocks of 4 slots. changes: other arguments of `make_case`."""
    if op == "flash_attn_with_kvcache":
        return {"q": ones(2, 3, 4, 16), **kv(2, 8, 2, 16)}
    if op == "flash_attn_varlen_func":
        lens = {"cu_seqlens_q": i32(0, 2, 5), "cu_seqlens_k": i32(0, 3, 7)}
        keys = {"q": ones(5, 4, 16), "k": zeros(7, 2, 16), "v": zeros(7, 2, 16)}
        return {**keys, **lens, "max_seqlen_q": 3, "max_seqlen_k": 4}
    call = make_case(op, **_TINY | {**OPS[op].tiny} | changes).inputs
    if op in ATTENTION:
        call["out"] = zeros(2, 4, 16)
    if op == "swap_blocks":  # one plane
        call |= {name: call[name][0, 0] for name in ("src_cache", "dst_cache")}
    return call


def on_device(call: dict[str, object], device: torch.device) -> dict[str, object]:
    """The call with its tensors moved, in the strides they have; meta tensors stay, and the host
    cache of a swap is pinned."""

    def moved(tensor):
        if tensor.is_meta:
            return tensor
        if tensor is call.get("dst_cache"):
            return tensor if device.type == "cpu" else tensor.pin_memory()
        if tensor.is_contiguous():
            return tensor.to(device)
        options = {"dtype": tensor.dtype, "device": device}
        return torch.empty_strided(tensor.size(), tensor.stride(), **options).copy_(tensor)

    return tree_map_only(torch.Tensor, moved, call)
