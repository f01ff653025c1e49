"""Which memory swap_blocks takes; test_contract.py compares it with its reference."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import swap_blocks

MODULE = sys.modules["kernels.swap_blocks"]


def test_parts_of_one_pool_that_do_not_overlap(device):
    """Layers that alternate: the address ranges overlap and the elements do not."""
    pool = torch.arange(2 * 2 * 5 * 16.0, device=device).view(2, 2, 5, 1, 1, 16)
    expected = pool.clone()
    expected[:, 1, 3] = expected[:, 0, 4]
    swap_blocks(pool[:, :1], pool[:, 1:], torch.tensor([[4, 3]], device=device))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("src", [slice(5), slice(None, None, 2), slice(4, 5)])
def test_caches_that_overlap_are_refused(src, device):
    pool = torch.zeros(12, 4, 2, 16, device=device)
    with pytest.raises(ValueError, match="src_cache, dst_cache: expected tensors that do not over"):
        swap_blocks(pool[src], pool[4:], torch.tensor([[0, 0]], device=device))


def test_pageable_host_memory_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(MODULE, "INTERPRETED", SimpleNamespace(value=False))
    gpu, host = torch.empty(5, 4, 2, 16, device="meta"), torch.zeros(5, 4, 2, 16)
    pairs = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    for name, caches in (("dst", (gpu, host)), ("src", (host, gpu)), ("src", (host, host))):
        with pytest.raises(ValueError, match=rf"^{name}_cache: .*pageable.*pin_memory=True"):
            swap_blocks(*caches, pairs)
