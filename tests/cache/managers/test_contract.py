"""The contract of all managers, and faults of real systems."""

import copy
import pickle
import time

import numpy as np
import pytest
from manager_helpers import (
    CACHING,
    FORKING,
    NAMES,
    cached,
    grow,
    manager_of,
    started,
    state_of,
    used,
)  # fmt: skip

from cache import CacheStats, Sequence, UnsupportedByDesign
from cache.managers import MANAGERS
from cache.managers.base import Hit
from cache.policies import POLICIES

every_manager = pytest.mark.parametrize("name", NAMES)
caching_manager = pytest.mark.parametrize("name", CACHING)
forking_manager = pytest.mark.parametrize("name", FORKING)


def test_the_designs_differ_in_what_they_offer():
    features = (
        "prefix_caching", "can_chunk", "can_fork", "can_look_ahead", "can_swap", "can_reset",
    )  # fmt: skip
    offered = {name: [f for f in features if getattr(MANAGERS[name], f)] for name in NAMES}
    assert offered == {
        "contiguous": ["can_chunk"],
        "paged": ["can_chunk"],
        "nano_vllm": ["prefix_caching", "can_chunk"],
        "vllm_v0": ["prefix_caching", "can_fork", "can_swap"],
        "vllm_v1": ["prefix_caching", "can_chunk", "can_fork", "can_look_ahead", "can_reset"],
        "radix": ["prefix_caching", "can_chunk", "can_fork", "can_reset"],
    }


NOT_OFFERED = {
    "fork": ("can_fork", lambda m, seq: m.fork(seq, seq.fork(1))),
    "swap_out": ("can_swap", lambda m, seq: m.swap_out(seq)),
    "swap_in": ("can_swap", lambda m, seq: m.swap_in(seq)),
    "can_swap_out": ("can_swap", lambda m, seq: m.can_swap_out(seq)),
    "can_swap_in": ("can_swap", lambda m, seq: m.can_swap_in(seq)),
    "num_lookahead_tokens": ("can_look_ahead", lambda m, _: m.admit(Sequence(1, [1]), Hit(), 1, 1)),
    "reset_prefix_cache": ("can_reset", lambda m, seq: m.reset_prefix_cache()),
    "chunks": ("can_chunk", lambda m, seq: m.allocate_slots(Sequence(1, [1, 2]), 1)),
}
CHILDREN = [
    ([*range(7), 9], {}), (range(7), {}), (range(8), {"lora_name": "x"}),
    (range(8), {"cache_salt": "x"}), (range(8), {"mm_inputs": [("x", 0, 1)]}),
]  # fmt: skip


def refusals(manager, seq, full, new):
    """Messages and calls that must raise them: ``seq`` has slots for 8 of 14 tokens."""
    for feature, (offered, call) in NOT_OFFERED.items():
        if not getattr(manager, offered):
            yield f"'{manager.name}' does not offer {feature}", call, manager, seq
    yield "sequence 0 holds blocks already; free it first", manager.allocate, seq
    for call in (manager.append, manager.can_append, manager.free, manager.block_table):
        yield "sequence 1 holds no blocks", call, new
    yield "end=4: 4 of the 4 tokens .* have a slot; .*append", manager.append, full
    for end in (8, 15, -1):
        yield f"end={end}: 8 of the 14 tokens .* int from 9 to 14", manager.append, seq, end
    for end in (9.5, True, "9"):
        yield f"end='?{end}'?: needs an int", manager.append, seq, end
    for target, start in ((seq, 8), (new, 0)):
        for count in (-1, -100, 0, 7):
            says = f"num_new_tokens={count}: {start} of the .* needs 1 to 6 new ones"
            yield says, manager.allocate_slots, target, count
        for count in (1.5, 1.0, "1", True, None):
            yield f"num_new_tokens='?{count}'?: needs an int", manager.allocate_slots, target, count
    for limit in (-1, 1.5) if manager.prefix_caching else ():
        yield f"limit={limit}: needs an int of at least 0", manager.find, new, limit
    if manager.can_fork:
        yield "sequence 1 holds no blocks", manager.fork, new, Sequence(2, range(6))
        yield "sequence 0 holds blocks already", manager.fork, seq, seq
        for tokens, keys in CHILDREN:
            says = "child: the first 8 .* must equal the parent's, .* 0"
            yield says, manager.fork, seq, Sequence(2, tokens, **keys)


