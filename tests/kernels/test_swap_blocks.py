"""Which memory swap_blocks takes; test_contract.py compares it with its reference."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kernels import reference, swap_blocks

MODULE = sys.modules["kernels.swap_blocks"]


@pytest.mark.parametrize("part", [slice(4), slice(4, 8), slice(8, 12)])
def test_parts_of_one_tensor_are_refused(part, device):
    pool = torch.zeros(12, 4, 2, 16, device=device)
    with pytest.raises(ValueError, match="src_cache, dst_cache: expected two tensors, got parts"):
        swap_blocks(pool[part], pool[4:8], torch.tensor([[0, 0]], device=device))


def test_pageable_host_memory_is_refused_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(MODULE, "INTERPRETED", SimpleNamespace(value=False))
    gpu, host = torch.empty(5, 4, 2, 16, device="meta"), torch.zeros(5, 4, 2, 16)
    pairs = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    for name, caches in (("dst", (gpu, host)), ("src", (host, gpu)), ("src", (host, host))):
        with pytest.raises(ValueError, match=rf"^{name}_cache: .*pageable.*pin_memory=True"):
            swap_blocks(*caches, pairs)


SCATTERED = [[6, 0], [1, 7], [4, 2], [-1, 4]]
ADJACENT = [[1, 5], [0, 4], [5, 1], [4, 0]]


@pytest.mark.parametrize(
    ("pairs", "block_size", "num_copies"),
    [(ADJACENT, 8, 8), (SCATTERED, 16, 12), (SCATTERED, 8, 0), (ADJACENT, 4, 0)],
)
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("to_host", [False, True])
@mock.patch.object(MODULE, "COPY_ENGINE_BYTES", 2**12)
def test_the_copy_engine_moves_large_parts(pairs, block_size, num_copies, hnd, to_host, fake_gpu):
    shape = (2, 2, 8, 4, block_size, 16) if hnd else (2, 2, 8, block_size, 4, 16)
    src = torch.randn(shape, dtype=torch.float32)  # 256 bytes a token
    gpu, host = src.cuda(), src.pin_memory()
    caches = (gpu, torch.zeros_like(host)) if to_host else (host, torch.zeros_like(gpu))
    caches = [cache.transpose(3, 4) if hnd else cache for cache in caches]
    wanted = torch.zeros_like(caches[1])
    reference.swap_blocks(caches[0], wanted, torch.tensor(pairs))
    with mock.patch.object(MODULE, "swap_num_programs", wraps=MODULE.swap_num_programs) as programs:
        waits = fake_gpu.waits
        swap_blocks(*caches, torch.tensor(pairs))
        assert fake_gpu.waits == waits
    assert programs.called == (num_copies == 0), "launches the kernel"
    assert torch.equal(caches[1].cpu(), wanted.cpu())
    assert num_copies in (0, len(MODULE.adjacent_parts(*caches, torch.tensor(pairs))))
