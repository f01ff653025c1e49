"""The experiment engine_throughput: the load it serves, and the engine at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.gpu import engine_throughput
from experiments.gpu.engine_throughput import EngineThroughput
from experiments.harness import Unavailable, grid

TINY = EngineThroughput(model="tiny", num_requests=3, lengths=(17, 20), max_model_len=64)


def test_the_load_is_the_one_that_nano_vllm_publishes():
    prompts, outputs = engine_throughput.requests(256, (100, 1024), seed=0, vocab_size=151_936)
    assert sum(outputs) == 133_966
    assert {len(prompt) for prompt in prompts} <= set(range(100, 1025))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_engines_serve_the_load_twice_and_the_second_time_from_the_cache(monkeypatch):
    # Not in the interpreter, which tests/models have already: it takes a second per step.
    on_cpu = {"attention_backend": "torch", "cuda_graphs": False, "block_size": 16}
    monkeypatch.setitem(engine_throughput._ENGINES, "triton, eager", on_cpu)
    rows = []
    for cell in grid(TINY):
        if "graphs" in cell.engine:
            with pytest.raises(Unavailable, match="CUDA graphs need a CUDA device"):
                engine_throughput.run_cell(cell)
        else:
            rows += engine_throughput.run_cell(cell)
    first, again = rows
    assert first["cached_tokens"] == 0
    assert again["cached_tokens"] == 3 * 16  # one full block of each prompt
    prompts, outputs = engine_throughput.requests(3, (17, 20), seed=0, vocab_size=512)
    for row in rows:
        assert row["output_tokens"] == sum(outputs)
        assert row["prompt_tokens"] == sum(map(len, prompts))
        assert row["seconds"] is None
        assert row["output_tokens_per_s"] is None


def test_the_figure_shows_both_turns_of_each_engine(drawn):
    table = pd.DataFrame(
        {
            "engine": engine, "turn": turn, "seconds": 1.0, "output_tokens_per_s": 1000.0 + i,
            "model": "qwen3-0.6b", "requests": 256,
        }
        for i, engine in enumerate(EngineThroughput().engine)
        for turn in ("nothing cached", "prompts cached")
    )  # fmt: skip
    engine_throughput.plot(table, Path())
    (axis,) = drawn["engine_throughput"].axes
    assert [len(bars) for bars in axis.containers] == [4, 4]
    assert engine_throughput.plot(table.assign(seconds=float("nan")), Path()) == []
