"""Coding agents: long contexts that grow with every tool call, in many short steps."""

from collections.abc import Generator
from functools import partial

from cache.traces.workloads import draws, options
from cache.traces.workloads.prompts import Prompt, PromptSpace


@options.workload
def agent_loops(
    *,
    num_requests: options.Count = 2000,
    block_size: options.Count = 64,
    seed: options.Seed = 0,
    session_rate: options.Positive = 0.05,
    num_agents: options.Count = 4,
    zipf_exponent: options.NonNegative = 1.0,
    system_tokens: options.Positive = 3000.0,
    task_tokens: options.Positive = 2000.0,
    mean_steps: options.AtLeastOne = 25.0,
    output_tokens: options.Positive = 80.0,
    tool_result_tokens: options.Positive = 150.0,
    length_sigma: options.NonNegative = 0.8,
    tool_seconds: options.Positive = 2.0,
    pause_probability: options.Probability = 0.05,
    pause_seconds: options.Positive = 120.0,
    time_sigma: options.NonNegative = 1.2,
    ms_per_output_token: options.NonNegative = 20.0,
    subagent_probability: options.Probability = 0.04,
    mean_subagent_steps: options.AtLeastOne = 8.0,
    max_context_tokens: options.Count = 16384,
    summary_tokens: options.Positive = 500.0,
) -> options.Requests:
    """Tool-calling agents: each step appends the model's call and the tool's result.

    Nearly all tokens of a prompt were in the previous prompt, seconds ago.  While the agent waits
    for a person or a sub-agent, its whole context is idle.  After compaction the old context is
    never used again.

    Args:
        session_rate: Rate of Poisson arrivals of agent sessions, per second.
        num_agents: Number of kinds of agents.  Each kind has a system prompt (instructions and
            tools).  ``zipf_exponent`` is the skew of their popularity.
        system_tokens: Median length of a system prompt.  Its length is the same in all sessions.
        task_tokens: Median length of a task, including its files.
        mean_steps: Mean number of steps of a session (geometric).
        output_tokens: Median length of the model's output in a step.
        tool_result_tokens: Median length of a tool's result.
        length_sigma: Standard deviation of the logarithm of every length (log-normal).
        tool_seconds: Median run time of a tool.  With ``pause_probability`` a step waits for a
            person instead, median ``pause_seconds``.  Both are log-normal with ``time_sigma``.
        ms_per_output_token: Time to generate a token.
        subagent_probability: Share of the steps that start a sub-agent with the same system prompt,
            but its own task and context.  It takes ``mean_subagent_steps`` steps (geometric).  The
            agent waits for it.  Its last output is the tool result.  Sub-agents start no others.
        max_context_tokens: A context that would exceed this length is compacted: a summary of
            median length ``summary_tokens`` replaces all but the system prompt and the task.
    """
    arrivals_rng, sessions_rng = draws.generator(seed).spawn(2)
    space = PromptSpace(block_size)
    popularity = draws.Zipf(num_agents, zipf_exponent)
    tokens = partial(draws.log_normal_tokens, sigma=length_sigma)
    system_prompts = [
        space.extended(space.empty, tokens(sessions_rng, system_tokens)) for _ in range(num_agents)
    ]

    def session(arrival_ms: int) -> options.Requests:
        # Each session has its own generator, so its steps do not depend on other sessions.
        (rng,) = sessions_rng.spawn(1)
        system_prompt = system_prompts[popularity.draw(rng)]
        yield from agent(rng, arrival_ms, system_prompt, mean_steps, subagent_probability)

    def agent(
        rng: draws.Rng, now: float, system: Prompt, mean_steps: float, spawns: float
    ) -> Generator[tuple[int, Prompt, int], None, tuple[float, int]]:
        """Yield the requests of one agent.  Returns its end time and the length of its answer."""
        prompt = task = space.extended(system, tokens(rng, task_tokens))
        while True:
            output_length = tokens(rng, output_tokens)
            if prompt.num_tokens + output_length > max_context_tokens and prompt is not task:
                prompt = space.extended(task, tokens(rng, summary_tokens))
            yield round(now), prompt, output_length
            now += output_length * ms_per_output_token
            if rng.random() < 1 / mean_steps:
                return now, output_length
            prompt = space.extended(prompt, output_length)
            if rng.random() < spawns:
                now, result_length = yield from agent(rng, now, system, mean_subagent_steps, 0)
                prompt = space.extended(prompt, result_length)
                continue
            prompt = space.extended(prompt, tokens(rng, tool_result_tokens))
            waits = pause_seconds if rng.random() < pause_probability else tool_seconds
            now += 1000 * draws.log_normal(rng, waits, time_sigma)

    return draws.interleaved(draws.poisson_arrivals_ms(arrivals_rng, session_rate), session)
