"""The engine on a fake model that checks every slot a sequence reads."""

import gc
import itertools
import random
import sys
import warnings
import weakref
from collections import Counter

import pytest
from symbolic_engine import (
    GREEDY,
    VOCAB_SIZE,
    Injected,
    assert_idle,
    keys_of,
    make_engine,
    prompt,
    serve,
)

from cache import MANAGERS, POLICIES, Group, InterruptedChange, UnsupportedByDesign
from cache.serving.request import FinishReason, Request, ScheduledSequence
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler, Step

CHUNKED = [name for name in sorted(MANAGERS) if MANAGERS[name].can_chunk]
FORKING = [name for name in sorted(MANAGERS) if MANAGERS[name].can_fork]
assert {"vllm_v1", "nano_vllm"} <= set(CHUNKED)
assert {"vllm_v1", "vllm_v0"} <= set(FORKING)
BEAMS = SamplingParams(beam_width=3, n=3, max_tokens=8)


def alone(tokens, params: SamplingParams, *, max_model_len=64, eos=frozenset(), **keys) -> list:
    """The outputs of a request that is computed alone and with enough memory."""
    engine = make_engine("vllm_v1", 200, max_model_len=max_model_len, eos=eos)
    engine.add(tokens, params, **keys)
    return serve(engine)[0]


@pytest.mark.parametrize("manager", FORKING)
@pytest.mark.parametrize(("length", "copies"), [(8, 0), (10, 2)], ids=["aligned", "partial"])
def test_samples_and_beams_share_the_blocks_of_the_prompt(manager, length, copies):
    engine = make_engine(manager, 32, enable_prefix_caching=False)
    engine.add(prompt(length), SamplingParams(n=3, max_tokens=4))
    engine.step()
    assert engine.manager.num_free_blocks == 32 - -(-length // 4)
    serve(engine)
    assert sum(len(step.copies) for step in engine.runner.steps) == copies
    engine = make_engine(manager, 64, 5)
    engine.add(prompt(7), BEAMS)
    serve(engine)
    computed = sum(step.num_tokens for step in engine.runner.steps)
    assert computed == 7 + 3 * (8 - 1), "each token of a beam once"


def test_end_of_text_and_stop_tokens():
    expected = make_engine().runner.greedy(prompt(6), 12)
    firsts = [token for i, token in enumerate(expected) if token not in expected[:i]]
    stop, eos = firsts[1], firsts[3]  # so that each ends elsewhere
    engine = make_engine(eos=frozenset({eos}))
    to_the_end = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    for params, count, reason in (
        (GREEDY, expected.index(eos) + 1, "stop"),
        (SamplingParams(**to_the_end), 12, "length"),
        (SamplingParams(**to_the_end, stop_token_ids=[stop]), expected.index(stop) + 1, "stop"),
        (SamplingParams(temperature=0, max_tokens=1), 1, "length"),
    ):
        request_id = engine.add(prompt(6), params)
        [output] = serve(engine)[request_id]
        assert (output.token_ids, output.finish_reason) == (expected[:count], reason)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"num_blocks": 3, "block_size": 7}, 21),
        ({"num_blocks": 3, "block_size": 7, "max_model_len": 20}, 20),
        ({"manager": "vllm_v0", "num_blocks": 20, "block_size": 2, "watermark": 0.1}, 36),
        ({"manager": "vllm_v0", "max_num_batched_tokens": 50}, 50),
        ({"chunked_prefill": False, "max_num_batched_tokens": 9}, 9),
        ({"max_num_batched_tokens": 9}, 64),
        ({"num_blocks": 1, "block_size": 1}, 1),
    ],
)
def test_the_longest_sequence(options, longest):
    assert make_engine(**options).max_model_len == longest


@pytest.mark.parametrize("num_host_blocks", [0, 6, 64])
@pytest.mark.parametrize("manager", sorted(MANAGERS))
def test_only_what_is_dropped_is_computed_again(manager, num_host_blocks):
    """With enough host memory each token is computed once; with little, some are dropped."""
    engine = make_engine(
        manager, 16, 4, num_host_blocks=num_host_blocks, enable_prefix_caching=False
    )
    lengths = (20, 9, 14, 17, 6)
    for seed, length in enumerate(lengths):
        engine.add(prompt(length, seed), SamplingParams(max_tokens=40, temperature=0))
    stats = [request.stats for request in engine.requests.values()]
    serve(engine)
    recomputed = sum(stat.num_recomputed_tokens for stat in stats)
    preempts = manager != "contiguous"  # it reserves everything beforehand
    assert (recomputed > 0) == (preempts and num_host_blocks < 64)
    assert any(stat.num_swapped_tokens for stat in stats) == (preempts and num_host_blocks > 0)
    computed = sum(step.num_tokens for step in engine.runner.steps)
    assert computed == sum(lengths) + 5 * (40 - 1) + recomputed


