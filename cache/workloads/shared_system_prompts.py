"""Many applications, each with its own system prompt, popular to different degrees."""

from __future__ import annotations

from itertools import islice

from cache.trace import Trace
from cache.workloads.draws import Zipf, generator, log_normal_tokens, poisson_arrivals_ms
from cache.workloads.options import Count, NonNegative, Positive, Seed
from cache.workloads.prompts import PromptSpace


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
) -> Trace:
    """Independent requests: one of many system prompts, then a message that never comes again.

    The cacheable part is a static Zipf popularity, the rest a stream of blocks used once: the
    classic case for frequency over recency.

    Args:
        request_rate: Poisson arrivals, requests per second.
        num_system_prompts: Applications; ``zipf_exponent`` is the skew of their popularity.
        system_tokens: Median length of a system prompt, drawn once for each.
        message_tokens: Median length of a user's message.
        output_tokens: Median length of an answer.
        length_sigma: Standard deviation of the logarithm of every length (log-normal).
    """
    rng = generator(seed)
    space = PromptSpace(block_size)
    popularity = Zipf(num_system_prompts, zipf_exponent)
    system_prompts = [
        space.extended(
            space.empty, space.new_text(), log_normal_tokens(rng, system_tokens, length_sigma)
        )
        for _ in range(num_system_prompts)
    ]

    def requests():
        for arrival in poisson_arrivals_ms(rng, request_rate):
            prompt = space.extended(
                system_prompts[popularity.draw(rng)],
                space.new_text(),
                log_normal_tokens(rng, message_tokens, length_sigma),
            )
            output_length = log_normal_tokens(rng, output_tokens, length_sigma)
            yield arrival, prompt.num_tokens, output_length, prompt.block_ids

    return Trace.from_requests(
        islice(requests(), num_requests), name="shared_system_prompts", block_size=block_size
    )
