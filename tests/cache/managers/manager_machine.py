"""A machine that drives any cache manager by random calls, beside a simple model of its blocks.

The model stores the content of each slot: its group of layers, all tokens up to its position and
the extra keys, which its K/V depend on.  After the calls of a step, ``run`` moves blocks between
device and host memory, makes the copies, and writes K/V.  After every step

- every token that the next query of a live sequence reads is unchanged, on the device or swapped,
- a cached prefix held exactly the requested content, and so does each host block,
- nothing was written to a block that is also in another table,
- free and used blocks and slots add up, and the manager's own invariants hold,
- a call that failed has changed nothing.

The machine of a design may predict more (``expected_hits``, ``blocks_needed``, ``observe``).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import note
from manager_helpers import manager_of, state_of

from cache import AllocStatus, OutOfBlocks, Sequence
from cache.managers.base import FREED


@dataclass
class Live:
    """A sequence that holds blocks, how many of its tokens are stored, and its table by group."""

    seq: Sequence
    stored: int
    tables: list[list[int]]

    @property
    def table(self) -> list[int]:
        return self.tables[0]


def held(table: list[int]) -> list[int]:
    """The blocks of a table that its sequence holds."""
    return [block for block in table if block != FREED]


class Machine:
    """Calls for what the design ``name`` offers.  By default one call is a step."""

    name = ""
    predicts = True
    """Whether the machine knows which calls succeed, and which blocks they share."""
    takes_only_new = True
    """Whether all blocks that a call adds to a table, except ``found`` ones, have new content."""
    sizes = 1, 2, 3, 4, 16
    num_calls = 1
    """Most calls of a step."""

    def __init__(self, random: Random) -> None:
        self.random, self.randint, self.pick = random, random.randint, random.choice
        self.size, self.num_blocks = self.pick(self.sizes), self.randint(1, 20)
        self.options = self.make_options()
        self.manager = manager_of(self.name, self.num_blocks, self.size, **self.options)
        self.live: dict[int, Live] = {}
        self.waiting: list[Sequence] = []  # preempted
        self.device: dict[tuple[int, int], tuple] = {}  # (block, offset) -> content
        self.host: dict[tuple[int, int], tuple] = {}
        self.history: list[list[int]] = [[]]
        self.versions: dict[tuple[int, int], list[list[int]]] = {}
        self.unknown: dict[int, int] = {}  # last tokens that the host has not read
        self.counted: Counter[str] = Counter()  # fields of CacheStats
        self.next_id, self.longest = 0, {}  # most tokens of some sequences, by id
        # Of this step:
        self.starts: dict[int, int] = {}
        self.copies: list[tuple[int | None, int]] = []  # None: the block loses its content
        self.shared: set[int] = set()  # blocks to which sequences may write the same content

    def make_options(self) -> dict:
        """Options of the manager.  May change ``num_blocks``."""
        return {}

    def expected_hits(self, seq: Sequence) -> int | None:
        """Cached tokens that an allocation of ``seq`` must report; None if not predicted."""
        return None if self.manager.prefix_caching else 0

    def expected_status(self, seq: Sequence) -> AllocStatus:
        """The result that ``can_allocate`` must have."""
        needed = self.blocks_needed(Live(seq, 0, [[]]), seq.num_tokens)
        return self.status(needed, -(-seq.num_tokens // self.size))

    def status(self, needed: int, at_most: int) -> AllocStatus:
        if at_most > self.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if needed <= self.manager.num_free_blocks else AllocStatus.LATER

    def blocks_needed(self, live: Live, end: int) -> int:
        """Free blocks that storing up to ``end`` tokens takes."""
        table, needed = live.table, -(-end // self.size)
        if live.seq.seq_id not in self.live:
            table, _ = self.manager.get_computed_blocks(live.seq)
            return needed - len(table) + sum(self.users(block) == 0 for block in held(table))
        partial = live.stored % self.size
        copied = partial and self.users(table[live.stored // self.size]) > 1
        return max(0, needed - len(table)) + bool(copied)

    def found(self, live: Live, end: int) -> dict[int, int]:
        """Blocks that hold content of ``live`` up to ``end`` already, by position in its table."""
        return {}

    def observe(self, *_) -> None:
        """After a call: ``live`` has its new table and tokens, and ``taken`` are new blocks.

        Or ``live`` has been freed, or has given back ``blocks`` behind its window.
        """

    observe_free = observe_given_back = observe_reset = observe

    def content(self, seq: Sequence, position: int, group: int = 0) -> tuple:
        """Everything that the K/V of ``position`` depend on."""
        inputs = tuple(item for item in seq.mm_inputs if item.offset <= position)
        tokens = tuple(seq.token_ids[: position + 1])
        if seq.num_unknown_tokens and position == seq.num_tokens - 1:
            tokens = *tokens[:-1], self.unknown[seq.seq_id]
        return group, seq.lora_name, seq.cache_salt, inputs, tokens

    def slots(self, seq: Sequence, group: int, first: int, end: int) -> Iterator[tuple]:
        """(position in the table, offset, content) of slots that the tokens before ``end`` have.

        A state fills the first slot of its block.
        """
        is_state = self.manager.groups[group].kind == "state"
        for i in range(end - 1 if is_state else first, end):
            yield i // self.size, 0 if is_state else i % self.size, self.content(seq, i, group)

    def first_seen(self, num_tokens: int, group: int = 0) -> int:
        """The first of ``num_tokens`` stored tokens that later queries see."""
        return max(0, num_tokens + 1 - (self.manager.groups[group].window or num_tokens + 1))

    def users(self, block: int) -> int:
        return sum(block in table for live in self.live.values() for table in live.tables)

    def tables_of(self, seq: Sequence) -> list[list[int]]:
        return [self.manager.block_table(seq), *self.manager.block_tables(seq)[1:]]

    def granted(self, live: Live, end: int, copies=()) -> None:
        """A call has given ``live`` slots up to ``end``: check its tables."""
        self.give_back(live)
        found, moved = self.found(live, end), dict(copies)
        before, live.tables = live.tables, self.tables_of(live.seq)
        assert moved.keys() <= {block for table in before for block in table}
        assert all(map(self.users, moved)), "a block is copied that no other sequence holds"
        assert all(live.table[i] == block for i, block in found.items())
        taken = list(moved.values())
        for group, (old, table) in enumerate(zip(before, live.tables, strict=True)):
            for i, block in enumerate(table):
                kept = block == FREED and self.manager.groups[group].kind == "state"
                if i < len(old):
                    kept |= block == found.get(i, moved.get(old[i], old[i]))
                    assert kept or not self.takes_only_new, "only copied blocks are replaced"
                elif not kept and i not in found and block not in table[:i]:
                    taken.append(block)
        for block in taken if self.takes_only_new else ():
            assert self.users(block) == 1, f"block {block} was handed out, but is in use"
            self.copies.append((None, block))
        self.copies += copies
        self.shared.update(found.values())
        self.starts[live.seq.seq_id], live.stored = live.stored, end
        assert live.seq.num_computed_tokens == end
        self.counted["copied_blocks"] += len(copies)
        self.observe(live, taken)

    def run(self) -> None:
        """The work of the step: swap_out, copies, swap_in, then K/V."""
        out, loads = self.manager.take_transfers()
        self.counted.update(stored_blocks=len(out), loaded_blocks=len(loads))
        for source, target in out:
            self.copy(self.device, source, self.host, target)
        for source, target in self.copies:
            self.copy(self.device, source, self.device, target)
        for source, target in loads:
            self.copy(self.host, source, self.device, target)
        for seq_id, start in self.starts.items():
            live = self.live[seq_id]
            self.check_reads(live, start, self.device)
            for group, table in enumerate(live.tables):
                for i, offset, content in self.slots(live.seq, group, start, live.stored):
                    slot = table[i], offset
                    same = table[i] in self.shared and self.device[slot] == content
                    alone = same or self.num_calls > 1 or self.users(table[i]) == 1
                    assert alone, f"block {table[i]} is written while shared"
                    self.device[slot] = content
        self.starts, self.copies, self.shared = {}, [], set()

    def copy(self, source: dict, src: int | None, target: dict, dst: int) -> None:
        """Copy block ``src`` of the slots ``source`` to block ``dst`` of ``target``."""
        for offset in range(self.size):
            target.pop((dst, offset), None)
            if (src, offset) in source:
                target[dst, offset] = source[src, offset]

    def check_reads(self, live: Live, end: int, slots: dict) -> None:
        """Check what the query at ``end`` reads."""
        for group, table in enumerate(live.tables if end else ()):
            for i, offset, content in self.slots(live.seq, group, self.first_seen(end, group), end):
                assert slots.get((table[i], offset)) == content, (live.seq, group, i, offset)

    def behind_window(self, live: Live) -> list[int]:
        """Blocks that ``live`` holds and that its next query does not see."""
        firsts = [self.first_seen(live.stored, g) // self.size for g in range(len(live.tables))]
        return [b for table, i in zip(live.tables, firsts, strict=True) for b in held(table[:i])]

    def give_back(self, live: Live) -> None:
        """The manager has taken back the blocks behind the window, before anything else."""
        blocks = self.behind_window(live)
        live.tables = [[FREED if b in blocks else b for b in table] for table in live.tables]
        self.observe_given_back(blocks)

    def attempt(self, live: Live, end: int, call):
        """``call()``; None if too few blocks are free, after checking that it raises then.

        A raise changes nothing, except that blocks behind a window are given back.
        """
        if not self.predicts:
            try:
                return call()
            except OutOfBlocks:
                if live.seq.seq_id in self.live:
                    live.tables = self.tables_of(live.seq)
                self.free(is_finished=False)
                return None
        unseen = self.behind_window(live)
        needed = self.blocks_needed(live, end)
        free = self.manager.num_free_blocks + sum(self.users(block) == 1 for block in unseen)
        if needed <= free:
            return call()
        before = state_of(self.manager)
        with pytest.raises(OutOfBlocks) as failure:
            call()
        assert failure.value.free == free < failure.value.needed
        assert unseen or state_of(self.manager) == before, "a failed call has changed something"
        self.give_back(live)
        return None

    def new_sequence(self) -> Sequence:
        known = self.pick(self.history)[: self.size * (self.num_blocks // 2)]
        length = self.randint(1, 2 * self.size + 1)
        if self.randint(0, 15) == 15:  # too long
            length = self.size * self.num_blocks + 1
        cut = self.pick([len(known), self.randint(0, len(known))])
        tokens = known[:cut] + [self.randint(0, 1)] * length
        start = self.randint(0, len(tokens) - 1)
        image = self.pick("ab"), start, self.randint(1, len(tokens) - start)
        keys = [{}] * 5 + [{"lora_name": "a"}, {"cache_salt": "a"}, {"mm_inputs": [image]}]
        self.history.append(tokens[: self.size * self.num_blocks])
        self.next_id += 1
        return Sequence(self.next_id, tokens, **self.pick(keys))

    def any_live(self) -> Live | None:
        """A sequence that has no call in this step; the host has read its last token."""
        idle = [live for seq_id, live in self.live.items() if seq_id not in self.starts]
        live = self.pick(idle) if idle else None
        if live is not None and live.seq.num_unknown_tokens:
            live.seq.token_ids[-1], live.seq.num_unknown_tokens = self.unknown[live.seq.seq_id], 0
        return live

    def adopt(self, seq: Sequence, num_cached: int, num_device: int, end: int) -> None:
        """``seq`` got blocks; ``num_cached`` tokens of it were cached, ``num_device`` of them on
        the device."""
        expected = self.expected_hits(seq)
        note(f"sequence {seq.seq_id} {list(seq.token_ids)}: {num_cached} cached")
        assert expected is None or num_cached == expected
        assert num_cached < seq.num_tokens, "no token is left to compute"
        assert seq.num_cached_tokens == num_cached
        kind = "resumed_" if any(seq is other for other in self.waiting) else ""
        self.counted["num_resumptions" if kind else "num_allocations"] += 1
        self.counted[f"{kind}queried_tokens"] += seq.num_tokens
        self.counted[f"{kind}queried_blocks"] += seq.num_tokens // self.size
        self.counted[f"{kind}hit_tokens"] += num_device
        self.counted[f"{kind}hit_blocks"] += num_device // self.size
        self.counted[f"{kind}host_hit_blocks"] += (num_cached - num_device) // self.size
        tables = [table[: -(-num_cached // self.size)] for table in self.tables_of(seq)]
        self.live[seq.seq_id] = live = Live(seq, num_cached, tables)
        self.granted(live, end)

    def admit(self, seq: Sequence | None = None) -> bool:
        """Start a sequence, or the first chunk of it, by one of the three calls."""
        seq, manager, was_empty = seq or self.new_sequence(), self.manager, not self.live
        way, hit, end, ahead = self.pick(["whole", "slots", "chunk"]), manager.find(seq), 0, 0
        start, on_device = hit.num_tokens, hit.num_device_blocks * self.size
        status = manager.can_allocate(seq, self.pick([None, hit]))
        assert not self.predicts or status is self.expected_status(seq)
        if way == "slots":
            blocks, start = manager.get_computed_blocks(seq)
            on_device, ahead = start, 3 * manager.can_look_ahead * self.predicts
        if way != "whole" and manager.can_chunk:
            end = self.randint(start + 1, seq.num_tokens)
            if way == "chunk" and (end := manager.chunk_end(seq, start, end, hit)) == start:
                return False
        end = end or seq.num_tokens
        call = {
            "whole": lambda: manager.allocate(seq),
            "slots": lambda: manager.allocate_slots(seq, end - start, blocks, ahead),
            "chunk": lambda: manager.admit(seq, hit, end),
        }[way]
        result = self.attempt(Live(seq, 0, [[] for _ in manager.groups]), end + ahead, call)
        if result is None:
            if way != "slots":
                assert status is not AllocStatus.OK
                assert not was_empty or status is AllocStatus.NEVER, "an empty cache has room"
            return False
        assert result == (start if way == "whole" else [])
        self.adopt(seq, start, on_device, end)
        return True

    def append(self) -> None:
        """Decoded tokens, accepted drafts, or the next chunk of a prompt."""
        if (live := self.any_live()) is None:
            return
        seq, start, tables, manager = live.seq, live.stored, live.tables, self.manager
        tokens = self.random.choices([0, 1], k=self.pick([1, 1, 1, 0, 2, 3]))
        is_unknown = not self.predicts and start == seq.num_tokens and self.randint(0, 1)
        room = self.longest.get(seq.seq_id, 9999) - seq.num_tokens
        for token in tokens[: 1 if is_unknown else room]:
            seq.append_token(99 if is_unknown else token)
            self.unknown[seq.seq_id], seq.num_unknown_tokens = token, is_unknown
        if start == seq.num_tokens:
            return
        end = self.pick([None, start + 1, self.randint(start + 1, seq.num_tokens)])
        if manager.has_states:
            end = manager.chunk_end(seq, start, end or seq.num_tokens)
            if end == start:
                return
        ahead = self.pick([0, 0, 1, 5]) if end and manager.can_look_ahead and self.predicts else 0
        version, possible = seq.table_version, manager.can_append(seq)

        def call():
            if end is None:
                return manager.append(seq)
            return manager.allocate_slots(seq, end - start, num_lookahead_tokens=ahead)

        last = end or seq.num_tokens
        copies = self.attempt(live, last + ahead, call)
        if end is None:
            assert possible == (copies is not None)
        if copies is not None:
            self.granted(live, last, copies)
            if live.tables == tables and -(-start // self.size) == -(-last // self.size):
                assert seq.table_version == version or manager.has_states

    def free(self, is_finished: bool | None = None) -> None:
        if (live := self.any_live()) is None:
            return
        seq = live.seq
        is_finished = bool(self.randint(0, 1)) if is_finished is None else is_finished
        del self.live[seq.seq_id]
        self.manager.free(seq, is_finished)
        assert (seq.num_cached_tokens, seq.num_computed_tokens) == (0, 0)
        if is_finished:
            self.history.append(list(seq.token_ids))
        else:
            self.waiting.append(seq)
        self.observe_free(live)

    def resume(self) -> None:
        if self.waiting and self.admit(self.waiting[0]):
            self.waiting.pop(0)

    def fork(self) -> None:
        if not self.manager.can_fork or (parent := self.any_live()) is None:
            return
        self.next_id += 1
        child = parent.seq.fork(self.next_id)
        for token in self.random.choices([0, 1], k=self.randint(0, 2)):
            child.append_token(token)
        self.manager.fork(parent.seq, child)
        if not self.takes_only_new:  # the last block is named, and may be replaced
            parent.tables = self.tables_of(parent.seq)
        tables, num_blocks = self.tables_of(child), -(-parent.stored // self.size)
        assert tables == [table[:num_blocks] for table in parent.tables]
        assert {len(table) for table in tables} == {num_blocks}
        assert child.num_computed_tokens == child.num_cached_tokens == parent.stored
        self.live[child.seq_id] = Live(child, parent.stored, tables)

    def reset(self) -> None:
        if not self.manager.can_reset or self.randint(0, 4):
            return
        if self.live:
            before = state_of(self.manager)
            assert not self.manager.reset_prefix_cache()
            assert state_of(self.manager) == before
        else:
            assert self.manager.reset_prefix_cache()
            self.device.clear()
            self.observe_reset()

    def actions(self) -> list:
        """The calls, as often as they are to be made."""
        calls = self.admit, self.append, self.free, self.resume, self.fork, self.reset
        return [call for call, n in zip(calls, (5, 5, 3, 2, 1, 1), strict=True) for _ in range(n)]

    def step(self) -> None:
        for action in self.random.choices(self.actions(), k=self.randint(1, self.num_calls)):
            note(action.__name__)
            action()
        self.run()
        self.check()

    def check(self) -> None:
        self.manager.check_invariants()
        lives, usage = self.live.values(), self.manager.memory_usage()
        blocks = {block for live in lives for table in live.tables for block in held(table)}
        assert blocks <= set(range(self.num_blocks))
        assert self.manager.num_free_blocks == self.num_blocks - len(blocks)
        stored = {
            (table[i // self.size], i % self.size)
            for live in lives for table in live.tables for i in range(live.stored)
        }  # fmt: skip
        num_stored = sum(block != FREED for block, _ in stored)
        assert (usage.used, usage.internal) == (num_stored, len(blocks) * self.size - num_stored)
        assert (usage.reserved, usage.external) == (0, 0)
        assert usage.free == self.manager.num_free_blocks * self.size
        self.check_sequences()

    def check_sequences(self) -> None:
        stats = self.manager.stats
        assert {name: getattr(stats, name) for name in self.counted} == self.counted
        for seq_id, live in self.live.items():
            assert self.tables_of(live.seq) == live.tables
            version = seq_id, live.seq.table_version
            assert self.versions.setdefault(version, live.tables) == live.tables
            self.check_reads(live, live.stored, self.device)

    def end(self) -> None:
        for live in self.live.values():
            self.manager.free(live.seq)
        self.live = {}
        self.run()
        self.run()  # a tier stores some blocks a step later
        self.manager.check_invariants()
        assert self.manager.num_free_blocks == self.num_blocks
        if self.manager.can_reset:
            assert self.manager.reset_prefix_cache()
            self.manager.check_invariants()


class CachingMachine(Machine):
    """Full blocks are found by their content."""

    caching = True

    def contents(self) -> set[tuple]:
        """Contents, by their last tokens, of all blocks that can be found."""
        return set(self.cached.values())

    def full_contents(self, seq: Sequence, end: int) -> list[tuple]:
        """Contents of the full blocks before token ``end``; none without caching."""
        num_full = end // self.size if self.caching else 0
        return [self.content(seq, i * self.size - 1) for i in range(1, num_full + 1)]

    def expected_hits(self, seq):
        size, found = self.size, self.contents()
        for end in range((seq.num_tokens - 1) // size, 0, -1):
            first = min(end - 1, self.first_seen(end * size) // size)
            if all(self.content(seq, i * size - 1) in found for i in range(first + 1, end + 1)):
                return end * size
        return 0
