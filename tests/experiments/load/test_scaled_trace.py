"""Scaling of traces, and the tokens of their prompts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache import Trace
from experiments.harness import Unavailable
from experiments.load.scaled_trace import shrink, shrink_blocks

REQUESTS = [
    # Blocks of 512 tokens; the last one of a prompt is partly filled, as in Mooncake's traces.
    (0, 1024, 100, [1, 2]),
    (1, 1500, 301, [1, 2, 3]),
    (2, 600, 0, [1, 9]),
]


def mooncake(requests=REQUESTS, block_size=512) -> Trace:
    return Trace.from_requests(requests, name="t", block_size=block_size)


def test_lengths_are_divided_by_one_number_and_rounded_up():
    scaled = shrink(mooncake(), mean_tokens=1175 / 64, max_tokens=1_000, vocab_size=512)
    trace = scaled.trace
    assert scaled.divisor == 64
    assert trace.block_size == 8
    assert trace.input_lengths.tolist() == [16, 24, 10]
    assert trace.output_lengths.tolist() == [2, 5, 1]
    assert trace.block_ids.tolist() == mooncake().block_ids.tolist()
    assert trace.timestamps_ms.tolist() == [0, 1, 2]
    assert scaled.num_left_out == 0


def test_requests_that_are_too_long_or_faults_of_the_file_are_left_out():
    trace = mooncake([*REQUESTS, (3, 10, 10**6, [7])])
    scaled = shrink(trace, mean_tokens=1175 / 64, max_tokens=20, vocab_size=512)
    assert scaled.divisor == 64  # the fault takes no part in the mean
    assert scaled.trace.input_lengths.tolist() == [16, 10]
    assert scaled.num_left_out == 2
    with pytest.raises(Unavailable, match="no request that can be served"):
        shrink(trace, mean_tokens=1175 / 64, max_tokens=5, vocab_size=512)


def test_lengths_only_are_divided_exactly_and_never_stretched():
    trace = Trace.from_requests([(0, 300, 100, ()), (1, 100, 100, ())], name="t")
    scaled = shrink(trace, mean_tokens=100, max_tokens=10_000, vocab_size=512)
    assert scaled.divisor == 3
    assert scaled.trace.input_lengths.tolist() == [100, 34]
    assert shrink(trace, mean_tokens=9_999, max_tokens=400, vocab_size=512).divisor == 1


def test_small_blocks_are_joined_rather_than_left_without_a_token():
    """16 tokens / 64 would leave a quarter of a token; two are needed to spell 400 blocks."""
    trace = mooncake([(0, 16 * 400, 0, list(range(400)))], block_size=16)
    scaled = shrink(trace, mean_tokens=100, max_tokens=10_000, vocab_size=512)
    assert (scaled.trace.block_size, scaled.divisor) == (2, 64)
    assert scaled.trace.num_block_references == 400 * 16 // 128
    assert scaled.trace.input_lengths.tolist() == [100]


def test_whole_blocks_and_one_token_more():
    scaled = shrink_blocks(mooncake(), slice_tokens=7 * 9, max_output_tokens=3, vocab_size=512)
    assert scaled.trace.block_size == 9  # 7 blocks
    assert scaled.divisor == 512 / 9
    assert scaled.trace.input_lengths.tolist() == [19, 28, 19]
    assert scaled.trace.output_lengths.tolist() == [2, 3, 1]


def test_blocks_never_grow_and_prompts_beyond_the_slice_are_left_out():
    def shrunk(**options):
        return shrink_blocks(mooncake(), max_output_tokens=4, **options)

    assert shrunk(slice_tokens=10**6, vocab_size=512).trace.block_size == 512
    few = shrunk(slice_tokens=11, vocab_size=4)  # 4 blocks of 2 tokens over an alphabet of 2
    assert few.trace.block_size == 2
    assert (len(few.trace), few.num_left_out) == (2, 1)
    with pytest.raises(Unavailable, match="no request"):
        shrunk(slice_tokens=1, vocab_size=512)


def test_unknown_block_sizes_are_unavailable():
    unknown = dataclasses.replace(mooncake(), block_size=None)
    with pytest.raises(Unavailable, match="tokens per block are unknown"):
        shrink_blocks(unknown, slice_tokens=100, max_output_tokens=1, vocab_size=512)
    with pytest.raises(Unavailable, match="tokens per block are unknown"):
        shrink(unknown, mean_tokens=10, max_tokens=100, vocab_size=512)


def agreeing(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    both = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in both if x != y), min(len(a), len(b)))


@given(
    paths=st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=8).filter(any),
    vocab_size=st.sampled_from([4, 6, 512, 32_000]),
)
def test_prompts_agree_exactly_as_far_as_their_blocks(paths, vocab_size):
    """Two prompts have the same tokens up to the end of a block if and only if they share it."""
    names: dict[tuple, int] = {}
    requests = []
    for index, path in enumerate(paths):
        starts = (tuple(path[: depth + 1]) for depth in range(len(path)))
        ids = [names.setdefault(start, len(names)) for start in starts]
        requests.append((index, 10 * len(path) + 1, 1, ids))
    trace = mooncake(requests, block_size=10)
    sizes = {"slice_tokens": 40 * trace.num_block_references, "max_output_tokens": 1}
    trace = shrink_blocks(trace, **sizes, vocab_size=vocab_size).trace
    prompts = [cache.prompt_token_ids(trace, i, vocab_size).tolist() for i in range(len(trace))]
    blocks = [request.block_ids.tolist() for request in trace]
    for mine, ids in zip(prompts, blocks, strict=True):
        whole = len(ids) * trace.block_size
        assert len(mine) == whole + 1
        assert max(mine[:whole]) < vocab_size // 2, "the lower half spells blocks"
        assert mine[whole] >= vocab_size // 2, "the upper half the number of the request"
    for i, j in itertools.combinations(range(len(trace)), 2):
        same_tokens = agreeing(prompts[i], prompts[j])
        depth = min(same_tokens // trace.block_size, len(blocks[i]), len(blocks[j]))
        assert depth == agreeing(blocks[i], blocks[j])
        if len(trace) <= vocab_size // 2:
            assert prompts[i] != prompts[j]  # the last token is a request's own


def test_what_lies_beyond_the_blocks_is_a_requests_own():
    """Lengths alone share nothing, not even with request 256 of a vocabulary of 512."""
    trace = Trace.from_requests([(i, 8, 1, ()) for i in range(300)], name="t")
    prompts = {tuple(cache.prompt_token_ids(trace, index, 512)) for index in range(300)}
    assert len(prompts) == 300
