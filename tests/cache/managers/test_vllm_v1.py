"""vllm_v1: the worked examples to the digit, and the faults that real systems had."""

from __future__ import annotations

import time

import pytest

from cache import AllocStatus, OutOfBlocks, Sequence, make_manager, make_workload, simulate
from cache.managers import VLLMv1
from cache.policies.lru import LRU

ONLINE_POLICIES = ["lru", "fifo", "lfu"]


def manager_of(num_blocks: int = 10, block_size: int = 4, **options) -> VLLMv1:
    return make_manager("vllm_v1", num_blocks=num_blocks, block_size=block_size, **options)


def grow(manager: VLLMv1, seq: Sequence, *token_ids: int) -> list[tuple[int, int]]:
    """Decode ``token_ids``; returns all copies."""
    copies = []
    for token_id in token_ids:
        seq.append_token(token_id)
        copies += manager.append(seq)
    return copies


def free_queue(manager: VLLMv1) -> list[int]:
    return list(manager.pool.free_blocks())


def cached_blocks(manager: VLLMv1) -> list[int]:
    return [block for block, key in enumerate(manager.pool.block_hashes) if key is not None]


def state_of(manager: VLLMv1, *seqs: Sequence):
    pool = manager.pool
    tables = [manager.block_table(seq) for seq in seqs]
    counts = [(seq.num_cached_tokens, seq.num_computed_tokens) for seq in seqs]
    pool_state = pool.ref_counts[:], pool.block_hashes[:], free_queue(manager)
    return tables, counts, pool_state, manager.stats


@pytest.fixture
def after_two_requests() -> VLLMv1:
    """The first part of the worked example: requests 0 and 1 have come and gone."""
    manager = manager_of()
    first = Sequence(0, range(14))
    assert manager.allocate(first) == 0
    assert manager.block_table(first) == [0, 1, 2, 3]
    assert cached_blocks(manager) == [0, 1, 2]

    assert grow(manager, first, 14, 15) == []
    assert manager.block_table(first) == [0, 1, 2, 3]
    assert cached_blocks(manager) == [0, 1, 2, 3]
    assert grow(manager, first, 16) == []
    assert manager.block_table(first) == [0, 1, 2, 3, 4]

    second = Sequence(1, [*range(11), 91, 92, 93])
    assert manager.allocate(second) == 8
    assert manager.block_table(second) == [0, 1, 5, 6]
    assert manager.pool.ref_counts[:7] == [2, 2, 1, 1, 1, 1, 1]

    manager.free(first)
    assert free_queue(manager) == [7, 8, 9, 4, 3, 2]
    manager.free(second)
    assert free_queue(manager) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]
    manager.check_invariants()
    return manager


def test_worked_example(after_two_requests):
    manager = after_two_requests
    hash_of_3 = manager.pool.block_hashes[3]
    third = Sequence(2, [*range(12), *range(50, 67)])
    blocks, num_cached = manager.get_computed_blocks(third)
    assert (blocks, num_cached) == ([0, 1, 2], 12)
    assert manager.allocate(third) == 12
    assert manager.block_table(third) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert free_queue(manager) == [6, 5]
    assert hash_of_3 not in manager.pool.block_hashes
    assert manager.pool.lookup([hash_of_3]) == []
    manager.check_invariants()
    stats = manager.stats
    assert (stats.num_allocations, stats.queried_tokens, stats.hit_tokens) == (3, 57, 20)
    assert (stats.queried_blocks, stats.hit_blocks) == (3 + 3 + 7, 5)
    assert (stats.allocated_blocks, stats.evicted_blocks, stats.copied_blocks) == (12, 1, 0)
    assert stats.token_hit_rate == 20 / 57
    assert stats.block_hit_rate == 5 / 13


def test_worked_example_with_33_tokens_and_16_in_common(after_two_requests):
    manager = after_two_requests
    third = Sequence(2, [*range(16), *range(50, 67)])
    assert manager.allocate(third) == 16
    assert manager.block_table(third) == [0, 1, 2, 3, 7, 8, 9, 4, 6]
    assert free_queue(manager) == [5]
    manager.check_invariants()


