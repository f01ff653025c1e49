"""nano_vllm compares tokens, since its hashes may collide."""

from __future__ import annotations

import functools

import manager_helpers
import pytest
from manager_helpers import used

from cache import Sequence

manager_of = functools.partial(manager_helpers.manager_of, "nano_vllm")

KEYS = [{}, {"lora_name": "a"}, {"cache_salt": "a"}, {"mm_inputs": [("a", 0, 4)]}]


@pytest.mark.parametrize("keys", KEYS)
def test_the_tokens_and_the_extra_keys_of_a_hit_are_compared(keys):
    manager = manager_of()
    manager._hasher._digest = lambda data: bytes(8)
    manager.allocate(Sequence(0, range(9), **keys))
    for others in KEYS:
        hits, _ = manager.get_computed_blocks(Sequence(1, range(5), **others))
        assert hits == ([0] if others == keys else [])
    assert manager.get_computed_blocks(Sequence(1, [0, 1, 2, 9, 4], **keys)) == ([], 0)


def test_a_first_block_that_is_computed_again_finds_the_later_ones():
    manager = manager_of(5, 2, policy="mru")  # which gives up the last block released first
    prompt = Sequence(0, [1, 2, 5, 6, 9])
    manager.allocate(prompt)
    second = manager.block_table(prompt)[1]
    shorter = Sequence(1, [1, 2, 9])
    manager.allocate(shorter)
    manager.free(prompt)
    manager.free(shorter)
    used(manager, 2, [7, 7, 8, 8, 9, 9, 7])  # evicts the first block and not the second
    assert manager.get_computed_blocks(prompt) == ([], 0)
    manager.allocate(prompt)
    first = manager.block_table(prompt)[0]
    assert manager.get_computed_blocks(Sequence(3, [1, 2, 5, 6, 9])) == ([first, second], 4)
    assert manager._contents[second].parent is manager._contents[first]  # not compared again
