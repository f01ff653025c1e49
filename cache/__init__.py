"""Paged KV cache control path: blocks, hashes, policies, managers and trace replay.  No torch."""

from __future__ import annotations

from cache.policies import POLICIES, EvictionPolicy, PriorityPolicy, make_policy

__all__ = ["POLICIES", "EvictionPolicy", "PriorityPolicy", "make_policy"]
