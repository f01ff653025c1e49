import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cache.serving.sampling_params import SamplingParams
from kernels.reference import mask_top_k_top_p
from models.sampler import Sampler, noise_seed

CPU = torch.device("cpu")
DRAWS = 20_000
LOGITS = torch.tensor([2.0, 0.5, 1.5, -1.0, 0.0, 1.49, -2.0, 0.7])


def sample(logits, params, noise_seeds=None, seed=0):
    rows = [params] * len(logits) if isinstance(params, SamplingParams) else params
    return Sampler(CPU, seed)(logits, rows, noise_seeds or [None] * len(rows))


def p_value(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's chi-square test that tokens are samples of probs (fp64, zeros allowed)."""
    counts = tokens.bincount(minlength=len(probs)).double()
    assert (counts[probs == 0] == 0).all()
    expected = probs[probs > 0] * len(tokens)
    assert expected.min() >= 5
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    degrees = torch.tensor(float(len(expected) - 1)).double()
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def softmax(logits, keep=None, temperature=1.0):
    scores = logits.double() / temperature
    if keep is not None:
        scores = torch.full_like(scores, -math.inf).scatter(0, torch.tensor(keep), scores[keep])
    return scores.softmax(0)


DISTRIBUTIONS = {
    "plain": (SamplingParams(), softmax(LOGITS)),
    "cold": (SamplingParams(temperature=0.6), softmax(LOGITS, temperature=0.6)),
    "hot": (SamplingParams(temperature=3.0), softmax(LOGITS, temperature=3.0)),
    "top_k": (SamplingParams(top_k=3), softmax(LOGITS, [0, 2, 5])),
    "top_k_above_vocab": (SamplingParams(top_k=100), softmax(LOGITS)),
    # softmax: .344 .077 .209 .017 .047 .207 .006 .094 -> .344 + .209 < .7 <= .344 + .209 + .207
    "top_p": (SamplingParams(top_p=0.7), softmax(LOGITS, [0, 2, 5])),
    # among the top 2, token 0 has .62, so .6 is reached by it alone and .7 by both
    "top_k_then_top_p": (SamplingParams(top_k=2, top_p=0.7), softmax(LOGITS, [0, 2])),
    # tokens of at least .3 times the largest probability
    "min_p": (SamplingParams(min_p=0.3), softmax(LOGITS, [0, 2, 5])),
    "top_p_after_min_p": (SamplingParams(min_p=0.3, top_p=0.7), softmax(LOGITS, [0, 2])),
    "top_p_after_temperature": (
        SamplingParams(top_p=0.7, temperature=3.0),
        softmax(LOGITS, [0, 1, 2, 5, 7], 3.0),
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("seeded", [False, True], ids=["shared_noise", "seeded"])
def test_samples_follow_the_distribution(name, seeded):
    params, probs = DISTRIBUTIONS[name]
    seeds = [noise_seed(11, 0, i) for i in range(DRAWS)] if seeded else None
    tokens = sample(LOGITS.expand(DRAWS, -1), params, seeds)
    assert p_value(tokens, probs) > 1e-3


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_equal_logits_are_drawn_evenly_at_any_temperature(temperature):
    """A hot row beside them is sampled as it is alone."""
    cold, hot = SamplingParams(temperature=temperature), SamplingParams()
    tied = torch.tensor([20.3, 20.3, 20.2])
    rows, seeds = [cold] * DRAWS + [hot], list(range(DRAWS + 1))
    tokens = sample(torch.stack([tied] * DRAWS + [LOGITS[:3] + 20]), rows, seeds)
    assert p_value(tokens[:-1], torch.tensor([0.5, 0.5, 0.0]).double()) > 1e-3
    assert tokens[-1] == sample(LOGITS[None, :3] + 20, hot, seeds[-1:])


def test_the_chi_square_test_notices_a_small_difference():
    tokens = sample(LOGITS.expand(DRAWS, -1), SamplingParams())
    assert p_value(tokens, softmax(LOGITS, temperature=1.1)) < 1e-6


def test_outputs_of_a_seeded_request_are_independent():
    """Pairs of samples at neighbouring positions have the product distribution."""
    logits, count = LOGITS[:3], 3000
    request = SimpleNamespace(params=SamplingParams(seed=5))
    sequences = [
        SimpleNamespace(request=request, index=0, num_output_tokens=i) for i in range(count + 1)
    ]
    rows = [*range(count + 1)]
    tokens = Sampler(CPU).draw(logits.expand(count + 1, -1), rows, sequences).tokens
    pairs = tokens[:-1] * 3 + tokens[1:]
    assert p_value(pairs, torch.outer(softmax(logits), softmax(logits)).flatten()) > 1e-3


def test_kernels_sample_as_the_reference_does():
    """Each kind of seeded row, alone and in a batch with all kinds and an unseeded row."""
    kinds = [params for params, _ in DISTRIBUTIONS.values()]
    kinds += [SamplingParams(min_p=0.1, temperature=2.0), SamplingParams(temperature=0.0)]
    kinds.append(SamplingParams())
    logits = torch.randn(len(kinds), 700, generator=torch.Generator().manual_seed(2)) * 2
    seeds = [noise_seed(3, 0, row) for row in range(len(kinds) - 1)] + [None]
    by_kernels = Sampler(CPU, 0, use_kernels=True)(logits, kinds, seeds)
    assert torch.equal(by_kernels, Sampler(CPU, 0)(logits, kinds, seeds))
    alone = [
        sample(logits[row : row + 1], [params], seeds[row : row + 1], seed=1)
        for row, params in enumerate(kinds[:-1])
    ]
    assert torch.equal(torch.cat(alone), by_kernels[:-1])
    assert alone[-1] == logits[-2].argmax(), "greedy"


def test_noise_seeds_differ_by_seed_sample_and_position():
    seeds = {
        noise_seed(s, n, p) for s in (0, 1, 2**40, 2**40 + 1) for n in range(10) for p in range(50)
    }
    assert len(seeds) == 4 * 10 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 5}], ids=["", "top_p", "top_k"])
