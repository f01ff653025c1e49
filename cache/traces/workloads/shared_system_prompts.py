"""Many applications.  Each application has its own system prompt; some are more popular."""

from functools import partial

from cache.traces.workloads.draws import Zipf, generator, log_normal_tokens, poisson_arrivals_ms
from cache.traces.workloads.options import Count, NonNegative, Positive, Requests, Seed, workload
from cache.traces.workloads.prompts import PromptSpace


@workload
def shared_system_prompts(
    *,
    num_requests: Count = 4000,
    block_size: Count = 16,
    seed: Seed = 0,
    request_rate: Positive = 10.0,
    num_system_prompts: Count = 200,
    zipf_exponent: NonNegative = 1.0,
    system_tokens: Positive = 600.0,
    message_tokens: Positive = 80.0,
    output_tokens: Positive = 150.0,
    length_sigma: NonNegative = 0.8,
) -> Requests:
    """Independent requests: a popular or rare system prompt, then a unique message.

    System prompts have a static Zipf popularity, and all other blocks are used once.  In this
    classic case frequency predicts reuse better than recency.

    Args:
        request_rate: Rate of Poisson arrivals, requests per second.
        num_system_prompts: Number of applications; ``zipf_exponent``: skew of their popularity.
        system_tokens: Median length of a system prompt.  Its length is the same in all requests.
        message_tokens: Median length of a user's message.
        output_tokens: Median length of an answer.
        length_sigma: Standard deviation of the logarithm of every length (log-normal).
    """
    rng = generator(seed)
    tokens = partial(log_normal_tokens, rng, sigma=length_sigma)
    space = PromptSpace(block_size)
    popularity = Zipf(num_system_prompts, zipf_exponent)
    system_prompts = [
        space.extended(space.empty, tokens(system_tokens)) for _ in range(num_system_prompts)
    ]
    for arrival in poisson_arrivals_ms(rng, request_rate):
        system_prompt = system_prompts[popularity.draw(rng)]
        yield arrival, space.extended(system_prompt, tokens(message_tokens)), tokens(output_tokens)
