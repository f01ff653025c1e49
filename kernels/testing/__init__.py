"""What the kernels are tested and measured with: hostile inputs, the rule of accuracy, baselines.

Tests and experiments share these; no op imports them.
"""
