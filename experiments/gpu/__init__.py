"""Experiments that need a GPU, and ``gpu_pass.py``, which runs what matters most of them."""
