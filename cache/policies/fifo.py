"""First in, first out."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class FIFO(PriorityPolicy):
    """Evicts the block whose content came in first, however often it was used since."""

    name = "fifo"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.inserted
