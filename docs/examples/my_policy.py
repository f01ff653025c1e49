"""Two user-defined eviction policies, and how to compare them with LRU and the optimum.

    pagelab run eviction --policy lru --policy belady \\
        --policy docs/examples/my_policy.py:TailFirst --policy docs/examples/my_policy.py:Clock

Use a policy in the engine: ``LLM(model, policy="docs/examples/my_policy.py:Clock")``.
"""

from cache.policies import PriorityPolicy, QueuePolicy
from cache.policies.queues import Queue


class TailFirst(PriorityPolicy):
    """LRU that evicts the deep blocks of a prompt before its first blocks.

    A policy that ranks blocks by one number needs only ``priority``; the replay compiles it.
    ``BlockHistory`` in ``cache/policies/priority.py`` lists the properties of a block.
    """

    @staticmethod
    def priority(block):  # the released block with the smallest number is evicted first
        return block.accessed - 100.0 * block.depth


class Clock(QueuePolicy):
    """FIFO with a second chance (Corbató, 1968): a hit lets a block return to the end once.

    A subclass of ``QueuePolicy`` (``cache/policies/queues.py``) defines the queue of a new block,
    the effect of a hit, and the block to evict.  ``cache/policies/base.py`` has the whole interface
    for other kinds of policies.
    """

    def _reset(self) -> None:
        self._queue = Queue()
        self._referenced: set[int] = set()

    def _admit(self, block: int) -> None:
        self._move(block, self._queue)

    def _hit(self, block: int) -> None:
        self._referenced.add(block)

    def _choose(self) -> int:
        while (block := self._oldest(self._queue)) in self._referenced:
            self._referenced.remove(block)
            self._move(block, self._queue)
        return block

    def _remove(self, block: int) -> None:
        super()._remove(block)
        self._referenced.discard(block)
