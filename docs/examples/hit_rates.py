"""Hit rates of four eviction policies on a trace, in a pool of 5 % of the trace's unique blocks.

python docs/examples/hit_rates.py [TRACE.jsonl.zst]
"""

import sys
from pathlib import Path

import cache

ROOT = Path(__file__).parents[2]


def main(path: str | Path) -> None:
    trace = cache.load_trace(path)
    capacity = trace.num_unique_blocks // 20
    print(f"{trace.name}: {trace.num_requests} requests, a pool of {capacity} blocks")
    print("| policy | block hit rate |\n| --- | --- |")
    for policy in ("lru", "arc", "gittins", "belady"):  # belady: the upper bound
        result = cache.simulate(trace, policy=policy, capacity_blocks=capacity)
        print(f"| {policy} | {result.block_hit_rate:.3f} |")


if __name__ == "__main__":
    traces = ROOT / "experiments" / "traces"
    main(sys.argv[1] if len(sys.argv) > 1 else traces / "mooncake_conversation_512.jsonl.zst")
