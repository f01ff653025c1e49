"""Cases of every op, hostile inputs, the accuracy rule and baselines.

Tests and experiments share these; no op imports them.
"""
