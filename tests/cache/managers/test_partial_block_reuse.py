"""vllm_v1 with partial_block_reuse: hits that end inside a block."""

from __future__ import annotations

import functools

import pytest
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


@pytest.mark.parametrize(
    ("num_blocks", "prompt", "num_cached"),
    [
        (10, [1, 2, 3, 4, 5, 6, 0, 0, 0], 6),
        (4, [1, 2, 3, 4, 5, 6, 0, 0, 0], 6),  # the prefix, the source and two new blocks
        (3, [1, 2, 0, 0, 0], 2),  # the source and two new blocks
        (2, [1, 2, 0, 0, 0, 0, 0, 0], 0),  # no room for the source
    ],
)
def test_a_prefix_that_ends_inside_a_block_is_copied_up_to_its_end(num_blocks, prompt, num_cached):
    manager = make(num_blocks=num_blocks)
    serve(manager, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    cached, copies, table = serve(manager, 1, prompt)
    assert cached == num_cached
    position = cached // 4
    assert copies == ([(position, table[position])] if cached else [])
    assert not {source for source, _ in copies} & set(table), "the block itself stays as it is"
    assert manager.stats.hit_tokens == cached
    assert manager.stats.copied_blocks == len(copies)
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


def test_copies_of_a_freed_sequence_are_void():
    manager = make()
    serve(manager, 0, [1, 2, 3, 4, 5])
    gone, stays = cache.Sequence(1, [1, 2, 0, 0]), cache.Sequence(2, [1, 2, 3, 0])
    manager.allocate(gone)
    manager.allocate(stays)
    manager.free(gone)
    assert [target for _, target in manager.take_copies()] == manager.block_table(stays)


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
