"""check_invariants of every manager finds damaged state."""

import pytest
from manager_helpers import CACHING, NAMES, manager_of, started, used

TABLE_DAMAGES = {
    "doubled": (lambda table: table.blocks.__setitem__(1, table.blocks[0]), "for 9 tokens"),
    "shortened": (lambda table: table.blocks.pop(), "for 9 tokens"),
    "more": (lambda table: setattr(table.seq, "num_computed_tokens", 13), "13 tokens"),
    "fewer": (lambda table: setattr(table.seq, "num_computed_tokens", 0), "0 tokens are stored"),
}


@pytest.mark.parametrize(("damage", "says"), TABLE_DAMAGES.values(), ids=TABLE_DAMAGES)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "contiguous"])
def test_a_damaged_table_is_found(name, caching, damage, says):
    manager = manager_of(name, **({"enable_prefix_caching": caching} if name in CACHING else {}))
    started(manager, 0, range(9))
    damage(manager._tables[0])
    with pytest.raises(AssertionError, match=f"0: .*{says}"):
        manager.check_invariants()


def child_of_root(manager):
    return next(iter(manager.tree.root.children.values()))


def unjoined_buddies(manager, table):
    manager._buddy._free[:3] = {}, {4: None, 6: None, 8: None}, {}


# Damage to a manager with blocks of 4: one sequence of 9 tokens was freed, the other has table t.
DAMAGES = {
    "paged": {
        "free and used": lambda m, t: m._free.append(t.blocks[0]),
        "lost": lambda m, t: m._free.pop(),
        "unknown": lambda m, t: m._free.append(10),
        "empty block": lambda m, t: t.blocks.append(m._free.pop()),
    },
    "nano_vllm": {
        "ref_count": lambda m, t: m.pool.ref_counts.__setitem__(t.blocks[0], 2),
        "content": lambda m, t: m._contents.__setitem__(t.blocks[1], None),
        "fewer cached": lambda m, t: setattr(t, "num_cached_blocks", 1),
        "hashes": lambda m, t: m._hasher.block_hashes(t.seq).reverse(),
        "not evictable": lambda m, t: m.pool._publish([9], [bytes(8)], (0,)),
    },
    "vllm_v1": {
        "negative ref_count": lambda m, t: m.pool.ref_counts.__setitem__(9, -1),
        "free but cached": lambda m, t: m.pool.block_hashes.__setitem__(9, bytes(16)),
        "released but forgotten": lambda m, t: m.pool._forget([0]),
        "index": lambda m, t: m.pool.block_hashes.__setitem__(t.blocks[0], None),
        "free twice": lambda m, t: m.pool._free.append(m.pool._free[0]),
        "free count": lambda m, t: setattr(m.pool, "num_free_blocks", 3),
        "lost free block": lambda m, t: m.pool._free.pop(),
        "uncached in policy": lambda m, t: m.pool.policy.release(m.pool._free.pop()),
    },
    "vllm_v0": {
        "ref_count": lambda m, t: m.gpu.ref_counts.__setitem__(t.blocks[0], 2),
        "key": lambda m, t: m.gpu.keys.__setitem__(t.blocks[0], m.gpu.keys[t.blocks[1]]),
        "computed": lambda m, t: m.gpu.computed.__setitem__(t.blocks[2], 1),
        "free": lambda m, t: m.gpu._stack.append(t.blocks[0]),
        "marked": lambda m, t: setattr(t, "num_computed_blocks", 2),
    },
    "radix": {
        "free": lambda m, t: m._free.append(t.blocks[0]),
        "extra": lambda m, t: m._extra_users.update([t.blocks[2]]),
        "table": lambda m, t: setattr(t, "blocks", t.blocks[::-1]),
        "shared": lambda m, t: m.tree.share(t.node),
        "evictable": lambda m, t: setattr(m.tree, "num_evictable", m.tree.num_evictable + 1),
        "lock": lambda m, t: setattr(child_of_root(m), "lock_ref", 1),
        "blocks": lambda m, t: child_of_root(m).blocks.pop(),
        "parent": lambda m, t: setattr(child_of_root(m), "parent", t.node),
        "leaf": lambda m, t: m.tree.leaves.remove(child_of_root(m)),
        "depth": lambda m, t: setattr(child_of_root(m), "depth", 1),
    },
    "contiguous": {
        "freed": lambda m, t: m._buddy.free(t.start),
        "leaked": lambda m, t: m._buddy.allocate(1),
        "overfull": lambda m, t: setattr(t, "max_tokens", 4),
        "unreserved": lambda m, t: setattr(t, "num_reserved", 4),
        "lost run": lambda m, t: m._buddy._free[2].clear(),
        "free and used": lambda m, t: m._buddy._free[0].update({t.start: None}),
        "miscounted": lambda m, t: setattr(m._buddy, "num_free", 7),
        "unjoined": unjoined_buddies,
    },
}


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name in DAMAGES for damage in DAMAGES[name]]
)
def test_damaged_state_is_found(name, damage):
    manager = manager_of(name)
    used(manager, 0, range(50, 59))
    started(manager, 1, range(9))
    DAMAGES[name][damage](manager, manager._tables[1])
    with pytest.raises(AssertionError):
        manager.check_invariants()
