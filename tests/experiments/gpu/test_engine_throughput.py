"""The experiment engine_throughput: the load that it serves. test_on_fake_gpu.py runs it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.gpu import engine_throughput
from experiments.gpu.engine_throughput import EngineThroughput
from experiments.harness import Unavailable


def test_the_load_is_the_one_that_nano_vllm_publishes():
    prompts, outputs = engine_throughput.requests(256, (100, 1024), seed=0, vocab_size=151_936)
    assert sum(outputs) == 133_966
    assert {len(prompt) for prompt in prompts} <= set(range(100, 1025))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_cuda_graphs_need_a_gpu():
    with pytest.raises(Unavailable, match="CUDA graphs need a CUDA device"):
        engine_throughput.run_cell(EngineThroughput(engine="triton, CUDA graphs"))


def test_the_figure_shows_both_turns_of_each_engine(drawn):
    table = pd.DataFrame(
        {
            "engine": engine, "turn": turn, "seconds": 1.0, "output_tokens_per_s": 1000.0 + i,
            "model": "qwen3-0.6b", "requests": 256,
        }
        for i, engine in enumerate(EngineThroughput().engine)
        for turn in ("nothing cached", "prompts cached")
    )  # fmt: skip
    engine_throughput.EXPERIMENT.plot(table, Path())
    (axis,) = drawn["engine_throughput"].axes
    assert [len(bars) for bars in axis.containers] == [5, 5]
    assert engine_throughput.EXPERIMENT.plot(table.assign(seconds=float("nan")), Path()) == []
