"""The overlapping replay: it always ends and loses neither a request nor a block."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache.replay.overlapping import most_hits, simulate_serving
from cache.serving.open_loop import ServiceModel
from cache.traces.trace import Trace
from tests.cache.prefix_traces import simulate_both, trace_of_requests
from tests.cache.replay.test_serial import in_python

SERVICE = ServiceModel(
    step_seconds=1.0,
    prefill_tokens_per_second=10.0,
    decode_seconds_per_sequence=0.5,
    max_num_seqs=4,
    max_num_batched_tokens=20,
)

requests = st.lists(
    st.tuples(
        st.integers(0, 20_000),  # arrival, ms
        st.lists(st.integers(0, 1), max_size=4).map(tuple),  # blocks of 4 tokens
        st.integers(0, 3),  # tokens beyond them
        st.integers(0, 12),  # output
    ),
    min_size=1,
    max_size=14,
)


@given(
    requests=requests,
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 4, 5]),
    policy=st.sampled_from(["lru", "lfu", "arc", "s3fifo", "random", "queue_informed"]),
)
def test_every_request_ends_and_every_block_returns(requests, num_blocks, block_size, policy):
    trace = trace_of_requests(requests)
    manager = cache.make_manager(
        "vllm_v1", num_blocks=num_blocks, block_size=block_size, policy=policy
    )
    result = simulate_serving(trace, manager=manager, service=SERVICE)
    manager.check_invariants()
    assert manager.num_free_blocks == num_blocks
    capacity = num_blocks * block_size
    # The K/V of the last generated token are never stored.
    sizes = np.maximum(trace.input_lengths, 1) + np.maximum(trace.output_lengths, 1) - 1
    assert result.finished == (sizes <= capacity).sum()
    assert result.dropped == (sizes > capacity).sum()
    assert len(result.ttft_seconds) == len(result.normalized_latency_seconds) == result.finished
    assert (result.ttft_seconds >= 0.999 * SERVICE.step_seconds).all()
    assert result.mean_running <= SERVICE.max_num_seqs
    assert result.stats.num_allocations == result.finished
    assert result.stats.num_resumptions == result.preemptions
    if block_size == trace.block_size:
        assert result.stats.hit_blocks <= most_hits(trace)


def replay(*rows: tuple, manager: str = "vllm_v1", num_blocks: int = 10, **options):
    """Requests (arrival, input, output, blocks) served in blocks of four tokens."""
    trace = Trace.from_requests(rows, name="by hand", block_size=4)
    manager = cache.make_manager(manager, num_blocks=num_blocks, block_size=4)
    return simulate_serving(trace, manager=manager, service=SERVICE, **options)


def test_times_of_a_request_alone():
    """Prefill of 8 tokens in one step (1 + 0.8 s), then two decode steps (1 + 0.5 s each)."""
    result = replay((5000, 8, 3, [0, 1]))
    assert result.ttft_seconds == pytest.approx([1.8])
    assert result.normalized_latency_seconds == pytest.approx([4.8 / 3])
    assert result.makespan_seconds == pytest.approx(4.8)
    assert result.mean_running == 1


def test_a_cached_prefix_shortens_the_prefill():
    # Eight of the second prompt's nine tokens are cached: one is computed.
    result = replay((0, 9, 1, [0, 1]), (100_000, 9, 1, [0, 1]))
    assert result.ttft_seconds == pytest.approx([1.9, 1.1])
    assert result.stats.hit_tokens == 8


def test_the_last_admitted_is_preempted_and_resumed():
    # Two requests of 4 + 4 tokens in 3 blocks of 4: both prompts fit, both answers do not.
    result = replay((0, 4, 5, [0]), (0, 4, 5, [1]), num_blocks=3)
    assert (result.finished, result.preemptions) == (2, 1)
    first, second = result.normalized_latency_seconds
    assert first < second
    assert result.recomputed_tokens == 0  # the prompt block of the second stayed cached


def test_a_victim_whose_turn_had_not_come_keeps_the_token_of_the_step_before():
    # The first needs a second block with its fifth token, and takes that of the second request.
    result = replay((0, 4, 4, [0]), (0, 2, 4, []), manager="paged", num_blocks=2)
    assert (result.finished, result.preemptions) == (2, 1)
    assert result.recomputed_tokens == 2  # of the prompt; the generated one had not been


def test_twice_the_rate_halves_the_gaps():
    rows = (0, 4, 1, [0]), (100_000, 4, 1, [1])
    spans = [replay(*rows, time_scale=scale).makespan_seconds for scale in (1.0, 0.5)]
    assert spans == pytest.approx([101.4, 51.4])


def agent(session: int, think_time: float, **facts: str) -> dict:
    return {"session": session, "agent": 0, "think_time": think_time, **facts}


def test_in_a_closed_loop_a_session_waits_for_its_answers():
    """Its second request arrives 3 s after the first is finished, whatever the trace says."""
    rows = (0, 4, 1, [0], agent(1, 0)), (50, 8, 1, [0, 1], agent(1, 3000)), (
        60_000, 4, 1, [2], agent(2, 9e9)
    )  # fmt: skip
    result = replay(*rows, closed_loop=True, time_scale=0.5)
    assert result.ttft_seconds == pytest.approx([1.4, 1.4, 1.4])
    assert result.stats.hit_tokens == 4
    assert result.makespan_seconds == pytest.approx(30 + 1.4)
    with pytest.raises(ValueError, match="'by hand' lacks agent, session, think_time"):
        replay((0, 4, 1, [0]), closed_loop=True)


@pytest.mark.parametrize(("policy", "hits"), [("lru", 0), ("ttl", 1)])
def test_blocks_of_a_request_that_calls_a_tool_outlive_others(policy, hits):
    """The one that called it a second ago goes last, compiled, in Python and in a manager."""
    stops, blocks = ("tool_use", "end_turn", "end_turn", "end_turn"), (0, 1, 2, 0)
    rows = [
        (10_000 * i, 4, 1, [block], agent(i, 0, stop=stop))
        for i, (block, stop) in enumerate(zip(blocks, stops, strict=True))
    ]
    trace = Trace.from_requests(rows, name="t", block_size=4)
    result = simulate_both(trace, policy, in_python(policy), capacity_blocks=2)
    assert result.hit_blocks == hits
    longer = [(time, 5, 1, ids, facts) for time, _, _, ids, facts in rows]  # a token to compute
    trace = Trace.from_requests(longer, name="t", block_size=4)
    manager = cache.make_manager("vllm_v1", num_blocks=3, block_size=4, policy=policy)
    run = simulate_serving(trace, manager=manager, service=SERVICE)
    assert run.stats.hit_blocks == hits


def test_lengths_only_traces_share_nothing():
    trace = Trace.from_requests([(0, 20, 4, []), (1, 20, 4, [])], name="azure")
    manager = cache.make_manager("vllm_v1", num_blocks=32, block_size=4)
    result = simulate_serving(trace, manager=manager)
    assert result.finished == 2
    assert result.stats.hit_tokens == 0


def test_bad_arguments():
    trace = Trace.from_requests([(0, 8, 1, [0, 1])], name="t", block_size=4)
    manager, paged = (
        cache.make_manager(name, num_blocks=8, block_size=4) for name in ("vllm_v1", "paged")
    )
    for value in (math.nan, 0):
        with pytest.raises(ValueError, match=r"prefill_tokens_per_second=.*: needs a finite"):
            ServiceModel(prefill_tokens_per_second=value)
    later = Trace.from_requests([(0, 8, 1, []), (1e300, 8, 1, [])], name="t")
    with pytest.raises(ValueError, match=r"time_scale=1e\+99: the last arrival"):
        simulate_serving(later, manager=manager, time_scale=1e99)
    slow = ServiceModel(prefill_tokens_per_second=5e-324)
    with pytest.raises(ValueError, match=r"service.duration\(step\)=inf: needs"):
        simulate_serving(trace, manager=paged, service=slow)
    unknown = Trace.from_requests([(0, 8, 1, [0]), (1, 90, 1, [0])], name="t")
    with pytest.raises(ValueError, match="blocks of unknown size"):
        simulate_serving(unknown, manager=manager)
    manager.allocate(cache.Sequence("other", [1, 2, 3]))
    with pytest.raises(ValueError, match="1 of its 8 blocks are in use"):
        simulate_serving(trace, manager=manager)
