"""First in, last out."""

from cache.policies.priority import BlockHistory, PriorityPolicy


class FILO(PriorityPolicy):
    """Evicts the block whose content was inserted last (``filo`` of SGLang's radix cache).

    The first content that fills the cache, such as system prompts, stays forever.
    """

    name = "filo"

    @staticmethod
    def priority(block: BlockHistory) -> float:
        return -block.inserted
