"""The case of every op: its cost, and that its results are judged."""

import pytest
import torch

import kernels
from kernels import reference
from kernels.fp8_cache import FP8_DTYPE
from kernels.testing.cases import OPS, make_case

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def test_every_op_has_a_case():
    assert set(OPS) == set(kernels.__all__)


@pytest.mark.parametrize("op", [op for op in OPS if op != "slot_mapping_from_positions"])
def test_a_wrong_result_is_judged_wrong(op):
    """Results a little off, and of ops that only write: nothing written."""
    case = make_case(op, **HEADS, dtype=torch.float16)

    def off():
        if not case.returns:
            return None
        result = case.call(getattr(reference, op))
        out = result[0] if isinstance(result, tuple) else result
        wrong = out + 0.05 * out.abs().max()
        return (wrong, *result[1:]) if isinstance(result, tuple) else wrong

    judged = case.judge(off)
    assert set(judged) == {*case.returns, *case.writes}
    assert not next(iter(judged.values())).passed


FEATURED = [(op, one) for op, record in OPS.items() for one in record.features]
FEATURED.remove(("swap_blocks", "in"))  # the two caches change places


@pytest.mark.parametrize(("op", "feature"), FEATURED)
def test_every_feature_changes_the_call(op, feature):
    plain, other = (make_case(op, features=f, device="meta").inputs for f in ((), (feature,)))
    assert str(plain) != str(other) or plain["dst_cache"].stride() != other["dst_cache"].stride()


def test_cost_of_decode():
    """Batch 64, context 4096, 32 query and 8 KV heads of 128: every key and value once."""
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "device": "meta"}
    sizes |= {"context_lens": [4096] * 64}
    case = make_case("paged_decode_attention", **sizes)
    keys_and_values = 64 * 4096 * 8 * 2 * 128 * 2
    assert case.num_bytes == keys_and_values + 64 * 256 * 4 + 2 * 64 * 32 * 128 * 2
    assert case.flops == 64 * 32 * 4096 * 2 * (2 * 128)  # two products of 2 x 128 per key
    fp8 = make_case("paged_decode_attention", kv_dtype=FP8_DTYPE, **sizes)
    assert case.num_bytes - fp8.num_bytes == keys_and_values // 2
    assert fp8.flops == case.flops


def test_cost_of_prefill_counts_what_each_query_sees():
    lens = {"context_lens": (37, 37), "query_lens": (19, 19)}
    case = make_case("paged_prefill_attention", **HEADS, **lens)
    kv, qo, ids = 2 * (2 * 37 * 2 * 32) * 2, 2 * (2 * 19 * 4 * 32) * 2, 4 * 2 * 3
    assert case.num_bytes == kv + qo + ids
    assert case.flops == 2 * sum(range(37 - 19 + 1, 37 + 1)) * 4 * (2 * 32 * 2)


def test_cost_of_a_shared_prefix_counts_it_once():
    lens = {"prefix_lens": (48,), "context_lens": (21, 21, 21), "group_sizes": (3,)}
    case = make_case("shared_prefix_decode_attention", **HEADS, **lens)
    ids = 4 * (3 + 3 * 2)
    assert case.num_bytes == 2 * (48 + 3 * 21) * 2 * 32 * 2 + 2 * 3 * 4 * 32 * 2 + ids


def test_cost_of_moves():
    """A stored token is read and written, and so is its slot; a swapped block crosses the link."""
    store = make_case("store_kvcache", **HEADS, num_tokens=10, kv_dtype=FP8_DTYPE)
    assert store.num_bytes == 10 * (2 * 2 * 32 * (2 + 1) + 8)
    copy = make_case("copy_blocks", **HEADS, num_pairs=3, block_size=8)
    assert copy.num_bytes == 2 * 3 * (2 * 2 * 8 * 2 * 32) * 2
    swap = make_case("swap_blocks", **HEADS, num_pairs=3, block_size=8)
    assert 2 * swap.num_bytes == copy.num_bytes