def test_only_what_left_the_cache_is_swapped_in():
    engine = make_engine("vllm_v1", 11, 4, num_host_blocks=16)
    engine.add(prompt(16), SamplingParams(max_tokens=14, temperature=0))
    engine.add(prompt(16), SamplingParams(max_tokens=14, temperature=0.5))
    serve(engine)
    out = sum(len(step.swap_out) for step in engine.runner.steps)
    back = sum(len(step.swap_in) for step in engine.runner.steps)
    assert out > back > 0  # the prompt's blocks stayed with the other request


def test_decoding_goes_on_beside_the_chunks_of_a_prompt():
    engine = make_engine("vllm_v1", 64, 4, max_num_batched_tokens=8)
    engine.add(prompt(4), SamplingParams(max_tokens=30))
    engine.step()
    engine.add(prompt(40, 1), GREEDY)
    for _ in range(5):
        tokens, _ = engine.step()
        assert [token.request_id for token in tokens] == [0]
        assert engine.runner.steps[-1].num_tokens == 8


def test_a_cancelled_beam_search_returns_its_beams():
    params = SamplingParams(beam_width=3, n=2, max_tokens=4)
    expected = alone(prompt(6), params)
    engine = make_engine("vllm_v1", 64)
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
    assert engine.completions(engine.abort(1)) == []  # no token yet
    engine.add(prompt(6), params)
    engine.step()
    search = weakref.ref(engine.abort(2).search)
    engine.runner.steps.clear()
    gc.collect()
    assert search() is None  # though nobody asked for its beams


def test_statistics():
    engine = make_engine("vllm_v1", 64)
    times = itertools.count(100)
    engine.clock = lambda: float(next(times))
    stats = engine.requests[engine.add(prompt(6), SamplingParams(n=2, max_tokens=5))].stats
    assert stats.time_to_first_token is None
    assert stats.time_per_output_token is None
    serve(engine)
    # The clock is read at arrival, when the prompt is scheduled, after each step and at the end.
    assert (stats.arrival_time, stats.first_scheduled_time) == (100, 101)
    assert (stats.first_token_time, stats.finish_time) == (102, 107)
    assert stats.time_to_first_token == 2
    assert stats.time_per_output_token == 5 / 4
    assert (stats.num_output_tokens, stats.longest_output) == (10, 5)
    single = engine.requests[engine.add(prompt(6), SamplingParams(max_tokens=1))].stats
    serve(engine)
    assert single.time_per_output_token is None


