from __future__ import annotations

import pytest

from cache import MANAGERS, CacheManager, UnsupportedByDesign, make_manager
from cache.policies.fifo import FIFO


@pytest.mark.parametrize("name", sorted(MANAGERS))
def test_every_manager_is_made_by_name(name):
    manager = make_manager(name, num_blocks=8, block_size=4)
    assert isinstance(manager, CacheManager)
    assert (manager.name, manager.num_blocks, manager.block_size) == (name, 8, 4)
    assert manager.num_free_blocks == 8
    assert manager.stats.token_hit_rate == manager.stats.block_hit_rate == 0
    manager.check_invariants()


@pytest.mark.parametrize(
    ("name", "own"), [("vllm_v1", "xxh3_128"), ("vllm_v0", "xxh3_128"), ("nano_vllm", "xxh64")]
)
def test_a_hash_algorithm_that_is_named_is_used_and_the_default_is_that_of_the_design(name, own):
    for asked in ("xxh3_128", "sha256"):
        manager = make_manager(name, num_blocks=8, block_size=4, hash_algorithm=asked)
        assert manager._hasher.algorithm == (own if asked == "xxh3_128" else asked)


@pytest.mark.parametrize("name", ["contiguous", "paged", "radix"])
def test_a_design_that_hashes_nothing_refuses_every_hash_algorithm_but_the_default(name):
    make_manager(name, num_blocks=8, block_size=4, hash_algorithm="xxh3_128")
    with pytest.raises(UnsupportedByDesign, match=r"a hash_algorithm \('sha256'\)"):
        make_manager(name, num_blocks=8, block_size=4, hash_algorithm="sha256")


def test_an_unknown_manager_names_the_choices():
    with pytest.raises(ValueError, match=r"manager='vllm_v9'.*vllm_v1"):
        make_manager("vllm_v9", num_blocks=8, block_size=4)


def test_an_unknown_option_names_the_choices():
    with pytest.raises(ValueError, match=r"no option watermark; its options: .*policy"):
        make_manager("vllm_v1", num_blocks=8, block_size=4, watermark=0.1)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None], ids=repr)
@pytest.mark.parametrize("argument", ["num_blocks", "block_size"])
def test_sizes_below_one_are_refused(argument, value):
    sizes = {"num_blocks": 8, "block_size": 4} | {argument: value}
    with pytest.raises(ValueError, match=f"{argument}=.*at least 1"):
        make_manager("vllm_v1", **sizes)


def test_an_unknown_policy_names_the_choices():
    with pytest.raises(ValueError, match=r"policy='mru2'.*lru"):
        make_manager("vllm_v1", num_blocks=8, block_size=4, policy="mru2")


def test_a_policy_class_is_no_policy():
    with pytest.raises(ValueError, match="needs a name or an EvictionPolicy object"):
        make_manager("vllm_v1", num_blocks=8, block_size=4, policy=FIFO)


def test_the_offline_policy_says_that_it_needs_the_future():
    with pytest.raises(ValueError, match="'belady' needs the future"):
        make_manager("vllm_v1", num_blocks=8, block_size=4, policy="belady")


def test_a_policy_of_the_users_own_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from cache.policies.lru import LRU\n\n\nclass Mine(LRU):\n    name = 'mine'\n")
    manager = make_manager("vllm_v1", num_blocks=8, block_size=4, policy=f"{file}:Mine")
    assert manager.pool.policy.name == "mine"


def test_a_design_without_prefix_caching_gets_its_own_options_only():
    manager = make_manager("contiguous", num_blocks=8, block_size=4, reservation="pow2")
    assert manager.reservation == "pow2"
    assert not manager.enable_prefix_caching


@pytest.mark.parametrize("name", ["contiguous", "paged"])
@pytest.mark.parametrize(("option", "value"), [("policy", "fifo"), ("hash_algorithm", "sha256")])
def test_a_design_without_prefix_caching_refuses(name, option, value):
    with pytest.raises(UnsupportedByDesign, match=f"'{name}' does not offer a {option}"):
        make_manager(name, num_blocks=8, block_size=4, **{option: value})
