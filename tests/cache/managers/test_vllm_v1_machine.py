"""vllm_v1 under random operations, against the model and a list as the free queue."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from manager_machine import Live, ManagerMachine

from cache import POLICIES, make_manager

ONLINE_POLICIES = sorted(name for name, policy in POLICIES.items() if not policy.needs_future)


class VLLMv1Machine(ManagerMachine):
    supports_fork = True
    supports_chunks = True
    supports_reset = True

    def make_manager(self, data, num_blocks, block_size):
        # One block in each position; lru twice as often, since its queue is predicted exactly.
        self.policy = data.draw(st.sampled_from([*ONLINE_POLICIES, "lru"]), label="policy")
        self.caching = data.draw(st.sampled_from([True, True, True, False]), label="caching")
        self.cached: dict[int, tuple] = {}  # block -> content of its last token
        self.queue = list(range(num_blocks))  # free blocks as vLLM keeps them
        return make_manager(
            "vllm_v1",
            num_blocks=num_blocks,
            block_size=block_size,
            policy=self.policy,
            hash_algorithm=data.draw(st.sampled_from(["xxh3_128", "sha256"])),
            enable_prefix_caching=self.caching,
        )

    def expected_hits(self, seq):
        found, size = set(self.cached.values()), self.block_size
        hits = 0
        while hits + size < seq.num_tokens and self.content(seq, hits + size - 1) in found:
            hits += size
        return hits

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

    def observe(self, live: Live, taken: list[int]) -> None:
        for block in live.table:
            if block in self.queue and block not in taken:
                self.queue.remove(block)
        if self.policy == "lru":
            assert taken == self.queue[: len(taken)], "not from the front of the queue"
        for block in taken:
            self.queue.remove(block)
            self.cached.pop(block, None)

    def observe_noted(self, live: Live) -> None:
        if self.caching:
            for i in range(live.stored // self.block_size):
                last = (i + 1) * self.block_size - 1
                self.cached[live.table[i]] = self.content(live.seq, last)

    def observe_free(self, live: Live) -> None:
        self.queue += [block for block in reversed(live.table) if not self.users(block)]

    def observe_reset(self) -> None:
        self.cached.clear()

    def snapshot(self):
        pool = self.manager.pool
        state = (*pool.ref_counts,), (*pool.block_hashes,), (*pool.free_blocks(),)
        return *super().snapshot(), state

    def teardown(self):
        if hasattr(self, "manager"):
            for live in self.live.values():
                self.manager.free(live.seq)
            self.manager.check_invariants()
            assert self.manager.num_free_blocks == self.num_blocks
            assert self.manager.reset_prefix_cache()
            assert self.manager.pool.num_cached_blocks == 0


VLLMv1Machine.TestCase.settings = settings(
    max_examples=12 * settings.default.max_examples, stateful_step_count=40
)
TestVLLMv1Machine = VLLMv1Machine.TestCase
