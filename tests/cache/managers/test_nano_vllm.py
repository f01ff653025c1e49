"""nano_vllm compares tokens, since its hashes may collide."""

import functools

import manager_helpers
import pytest

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
