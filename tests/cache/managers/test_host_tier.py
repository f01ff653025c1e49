"""The tier in host memory: random steps on memory that is checked, and examples to the digit."""

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_helpers import manager_of

from cache import AllocStatus, Group, OutOfBlocks, Sequence
from cache.blocks.session_hint import SessionHint

DESIGNS = {name: {} for name in ("nano_vllm", "vllm_v0", "vllm_v1", "radix")}
DESIGNS["vllm_v1 window"] = {"sliding_window": 4}
DESIGNS["vllm_v1 groups"] = {"groups": [Group("window", 3), Group(), Group("window", 6)]}
DESIGNS["vllm_v1 states"] = {"groups": [Group(), Group("state"), Group("window", 4)]}
STORES = [("through", True), ("selective", True), ("back", True), ("back", False)]
HOST_POLICIES = ["lru", "arc", "gittins", "lfu", "session_gap", "safeguarded"]


class Machine:
    """Steps of random calls.  The beginnings of four long texts are served again and again.

    A slot holds its group, the salt and all tokens up to it.  A state fills its whole block.
    """

    def __init__(self, design: str, seed: int) -> None:
        self.random = random.Random(seed)
        pick, options = self.random.choice, dict(DESIGNS[design])
        options["store"], options["inclusive"] = pick(STORES)
        options |= {"host_blocks": pick(range(1, 31)), "host_policy": pick(HOST_POLICIES)}
        self.size, num_blocks = pick([1, 2, 3]), pick([3, 4, 5, 6])
        if "groups" in options:
            num_blocks, options["retention"] = 3 * num_blocks, pick([None, 0])
        self.manager = manager_of(design.split()[0], num_blocks, self.size, **options)
        self.manager.clock, self.tier = count().__next__, self.manager.tier
        self.device = [[None] * self.size for _ in range(num_blocks)]
        self.host = [[None] * self.size for _ in range(self.manager.num_host_blocks)]
        self.live, self.waiting, self.ids, self.counted = [], [], count(), Counter()
        self.copies, self.starts = [], {}  # of this step, starts by sequence
        self.contents = {}
        for seq in (self.sequence(text, 60) for text in range(4)):
            for group, kind in enumerate(self.manager.groups):
                for i, key in enumerate(self.tier.hasher.block_hashes(seq, group)):
                    slots = range(i * self.size, (i + 1) * self.size)
                    if kind.kind == "state":
                        slots = [slots[-1]] * self.size
                    self.contents[key] = [self.content(seq, group, slot) for slot in slots]

    def tokens(self, text: int, end: int) -> tuple[int, ...]:
        return tuple(text * (i >= 2 * text) for i in range(end))

    def sequence(self, text: int, length: int) -> Sequence:
        salt = "a" if text == 3 else None
        seq = Sequence(next(self.ids), self.tokens(text, length), cache_salt=salt)
        seq.text, seq.hints = text, SessionHint(text, self.random.random() < 0.5).numbers
        return seq

    def content(self, seq: Sequence, group: int, position: int) -> tuple:
        return group, seq.cache_salt, self.tokens(seq.text, position + 1)

    def step(self) -> None:
        actions = [self.admit] * 4 + [self.append] * 5 + [self.leave] * 2 + [self.fork, self.reset]
        for action in self.random.choices(actions, k=self.random.randint(1, 6)):
            action()
        self.run()
        self.check()

    def stored(self) -> Sequence | None:
        """A sequence that has no call in this step."""
        return self.random.choice([s for s in self.live if s not in self.starts] or [None])

    def reveal(self, seq: Sequence) -> None:
        """The host reads the token that was sampled last."""
        if seq.num_unknown_tokens:
            seq.token_ids[-1] = self.tokens(seq.text, len(seq.token_ids))[-1]
            seq.num_unknown_tokens = 0

    def admit(self) -> None:
        manager, randint, resumes = self.manager, self.random.randint, self.random.random() < 0.4
        if resumes and self.waiting:
            seq, kind = self.waiting[0], "resumed_host_hit_blocks"
        else:
            seq = self.sequence(randint(0, 3), randint(1, 4 * self.size + 1))
            kind = "host_hit_blocks"
        self.reveal(seq)
        hit, length = manager.find(seq), len(seq.token_ids)
        start = hit.num_tokens
        assert start < length, "no token is left to compute"
        if manager.groups == (Group(),) and start + self.size < length:
            host = self.tier.pool.find(self.tier.hasher.block_hashes(seq)[start // self.size])
            assert host in {None, *(host for _, host in self.tier._next_out)}, "a short hit"
        end = randint(start + 1, length) if manager.can_chunk and randint(0, 1) else length
        end = manager.chunk_end(seq, start, end, hit)
        if end == start:
            return
        status = manager.can_allocate(seq, hit)
        try:
            self.copies += manager.admit(seq, hit, end)
        except OutOfBlocks:
            assert status is not AllocStatus.OK
            self.leave(is_finished=False)
            return
        self.starts[seq] = start
        self.live.append(seq)
        if seq in self.waiting:
            self.waiting.remove(seq)
        self.counted[kind] += start // self.size - len(hit.blocks)

    def append(self) -> None:
        if (seq := self.stored()) is None:
            return
        self.reveal(seq)
        start, length = seq.num_computed_tokens, len(seq.token_ids)
        if start == length:
            is_known = self.random.random() < 0.5
            for token in self.tokens(seq.text, length + 1 + is_known)[length:]:
                seq.append_token(token if is_known else 99)
            seq.num_unknown_tokens = int(not is_known)
        end = self.manager.chunk_end(seq, start, len(seq.token_ids))
        try:
            if end > start:
                self.copies += self.manager.append(seq, end)
                self.starts[seq] = start
        except OutOfBlocks:
            self.leave(is_finished=False)

    def leave(self, is_finished: bool | None = None) -> None:
        if (seq := self.stored()) is not None:
            is_finished = self.random.random() < 0.5 if is_finished is None else is_finished
            self.manager.free(seq, is_finished)
            self.live.remove(seq)
            self.waiting += [seq] * (not is_finished)

    def fork(self) -> None:
        if self.manager.can_fork and (parent := self.stored()) is not None:
            self.reveal(parent)
            self.live.append(parent.fork(next(self.ids)))
            self.manager.fork(parent, self.live[-1])

    def reset(self) -> None:
        if self.manager.can_reset and not self.live and self.random.random() < 0.1:
            self.counted["stored_blocks"] += len(self.tier._out) + len(self.tier._next_out)
            assert self.manager.reset_prefix_cache()
            assert not any(self.tier.pool.block_hashes)

    def run(self) -> None:
        """The step: swap_out, copies, swap_in, then K/V."""
        out, loads = self.manager.take_transfers()
        self.counted.update(stored_blocks=len(out), loaded_blocks=len(loads))
        device, host, size = self.device, self.host, self.size
        for source, target, pairs in (
            (device, host, out), (device, device, self.copies), (host, device, loads)
        ):  # fmt: skip
            for src, dst in pairs:
                target[dst] = source[src].copy()
        for seq, start in self.starts.items():
            end = seq.num_computed_tokens
            for group, table in enumerate(self.manager.block_tables(seq)):
                is_state = self.manager.groups[group].kind == "state"
                if is_state and start:
                    state = device[table[(start - 1) // size]][0]
                    assert state == self.content(seq, group, start - 1), "another state"
                for position in range(end - 1 if is_state else start, end):
                    content, slots = (
                        self.content(seq, group, position),
                        device[table[position // size]],
                    )
                    slots[
                        slice(None) if is_state else slice(position % size, position % size + 1)
                    ] = [content] * (size if is_state else 1)
        self.copies, self.starts = [], {}

    def check(self) -> None:
        if self.random.random() < 0.1:  # it copies some policies
            self.manager.check_invariants()
        for seq in self.live:
            stored = seq.num_computed_tokens
            for number, table in enumerate(self.manager.block_tables(seq)):
                group = self.manager.groups[number]
                first = 0 if group.kind == "full" else max(0, stored - group._reach)
                for position in range(first, stored):
                    slot = self.device[table[position // self.size]][position % self.size]
                    assert slot == self.content(seq, number, position), "it reads other content"
        pending = {host for _, host in (*self.tier._out, *self.tier._next_out)}
        for host, key in enumerate(self.tier.pool.block_hashes):
            assert key is None or host in pending or self.host[host] == self.contents[key]

    def end(self) -> None:
        for seq in self.live:
            self.manager.free(seq)
        self.live = []
        self.run()
        self.run()
        self.check()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.tier.pool.num_free_blocks == self.manager.num_host_blocks
        for name, number in self.counted.items():
            assert getattr(self.manager.stats, name) == number, name


@pytest.mark.parametrize("design", DESIGNS)
def test_host_blocks_hold_the_content_of_their_keys(design):
    num_loads = Counter()

    @settings(max_examples=10 * settings.default.max_examples)
    @given(seed=st.integers(0, 1 << 30))
    def run(seed):
        machine = Machine(design, seed)
        for _ in range(60):
            machine.step()
        machine.end()
        num_loads.update(
            loads=machine.counted["loaded_blocks"],
            stores=machine.counted["stored_blocks"],
            hits=machine.manager.stats.hit_blocks,
            resumed=machine.counted["resumed_host_hit_blocks"],
        )

    run()
    print(design, num_loads)
