"""The examples, run as their first lines say."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import cache
from cache.policies import make_policy
from models import LLM
from models.weights import checkpoint_tensors

REPOSITORY = Path(__file__).parents[2]
MY_POLICY = REPOSITORY / "docs" / "examples" / "my_policy.py"


def run(*arguments: object) -> str:
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
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


def test_generate_with_a_checkpoint(tmp_path, capsys, monkeypatch):
    fields = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64,
        "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = LLM(tmp_path, random_weights=True).model
    tensors = {name: tensor.target.clone() for name, tensor in checkpoint_tensors(model).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    options = ["--model", str(tmp_path), "--manager", "radix", "--max-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["generate", *options])
    runpy.run_module("docs.examples.generate", run_name="__main__")
    printed = capsys.readouterr().out
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
