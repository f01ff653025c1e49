"""Continuous batching: which sequences compute which tokens in the next step.

Sequences are served in the order in which their requests arrived ("fcfs"), or by priority and then
arrival ("priority"), running ones first:

* A running sequence gets the tokens it lacks: one when it decodes, a chunk of its prompt otherwise.
  If blocks run out, the last running sequence of the order is preempted.
* Then waiting sequences are admitted while blocks, token budget and sequence budget last, but not
  in a step that preempted one.  No waiting sequence overtakes another: a prompt that does not fit
  yet waits at the head of the queue.

So the first running sequence can always take the blocks it needs, up to the whole cache.  Every
step computes tokens of it or brings a sequence back, so there is no livelock.  With "fcfs" every
request ends; with "priority" if only finitely many requests of smaller priority arrive.  A waiting
request preempts running sequences only if they are all beams that wait for beams behind it.

With ``prefill_first`` a step computes either prompts or decoded tokens: no sequence decodes while a
prompt can be computed.  That is the order of Nano-vLLM and of vLLM's first engine; budgets and
chunks stay the same in both modes, which differs from Nano-vLLM (docs/deviations.md).

A preempted sequence returns to its position in the queue.  *Recompute* drops its K/V and computes
them again, the generated tokens' included.  *Swap* copies them to host memory and back (Kwon et
al., 2023, section 4.5); if host memory is full, they are recomputed.
"""

import bisect
import contextlib
from array import array
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from cache.blocks.pool import OutOfBlocks
from cache.blocks.sequence import Sequence
from cache.checks import at_least, shown, true_or_false
from cache.managers.base import NOTHING, AllocStatus, CacheManager, Copies, InterruptedChange
from cache.policies.lazy_heap import LazyHeap
from cache.serving.request import ScheduledSequence, Status