@pytest.mark.parametrize("first_freed", ["a", "b"])
def test_worked_example_of_duplicates(first_freed):
    manager = manager_of(4)
    a, b = Sequence("a", range(6)), Sequence("b", range(6))
    manager.allocate(a)
    grow(manager, a, 6, 7, 8)
    assert manager.block_table(a) == [0, 1, 2]
    assert cached_blocks(manager) == [0, 1]
    assert manager.allocate(b) == 4
    assert manager.block_table(b) == [0, 3]
    grow(manager, b, 6, 7)
    assert manager.block_table(b) == [0, 3]
    keys = manager.pool.block_hashes
    assert keys[1] == keys[3] is not None
    manager.check_invariants()

    manager.free(a if first_freed == "a" else b)
    for i in range(manager.num_free_blocks):  # evict what was freed
        manager.allocate(Sequence(i, [99]))
        manager.check_invariants()
    expected = {"a": 3, "b": 1}[first_freed]
    assert manager.get_computed_blocks(Sequence("probe", range(9))) == ([0, expected], 8)


def test_worked_example_of_an_image():
    text = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551]
    prompt = [*text, *[10] * 41, 4]
    manager = manager_of(20, 16)
    cat, dog, cat_again = (
        Sequence(i, prompt, mm_inputs=[(image, 8, 41)])
        for i, image in enumerate(["cat", "dog", "cat"])
    )
    assert manager.allocate(cat) == 0
    assert manager.block_table(cat) == [0, 1, 2, 3]
    assert cached_blocks(manager) == [0, 1, 2]
    assert manager.allocate(dog) == 0
    assert len(set(manager.pool.block_hashes) - {None}) == 6
    assert manager.allocate(cat_again) == 48
    plain = Sequence(3, prompt)
    assert manager.allocate(plain) == 0
    manager.check_invariants()


def test_worked_example_of_parallel_sampling():
    manager = manager_of()
    one = Sequence("one", range(6))
    manager.allocate(one)
    other = one.fork("other")
    manager.fork(one, other)
    assert manager.block_table(other) == manager.block_table(one) == [0, 1]
    assert manager.pool.ref_counts[:2] == [2, 2]
    assert other.num_computed_tokens == other.num_cached_tokens == 6

    other.append_token(77)
    assert manager.append(other) == [(1, 2)]
    assert manager.block_table(other) == [0, 2]
    assert manager.pool.ref_counts[:3] == [2, 1, 1]
    one.append_token(78)
    assert manager.append(one) == []
    assert manager.block_table(one) == [0, 1]
    assert manager.stats.copied_blocks == 1
    manager.check_invariants()


def test_parallel_sampling_of_a_prompt_that_fills_its_blocks_copies_nothing():
    manager = manager_of()
    one = Sequence("one", range(8))
    manager.allocate(one)
    other = one.fork("other")
    manager.fork(one, other)
    assert grow(manager, one, 8) == grow(manager, other, 9) == []
    assert manager.block_table(one) == [0, 1, 2]
    assert manager.block_table(other) == [0, 1, 3]
    assert manager.pool.ref_counts[:4] == [2, 2, 1, 1]


def test_the_last_holder_of_a_shared_block_writes_in_place():
    manager = manager_of()
    seqs = [Sequence(0, range(6))]
    manager.allocate(seqs[0])
    for i in (1, 2):
        seqs.append(seqs[0].fork(i))
        manager.fork(seqs[0], seqs[i])
    copies = [grow(manager, seq, 10 + seq.seq_id) for seq in seqs]
    assert copies == [[(1, 2)], [(1, 3)], []]
    manager.free(seqs[0])
    manager.check_invariants()


# Faults seen in real systems ------------------------------------------------------------------


