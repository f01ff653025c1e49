"""The tier in host memory under random steps; the content of device and host memory is checked."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_helpers import CACHING, manager_of

from cache import AllocStatus, Group, OutOfBlocks, Sequence
from cache.blocks.session_hint import SessionHint

DESIGNS = {name: {} for name in CACHING} | {
    "vllm_v1 window": {"sliding_window": 4},
    "vllm_v1 groups": {"groups": [Group("window", 3), Group(), Group("window", 6)]},
    "vllm_v1 states": {"groups": [Group(), Group("state"), Group("window", 4)]},
}
STORES = [("through", True), ("selective", True), ("back", True), ("back", False)]
TEXTS = [[text * (i >= 2 * text) for i in range(99)] for text in range(4)]


class Machine:
    """Steps of random calls for sequences that are the beginnings of TEXTS, many times.

    A slot holds its group and all tokens up to it.  A state fills the first slot of its block.
    """

    def __init__(self, design: str, seed: int) -> None:
        self.random = random.Random(seed)
        pick, options = self.random.choice, dict(DESIGNS[design])
        options["store"], options["inclusive"] = pick(STORES)
        policies = ["lru", "arc", "gittins", "lfu", "session_gap", "safeguarded"]
        options |= {"host_blocks": pick(range(1, 31)), "host_policy": pick(policies)}
        self.size, num_blocks = pick([1, 2, 3]), pick([3, 4, 5, 6])
        if "groups" in options:
            num_blocks, options["retention"] = 3 * num_blocks, pick([None, 0])
        self.manager = manager_of(design.split()[0], num_blocks, self.size, **options)
        self.manager.clock, self.tier = count().__next__, self.manager.tier
        self.device = [[None] * self.size for _ in range(num_blocks)]
        self.host = [[None] * self.size for _ in range(options["host_blocks"])]
        self.live, self.waiting, self.ids, self.counted = [], [], count(), Counter()
        self.copies, self.starts = [], {}  # of this step, starts by sequence
        self.keys = {}  # key -> text, group, position of the block
        for text, tokens in enumerate(TEXTS):
            for group in range(len(self.manager.groups)):
                hashes = self.tier.hasher.block_hashes(Sequence(0, tokens), group)
                self.keys |= {key: (text, group, i) for i, key in enumerate(hashes)}

    def slots(self, text: int, group: int, first: int, end: int) -> Iterator[tuple]:
        """(position in the table, offset, content) of slots that the tokens before ``end`` have."""
        is_state = self.manager.groups[group].kind == "state"
        for i in range(end - 1 if is_state else first, end):
            offset = 0 if is_state else i % self.size
            yield i // self.size, offset, (group, *TEXTS[text][: i + 1])

    def step(self) -> None:
        actions = [self.admit] * 5 + [self.append] * 5 + [self.leave] * 3 + [self.fork, self.reset]
        for action in self.random.choices(actions, k=self.random.randint(1, 8)):
            action()
        self.run()

    def stored(self) -> Sequence | None:
        """A sequence that has no call in this step; the host has read its last token."""
        seq = self.random.choice([s for s in self.live if s not in self.starts] or [None])
        if seq is not None and seq.num_unknown_tokens:
            seq.token_ids[-1], seq.num_unknown_tokens = TEXTS[seq.text][len(seq.token_ids) - 1], 0
        return seq

    def admit(self) -> None:
        manager, randint, kind = self.manager, self.random.randint, "host_hit_blocks"
        if self.waiting and randint(0, 1):
            seq, kind = self.waiting.pop(0), "resumed_host_hit_blocks"
        else:
            text = randint(0, 3)
            seq = Sequence(next(self.ids), TEXTS[text][: randint(1, 4 * self.size + 1)])
            seq.text, seq.hints = text, SessionHint(text, bool(randint(0, 1))).numbers
        hit, length = manager.find(seq), len(seq.token_ids)
        assert hit.num_tokens < length, "no token is left to compute"
        ends = [min(length, hit.num_tokens + randint(1, 9)), length]
        ends = [manager.chunk_end(seq, hit.num_tokens, end, hit) for end in ends]
        end = ends[0] if manager.can_chunk and ends[0] > hit.num_tokens else ends[1]
        status = manager.can_allocate(seq, hit)
        try:
            self.copies += manager.admit(seq, hit, end)
        except OutOfBlocks:
            assert status is not AllocStatus.OK
            self.waiting += [seq] * (kind != "host_hit_blocks")
            self.leave(is_finished=False)
            return
        self.starts[seq] = hit.num_tokens
        self.live.append(seq)
        self.counted[kind] += hit.num_tokens // self.size - hit.num_device_blocks

    def append(self) -> None:
        if (seq := self.stored()) is None:
            return
        start, length = seq.num_computed_tokens, len(seq.token_ids)
        if start == length:
            seq.num_unknown_tokens = self.random.randint(0, 1)
            for token in TEXTS[seq.text][length : length + 2 - seq.num_unknown_tokens]:
                seq.append_token(99 if seq.num_unknown_tokens else token)
        try:
            end = self.manager.chunk_end(seq, start, len(seq.token_ids))
            self.copies += self.manager.append(seq, end)
            self.starts[seq] = start
        except OutOfBlocks:
            self.leave(is_finished=False)

    def leave(self, is_finished: bool | None = None) -> None:
        if (seq := self.stored()) is not None:
            is_finished = self.random.random() < 0.5 if is_finished is None else is_finished
            self.manager.free(seq, is_finished)
            self.live.remove(seq)
            self.waiting += [] if is_finished else [seq]

    def fork(self) -> None:
        if self.manager.can_fork and (parent := self.stored()) is not None:
            self.live.append(parent.fork(next(self.ids)))
            self.manager.fork(parent, self.live[-1])

    def reset(self) -> None:
        if self.manager.can_reset and not self.live and self.random.random() < 0.2:
            assert self.manager.reset_prefix_cache()
            assert not any(self.tier.pool.block_hashes)

    def run(self) -> None:
        """The step: swap_out, copies, swap_in, then K/V."""
        out, loads = self.manager.take_transfers()
        self.counted.update(stored_blocks=len(out), loaded_blocks=len(loads))
        for device, host in out:
            self.host[host] = self.device[device].copy()
        for source, target in self.copies:
            self.device[target] = self.device[source].copy()
        for host, device in loads:
            self.device[device] = self.host[host].copy()
        for seq, start in self.starts.items():
            self.check_reads(seq, start)
            for group, table in enumerate(self.manager.block_tables(seq)):
                for i, offset, content in self.slots(
                    seq.text, group, start, seq.num_computed_tokens
                ):
                    self.device[table[i]][offset] = content
        self.copies, self.starts = [], {}
        for seq in self.live:
            self.check_reads(seq, seq.num_computed_tokens)
        pending = {*self.tier._out, *self.tier._next_out}
        for host, key in enumerate(self.tier.pool.block_hashes):
            if key is not None and host not in pending:
                text, group, i = self.keys[key]
                for _, offset, content in self.slots(
                    text, group, i * self.size, (i + 1) * self.size
                ):
                    assert self.host[host][offset] == content, "a host block has other content"
        if self.random.random() < 0.05:  # it takes long
            self.manager.check_invariants()

    def check_reads(self, seq: Sequence, end: int) -> None:
        """Check what the query at ``end`` reads."""
        for number, table in enumerate(self.manager.block_tables(seq) if end else ()):
            window = self.manager.groups[number].window or 99
            for i, offset, content in self.slots(seq.text, number, max(0, end + 1 - window), end):
                assert self.device[table[i]][offset] == content, "a sequence reads other content"

    def end(self) -> None:
        for seq in self.live:
            self.manager.free(seq)
        self.live = []
        self.run()
        self.run()
        self.manager.check_invariants()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.tier.pool.num_free_blocks == self.tier.pool.num_blocks
        assert {name: getattr(self.manager.stats, name) for name in self.counted} == self.counted


@pytest.mark.parametrize("design", DESIGNS)
def test_no_history_gives_a_host_block_other_content(design):
    loads = []

    @settings(max_examples=3 * settings.default.max_examples)
    @given(seed=st.integers(0, 1 << 30))
    def run(seed):
        machine = Machine(design, seed)
        for _ in range(60):
            machine.step()
        machine.end()
        loads.append(machine.counted["loaded_blocks"])

    run()
    assert sum(loads) > 2 * len(loads)
