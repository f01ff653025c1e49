"""Host code of the engine on a GPU: CUDA graphs, pinned memory, the profiling run.

On the fake GPU of ``tests/fake_cuda.py``; kernels are interpreted, not compiled or timed.
"""

import pytest
import torch

from models import LLM, SamplingParams
from tests.models.tiny import tiny_config, tokens_of

CONFIG = tiny_config(initializer_range=0.4, tie_word_embeddings=True)
PROMPTS = [[1, 2, 3, 4, 5], [5, 6] * 5]
OPTIONS = {"dtype": "float32", "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16}
SWAP, TIER = {"preemption": "swap"}, {"manager_options": {"host_blocks": 12}}


@pytest.mark.parametrize(
    ("kind", "overlap", "preempting"),
    [
        ({"temperature": 0}, False, {}),
        ({"temperature": 0}, None, SWAP),
        ({"temperature": 0}, None, TIER),
        ({"min_p": 0.02, "temperature": 0.7}, False, SWAP),
        ({"top_k": 20, "top_p": 0.9}, None, {}),
        ({}, None, {}),
    ],
)
def test_graphs_give_the_tokens_of_the_cpu_with_one_wait_a_step(
    kind, overlap, preempting, fake_gpu
):
    options = {"num_blocks": 6, "max_model_len": 24, **OPTIONS, **preempting}
    llm = LLM(CONFIG, overlap=overlap, **options)
    assert llm.device == torch.device("cuda", 0)
    steps, step = [], llm.engine.runner.run
    llm.engine.runner.run = lambda *args: steps.append(1) or step(*args)
    waits, replays = fake_gpu.waits, fake_gpu.replays
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, **kind)
    outputs = llm.generate(PROMPTS, params)
    assert fake_gpu.waits - waits == len(steps), "only for the sampled tokens"
    assert len(steps) > fake_gpu.replays - replays >= 5
    cpu = LLM(CONFIG, device="cpu", attention_backend="torch", **OPTIONS)
    assert tokens_of(outputs) == tokens_of(cpu.generate(PROMPTS, params))
    assert sum(output.stats.num_preemptions for output in outputs) >= 1
    swapped = sum(output.stats.num_swapped_tokens for output in outputs)
    assert (swapped > 0) == (preempting == SWAP)
    if preempting == TIER:
        llm.generate([[7] * 18], params)  # evicts the prompts
        assert tokens_of(llm.generate(PROMPTS, params)) == tokens_of(outputs)
        assert llm.manager.stats.loaded_blocks > 0


def test_padding_of_a_graph_is_not_stored(fake_gpu):
    prompts = [*PROMPTS, [9] * 17, [60], [2, 4], [30, 31]]
    options = {**OPTIONS, "max_num_seqs": 11, "max_num_batched_tokens": 40}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    cpu = LLM(CONFIG, device="cpu", attention_backend="torch", **options)
    expected = tokens_of(cpu.generate(prompts, params))
    llm = LLM(CONFIG, num_blocks=40, max_model_len=32, **options)
    runner = llm.engine.runner
    assert runner._graphs.batch_sizes == [1, 2, 4, 8, 11]
    for batch in (6, 5):  # both in the graph of eight
        runner.kv_cache.fill_(torch.nan)
        llm.reset_prefix_cache()
        assert tokens_of(llm.generate(prompts[:batch], params)) == expected[:batch]
    assert fake_gpu.replays == 6
    written = ~runner.kv_cache[0, 0].cpu().isnan().any(-1).any(-1)
    assert written.sum() == sum(len(prompt) + 3 for prompt in prompts[:5])


def test_a_step_is_launched_before_the_tokens_of_the_last_are_waited_for(fake_gpu):
    llm = LLM(CONFIG, num_blocks=20, max_model_len=32, **OPTIONS)
    engine, waits = llm.engine, []
    run = engine.runner.run

    def counted(*args):
        before = fake_gpu.waits
        logits = run(*args)
        waits.append((before, fake_gpu.waits))
        return logits

    engine.runner.run = counted
    for prompt in PROMPTS:
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    start = fake_gpu.waits
    num_tokens = [len(engine.step()[0]) for _ in range(7)]
    assert not engine.has_unfinished
    assert num_tokens == [0, 2, 2, 2, 2, 2, 2]
    # Step i begins after i - 1 waits: the tokens of the previous step are unread.
    assert waits == [(start + max(0, i - 1),) * 2 for i in range(6)]


def test_the_cache_fills_the_share_of_memory_that_the_largest_batch_leaves(fake_gpu):
    options = {"gpu_memory_utilization": 0.8, "max_model_len": 64, "cuda_graphs": False}
    llm = LLM(CONFIG, **options, **OPTIONS)
    limit = 0.8 * fake_gpu.total_bytes
    assert 0.75 * fake_gpu.total_bytes < fake_gpu.allocated <= limit
    torch.cuda.reset_peak_memory_stats()
    sampled = SamplingParams(top_p=0.9, max_tokens=2)
    llm.generate([[7] * 14, [8, 9]], sampled)
    assert fake_gpu.allocated < fake_gpu.peak <= limit


def test_ranks_without_a_gpu_are_refused_before_any_starts(fake_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: needs a GPU for each .* are 1"):
        LLM(CONFIG, tensor_parallel_size=2, num_blocks=9)
