"""Three panels from the event log of a manager: usage, lifetimes and reuse distances of blocks.

    .venv/bin/python -m docs.examples.block_lives
    .venv/bin/python -m docs.examples.block_lives --trace trace.jsonl.zst --manager radix

A modelled engine serves a trace, synthetic without ``--trace``, through the manager.  Every manager
with prefix caching takes ``event_log=`` and logs an ``Event`` for each change of a block;
``EventLog`` defines the terms.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cache
from experiments import style


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw usage, lifetimes and reuse of cache blocks.")
    parser.add_argument("--trace", type=Path, help="a request trace with block ids")
    parser.add_argument("--manager", default="vllm_v1", help="a manager with prefix caching")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--num-blocks", type=int, default=4_000, help="blocks of the cache")
    parser.add_argument(
        "--requests", type=int, default=1_000, help="requests of the synthetic trace"
    )
    parser.add_argument("--out", type=Path, default=Path("results/quick/block_lives.png"))
    args = parser.parse_args()

    if args.trace is None:
        trace = cache.make_workload("multi_turn_chat", seed=0, num_requests=args.requests)
    else:
        trace = cache.load_trace(args.trace)
    # The clock counts allocated requests.
    log = cache.EventLog(clock=lambda: manager.stats.num_allocations)
    manager = cache.make_manager(
        args.manager,
        num_blocks=args.num_blocks,
        block_size=trace.block_size,
        policy=args.policy,
        event_log=log,
    )
    cache.simulate_serving(trace, manager=manager)
    stats = manager.stats
    print(
        f"{args.manager}, {args.policy}: {stats.token_hit_rate:.1%} of the tokens and "
        f"{stats.block_hit_rate:.1%} of the blocks hit, {stats.evicted_blocks:,} evictions"
    )
    with style.figures():
        figure = draw(log, args.num_blocks)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out)
    print(f"wrote {args.out}")


def draw(log: cache.EventLog, num_blocks: int):
    """Blocks in use over time, and the distributions of lifetimes and reuse distances."""
    figure, (usage, lifetimes, distances), _ = style.panel_grid(3, height=2.0)

    times, in_use = zip(*log.usage(), strict=True)
    usage.step(times, in_use, where="post", color=style.BLUE, linewidth=0.8)
    usage.axhline(num_blocks, color=style.GREY, linestyle="dashed", label="blocks of the cache")
    usage.set(xlabel="time (requests)", ylabel="blocks in use", ylim=(0, None))

    for axis, values, event, what in (
        (lifetimes, log.lifetimes(), "evictions", "from cached to evicted (requests)"),
        (distances, log.reuse_distances(), "hits", "reuse distance (different blocks)"),
    ):
        if values:
            axis.ecdf(values, color=style.BLUE)
        else:
            axis.text(0.5, 0.5, f"no {event}", ha="center", transform=axis.transAxes)
            axis.set(xticks=(), yticks=())
        axis.set(xlabel=what, ylabel="share of blocks" if axis is lifetimes else "share of hits")
    if distances.lines:
        distances.axvline(num_blocks, color=style.GREY, linestyle="dashed")
    style.shared_legend(figure)
    return figure


if __name__ == "__main__":
    main()
