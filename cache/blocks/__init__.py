"""Sequences, block hashes, the pool of blocks, and the use of memory."""
