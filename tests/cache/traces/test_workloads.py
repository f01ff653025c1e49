import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.traces.trace import Trace
from cache.traces.workloads import WORKLOADS, make_workload
from cache.traces.workloads.draws import Zipf, generator
from cache.traces.workloads.prompts import PromptSpace

# Small in every length, so that a request has few tokens and texts end inside blocks.
TINY = {
    "shared_system_prompts": {"num_system_prompts": 4, "system_tokens": 30, "message_tokens": 9},
    "multi_turn_chat": {
        "system_tokens": 20, "message_tokens": 7, "output_tokens": 9, "max_context_tokens": 90,
    },
    "agent_loops": {
        "system_tokens": 25, "task_tokens": 12, "output_tokens": 5, "tool_result_tokens": 8,
        "summary_tokens": 6, "mean_steps": 10, "session_rate": 0.5, "subagent_probability": 0.1,
        "max_context_tokens": 100,
    },
    "parallel_sampling": {
        "num_prompts": 9, "num_templates": 3, "template_tokens": 20, "question_tokens": 12,
    },
    "rag": {
        "num_documents": 6, "documents_per_request": 3, "system_tokens": 21, "document_tokens": 10,
        "question_tokens": 4,
    },
}  # fmt: skip
every_workload = pytest.mark.parametrize("name", WORKLOADS)


def tiny(name: str, **options) -> Trace:
    return make_workload(name, **{"num_requests": 150, "block_size": 4, **TINY[name], **options})


@settings(max_examples=100)
@given(
    st.integers(1, 7),
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=5), max_size=8),
)
@example(block_size=4, prompts=[[(0, 2), (1, 2), (1, 4)], [(0, 2), (1, 6)]])
def test_two_prompts_share_a_block_iff_they_agree_up_to_its_end(block_size, prompts):
    space = PromptSpace(block_size)
    texts = [space.new_text() for _ in range(3)]
    prefix_of_id: dict[int, tuple] = {}
    id_of_prefix: dict[tuple, int] = {}
    for parts in prompts:
        prompt, tokens = space.empty, []
        for text, length in parts:
            prompt = space.extended(prompt, length, texts[text])
            tokens += [(text, position) for position in range(length)]
        assert prompt.num_tokens == len(tokens)
        assert len(prompt.block_ids) == len(tokens) // block_size
        for index, block_id in enumerate(prompt.block_ids):
            prefix = tuple(tokens[: (index + 1) * block_size])
            assert prefix_of_id.setdefault(block_id, prefix) == prefix
            assert id_of_prefix.setdefault(prefix, block_id) == block_id


DEFAULT_DIGESTS = {
    "shared_system_prompts": "b87fad6e6c0e26086c8ba4587a355c84",
    "multi_turn_chat": "468c62430e621598d763a209121541cf",
    "agent_loops": "21640efa0492b977140ec7fd7013fd88",
    "parallel_sampling": "a4b11b9ee55ec86e3c6ac39e95e2ffba",
    "rag": "54c7d01c574391803a7972224fa5d1d8",
}


@every_workload
def test_default_traces_are_the_same_everywhere(name):
    # Published figures name a workload and a seed, and resumable sweeps key their cells by the
    # digest, so neither a platform nor a release may change what they stand for.
    trace = make_workload(name)
    assert (trace.name, trace.digest) == (name, DEFAULT_DIGESTS[name])


@every_workload
@pytest.mark.parametrize("num_requests", [1, 2, 77])
def test_a_longer_workload_of_the_same_seed_begins_with_the_shorter_one(name, num_requests):
    shorter = tiny(name, num_requests=num_requests, seed=3)
    assert shorter.num_requests == num_requests
    assert shorter.digest == tiny(name, seed=3)[:num_requests].digest
    assert shorter.digest != tiny(name, num_requests=num_requests, seed=4).digest


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chat", {}, "unknown workload 'chat'; choose from .*multi_turn_chat"),
        ("rag", {"num_dogs": 3}, "unknown option num_dogs .*choose from .*length_sigma"),
        ("rag", {"num_documents": 3}, "documents_per_request must not exceed num_documents"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_workload(name, **options)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("rag", {"seed": 0, "block_size": 1, "zipf_exponent": 0, "documents_per_request": 1}),
        ("multi_turn_chat", {"mean_turns": 1, "ms_per_output_token": 0, "think_sigma": 0}),
        ("agent_loops", {"pause_probability": 1, "subagent_probability": 0, "mean_steps": 1}),
    ],
)
def test_options_may_lie_on_their_bounds(name, least):
    assert len(make_workload(name, num_requests=3, **least)) == 3


@pytest.mark.parametrize("exponent", [0, 0.7, 1.0, 2.0])
def test_zipf_frequencies(exponent):
    rng, zipf = generator(3), Zipf(10, exponent)
    counts = np.bincount([zipf.draw(rng) for _ in range(20_000)], minlength=10)
    weights = np.arange(1, 11) ** -float(exponent)
    expected = 20_000 * weights / weights.sum()
    assert (abs(counts - expected) < 4.5 * np.sqrt(expected)).all()
