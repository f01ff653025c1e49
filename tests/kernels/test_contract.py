"""Contract of every op: cases of kernels/testing/cases.py of any shape, strides and values.

Results are judged by the rule of kernels/testing/accuracy.py, moves bit by bit. Behaviour
of one op, and of attention alone, is tested in files of their own.
"""

import math
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from attention_ops import OPS as ATTENTION_OPS
from attention_ops import ScoreRounding
from hypothesis import given
from hypothesis import strategies as st
from op_calls import copied, labelled, same, tensors_of
from torch.utils._pytree import tree_map_only

import kernels
from kernels import reference
from kernels.block_layout import CACHE_DTYPES
from kernels.testing.accuracy import bits
from kernels.testing.cases import OPS, make_case
from kernels.testing.op import Lens, Sizes

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ATTENTION = {op.op: op for op in ATTENTION_OPS.values()}
SCORED = (*ATTENTION, "paged_mla_decode_attention")
every_op = pytest.mark.parametrize("op", OPS)

SIZES = {
    "num_tokens": st.integers(0, 40),
    "num_kv_heads": st.integers(1, 3),
    "head_dim": st.sampled_from([16, 17, 24, 33, 64, 80, 112, 200, 255, 256]),
    "block_size": st.sampled_from([1, 2, 3, 7, 16, 24, 100, 256]),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**16),
}
"""Sizes that every op has; records have the sizes and arguments of single ops."""
OTHER_DTYPES = {
    torch.int32: (("positions",), ("slot_mapping",), ("seq_ids",)),
    torch.float32: (("weight",), ("cos", "sin"), ("q_norm_weight", "k_norm_weight")),
    torch.float16: (("cos", "sin"),),
}


def strategy(values) -> st.SearchStrategy:
    """Draws what an op's record describes."""
    if isinstance(values, Lens):
        return st.lists(st.integers(0, values.longest), max_size=values.most)
    if isinstance(values, range):
        return st.integers(values.start, values.stop - 1)
    ranges = [strategy(one) for one in values if isinstance(one, range)]
    single = [one for one in values if not isinstance(one, range)]
    return st.one_of(st.sampled_from(single), *ranges)


def relaid(tensor: torch.Tensor, how: str, start: int = 0) -> torch.Tensor:
    """A copy with other strides. "wide": a part of a larger tensor, from `start` in its rows. Then
    row length (start 0), first address (start 1) or both (start 8) are off alignment.
    "reversed": the first dimensions in reverse order in memory."""
    if how == "wide" and tensor.dim():
        wide = torch.empty(
            *(n + 4 for n in tensor.shape[:-1]), tensor.shape[-1] + 15 + start,
            dtype=tensor.dtype, device=tensor.device,
        )  # fmt: skip
        within = [slice(2, 2 + n) for n in tensor.shape[:-1]]
        return wide[(*within, slice(start, start + tensor.shape[-1]))].copy_(tensor)
    if how == "reversed" and tensor.dim():
        order = (*reversed(range(tensor.dim() - 1)), tensor.dim() - 1)
        return tensor.permute(order).contiguous().permute(order)
    return tensor


def memory_of(inputs) -> dict[int, torch.Tensor]:
    """All bytes that the tensors are parts of, by address."""
    return {
        x.untyped_storage().data_ptr(): torch.empty(0, dtype=torch.uint8, device=x.device).set_(
            x.untyped_storage()
        )
        for x in tensors_of(inputs)
    }


def assert_nothing_else_is_written(before, case) -> None:
    """before: copies of `memory_of`. Only tensors that the op writes to have changed, and no memory
    around them."""
    for tensor in tensors_of([case.inputs[name] for name in case.writes]):
        memory = before[tensor.untyped_storage().data_ptr()].view(tensor.dtype)
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        memory.as_strided(*place).copy_(tensor)
    for start, memory in memory_of(case.inputs).items():
        assert torch.equal(before[start], memory)


