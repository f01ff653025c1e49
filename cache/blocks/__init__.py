"""Blocks and what they hold: sequences, block hashes, the block pool, its event log."""
