"""paged: free set and (block, filled) tables."""

from __future__ import annotations

import functools

import manager_helpers

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
