"""Which sequences compute which tokens in the next step: continuous batching.

Sequences stand in one line, ordered by the arrival of their requests, and are served in that order
(FCFS), first those that hold blocks and then those that wait:

* Running sequences get the tokens they lack: one when decoding, a chunk of their prompt otherwise.
  If blocks run out, the youngest sequence that holds any is preempted.
* Then waiting sequences are admitted while blocks, the token budget and the sequence budget last,
  and not in a step that preempted one.  Nobody overtakes: a prompt too large for what is free now
  waits at the head of the line.

The oldest sequence can therefore always take what it needs, up to the whole cache, and every step
computes tokens of it or brings it back: there is no livelock.

A preempted sequence returns to the head of the line.  By *recompute* its K/V are dropped, and
computed again together with those of the tokens it has generated.  By *swap* they are copied to
host memory and back (Kwon et al., 2023, section 4.5); where host memory is full it is recomputed.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from cache import AllocStatus, CacheManager, OutOfBlocks
from models.sequence import Sequence, Status

BlockPairs = list[tuple[int, int]]


@dataclass(slots=True)
class Step:
    """What to do in one step.  The lists of blocks are to be copied before the model runs, in this
    order: to host memory, within the cache, from host memory.

    sequences[i] computes its tokens starts[i] to ends[i] - 1.
    """

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    swap_out: BlockPairs = field(default_factory=list)
    """(device block, host block) pairs."""
    copies: BlockPairs = field(default_factory=list)
    """(source, destination) pairs; a later one may depend on an earlier."""
    swap_in: BlockPairs = field(default_factory=list)
    """(host block, device block) pairs."""
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.ends) - sum(self.starts)


class Scheduler:
    """Serves sequences in order of arrival.

    Args:
        manager: of the blocks; all sequences that hold any are this scheduler's.
        max_num_seqs: most sequences that hold blocks at a time.
        max_num_batched_tokens: most tokens computed in one step.
        num_host_blocks: blocks of host memory to swap to; 0 to recompute preempted sequences.  A
            manager whose design swaps by itself uses its own, of which it must have been given
            as many.
        chunked_prefill: compute long prompts over several steps.  Without it, and with managers
            whose design cannot do so, no sequence may be longer than max_num_batched_tokens.

    Raises ValueError, naming the argument, for sizes out of range.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_host_blocks: int = 0,
        chunked_prefill: bool = True,
    ) -> None:
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("num_host_blocks", num_host_blocks, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value!r}: needs an int of at least {least}")
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._manager_swaps = manager.can_swap
        self._block_size = manager.block_size
        self.chunked_prefill = chunked_prefill and manager.can_chunk
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._free_host_blocks = list(range(num_host_blocks))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_free_host_blocks(self) -> int:
        if self._manager_swaps:
            return self.manager.num_free_cpu_blocks
        return len(self._free_host_blocks)

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the line."""
        self.waiting.append(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, a fork of the running ``parent``, share its blocks and run beside it."""
        self.manager.fork(parent, child)
        parent.block_row = child.block_row = None
        child.status = Status.RUNNING
        bisect.insort(self.running, child, key=attrgetter("order"))

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence wherever it is, and free what it holds.  Not between schedule and the
        end of the step, if it is scheduled."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._free(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
            if seq.is_swapped_by_manager:
                self.manager.free(seq)
                seq.is_swapped_by_manager = False
            self._drop_host_copy(seq)
        seq.status = Status.FINISHED

    def schedule(self) -> Step:
        """Choose the tokens of the next step and give them their slots.

        After the step they count as computed: the caller must run all of it.  A sequence all whose
        tokens are computed (a beam that waits for the others of its request) is passed over.
        Raises RuntimeError if sequences wait that can never run.
        """
        step = Step()
        num_waiting = len(self.waiting)
        budget = self._schedule_running(step)
        if not step.preempted:
            self._admit_waiting(step, budget)
        if self.waiting and not step.sequences and len(self.waiting) == num_waiting:
            head = self.waiting[0]
            raise RuntimeError(
                f"{head!r} waits, but nothing runs: {self.manager.num_free_blocks} of "
                f"{self.manager.num_blocks} blocks are free, can_allocate says "
                f"{self.manager.can_allocate(head).name}"
            )
        return step

    def _schedule_running(self, step: Step) -> int:
        """Returns what remains of the token budget.

        A token that goes to a slot which its sequence has needs nothing of the manager, who takes
        note of it at the next one that does.  So a block that fills up can be found one step
        later: that keeps the cost of a step low (vLLM's managers are asked about every token).
        """
        budget = self.max_num_batched_tokens
        sequences, starts, ends = step.sequences, step.starts, step.ends
        for seq in self.running:  # which a preemption shortens, at its end
            start = seq.num_computed_tokens
            end = len(seq.token_ids)
            if end == start:
                continue
            if end > start + budget:
                end = start + budget
            copies = self._extend(seq, end - start, step)
            if copies is None:
                break  # it was the youngest itself
            step.copies += copies
            sequences.append(seq)
            starts.append(start)
            ends.append(end)
            budget -= end - start
            if not budget:
                break
        return budget

    def _extend(self, seq: Sequence, count: int, step: Step) -> BlockPairs | None:
        """Slots for the next ``count`` tokens, preempting the youngest; None if that is ``seq``."""
        while True:
            try:
                version = seq.table_version
                copies = self.manager.allocate_slots(seq, count)
                if seq.table_version != version:
                    seq.block_row = None
                return copies
            except OutOfBlocks:
                victim = self.running.pop()
                self._preempt(victim, step)
                if victim is seq:
                    return None

    def _preempt(self, seq: Sequence, step: Step) -> None:
        stats = seq.request.stats
        num_tokens = seq.num_computed_tokens
        pairs = self._swap_out(seq)
        if pairs is not None:
            step.swap_out += pairs
            stats.num_swapped_tokens += num_tokens
        if not seq.is_swapped_by_manager:
            self._free(seq)
        seq.status = Status.WAITING
        stats.num_preemptions += 1
        self.waiting.appendleft(seq)
        step.preempted.append(seq)

    def _swap_out(self, seq: Sequence) -> BlockPairs | None:
        """The copies that save the K/V of a running sequence; None without room for them."""
        if self._manager_swaps:
            try:
                pairs = self.manager.swap_out(seq)
            except OutOfBlocks:
                return None
            seq.is_swapped_by_manager = True
            seq.block_row = None
            return pairs
        num_blocks = -(-seq.num_computed_tokens // self._block_size)
        if not 0 < num_blocks <= len(self._free_host_blocks):
            return None
        seq.host_blocks = [self._free_host_blocks.pop() for _ in range(num_blocks)]
        seq.num_host_tokens = seq.num_computed_tokens
        return list(zip(self.manager.block_table(seq), seq.host_blocks, strict=False))

    def _admit_waiting(self, step: Step, budget: int) -> None:
        if not self.waiting:
            return
        num_forks = sum(map(attrgetter("num_pending_forks"), self.running))
        slots = self.max_num_seqs - len(self.running) - num_forks
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            slots -= 1 + seq.num_pending_forks
            if slots < 0:
                return
            scheduled = self._admit(seq, budget, step)
            if scheduled is None:
                return
            start, end = scheduled
            self.waiting.popleft()
            seq.status = Status.RUNNING
            bisect.insort(self.running, seq, key=attrgetter("order"))
            if start == end:
                continue
            budget -= end - start
            step.admitted.append(seq)
            step.sequences.append(seq)
            step.starts.append(start)
            step.ends.append(end)

    def _admit(self, seq: Sequence, budget: int, step: Step) -> tuple[int, int] | None:
        """Give a waiting sequence its blocks; returns its tokens to compute, or None if not now.

        There are none for one that its manager swaps in: it is served with the running ones, from
        the next step on.  Beside others it waits until it can go on then, or it would be swapped
        out again at once.
        """
        if seq.is_swapped_by_manager:
            if step.sequences and self.manager.can_swap_in(seq) is not AllocStatus.OK:
                return None
            try:
                step.swap_in += self.manager.swap_in(seq)
            except OutOfBlocks:
                return None
            seq.is_swapped_by_manager = False
            return seq.num_computed_tokens, seq.num_computed_tokens
        if self.manager.can_allocate(seq) is not AllocStatus.OK:
            return None
        length = len(seq.token_ids)
        hits, num_cached = self.manager.get_computed_blocks(seq)
        start = max(num_cached, seq.num_host_tokens)
        end = min(length, start + budget)
        if end < length and not self.chunked_prefill:
            return None
        try:
            self.manager.allocate_slots(seq, end - num_cached, hits)
        except OutOfBlocks:
            return None
        seq.block_row = None
        if seq.num_host_tokens:
            self._restore(seq, num_cached, step)
        return start, end

    def _free(self, seq: Sequence) -> None:
        self.manager.free(seq)
        seq.block_row = None

    def _restore(self, seq: Sequence, num_cached: int, step: Step) -> None:
        """Have the host copy of ``seq`` brought back, but for the blocks found in the cache."""
        first = num_cached // self.manager.block_size
        table = self.manager.block_table(seq)
        step.swap_in += zip(seq.host_blocks[first:], table[first:], strict=False)
        self._drop_host_copy(seq)

    def _drop_host_copy(self, seq: Sequence) -> None:
        """Host blocks are written at the earliest by the next step, after they have been read."""
        self._free_host_blocks += seq.host_blocks
        seq.host_blocks, seq.num_host_tokens = [], 0
