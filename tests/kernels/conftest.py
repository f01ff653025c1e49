"""Fixtures of the kernel tests. They always run with poisoned fresh memory."""

from __future__ import annotations

import mmap

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory(poisoned_memory):
    return poisoned_memory


@pytest.fixture
def huge_tensor(device):
    """Make fp16 tensors of several GiB of which only the touched pages exist."""

    def make(*shape: int) -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=torch.float16, device=device)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        memory = mmap.mmap(-1, 2 * torch.Size(shape).numel(), flags=flags)
        return torch.frombuffer(memory, dtype=torch.float16).view(shape)

    return make


@pytest.fixture
def huge_cache(huge_tensor):
    """Make (k_cache, v_cache) whose element offsets exceed 32 bits."""

    def make(block_size: int, num_kv_heads: int, head_dim: int):
        num_blocks = 2**31 // (block_size * num_kv_heads * head_dim) + 8
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return huge_tensor(*shape), huge_tensor(*shape)

    return make
