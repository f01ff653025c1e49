"""paged_decode_attention against its twin in fp64, by the rule of kernels/accuracy.py."""

from __future__ import annotations

import pytest
import torch

from kernels import paged_decode_attention, reference
from kernels.accuracy import compare_with_twin, random_paged_batch


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_matches_twin(dtype, num_splits, device):
    batch = random_paged_batch(
        [0, 1, 33, 100],
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=80,
        block_size=7,
        dtype=dtype,
        device=device,
    )
    for result in compare_with_twin(
        paged_decode_attention,
        reference.paged_decode_attention,
        batch.decode_args,
        num_splits=num_splits,
        return_lse=True,
    ):
        assert result.passed, result
