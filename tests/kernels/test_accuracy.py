"""The rule that judges the kernels, and the hostile inputs it judges them on."""

import math

import pytest
import torch

from kernels.reference import gather_tokens
from kernels.testing.accuracy import accuracy, max_error
from kernels.testing.inputs import LAYOUTS, make_cache, poison_, random_paged_batch


@pytest.mark.parametrize(
    ("out", "low", "ref", "error", "passed"),
    [
        ([1.0, 0.0], [0.0, -0.5], [0.0, 0.0], 1.0, True),  # twice the eager error
        ([1.0001, 0.0], [0.0, -0.5], [0.0, 0.0], 1.0001, False),
        ([0.9e-5], [0.0], [0.0], 0.9e-5, True),  # a little where eager is exact
        ([1.1e-5], [0.0], [0.0], 1.1e-5, False),
        ([math.inf, 1.0], [math.inf, 1.0], [math.inf, 1.0], 0.0, True),
        *[([x, 1.0], [math.inf] * 2, [math.inf, 1.0], math.inf, False) for x in (-math.inf, 0.0)],
        ([math.nan], [1.0], [1.0], math.inf, False),
        ([math.nan], [math.nan], [math.nan], math.inf, False),
        ([1.0], [math.nan], [1.0], 0.0, False),  # where eager fails nothing is right
    ],
)
def test_rule(out, low, ref, error, passed):
    judged = accuracy(torch.tensor(out), torch.tensor(low), torch.tensor(ref).double())
    assert judged.error == pytest.approx(error)
    assert judged.passed == passed
    assert judged.bound == 2 * judged.eager_error + 1e-5


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"actual: expected shape \(2,\), got \(1,\)"):
        max_error(torch.zeros(1), torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_poison_has_no_finite_number(dtype):
    tensor = poison_(torch.zeros(2, 5, dtype=dtype))
    assert not tensor.isfinite().any()
    assert {str(x) for x in tensor.flatten().tolist()} == {"nan", "inf", "-inf"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_have_the_shape_of_the_contract_in_every_layout(layout):
    for cache in make_cache(3, 4, 2, 16, dtype=torch.float16, device="cpu", layout=layout):
        assert cache.shape == (3, 4, 2, 16)
        assert cache.stride(-1) == 1
    hnd = make_cache(3, 4, 2, 16, dtype=torch.float16, device="cpu", layout="HND")[0]
    assert hnd.stride(2) > hnd.stride(1)


def make(**overrides):
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4}
    options = shape | {"dtype": torch.float32} | overrides
    return random_paged_batch([5, 0, 16], **options, device="cpu")


def test_used_slots_are_finite_and_all_others_poison():
    batch = make()
    for cache in (batch.k_cache, batch.v_cache):
        assert cache.isfinite().all(-1).sum() == (5 + 16) * 2
        for row, length in enumerate([5, 0, 16]):
            assert gather_tokens(cache, batch.block_tables[row], 0, length).isfinite().all()


def test_tables_are_shuffled_and_their_padding_is_garbage():
    batch = make()
    used = [*batch.block_tables[0, :2].tolist(), *batch.block_tables[2, :4].tolist()]
    assert len(set(used)) == 6
    assert used != sorted(used)
    padding = torch.cat(
        [batch.block_tables[0, 2:], batch.block_tables[1], batch.block_tables[2, 4:]]
    )
    assert ((padding < 0) | (padding >= batch.k_cache.shape[0])).all()


def test_hidden_tokens_are_poison_and_their_blocks_garbage():
    batch = make(hidden_tokens=[-3, 0, 9])
    table = batch.block_tables[2]
    assert ((table[:2] < 0) | (table[:2] >= batch.k_cache.shape[0])).all()
    assert not batch.k_cache[table[2], 0].isfinite().any()
    assert batch.k_cache[table[2], 1:].isfinite().all()
