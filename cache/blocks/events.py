"""Events about cached blocks, for a router that sends a prompt to the replica that has its prefix.

Fields and order are as in ``vllm.distributed.kv_events`` (0.33).
"""

from typing import NamedTuple

from cache.blocks.sequence import ExtraKey


class BlockStored(NamedTuple):
    """Full blocks of a sequence with ``token_ids``, maybe duplicates, can be found from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Hash of the block before them; None at the head of a prompt."""
    token_ids: list[int]
    block_size: int
    lora_name: str | int | None
    extra_keys: list[list[ExtraKey]]
    """Extra keys that the hash of each block contains."""


class BlockRemoved(NamedTuple):
    """A block of each of ``block_hashes`` has lost its content; a duplicate may still have it."""

    block_hashes: list[bytes]


class AllBlocksCleared(NamedTuple):
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
