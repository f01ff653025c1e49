"""Chat sessions: every turn sends the whole previous conversation."""

from functools import partial
from itertools import count

from cache.traces.workloads import draws, options
from cache.traces.workloads.prompts import PromptSpace


@options.workload
def multi_turn_chat(
    *,
    num_requests: options.Count = 3000,
    block_size: options.Count = 16,
    seed: options.Seed = 0,
    session_rate: options.Positive = 0.5,
    num_system_prompts: options.Count = 4,
    zipf_exponent: options.NonNegative = 1.0,
    system_tokens: options.Positive = 400.0,
    mean_turns: options.AtLeastOne = 4.0,
    message_tokens: options.Positive = 60.0,
    output_tokens: options.Positive = 150.0,
    length_sigma: options.NonNegative = 0.8,
    think_seconds: options.Positive = 30.0,
    think_sigma: options.NonNegative = 1.2,
    ms_per_output_token: options.NonNegative = 20.0,
    max_context_tokens: options.Count = 8192,
) -> options.Requests:
    """Conversations: a prompt is the previous prompt, the previous answer and a new message.

    The blocks of a conversation are used again after the user's think time, and never after the
    last turn.  Recency predicts reuse.  Blocks hit if they stay in the cache during the think time.

    Args:
        session_rate: Rate of Poisson arrivals of conversations, per second.
        num_system_prompts: Number of assistants; ``zipf_exponent``: skew of their popularity.
        system_tokens: Median length of a system prompt.  Its length is the same in all requests.
        mean_turns: Mean number of turns (geometric).
        message_tokens: Median length of a user's message.
        output_tokens: Median length of an answer.
        length_sigma: Standard deviation of the logarithm of every length (log-normal).
        think_seconds: Median time from the end of an answer to the next message (log-normal with
            ``think_sigma``).
        ms_per_output_token: Time to generate a token.
        max_context_tokens: A conversation ends before a turn whose prompt and answer would exceed
            this length.  The first turn is always sent.
    """
    arrivals_rng, sessions_rng = draws.generator(seed).spawn(2)
    space = PromptSpace(block_size)
    popularity = draws.Zipf(num_system_prompts, zipf_exponent)
    tokens = partial(draws.log_normal_tokens, sigma=length_sigma)
    system_prompts = [
        space.extended(space.empty, tokens(sessions_rng, system_tokens))
        for _ in range(num_system_prompts)
    ]

    def conversation(arrival_ms: float) -> options.Requests:
        # Each conversation has its own generator, so turns do not depend on other conversations.
        (rng,) = sessions_rng.spawn(1)
        prompt = system_prompts[popularity.draw(rng)]
        now = arrival_ms
        for turn in count():
            prompt = space.extended(prompt, tokens(rng, message_tokens))
            output_length = tokens(rng, output_tokens)
            if turn and prompt.num_tokens + output_length > max_context_tokens:
                return
            yield round(now), prompt, output_length
            if rng.random() < 1 / mean_turns:
                return
            prompt = space.extended(prompt, output_length)
            now += output_length * ms_per_output_token
            now += 1000 * draws.log_normal(rng, think_seconds, think_sigma)

    return draws.interleaved(draws.poisson_arrivals_ms(arrivals_rng, session_rate), conversation)
