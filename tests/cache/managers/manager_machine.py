"""A Hypothesis state machine that drives any cache manager beside a simple model of its blocks.

The model stores the content of each slot: all tokens up to its position and the extra keys, which
its K/V depend on.  Writing a token writes its slot, and a copy copies all slots of a block.  After
every step

- every stored token of every live sequence is unchanged when read through its block table,
- a cached prefix holds exactly the requested content,
- nothing was written to a block that is also in another table,
- free and used blocks and slots add up, and the manager's own invariants hold,
- a call that failed has changed nothing.

The machine of a design makes the manager and may predict more (``expected_hits``,
``blocks_needed``, ``observe``).
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manager_helpers import state_of

from cache import AllocStatus, OutOfBlocks, Sequence
from cache.managers.base import FREED

TOKENS = st.integers(0, 1)
BLOCK_SIZES = st.sampled_from([1, 2, 3, 4, 16])


@dataclass
class Live:
    """A sequence that holds blocks, and how many of its tokens are stored."""

    seq: Sequence
    stored: int
    table: list[int]


class ManagerMachine(RuleBasedStateMachine):
    """Rules for what the design under test offers."""

    window: int | None = None
    """Tokens that a query sees, itself included; None for all."""

    def first_seen(self, num_tokens: int) -> int:
        """The first of ``num_tokens`` stored tokens that later queries see."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1)

    def make_manager(self, data, num_blocks: int, block_size: int):
        """The manager under test."""
        raise NotImplementedError

    def expected_hits(self, seq: Sequence) -> int | None:
        """Cached tokens that an allocation of ``seq`` must report; None if not predicted."""
        return 0

    def expected_status(self, seq: Sequence) -> AllocStatus:
        """The result that ``can_allocate`` must have."""
        if -(-seq.num_tokens // self.block_size) > self.num_blocks:
            return AllocStatus.NEVER
        enough = self.blocks_needed(Live(seq, 0, []), seq.num_tokens) <= self.num_free
        return AllocStatus.OK if enough else AllocStatus.LATER

    def blocks_needed(self, live: Live, end: int) -> int:
        """Free blocks that storing up to ``end`` tokens takes."""
        table, needed = live.table, -(-end // self.block_size)
        if live.seq.seq_id not in self.live:
            table, _ = self.manager.get_computed_blocks(live.seq)
            return needed - len(table) + sum(self.users(block) == 0 for block in held(table))
        partial = live.stored % self.block_size
        copied = partial and self.users(table[live.stored // self.block_size]) > 1
        return max(0, needed - len(table)) + bool(copied)

    def found(self, live: Live, end: int) -> dict[int, int]:
        """Blocks that hold content of ``live`` up to ``end`` already, by position in its table."""
        return {}

    def tokens_to_come(self, seq: Sequence) -> int:
        """How many tokens ``seq`` may still generate."""
        return 99

    def observe(self, live: Live, taken: list[int]) -> None:
        """A call succeeded: ``live`` has its new table and tokens; ``taken`` are new blocks."""

    def observe_free(self, live: Live) -> None:
        """``live`` has given its blocks back."""

    def observe_given_back(self, blocks: list[int]) -> None:
        """A sequence has given back ``blocks``, which are behind its window."""

    @property
    def num_free(self) -> int:
        return self.manager.num_free_blocks

    @initialize(data=st.data(), block_size=BLOCK_SIZES, num_blocks=st.integers(1, 20))
    def start(self, data, block_size, num_blocks):
        self.block_size, self.num_blocks = block_size, num_blocks
        self.manager = self.make_manager(data, num_blocks, block_size)
        self.live: dict[int, Live] = {}
        self.waiting: list[Sequence] = []  # preempted
        self.preempted: set[int] = set()  # ids of those that have not resumed
        self.slots: dict[tuple[int, int], tuple] = {}
        self.history: list[list[int]] = [[]]
        self.next_id = 0
        self.versions: dict[tuple[int, int], list[int]] = {}
        self.counted: Counter[str] = Counter()  # fields of CacheStats

    def content(self, seq: Sequence, position: int) -> tuple:
        """Everything that the K/V of ``position`` depend on."""
        inputs = tuple(item for item in seq.mm_inputs if item.offset <= position)
        tokens = tuple(seq.token_ids[: position + 1])
        return seq.lora_name, seq.cache_salt, inputs, tokens

    def stored_at(self, table: list[int], position: int) -> tuple | None:
        return self.slots.get((table[position // self.block_size], position % self.block_size))

    def users(self, block: int) -> int:
        return sum(block in live.table for live in self.live.values())

    def write(self, live: Live, end: int, copies=()) -> None:
        """Do the work of the caller's kernels: the copies, then K/V of the new tokens."""
        self.give_back(live)
        found, moved = self.found(live, end), dict(copies)
        before, live.table = live.table, self.manager.block_table(live.seq)
        kept = [found.get(i, moved.get(block, block)) for i, block in enumerate(before)]
        assert live.table[: len(before)] == kept, "only copied blocks are replaced"
        assert moved.keys() <= set(before)
        assert all(map(self.users, moved)), "a block is copied that no other sequence holds"
        assert all(live.table[i] == block for i, block in found.items())
        taken = list(moved.values())
        for i in range(len(before), len(live.table)):
            if i not in found and live.table[i] not in live.table[:i]:
                taken.append(live.table[i])
        for block in taken:
            assert self.users(block) == 1, f"block {block} was handed out, but is in use"
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)
        for src, dst in copies:
            self.copy(self.slots, src, self.slots, dst)
        for position in range(live.stored, end):
            block, offset = live.table[position // self.block_size], position % self.block_size
            content = self.content(live.seq, position)
            same = position // self.block_size in found and self.slots[block, offset] == content
            assert same or self.users(block) == 1, f"block {block} is written while shared"
            self.slots[block, offset] = content
        live.stored = end
        assert live.seq.num_computed_tokens == end
        self.counted["copied_blocks"] += len(copies)
        self.observe(live, taken)

    def copy(self, source: dict, src: int, target: dict, dst: int) -> None:
        """Copy block ``src`` of the slots ``source`` to block ``dst`` of ``target``."""
        for offset in range(self.block_size):
            target.pop((dst, offset), None)
            if (src, offset) in source:
                target[dst, offset] = source[src, offset]

    def behind_window(self, live: Live) -> list[int]:
        """Blocks that ``live`` holds and that its next query does not see."""
        return held(live.table[: self.first_seen(live.stored) // self.block_size])

    def give_back(self, live: Live) -> None:
        """The manager has taken back the blocks behind the window, before anything else."""
        blocks = self.behind_window(live)
        live.table = [FREED if block in blocks else block for block in live.table]
        self.observe_given_back(blocks)

    def attempt(self, live: Live, end: int, call):
        """``call()``; None if too few blocks are free, after checking that it raises then.

        A raise changes nothing, except that blocks behind a window are given back.
        """
        unseen = self.behind_window(live)
        needed = self.blocks_needed(live, end)
        free = self.num_free + sum(self.users(block) == 1 for block in unseen)
        if needed <= free:
            return call()
        before = state_of(self.manager)
        with pytest.raises(OutOfBlocks) as failure:
            call()
        assert failure.value.free == free < failure.value.needed
        assert unseen or state_of(self.manager) == before, "a failed call has changed something"
        self.give_back(live)
        return None

    def new_sequence(self, data) -> Sequence:
        size = self.block_size
        known = data.draw(st.sampled_from(self.history), label="prefix of")
        known = known[: size * (self.num_blocks // 2)]
        cut = data.draw(st.integers(0, len(known)) | st.just(len(known)), label="cut")
        too_long = data.draw(st.integers(0, 15), label="too long if 15") == 15
        lengths = st.integers(1, 2 * size + 1)
        length = size * self.num_blocks + 1 if too_long else data.draw(lengths, label="length")
        tokens = known[:cut] + [data.draw(TOKENS)] * length
        keys = data.draw(
            st.sampled_from([{}] * 5 + [{"lora_name": "a"}, {"cache_salt": "a"}, "mm"])
        )
        if keys == "mm":
            offset = data.draw(st.integers(0, len(tokens) - 1))
            length = data.draw(st.integers(1, len(tokens) - offset))
            name = data.draw(st.sampled_from(["image", "a"]))
            keys = {"mm_inputs": [(name, offset, length)]}
        self.history.append(tokens[: size * self.num_blocks])
        self.next_id += 1
        return Sequence(self.next_id, tokens, **keys)

    def pick(self, data) -> Live:
        return self.live[data.draw(st.sampled_from(sorted(self.live)), label="sequence")]

    def adopt(self, seq: Sequence, num_cached: int, end: int, table: list[int]) -> None:
        """``seq`` got its blocks; ``table`` holds its cached prefix."""
        expected = self.expected_hits(seq)
        note(f"sequence {seq.seq_id} {list(seq.token_ids)}: {num_cached} cached")
        assert expected is None or num_cached == expected
        assert num_cached < seq.num_tokens, "no token is left to compute"
        assert seq.num_cached_tokens == num_cached
        kind = "resumed_" if seq.seq_id in self.preempted else ""
        self.preempted.discard(seq.seq_id)
        self.counted["num_resumptions" if kind else "num_allocations"] += 1
        self.counted[f"{kind}queried_tokens"] += seq.num_tokens
        self.counted[f"{kind}queried_blocks"] += seq.num_tokens // self.block_size
        self.counted[f"{kind}hit_tokens"] += num_cached
        self.counted[f"{kind}hit_blocks"] += num_cached // self.block_size
        live = Live(seq, num_cached, table)
        for position in range(self.first_seen(num_cached), num_cached):
            assert self.stored_at(table, position) == self.content(seq, position), "a false hit"
        self.live[seq.seq_id] = live
        self.write(live, end)

    def allocate(self, seq: Sequence) -> bool:
        status = self.manager.can_allocate(seq)
        assert status is self.expected_status(seq)
        num_cached = self.attempt(
            Live(seq, 0, []), seq.num_tokens, lambda: self.manager.allocate(seq)
        )
        if num_cached is None:
            assert status is not AllocStatus.OK
            assert self.live or status is AllocStatus.NEVER, "an empty cache has room"
            return False
        prefix = self.manager.block_table(seq)[: -(-num_cached // self.block_size)]
        self.adopt(seq, num_cached, seq.num_tokens, prefix)
        return True

    @rule(data=st.data())
    def allocate_new(self, data):
        self.allocate(self.new_sequence(data))

    @rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=1) | st.lists(TOKENS))
    @precondition(lambda self: self.live)
    def append(self, data, tokens):
        """Decoded tokens, accepted drafts, or the next chunk of a prompt."""
        live = self.pick(data)
        seq, start, table = live.seq, live.stored, live.table
        for token in tokens[: self.tokens_to_come(seq)]:
            seq.append_token(token)
        if start == seq.num_tokens:
            return
        ends = st.just(start + 1) | st.integers(start + 1, seq.num_tokens)
        end = data.draw(st.none() | ends, label="end")
        ahead = data.draw(st.sampled_from([0, 0, 1, 5]), label="ahead")
        ahead = ahead if end and self.manager.can_look_ahead else 0
        version, possible = seq.table_version, self.manager.can_append(seq)

        def call():
            if end is None:
                return self.manager.append(seq)
            return self.manager.allocate_slots(seq, end - start, num_lookahead_tokens=ahead)

        last = end or seq.num_tokens
        copies = self.attempt(live, last + ahead, call)
        if end is None:
            assert possible == (copies is not None)
        if copies is not None:
            self.write(live, last, copies)
            if live.table == table and -(-start // self.block_size) == -(-last // self.block_size):
                assert seq.table_version == version

    @rule(data=st.data(), is_finished=st.booleans())
    @precondition(lambda self: self.live)
    def free(self, data, is_finished):
        live = self.pick(data)
        seq = live.seq
        del self.live[seq.seq_id]
        self.manager.free(seq, is_finished)
        assert (seq.num_cached_tokens, seq.num_computed_tokens) == (0, 0)
        if is_finished:
            self.history.append(list(seq.token_ids))
        else:
            self.waiting.append(seq)
            self.preempted.add(seq.seq_id)
        self.observe_free(live)

    @rule()
    @precondition(lambda self: self.waiting)
    def resume(self):
        if self.allocate(self.waiting[0]):
            self.waiting.pop(0)

    @rule(data=st.data(), ahead=st.lists(TOKENS, max_size=2))
    @precondition(lambda self: self.manager.can_fork and self.live)
    def fork(self, data, ahead):
        parent = self.pick(data)
        self.next_id += 1
        child = parent.seq.fork(self.next_id)
        for token in ahead:
            child.append_token(token)
        self.manager.fork(parent.seq, child)
        table = self.manager.block_table(child)
        assert table == parent.table[: len(table)]
        assert len(table) == -(-parent.stored // self.block_size)
        assert child.num_computed_tokens == child.num_cached_tokens == parent.stored
        self.live[child.seq_id] = Live(child, parent.stored, table)

    @rule(data=st.data())
    @precondition(lambda self: self.manager.can_chunk)
    def allocate_first_chunk(self, data):
        seq = self.new_sequence(data)
        blocks, num_cached = self.manager.get_computed_blocks(seq)
        count = data.draw(st.integers(1, seq.num_tokens - num_cached), label="tokens")
        end = num_cached + count
        ahead = 3 * self.manager.can_look_ahead
        copies = self.attempt(
            Live(seq, 0, []),
            end + ahead,
            lambda: self.manager.allocate_slots(seq, count, blocks, ahead),
        )
        if copies is not None:
            assert copies == []
            self.adopt(seq, num_cached, end, blocks)

    @rule(now=st.integers(0, 4).map(lambda n: n == 0))
    @precondition(lambda self: self.manager.can_reset)
    def reset(self, now):
        if not now:
            return
        if self.live:
            before = state_of(self.manager)
            assert not self.manager.reset_prefix_cache()
            assert state_of(self.manager) == before
        else:
            assert self.manager.reset_prefix_cache()
            self.slots.clear()
            self.observe_reset()

    def observe_reset(self) -> None:
        """All cached content was dropped."""

    @invariant()
    def state_is_consistent(self):
        self.manager.check_invariants()

    @invariant()
    def blocks_add_up(self):
        used = {block for live in self.live.values() for block in held(live.table)}
        assert used <= set(range(self.num_blocks))
        assert self.manager.num_free_blocks == self.num_blocks - len(used)

    @invariant()
    def statistics_add_up(self):
        for name, count in self.counted.items():
            assert getattr(self.manager.stats, name) == count, name

    @invariant()
    def memory_adds_up(self):
        usage, size = self.manager.memory_usage(), self.block_size
        blocks = {block for live in self.live.values() for block in held(live.table)}
        stored = {
            (live.table[position // size], position % size)
            for live in self.live.values()
            for position in range(live.stored)
            if live.table[position // size] != FREED
        }
        assert (usage.used, usage.internal) == (len(stored), len(blocks) * size - len(stored))
        assert (usage.reserved, usage.external) == (0, 0)
        assert usage.free == (self.num_blocks - len(blocks)) * size

    @invariant()
    def stored_tokens_are_unchanged(self):
        for live in self.live.values():
            self.check_stored(live, self.slots)

    def check_stored(self, live: Live, slots: dict) -> None:
        assert self.manager.block_table(live.seq) == live.table
        for position in range(self.first_seen(live.stored), live.stored):
            slot = live.table[position // self.block_size], position % self.block_size
            assert slots.get(slot) == self.content(live.seq, position), (live.seq, position)

    @invariant()
    def tables_change_with_their_versions(self):
        for seq_id, live in self.live.items():
            version, table = live.seq.table_version, self.manager.block_table(live.seq)
            assert self.versions.setdefault((seq_id, version), table) == table

    def teardown(self):
        if hasattr(self, "manager"):
            for live in self.live.values():
                self.manager.free(live.seq)
            self.manager.check_invariants()
            assert self.num_free == self.num_blocks
            if self.manager.can_reset:
                assert self.manager.reset_prefix_cache()
                self.manager.check_invariants()


class CachingMachine(ManagerMachine):
    """Full blocks are found by their content."""

    caching = True

    def contents(self) -> set[tuple]:
        """Contents, by their last tokens, of all blocks that can be found."""
        raise NotImplementedError

    def full_contents(self, seq: Sequence, end: int) -> list[tuple]:
        """Contents of the full blocks before token ``end``; none without caching."""
        size = self.block_size
        num_full = end // size if self.caching else 0
        return [self.content(seq, i * size + size - 1) for i in range(num_full)]

    def expected_hits(self, seq):
        size, found = self.block_size, self.contents()
        for end in range((seq.num_tokens - 1) // size, 0, -1):
            first = min(end - 1, self.first_seen(end * size) // size)
            if all(self.content(seq, i * size - 1) in found for i in range(first + 1, end + 1)):
                return end * size
        return 0


def held(table: list[int]) -> list[int]:
    """The blocks of a table that its sequence holds."""
    return [block for block in table if block != FREED]