def test_extreme_temperatures(options):
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    greedy = [options | {"temperature": t} for t in (1e-5, 1e-30, 1e-40, 5e-324)]
    for fields in (*greedy, {"top_k": 1}, {"top_p": 1e-9}):
        assert torch.equal(sample(logits, SamplingParams(**fields)), logits.argmax(-1))
    logits = torch.tensor([0.0, -math.inf, 1.0, 2.0]).expand(DRAWS, -1)
    for temperature in (1e5, 1e38, 1e300, 10**400):
        hot = sample(logits, SamplingParams(temperature=temperature, **options))
        assert p_value(hot, torch.tensor([1.0, 0.0, 1.0, 1.0]).double() / 3) > 1e-3


def test_the_seed_of_the_sampler_fixes_requests_without_one():
    logits = LOGITS.expand(100, -1)
    assert torch.equal(sample(logits, SamplingParams()), sample(logits, SamplingParams()))
    assert not torch.equal(
        sample(logits, SamplingParams()), sample(logits, SamplingParams(), seed=1)
    )
    unseeded = Sampler(CPU)(logits, [SamplingParams()] * 100, [None] * 100)
    assert not torch.equal(unseeded, Sampler(CPU)(logits, [SamplingParams()] * 100, [None] * 100))


@given(data=st.data())
def test_masks_follow_their_definitions(data):
    vocab = data.draw(st.integers(1, 12))
    values = data.draw(st.lists(st.integers(-6, 6), min_size=vocab, max_size=vocab))  # with ties
    top_k = data.draw(st.integers(1, vocab))
    top_p = data.draw(st.floats(0.05, 0.95))
    logits = torch.tensor([values]).double() / 2
    masked = mask_top_k_top_p(
        logits, torch.ones(1), torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64)
    )[0]
    order = sorted(range(vocab), key=lambda token: (-values[token], token))[:top_k]
    weights = [math.exp(values[token] / 2) for token in order]
    before = [sum(weights[:rank]) / sum(weights) for rank in range(top_k)]
    assume(all(abs(share - top_p) > 1e-9 for share in before))  # floating point cannot decide
    kept = [token for token, share in zip(order, before, strict=True) if share < top_p]
    assert masked.isfinite().nonzero().flatten().tolist() == sorted(kept)
    assert torch.equal(masked[kept], logits[0, kept])