@pytest.mark.parametrize(
    ("tokens", "params", "keys", "message"),
    [
        ([], GREEDY, {}, "prompt: has no tokens"),
        ({3: 1}, GREEDY, {}, "prompt: needs a list of token ids, got {3: 1}"),
        ([1, 13], GREEDY, {}, "token ids from 1 to 13; needs ids from 0 to 12"),
        ([3, -1], GREEDY, {}, r"prompt: token_ids\[1\]=-1: a token id is an int in"),
        ([1.0], GREEDY, {}, r"prompt: token_ids\[0\]=1.0: a token id is an int in"),
        (prompt(20), GREEDY, {}, "prompt: has 20 tokens; needs at most 19"),
        ([1], SamplingParams(beam_width=9), {}, "beam_width=9: needs at most max_num_seqs=8"),
        (prompt(9), SamplingParams(beam_width=2), {}, r"may need 10 blocks, all at .* has 5"),
        ([1], SamplingParams(stop="x"), {}, r"stop=\('x',\): texts need a tokenizer"),
        ([1], GREEDY, {"cache_salt": "\ud800"}, "cache_salt='.ud800': cannot be hashed"),
        ([1], GREEDY, {"cache_salt": 7}, r"cache_salt=7: needs str \| bytes"),
        ([1], GREEDY, {"lora_name": 1.5}, r"lora_name=1.5: needs str \| int"),
        ([1], GREEDY, {"mm_inputs": 5}, r"mm_inputs=5: needs a list of \(content_hash"),
        ([1], GREEDY, {"mm_inputs": [("cat", 0, 2)]}, r"mm_inputs\[0\]: offset=0, length=2"),
        ([1], GREEDY, {"priority": 0.5}, "priority=0.5: needs an int"),
        ([1], GREEDY, {"priority": -1}, "priority=-1: needs 0, or a Scheduler"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(tokens, params, keys, message):
    engine = make_engine("vllm_v1", 5, 4)
    with pytest.raises(ValueError, match=message):
        engine.add(tokens, params, **keys)
    assert_idle(engine)
    with pytest.raises(UnsupportedByDesign, match=r"paged.*fork, which beam search needs"):
        make_engine("paged").add([1], SamplingParams(beam_width=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": -1}, "max_num_seqs=-1: needs an int of at least"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: needs an int of at least"),
        ({"num_host_blocks": -1}, "num_host_blocks=-1: needs an int of at least"),
        ({"num_host_blocks": 4, "sliding_window": 9}, "num_host_blocks=4: with a sliding_window"),
        ({"num_host_blocks": 4, "host_blocks": 4}, "num_host_blocks=4: the manager's host_blocks"),
        ({"scheduling": "lifo"}, "policy='lifo': needs one of fcfs, priority"),
    ],
)
def test_options_of_a_scheduler_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


@pytest.mark.parametrize("budget", [5, 64])
def test_prefill_first_computes_prompts_or_decodes(budget):
    """A new prompt is computed at once, in chunks of the budget, and no sequence decodes."""
    engine = make_engine(num_blocks=12, max_num_batched_tokens=budget, prefill_first=True)
    steps = []

    def observe(step, seconds):
        missing = [seq.num_tokens - seq.num_computed_tokens for seq in step.sequences]
        decodes = [
            count + rest == 1 and seq not in step.admitted
            for seq, count, rest in zip(step.sequences, step.counts, missing, strict=True)
        ]
        assert len(set(decodes)) <= 1
        steps.append(("d" if decodes[0] else "p") if decodes else "")

    engine.on_step = observe
    for length in (17, 6, 11, 9):
        engine.add(prompt(length, length), GREEDY)
        for _ in range(6):
            engine.step()
    serve(engine)
    assert "".join(steps).startswith("ppppdd" if budget == 5 else "pdddddp")
    assert_idle(engine)


def test_a_stop_token_costs_a_token_too_many_which_is_found_in_the_cache():
    """K/V of the stop token fill a block, which a prompt that continues there hits."""
    tokens = prompt(5)
    output = make_engine().runner.greedy(tokens, 30)
    count = next(
        n for n in range(3, 30) if (5 + n) % 4 == 0 and output[n - 1] not in output[: n - 1]
    )
    stop = SamplingParams(temperature=0, max_tokens=30, stop_token_ids={output[count - 1]})
    hits = {}
    for overlap in (False, True):
        engine = make_engine(overlap=overlap)
        engine.add(tokens, stop)
        [[completion]] = serve(engine).values()
        assert completion.token_ids == output[:count]
        assert completion.finish_reason is FinishReason.STOP
        computed = sum(step.num_tokens for step in engine.runner.steps)
        assert computed == 5 + count - 1 + overlap
        request = engine.requests[engine.add([*tokens, *output[:count], 1], GREEDY)]
        [[after]] = serve(engine).values()
        assert after.token_ids == engine.runner.greedy([*tokens, *output[:count], 1], 12)
        hits[overlap] = request.stats.num_cached_tokens
    assert hits == {False: 5 + count - 4, True: 5 + count}


@pytest.mark.parametrize("params", [SamplingParams(n=70, max_tokens=2), BEAMS])
def test_add_that_raises_adds_nothing(params):
    """Wherever an interrupt comes, or the policy raises."""
    queue, max_length = {}, 99

    class Queue(POLICIES["lru"]):
        def on_queued(self, position, keys):
            queue[position] = keys
            if not keys:
                del queue[position]
            if len(queue) > max_length:
                raise ZeroDivisionError

    def interrupt(frame, event, _):
        nonlocal lines
        lines -= event == "line"
        if lines < 0:
            raise KeyboardInterrupt
        return interrupt if "serving" in frame.f_code.co_filename else None

    engine, trace = make_engine(policy=Queue()), sys.gettrace()
    for count in itertools.count():
        lines = count
        sys.settrace(interrupt)
        try:
            request_id = engine.add(prompt(9), params)
            break
        except KeyboardInterrupt:
            assert_idle(engine)
            assert not queue
        finally:
            sys.settrace(trace)
    assert count > 50
    assert len(serve(engine)[request_id]) == params.n
    max_length = 5
    with pytest.raises(ZeroDivisionError):
        engine.add(prompt(9), SamplingParams(n=70))
    assert_idle(engine)
    assert not queue


def test_keys_are_part_of_the_content_of_blocks():
    """All tokens are equal; the image is in the second of three blocks."""
    engine = make_engine(num_blocks=200)
    image, hits = [("cat", 5, 2)], []
    skips = SamplingParams(skip_reading_prefix_cache=True)
    for keys in ({}, {"lora_name": 1}, {"cache_salt": "a"}, {"mm_inputs": image}):
        for params in (GREEDY, skips, GREEDY):
            request = engine.requests[engine.add(prompt(10), params, **keys)]
            serve(engine)
            hits.append(request.stats.num_cached_tokens)
    assert hits == [0, 0, 8] * 3 + [4, 0, 8]
    request = engine.requests[engine.add(prompt(10), GREEDY, cache_salt="")]
    engine.step()
    assert request.stats.num_cached_tokens == 8


def test_priorities_as_in_vllm():
    """The scheduler of vLLM 0.33 served this workload in the same steps."""
    engine = make_engine("vllm_v1", 9, 4, max_num_seqs=4, scheduling="priority")
    arrivals = {0: [(6, 9, 1), (7, 9, 1)], 1: [(9, 5, 2)], 3: [(5, 8, 0)], 4: [(8, 4, 0)]}
    arrivals[4].append((3, 4, 1))  # (length, max_tokens, priority) by step
    expected = "0+0 0+1 1+2 5-2 6+3 7-1 8+4 9+1 10-1 12+1 12+5 13+2"  # admitted, preempted
    events = []
    for number in range(16):
        for length, max_tokens, priority in arrivals.get(number, ()):
            params = SamplingParams(temperature=0, max_tokens=max_tokens)
            engine.add([number + length] * length, params, priority=priority)
        engine.step()
        step = engine.runner.steps[-1]
        events += [f"{number}+{seq.request.request_id}" for seq in step.admitted]
        events += [f"{number}-{seq.request.request_id}" for seq in step.preempted]
    assert " ".join(events) == expected
    assert_idle(engine)


@pytest.mark.parametrize("case", ["1 tell", "5 tell", "0 on_queued", "1 release_many"])
def test_a_request_whose_abort_raises_is_not_lost(case):
    """It goes on, or every step raises.  After five steps it is swapped out."""
    steps, hook = case.split()
    options = {"manager": "vllm_v0", "num_blocks": 4, "num_host_blocks": 9} if steps == "5" else {}
    raises, lru = False, POLICIES["lru"]

    def method(self, *arguments):
        return 1 / (not raises) and getattr(lru, hook)(self, *arguments)

    engine = make_engine(policy=type("Raising", (lru,), {hook: method})(), **options)
    request_id = [engine.add(prompt(7, seed), GREEDY) for seed in range(1 + bool(options))][-1]
    for _ in range(int(steps)):
        engine.step()
    assert bool(options) == any(step.swap_out for step in engine.runner.steps)
    raises = True
    with pytest.raises(ZeroDivisionError):
        engine.abort(request_id)
    raises = False
    if hook == "release_many":
        with pytest.raises(InterruptedChange, match="ZeroDivisionError"):
            engine.step()
        engine.restart(make_engine().scheduler)
    serve(engine)
    assert_idle(engine)


READERS = {
    "parallel sampling": {"n": 2, "seed": 1},
    "beam search": {"beam_width": 2},
    "logprobs": {"logprobs": 1},
    "a penalty": {"presence_penalty": 0.5},
    "least tokens": {"min_tokens": 2},
    "a stop string": {"stop": "x"},
}


def test_policies_get_the_time_of_the_engine():
    class Listening(POLICIES["lru"]):
        def tell(self, request):
            times.append(request.time_ms)

    times: list[float] = []
    engine = make_engine(policy=Listening())
    begin = engine.clock()
    engine.add(prompt(9), GREEDY)
    serve(engine)
    assert 1000 * begin <= times[0] <= times[-1] <= 1000 * engine.clock()


@pytest.mark.parametrize("options", READERS.values(), ids=READERS)
def test_tokens_are_read_at_once_for_parameters_that_need_them(options):
    params = SamplingParams(max_tokens=4, ignore_eos=True, **options)
    assert params.reads_tokens
    assert not GREEDY.reads_tokens
    engine = make_engine(overlap=True)
    engine.new_decoder = lambda params: lambda token_ids: (str(token_ids), "")
    engine.sampler.logprobs = lambda logits, row, token, count: {token: 0.0}
    first = engine.add(prompt(9), GREEDY)
    engine.step()
    engine.add(prompt(6, 1), params)
    for _ in range(4):
        engine.step()
        unread = [seq for seq in engine.scheduler.running if seq.num_unknown_tokens]
        assert not unread or params.beam_width
    done = serve(engine)
    assert done[first][0].token_ids == engine.runner.greedy(prompt(9), 12)
    assert_idle(engine)


HOST_POLICIES = ["lru", "arc", "gittins", "lfu", "session_gap", "safeguarded"]
STORES = [("through", True), ("selective", True), ("back", True), ("back", False)]
DESIGNS = {name: (name, {}) for name in sorted(MANAGERS)}
DESIGNS["window"] = "vllm_v1", {"sliding_window": 6, "queue_uncached": True}
_GROUPS = [Group("window", 3), Group(), Group("window", 6), Group("window", 3)]
DESIGNS["groups"] = "vllm_v1", {"groups": _GROUPS, "retention": 0}
DESIGNS["states"] = "vllm_v1", {"groups": [Group(), Group("state"), Group("window", 4)]}
CACHING = [key for key, (name, _) in DESIGNS.items() if MANAGERS[name].prefix_caching]


@pytest.mark.parametrize("design", DESIGNS)
def test_a_text_is_not_found_with_a_token_that_nobody_knows(design):
    """A request fails before its last token is read; others continue its text with every token."""
    name, options = DESIGNS[design]
    for num_steps in range(1, 9):
        engine = make_engine(name, 64, 2, overlap=True, **options)
        request = engine.requests[engine.add([1], GREEDY)]
        for _ in range(num_steps):
            engine.step()
        engine.sampler.faults[request.request_id] = "nan"
        with pytest.warns(RuntimeWarning, match="NaN"):
            serve(engine)
        text = request.sequences[0].token_ids.tolist()
        for token in range(VOCAB_SIZE):
            engine.add([*text, token, 5], GREEDY)
        serve(engine)
        assert_idle(engine)


class RandomServing:
    """Requests come, go, fail and are cancelled at random; memory is scarce.

    Many prompts continue the text of an earlier request, also of one that failed.
    """

    def __init__(self, design: str, overlap: bool, seed: int, **changes) -> None:
        self.random = random.Random(f"{design} {overlap} {seed}")
        pick = self.random.choice
        name, options = DESIGNS[design]
        block_size = pick([1, 2, 2, 4, 5])
        num_blocks = -(-40 // block_size) * len(options.get("groups", "1"))
        self.arguments = name, num_blocks, block_size
        self.options = {
            "eos": frozenset({0}),
            "overlap": overlap,
            "num_host_blocks": 0 if options else pick([0, 4, 30]),
            "max_num_seqs": pick([1, 3, 5]),
            "max_num_batched_tokens": pick([1, 4, 16, 40]) if name in CHUNKED else 40,
            "enable_prefix_caching": pick([False, True, True, True]),
            "prefill_first": pick([False, True]),
            "scheduling": pick(["fcfs", "priority"]),
        } | options
        if MANAGERS[name].prefix_caching and not changes and pick([False, True]):
            self.options |= {"num_host_blocks": 0, "enable_prefix_caching": True}
            self.options |= {"host_blocks": pick([1, 5, 40]), "host_policy": pick(HOST_POLICIES)}
            self.options["store"], self.options["inclusive"] = pick(STORES)
        self.options |= changes
        self.engine = make_engine(*self.arguments, **self.options)
        self.expected: dict[int, list[list[int]]] = {}
        self.texts: list[tuple[list[int], dict]] = [(prompt(24, seed), {}) for seed in range(3)]
        self.preemptions: Counter[int] = Counter()

    def run(self, num_adds: int = 1) -> None:
        for _ in range(30 * num_adds):
            actions = [self.add] * num_adds + [self.step] * 3
            if self.engine.has_unfinished:
                actions += [self.abort, self.fail]
            self.random.choice(actions)()
            self.check_state()
        for _ in range(3000):
            if self.engine.has_unfinished:
                self.step()
        assert_idle(self.engine)

    def add(self) -> None:
        engine, pick, randint = self.engine, self.random.choice, self.random.randint
        text, keys = pick([self.texts[-1], pick(self.texts)])
        text = text[: pick([len(text), randint(0, len(text))])]
        tokens = [*text, *(randint(0, VOCAB_SIZE - 1) for _ in range(randint(0, 4)))]
        options, width = {"max_tokens": randint(1, 12)}, pick([1, 2, 3, 7])
        options["skip_reading_prefix_cache"] = self.random.random() < 0.1
        kinds = [{"temperature": 0}, {"n": width, "ignore_eos": True}]
        if engine.manager.can_fork:
            kinds.append({"beam_width": width, "n": min(width, 2)})
        params = SamplingParams(**pick(kinds), **options)
        keys = pick([keys] * 9 + [{"cache_salt": ""}, {"cache_salt": "a"}, {"lora_name": 1}])
        priority = pick([-1, 0, 0, 1]) if engine.scheduler.policy == "priority" else 0
        try:
            request_id = engine.add(tokens, params, priority=priority, **keys)
        except ValueError as error:
            assert params.beam_width or "prompt: has" in str(error)  # noqa: PT017
            return
        limits = {"max_model_len": engine.max_model_len, "eos": engine.eos_token_ids}
        outputs = alone(tokens, params, **keys, **limits)
        self.expected[request_id] = [output.token_ids for output in outputs]

    def abort(self) -> None:
        request = self.engine.abort(self.random.choice(sorted(self.engine.requests)))
        assert any(seq.finish_reason is FinishReason.ABORT for seq in request.sequences)
        self.check_ended(request)

    def fail(self) -> None:
        if self.random.random() < 0.1:
            self.engine.runner.fails = True
        else:
            running = [seq.request.request_id for seq in self.engine.scheduler.running]
            request_id = self.random.choice(running or sorted(self.engine.requests))
            self.engine.sampler.faults[request_id] = self.random.choice(["nan", "nan", "error"])

    def step(self) -> None:
        """A step keeps its budgets and serves the first request, or brings beams of it back."""
        engine, steps = self.engine, self.engine.runner.steps
        first = next(iter([*engine.scheduler.running, *engine.scheduler.waiting]), None)
        num_steps, finished = len(steps), []
        try:
            with warnings.catch_warnings(action="ignore"):  # of requests that fail
                _, finished = engine.step()
        except Injected:
            fresh = make_engine(*self.arguments, **self.options)
            for request in engine.restart(fresh.scheduler):
                self.check_ended(request)
            return
        if len(steps) > num_steps:
            self.check_computed(first, steps[-1])
        else:
            assert finished or first is None, "it read what ended all requests"
        for request in finished:
            self.check_ended(request)

    def check_computed(self, first: ScheduledSequence | None, step: Step) -> None:
        scheduler = self.engine.scheduler
        assert step.num_tokens <= scheduler.max_num_batched_tokens
        assert len(step.sequences) <= scheduler.max_num_seqs
        served = {seq.request for seq in (*step.sequences, *step.admitted)}
        waits = scheduler.prefill_first or self.engine.overlap  # for its last token to be read
        if first and first.request.search and scheduler.policy == "priority":
            waits = True  # for beams behind a request of smaller priority
        assert first is None or first.request in served or waits
        assert first not in step.preempted or first.request.search
        self.preemptions.update(seq.request.request_id for seq in step.preempted)

    def check_ended(self, request: Request) -> None:
        """It has the tokens that it gets alone, or the first of them."""
        outputs, stats = self.engine.completions(request), request.stats
        expected = self.expected[request.request_id]
        self.texts += ((seq.token_ids.tolist(), keys_of(seq)) for seq in request.sequences)
        if request.error is not None:
            assert request.request_id in self.engine.sampler.faults
        if stats.was_aborted:
            for output in outputs if request.search is None else ():
                assert output.token_ids == expected[output.index][: len(output.token_ids)]
            return
        assert [output.token_ids for output in outputs] == expected
        assert [output.index for output in outputs] == list(range(request.params.n))
        lengths, scheduled = list(map(len, expected)), stats.first_scheduled_time
        assert stats.arrival_time <= scheduled <= stats.first_token_time <= stats.finish_time
        reads = not request.params.skip_reading_prefix_cache
        assert 0 <= stats.num_cached_tokens < len(request.prompt_token_ids) * reads + 1
        assert stats.num_preemptions == self.preemptions[request.request_id]
        assert (stats.num_output_tokens, stats.longest_output) == (sum(lengths), max(lengths))

    def check_state(self) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        engine.manager.check_invariants()
        running, waiting = scheduler.running, list(scheduler.waiting)
        num_seqs = sum(1 + seq.num_pending_forks for seq in running)
        assert num_seqs <= scheduler.max_num_seqs
        sequences = [*running, *waiting]
        assert len({seq.seq_id for seq in sequences}) == len(sequences)
        orders = [seq.order[:2] for seq in sequences]  # of requests
        if scheduler.policy == "priority":
            orders = orders[: len(running)]
        assert orders == sorted(orders), "one has overtaken another"
        if engine.manager.tier is not None or engine.manager.can_swap:
            return
        held = sum(len(seq.host_blocks) for seq in sequences)
        assert held + len(scheduler.free_host_blocks) == len(engine.runner.host_blocks)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("design", DESIGNS)
def test_no_history_gives_a_sequence_the_cache_of_another(design, overlap, pytestconfig):
    for seed in range(20 if pytestconfig.getoption("--all") else 10):
        RandomServing(design, overlap, seed).run()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_sequences_come_back_from_host_memory_of_the_manager(overlap):
    """Samples and beams share blocks there."""
    loads = []
    for seed in range(30, 66):
        changes = {"num_host_blocks": 30, "watermark": [0.01, 0.2][seed % 2], "max_num_seqs": 8}
        serving = RandomServing("vllm_v0", overlap, seed, **changes)
        serving.run(num_adds=3)
        loads += [step.swap_in for step in serving.engine.runner.steps if step.swap_in]
    assert len(loads) > 50
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 9, "num_host_blocks": 4}
    with pytest.raises(ValueError, match=r"num_host_blocks=4: manager 'vllm_v0' swaps to its own"):
        Scheduler(serving.engine.manager, **options)


@pytest.mark.parametrize(("store", "inclusive"), STORES)
@pytest.mark.parametrize("design", CACHING)
def test_a_tier_changes_no_text(design, store, inclusive):
    """Beginnings of three texts are served.  Some requests are aborted after they are loaded."""
    (name, options), num_loads = DESIGNS[design], 0
    for seed in range(6):
        rng = random.Random(f"{design} {store} {inclusive} {seed}")
        size, factor = rng.choice([1, 2, 3]), 1 + ("groups" in options)
        engine = make_engine(
            name, -(-20 // size) * factor, size, overlap=rng.choice([False, True]),
            max_num_seqs=3, max_num_batched_tokens=rng.choice([4, 40]) if name in CHUNKED else 40,
            store=store, inclusive=inclusive, host_policy=rng.choice(HOST_POLICIES),
            host_blocks=rng.choice([4, 20, 60]) * factor, **options,
        )  # fmt: skip
        texts, expected = [[text, *engine.runner.greedy([text], 40)] for text in range(3)], {}
        for _ in range(60):
            if len(engine.requests) < 4 and rng.random() < 0.6:
                length, count = rng.randint(1, min(16, engine.max_model_len - 4)), rng.randint(1, 4)
                text, n = rng.choice(texts), rng.choice([1, 1, 2])
                params = SamplingParams(temperature=n - 1, n=n, max_tokens=count)
                expected[engine.add(text[:length], params)] = text[length : length + count]
            for request in engine.step()[1]:
                [output, *others] = engine.completions(request)
                assert others or output.token_ids == expected[request.request_id]
            step = engine.runner.steps[-1] if engine.runner.steps else Step()
            loading = {seq.request.request_id for seq in step.admitted if step.swap_in}
            for request_id in [*engine.requests.keys() & loading] * (rng.random() < 0.3):
                engine.abort(request_id)
        serve(engine)
        assert_idle(engine)
        num_loads += engine.manager.stats.loaded_blocks
    assert num_loads > 50
