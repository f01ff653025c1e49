"""First in, last out."""

from __future__ import annotations

from cache.policies.priority import BlockHistory, PriorityPolicy


class FILO(PriorityPolicy):
    """Evicts the block whose content came in last: ``filo`` of SGLang's radix cache.

    What came first stays for good, as the system prompts of an agent that never change.
    """

    name = "filo"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.inserted
