"""radix under random operations, against the content of its blocks and a rule for what it keeps."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant
from manager_machine import Live, ManagerMachine

from cache import POLICIES, make_manager

ONLINE_POLICIES = sorted(name for name, policy in POLICIES.items() if not policy.needs_future)


class RadixMachine(ManagerMachine):
    supports_fork = True
    supports_chunks = True
    supports_reset = True

    def make_manager(self, data, num_blocks, block_size):
        self.caching = data.draw(st.sampled_from([True, True, True, False]), label="caching")
        self.cached_before: set[tuple] = set()  # the running step
        return make_manager(
            "radix",
            num_blocks=num_blocks,
            block_size=block_size,
            policy=data.draw(st.sampled_from(ONLINE_POLICIES), label="policy"),
            enable_prefix_caching=self.caching,
        )

    def nodes(self):
        return self.manager.tree.check_invariants()

    def cached(self) -> set[tuple]:
        """Contents of the last tokens of all blocks in the tree."""
        last = self.block_size - 1
        return {self.slots[block, last] for node in self.nodes() for block in node.blocks}

    def last_of_block(self, seq, i):
        return self.content(seq, (i + 1) * self.block_size - 1)

    def expected_hits(self, seq):
        cached, hits = self.cached_before, 0
        while (hits + 1) * self.block_size < seq.num_tokens and (
            self.last_of_block(seq, hits) in cached
        ):
            hits += 1
        return hits * self.block_size

    def blocks_needed(self, live, end):
        table = live.table
        if live.seq.seq_id not in self.live:
            table, _ = self.manager.get_computed_blocks(live.seq)
            revived = sum(self.users(block) == 0 for block in table)
            return -(-end // self.block_size) - len(table) + revived
        copied = live.stored % self.block_size and (
            self.users(table[live.stored // self.block_size]) > 1
        )
        return max(0, -(-end // self.block_size) - len(table)) + bool(copied)

    def adopt(self, seq, num_cached, end, table):
        super().adopt(seq, num_cached, end, table)
        if self.caching:
            contents = {self.last_of_block(seq, i) for i in range(end // self.block_size)}
            assert contents <= self.cached(), "full blocks of a prompt are missing in the tree"

    def observe_free(self, live: Live) -> None:
        cached = self.cached()
        in_tree = {block for node in self.nodes() for block in node.blocks}
        for i in range(live.stored // self.block_size if self.caching else 0):
            if live.table[i] not in in_tree and self.users(live.table[i]):
                break  # a fork has it: the last one to be freed brings it into the tree
            assert self.last_of_block(live.seq, i) in cached, "a full block was lost"

    def snapshot(self):
        manager = self.manager
        nodes = [(n.key, n.extra, (*n.blocks,), n.lock_ref, n.accessed) for n in self.nodes()]
        leaves = [tuple(node.blocks) for node in manager.tree.leaves]
        free = (*manager._free,), manager._num_fresh, dict(manager._extra_users)
        return *super().snapshot(), nodes, leaves, free

    @invariant()
    def the_tree_holds_what_its_paths_say(self):
        cached = set()
        for node in self.nodes():  # parents first
            for i, block in enumerate(node.blocks):
                for offset in range(self.block_size):
                    lora, salt, inputs, tokens = self.slots[block, offset]
                    assert len(tokens) == (node.depth + i) * self.block_size + offset + 1
                    position = i * self.block_size + offset
                    assert node.key[4 * position : 4 * position + 4] == tokens[-1].to_bytes(
                        4, "little"
                    )
                content = lora, salt, inputs, tokens
                assert content not in cached, "the same content twice in the tree"
                cached.add(content)
                before = tokens[: -self.block_size]
                inputs = tuple(item for item in inputs if item.offset < len(before))
                assert not before or (lora, salt, inputs, before) in cached
        self.cached_before = cached

    def teardown(self):
        if hasattr(self, "manager"):
            for live in self.live.values():
                self.manager.free(live.seq)
            self.manager.check_invariants()
            assert self.manager.num_free_blocks == self.num_blocks
            assert self.manager.reset_prefix_cache()
            self.manager.check_invariants()
            assert self.nodes() == []


RadixMachine.TestCase.settings = settings(
    max_examples=12 * settings.default.max_examples, stateful_step_count=40
)
TestRadixMachine = pytest.mark.slow(RadixMachine.TestCase)
