"""Serve a prompt twice with a small random model.  The second time, its prefix is cached.

python docs/examples/serve.py
"""

import time

from models import LLM, ModelConfig, SamplingParams

CONFIG = ModelConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=2,
    num_q_heads=4, num_kv_heads=2, head_dim=32, max_position_embeddings=1024,
)  # fmt: skip


def main() -> None:
    llm = LLM(CONFIG, device="cpu", num_blocks=128, policy="lru")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)  # warm-up
    for attempt in ("first", "second"):
        begin = time.perf_counter()
        [output] = llm.generate([list(range(900))], params)
        ms = 1000 * (time.perf_counter() - begin)
        rate = output.stats.num_cached_tokens / 900
        print(f"{attempt}: {ms:.0f} ms, hit rate {rate:.2f}, tokens {output.outputs[0].token_ids}")


if __name__ == "__main__":
    main()
