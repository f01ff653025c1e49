"""contiguous: one reservation per sequence, placed by a buddy allocator."""

import functools

import manager_helpers
import pytest

from cache import AllocStatus, Sequence

manager_of = functools.partial(manager_helpers.manager_of, "contiguous", block_size=1)


def test_a_waiting_request_needs_a_run_for_all_that_it_reserves():
    manager = manager_of(
        num_blocks=32, reservation="pow2", final_length=lambda seq: seq.num_prompt_tokens + 3
    )
    sequences = [Sequence(i, [1]) for i in range(4)]  # 1 + 4 slots in a run of 8
    for seq in sequences:
        manager.allocate(seq)
    for seq in sequences:
        if manager.block_table(seq)[0] in (0, 16):
            manager.free(seq)
    beyond = 2 * (8 - 5)
    waiting = Sequence(9, [1] * 5)  # 5 + 4 slots in a run of 16, though it will use 8
    assert manager.memory_usage(waiting).external == beyond + 16
    assert manager.memory_usage(Sequence(9, [1] * 4)).external == beyond


def test_sequences_longer_than_they_may_be():
    manager = manager_of(num_blocks=16, reservation="max", max_model_len=8)
    seq = Sequence(0, [1] * 8)
    assert manager.can_allocate(Sequence(1, [1] * 9)) is AllocStatus.NEVER
    with pytest.raises(ValueError, match=r"9 tokens.*max_model_len=8"):
        manager.allocate(Sequence(1, [1] * 9))
    manager.allocate(seq)
    seq.append_token(1)
    with pytest.raises(ValueError, match=r"9 tokens.*max_model_len=8"):
        manager.can_append(seq)
    with pytest.raises(ValueError, match=r"9 tokens.*max_model_len=8"):
        manager.append(seq)
    assert manager.block_table(seq) == list(range(8))
    assert seq.num_computed_tokens == 8


@pytest.mark.parametrize("final", [4, 17])
def test_a_wrong_oracle_is_named(final):
    manager = manager_of(num_blocks=16, reservation="oracle", final_length=lambda seq: final)
    with pytest.raises(ValueError, match=f"5 tokens, final length {final}, max_model_len=16"):
        manager.allocate(Sequence(0, [1] * 5))
    manager.check_invariants()
    assert manager.num_free_blocks == 16


def test_reservations_lie_one_behind_another():
    manager = manager_of(num_blocks=4, block_size=4, max_model_len=8)
    sequences = [Sequence(i, [1] * 5) for i in range(2)]
    for seq in sequences:
        manager.allocate(seq)
        seq.append_token(1)
        manager.append(seq)
    assert sorted(map(manager.block_table, sequences)) == [[0, 1], [2, 3]]
