"""The offline optimum."""

from __future__ import annotations

from cache.policies.priority import BlockHistory, PriorityPolicy


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