def harder(op: str, inputs: dict, draw) -> dict:
    """Inputs of a case with padding, dtypes and magnitudes that it does not have."""
    changed = dict(inputs)
    for dtype, groups in OTHER_DTYPES.items():
        for names in groups:
            if inputs.get(names[0]) is not None and draw(f"{names[0]} in {dtype}", st.booleans()):
                changed |= {name: inputs[name].to(dtype) for name in names}
    if OPS[op].scaled:
        largest = [2.0**125] if op == "merge_attention_states" else []
        size = draw("magnitude", st.sampled_from([1e-2, 1.0, 30.0, *largest]))
        for name in OPS[op].scaled:
            if inputs[name] is not None:
                changed[name] = inputs[name] * size
    if "slot_mapping" in inputs:
        slots = changed["slot_mapping"].clone()
        slots[slots < 0] = draw("skipped slot", st.sampled_from([-1, -2, -5, -(2**31)]))
        changed["slot_mapping"] = slots[: draw("num_slots", st.integers(0, len(slots)))]
    if "src_to_dst" in inputs:
        pairs = inputs["src_to_dst"].clone()
        if draw("one source", st.booleans()):
            pairs[:, 0] = pairs[:1, 0]
        padding = [[-1, 0], [0, -1], [-(2**40), 2**40]]
        padding += [[block, block] for block in pairs[:1, 0].tolist() if op == "copy_blocks"]
        changed["src_to_dst"] = torch.cat([torch.tensor(padding).to(pairs), pairs])
    return changed


@given(data=st.data())
@every_op
def test_matches_reference(op, data, device):
    draw = labelled(data)
    own = {name: strategy(values) for name, values in OPS[op].drawn.items()}
    sizes = {name: draw(name, one) for name, one in (SIZES | own).items()}
    options = {name: sizes.pop(name) for name in own if not hasattr(Sizes, name)}
    sizes["num_q_heads"] = sizes["num_kv_heads"] * draw("group", st.sampled_from([1, 2, 3, 5, 8]))
    features = draw("features", st.sets(st.sampled_from(OPS[op].features or ("",))))
    features -= {"", "norms"} | ({"min_p", "top_k", "top_p"} if "greedy" in features else set())
    if op in ATTENTION:
        if sizes["exponent"] is not None:  # exact scores
            options["scale"] = math.copysign(0.125, options["scale"] or 1)
            sizes["scales"] = "none"
        sizes |= ATTENTION[op].sizes(draw("lengths", ATTENTION[op].lengths))
        sizes |= {"options": options}
        features -= {"window", "softcap", "split"}
    inexact = op in SCORED and not sizes.get("exponent") and sizes["dtype"] == torch.float32
    case = make_case(op, **sizes, features=sorted(features), device=device)
    case.inputs.update(options | harder(op, case.inputs, draw))

    if op != "swap_blocks" or device.type == "cpu":  # a cache in host memory stays pinned
        for name, value in case.inputs.items():
            if tensors_of(value):
                how = draw(f"strides of {name}", st.sampled_from(["as made", "wide", "reversed"]))
                start = draw(f"start in rows of {name}", st.sampled_from([0, 1, 8]))
                move = partial(relaid, how=how, start=start)
                case.inputs[name] = tree_map_only(torch.Tensor, move, value)
    before = {start: memory.clone() for start, memory in memory_of(case.inputs).items()}
    rounding = ScoreRounding()
    with rounding if inexact else nullcontext():
        results = case.judge()
    for name, result in results.items():
        bound = result.bound + rounding.bounds.get(name, 0.0)
        assert result.error <= bound < math.inf, f"{name}: {result}, bound {bound:.3g}"
        assert result.error == 0 or not OPS[op].is_exact, name
    assert_nothing_else_is_written(before, case)


@pytest.mark.parametrize("dtype", [*CACHE_DTYPES], ids=str)
@pytest.mark.parametrize("op", ["store_kvcache", "copy_blocks", "swap_blocks"])
def test_moves_keep_every_bit_pattern(op, dtype, device):
    """NaN payloads too; as integers, since deterministic index_put on a GPU computes in fp32."""
    if op == "store_kvcache" and dtype not in DTYPES:
        pytest.skip("keys and values are floating-point numbers")
    case = make_case(op, num_tokens=3, dtype=torch.float32, device=device)

    def any_bits(x):
        if not x.is_floating_point():
            return x
        generator = torch.Generator().manual_seed(x.numel())
        shape = [*x.shape[:-1], x.shape[-1] * dtype.itemsize]
        random = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return random.view(dtype).to(x.device)

    if op != "swap_blocks" or device.type == "cpu":
        case.inputs.update(tree_map_only(torch.Tensor, any_bits, case.inputs))
    expected = tree_map_only(torch.Tensor, lambda x: bits(x).clone(), case.inputs)
    getattr(reference, op)(**expected)
    case.call()
    assert same(case.inputs, expected)


NOTHING = {"num_tokens": 0, "num_pairs": 0, "context_lens": (), "query_lens": ()}
NOTHING |= {"group_sizes": (), "prefix_lens": ()}