@every_manager
def test_a_refused_call_says_why_and_changes_nothing(name):
    manager = manager_of(name)
    seq, full = started(manager, 0, range(8)), started(manager, "full", range(50, 54))
    for token in range(6):
        seq.append_token(token)
    before = state_of(manager)
    for says, call, *arguments in refusals(manager, seq, full, Sequence(1, range(6))):
        error = UnsupportedByDesign if "does not offer" in says else ValueError
        with pytest.raises(error, match=says):
            call(*arguments)
        assert state_of(manager) == before, says
    manager.allocate_slots(seq, np.int64(6))
    assert type(seq.num_computed_tokens) is int


@caching_manager
def test_computed_blocks_precede_the_first_chunk(name):
    manager = manager_of(name)
    used(manager, 0, range(9))
    seq = Sequence(1, [*range(8), *range(50, 58)])
    assert manager.get_computed_blocks(seq) == ([0, 1], 8)
    for stale in ([1, 0], [0, 9], [0, 1, 2], [1]):
        before = state_of(manager)
        with pytest.raises(ValueError, match=r"computed_blocks=.*these do not hold the prefix"):
            manager.allocate_slots(seq, 16 - 4 * len(stale), stale)
        assert state_of(manager) == before
    with pytest.raises(ValueError, match=r"num_new_tokens=9: 8 of the 16 .* needs 1 to 8 new ones"):
        manager.allocate_slots(seq, 9, [0, 1])
    manager.allocate_slots(seq, 12, [0])  # part of what was found will do
    assert manager.block_table(seq)[0] == 0
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (4, 16)
    assert manager.stats.hit_tokens == 4
    seq.append_token(1)
    with pytest.raises(ValueError, match="can only go in front of its first chunk"):
        manager.allocate_slots(seq, 1, [0])
    manager.check_invariants()


@every_manager
def test_sequences_are_identified_by_seq_id(name):
    manager = manager_of(name)
    seq = started(manager, "a", range(6))
    other = Sequence("a", range(9))
    before = manager.block_table(seq)
    manager.block_table(seq).append(9)
    assert manager.block_table(other) == before, "a copy"
    manager.append(other)
    assert other.num_computed_tokens == 9
    assert len(manager.block_table(seq)) == 3
    manager.free(Sequence("a", [1]))
    assert other.num_computed_tokens == 0
    assert manager.num_free_blocks == 10
    manager.check_invariants()


@every_manager
def test_statistics_are_a_snapshot_of_what_was_counted(name):
    manager = manager_of(name, 8)
    sizes = "num_blocks=8, block_size=4, num_free_blocks=8, num_sequences=0"
    assert repr(manager) == f"{type(manager).__name__}({sizes})"
    before = manager.stats
    assert before.token_hit_rate == before.block_hit_rate == 0
    used(manager, 0, range(8))
    started(manager, 1, range(11))
    hits = 2 if name in CACHING else 0
    assert before == CacheStats()
    assert (manager.stats.token_hit_rate, manager.stats.block_hit_rate) == (4 * hits / 19, hits / 4)
    usage = manager.memory_usage()
    assert (usage.used, usage.num_slots) == (11, 32)


