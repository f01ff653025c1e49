"""The engine gives the tokens of transformers on a GPU, and on a CPU with interpreted kernels."""

import pytest

from models import SamplingParams
from tests.models.tiny import tokens_of

MAX_TOKENS = 6
SHARED = [(i * 37 + 11) % 97 for i in range(14)]
PROMPTS = [SHARED, [*SHARED[:9], 1, 2, 3], [5], SHARED]
SCARCE = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
NUM_BLOCKS = {"qwen3": 8, "gemma2": 8, "gemma3": 22}
"""Prompts are computed in chunks, and the cache is too small for all requests at a time.  gemma3
has a block table for each of its four groups of layers."""
RECOMPUTE, SWAP = {"preemption": "recompute"}, {"preemption": "swap"}
TIER = {"manager_options": {"host_blocks": 30}}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize(
    ("manager", "preempting", "checkpoint"),
    [
        ("vllm_v1", SWAP, "qwen3"),
        ("radix", RECOMPUTE, "gemma2"),
        ("vllm_v1", RECOMPUTE, "gemma3"),
        ("vllm_v1", TIER, "gemma3"),
    ],
)
def test_tokens_are_those_of_transformers(
    manager, preempting, checkpoint, variant, overlap, device, make_llm, expected
):
    """Without and with CUDA graphs on a GPU; with the backends "torch" and "triton" on a CPU."""
    is_second = not overlap or (checkpoint, preempting) == ("gemma3", RECOMPUTE)
    if device.type == "cpu" and variant and is_second:
        pytest.skip("interpreted kernels serve each checkpoint once")
    options = SCARCE | preempting | {"manager": manager, "overlap": overlap}
    options["num_blocks"] = NUM_BLOCKS[checkpoint]
    if device.type == "cuda":
        options["cuda_graphs"] = bool(variant)
    else:
        options["attention_backend"] = ("torch", "triton")[variant]
    llm = make_llm(checkpoint, device=device, dtype="float32", **options)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    assert tokens_of(outputs) == expected(checkpoint)
    stats = [output.stats for output in outputs]
    assert any(one.num_preemptions for one in stats)
    assert any(one.num_cached_tokens for one in stats)
    assert any(one.num_swapped_tokens for one in stats) == (preempting == SWAP)
    assert (llm.manager.stats.loaded_blocks > 0) == (preempting == TIER)
