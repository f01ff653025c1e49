"""Prompts that share a prefix: cached tokens and times of each request.

    .venv/bin/python -m docs.examples.generate
    .venv/bin/python -m docs.examples.generate --model path/to/Qwen3-0.6B --manager radix

Without a checkpoint a small model gets random weights: only its times mean anything.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from models import LLM, ModelConfig, RequestOutput, SamplingParams

SMALL = ModelConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=32,
)
INSTRUCTIONS = "You answer questions about geography, in one short sentence and without guessing. "
QUESTIONS = ("What is the capital of France?", "Which river runs through Cairo?", "Where is Oslo?")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate from prompts that share a prefix.")
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--manager", default="vllm_v1", help="a key of cache.MANAGERS")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()

    if args.model is None:
        llm = LLM(SMALL, manager=args.manager)
        shared = list(range(600))
        prompts = [[*shared, 700 + question] for question in range(3)]
    else:
        llm = LLM(args.model, manager=args.manager)
        prompts = [40 * INSTRUCTIONS + question for question in QUESTIONS]
    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens)

    print("The first prompt fills the cache, the others hit the prefix they share with it:")
    for prompt in prompts:
        [output] = llm.generate(prompt, greedy)
        report(output)

    print("All at once, three samples each, which share the blocks of their prompt:")
    samples = SamplingParams(n=3, temperature=0.8, top_p=0.95, seed=1, max_tokens=args.max_tokens)
    for output in llm.generate(prompts, samples):
        report(output)

    print("Token by token:", end="")
    for event in llm.stream(prompts[0], greedy):
        if not isinstance(event, RequestOutput):
            text = llm.tokenizer.decode([event.token_id]) if llm.tokenizer else event.token_id
            print(f" {text}", end="", flush=True)
    print(f"\n{llm.manager.stats.token_hit_rate:.0%} of all prompt tokens came from the cache")


def report(output: RequestOutput) -> None:
    stats = output.stats
    line = (
        f"  request {output.request_id}: {stats.num_cached_tokens:4} of "
        f"{len(output.prompt_token_ids)} prompt tokens cached, "
        f"first token after {1e3 * stats.time_to_first_token:6.1f} ms"
    )
    if stats.time_per_output_token is not None:
        line += f", then {1e3 * stats.time_per_output_token:5.2f} ms each"
    print(line)
    for completion in output.outputs:
        if completion.text is not None:
            print(f"    {completion.text!r}")


if __name__ == "__main__":
    main()
