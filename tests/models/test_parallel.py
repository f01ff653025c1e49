"""Tensor parallelism over gloo: two processes on one CPU."""

import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cache import SessionHint
from models import LLM, SamplingParams
from models.parallel import TensorParallel, join_tensor_parallel
from models.workers import has_workers, start_workers

CPU = torch.device("cpu")
PROMPTS = [[(i * 37 + 11) % 97 for i in range(19)], [5], [(i * 5) % 97 for i in range(11)]]
KV_DTYPES = {"llama_biased": None, "qwen3": None, "llama": "fp8_e4m3"}
"""By checkpoint.  qwen3 has one KV head, which both ranks hold; of two each rank has one."""


@pytest.fixture(autouse=True)
def end_ranks():
    """Ends the other ranks when called, and after a minute.  A rank that waits in a collective,
    which no signal interrupts, then raises."""
    others = set(multiprocessing.active_children())

    def end() -> None:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
            child.join()

    timer = threading.Timer(60, end)
    timer.start()
    yield end
    timer.cancel()
    if dist.is_initialized():
        dist.destroy_process_group()


def generate(folder, tensor_parallel_size, **options):
    """Tokens of all completions, and the number of KV heads here."""
    sizes = {"tensor_parallel_size": tensor_parallel_size, "block_size": 4, "num_blocks": 12}
    llm = LLM(folder, **sizes, **options)
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10))
    sampled = llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=4))
    kv_heads = llm.engine.runner.kv_cache.shape[-2]
    return [[out.token_ids for out in output.outputs] for output in (*greedy, *sampled)], kv_heads


def run_rank(folders: list[Path]) -> list:
    """What this rank of torchrun's gets from collectives and from each checkpoint."""
    torch.set_num_threads(1)
    tp = join_tensor_parallel(2, CPU)
    x = torch.arange(3.0) + tp.rank
    got = [tp.all_gather_last(x).tolist(), tp.all_reduce(x).tolist(), tp.min(5 - tp.rank, CPU)]
    for folder, dtype in zip(folders, KV_DTYPES.values(), strict=True):
        got.append(generate(folder, 2, preemption="swap", kv_cache_dtype=dtype))
    return got


def test_two_ranks_of_torchrun_generate_what_one_does(make_checkpoint, monkeypatch):
    """In the environment and with the store that torchrun gives them."""
    folders = [make_checkpoint(name)[0] for name in KV_DTYPES]
    expected = [[0.0, 1.0, 2.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0], 4]
    for folder, (checkpoint, dtype) in zip(folders, KV_DTYPES.items(), strict=True):
        tokens, kv_heads = generate(folder, 1, preemption="swap", kv_cache_dtype=dtype)
        assert kv_heads == (1 if checkpoint == "qwen3" else 2)
        expected.append((tokens, 1))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, "WORLD_SIZE": 2, "RANK": 1}
    environment |= {"TORCHELASTIC_RUN_ID": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in (environment | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, str(value))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        result = other.submit(run_rank, folders)
        monkeypatch.setenv("RANK", "0")
        assert run_rank(folders) == result.result() == expected


def test_the_library_starts_the_other_rank_itself(make_checkpoint, end_ranks):
    folder, _ = make_checkpoint("llama")
    alone, _ = generate(folder, 1)
    llm = LLM(folder, tensor_parallel_size=2, block_size=4, num_blocks=12)
    try:
        greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=10, session="a"))
        assert [[output.outputs[0].token_ids] for output in greedy] == alone[:3]
        llm.hint_session(SessionHint("a", ends=True))  # the workers hear it as well
        stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=10))
        next(stream)
        stream.close()  # the workers must abort as well
        beams = llm.generate(PROMPTS[1], SamplingParams(beam_width=2, max_tokens=3))
        assert len(beams[0].outputs[0].token_ids) == 3
        [again] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=10))
        assert [again.outputs[0].token_ids] == alone[0]
        with pytest.raises(ValueError, match="this process leads the ranks of another LLM"):
            LLM(folder, tensor_parallel_size=2, num_blocks=12)
        end_ranks()
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
        start_workers(2, CPU, dict)
    assert not dist.is_initialized()
    assert not has_workers()


def test_alone_nothing_is_exchanged():
    tp = join_tensor_parallel(1, CPU)
    x = torch.ones(2)
    assert tp == TensorParallel()
    assert tp.all_reduce(x) is x
    assert tp.all_gather_last(x) is x
    assert tp.min(3, CPU) == 3
    with pytest.raises(ValueError, match="start them with torchrun --nproc-per-node 3"):
        join_tensor_parallel(3, CPU)


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
