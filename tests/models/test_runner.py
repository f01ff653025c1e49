import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.serving.scheduler import Step
from kernels.testing.accuracy import bits
from models.memory import available_host_bytes
from models.runner import independent, make_kv_cache


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_independent_batches_do_what_the_pairs_do_in_order(pairs):
    expected = list(range(7))
    for src, dst in pairs:
        expected[dst] = expected[src]
    actual = list(range(7))
    for batch in independent(pairs):
        before = actual.copy()
        destinations = [dst for _, dst in batch]
        assert len(set(destinations)) == len(destinations)
        for src, dst in reversed(batch):  # any order would do
            assert src == dst or src not in destinations
            actual[dst] = before[src]
    assert actual == expected


def test_independent_copies_stay_together():
    assert list(independent([(0, 1), (0, 2), (3, 4)])) == [[(0, 1), (0, 2), (3, 4)]]
    assert list(independent([(0, 1), (1, 2)])) == [[(0, 1)], [(1, 2)]]
    assert list(independent([])) == []


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_swapped_blocks_come_back_bit_by_bit(backend, make_llm):
    sizes = {"block_size": 3, "num_blocks": 20, "num_host_blocks": 5}
    llm = make_llm("qwen3", attention_backend=backend, preemption="swap", **sizes)
    runner, manager = llm.engine.runner, llm.manager
    generator = torch.Generator().manual_seed(0)
    runner.kv_cache.copy_(torch.randn(runner.kv_cache.shape, generator=generator))
    before = runner.kv_cache.clone()
    logits = runner.run(Step(swap_out=[(3, 0), (17, 4), (5, 2)]), manager)
    assert logits.shape == (0, 97)  # no sequence computes a token
    assert torch.equal(runner.kv_cache, before)
    assert torch.equal(runner.host_cache[:, :, [0, 4, 2]], before[:, :, [3, 17, 5]])
    runner.kv_cache[:, :, [3, 17, 5]] = torch.nan
    # Out, then copies, then in: block 1's old content goes to block 9, block 5's to block 1.
    step = Step(swap_out=[(2, 1)], copies=[(1, 9), (9, 2)], swap_in=[(0, 3), (4, 17), (2, 1)])
    runner.run(step, manager)
    expected = before.clone()
    expected[:, :, 9] = expected[:, :, 2] = before[:, :, 1]
    expected[:, :, 1] = before[:, :, 5]
    expected[:, :, 5] = torch.nan
    assert torch.equal(bits(runner.kv_cache), bits(expected))
    assert torch.equal(runner.host_cache[:, :, 1], before[:, :, 2])


def test_a_cache_on_a_cpu_takes_memory_as_it_is_used(load_model):
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    model, before = load_model("llama"), resident_bytes()
    for dtype in (torch.float32, torch.float8_e4m3fn):
        cache = make_kv_cache(model, 2**20, 4, dtype)
        assert (cache.dtype, cache.nbytes) == (dtype, 2**20 * 4 * 2 * 2 * 2 * 16 * dtype.itemsize)
        assert not cache[:, :, 77].float().any()
        assert resident_bytes() - before < 2**27


def test_memory_that_is_available(tmp_path, monkeypatch):
    """No more than a container leaves, whose page cache can be given up."""
    monkeypatch.setattr("models.memory._CGROUP", tmp_path)
    whole = available_host_bytes()
    assert 0 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, available in (("2500\n", 1800), ("600\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert available_host_bytes() == available
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes() > 2500
