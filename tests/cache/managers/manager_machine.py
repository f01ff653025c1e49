"""A hypothesis state machine that drives any cache manager next to a simple model of its blocks.

The model knows what each slot holds: K/V of a position depend on all tokens up to it and on the
extra keys, so that is what a slot "contains".  Writing a token puts its content into a slot,
a copy copies a block's slots.  After every step

- every stored token of every live sequence is found unchanged through its block table,
- a cached prefix holds exactly the content that was asked for,
- nothing was written to a block that another table holds too,
- free and used blocks add up, and the manager's own invariants hold,
- a call that failed has changed nothing that can be seen.

A manager's test file subclasses ``ManagerMachine``, says how to make the manager and which
features its design has, and may predict more (``expected_hits``, ``blocks_needed``, ``observe``).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache import AllocStatus, OutOfBlocks, Sequence

TOKENS = st.integers(0, 1)
BLOCK_SIZES = st.sampled_from([1, 2, 3, 4, 16])


@dataclass
class Live:
    """A sequence that holds blocks, and how many of its tokens are stored."""

    seq: Sequence
    stored: int
    table: list[int]
    noted: int = 0
    """Stored tokens that its last call knows of."""
    num_slots: int = 0
    """Tokens that can be stored before its next call."""


class ManagerMachine(RuleBasedStateMachine):
    """Rules that every design has; subclasses switch features on and say how a manager is made."""

    supports_fork = False
    supports_chunks = False
    lookaheads = (0, 0, 1, 5)
    supports_reset = False

    def make_manager(self, data, num_blocks: int, block_size: int):
        """The manager under test, of ``num_blocks`` blocks of ``block_size`` tokens."""
        raise NotImplementedError

    def expected_hits(self, seq: Sequence) -> int | None:
        """Cached tokens that an allocation of ``seq`` must report; None if not predicted."""
        return None

    def blocks_needed(self, live: Live, end: int) -> int | None:
        """Free blocks that storing up to ``end`` tokens takes; None if not predicted."""
        return None

    def observe(self, live: Live, taken: list[int]) -> None:
        """A call succeeded: ``live`` has its new table; ``taken`` are the blocks handed out."""

    def observe_noted(self, live: Live) -> None:
        """The manager has taken note of all stored tokens of ``live``."""

    def observe_free(self, live: Live) -> None:
        """``live`` has given its blocks back."""

    def snapshot(self):
        """Everything that a failing call must leave as it was."""
        tables = {key: self.manager.block_table(live.seq) for key, live in self.live.items()}
        return tables, self.manager.num_free_blocks, self.manager.stats

    @initialize(data=st.data(), block_size=BLOCK_SIZES, num_blocks=st.integers(1, 20))
    def start(self, data, block_size, num_blocks):
        self.block_size, self.num_blocks = block_size, num_blocks
        self.manager = self.make_manager(data, num_blocks, block_size)
        self.live: dict[int, Live] = {}
        self.waiting: list[Sequence] = []  # preempted
        self.slots: dict[tuple[int, int], tuple] = {}
        self.history: list[list[int]] = [[]]
        self.next_id = 0

    # Content ------------------------------------------------------------------------------------

    def content(self, seq: Sequence, position: int) -> tuple:
        """What the K/V of ``position`` depend on."""
        inputs = tuple(item for item in seq.mm_inputs if item.offset <= position)
        tokens = tuple(seq.token_ids[: position + 1])
        return seq.lora_name, seq.cache_salt, inputs, tokens

    def stored_at(self, table: list[int], position: int) -> tuple | None:
        return self.slots.get((table[position // self.block_size], position % self.block_size))

    def users(self, block: int) -> int:
        return sum(block in live.table for live in self.live.values())

    def write(self, live: Live, end: int, copies=()) -> None:
        """What the caller's kernels do after a call: the copies, then K/V of the new tokens."""
        before = live.table
        live.table = self.manager.block_table(live.seq)
        kept = [b for i, b in enumerate(live.table) if i < len(before) and before[i] == b]
        assert len(kept) == len(before) - len(copies), "only copied blocks are replaced"
        assert {dst for _, dst in copies} <= set(live.table)
        assert {src for src, _ in copies} == set(before) - set(live.table)
        taken = [dst for _, dst in copies] + live.table[len(before) :]
        for block in taken:
            assert self.users(block) == 1, f"block {block} was handed out, but is in use"
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)
        for src, dst in copies:
            for offset in range(self.block_size):
                if (src, offset) in self.slots:
                    self.slots[dst, offset] = self.slots[src, offset]
        for position in range(live.stored, end):
            block, offset = live.table[position // self.block_size], position % self.block_size
            assert self.users(block) == 1, f"block {block} is written while shared"
            self.slots[block, offset] = self.content(live.seq, position)
        live.stored = end
        live.num_slots = live.seq.num_slots
        assert end <= live.num_slots <= len(live.table) * self.block_size
        assert live.seq.num_computed_tokens == end
        self.observe(live, taken)
        self.note(live)

    def note(self, live: Live) -> None:
        """A call about ``live`` tells the manager of the tokens that were stored without one."""
        live.noted = live.stored
        self.observe_noted(live)

    def attempt(self, live: Live, end: int, call):
        """``call()``, or None if it found too few blocks, which must be so and change nothing."""
        needed, free, before = (
            self.blocks_needed(live, end),
            self.manager.num_free_blocks,
            self.snapshot(),
        )
        error = None
        try:
            result = call()
        except OutOfBlocks as failure:
            error, result = failure, None
        if needed is not None:
            assert (error is not None) == (needed > free)
        if error is not None:
            assert error.free == free < error.needed
            assert self.snapshot() == before, "a failed call has changed something"
        return result

    # Rules --------------------------------------------------------------------------------------

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
        """``seq`` was given blocks, of which ``table``, its cached prefix, were there before."""
        expected = self.expected_hits(seq)
        note(f"sequence {seq.seq_id} {list(seq.token_ids)}: {num_cached} cached")
        assert expected is None or num_cached == expected
        assert num_cached < seq.num_tokens, "no token is left to compute"
        assert seq.num_cached_tokens == num_cached
        live = Live(seq, num_cached, table)
        for position in range(num_cached):
            assert self.stored_at(table, position) == self.content(seq, position), "a false hit"
        self.live[seq.seq_id] = live
        self.write(live, end)

    def allocate(self, seq: Sequence) -> bool:
        status = self.manager.can_allocate(seq)
        num_cached = self.attempt(
            Live(seq, 0, []), seq.num_tokens, lambda: self.manager.allocate(seq)
        )
        assert (status is AllocStatus.OK) == (num_cached is not None)
        if status is AllocStatus.NEVER:
            assert seq.num_tokens > self.block_size * self.num_blocks
        if num_cached is None:
            assert self.live or status is AllocStatus.NEVER, "an empty cache has room"
            return False
        prefix = self.manager.block_table(seq)[: -(-num_cached // self.block_size)]
        self.adopt(seq, num_cached, seq.num_tokens, prefix)
        return True

    @rule(data=st.data())
    def allocate_new(self, data):
        self.allocate(self.new_sequence(data))

    @rule(data=st.data(), token=TOKENS)
    @precondition(lambda self: self.live)
    def append(self, data, token):
        live = self.pick(data)
        if live.stored == live.seq.num_tokens:
            live.seq.append_token(token)
        possible = self.manager.can_append(live.seq)
        end = live.seq.num_tokens
        copies = self.attempt(live, end, lambda: self.manager.append(live.seq))
        assert possible == (copies is not None)
        if copies is not None:
            self.write(live, end, copies)

    @rule(data=st.data(), token=TOKENS)
    @precondition(lambda self: any(live.stored < live.num_slots for live in self.live.values()))
    def store_without_a_call(self, data, token):
        """The caller counts a token itself that goes to a slot which its sequence has."""
        choices = sorted(key for key, live in self.live.items() if live.stored < live.num_slots)
        live = self.live[data.draw(st.sampled_from(choices), label="sequence")]
        if live.stored == live.seq.num_tokens:
            live.seq.append_token(token)
        block = live.table[live.stored // self.block_size]
        assert self.users(block) == 1, f"block {block} is written while shared"
        self.slots[block, live.stored % self.block_size] = self.content(live.seq, live.stored)
        assert self.manager.allocate_slots(live.seq, 1) == []
        live.stored += 1

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def free(self, data):
        live = self.pick(data)
        self.note(live)
        del self.live[live.seq.seq_id]
        self.manager.free(live.seq)
        self.history.append(list(live.seq.token_ids))
        self.observe_free(live)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def preempt(self, data):
        live = self.pick(data)
        self.note(live)
        self.waiting.append(live.seq)
        del self.live[live.seq.seq_id]
        self.manager.free(live.seq)
        self.observe_free(live)

    @rule()
    @precondition(lambda self: self.waiting)
    def resume(self):
        if self.allocate(self.waiting[0]):
            self.waiting.pop(0)

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def misuse(self, data):
        live, before = self.pick(data), self.snapshot()
        stranger = Sequence("stranger", [0])
        calls = [
            lambda: self.manager.allocate(live.seq),
            lambda: self.manager.append(stranger),
            lambda: self.manager.free(stranger),
            lambda: self.manager.block_table(stranger),
        ]
        if live.stored == live.seq.num_tokens:
            calls.append(lambda: self.manager.append(live.seq))
        for call in calls:
            with pytest.raises(ValueError, match="sequence"):
                call()
        assert self.snapshot() == before

    @rule(data=st.data(), ahead=st.lists(TOKENS, max_size=2))
    @precondition(lambda self: self.supports_fork and self.live)
    def fork(self, data, ahead):
        parent = self.pick(data)
        self.next_id += 1
        child = parent.seq.fork(self.next_id)
        for token in ahead:
            child.append_token(token)
        free = self.manager.num_free_blocks
        self.note(parent)
        self.manager.fork(parent.seq, child)
        assert self.manager.num_free_blocks == free
        table = self.manager.block_table(child)
        assert table == parent.table[: -(-parent.stored // self.block_size)]
        assert child.num_computed_tokens == child.num_cached_tokens == parent.stored
        parent.num_slots = 0
        self.live[child.seq_id] = Live(child, parent.stored, table, parent.stored)

    @rule(data=st.data())
    @precondition(lambda self: self.supports_chunks)
    def allocate_first_chunk(self, data):
        seq = self.new_sequence(data)
        blocks, num_cached = self.manager.get_computed_blocks(seq)
        count = data.draw(st.integers(1, seq.num_tokens - num_cached), label="tokens")
        ahead = data.draw(st.sampled_from(self.lookaheads), label="lookahead")
        end = num_cached + count
        copies = self.attempt(
            Live(seq, 0, []),
            end + ahead,
            lambda: self.manager.allocate_slots(seq, count, blocks, num_lookahead_tokens=ahead),
        )
        if copies is not None:
            assert copies == []
            self.adopt(seq, num_cached, end, blocks)

    @rule(data=st.data())
    @precondition(lambda self: self.supports_chunks and self.live)
    def allocate_next_chunk(self, data):
        live = self.pick(data)
        for token in data.draw(st.lists(TOKENS, min_size=1, max_size=3)):
            live.seq.append_token(token)
        end = data.draw(st.integers(live.stored + 1, live.seq.num_tokens), label="end")
        ahead = data.draw(st.sampled_from(self.lookaheads), label="lookahead")
        copies = self.attempt(
            live,
            end + ahead,
            lambda: self.manager.allocate_slots(
                live.seq, end - live.stored, num_lookahead_tokens=ahead
            ),
        )
        if copies is not None:
            self.write(live, end, copies)

    @rule(now=st.integers(0, 4).map(lambda n: n == 0))
    @precondition(lambda self: self.supports_reset)
    def reset(self, now):
        if not now:
            return
        before = self.snapshot()
        if self.manager.reset_prefix_cache():
            assert not self.live
            self.slots.clear()
            self.observe_reset()
        else:
            assert self.live
            assert self.snapshot() == before

    def observe_reset(self) -> None:
        """All cached content was forgotten."""

    # Checks after every step --------------------------------------------------------------------

    @invariant()
    def state_is_consistent(self):
        self.manager.check_invariants()

    @invariant()
    def blocks_add_up(self):
        used = {block for live in self.live.values() for block in live.table}
        assert used <= set(range(self.num_blocks))
        assert self.manager.num_free_blocks == self.num_blocks - len(used)

    @invariant()
    def stored_tokens_are_unchanged(self):
        for live in self.live.values():
            assert self.manager.block_table(live.seq) == live.table
            for position in range(live.stored):
                found = self.stored_at(live.table, position)
                assert found == self.content(live.seq, position), (live.seq, position)
