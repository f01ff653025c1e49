"""The examples, run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import cache
from cache.policies import make_policy

REPOSITORY = Path(__file__).parents[2]
MY_POLICY = REPOSITORY / "docs" / "examples" / "my_policy.py"


def run(*arguments: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRACES_DIR"}
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def cached_tokens(printed: str) -> list[tuple[int, int]]:
    """Cached and all tokens of the prompt of every request."""
    found = re.findall(r"(\d+) of (\d+) prompt tokens cached", printed)
    return [(int(cached), int(of)) for cached, of in found]


@pytest.mark.slow
def test_generate_with_random_weights():
    printed = run("-m", "docs.examples.generate", "--max-tokens", 4)
    assert cached_tokens(printed) == [(0, 601)] + 5 * [(592, 601)]
    [tokens] = re.findall(r"Token by token:((?: \d+)+)\n", printed)
    assert len(tokens.split()) == 4


@pytest.mark.slow
def test_generate_with_a_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ("--model", tmp_path, "--manager", "radix", "--max-tokens", 3)
    printed = run("-m", "docs.examples.generate", *options)
    # To this tokenizer all words are the same, so one prompt is the beginning of another.
    (first, length), *others = cached_tokens(printed)
    assert first == 0
    assert len(others) == 5
    assert {cached for cached, _ in others} == {(length - 1) // 16 * 16}
    assert len(re.findall(r"\n    '.*w\d+.*'", printed)) == 3 + 3 * 3


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


@pytest.mark.slow
def test_my_policies_between_lru_and_the_optimum(tmp_path):
    names = ("lru", "belady", "docs/examples/my_policy.py:TailFirst",
             "docs/examples/my_policy.py:Clock")  # fmt: skip
    policies = [word for name in names for word in ("--policy", name)]
    trace = tmp_path / "chat.jsonl"
    cache.save_trace(cache.make_workload("multi_turn_chat", num_requests=150), trace)
    grid = ("--trace", trace, "--capacity-percent", 5, "--jobs", 1, "--out", tmp_path)
    run("-m", "experiments", "run", "eviction", *policies, *grid)
    rows = pd.read_csv(tmp_path / "eviction" / "cpu" / "rows.csv")
    rates = rows.set_index("policy")["block_hit_rate"]
    for policy in ("my_policy.py:TailFirst", "my_policy.py:Clock"):
        assert 0 < rates[policy] < rates["belady"]
        assert rates[policy] != rates["lru"]
