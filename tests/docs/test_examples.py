"""The chat of docs/examples, and its policies by the names that a command line gives them."""

import re
import runpy
from pathlib import Path

import pytest

import cache
from cache.policies import make_policy
from models.hub import gemma3_model

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MY_POLICY = EXAMPLES / "my_policy.py"


def test_a_chat_with_gemma3(capsys):
    try:
        gemma3_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    runpy.run_path(str(EXAMPLES / "hybrid_chat.py"))["main"](num_characters=2_000)
    assert re.search(r"one table for all layers: [1-6]\.\d times", capsys.readouterr().out)


def test_clock_gives_a_second_chance():
    clock = make_policy(f"{MY_POLICY}:Clock")
    clock.start(4)
    for block in range(4):
        clock.insert(block, f"key {block}", None, 0)
        clock.release(block)
    clock.pin(0)  # 0 and 2 are hit, 1 comes to be used once more
    clock.release(0)
    clock.pin(2)
    clock.release(2)
    clock.pin(1)
    assert clock.evict_many(3) == [3, 0, 2]
    with pytest.raises(IndexError):
        clock.evict()
    clock.release(1)
    assert clock.evict() == 1


@pytest.mark.parametrize("policy", ["TailFirst", "Clock"])
def test_my_policies_are_below_the_optimum(policy):
    trace = cache.make_workload("multi_turn_chat", num_requests=150)
    capacity = trace.num_unique_blocks // 20
    rates = {
        name: cache.simulate(trace, policy=name, capacity_blocks=capacity).block_hit_rate
        for name in ("lru", "belady", f"{MY_POLICY}:{policy}")
    }
    lru, optimum, mine = rates.values()
    assert 0 < mine < optimum
    assert mine != lru
