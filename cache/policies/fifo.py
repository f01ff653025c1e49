"""First in, first out."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class FIFO(PriorityPolicy):
    """Evicts the block whose content was inserted first, even if it was used often since."""

    name = "fifo"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return block.inserted
