"""Tensor parallelism over gloo: two processes on one CPU."""

from __future__ import annotations

import faulthandler
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from models import LLM, SamplingParams
from models.parallel import TensorParallel, join_tensor_parallel
from models.workers import has_workers, start_workers

PROMPTS = [[(i * 37 + 11) % 97 for i in range(19)], [5], [(i * 5) % 97 for i in range(11)]]


def run_rank(rank: int, store: Path, seconds: float, target, *arguments):
    """Call target(rank, *arguments) as one of two ranks.

    A collective fails after half of ``seconds``; after all of them the process prints where it is
    and ends.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)
    torch.set_num_threads(1)
    options = {"init_method": f"file://{store}", "timeout": timedelta(seconds=seconds / 2)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **options)
    try:
        result = target(rank, *arguments)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()  # a rank that waits for this one fails at once
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def run_ranks(tmp_path, monkeypatch):
    """run_ranks(target, *arguments, seconds=300) -> the results of two ranks; see run_rank.

    The ranks are not forked from this process: a fork of a process that has run OpenMP threads
    hangs in its first parallel region.  Raises the first exception of a rank, with its traceback,
    and BrokenProcessPool if a rank ends without one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(target, *arguments, seconds: float = 300) -> list:
        with ProcessPoolExecutor(2, context) as ranks:
            started = [
                ranks.submit(run_rank, rank, tmp_path / "store", seconds, target, *arguments)
                for rank in range(2)
            ]
            for rank in as_completed(started):
                rank.result()
            return [rank.result() for rank in started]

    return run


def generate(rank, folder, tensor_parallel_size, options):
    llm = LLM(
        folder, tensor_parallel_size=tensor_parallel_size, block_size=4, num_blocks=12, **options
    )
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10))
    sampled = llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=4))
    kv_heads = llm.engine.runner.kv_cache.shape[-2]
    tokens = [[out.token_ids for out in output.outputs] for output in (*greedy, *sampled)]
    return tokens, kv_heads


@pytest.mark.parametrize(
    ("checkpoint", "kv_cache_dtype"),
    [("llama_biased", None), ("qwen3", None), ("llama", "fp8_e4m3")],
)
def test_two_ranks_generate_what_one_does(checkpoint, kv_cache_dtype, make_checkpoint, run_ranks):
    """llama: a KV head per rank.  qwen3: one KV head, which both ranks hold."""
    folder, _ = make_checkpoint(checkpoint)
    options = {"preemption": "swap", "kv_cache_dtype": kv_cache_dtype}
    alone, all_kv_heads = generate(0, folder, 1, options)
    ranks = run_ranks(generate, folder, 2, options)
    assert [tokens for tokens, _ in ranks] == [alone, alone]
    assert [heads for _, heads in ranks] == [1, 1]
    assert all_kv_heads == (1 if checkpoint == "qwen3" else 2)


def test_the_library_starts_the_other_rank_itself(make_checkpoint):
    folder, _ = make_checkpoint("llama")
    alone, _ = generate(0, folder, 1, {})
    of_others = set(multiprocessing.active_children())
    llm = LLM(folder, tensor_parallel_size=2, block_size=4, num_blocks=12)
    try:
        greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10))
        assert [[output.outputs[0].token_ids] for output in greedy] == alone[:3]
        stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=10))
        next(stream)
        stream.close()  # the workers must abort as well
        beams = llm.generate(PROMPTS[1], SamplingParams(beam_width=2, max_tokens=3))
        assert len(beams[0].outputs[0].token_ids) == 3
        [again] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=10))
        assert [again.outputs[0].token_ids] == alone[0]
        with pytest.raises(ValueError, match="this process leads the ranks of another LLM"):
            LLM(folder, tensor_parallel_size=2, num_blocks=12)
        for child in set(multiprocessing.active_children()) - of_others:
            child.kill()
            child.join()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="tensor-parallel rank 1 has ended"):
                llm.generate(PROMPTS)
        assert not llm.engine.has_unfinished
    finally:
        llm.engine.workers.close()
    assert not dist.is_initialized()


def test_a_rank_that_does_not_start_is_noticed(monkeypatch):
    monkeypatch.setattr("models.workers._work", repr)  # takes no six arguments
    with pytest.raises(RuntimeError, match=r'rank 1 ended as it started.*__name__ == "__main__"'):
        start_workers(2, torch.device("cpu"), dict)
    assert not dist.is_initialized()
    assert not has_workers()


def collect(rank):
    tp = join_tensor_parallel(2, torch.device("cpu"))
    x = torch.arange(3.0) + rank
    gathered = tp.all_gather_last(x).tolist()
    return tp.all_reduce(x).tolist(), gathered, tp.min(5 - rank, torch.device("cpu"))


def test_collectives(run_ranks):
    expected = [1.0, 3.0, 5.0], [0.0, 1.0, 2.0, 1.0, 2.0, 3.0], 4
    assert run_ranks(collect) == [expected, expected]


def test_alone_nothing_is_exchanged():
    tp = join_tensor_parallel(1, torch.device("cpu"))
    x = torch.ones(2)
    assert tp == TensorParallel()
    assert tp.all_reduce(x) is x
    assert tp.all_gather_last(x) is x
    assert tp.min(3, torch.device("cpu")) == 3
    with pytest.raises(ValueError, match="start them with torchrun --nproc-per-node 3"):
        join_tensor_parallel(3, torch.device("cpu"))


def test_shares_of_heads():
    halves = [TensorParallel(rank, 2).share(6, "heads") for rank in range(2)]
    assert halves == [range(0, 3), range(3, 6)]
    repeated = [TensorParallel(rank, 4).share(2, "heads", repeat=True) for rank in range(4)]
    assert repeated == 2 * [range(0, 1)] + 2 * [range(1, 2)]
    with pytest.raises(ValueError, match="tensor_parallel_size=4 does not divide heads=6"):
        TensorParallel(0, 4).share(6, "heads", repeat=True)
    with pytest.raises(ValueError, match="tensor_parallel_size=4 does not divide heads=2"):
        TensorParallel(0, 4).share(2, "heads")  # the ranks' outputs are summed: twice too much
    with pytest.raises(ValueError, match="rank=2, size=2"):
        TensorParallel(2, 2)
