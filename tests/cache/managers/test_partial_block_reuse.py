"""vllm_v1 with partial_block_reuse: hits that end inside a block."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st
from manager_helpers import manager_of

import cache
from cache.blocks.partial_blocks import PartialBlockIndex

make = functools.partial(manager_of, "vllm_v1", partial_block_reuse=True)


def serve(manager, seq_id, tokens, **keys):
    """Allocate, end the step, free: (cached tokens, copies, table)."""
    seq = cache.Sequence(seq_id, tokens, **keys)
    cached = manager.allocate(seq)
    result = cached, manager.take_copies(), manager.block_table(seq)
    manager.free(seq)
    manager.check_invariants()
    return result


def test_a_prefix_that_ends_inside_a_block_is_copied_up_to_its_end():
    manager = make()
    serve(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cached, copies, table = serve(manager, 1, [1, 2, 3, 4, 5, 6, 0, 0, 0])
    assert cached == 6
    assert table[0] == 0
    assert copies == [(1, table[1])]
    assert table[1] != 1, "the block itself stays as it is"
    assert manager.stats.hit_tokens == 6
    assert manager.stats.copied_blocks == 1
    assert manager.take_copies() == []


def test_a_block_is_copied_from_only_when_its_step_is_over():
    manager = make()
    first = cache.Sequence(0, [1, 2, 3, 4, 5])
    manager.allocate(first)
    same_step = cache.Sequence(1, [1, 2, 9, 9, 9])
    assert manager.allocate(same_step) == 0
    for seq in (first, same_step):
        seq.append_token(6)
    manager.append(first)
    next_step = cache.Sequence(2, [1, 2, 8, 8, 8])
    assert manager.allocate(next_step) == 2
    manager.append(same_step)  # its step is over too
    assert manager.allocate(cache.Sequence(3, [1, 2, 9, 0])) == 3
    manager.check_invariants()


def test_the_source_of_a_copy_is_not_its_target():
    manager = make(num_blocks=3)
    serve(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    # Two blocks are needed and three are free; the donor is the oldest after the partial one.
    cached, copies, table = serve(manager, 1, [1, 2, 0, 0, 0])
    assert cached == 2
    ((donor, copy),) = copies
    assert donor not in table
    assert copy == table[0]


def test_a_part_behind_cached_blocks_takes_no_more_than_the_room_that_there_is():
    manager = make(num_blocks=4)
    serve(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    # Of four blocks one is the prefix, one is copied from, and the two others are needed.
    cached, copies, table = serve(manager, 1, [1, 2, 3, 4, 5, 6, 0, 0, 0])
    assert (cached, table[0], copies) == (6, 0, [(1, table[1])])


def test_without_room_for_a_copy_nothing_is_reused():
    manager = make(num_blocks=2)
    serve(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    cached, copies, table = serve(manager, 1, [1, 2, 0, 0, 0, 0, 0, 0])
    assert (cached, copies, sorted(table)) == (0, [], [0, 1])


def test_extra_keys_never_share_parts():
    manager = make(num_blocks=40)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    for number, keys in enumerate(
        ({"lora_name": "a"}, {"cache_salt": "a"}, {"mm_inputs": [("image", 1, 2)]})
    ):
        own = [token + 10 * number for token in tokens]
        serve(manager, number, own, **keys)
        assert serve(manager, 10 + number, [*own[:2], 0, 0])[0] == 0
        # Nor with the same keys: the image and the first block's keys are not compared.
        assert serve(manager, 20 + number, [*own[:2], 0, 0, 0], **keys)[0] == 0
    # Behind the first block the chain itself tells adapters apart.
    assert serve(manager, 30, [1, 2, 3, 4, 5, 6, 0, 0], lora_name="a")[0] == 6
    assert serve(manager, 31, [1, 2, 3, 4, 5, 6, 0, 0], lora_name="b")[0] == 0


def test_a_reset_forgets_parts_too():
    manager = make()
    serve(manager, 0, [1, 2, 3, 4, 5])
    assert manager.reset_prefix_cache()
    assert serve(manager, 1, [1, 2, 0, 0, 0])[0] == 0


def test_copies_of_a_freed_sequence_are_void():
    manager = make()
    serve(manager, 0, [1, 2, 3, 4, 5])
    gone, stays = cache.Sequence(1, [1, 2, 0, 0]), cache.Sequence(2, [1, 2, 3, 0])
    manager.allocate(gone)
    manager.allocate(stays)
    manager.free(gone)
    assert [target for _, target in manager.take_copies()] == manager.block_table(stays)


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    num_blocks=st.integers(4, 12),
    block_size=st.sampled_from([1, 2, 3, 5]),
    policy=st.sampled_from(["lru", "lfu", "s3fifo", "random"]),
)
def test_cached_tokens_have_the_right_content(prompts, num_blocks, block_size, policy):
    """A slot's content is its whole prefix, as K and V depend on it."""
    manager = make(num_blocks=num_blocks, block_size=block_size, policy=policy)
    memory = [[None] * block_size for _ in range(num_blocks)]
    running = []
    for number, (tokens, generated) in enumerate(prompts):
        seq = cache.Sequence(number, tokens)
        if manager.can_allocate(seq) is not cache.AllocStatus.OK:
            if running:
                manager.free(running.pop(0))
            continue
        cached = manager.allocate(seq)
        assert 0 <= cached < len(tokens)
        for source, target in manager.take_copies():
            memory[target] = memory[source].copy()
        table = manager.block_table(seq)
        slots = [(table[i // block_size], i % block_size) for i in range(len(tokens))]
        for position, (block, offset) in enumerate(slots[:cached]):
            assert memory[block][offset] == tuple(tokens[: position + 1])
        for position, (block, offset) in enumerate(slots[cached:], cached):
            memory[block][offset] = tuple(tokens[: position + 1])
        for token in range(generated):
            seq.append_token(token)
            if not manager.can_append(seq):
                break
            manager.append(seq)
            block, offset = divmod(seq.num_tokens - 1, block_size)
            memory[manager.block_table(seq)[block]][offset] = tuple(seq.token_ids)
        manager.check_invariants()
        running.append(seq)
        if number % 3 == 0:
            manager.free(running.pop())
    for seq in running:
        manager.free(seq)
    manager.check_invariants()
    assert manager.num_free_blocks == num_blocks


@given(st.data())
def test_index_finds_the_best_of_all_blocks(data):
    runs = st.lists(st.integers(0, 2), min_size=4, max_size=4)
    index, blocks = PartialBlockIndex(), {}
    for block in range(data.draw(st.integers(0, 8))):
        blocks[block] = data.draw(runs)
        index.add(block, b"parent", pack(blocks[block]))
    gone = data.draw(st.lists(st.sampled_from(range(10)), unique=True))
    index.discard(gone)
    blocks = {block: run for block, run in blocks.items() if block not in gone}
    wanted = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))

    def common(run):
        return next(
            (i for i, (a, b) in enumerate(zip(run, wanted, strict=False)) if a != b), len(wanted)
        )

    best = max(map(common, blocks.values()), default=0)
    found = index.find(b"parent", pack(wanted))
    if best == 0:
        assert found is None
    else:
        assert found[1] == best == common(blocks[found[0]])
    assert index.find(b"other", pack(wanted)) is None


def pack(tokens):
    return cache.Sequence(0, tokens).token_ids.tobytes()