def test_no_stale_hash_on_a_reused_block():
    manager = manager_of(2)
    old = Sequence(0, range(8))
    manager.allocate(old)
    manager.free(old)
    partial = Sequence(1, [7, 7, 7, 7, 7])
    manager.allocate(partial)
    assert cached_blocks(manager) == [manager.block_table(partial)[0]]
    manager.free(partial)
    assert manager.get_computed_blocks(Sequence(2, range(9))) == ([], 0)


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
def test_hits_are_untouched_when_the_allocation_fails(policy):
    manager = manager_of(5, policy=policy)
    prompt = Sequence(0, range(8))
    manager.allocate(prompt)
    manager.free(prompt)
    holder = Sequence(1, [50] * 8)
    manager.allocate(holder)
    before = state_of(manager, holder)
    wanting = Sequence(2, [*range(8), *range(60, 72)])
    assert manager.can_allocate(wanting) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks):
        manager.allocate(wanting)
    assert state_of(manager, holder) == before
    assert (wanting.num_cached_tokens, wanting.num_computed_tokens) == (0, 0)
    manager.free(holder)
    assert manager.allocate(wanting) == 8


def test_a_hit_in_the_free_list_is_not_counted_as_free_capacity_too():
    manager = manager_of(4)
    prompt = Sequence(0, range(8))
    manager.allocate(prompt)
    manager.free(prompt)
    holder = Sequence(1, [50])
    manager.allocate(holder)
    wanting = Sequence(2, [*range(8), *range(60, 68)])  # 2 hits, 2 new; but 3 blocks are free
    assert manager.num_free_blocks == 3
    assert manager.can_allocate(wanting) is AllocStatus.LATER
    with pytest.raises(OutOfBlocks, match="4 blocks are needed, 3 are free"):
        manager.allocate(wanting)
    shorter = Sequence(3, [*range(8), 60])
    assert manager.can_allocate(shorter) is AllocStatus.OK
    assert manager.allocate(shorter) == 8


def test_hits_that_others_hold_need_no_free_block():
    manager = manager_of(4)
    holder = Sequence(0, range(12))
    manager.allocate(holder)
    wanting = Sequence(1, [*range(12), 60])
    assert manager.can_allocate(wanting) is AllocStatus.OK
    assert manager.allocate(wanting) == 12
    assert manager.num_free_blocks == 0
    assert manager.can_allocate(Sequence(2, range(12))) is AllocStatus.LATER


def evicted_after_hits(policy: str) -> set[str]:
    """A is computed and hit twice, then B is computed, then one of both has to go."""
    manager = manager_of(3, 2, policy=policy)
    a, b, c = ([i, i, 0] for i in range(3))
    for i, prompt in enumerate([a, a, a, b, c]):
        seq = Sequence(i, prompt)
        assert manager.allocate(seq) == (2 if i in (1, 2) else 0)
        manager.free(seq)
    found = {
        name: manager.get_computed_blocks(Sequence(9, p))[1] for name, p in (("a", a), ("b", b))
    }
    return {name for name, num_cached in found.items() if not num_cached}


def test_hit_counters_are_incremented():
    assert evicted_after_hits("lfu") == {"b"}  # a was used three times, though longer ago


def test_metadata_of_a_hit_is_kept_when_it_is_revived():
    assert evicted_after_hits("fifo") == {"a"}  # a came in first, though it was used since


def test_duplicates_of_the_same_step_do_not_overwrite_the_index():
    manager = manager_of()
    twins = [Sequence(i, range(9)) for i in range(3)]
    looked_up = [manager.get_computed_blocks(seq) for seq in twins]
    assert looked_up == [([], 0)] * 3
    for seq, (blocks, _) in zip(twins, looked_up, strict=True):
        manager.allocate_slots(seq, 9, blocks)
    assert [manager.block_table(seq) for seq in twins] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    manager.check_invariants()
    for freed in (2, 0, 1):
        assert manager.get_computed_blocks(Sequence(9, range(9))) == ([0, 1], 8)
        manager.free(twins[freed])
        manager.check_invariants()


def test_a_block_is_not_queued_as_free_twice():
    manager = manager_of()
    seq = Sequence(0, range(9))
    manager.allocate(seq)
    manager.free(seq)
    before = state_of(manager)
    with pytest.raises(ValueError, match="sequence 0 holds no blocks"):
        manager.free(seq)
    assert state_of(manager) == before
    assert sorted(free_queue(manager)) == list(range(10))


