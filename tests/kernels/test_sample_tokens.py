"""sample_tokens against its reference, exactly, and the distribution of its noise."""

import math
import sys

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from op_calls import labelled

from kernels import reference, sample_tokens
from kernels.sample_tokens import NOISE_SPAN, _gumbel

CHUNK = 4 * NOISE_SPAN.value
FP = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def assert_matches_reference(logits, *args, **options):
    tokens = sample_tokens(logits, *args, **options)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, reference.sample_tokens(logits, *args, **options))
    return tokens


def seeds_of(count, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(device)


LAYOUTS = {
    "rows": lambda x: x,
    "rows of a wider tensor": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.t().contiguous().t(),
    "every third": lambda x: torch.stack([x, x + 1, x + 2], -1)[..., 0],
}


@given(data=st.data())
def test_samples_what_the_reference_samples(data, device):
    draw = labelled(data)
    sizes = st.sampled_from([1, 2, 63, NOISE_SPAN.value, CHUNK, CHUNK + 1]) | st.integers(1, 4500)
    num_rows, vocab_size = draw("num_rows", st.integers(1, 3)), draw("vocab_size", sizes)
    torch.manual_seed(draw("seed", st.integers(0, 2**16)))
    logits = torch.randn(num_rows, vocab_size) * draw("spread", st.sampled_from([0.3, 3, 30]))
    if draw("ties", st.booleans()):
        logits = logits.round()
    if draw("masked", st.booleans()):
        logits[torch.rand_like(logits) < 0.6] = -math.inf
    if draw("broken", st.booleans()):
        strange = torch.tensor([math.nan, math.inf, -math.inf])
        logits[0, torch.randint(vocab_size, (2,))] = strange[torch.randint(3, (2,))]
    dtype = FP[draw("dtype", st.sampled_from([*FP]))]
    logits = LAYOUTS[draw("layout", st.sampled_from([*LAYOUTS]))](logits.to(device, dtype))
    assert_matches_reference(logits)  # greedy
    temperatures = torch.tensor([0.0, 1.0, 0.4, 1e-30, 7.0, 1e29])[torch.randint(6, (num_rows,))]
    args = temperatures.to(device), seeds_of(num_rows, device, vocab_size)
    tokens = assert_matches_reference(logits, *args)
    if num_rows > 1:
        alone = sample_tokens(logits[-1:], *[x[-1:] for x in args])
        assert torch.equal(alone, tokens[-1:]), "a row depends on itself only"
    min_ps = torch.tensor([0.0, 0.05, 0.5, 1.0, 1e-40])[torch.randint(5, (num_rows,))].to(device)
    assert_matches_reference(logits, *args, min_ps=min_ps)
    top = {"top_ks": torch.tensor([1, 2, 20, 2**40])[torch.randint(4, (num_rows,))].to(device)}
    top["top_ps"] = torch.tensor([0.0, 0.3, 0.95, 1.0])[torch.randint(4, (num_rows,))].to(device)
    top["min_ps"] = min_ps
    chosen = draw("options", st.sampled_from([("top_ks",), ("top_ps",), [*top][:2], [*top]]))
    assert_matches_reference(logits, *args, **{name: top[name] for name in chosen})


@pytest.mark.parametrize("num_splits", [2, 5])
def test_any_number_of_programs_finds_the_same(num_splits, device, monkeypatch):
    logits = torch.randn(2, 4 * CHUNK + 5, generator=torch.Generator().manual_seed(0)).round()
    monkeypatch.setattr(
        sys.modules["kernels.sample_tokens"],
        "sample_num_splits",
        lambda _, num_chunks, __: min(num_splits, num_chunks),
    )
    args = torch.tensor([0.0, 2.0], device=device), seeds_of(2, device)
    limits = {  # among tokens with equal logits
        "min_ps": torch.tensor([0.0, 0.2], device=device),
        "top_ks": torch.tensor([5, 3000], device=device),
        "top_ps": torch.tensor([0.9, 0.01], device=device),
    }
    for names in (["min_ps"], ["top_ks"], ["top_ps"], [*limits][1:]):
        chosen = {name: limits[name] for name in names}
        assert_matches_reference(logits.to(device), *args, **chosen)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("place", [3, CHUNK + 9])
def test_a_row_that_is_not_finite_has_no_token(bad, place, device):
    logits = torch.zeros(4, CHUNK + 10, device=device)
    logits[1, place] = bad
    logits[2] = -math.inf
    logits[3, place] = -math.inf
    drawn = torch.tensor([0.0, 1.0, 1.0, 1.0], device=device), seeds_of(4, device)
    for args in ((), drawn):
        for options in ({}, {"min_ps": torch.full((4,), 0.1, device=device)} if args else {}):
            sound = assert_matches_reference(logits, *args, **options) >= 0
            assert sound.tolist() == [True, False, False, True]


def test_the_largest_finite_logits_do_not_overflow(device):
    logits = torch.tensor([[3.4028234e38, -3.4028234e38]] * 50, device=device)
    hottest = torch.full((50,), 1e29, device=device)
    assert not assert_matches_reference(logits, hottest, seeds_of(50, device)).any()


def test_strides_beyond_32_bits(device, huge_tensor):
    rows = huge_tensor(3, 2**30 + 2**16)  # 2 GiB each
    rows[2, 5] = 1
    assert sample_tokens(rows[:, :9]).tolist() == [0, 0, 5]
    assert sample_tokens(rows[:, 5:6].t()).tolist() == [2]


def test_philox_is_philox():
    """The answer that Random123 publishes for a key and a counter of zeros."""
    words = reference.philox(torch.tensor([0]), torch.tensor([0])).flatten().tolist()
    assert [f"{word:08x}" for word in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@triton.jit
def _noise_kernel(out_ptr, words_ptr):
    lanes = tl.arange(0, 64)
    tl.store(out_ptr + lanes, _gumbel(tl.load(words_ptr + lanes).to(tl.uint32)))


def test_noise_is_the_gumbel_variable_of_its_word(device):
    """The smallest and largest words are included."""
    low, high = torch.arange(16), 2**32 - 1 - torch.arange(16)
    middle = torch.randint(2**32, (32,), generator=torch.Generator().manual_seed(0))
    words = torch.cat([low, middle, high]).to(device)
    noise = torch.empty(64, device=device)
    _noise_kernel[(1,)](noise, words, enable_fp_fusion=False)
    assert torch.equal(noise, reference.gumbel(words))
    exact = -((-(-(words.cpu().double() + 0.5) / 2**32).log1p()).log())
    assert (noise.cpu() - exact).abs().max() < 4e-6
    assert (noise.min(), noise.max()) == (noise[-16:].min(), noise[0])
    assert -3.14 < noise.min() < noise.max() < 22.88


def test_noise_of_rows_and_tokens_is_independent():
    """The first two moments, and the products of neighbours, are within 5 sigma."""
    noise = reference.gumbel_noise(torch.arange(400), 3 * CHUNK).double()
    noise = (noise - 0.5772156649) / (math.pi / 6**0.5)
    products = [noise, noise**2 - 1, noise[1:] * noise[:-1], noise[:, 1:] * noise[:, :-1]]
    span = NOISE_SPAN.value
    products += [noise[:, gap:] * noise[:, :-gap] for gap in (span, CHUNK)]
    for values in products:
        sigma = values.std() / values.numel() ** 0.5
        assert abs(values.mean()) < 5 * sigma
