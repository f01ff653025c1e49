"""First in, last out."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class FILO(PriorityPolicy):
    """Evicts the block whose content came in last: ``filo`` of SGLang's radix cache.

    Early content stays for good, such as an agent's system prompts.
    """

    name = "filo"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.inserted
