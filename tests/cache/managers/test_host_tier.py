"""The tier in host memory; test_a_tier_changes_no_text in test_engine.py serves random requests."""

from unittest.mock import Mock

import pytest
from manager_helpers import manager_of, started

from cache import POLICIES, Group, OutOfBlocks, Sequence, UnsupportedByDesign
from cache.managers.base import NOTHING

LRU = POLICIES["lru"]()
IDLE = [], []
THROUGH = [
    IDLE, ([(0, 0)], []), ([(2, 2)], [(0, 0)]), ([], [(2, 2)]), ([], [(0, 0)]),
    ([(1, 1), (2, 3)], []),
]  # fmt: skip
TWICE = [IDLE] * 3 + [([(0, 0)], []), ([(2, 2)], [(0, 0)]), ([(1, 1), (2, 3)], [])]
BACK = [IDLE, ([(1, 0), (0, 1)], []), ([(0, 2), (1, 3)], [(1, 0), (0, 1)]), ([(2, 2)], [])]
BACK += [([(0, 2), (2, 3)], [(1, 0), (0, 1)]), IDLE]
LOADED_ARE_REMOVED = [([(2, 1), (1, 0), (0, 2)], []), ([(0, 3), (1, 1)], [(2, 0), (0, 1)]), IDLE]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, THROUGH), ({"store": "selective"}, TWICE), ({"store": "back"}, BACK),
     ({"store": "selective", "store_threshold": 3}, [IDLE] * 5 + [([(0, 0), (1, 1)], [])]),
     ({"store": "back", "inclusive": False}, BACK[:3] + LOADED_ARE_REMOVED)],
)  # fmt: skip
def test_transfers_of_two_prompts_in_turn(options, expected):
    """Three device and four host blocks of one token; a prompt is freed after its step.

    The tails of prompts are evicted before they are copied."""
    manager, transfers = manager_of("vllm_v1", 3, 1, host_blocks=4, **options), []
    for number, tokens in enumerate([[1, 2], [7, 8, 9], [1, 2, 3], [7, 8, 9], [1, 2, 3]]):
        seq = started(manager, number, tokens)
        transfers.append(manager.take_transfers())
        manager.free(seq)
    assert [*transfers, manager.take_transfers()] == expected
    stored, loaded = (sum(map(len, pairs)) for pairs in zip(*expected, strict=True))
    assert (manager.stats.stored_blocks, manager.stats.hit_blocks) == (stored, 0)
    assert manager.stats.loaded_blocks == manager.stats.host_hit_blocks == loaded


def test_a_block_can_be_loaded_after_the_step_that_computes_it():
    """``vllm_v0`` finds it on the device only after the next call about its sequence."""
    manager, probe = manager_of("vllm_v0", 9, 2, host_blocks=9), Sequence("probe", range(7))
    started(manager, 0, range(5))
    assert manager.find(probe).loads == []
    assert manager.take_transfers() == IDLE
    assert manager.find(probe).loads == [(0, 0, 0), (0, 1, 1)]
    assert manager.allocate(probe) == 4
    assert manager.take_transfers() == ([(0, 0), (1, 1)], [(0, 0), (1, 1)])


@pytest.mark.parametrize("name", ["nano_vllm", "vllm_v0", "vllm_v1", "radix"])
def test_a_preempted_sequence_resumes_from_host_memory(name):
    """Its last block is full, but one token of it is unknown in the step that computes it."""
    manager, seq = manager_of(name, 3, 2, host_blocks=9), Sequence(0, range(6))
    seq.num_unknown_tokens = 1
    manager.allocate(seq)
    manager.take_transfers()
    seq.num_unknown_tokens = 0
    manager.free(seq, is_finished=False)
    manager.free(started(manager, 1, range(9, 15)))
    assert len(manager.take_transfers()[0]) == 3
    assert manager.allocate(seq) == seq.num_cached_tokens == 4
    assert len(manager.take_transfers()[1]) == 2
    assert (manager.stats.host_hit_blocks, manager.stats.resumed_host_hit_blocks) == (0, 2)
    manager.free(seq)
    assert manager.tier.hasher.digest_size == 16
    if manager.can_reset:
        manager.free(started(manager, 2, range(20, 24)))
        manager.take_transfers()
        assert manager.reset_prefix_cache()
        assert not manager.find(seq).num_tokens
        assert manager.take_transfers() == IDLE


def test_a_state_that_is_loaded_needs_a_block():
    manager = manager_of("vllm_v1", 5, 1, host_blocks=9, groups=[Group(), Group("state")])
    seq = first = Sequence(0, [1, 2])
    manager.admit(seq, NOTHING, 1)
    for number in (3, 4, 5):
        manager.take_transfers()
        manager.free(seq)
        seq = started(manager, number, [number])
    with pytest.raises(OutOfBlocks, match="4 blocks are needed, 3 are free"):
        manager.admit(first, manager.find(first), 2)


def test_the_policy_sees_one_access_for_each_sequence():
    manager = manager_of("vllm_v1", 3, 1, host_blocks=9)
    policy = manager.tier.pool.policy
    pins, releases = Mock(wraps=policy.pin_many), Mock(wraps=policy.release_many)
    policy.pin_many, policy.release_many = pins, releases
    for number, tokens in enumerate([[1, 2], [1, 2, 3], [7, 8, 9], [1, 2, 3]]):
        seq = started(manager, number, tokens)
        manager.take_transfers()
        manager.take_transfers()
        manager.fork(seq, child := seq.fork("child"))
        manager.free(seq)
        manager.free(child)
    assert [block for call in pins.mock_calls for block in call.args[0]] == [0, 1, 0, 1, 2]
    released = [call.args[0] for call in releases.mock_calls if call.args[0]]
    assert released == [[1, 0], [2, 1, 0], [5, 4, 3], [2, 1, 0]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vllm_v1", {"host_blocks": -1}, "host_blocks=-1: needs an int of at least 0"),
        ("vllm_v1", {"host_blocks": 2.5}, "host_blocks=2.5: needs an int"),
        ("vllm_v1", {"store": "never"}, "store='never': choose from through, selective, back"),
        ("radix", {"store_threshold": 0}, "store_threshold=0: needs an int of at least 1"),
        ("vllm_v0", {"inclusive": False}, "inclusive=False: needs store=.back., not store='thro"),
        ("radix", {"store": "back", "inclusive": False, "host_policy": "queue_informed"}, "remove"),
        ("vllm_v1", {"host_policy": "belady"}, "policy.*'belady'.*future"),
        ("nano_vllm", {"policy": LRU, "host_policy": LRU}, "host_policy: is the policy of the dev"),
        ("vllm_v1", {"enable_prefix_caching": False}, "host_blocks=4: the tier holds cached pref"),
        ("vllm_v0", {"num_cpu_blocks": 3}, "num_cpu_blocks=3: host_blocks=4 keep"),
        ("contiguous", {}, "host_blocks: it shares no prefixes"),
    ],
)  # fmt: skip
def test_bad_options_of_a_tier_are_named(name, options, message):
    with pytest.raises((ValueError, UnsupportedByDesign), match=message):
        manager_of(name, **{"host_blocks": 4} | options)
