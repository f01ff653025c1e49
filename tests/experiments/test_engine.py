"""The engine on the device: the CPU, and the stand-in for a GPU."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest

from experiments import engine, style
from experiments.engine import OnDevice
from experiments.harness.environment import committed
from experiments.load import engine_models
from models import ModelConfig

SMALL = {"model": "tiny", "threads": 1, "bench_requests": 2, "num_requests": 5, "scale": 8}
OPTIONS = OnDevice(**SMALL, trace=(Path("multi_turn_chat"),), longest=300, output_tokens=3)


def test_a_run_without_a_model_hits_the_same_and_every_cache_gives_the_same_tokens(tiny_run):
    rows = tiny_run("engine").rows.set_index("part")
    assert rows.loc[rows.index != "transformers", "passed"].all()
    on_trace = rows[rows["trace"].notna()]
    assert on_trace[["tokens_checksum", "manager"]].nunique().tolist() == [1, 6]
    assert on_trace["hit_rate"].nunique() > 5
    assert on_trace["preemptions"].any()
    assert rows.loc["transformers", "same_tokens"].all()


def test_scaling_keeps_what_requests_share():
    cell = replace(OPTIONS, num_requests=30, trace=next(OPTIONS.sources()))
    shared = []
    for scale in (1, 4):
        prompts, *_, block_size = engine._requests(replace(cell, scale=scale))
        firsts = [tuple(prompt[:block_size]) for prompt in prompts]
        shared.append([firsts.index(first) for first in firsts])
    assert shared[0] == shared[1] != [*range(30)]


def test_the_same_cells_run_on_a_gpu_with_graphs(fake_gpu, monkeypatch):
    config = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
    config |= {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "initializer_range": 0.4}
    monkeypatch.setattr(engine_models, "model_config", lambda name: ModelConfig(**config))
    served = Mock(wraps=engine._serve)
    monkeypatch.setattr(engine, "_serve", served)
    options = {"part": ("throughput", "policy"), "policy": ("lru",), "pool_percent": (50.0,)}
    bench, _, _, _, nano_vllm, policy = engine.cells(replace(OPTIONS, **options))
    with pytest.raises(engine_models.Unavailable, match="No module named 'nanovllm'"):
        engine.run_cell(nano_vllm)
    for cell in (replace(bench, scale=128), policy):
        replays = fake_gpu.replays
        [row] = engine.run_cell(cell)
        assert all((row["passed"], row["graphs"], row["overlap"], fake_gpu.replays > replays))
    assert served.call_count == 7, "the policy's requests once more, before they are timed"


def test_the_benchmark_has_the_lengths_of_nano_vllms():
    prompts, outputs = engine.nano_vllm_requests()
    assert (len(prompts), sum(outputs), max(map(max, prompts))) == (256, 133_966, 10_000)


def test_bars_have_the_names_of_policies_or_variants():
    rows = pd.read_csv(committed("engine") / "rows.csv")
    with style.figures():
        axes = engine._draw(rows).axes
        names = [[x.get_text() for x in axis.get_yticklabels()] for axis in axes]
    parts = rows.groupby(["part", "trace", "pool_percent"], sort=False, dropna=False)
    wanted = [[*some["policy" if part == "policy" else "variant"]] for (part, *_), some in parts]
    assert names[: len(wanted)] == wanted