def test_evictable_blocks_are_counted_once():
    manager = manager_of(4)
    seqs = [Sequence(i, [*range(4), 10 + i]) for i in range(3)]
    free = [manager.num_free_blocks]
    for seq in seqs:
        manager.allocate(seq)
        free.append(manager.num_free_blocks)
    for seq in seqs:
        manager.free(seq)
        free.append(manager.num_free_blocks)
    assert free == [4, 2, 1, 0, 1, 2, 4]
    assert len(free_queue(manager)) == 4


def test_a_64_bit_hash_is_refused_because_tokens_are_not_compared():
    with pytest.raises(ValueError, match=r"'xxh64'.*128 bits.*xxh3_128, sha256"):
        manager_of(hash_algorithm="xxh64")


def test_a_lora_name_that_equals_a_salt_shares_nothing():
    manager = manager_of()
    for i, keys in enumerate([{"lora_name": "a"}, {"cache_salt": "a"}, {}]):
        assert manager.allocate(Sequence(i, range(9), **keys)) == 0
    assert manager.get_computed_blocks(Sequence(9, range(9), cache_salt="a"))[0] == [3, 4]


def test_removal_from_the_middle_of_the_free_queue_does_not_scan_it():
    """With a scan these 40,000 removals would look at 2e9 entries, minutes of work."""
    manager = manager_of(100_000, 1)
    everything = Sequence(0, range(99_999))
    manager.allocate(everything)
    manager.free(everything)
    started = time.perf_counter()
    for i in range(20_000):
        for hit in (50_000 - i, 50_001 + i):  # from the middle outwards
            manager.pool.allocate(0, [hit])
    assert time.perf_counter() - started < 10
    assert manager.num_free_blocks == 60_000
    manager.pool.check_invariants()


