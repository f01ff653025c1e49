"""Events about cached blocks.  A router uses them to find the replica that caches a prefix.

The fields are a part of those in ``vllm.distributed.kv_events`` (0.33), in the same order.
"""

from typing import NamedTuple

from cache.blocks.sequence import ExtraKey


class BlockStored(NamedTuple):
    """The full blocks with ``token_ids``, which may be duplicates, can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Hash of the block before the first of these blocks; None at the start of a prompt."""
    token_ids: list[int]
    block_size: int
    lora_name: str | int | None
    extra_keys: list[list[ExtraKey]]
    """For each block, the extra keys that are part of its hash."""


class BlockRemoved(NamedTuple):
    """For each hash, one block has lost its content; a duplicate block may still hold it."""

    block_hashes: list[bytes]


class AllBlocksCleared(NamedTuple):
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