@every_manager
def test_a_hit_costs_the_same_in_a_free_queue_thirty_times_longer(name):
    def seconds(num_blocks: int) -> float:
        manager, count = manager_of(name, num_blocks, 16), num_blocks // 32 - 1
        sequences = [Sequence(i, range(i * 512, i * 512 + 511)) for i in range(count)]
        for call in (manager.allocate, manager.free):
            for seq in sequences:
                call(seq)
        times = []
        for seq in sequences[count // 2 - 8 : count // 2 + 8]:
            began = time.thread_time()
            manager.allocate(seq)
            manager.free(seq)
            times.append(time.thread_time() - began)
        return min(times)

    assert seconds(32_768) < 8 * seconds(1_024)  # what is O(pool) would be 32 times


@pytest.mark.parametrize("child_first", [True, False])
@forking_manager
def test_worked_example_of_parallel_sampling(name, child_first):
    manager = manager_of(name)
    one = started(manager, "one", range(6))
    other = one.fork("other")
    manager.fork(one, other)
    assert manager.block_table(other) == manager.block_table(one) == [0, 1]
    assert manager.num_free_blocks == 8
    assert other.num_computed_tokens == other.num_cached_tokens == 6

    first, second = (other, one) if child_first else (one, other)
    assert grow(manager, first, 77) == [(1, 2)]
    assert manager.block_table(first) == [0, 2]
    assert manager.num_free_blocks == 7
    assert grow(manager, second, 78) == []
    assert manager.block_table(second) == [0, 1]
    assert manager.stats.copied_blocks == 1


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        pytest.param("lfu", "b", id="hit counters are incremented"),  # a was used three times
        pytest.param("fifo", "a", id="metadata of a hit is kept"),  # a came in first
    ],
)
@caching_manager
def test_a_policy_keeps_the_history_of_a_revived_block(name, policy, gone):
    """A is computed and hit twice, then B is computed, then one of them is evicted."""
    manager = manager_of(name, 3, 2, policy=policy)
    a, b, c = ([i, i, 0] for i in range(3))
    for i, prompt in enumerate([a, a, a, b, c]):
        seq = Sequence(i, prompt)
        assert manager.allocate(seq) == (2 if i in (1, 2) else 0)
        manager.free(seq)
    assert [which for which, p in (("a", a), ("b", b)) if not cached(manager, p[:2])] == [gone]


@caching_manager
def test_a_policy_that_evicts_a_block_it_does_not_have_is_named(name):
    class Wrong(POLICIES["mq"]):
        name = "wrong"

        def evict(self):
            super().evict()
            return -1

    manager = manager_of(name, 4, policy=Wrong())
    seq = Sequence(0, range(9))
    manager.allocate(seq)
    manager.free(seq)
    with pytest.raises(RuntimeError, match=r"policy 'wrong': evict\(\) gave -1, not a released"):
        manager.allocate(Sequence(1, range(50, 59)))


@caching_manager
def test_worked_example_of_an_image(name):
    text = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551]
    prompt = [*text, *[10] * 41, 4]
    manager = manager_of(name, 20, 16)
    cat, dog, cat_again = (
        Sequence(i, prompt, mm_inputs=[(image, 8, 41)])
        for i, image in enumerate(["cat", "dog", "cat"])
    )
    assert manager.allocate(cat) == 0
    assert manager.block_table(cat) == [0, 1, 2, 3]
    if name == "vllm_v0":
        manager.mark_blocks_as_computed(cat)
    assert cached(manager, prompt, mm_inputs=[("cat", 8, 41)]) == 48  # block 3 is partial
    assert manager.allocate(dog) == 0
    assert not set(manager.block_table(dog)) & set(manager.block_table(cat))
    assert manager.allocate(cat_again) == 48
    assert manager.allocate(Sequence(3, prompt)) == 0
    manager.check_invariants()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize(
    ("name", "tier"),
    [*((name, {}) for name in NAMES), *((name, {"host_blocks": 999}) for name in CACHING),
     ("vllm_v1", {"host_blocks": 99, "store": "selective", "host_policy": "gittins"})],
)  # fmt: skip
def test_a_copy_goes_on_as_the_original_would(name, tier, duplicate):
    """Also of long prompts and conversations of many turns, which are linked lists."""
    manager = manager_of(name, 8192, 2, **tier)
    managers = [manager, duplicate(manager)]
    assert isinstance(manager, MANAGERS[name])
    assert type(managers[1]) is type(manager)
    prompts = [[*range(4 * turn)] for turn in range(1, 300)] + [[7] * 50, [*range(2500), 8]]
    for number, prompt in enumerate(prompts):
        tables = []
        for manager in managers:
            seq = Sequence(number, prompt)
            num_cached = manager.allocate(seq)
            facts = num_cached, manager.block_table(seq), manager.take_transfers(), manager.stats
            tables.append(facts)
            if number % 100:
                manager.free(seq)
        assert tables[0] == tables[1]
        if number % 100 == 70:
            managers[number % 2] = duplicate(managers[0])
    for manager in managers:
        manager.check_invariants()
        assert (manager.stats.stored_blocks > 0) is bool(tier)
