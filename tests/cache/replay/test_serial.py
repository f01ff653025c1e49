"""The replay against its definition written out, reference figures and libCacheSim."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cache
from cache import Group
from cache.policies import POLICIES, EvictionPolicy, PriorityPolicy, make_policy, record
from cache.traces.trace import Trace
from tests.cache.prefix_traces import hits, prefix_traces, simulate_both, trace_of

# Smallest is evicted first; then the deeper block of its prompt.
DEFINITIONS = {
    "lru": lambda b: b["accessed"],
    "fifo": lambda b: b["inserted"],
    "lfu": lambda b: (b["accesses"], b["accessed"]),
    "belady": lambda b: -b["next_use"],
    "mru": lambda b: -b["accessed"],
}


def replay_by_definition(trace: Trace, policy: str, capacity: int) -> tuple[list[int], int]:
    """Hits per request and evictions, as ``cache/replay/serial.py`` defines them."""
    requests = [list(request.block_ids)[:capacity] for request in trace]
    pool: dict[int, dict] = {}
    hits, evictions = [], 0
    for now, blocks in enumerate(requests):
        hit = 0
        while hit < len(blocks) and blocks[hit] in pool:
            hit += 1
        hits.append(hit)
        for depth, block in enumerate(blocks):
            if block in pool:
                continue
            if len(pool) == capacity:
                unpinned = [b for b in pool if b not in blocks]
                order = DEFINITIONS[policy]
                del pool[min(unpinned, key=lambda b: (order(pool[b]), -pool[b]["depth"]))]
                evictions += 1
            pool[block] = {"depth": depth, "inserted": now, "accesses": 0}
        for block in blocks:
            later = (t for t in range(now + 1, len(requests)) if block in requests[t])
            pool[block]["accessed"] = now
            pool[block]["accesses"] += 1
            pool[block]["next_use"] = next(later, math.inf)
    return hits, evictions


def in_python(policy: str, /, **options) -> EvictionPolicy:
    """The same policy in a form that the replay does not compile."""
    base = POLICIES[policy]
    return type("InPython", (base,), {"evict": lambda self: base.evict(self)})(**options)


@pytest.mark.parametrize("policy", DEFINITIONS)
@given(trace=prefix_traces, capacity=st.integers(1, 12))
def test_replay_is_its_definition(policy, trace, capacity):
    hits, evictions = replay_by_definition(trace, policy, capacity)
    result = simulate_both(trace, policy, in_python(policy), capacity_blocks=capacity)
    assert (result.hits.tolist(), result.hit_blocks) == (hits, sum(hits))
    assert result.evictions == evictions
    assert result.hit_tokens == 4 * sum(hits)
    assert result.block_hit_rate == sum(hits) / trace.num_block_references


def too_large_after_31_requests(block):
    return block.accessed * 2**48 + block.depth


@pytest.mark.parametrize("num_requests", [31, 300])
def test_priorities_that_float64_would_round_run_in_python(num_requests):
    priority = too_large_after_31_requests
    trace = cache.make_workload("multi_turn_chat", seed=3, num_requests=num_requests)
    static = type("Static", (PriorityPolicy,), {"priority": staticmethod(priority)})()
    bound = type("Bound", (PriorityPolicy,), {"priority": lambda self, block: priority(block)})()
    capacity = trace.num_unique_blocks // 10
    compiled, interpreted = (
        cache.simulate(trace, policy=policy, capacity_blocks=capacity) for policy in (static, bound)
    )
    assert (compiled.compiled, interpreted.compiled) == (num_requests == 31, False)
    assert compiled.hits.tolist() == interpreted.hits.tolist()


class Informed(PriorityPolicy):
    """Depends on every fact that a policy gets."""

    ghost_ratio = 1.5

    def __init__(self, weight: float = 3.0) -> None:
        self.weight = weight

    def own_state(self, capacity):
        return record(weight=self.weight, capacity=capacity, calls=0, longest=1)

    @staticmethod
    def priority(block, own):
        own.calls += 1
        interval = own.capacity if math.isnan(block.interval) else block.interval
        own.longest = max(own.longest, interval)
        is_last = block.depth == block.request.prompt_blocks - 1
        facts = block.request.output_tokens + block.request.prompt_tokens / 8
        return (
            block.accessed + own.weight * block.total_accesses - 5 * interval / own.longest
            - 4 * is_last + 2 * block.children + facts / 100 + own.calls % 7
            + block.request.time_ms % 11
        )  # fmt: skip


@given(trace=prefix_traces, capacity=st.integers(1, 12), weight=st.sampled_from([0.0, 3.0, 50.0]))
def test_facts_ghosts_and_a_state_of_its_own_are_the_same_compiled(trace, capacity, weight):
    by_hand = type("ByHand", (Informed,), {"evict": lambda self: Informed.evict(self)})
    simulate_both(trace, Informed(weight), by_hand(weight), capacity_blocks=capacity)


def test_the_history_of_a_block_by_hand():
    seen = {}

    class Witness(PriorityPolicy):
        ghost_ratio = 1.0

        def priority(self, block):
            seen.setdefault(block.block, []).append(
                (block.accesses, block.total_accesses, block.interval, block.children)
            )
            return block.accessed

    # Two blocks fit.  4 evicts 1 and 3 evicts 0; 0 returns as a ghost, 1 was forgotten by then.
    paths = [(0, 1), (0,), (4,), (3,), (0,), (0, 1)]
    cache.simulate(trace_of(paths), policy=Witness(), capacity_blocks=2)
    first_block, second_block = seen[0], seen[1]
    assert first_block[0][:2] == (1, 1)
    assert math.isnan(first_block[0][2])
    assert first_block[1:] == [(2, 2, 1, 1), (1, 3, 3, 0), (2, 4, 1, 1)]
    assert first_block[0][3] == 1
    assert [entry[:2] for entry in second_block] == [(1, 1), (1, 1)]


CHAT = cache.make_workload("multi_turn_chat", seed=1, num_requests=60)
RATIOS, GHOSTS = st.floats(0.01, 0.99), st.floats(0, 3) | st.just(1e308)
OPTIONS = {
    "slru": {"segments": st.integers(1, 6)},
    "lru_k": {"k": st.integers(1, 4)},
    "two_q": {"in_ratio": RATIOS, "out_ratio": GHOSTS},
    "s3fifo": {
        "small_ratio": RATIOS, "ghost_ratio": GHOSTS, "promote_after": st.integers(1, 3)
    },
    "mq": {
        "num_queues": st.integers(1, 5), "life_time": st.integers(1, 30),
        "ghost_ratio": GHOSTS,
    },
    "random": {"seed": st.integers()},
    "random_leaf": {"seed": st.integers()},
    "marconi": {"alpha": st.floats(0, 9)},
    "workload_aware": {"max_turn": st.integers(1, 20)},
    "retention": {
        "ranges": st.lists(
            st.builds(
                lambda first, blocks, *rest: (first, blocks and first + blocks, *rest),
                st.integers(0, 3), st.sampled_from([None, 1, 2]), st.integers(0, 100),
                st.sampled_from([None, 0, 2, 9.5]),
            ),
            max_size=3,
        )
    },
    "queue_informed": {"policy": st.sampled_from(["lru", "sieve", "marconi"])},
    "safeguarded": {"budget": st.sampled_from([0, 0.02, 0.3])},
}  # fmt: skip


@pytest.mark.parametrize("policy", [*sorted(POLICIES), "safeguarded random_leaf"])
@given(trace=prefix_traces, capacity=st.integers(1, 12), data=st.data())
def test_every_policy_is_the_same_compiled_and_keeps_the_books(
    policy, trace, capacity, data, pytestconfig
):
    policy, *wrapped = policy.split()
    if wrapped and not pytestconfig.getoption("--all"):
        pytest.skip("compiling it takes 8 seconds")
    options = data.draw(st.fixed_dictionaries({}, optional=OPTIONS.get(policy, {})))
    options |= {"policy": wrapped[0]} if wrapped else {}
    compiled, slow = (make(policy, **options) for make in (make_policy, in_python))
    result = simulate_both(trace, compiled, slow, capacity_blocks=capacity)
    unbounded = trace.infinite_cache_hit_rate * trace.num_block_references
    assert 0 <= result.hit_blocks <= round(unbounded)
    assert result.evictions <= max(trace.num_block_references - result.hit_blocks - capacity, 0)
    if capacity >= trace.num_unique_blocks:
        assert result.evictions == 0
        assert result.hit_blocks == round(unbounded)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_object_starts_anew_each_time(policy):
    reused = in_python(policy)
    first, second, fresh, compiled = (
        hits(CHAT, one, 200) for one in (reused, reused, in_python(policy), policy)
    )
    assert first == second == fresh == compiled


def test_classes_of_one_name_share_no_code():
    fifo = type("mru", (POLICIES["fifo"],), {})()
    own = cache.simulate(CHAT, policy=fifo, capacity_blocks=200)
    assert own.compiled
    assert own.hits.tolist() == hits(CHAT, "fifo", 200) != hits(CHAT, "mru", 200)


LIBCACHESIM = {
    "lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "belady": "Belady", "slru": "SLRU",
    "lru_k": "LRUK", "two_q": "TwoQ", "arc": "ARC", "s3fifo": "S3FIFO", "sieve": "Sieve",
    "mq": "MQ",
}  # fmt: skip


@pytest.mark.parametrize("policy", LIBCACHESIM)
@pytest.mark.parametrize(("skew", "capacity"), [(1.1, 40), (1.4, 200)])
def test_single_block_requests_hit_as_in_libcachesim(policy, skew, capacity):
    """Requests of one block leave nothing of prefixes: an ordinary cache, judged by its field."""
    libcachesim = pytest.importorskip("libcachesim")
    generator = np.random.default_rng(int(10 * skew))
    stream = (generator.zipf(skew, 3000) % 1500).tolist()
    trace = Trace.from_requests([(t, 1, 1, [b]) for t, b in enumerate(stream)], name="zipf")
    next_use, upcoming = [0] * len(stream), {}
    for time in range(len(stream) - 1, -1, -1):
        next_use[time] = upcoming.get(stream[time], 2**62)
        upcoming[stream[time]] = time
    other, hits = getattr(libcachesim, LIBCACHESIM[policy])(capacity), 0
    for time, block in enumerate(stream):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = block, 1, time
        request.next_access_vtime = next_use[time]
        hits += other.get(request)
    ours = cache.simulate(trace, policy=in_python(policy), capacity_blocks=capacity)
    assert ours.hit_blocks == hits > 0


ROOT = Path(__file__).parents[3]
MOONCAKE = "mooncake_conversation_512"
PUBLISHED = {
    "lru": (0.0525, 0.1958, 0.2789),
    "fifo": (0.0513, 0.1753, 0.2481),
    "lfu": (0.0582, 0.1267, 0.1949),
    "belady": (0.2398, 0.3664, 0.3664),
}


COMMITTED = pd.read_csv(ROOT / "results/eviction/cpu/rows.csv").query(
    f"trace == '{MOONCAKE}' and capacity_fraction == 0.01"
)


@pytest.fixture(scope="module")
def mooncake():
    return cache.load_trace(ROOT / f"experiments/traces/{MOONCAKE}.jsonl.zst")


@pytest.mark.parametrize("row", COMMITTED.to_dict("records"), ids=COMMITTED["policy"])
def test_hit_rates_are_those_of_the_committed_table(row, mooncake):
    policy, capacity = row["policy"], row["capacity_blocks"]
    result = cache.simulate(mooncake, policy=policy, capacity_blocks=capacity)
    assert result.block_hit_rate == pytest.approx(row["block_hit_rate"], rel=1e-9)


@pytest.mark.parametrize("policy", PUBLISHED)
def test_reference_hit_rates_of_mooncake_conversation(policy, mooncake):
    rates = tuple(
        round(cache.simulate(mooncake, policy=policy, capacity_blocks=blocks).block_hit_rate, 4)
        for blocks in (1827, 9139, 18279)
    )
    assert rates == PUBLISHED[policy]


@pytest.mark.parametrize(
    ("lengths", "block_size", "tokens", "rate"), [((6, 6), 4, 6, 0.5), ((5, 50), None, None, None)]
)
def test_hit_tokens_stop_at_the_prompts_length_and_need_a_block_size(
    lengths, block_size, tokens, rate
):
    blocks = [0, 1] if block_size else [0]
    rows = [(time, length, 1, blocks) for time, length in enumerate(lengths)]
    trace = Trace.from_requests(rows, name="t", block_size=block_size)
    result = cache.simulate(trace, policy="lru", capacity_blocks=2)
    assert trace.block_size == block_size
    assert (result.hit_blocks, result.hit_tokens) == (len(blocks), tokens)
    assert result.token_hit_rate == rate


@pytest.mark.parametrize("policy", ["lru", "arc", "safeguarded"])
def test_a_part_is_counted_after_a_warm_start(policy):
    trace = cache.make_workload("rag", seed=1, num_requests=120)
    whole = cache.simulate(trace, policy=policy, capacity_blocks=500)
    warm, cold = (
        cache.simulate(trace, policy=policy, capacity_blocks=500, counted=part)
        for part in (slice(40, 100), slice(40))
    )
    assert whole.hits.tolist()[:100] == cold.hits.tolist() + warm.hits.tolist()
    assert whole.hit_blocks == whole.hits.sum()
    assert warm.hit_blocks == warm.hits.sum() > 0
    assert warm.num_requests == 60
    part = trace[40:100]
    assert warm.block_hit_rate == warm.hits.sum() / part.num_block_references
    assert warm.hit_tokens <= warm.input_tokens == part.input_lengths.sum()
    assert 0 < cold.evictions + warm.evictions < whole.evictions


WINDOWS = [Group(), Group("window", 5)]
UNKNOWN_SIZE = Trace.from_requests([(0, 1, 1, [0])], name="x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "lruu"}, "policy='lruu' is unknown; choose from arc, belady"),
        ({"policy": "lru", "size": 3}, "policy 'lru' has no option size"),
        ({"policy": "lru", "capacity_blocks": 0}, "capacity_blocks=0: needs an int of"),
        ({"policy": "lru", "capacity_blocks": 1.5}, "capacity_blocks=1.5: needs an int of"),
        ({"policy": 7}, "policy=7: needs a name or an EvictionPolicy object"),
        ({"policy": make_policy("slru"), "segments": 2}, "options segments were given with"),
        ({"counted": 3}, "counted=3: needs a slice of requests without a step"),
        ({"counted": slice(0, 9, 2)}, "counted=slice.*: needs a slice of requests without a step"),
        ({"trace": Trace.from_requests([(0, 9, 1, [])], name="a")}, "trace 'a' has lengths only"),
        ({"retention": 4}, "retention=4: needs groups"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: needs"),
        ({"groups": WINDOWS[1:]}, "groups=.*needs a group of kind 'full'"),
        ({"groups": WINDOWS, "retention": 6}, "retention=6: needs a multiple of block_size=4"),
        ({"groups": WINDOWS, "policy": "belady"}, "'belady' needs the future.*groups=.*needs full"),
        ({"groups": WINDOWS, "trace": UNKNOWN_SIZE}, "'x' has blocks of unknown"),
    ],
)
def test_bad_arguments(arguments, message):
    valid = {"trace": trace_of([(0,)]), "policy": "lru", "capacity_blocks": 4}
    with pytest.raises(ValueError, match=message):
        cache.simulate(**valid | arguments)


@pytest.mark.parametrize(
    ("victim", "given"),
    [(lambda pool: 2, "2"), (lambda pool: 7, "7"), (lambda pool: "0", "'0'")],
    ids=["in-use", "not-in-the-pool", "not-a-block"],
)
def test_a_policy_that_evicts_what_it_must_not_is_named(victim, given):
    broken = type("Broken", (POLICIES["fifo"],), {"evict": victim})()
    trace = trace_of([(0, 1), (2, 3)])  # the second request brings 2 and 3 into a pool of 3
    with pytest.raises(RuntimeError, match=rf"'Broken': evict\(\) gave {given}, not a released"):
        cache.simulate(trace, policy=broken, capacity_blocks=3)


def with_import(block):
    import math

    return math.log2(block.accessed)


def with_f_string(block):
    return float(f"{block.accessed}")


@pytest.mark.parametrize("priority", [with_import, with_f_string])
def test_a_priority_that_numba_cannot_compile_runs_in_python_with_a_note(priority):
    own = type("Own", (PriorityPolicy,), {"priority": staticmethod(priority)})()
    trace = trace_of([(0, 1), (2, 3), (0, 1)])
    with pytest.warns(UserWarning, match="Own runs in Python: numba: ."):
        result = cache.simulate(trace, policy=own, capacity_blocks=3)
    assert not result.compiled
    assert result.hit_blocks == cache.simulate(trace, policy="lru", capacity_blocks=3).hit_blocks


@pytest.mark.parametrize("policy", ["lru", "gittins", "s3fifo"])
def test_a_pool_larger_than_any_trace(policy):
    trace = trace_of([(0, 1), (0, 1)])
    result = cache.simulate(trace, policy=policy, capacity_blocks=2**63 - 1)
    assert (result.hit_blocks, result.capacity_blocks) == (2, 2**63 - 1)
