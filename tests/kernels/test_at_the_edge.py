"""No op accesses anything past the ends of tensors; for attention see test_attention_ops.py."""

from __future__ import annotations

import pytest
import torch
from op_calls import function, i64
from torch import rand, zeros
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.testing.cases import make_case

# The last slot, position and token are used. Heads of a block lie apart: only then does what
# follows it in its kernel not wrap into the block.
SIZES = {"num_q_heads": 5, "num_kv_heads": 3, "head_dim": 33, "rotary_dim": 30, "block_size": 3}
SIZES |= {"num_tokens": 3, "num_positions": 3, "spare_blocks": 0, "padded": False}
SIZES |= {"context_lens": (8, 7), "table_width": 3, "vocab_size": 2500, "width": 33}
CASES = {
    "store_kvcache": (),
    "rope_store_kvcache": (),
    "rope_store_kvcache interleaved": ("interleaved",),
    "rope_store_kvcache normalised": ("norms",),
    "rope_store_kvcache normalised interleaved": ("norms", "interleaved"),
    "add_rms_norm": (),
    "gated_activation": (),
    "apply_rotary_embedding": (),
    "apply_rotary_embedding interleaved": ("interleaved",),
    "merge_attention_states": (),
    "slot_mapping_from_positions": (),
    "sample_tokens": ("min_p",),
}
MOVES = {
    "copy_blocks out of the last": {
        "caches": rand(2, 2, 3, 5, 3, 33)[..., :32],
        "src_to_dst": i64([2, 0], [2, 1]),
    },
    "copy_blocks into the last": {
        "caches": [tuple(rand(2, 3, 5, 3, 33)[..., :32]) for _ in range(2)],
        "src_to_dst": i64([0, 2]),
    },
    "swap_blocks": {
        "src_cache": rand(4, 5, 3, 33)[..., :32],
        "dst_cache": zeros(3, 5, 3, 33)[..., :32],
        "src_to_dst": i64([0, 1], [3, 2]),
    },
}


def tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", [*CASES, *MOVES])
def test_nothing_past_the_end_is_accessed(name, at_the_edge, monkeypatch):
    def at_the_edge_with_strides(tensor):
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return at_the_edge(tensor.as_strided((last + 1,), (1,))).as_strided(
            tensor.shape, tensor.stride()
        )

    op = name.split()[0]
    if name in MOVES:
        call = MOVES[name]
    else:
        call = make_case(op, **SIZES, features=CASES[name], dtype=torch.float32).inputs
    edge = tree_map_only(torch.Tensor, at_the_edge_with_strides, call)
    op = function(op)
    expected = tensors([op(**call), *call.values()])
    empty = torch.empty  # results
    monkeypatch.setattr(torch, "empty", lambda *args, **how: at_the_edge(empty(*args, **how)))
    for one, other in zip(expected, tensors([op(**edge), *edge.values()]), strict=True):
        assert torch.equal(one, other)