@pytest.mark.parametrize("policy", ONLINE_POLICIES)
def test_preempted_sequences_make_progress(policy):
    """Two sequences that fit one at a time only: the younger yields, resumes, and both finish."""
    manager = manager_of(6, 2, policy=policy)
    waiting = [Sequence(0, [1, 2, 3]), Sequence(1, [4, 5, 6])]
    running, finished, steps, preemptions = [], [], 0, 0
    while waiting or running:
        steps += 1
        assert steps < 100, "livelock"
        while waiting and manager.can_allocate(waiting[0]) is AllocStatus.OK:
            running.append(waiting.pop(0))
            manager.allocate(running[-1])
        for seq in list(running):
            if seq not in running:
                continue
            seq.append_token(7)
            while not manager.can_append(seq):
                victim = running.pop()
                manager.free(victim)
                waiting.insert(0, victim)
                preemptions += 1
            manager.append(seq)
            if seq.num_tokens == 12:
                running.remove(seq)
                manager.free(seq)
                finished.append(seq.seq_id)
        manager.check_invariants()
    assert finished == [0, 1]
    assert preemptions > 0
    assert manager.num_free_blocks == 6


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_at_least_one_token_is_left_to_compute(block_size):
    manager = manager_of(100, block_size)
    for length in range(1, 4 * block_size + 2):
        seq = Sequence(length, range(length))
        manager.allocate(seq)
        again = Sequence("again", range(length))
        cached = manager.allocate(again)
        assert cached == (length - 1) // block_size * block_size
        manager.free(again)
        manager.free(seq)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_blocks_and_hashes_at_every_length(block_size):
    manager = manager_of(40, block_size)
    seq = Sequence(0, [0])
    manager.allocate(seq)
    for length in range(1, 2 * block_size + 3):
        if length > 1:
            assert grow(manager, seq, length) == []
        assert manager.block_table(seq) == list(range(-(-length // block_size)))
        assert cached_blocks(manager) == list(range(length // block_size))
        assert seq.num_computed_tokens == length
        at_once = manager_of(40, block_size)
        at_once.allocate(twin := Sequence(0, seq.token_ids))
        assert at_once.block_table(twin) == manager.block_table(seq)
        assert at_once.pool.block_hashes == manager.pool.block_hashes


@pytest.mark.parametrize("num_new_tokens", [-1, -100, 0, 7])
def test_a_bad_number_of_tokens_changes_nothing(num_new_tokens):
    manager = manager_of()
    seq, new = Sequence(0, range(14)), Sequence(1, range(6))
    manager.allocate_slots(seq, 8)
    before = state_of(manager, seq)
    for target in (seq, new):
        with pytest.raises(ValueError, match=f"num_new_tokens={num_new_tokens}"):
            manager.allocate_slots(target, num_new_tokens)
        with pytest.raises(ValueError, match="num_lookahead_tokens=-1"):
            manager.allocate_slots(target, 1, num_lookahead_tokens=-1)
    assert state_of(manager, seq) == before


def test_tokens_behind_computed_blocks_are_counted_from_there():
    manager = manager_of()
    manager.allocate(Sequence(0, range(14)))
    seq = Sequence(1, range(14))
    hits, num_cached = manager.get_computed_blocks(seq)
    assert (len(hits), num_cached) == (3, 12)
    with pytest.raises(ValueError, match="needs 1 to 2 new ones"):
        manager.allocate_slots(seq, 3, hits)
    manager.allocate_slots(seq, 2, hits)
    assert manager.block_table(seq) == [0, 1, 2, 4]


# Behaviour beyond the examples ----------------------------------------------------------------


def test_status_never_if_the_cache_is_too_small_for_the_sequence():
    manager = manager_of(3)
    assert manager.can_allocate(Sequence(0, range(12))) is AllocStatus.OK
    assert manager.can_allocate(Sequence(0, range(13))) is AllocStatus.NEVER
    manager.allocate(Sequence(1, range(5)))
    assert manager.can_allocate(Sequence(0, range(50, 62))) is AllocStatus.LATER
    assert manager.can_allocate(Sequence(0, range(50, 54))) is AllocStatus.OK


def test_chunked_prefill_caches_what_is_scheduled_and_no_more():
    manager = manager_of()
    seq = Sequence(0, range(14))
    tables = []
    for count in (3, 3, 7, 1):
        assert manager.allocate_slots(seq, count) == []
        tables.append((manager.block_table(seq), cached_blocks(manager)))
        manager.check_invariants()
    assert tables == [
        ([0], []),
        ([0, 1], [0]),
        ([0, 1, 2, 3], [0, 1, 2]),
        ([0, 1, 2, 3], [0, 1, 2]),
    ]
    assert seq.num_computed_tokens == 14
    assert manager.get_computed_blocks(Sequence(1, range(14))) == ([0, 1, 2], 12)


def test_a_first_chunk_behind_a_cached_prefix():
    manager = manager_of()
    first = Sequence(0, range(9))
    manager.allocate(first)
    second = Sequence(1, [*range(8), *range(50, 60)])
    blocks, num_cached = manager.get_computed_blocks(second)
    assert (blocks, num_cached) == ([0, 1], 8)
    manager.allocate_slots(second, 3, blocks)
    assert manager.block_table(second) == [0, 1, 3]
    assert (second.num_cached_tokens, second.num_computed_tokens) == (8, 11)
    with pytest.raises(ValueError, match="in front of its first chunk"):
        manager.allocate_slots(second, 3, blocks)
    assert blocks == [0, 1]
    second.append_token(99)
    assert manager.append(second) == []  # the rest of the prompt and the new token
    assert second.num_computed_tokens == 19
    manager.check_invariants()


@pytest.mark.parametrize("stale", [[1, 0], [0, 9], [0, 1, 2], [2]], ids=str)
def test_computed_blocks_that_do_not_hold_the_prefix_are_refused(stale):
    manager = manager_of()
    manager.allocate(Sequence(0, range(11)))
    seq = Sequence(1, range(16))
    with pytest.raises(ValueError, match="computed_blocks"):
        manager.allocate_slots(seq, 1, stale)
    manager.allocate_slots(seq, 1, [0])  # part of what was found will do
    assert manager.block_table(seq) == [0, 3]
    manager.check_invariants()


def test_lookahead_slots_are_there_when_the_draft_is_accepted():
    manager = manager_of()
    seq = Sequence(0, range(6))
    manager.allocate_slots(seq, 6, num_lookahead_tokens=4)
    assert manager.block_table(seq) == [0, 1, 2]
    child = seq.fork(1)
    manager.fork(seq, child)
    assert manager.block_table(child) == [0, 1]
    manager.free(child)
    for token_id in (6, 7, 8):
        seq.append_token(token_id)
    assert manager.append(seq) == []
    assert manager.block_table(seq) == [0, 1, 2]
    assert cached_blocks(manager) == [0, 1]
    assert manager.num_free_blocks == 7
    manager.check_invariants()


def test_without_prefix_caching_nothing_is_found():
    manager = manager_of(enable_prefix_caching=False)
    for i in range(2):
        assert manager.allocate(Sequence(i, range(9))) == 0
    assert manager.get_computed_blocks(Sequence(2, range(9))) == ([], 0)
    assert cached_blocks(manager) == []
    manager.check_invariants()
    assert manager.stats.hit_tokens == 0


def test_reset_needs_all_blocks_free():
    manager = manager_of()
    seq = Sequence(0, range(9))
    manager.allocate(seq)
    before = state_of(manager, seq)
    assert not manager.reset_prefix_cache()
    assert state_of(manager, seq) == before
    manager.free(seq)
    assert manager.reset_prefix_cache()
    assert manager.allocate(seq) == 0
    manager.check_invariants()


def test_a_preempted_sequence_finds_its_own_blocks_again():
    manager = manager_of()
    seq = Sequence(0, range(6))
    manager.allocate(seq)
    grow(manager, seq, 6, 7, 8)
    manager.free(seq)
    assert (seq.num_cached_tokens, seq.num_computed_tokens) == (0, 0)
    assert manager.allocate(seq) == 8
    assert manager.block_table(seq) == [0, 1, 3]
    assert seq.num_prompt_tokens == 6


def test_append_without_a_new_token_is_refused():
    manager = manager_of()
    seq = Sequence(0, range(6))
    manager.allocate(seq)
    with pytest.raises(ValueError, match="append a token"):
        manager.append(seq)


def test_append_that_finds_no_block_for_the_copy_changes_nothing():
    manager = manager_of(2)
    one = Sequence(0, range(6))
    manager.allocate(one)
    other = one.fork(1)
    manager.fork(one, other)
    other.append_token(9)
    before = state_of(manager, one, other)
    assert not manager.can_append(other)
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 are free"):
        manager.append(other)
    assert state_of(manager, one, other) == before
    manager.free(one)
    assert manager.append(other) == []


def test_a_copied_block_that_fills_up_is_cached():
    manager = manager_of()
    one = Sequence(0, range(7))
    manager.allocate(one)
    other = one.fork(1)
    manager.fork(one, other)
    assert grow(manager, other, 7) == [(1, 2)]
    assert cached_blocks(manager) == [0, 2]
    assert manager.get_computed_blocks(Sequence(2, range(9))) == ([0, 2], 8)
    manager.check_invariants()


def test_fork_takes_a_child_that_is_ahead_of_its_parent():
    manager = manager_of()
    parent = Sequence(0, range(6))
    manager.allocate(parent)
    child = parent.fork(1)
    child.append_token(66)
    manager.fork(parent, child)
    assert manager.append(child) == [(1, 2)]


@pytest.mark.parametrize(
    "child",
    [
        Sequence(1, [0, 1, 2, 9, 4, 5]),
        Sequence(1, range(5)),
        Sequence(1, range(6), lora_name="x"),
        Sequence(1, range(6), cache_salt="x"),
        Sequence(1, range(6), mm_inputs=[("x", 0, 1)]),
    ],
    ids=["other-token", "shorter", "other-adapter", "other-salt", "other-image"],
)
def test_fork_refuses_a_child_whose_content_differs(child):
    manager = manager_of()
    parent = Sequence(0, range(6))
    manager.allocate(parent)
    with pytest.raises(ValueError, match="sequence 1 must be those of 0"):
        manager.fork(parent, child)
    with pytest.raises(ValueError, match="sequence 0 holds blocks already"):
        manager.fork(parent, parent)
    assert manager.pool.ref_counts[:3] == [1, 1, 0]


def test_calls_about_unknown_and_known_sequences_are_checked():
    manager = manager_of()
    seq, unknown = Sequence(0, range(6)), Sequence(1, range(6))
    manager.allocate(seq)
    with pytest.raises(ValueError, match="sequence 0 holds blocks already"):
        manager.allocate(seq)
    for call in (manager.append, manager.can_append, manager.free, manager.block_table):
        with pytest.raises(ValueError, match="sequence 1 holds no blocks"):
            call(unknown)
    with pytest.raises(ValueError, match="sequence 1 holds no blocks"):
        manager.fork(unknown, Sequence(2, range(6)))


def test_the_block_table_is_a_copy():
    manager = manager_of()
    seq = Sequence(0, range(6))
    manager.allocate(seq)
    manager.block_table(seq).append(9)
    assert manager.block_table(seq) == [0, 1]


def test_check_invariants_compares_tables_and_reference_counts():
    manager = manager_of()
    seq = Sequence(0, range(6))
    manager.allocate(seq)
    manager.pool.ref_counts[0] = 2
    with pytest.raises(AssertionError, match="block 0 has ref_count 2 and is in 1 tables"):
        manager.check_invariants()


@pytest.mark.parametrize("damage", ["blocks", "num_tokens", "num_cached_blocks", "hash"])
def test_check_invariants_sees_a_wrong_table(damage):
    manager = manager_of()
    seq = Sequence(0, range(9))
    manager.allocate(seq)
    table = manager._tables[0]
    if damage == "blocks":
        table.blocks = [2, 1, 0]
    elif damage == "hash":
        table.hashes = table.hashes[::-1]
    elif damage == "num_tokens":
        seq.num_computed_tokens += 4
    else:
        table.num_cached_blocks += 4
    with pytest.raises(AssertionError):
        manager.check_invariants()


@pytest.mark.parametrize("damage", ["pool", "a block twice", "too few blocks"])
def test_check_invariants_sees_damage_without_prefix_caching(damage):
    """Where no hash would give it away."""
    manager = manager_of(enable_prefix_caching=False)
    manager.allocate(Sequence(0, range(9)))
    manager.check_invariants()
    table = manager._tables[0]
    if damage == "pool":
        manager.pool._num_fresh -= 1
    elif damage == "a block twice":
        table.blocks[1] = 0
        manager.pool.ref_counts[:3] = [2, 0, 1]
        manager.pool._free.append(1)
    else:
        table.seq.num_computed_tokens = 13
    with pytest.raises(AssertionError):
        manager.check_invariants()


def test_a_prompt_that_grows_stays_one_entry_of_the_index():
    """Lookups compare memory instead of asking a dictionary, whose cost grows with the pool."""
    manager = manager_of(20)
    seq = Sequence(0, range(18))
    manager.allocate_slots(seq, 7)
    manager.allocate_slots(seq, 11)
    grow(manager, seq, *range(18, 40))
    assert len(manager.pool._index._runs) == 1
    assert manager.get_computed_blocks(Sequence(1, range(41)))[1] == 40


def test_a_million_blocks_are_made_at_once():
    started = time.perf_counter()
    manager = manager_of(1_000_000, 16)
    assert time.perf_counter() - started < 1
    assert manager.num_free_blocks == 1_000_000
    manager.allocate(seq := Sequence(0, range(100)))
    assert manager.block_table(seq) == list(range(7))


class PlainLRU(LRU):
    """Never sees the partly filled blocks, which a replay of a trace does not have."""

    name = "plain_lru"
    queues_uncached = False
    compilable = False  # a few requests are not worth a compilation


@pytest.mark.parametrize("capacity", [7, 40, 300])
def test_a_serial_replay_through_the_manager_equals_simulate(capacity):
    trace = make_workload("multi_turn_chat", num_requests=150, seed=3)
    expected = simulate(trace, policy=PlainLRU(), capacity_blocks=capacity)
    manager = manager_of(capacity + 1, 2, policy=PlainLRU())
    for i, request in enumerate(trace):
        tokens = [token for block in request.block_ids[:capacity] for token in (block, block)]
        seq = Sequence(i, [*tokens, 0])  # one token more: the one that is always computed
        manager.allocate(seq)
        manager.free(seq)
    stats = manager.stats
    assert (stats.hit_blocks, stats.evicted_blocks) == (expected.hit_blocks, expected.evictions)
    assert 0 < stats.hit_blocks < expected.block_references
