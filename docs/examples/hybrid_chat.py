"""A chat of 8,000 tokens with Gemma 3 270M, and the memory that groups of layers save in it.

make model MODEL=gemma3 && python docs/examples/hybrid_chat.py
"""

from pathlib import Path

from models import LLM, SamplingParams
from models.hub import gemma3_model

PAGES = (Path(__file__).parents[1] / name for name in ("tutorial.md", "experiments.md"))
TEXT = "".join(page.read_text() for page in PAGES)
TURNS, PARAMS = 4, SamplingParams(temperature=0, max_tokens=48)


def main(num_characters: int = 25_000) -> None:
    """Ask about a text of which each turn shows the next part."""
    llm = LLM(gemma3_model(), block_size=16, num_blocks=6000, max_num_batched_tokens=1024)
    chat, part = "", num_characters // TURNS
    for turn in range(TURNS):
        content = TEXT[turn * part : (turn + 1) * part] + "\n\nWhat is this text about?"
        chat += f"<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n"
        prompt = llm.encode(chat)
        for event in llm.stream(prompt, PARAMS):  # noqa: B007
            if llm.manager.num_free_blocks < llm.manager.num_blocks:
                memory, blocks = llm.memory_usage(), llm.manager.num_used_blocks()
        answer, cached = event.outputs[0].text, event.stats.num_cached_tokens
        chat += f"{answer}<end_of_turn>\n"
        print(f"{len(prompt):,} tokens, {cached:,} of them cached: {answer!r}")
    print(memory)
    print(f"one table for all layers: {blocks[0] * len(blocks) / sum(blocks):.1f} times the blocks")


if __name__ == "__main__":
    main()