@every_op
def test_nothing_to_do(op, device):
    """No rows, pairs or sequences: no error, empty results, nothing written."""
    case = make_case(op, **NOTHING, device=device)
    written = [x for name in case.writes for x in tensors_of(case.inputs[name])]
    before = copied(written)
    result = case.call()
    assert not any(x.numel() for x in tensors_of(result))
    assert same(before, written)


SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 5, "num_tokens": 5}
SMALL |= {"dtype": torch.float16, "context_lens": (40, 7, 3), "query_lens": (5, 1, 2)}
SMALL |= {"vocab_size": 9, "width": 64, "first_block": 2, "num_layers": 3}
FAR = [
    (op, dim, ())
    for op in OPS
    for dim in range(5 if "blocks" in op else 3 if re.search("cache|bounds|attention$", op) else 1)
] + [("copy_blocks", dim, ("list",)) for dim in range(3)]


@pytest.mark.parametrize(("op", "dim", "features"), FAR)
def test_offsets_beyond_32_bits(op, dim, features, huge_tensor, device):
    """Every tensor has its last elements along a dimension more than 2**31 elements away."""
    if op == "swap_blocks" and device.type != "cpu":
        pytest.skip("would pin several GiB of host memory")

    def far(tensor):
        if dim >= tensor.dim() - 1 or tensor.shape[dim] < 2:
            return tensor
        shape = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
        stride = max(2**31 // (tensor.shape[dim] - 1) + 2**16, math.prod(shape))
        wide = huge_tensor(tensor.shape[dim], stride, dtype=tensor.dtype)
        return wide[:, : math.prod(shape)].unflatten(1, shape).movedim(0, dim).copy_(tensor)

    options = {"num_splits": 2} if op in SCORED else {}
    results = []
    for move in (lambda x: x, far):
        case = make_case(op, **SMALL, features=features, options=options, device=device)
        if op in SCORED:
            values = case.inputs["q"][..., : case.inputs.get("head_dim_v")]
            case.inputs["out"] = torch.empty_like(values)
        moved = tree_map_only(torch.Tensor, move, case.inputs)
        case.inputs.update(moved)
        results.append([case.call(), *(case.inputs[name] for name in case.writes)])
    assert same(*results)


# The last slot, position and token are used. Heads of a block lie apart: only then does what
# follows it in its kernel not wrap into the block.
EDGE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 33, "rotary_dim": 30, "num_tokens": 3}
EDGE |= {"num_positions": 3, "spare_blocks": 0, "padded": False, "vocab_size": 2500, "width": 33}
EDGE |= {"context_lens": (8, 7, 8), "query_lens": (5, 2, 8), "prefix_lens": (8, 3)}
EDGE |= {"dtype": torch.float32}
AT_THE_EDGE = [(op, (one,)) for op, record in OPS.items() for one in record.features]
AT_THE_EDGE += [(op, ()) for op in OPS]
AT_THE_EDGE += [("rope_store_kvcache", ("norms", "interleaved"))]
AT_THE_EDGE += [("paged_prefill_attention", ("not causal",))]


@pytest.mark.parametrize(("op", "features"), AT_THE_EDGE)
def test_nothing_past_the_end_is_accessed(op, features, at_the_edge, monkeypatch):
    """Tensors end where memory does. Block tables are as wide as the longest sequence needs."""

    def at_the_edge_with_strides(tensor):
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        edge = at_the_edge(tensor.as_strided((last + 1,), (1,), tensor.storage_offset()))
        return edge.as_strided(tensor.shape, tensor.stride())

    options = {"causal": False} if "not causal" in features else {}
    options |= {"num_splits": 1} if op in ATTENTION and "split" not in features else {}
    options |= {"window_size": 5} if "window" in features else {}
    block_size = 1 if op in ATTENTION else 3
    sizes = EDGE | {"block_size": block_size, "table_width": 8 if op in ATTENTION else 3}
    features = [one for one in features if one != "not causal"]
    case = make_case(op, **sizes, features=features, options=options)
    if "caches" in case.inputs or "src_cache" in case.inputs:  # rows of 33, of which 32 are used
        narrow = {k: v for k, v in case.inputs.items() if k != "src_to_dst"}
        case.inputs.update(tree_map_only(torch.Tensor, lambda x: x[..., :32], narrow))
    edge = tree_map_only(torch.Tensor, at_the_edge_with_strides, case.inputs)
    expected = case.call(), case.inputs
    empty = torch.empty  # results
    monkeypatch.setattr(torch, "empty", lambda *args, **how: at_the_edge(empty(*args, **how)))
    assert same((case.call(lambda **_: getattr(kernels, op)(**edge)), edge), expected)
