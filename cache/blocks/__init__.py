"""Blocks and what they hold: sequences, block hashes, the block pool, memory use."""
