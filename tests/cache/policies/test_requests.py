"""Owners of blocks report requests to policies."""

import numpy as np
import pytest

import cache
from cache import SessionHint
from cache.policies import RequestInfo
from cache.serving import open_loop
from cache.serving.sampling_params import SamplingParams
from tests.cache.prefix_traces import trace_of


class Listener(cache.policies.POLICIES["fifo"]):
    def start(self, capacity, next_use=None):
        super().start(capacity, next_use)
        self.told: list[RequestInfo] = []

    def tell(self, request):
        self.told.append(request)

    correct = tell


def test_a_replay_reports_each_request_twice():
    listener = Listener()
    trace = trace_of([(0, 1), (2,)])
    trace.columns["session"] = np.array(["a", ""])
    cache.simulate(trace, policy=listener, capacity_blocks=2)
    first, at_release, second, _ = listener.told
    assert np.isnan((first.ends_session, at_release.calls_tool)).all()
    assert at_release.ends_session == 1.0
    assert at_release[:4] == (0.0, 8, 1, 2)
    assert np.isnan(first.output_tokens)
    assert first._replace(output_tokens=1)[:4] == at_release[:4]
    assert second[:2] == (1.0, 4)
    manager = cache.make_manager("vllm_v1", num_blocks=9, block_size=4, policy=listener)
    cache.simulate_serving(trace, manager=manager)
    assert sum(request.ends_session == 1.0 for request in listener.told) == 1


@pytest.mark.parametrize("wrapper", [None, "queue_informed", "safeguarded"])
@pytest.mark.parametrize("name", ["nano_vllm", "vllm_v0", "vllm_v1", "radix"])
def test_a_manager_reports_requests(name, wrapper):
    listener = Listener()
    policy = cache.make_policy(wrapper, policy=listener) if wrapper else listener
    manager = cache.make_manager(name, num_blocks=4, block_size=2, policy=policy)
    seq = cache.Sequence(0, [1, 2, 3])
    manager.clock = lambda: 1.5
    manager.allocate(seq)
    seq.append_token(4)
    manager.append(seq)
    manager.free(seq)
    assert listener.told[-1][:4] == (1500.0, 3, 1, 1)
    assert np.isnan((listener.told[0].output_tokens, listener.told[-1].calls_tool)).all()
    manager.clock = None
    hint = cache.SessionHint("a", expected_pause_ms=20, pause_spread=0.5)
    seq.hints = hint.numbers
    for is_finished in (False, True):
        manager.allocate(seq)
        manager.free(seq, is_finished)
    manager.correct(hint)
    session_only = [np.nan, np.nan, hint.number, np.nan, np.nan]
    told = np.array(listener.told[-5:])
    np.testing.assert_array_equal(told[:, 4:], [session_only] * 3 + [hint.numbers] * 2)
    assert np.isnan(told[:, 0]).all()
    assert np.isnan(told[-1, :4]).all()
    with pytest.raises(ValueError, match="hint='a': needs a SessionHint"):
        manager.correct("a")
    cache.make_manager(name, num_blocks=4, block_size=2).correct(hint)  # lru ignores it


@pytest.mark.parametrize("name", ["nano_vllm", "vllm_v0", "vllm_v1"])
def test_a_manager_reports_what_an_admitted_request_asks_for(name):
    """Once, without the block of its last token, before any pin or miss; not if it is refused."""
    calls = []

    class Recorder(Listener):
        def look_up(self, keys):
            calls.append(("look_up", len(keys)))

        def miss(self, key):
            calls.append("miss")

        def pin(self, block):
            super().pin(block)
            calls.append("pin")

    manager = cache.make_manager(name, num_blocks=6, block_size=1, policy=Recorder())
    for number, tokens in enumerate(([1, 2], [1, 2, 3])):
        seq = cache.Sequence(number, tokens)
        manager.allocate(seq)
        seq.append_token(9)
        manager.append(seq)
        manager.free(seq)
        calls.append("free")
    with pytest.raises(cache.OutOfBlocks):
        manager.allocate(cache.Sequence(2, range(7)))
    own = [call for call in calls if call != "miss"]
    assert own == [("look_up", 1), "free", ("look_up", 2), "pin", "pin", "free"]
    assert calls.index("miss") > 0


class ShortestPrompt(cache.PriorityPolicy):
    @staticmethod
    def priority(block):
        return block.request.prompt_tokens


def test_a_radix_tree_ranks_its_nodes_by_their_requests():
    manager = cache.make_manager("radix", num_blocks=9, block_size=1, policy=ShortestPrompt())
    for number, tokens in enumerate([[1, 1, 1], [2, 2], [3, 3, 3, 3]]):
        seq = cache.Sequence(number, tokens)
        manager.allocate(seq)
        manager.free(seq)
    assert [len(node.blocks) for node in manager.tree.leaves] == [2, 3, 4]


def engine_with(listener):
    manager = cache.make_manager("vllm_v1", num_blocks=20, block_size=1, policy=listener)
    return open_loop.engine_without_model(
        manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=9
    )


def test_a_cancelled_request_does_not_end_its_session():
    listener = Listener()
    engine = engine_with(listener)
    number = engine.add([1, 2], SamplingParams(session=SessionHint("a", ends=True)))
    engine.step()
    engine.abort(number)
    assert np.isnan([request.ends_session for request in listener.told]).all()
    engine.add([1, 2], SamplingParams(session="a"))


def test_a_session_goes_on_while_one_of_its_requests_runs():
    engine = engine_with(Listener())
    for length in (1, 5):
        engine.add([1, 2], SamplingParams(session="a", max_tokens=length, ignore_eos=True))
    engine.hint_session(SessionHint("a", ends=True))
    engine.step()
    engine.step()
    assert len(engine.requests) == 1
    engine.hint_session(SessionHint("a", ends=False))


def test_groups_of_layers_lose_no_hits_to_a_session_without_hints():
    groups = cache.layer_groups([None, 4])
    hits = []
    for policy in ("lru", "session_gap"):
        manager = cache.make_manager(
            "vllm_v1", num_blocks=16, block_size=2, policy=policy, groups=groups
        )
        for number in range(60):
            seq = cache.Sequence(number, [number % 3] * 5 + list(range(number % 4)))
            seq.hints = SessionHint(number % 3).numbers
            manager.allocate(seq)
            manager.free(seq)
        hits.append(manager.stats.hit_blocks)
    assert hits[0] == hits[1] > 0
