"""Policies that are one number a block, in one line of arithmetic each."""

from __future__ import annotations

from cache.policies.priority import BlockHistory, PriorityPolicy


class FIFO(PriorityPolicy):
    """Evicts the block whose content came in first, however often it was used since."""

    name = "fifo"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.inserted


class FILO(PriorityPolicy):
    """Evicts the block whose content came in last: ``filo`` of SGLang's radix cache.

    What came first stays for good, as the system prompts of an agent that never change.
    """

    name = "filo"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.inserted


class MRU(PriorityPolicy):
    """Evicts the block accessed last.  Suits cyclic scans and little else: a lower bound."""

    name = "mru"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.accessed


class LFU(PriorityPolicy):
    """Evicts the block with the fewest accesses since its content came in; ties: oldest access.

    Counts start at one and die with the eviction (in-cache LFU, without aging).
    """

    name = "lfu"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accesses


class GDSF(PriorityPolicy):
    """GDSF (Cherkasova, HP Labs 1998), with blocks of equal size and cost.

    Value = accesses + the value of the last victim: frequency that ages as the cache turns over,
    which for equal sizes is LFU with dynamic aging (LFU-DA, Arlitt et al. 2000).  A newcomer starts
    from the value of the victim that made room for it, as the paper has it; libCacheSim 0.3.5
    starts it from the victim before, so its hit counts differ slightly.
    """

    name = "gdsf"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.clock + block.accesses


class Belady(PriorityPolicy):
    """Evicts the block whose next use is farthest in the future (Belady, 1966: MIN).

    Needs the whole trace in advance, so it serves as the upper bound that the other policies are
    compared with.  Of two blocks that the same future request needs, the deeper one was released
    first and goes first.
    """

    name = "belady"
    needs_future = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.next_use


class ReuseOracle(PriorityPolicy):
    """LRU among the blocks that are used again, after those that never are, the oldest first.

    What a perfect predictor of *whether* a block returns would bring, without *when*: between an
    online policy and Belady's optimum.  Needs the whole trace in advance.
    """

    name = "reuse_oracle"
    needs_future = True

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.accessed - (1e15 if block.next_use == float("inf") else 0.0)
