"""The engine over a stand-in for the model that checks every slot a sequence reads."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import MANAGERS, POLICIES, UnsupportedByDesign
from models.sampling_params import SamplingParams
from models.sequence import FinishReason

CHUNKED = [name for name in sorted(MANAGERS) if MANAGERS[name].can_chunk]
FORKING = [name for name in sorted(MANAGERS) if MANAGERS[name].can_fork]
assert {"vllm_v1", "nano_vllm"} <= set(CHUNKED)
assert {"vllm_v1", "vllm_v0"} <= set(FORKING)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7 + i * i + i // 3) % 13 for i in range(length)]


@pytest.mark.parametrize("num_host_blocks", [0, 100, 3], ids=["recompute", "swap", "little_swap"])
@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("manager", sorted(MANAGERS))
def test_scarce_memory_changes_no_token(
    manager, block_size, num_host_blocks, make_engine, serve, assert_idle
):
    engine = make_engine(manager, -(-64 // block_size), block_size, num_host_blocks=num_host_blocks)
    shared = prompt(17)
    prompts = [shared, prompt(5, 1), [*shared[:12], 1, 2], prompt(20, 2), shared, prompt(1, 3)]
    requests = {engine.add(tokens, GREEDY): tokens for tokens in prompts}
    stats = {request_id: engine.requests[request_id].stats for request_id in requests}
    done = serve(engine)
    for request_id, tokens in requests.items():
        [output] = done[request_id]
        assert output.token_ids == engine.runner.greedy(tokens, 12)
        assert output.finish_reason is FinishReason.LENGTH
    if manager != "contiguous":  # which reserves the longest sequence for each
        assert any(stat.num_preemptions for stat in stats.values())
        swapped = any(stat.num_swapped_tokens for stat in stats.values())
        assert swapped == (num_host_blocks == 100) or num_host_blocks == 3
    assert stats[0].num_preemptions == 0  # the oldest yields to nobody
    assert_idle(engine)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"belady"}))  # which needs the future
@pytest.mark.parametrize("manager", ["vllm_v1", "radix"])
def test_no_eviction_policy_changes_a_token(manager, policy, make_engine, serve, assert_idle):
    engine = make_engine(manager, 16, policy=policy, max_num_batched_tokens=20)
    shared = prompt(17)
    prompts = [shared, prompt(5, 1), [*shared[:12], 1, 2], prompt(20, 2), shared, shared[:14]] * 2
    requests = {engine.add(tokens, GREEDY): tokens for tokens in prompts}
    done = serve(engine)
    for request_id, tokens in requests.items():
        assert done[request_id][0].token_ids == engine.runner.greedy(tokens, 12)
    assert engine.manager.stats.evicted_blocks > 0
    assert engine.manager.stats.hit_blocks > 0
    assert_idle(engine)


@pytest.mark.parametrize("manager", CHUNKED)
@pytest.mark.parametrize("budget", [1, 3, 10])
def test_chunks_of_a_prompt(manager, budget, make_engine, serve, assert_idle):
    engine = make_engine(manager, max_num_batched_tokens=budget)
    prompts = [prompt(30), prompt(9, 1), prompt(30)[:25]]
    requests = {engine.add(tokens, GREEDY): tokens for tokens in prompts}
    done = serve(engine)
    for request_id, tokens in requests.items():
        assert done[request_id][0].token_ids == engine.runner.greedy(tokens, 12)
    assert max(step.num_tokens for step in engine.runner.steps) == budget
    assert_idle(engine)


def test_a_cached_prefix_is_not_computed_again(make_engine, serve):
    engine = make_engine("vllm_v1", 32)
    first, again = prompt(22), [*prompt(22)[:18], 3, 1, 2]
    for tokens, cached in ((first, 0), (again, 16), (first, 20), (again, 20)):
        request = engine.requests[engine.add(tokens, GREEDY)]
        serve(engine)
        assert request.stats.num_cached_tokens == cached
    engine = make_engine("vllm_v1", 32, enable_prefix_caching=False)
    for _ in range(2):
        request = engine.requests[engine.add(first, GREEDY)]
        serve(engine)
        assert request.stats.num_cached_tokens == 0


@pytest.mark.parametrize("manager", sorted(MANAGERS))
def test_samples_are_the_same_however_they_share(manager, make_engine, serve, assert_idle):
    """Requests with a seed get the same tokens from every design, alone or in a crowd."""
    params = SamplingParams(n=3, seed=5, max_tokens=9)
    alone = make_engine("vllm_v1", 64)
    alone.add(prompt(10), params)
    expected = [output.token_ids for output in serve(alone)[0]]
    assert len({tuple(tokens) for tokens in expected}) == 3

    engine = make_engine(manager, 16)
    engine.add(prompt(20, 3), SamplingParams(temperature=2.0))
    crowded = engine.add(prompt(10), params)
    engine.add(prompt(7, 4), SamplingParams(n=2, temperature=0.5))
    done = serve(engine)
    assert [output.token_ids for output in done[crowded]] == expected
    assert [output.index for output in done[crowded]] == [0, 1, 2]
    assert_idle(engine)


def test_samples_beams_and_single_outputs_share_a_step(make_engine, serve):
    """Each draws from its own row of logits, whichever rows the others take."""
    kinds = [
        SamplingParams(n=2, seed=3, max_tokens=5),
        SamplingParams(beam_width=2, max_tokens=5),
        SamplingParams(temperature=0, max_tokens=5),
    ]
    expected = []
    for seed, params in enumerate(kinds):
        engine = make_engine("vllm_v1", 64)
        engine.add(prompt(7, seed), params)
        expected.append(serve(engine)[0])
    for order in itertools.permutations(range(3)):
        engine = make_engine("vllm_v1", 64)
        ids = {engine.add(prompt(7, i), kinds[i]): i for i in order}
        done = serve(engine)
        assert {i: done[request_id] for request_id, i in ids.items()} == dict(enumerate(expected))


@pytest.mark.parametrize("manager", FORKING)
@pytest.mark.parametrize(("length", "copies"), [(8, 0), (10, 2)], ids=["aligned", "partial"])
def test_samples_share_the_blocks_of_the_prompt(manager, length, copies, make_engine, serve):
    engine = make_engine(manager, 32, enable_prefix_caching=False)
    engine.add(prompt(length), SamplingParams(n=3, max_tokens=4))
    engine.step()
    assert engine.manager.num_free_blocks == 32 - -(-length // 4)
    serve(engine)
    assert sum(len(step.copies) for step in engine.runner.steps) == copies


def test_end_of_text_and_stop_tokens(make_engine, serve, assert_idle):
    expected = make_engine().runner.greedy(prompt(6), 12)
    firsts = [token for i, token in enumerate(expected) if token not in expected[:i]]
    stop, eos = firsts[1], firsts[3]  # so that each way to end differs
    engine = make_engine(eos=frozenset({eos}))
    cases = [
        (GREEDY, expected[: expected.index(eos) + 1], FinishReason.STOP),
        (SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), expected, "length"),
        (
            SamplingParams(temperature=0, stop_token_ids=[stop], ignore_eos=True),
            expected[: expected.index(stop) + 1],
            "stop",
        ),
        (SamplingParams(temperature=0, max_tokens=1), expected[:1], "length"),
    ]
    for params, tokens, reason in cases:
        request_id = engine.add(prompt(6), params)
        [output] = serve(engine)[request_id]
        assert (output.token_ids, output.finish_reason) == (tokens, reason)
    assert_idle(engine)


def test_a_sequence_ends_where_the_cache_does(make_engine, serve, assert_idle):
    engine = make_engine("vllm_v1", 5, 4, max_model_len=64)
    assert engine.max_model_len == 20
    request_id = engine.add(prompt(15), SamplingParams(temperature=0, max_tokens=50))
    [output] = serve(engine)[request_id]
    assert output.token_ids == engine.runner.greedy(prompt(15), 5)
    assert output.finish_reason is FinishReason.LENGTH
    assert_idle(engine)


def test_the_line_is_served_in_order(make_engine, serve):
    """A prompt that fits does not overtake one that does not yet."""
    engine = make_engine("paged", 8, 4)
    engine.add(prompt(20), SamplingParams(max_tokens=10))
    large = engine.add(prompt(24, 1), GREEDY)
    small = engine.add(prompt(2, 2), GREEDY)
    engine.step()
    assert [seq.request.request_id for seq in engine.scheduler.running] == [0]
    waiting = [seq.request.request_id for seq in engine.scheduler.waiting]
    assert waiting == [large, small]
    stats = [engine.requests[request_id].stats for request_id in (large, small)]
    serve(engine)
    assert stats[0].first_scheduled_time <= stats[1].first_scheduled_time


def test_budgets_are_kept(make_engine, serve):
    engine = make_engine("vllm_v1", 200, 4, max_num_seqs=3, max_num_batched_tokens=10)
    for seed in range(8):
        engine.add(prompt(9, seed), GREEDY)
    engine.add(prompt(9, 9), SamplingParams(n=3, max_tokens=3))
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3
    assert max(step.num_tokens for step in engine.runner.steps) == 10
    assert max(len(step.sequences) for step in engine.runner.steps) == 3


def test_places_of_samples_yet_to_fork_are_kept_free(make_engine):
    engine = make_engine("vllm_v1", 64, 4, max_num_seqs=3, max_num_batched_tokens=10)
    engine.add(prompt(9), SamplingParams(n=3, max_tokens=4))
    engine.add(prompt(3, 1), GREEDY)
    while engine.has_unfinished:
        engine.step()
        assert len(engine.scheduler.running) <= 3


@pytest.mark.parametrize("manager", sorted(MANAGERS))
def test_swapping_saves_every_computation(manager, make_engine, serve):
    """With room in host memory, each token is computed once, however often it is preempted."""
    engine = make_engine(manager, 16, num_host_blocks=64, enable_prefix_caching=False)
    for seed, length in enumerate((20, 9, 14, 17, 6)):
        engine.add(prompt(length, seed), GREEDY)
    requests = list(engine.requests.values())
    serve(engine)
    if manager != "contiguous":  # which reserves everything beforehand
        assert sum(request.stats.num_swapped_tokens for request in requests) > 0
    computed = sum(step.num_tokens for step in engine.runner.steps)
    assert computed == sum((20, 9, 14, 17, 6)) + 5 * (12 - 1)


def test_a_sequence_comes_back_when_it_can_go_on(make_engine, serve):
    """The blocks of the younger one are free again at once, but not the next that it needs."""
    engine = make_engine("vllm_v0", 4, 16, num_host_blocks=4, enable_prefix_caching=False)
    engine.add(prompt(2), SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    younger = engine.requests[engine.add(prompt(46, 1), GREEDY)]
    serve(engine)
    assert younger.stats.num_preemptions == 1
    assert sum(len(step.swap_out) for step in engine.runner.steps) == 3


def test_a_sequence_may_come_back_without_a_copy_and_alone(make_engine, serve, assert_idle):
    """All its blocks were still in the cache; the next in line does not fit beside it."""
    engine = make_engine("vllm_v0", 8, 4, num_host_blocks=8)
    engine.add(prompt(13), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    younger = engine.requests[engine.add(prompt(15, 1), GREEDY)]
    engine.add(prompt(28, 2), SamplingParams(temperature=0, max_tokens=3))
    serve(engine)
    assert younger.stats.num_swapped_tokens == 16
    assert sum(len(step.swap_in) for step in engine.runner.steps) == 0
    assert [] in [step.sequences for step in engine.runner.steps]
    assert_idle(engine)


@pytest.mark.parametrize("manager", FORKING)
def test_beams_compute_each_token_once(manager, make_engine, serve):
    engine = make_engine(manager, 64, 5)
    engine.add(prompt(7), SamplingParams(beam_width=3, max_tokens=9))
    serve(engine)
    assert sum(step.num_tokens for step in engine.runner.steps) == 7 + 3 * (9 - 1)


def test_only_what_left_the_cache_is_swapped_in(make_engine, serve):
    engine = make_engine("vllm_v1", 11, 4, num_host_blocks=16)
    engine.add(prompt(16), SamplingParams(max_tokens=14, temperature=0))
    engine.add(prompt(16), SamplingParams(max_tokens=14, temperature=0.5))
    serve(engine)
    out = sum(len(step.swap_out) for step in engine.runner.steps)
    back = sum(len(step.swap_in) for step in engine.runner.steps)
    assert out > back > 0  # the prompt's blocks stayed with the other request


def test_decoding_goes_on_beside_the_chunks_of_a_prompt(make_engine):
    engine = make_engine("vllm_v1", 64, 4, max_num_batched_tokens=8)
    engine.add(prompt(4), SamplingParams(max_tokens=30))
    engine.step()
    engine.add(prompt(40, 1), GREEDY)
    for _ in range(5):
        tokens, _ = engine.step()
        assert [token.request_id for token in tokens] == [0]
        assert engine.runner.steps[-1].num_tokens == 8


def test_abort_frees_everything_at_any_time(make_engine, assert_idle):
    for num_steps in range(14):
        engine = make_engine("vllm_v1", 9, 4, num_host_blocks=9)
        ids = [
            engine.add(prompt(12), SamplingParams(n=2, max_tokens=9)),
            engine.add(prompt(8, 1), SamplingParams(beam_width=2, max_tokens=4)),
            engine.add(prompt(12, 2), GREEDY),
        ]
        for _ in range(num_steps):
            engine.step()
        for request_id in ids:
            if request_id in engine.requests:
                request = engine.abort(request_id)
                reasons = {seq.finish_reason for seq in request.sequences}
                assert FinishReason.ABORT in reasons
                with pytest.raises(KeyError):
                    engine.abort(request_id)
        assert_idle(engine)


def test_a_cancelled_beam_search_returns_its_beams(make_engine, serve):
    params = SamplingParams(beam_width=3, n=2, max_tokens=4)
    engine = make_engine("vllm_v1", 64)
    engine.add(prompt(6), params)
    expected = serve(engine)[0]
    params = SamplingParams(beam_width=3, n=2, max_tokens=9)
    request_id = engine.add(prompt(6), params)
    for _ in range(4):
        engine.step()
    request = engine.abort(request_id)
    outputs = engine.completions(request)
    assert {output.finish_reason for output in outputs} == {FinishReason.ABORT}
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert outputs[0].cumulative_logprob == pytest.approx(expected[0].cumulative_logprob)
    assert request.stats.num_output_tokens == 8
    engine.add(prompt(6), params)
    assert engine.completions(engine.abort(2)) == []  # no token yet


def test_statistics(make_engine, serve):
    engine = make_engine("vllm_v1", 64)
    request = engine.requests[engine.add(prompt(6), SamplingParams(n=2, max_tokens=5))]
    assert request.stats.time_to_first_token is None
    assert request.stats.time_per_output_token is None
    serve(engine)
    stats = request.stats
    times = [
        stats.arrival_time,
        stats.first_scheduled_time,
        stats.first_token_time,
        stats.finish_time,
    ]
    assert times == sorted(times)
    assert stats.time_to_first_token == stats.first_token_time - stats.arrival_time
    assert stats.time_per_output_token == (stats.finish_time - stats.first_token_time) / 4
    assert (stats.num_output_tokens, stats.longest_output) == (10, 5)


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], GREEDY, "prompt: has no tokens"),
        ([1, 13], GREEDY, "token ids from 1 to 13; needs ids from 0 to 12"),
        ([-1], GREEDY, "token ids from -1"),
        (prompt(20), GREEDY, "prompt: has 20 tokens; needs at most 19"),
        ([1], SamplingParams(n=9), "n=9: needs at most max_num_seqs=8"),
        ([1], SamplingParams(beam_width=9), "beam_width=9: needs at most max_num_seqs=8"),
        (prompt(9), SamplingParams(beam_width=2), r"may need 10 blocks, all at a time; .* has 5"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(tokens, params, message, make_engine):
    engine = make_engine("vllm_v1", 5, 4)
    with pytest.raises(ValueError, match=message):
        engine.add(tokens, params)
    assert not engine.has_unfinished


def test_beam_search_needs_a_manager_that_forks(make_engine):
    with pytest.raises(UnsupportedByDesign, match=r"paged.*fork, which beam search needs"):
        make_engine("paged").add([1], SamplingParams(beam_width=2))


@pytest.mark.parametrize("manager", FORKING)
@pytest.mark.parametrize("num_host_blocks", [0, 40], ids=["recompute", "swap"])
def test_beams_are_the_same_under_preemption(
    manager, num_host_blocks, make_engine, serve, assert_idle
):
    beams = SamplingParams(beam_width=3, n=3, max_tokens=8)
    prompts = [prompt(6), prompt(9, 1), prompt(4, 2)]
    expected = []
    for tokens in prompts:
        engine = make_engine(manager, 64)
        engine.add(tokens, beams)
        expected.append(serve(engine)[0])
    engine = make_engine(manager, 18, num_host_blocks=num_host_blocks)
    engine.add(prompt(20, 5), SamplingParams(max_tokens=20))
    requests = [engine.requests[engine.add(tokens, beams)] for tokens in prompts]
    done = serve(engine)
    assert [done[request.request_id] for request in requests] == expected
    assert sum(request.stats.num_preemptions for request in requests) > 0
    assert_idle(engine)


@pytest.mark.parametrize("manager", FORKING)
@pytest.mark.parametrize("num_host_blocks", [0, 40], ids=["recompute", "swap"])
def test_a_beam_may_be_preempted_while_it_waits_for_another(
    manager, num_host_blocks, make_engine, serve, assert_idle
):
    beams = SamplingParams(beam_width=2, n=2, max_tokens=7)
    engine = make_engine(manager, 40, num_host_blocks=num_host_blocks)
    engine.add(prompt(6), beams)
    expected = serve(engine)[0]
    scheduler = engine.scheduler
    engine.add(prompt(6), beams)
    for _ in range(3):
        engine.step()
    first, second = scheduler.running
    preempt = scheduler._preempt

    def preempt_in_next_step(seq):
        schedule = scheduler._schedule_running

        def scheduled(step):
            scheduler.running.remove(seq)
            preempt(seq, step)
            scheduler._schedule_running = schedule
            return schedule(step)

        scheduler._schedule_running = scheduled

    preempt_in_next_step(second)
    engine.step()  # the first beam has its logits now, and waits for the second
    assert scheduler.running == [first]
    assert first.num_computed_tokens == first.num_tokens
    preempt_in_next_step(first)
    engine.step()
    assert scheduler.running == []
    assert engine._beam_searches[1]._candidates.keys() == {first.seq_id}
    assert serve(engine)[1] == expected
    assert_idle(engine)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and are cancelled at random; memory is scarce."""

    make_engine = None  # set by the test
    assert_idle = None

    @initialize(
        manager=st.sampled_from(sorted(MANAGERS)),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_host_blocks=st.sampled_from([0, 4, 30]),
        budget=st.sampled_from([1, 4, 16, 40]),
        max_num_seqs=st.sampled_from([1, 3, 5]),
        caching=st.booleans(),
    )
    def start(self, manager, block_size, num_host_blocks, budget, max_num_seqs, caching):
        num_blocks = -(-40 // block_size)
        if manager not in CHUNKED:
            budget = 40
        self.engine = self.make_engine(
            manager,
            num_blocks,
            block_size,
            num_host_blocks=num_host_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            eos=frozenset({0}),
        )
        self.forks = manager in FORKING
        self.swaps = MANAGERS[manager].can_swap
        self.greedy = {}
        self.preemptions = Counter()
        self.ids = itertools.count()

    @rule(
        length=st.integers(1, 24),
        seed=st.integers(0, 2),
        kind=st.sampled_from(["greedy", "samples", "beams"]),
        max_tokens=st.integers(1, 12),
        width=st.integers(1, 3),
    )
    def add(self, length, seed, kind, max_tokens, width):
        tokens = prompt(length, seed)
        if kind == "beams" and not self.forks:
            kind = "samples"
        params = {
            "greedy": SamplingParams(temperature=0, max_tokens=max_tokens),
            "samples": SamplingParams(n=width, max_tokens=max_tokens, ignore_eos=True),
            "beams": SamplingParams(beam_width=width, max_tokens=max_tokens),
        }[kind]
        try:
            request_id = self.engine.add(tokens, params)
        except ValueError as error:
            assert kind == "beams" or "prompt: has" in str(error) or "n=" in str(error)  # noqa: PT017
            return
        if kind == "greedy":
            count = min(max_tokens, self.engine.max_model_len - length)
            self.greedy[request_id] = self.engine.runner.greedy(tokens, count, {0})

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.check_step()

    @precondition(lambda self: self.engine.has_unfinished)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
        self.engine.completions(self.engine.abort(request_id))

    def check_step(self):
        """A step keeps its budgets and serves the oldest request, whose beams may wait, though,
        for one that its manager is bringing back."""
        oldest = min(self.engine.requests, default=None)
        _, finished = self.engine.step()
        [*_, step] = self.engine.runner.steps
        scheduler = self.engine.scheduler
        assert step.num_tokens <= scheduler.max_num_batched_tokens
        assert len(step.sequences) <= scheduler.max_num_seqs
        assert all(start < end for start, end in zip(step.starts, step.ends, strict=True))
        served = {seq.request.request_id for seq in step.sequences}
        assert oldest is None or oldest in served or self.swaps
        self.preemptions.update(seq.request.request_id for seq in step.preempted)
        for request in finished:
            outputs = self.engine.completions(request)
            self.check_statistics(request, outputs)
            assert len(outputs) == request.params.n
            assert all(0 < len(output.token_ids) <= request.max_tokens for output in outputs)
            if request.request_id in self.greedy:
                assert outputs[0].token_ids == self.greedy[request.request_id]

    def check_statistics(self, request, outputs):
        stats, lengths = request.stats, [len(output.token_ids) for output in outputs]
        times = [
            stats.arrival_time,
            stats.first_scheduled_time,
            stats.first_token_time,
            stats.finish_time,
        ]
        assert times == sorted(times)
        assert 0 <= stats.num_cached_tokens < len(request.prompt_token_ids)
        assert stats.num_preemptions == self.preemptions[request.request_id]
        assert (stats.num_output_tokens, stats.longest_output) == (sum(lengths), max(lengths))

    @invariant()
    def is_consistent(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.manager.check_invariants()
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        num_seqs = sum(1 + seq.num_pending_forks for seq in running)
        assert num_seqs <= engine.scheduler.max_num_seqs
        in_line = [*running, *waiting]
        assert len({seq.seq_id for seq in in_line}) == len(in_line)
        orders = [seq.order for seq in running]
        assert orders == sorted(orders)
        assert [seq.order for seq in waiting] == sorted(seq.order for seq in waiting)
        if not self.swaps:  # by itself
            held = sum(len(seq.host_blocks) for seq in in_line)
            assert held + engine.scheduler.num_free_host_blocks == len(engine.runner.host_blocks)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self.check_step()
        self.assert_idle(self.engine)


def test_random_requests_leave_nothing_behind(make_engine, assert_idle):
    machine = type(
        "Machine",
        (EngineMachine,),
        {"make_engine": staticmethod(make_engine), "assert_idle": staticmethod(assert_idle)},
    )
    from hypothesis.stateful import run_state_machine_as_test

    profile = settings.get_profile(settings.get_current_profile_name())
    run_state_machine_as_test(
        machine, settings=settings(profile, stateful_step_count=30, max_examples=40)
    )
