"""Several samples of every prompt, in several passes over a data set."""

from functools import partial

from cache.traces.workloads.draws import Zipf, generator, log_normal_tokens, poisson_arrivals_ms
from cache.traces.workloads.options import Count, NonNegative, Positive, Requests, Seed, workload
from cache.traces.workloads.prompts import PromptSpace


@workload
def parallel_sampling(
    *,
    num_requests: Count = 4000,
    block_size: Count = 16,
    seed: Seed = 0,
    prompt_rate: Positive = 2.0,
    num_samples: Count = 4,
    num_prompts: Count = 250,
    num_templates: Count = 8,
    zipf_exponent: NonNegative = 1.0,
    template_tokens: Positive = 400.0,
    question_tokens: Positive = 200.0,
    output_tokens: Positive = 400.0,
    length_sigma: NonNegative = 0.8,
) -> Requests:
    """Rollouts and best-of-n: each prompt comes ``num_samples`` times at the same instant.

    The prompts form a data set that is run pass after pass, in a new order each time.  Between two
    uses of a prompt, nearly all other prompts are used.  So if the cache is much smaller than the
    data set, LRU keeps the wrong blocks.

    Args:
        prompt_rate: Rate of Poisson arrivals of prompts, per second.
        num_samples: Number of requests per prompt, all with the same timestamp.
        num_prompts: Number of prompts in the data set.
        num_templates: Number of few-shot templates.  Each prompt begins with a template;
            ``zipf_exponent`` is the skew of their popularity.
        template_tokens: Median length of a template.
        question_tokens: Median length of the text after the template.
        output_tokens: Median length of a sample.
        length_sigma: Standard deviation of the logarithm of every length (log-normal).
    """
    rng = generator(seed)
    tokens = partial(log_normal_tokens, rng, sigma=length_sigma)
    space = PromptSpace(block_size)
    popularity = Zipf(num_templates, zipf_exponent)
    templates = [space.extended(space.empty, tokens(template_tokens)) for _ in range(num_templates)]
    prompts = [
        space.extended(templates[popularity.draw(rng)], tokens(question_tokens))
        for _ in range(num_prompts)
    ]
    arrivals = poisson_arrivals_ms(rng, prompt_rate)
    while True:
        for index in rng.permutation(num_prompts):
            arrival = next(arrivals)
            for _ in range(num_samples):
                yield arrival, prompts[index], tokens(output_tokens)
