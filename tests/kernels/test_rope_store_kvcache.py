"""rope_store_kvcache: bitwise equal to a rotation and a store; its norms are judged in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_calls import copied

from kernels import apply_rotary_embedding, rope_store_kvcache, store_kvcache
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.accuracy import bits
from kernels.testing.cases import make_case
from kernels.testing.inputs import LAYOUTS, SCALES

SIZES = {
    "num_q_heads": st.sampled_from([1, 4, 5]),
    "num_kv_heads": st.integers(1, 3),
    "head_dim": st.sampled_from([16, 33, 64, 80]),
    "rotary_dim": st.sampled_from([2, 16, None]),
    "block_size": st.sampled_from([1, 3, 7, 16, 256]),
    "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    "kv_dtype": st.sampled_from([None, FP8_DTYPE]),
    "scales": st.sampled_from(SCALES),
    "layout": st.sampled_from(LAYOUTS),
    "features": st.sampled_from([(), ("interleaved",)]),
    "seed": st.integers(0, 2**16),
}


def drawn_sizes(data):
    return {name: data.draw(strategy, label=name) for name, strategy in SIZES.items()}


@given(data=st.data())
def test_is_rotation_then_store(data, device):
    num_tokens = data.draw(st.integers(0, 20), label="num_tokens")
    case = make_case(
        "rope_store_kvcache", **drawn_sizes(data), num_tokens=num_tokens, device=device
    )
    call = case.inputs
    if data.draw(st.booleans(), label="without queries"):
        call["query"] = None
    wanted = copied(call)
    assert case.call() is None

    rotation = {name: call[name] for name in ("positions", "cos", "sin", "interleaved")}
    wanted["key"] = apply_rotary_embedding(wanted["key"], **rotation)
    stored = ("key", "value", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale")
    store_kvcache(**{name: wanted[name] for name in stored if name in wanted})
    for name in ("k_cache", "v_cache"):
        assert torch.equal(bits(call[name]), bits(wanted[name]))
    if call["query"] is not None:
        rotated = apply_rotary_embedding(wanted["query"], **rotation)
        assert torch.equal(call["query"], rotated)


@given(data=st.data())
@settings(max_examples=8)
def test_norms_come_before_the_rotation(data, device):
    sizes = drawn_sizes(data)
    sizes["features"] += ("norms",)
    normed = data.draw(st.sampled_from(["q", "k", "qk"]), label="normed")
    options = {
        "norm_eps": data.draw(st.sampled_from([1e-6, 0.1]), label="eps"),
        "norm_offset": data.draw(st.sampled_from([0.0, 1.0]), label="offset"),
    }

    def with_norms(kv_dtype):
        sizes["kv_dtype"] = kv_dtype
        case = make_case("rope_store_kvcache", **sizes, num_tokens=64, device=device)
        # Many evenly spread numbers. Normal ones have few outliers, which PyTorch may round so well
        # by luck that two correct roundings are more than twice as far off.
        generator = torch.Generator().manual_seed(sizes["seed"])
        for name in ("query", "key", "q_norm_weight", "k_norm_weight"):
            shape = case.inputs[name].shape
            case.inputs[name].copy_(2 * torch.rand(shape, generator=generator) - 1)
        case.inputs.update(options)
        for head in {*"qk"} - {*normed}:
            case.inputs[f"{head}_norm_weight"] = None
        return case

    plain, quantised = with_norms(None), with_norms(FP8_DTYPE)
    for name, result in plain.judge().items():
        assert result.passed, f"{name}: {result}, bound {result.bound:.3g}"
    wanted = copied(quantised.inputs)
    quantised.call()
    # The same keys and values without scales, read back and stored.
    slots = wanted["slot_mapping"]
    used, block_size = slots >= 0, sizes["block_size"]
    where = slots[used] // block_size, slots[used] % block_size
    rows = (plain.inputs[name][where] for name in ("k_cache", "v_cache"))
    scales = {name: wanted[name] for name in ("k_scale", "v_scale") if name in wanted}
    caches = wanted["k_cache"], wanted["v_cache"]
    store_kvcache(*rows, *caches, slots[used], **scales)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(bits(quantised.inputs[name]), bits(wanted[name]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_are_rounded_before_the_rotation(interleaved, device):
    """Heads of ones have rms 1. Their gain 1.0035 is 1 in bf16, and 6 times it would not be 6."""
    heads = torch.ones(1, 4, 16, dtype=torch.bfloat16, device=device)
    query, key, value = heads.split((2, 1, 1), dim=1)
    caches = torch.zeros(2, 1, 1, 1, 16, dtype=torch.bfloat16, device=device)
    zero, threes = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1, 8), 3.0)
    weight = torch.full((16,), 0.0035, device=device)
    options = {"q_norm_weight": weight, "k_norm_weight": weight, "interleaved": interleaved}
    options |= {"norm_eps": 0.0, "norm_offset": 1.0}
    rotation = zero, *[threes.to(device)] * 2
    rope_store_kvcache(query, key, value, *caches, zero, *rotation, **options)
    for rotated in (query, caches[:1]):  # pairs (a, b) are now (3 a - 3 b, 3 b + 3 a)
        assert rotated.unique().tolist() == [0.0, 6.0]
