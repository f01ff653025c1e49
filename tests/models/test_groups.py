"""Models that mix full attention with windows: a block table for each group of layers."""

import functools

import pytest

from cache import MANAGERS, Group
from models import LLM, SamplingParams
from tests.models.tiny import tiny_config, tokens_of

MAX_TOKENS = 18
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SHARED = [(i * i + 3 * i) % 97 for i in range(70)]
PROMPTS = [SHARED, [*SHARED[:50], 1, 2, 3], [5], [(i * 5) % 97 for i in range(33)], SHARED[:64]]


@pytest.mark.parametrize(
    ("checkpoint", "block_size", "chunk", "num_blocks", "caching", "retention", "overlap"),
    [
        ("gemma3", 4, 9, 70, True, None, False),
        ("gemma3", 4, 16, 64, True, 0, True),
        ("gemma3", 1, 8, 260, True, 16, False),
        ("gemma3", 16, 128, 36, True, 32, True),
        ("gemma3", 16, 16, 24, False, None, True),
        ("gemma2", 7, 64, 30, True, 0, False),
        ("qwen2", 4, 16, 50, True, None, True),
    ],
)  # fmt: skip
def test_tokens_are_those_of_transformers(
    checkpoint, block_size, chunk, num_blocks, caching, retention, overlap, make_llm, expected
):
    """With chunks, hits, eviction and preemption: the cache is too small for all prompts."""
    options = {"block_size": block_size, "num_blocks": num_blocks, "max_num_batched_tokens": chunk}
    options |= {"enable_prefix_caching": caching, "overlap": overlap, "max_model_len": 104}
    options["manager"] = type("Own", (MANAGERS["vllm_v1"],), {}) if overlap else "vllm_v1"
    llm = make_llm(checkpoint, manager_options={"retention": retention}, **options)
    windows = [group.window for group in llm.manager.groups]
    assert windows == [None, 11, 11, 11][: llm.config.num_layers]
    preemptions = 0
    for prompts in (PROMPTS, PROMPTS, PROMPTS[:1], PROMPTS[:1]):
        outputs = llm.generate(prompts, GREEDY)
        assert tokens_of(outputs) == expected(checkpoint)[: len(prompts)]
        preemptions += sum(output.stats.num_preemptions for output in outputs)
        llm.manager.check_invariants()
    assert preemptions > 0
    assert (llm.manager.stats.hit_tokens > 0) == caching
    assert llm.manager.num_free_blocks == num_blocks


def test_only_the_full_layers_keep_the_whole_context(make_llm):
    """Layers with a window of 11 tokens hold 4 blocks of 4 tokens at most, of 25."""
    prompt, params = SHARED + SHARED[:20], SamplingParams(temperature=0, max_tokens=9)
    llm = make_llm("gemma3", block_size=4, num_blocks=100, max_num_batched_tokens=8)
    held = [llm.manager.num_used_blocks() for _ in llm.stream(prompt, params)]
    assert [blocks for blocks in held if any(blocks)][-1] == [25, 4, 4, 4]
    assert max(max(blocks[1:]) for blocks in held) == 4
    llm.engine.add(prompt, params)
    llm.engine.step()  # the first 22 blocks are cached
    report = llm.memory_usage().splitlines()
    assert [line.split()[:4] for line in report[1:5]] == [
        ["0", "1", "all", "23"], *[[str(group), "1", "11", "4"] for group in (1, 2, 3)]
    ]  # fmt: skip
    assert report[5].startswith("retention: None; the cache has 100 blocks of 4 tokens, 0.1 MiB")


def test_the_longest_sequence_counts_the_blocks_of_each_group(make_llm):
    """Three windows need ceil((10 + 8) / 4) + 1 blocks each, all layers together 4 of each."""
    options = {"block_size": 4, "max_num_batched_tokens": 8}
    llm = make_llm("gemma3", num_blocks=40, **options)
    assert llm.max_model_len == 4 * (40 - 3 * 6)
    prompt = [(i * 7) % 97 for i in range(llm.max_model_len - 1)]
    assert len(llm.generate(prompt, SamplingParams(max_tokens=1))[0].outputs[0].token_ids) == 1
    swapping = make_llm("gemma3", num_blocks=10, preemption="swap", **options)
    assert swapping.max_model_len == 40
    assert swapping.engine.runner.kv_cache[0].numel() == llm.engine.runner.kv_cache[0].numel()


def test_graphs_and_profiling_use_the_tables_of_each_group(fake_gpu):
    config = tiny_config(num_layers=4, windows=(7, None, 7, 7), initializer_range=0.4)
    options = {"dtype": "float32", "block_size": 4, "max_num_seqs": 2, "max_model_len": 32}
    llm = LLM(config, max_num_batched_tokens=16, **options)
    params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
    replays = fake_gpu.replays
    tokens = tokens_of(llm.generate([[5], SHARED[:14]], params))
    assert fake_gpu.replays - replays >= 6
    cpu = LLM(config, device="cpu", attention_backend="torch", num_blocks=99, **options)
    assert tokens == tokens_of(cpu.generate([[5], SHARED[:14]], params))


def test_groups_of_a_config():
    window = functools.partial(Group, "window")
    config = tiny_config(num_layers=4, windows=(7, None, 7, 7))
    assert config.groups == (Group(layers=(1,)), window(7, (0,)), window(7, (2,)), window(7, (3,)))
    assert tiny_config(num_layers=2).groups == (Group(layers=(0, 1)),)
    assert tiny_config(num_layers=2, windows=(7, 9)).groups == (window(9, (0, 1)),)
