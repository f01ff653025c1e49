"""paged: free set and (block, filled) tables."""

from __future__ import annotations

import functools

import manager_helpers
import pytest

from cache import Sequence
from cache.sizing import slot_bytes

manager_of = functools.partial(manager_helpers.manager_of, "paged", 8)


def test_fragmented_bytes_are_the_unfilled_slots_of_last_blocks():
    # Llama 3 8B in bfloat16: 32 layers, 8 KV heads of 128.
    bytes_per_slot = slot_bytes(num_layers=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
    manager = manager_of(256, bytes_per_slot=bytes_per_slot)
    manager.allocate(Sequence(0, [1] * 300))
    manager.allocate(Sequence(1, [1] * 256))
    assert manager.fragmented_bytes() == 212 * 131_072
    manager.allocate(Sequence(2, [1]))
    assert manager.fragmented_bytes() == (212 + 255) * 131_072


def test_without_a_slot_size_fragmentation_is_counted_in_slots():
    manager = manager_of()
    manager.allocate(Sequence(0, [1] * 5))
    assert manager.fragmented_bytes() == 3


def test_a_prompt_that_ends_on_a_boundary_fills_its_last_block():
    manager = manager_of()
    seq = Sequence(0, range(8))
    manager.allocate(seq)
    assert [filled for _, filled in manager.filled_block_table(seq)] == [4, 4]
    assert manager.fragmented_bytes() == 0
    seq.append_token(8)
    assert manager.append(seq) == []
    assert [filled for _, filled in manager.filled_block_table(seq)] == [4, 4, 1]


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_slot_has_bytes(value):
    with pytest.raises(ValueError, match=r"bytes_per_slot=.*at least 1"):
        manager_of(bytes_per_slot=value)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda m: m._free.append(m._tables[0].blocks[0]), "either free or in one table"),
        (lambda m: m._free.pop(), "either free or in one table"),
        (lambda m: m._free.append(8), r"no blocks \[8\]"),
        (lambda m: m._tables[0].blocks.append(m._free.pop()), "3 blocks for 5 tokens"),
    ],
    ids=["free and used", "lost", "unknown", "empty block"],
)
def test_check_invariants_sees(break_it, says):
    manager = manager_of()
    manager.allocate(Sequence(0, range(5)))
    manager.check_invariants()
    break_it(manager)
    with pytest.raises(AssertionError, match=says):
        manager.check_invariants()
