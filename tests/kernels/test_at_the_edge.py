"""No op accesses anything past the ends of tensors; for attention see test_attention_ops.py."""

from __future__ import annotations

import pytest
import torch
from op_calls import function, i32, i64, kv
from torch import rand, zeros
from torch.utils._pytree import tree_leaves, tree_map_only


def _rotary():
    """Of the first 30 elements of a head; the last position is used."""
    return {"positions": i64(8, 0, 4), "cos": rand(9, 15), "sin": rand(9, 15)}


def _store():
    key, value = rand(2, 3, 3, 33)
    return {"key": key, "value": value, **kv(2, 3, 3, 33), "slot_mapping": i64(5, 0, 2)}


# Heads of a block lie apart: only then does what follows it in its kernel not wrap into the block.
CALLS = {
    "store_kvcache": _store,
    "rope_store_kvcache": lambda: {"query": rand(3, 5, 33), **_store(), **_rotary()},
    "rope_store_kvcache interleaved": lambda: {
        **CALLS["rope_store_kvcache"](),
        "interleaved": True,
    },
    "rope_store_kvcache normalised": lambda: {
        **CALLS["rope_store_kvcache"](),
        **dict(zip(("q_norm_weight", "k_norm_weight"), rand(2, 33), strict=True)),
    },
    "rope_store_kvcache normalised interleaved": lambda: {
        **CALLS["rope_store_kvcache normalised"](),
        "interleaved": True,
    },
    "add_rms_norm": lambda: {"x": rand(3, 33), "residual": rand(3, 50)[:, :33], "weight": rand(33)},
    "gated_activation": lambda: {
        **dict(zip(("gate", "up"), rand(3, 66).chunk(2, dim=1), strict=True)),
        "activation": "silu",
    },
    "apply_rotary_embedding": lambda: {"x": rand(3, 5, 33), **_rotary()},
    "apply_rotary_embedding interleaved": lambda: {
        **CALLS["apply_rotary_embedding"](),
        "interleaved": True,
    },
    "merge_attention_states": lambda: {
        name: rand(shape)
        for part in "ab"
        for name, shape in ((f"out_{part}", (3, 5, 33)), (f"lse_{part}", (3, 5)))
    },
    "slot_mapping_from_positions": lambda: {
        "positions": i64(0, 13, 8),
        "block_tables": i32([3, 1, 6], [2, 0, 7]),
        "seq_ids": i64(0, 1, 1),
        "block_size": 5,
    },
    "sample_tokens": lambda: {
        "logits": rand(3, 2500),
        "temperatures": rand(3),
        "noise_seeds": i64(1, 2, 3),
        "min_ps": rand(3),
    },
    "copy_blocks out of the last": lambda: {
        "caches": rand(2, 2, 3, 5, 3, 33)[..., :32],
        "src_to_dst": i64([2, 0], [2, 1]),
    },
    "copy_blocks into the last": lambda: {
        "caches": [tuple(rand(2, 3, 5, 3, 33)[..., :32]) for _ in range(2)],
        "src_to_dst": i64([0, 2]),
    },
    "swap_blocks": lambda: {
        "src_cache": rand(4, 5, 3, 33)[..., :32],
        "dst_cache": zeros(3, 5, 3, 33)[..., :32],
        "src_to_dst": i64([0, 1], [3, 2]),
    },
}


def tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_nothing_past_the_end_is_accessed(name, at_the_edge, monkeypatch):
    def at_the_edge_with_strides(tensor):
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return at_the_edge(tensor.as_strided((last + 1,), (1,))).as_strided(
            tensor.shape, tensor.stride()
        )

    call = CALLS[name]()
    edge = tree_map_only(torch.Tensor, at_the_edge_with_strides, call)
    op = function(name.split()[0])
    expected = tensors([op(**call), *call.values()])
    empty = torch.empty  # results
    monkeypatch.setattr(torch, "empty", lambda *args, **how: at_the_edge(empty(*args, **how)))
    for one, other in zip(expected, tensors([op(**edge), *edge.values()]), strict=True):
        assert torch.equal(one, other)
