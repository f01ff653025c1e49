"""Sequences, block hashes, the block pool and memory usage."""