@dataclass(slots=True)
class Step:
    """One step of the engine.

    sequences[i] computes counts[i] tokens, the last of its num_computed_tokens.  Blocks are copied
    before the model runs: swap_out first, then copies, then swap_in.
    """

    sequences: list[ScheduledSequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    swap_out: Copies = field(default_factory=list)
    """(device block, host block) pairs."""
    copies: Copies = field(default_factory=list)
    """(source, destination) pairs; a later one may depend on an earlier."""
    swap_in: Copies = field(default_factory=list)
    """(host block, device block) pairs."""
    preempted: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[ScheduledSequence] = field(default_factory=list)
    errors: list[tuple[ScheduledSequence, Exception]] = field(default_factory=list)
    """Sequences that cannot be computed, and why; the caller ends their requests."""
    drawn: Any = None
    """Sampled tokens of the step before, if they are not read yet.  They include the last token of
    each sequence with a ``pending_row``."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, over all sequences."""
        return sum(self.counts)


POLICIES = ("fcfs", "priority")


class Scheduler:
    """Serves sequences by their ``order``.

    Args:
        manager: owns the blocks; no other scheduler uses it.
        max_num_seqs: most sequences that hold blocks at a time.
        max_num_batched_tokens: most tokens computed in one step.
        num_host_blocks: blocks of host memory to swap to; 0 to recompute preempted sequences, and
            for a manager with ``can_swap``, which swaps to blocks of its own.
        chunked_prefill: compute long prompts over several steps.  Without it, or with a design that
            cannot chunk, no sequence may be longer than max_num_batched_tokens.
        prefill_first: decode only in steps that compute no prompt.
        policy: "fcfs", or "priority" for requests with priorities.

    Raises ValueError, naming the argument, for sizes out of range, and for host blocks with a
    manager that has a tier, a sliding window or several groups of layers.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_host_blocks: int = 0,
        chunked_prefill: bool = True,
        prefill_first: bool = False,
        policy: str = "fcfs",
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={shown(policy)}: needs one of {', '.join(POLICIES)}")
        self.manager, self.policy = manager, policy
        self.max_num_seqs = at_least(1, "max_num_seqs", max_num_seqs)
        self.max_num_batched_tokens = at_least(1, "max_num_batched_tokens", max_num_batched_tokens)
        chunked_prefill = true_or_false("chunked_prefill", chunked_prefill)
        self.chunked_prefill = chunked_prefill and manager.can_chunk
        self.prefill_first = true_or_false("prefill_first", prefill_first)
        self.running: list[ScheduledSequence] = []
        self.waiting = LazyHeap[ScheduledSequence]()  # by their order
        limit = self.max_num_batched_tokens if self.chunked_prefill else None
        manager.max_in_flight_tokens = limit
        if num_host_blocks and manager.can_swap:
            raise ValueError(
                f"num_host_blocks={num_host_blocks}: manager {manager.name!r} swaps to its own "
                "num_cpu_blocks; needs 0"
            )
        if num_host_blocks and manager.tier is not None:
            raise ValueError(
                f"num_host_blocks={num_host_blocks}: the manager's host_blocks keep the blocks of "
                "preempted sequences; needs 0"
            )
        if num_host_blocks and [group.kind for group in manager.groups] != ["full"]:
            raise ValueError(
                f"num_host_blocks={num_host_blocks}: with a sliding_window or several groups of "
                "layers the manager gives back blocks, and a sequence cannot be swapped out as a "
                "whole; needs 0"
            )
        self.free_host_blocks = list(range(at_least(0, "num_host_blocks", num_host_blocks)))

    @property
    def has_tokens_to_compute(self) -> bool:
        """Whether a running sequence has a token without K/V."""
        return any(len(seq.token_ids) > seq.num_computed_tokens for seq in self.running)

    def longest_sequence(self, limit: int) -> int:
        """Most tokens, up to ``limit``, of a sequence that fits the cache; 0 if none does.

        Without chunked prefill it also has to fit one step.
        """
        limit = min(limit, self.manager.num_blocks * self.manager.block_size)
        longest = longest_that_fits(self.manager, limit)
        return longest if self.chunked_prefill else min(longest, self.max_num_batched_tokens)

    def add(self, seq: ScheduledSequence) -> None:
        """Put a sequence into the waiting queue."""
        self.manager.on_queued(seq.order, seq)
        self.waiting.push(seq, *seq.order)

    def withdraw(self, seq: ScheduledSequence) -> None:
        """Undo ``add``, also one that raised."""
        if seq in self.waiting:
            self.waiting.remove(seq)
        with contextlib.suppress(Exception):  # of the policy
            self.manager.on_queued(seq.order)

    def fork(self, parent: ScheduledSequence, child: ScheduledSequence) -> None:
        """Let ``child``, a fork of the running ``parent``, share its blocks and run beside it."""
        self.manager.fork(parent, child)
        child.status = Status.RUNNING
        bisect.insort(self.running, child, key=attrgetter("order"))

    def finish(self, seq: ScheduledSequence) -> None:
        """Remove a sequence and free its blocks.

        Do not call it for a scheduled sequence before its step has ended.
        """
        if seq.status is Status.RUNNING:
            self.manager.free(seq)  # first: the policy may raise
            self.running.remove(seq)
        elif seq.status is Status.WAITING:
            if seq.num_host_tokens:
                self._drop_host_copy(seq)  # first: the policy may raise
            self.manager.on_queued(seq.order)
            self.waiting.remove(seq)
            self.manager.drop(seq)
        seq.status = Status.FINISHED

    def schedule(self) -> Step:
        """Choose the tokens of the next step and give them slots.

        They count as computed, so the caller must run the whole step.  A sequence whose tokens are
        all computed (a beam that waits for its search) is skipped.  Raises RuntimeError if
        sequences wait that can never run, and InterruptedChange if a change of the manager was
        interrupted.
        """
        if self.manager.interruption:
            raise InterruptedChange(self.manager.interruption)
        step = Step()
        if self.prefill_first:
            self._admit_waiting(step, self._schedule_running(step, minimum=2))
        if not step.sequences and not step.admitted:
            budget = self._schedule_running(step)
            if not self.prefill_first:
                self._admit_waiting(step, budget)
        if self.waiting and not (step.sequences or step.admitted or step.preempted or step.errors):
            if not self.running:
                head = self.waiting.first()[1]
                raise RuntimeError(
                    f"{head!r} waits, but nothing runs: {self.manager.num_free_blocks} of "
                    f"{self.manager.num_blocks} blocks are free, can_allocate says "
                    f"{self.manager.can_allocate(head).name}"
                )
            # The running sequences are beams, and the queue's head is ahead of the beams they need.
            self._preempt(self.running.pop(), step)
        if self.manager.tier is not None:
            step.swap_out, step.swap_in = self.manager.take_transfers()
        return step

    def _schedule_running(self, step: Step, minimum: int = 1) -> int:
        """Schedule the running sequences; returns the rest of the token budget.

        minimum: skip sequences that lack fewer tokens; 2 for prompts that have begun.
        """
        append, budget = self.manager.append, self.max_num_batched_tokens
        sequences, counts, copies = step.sequences, step.counts, step.copies
        for seq in self.running:  # a preemption shortens this list at its end
            count, end = len(seq.token_ids) - seq.num_computed_tokens, None
            if count < minimum:
                continue
            if count > 1:
                if not budget:
                    break
                start = seq.num_computed_tokens
                end = start + min(count, budget)
                if self.manager.has_states:
                    end = self.manager.chunk_end(seq, start, end)
                count = end - start
                if not count:  # less than a block, of a model with states
                    continue
            elif not budget:
                break
            while True:
                try:
                    copies += append(seq, end)
                    break
                except OutOfBlocks:
                    victim = self.running.pop()
                    self._preempt(victim, step)
                    if victim is seq:
                        return budget
            sequences.append(seq)
            counts.append(count)
            budget -= count
        return budget

    def _preempt(self, seq: ScheduledSequence, step: Step) -> None:
        """Return ``seq`` to the queue, and swap out its K/V if host memory has room."""
        stats, num_tokens = seq.request.stats, seq.num_computed_tokens
        num_blocks = -(-num_tokens // self.manager.block_size)
        if self.manager.can_swap and self.manager.can_swap_out(seq):
            step.swap_out += self.manager.swap_out(seq)
            seq.num_host_tokens = num_tokens
        else:
            if 0 < num_blocks <= len(self.free_host_blocks):
                seq.host_blocks = [self.free_host_blocks.pop() for _ in range(num_blocks)]
                step.swap_out += zip(self.manager.block_table(seq), seq.host_blocks, strict=False)
                seq.num_host_tokens = num_tokens
            else:
                seq.num_dropped_tokens = num_tokens
            self.manager.free(seq, is_finished=False)
        stats.num_swapped_tokens += seq.num_host_tokens
        seq.status = Status.WAITING
        stats.num_preemptions += 1
        self.add(seq)
        step.preempted.append(seq)

    def _admit_waiting(self, step: Step, budget: int) -> None:
        if not self.waiting or step.preempted:
            return
        num_forks = sum(map(attrgetter("num_pending_forks"), self.running))
        num_free = self.max_num_seqs - len(self.running) - num_forks
        while self.waiting and budget > 0:
            seq = self.waiting.first()[1]
            num_free -= 1 + seq.num_pending_forks
            if num_free < 0:
                break
            count = self._admit(seq, budget, step)
            if count is None:
                break
            self.waiting.pop()
            if self.manager.queue_readers:
                self.manager.on_queued(seq.order)
            seq.status = Status.RUNNING
            bisect.insort(self.running, seq, key=attrgetter("order"))
            step.admitted.append(seq)
            if count:  # 0 for a beam that waits for its search
                step.sequences.append(seq)
                step.counts.append(count)
                budget -= count

    def _admit(self, seq: ScheduledSequence, budget: int, step: Step) -> int | None:
        """Give a waiting sequence its blocks, and swap in their content.

        Returns how many tokens it computes, or None if it has to wait.
        """
        if seq.num_host_tokens and not seq.host_blocks:  # in blocks of the manager
            # can_swap_in wants a block more, which beams that fill the cache would never get.
            has_room = self.manager.can_allocate(seq) is AllocStatus.OK
            return self._swap_in(seq, step) if has_room else None
        try:
            reads = not seq.request.params.skip_reading_prefix_cache
            hit = self.manager.find(seq) if reads else NOTHING
        except Exception as error:
            step.errors.append((seq, error))
            return None
        if self.manager.can_allocate(seq, hit) is not AllocStatus.OK:
            return None
        start = max(hit.num_tokens, seq.num_host_tokens)
        num_tokens = len(seq.token_ids)
        end = min(num_tokens, start + budget)
        if end < num_tokens and not self.chunked_prefill:
            return None
        if self.manager.has_states:
            end = self.manager.chunk_end(seq, start, end, hit)
            if end == start and end < num_tokens:
                return None
        try:
            step.copies += self.manager.admit(seq, hit, end)
        except OutOfBlocks:
            return None
        if seq.host_blocks:  # swap in the blocks that are not cached
            first = hit.num_tokens // self.manager.block_size
            table = self.manager.block_table(seq)
            step.swap_in += zip(seq.host_blocks[first:], table[first:], strict=False)
            self._drop_host_copy(seq)
        seq.request.stats.num_recomputed_tokens += max(0, seq.num_dropped_tokens - start)
        seq.num_dropped_tokens = 0
        return end - start

    def _swap_in(self, seq: ScheduledSequence, step: Step) -> int:
        """Let the manager move ``seq`` back; returns the number of tokens that it computes."""
        loaded = self.manager.swap_in(seq)
        seq.num_host_tokens = 0
        count = len(seq.token_ids) - seq.num_computed_tokens
        if count:  # Copies run before swap_in, but none is of a block that comes back.
            step.copies += self.manager.append(seq)
        held = {*self.manager.block_table(seq)}  # the new token may have given a block back
        step.swap_in += [pair for pair in loaded if pair[1] in held]
        return count

    def _drop_host_copy(self, seq: ScheduledSequence) -> None:
        """Free the host blocks of ``seq``; the next step writes them only after they are read."""
        if not seq.host_blocks:  # the manager's own
            self.manager.free(seq, is_finished=False)
        self.free_host_blocks += seq.host_blocks
        seq.host_blocks, seq.num_host_tokens = [], 0


def longest_that_fits(manager: CacheManager, limit: int) -> int:
    """Most tokens, up to ``limit``, of a sequence that fits the empty cache; 0 if none does."""

    def never_fits(num_tokens: int) -> bool:
        tokens = array("I", bytes(4 * num_tokens))
        return manager.can_allocate(Sequence(object(), tokens)) is AllocStatus.NEVER

    return bisect.bisect_left(range(1, limit + 1), True, key=never_fits)
