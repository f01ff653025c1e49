from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sizing import (
    block_bytes,
    kv_cache_shape,
    kv_heads_per_rank,
    num_cpu_blocks,
    num_gpu_blocks,
    reservation_waste,
    slot_bytes,
)

EXAMPLE = {"num_layers": 4, "num_kv_heads": 8, "head_dim": 128}


def test_worked_example_of_a_block():
    assert block_bytes(block_size=4, dtype_bytes=2, **EXAMPLE) == 65_536


@pytest.mark.parametrize(
    ("num_kv_heads", "ranks", "per_rank"),
    [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 4, 1), (71, 1, 71), (6, 3, 2)],
)
def test_kv_heads_per_rank(num_kv_heads, ranks, per_rank):
    assert kv_heads_per_rank(num_kv_heads, ranks) == per_rank


@pytest.mark.parametrize(("num_kv_heads", "ranks"), [(8, 3), (8, 12), (2, 3)])
def test_heads_that_cannot_be_divided_among_the_ranks(num_kv_heads, ranks):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={ranks}.*={num_kv_heads}"):
        kv_heads_per_rank(num_kv_heads, ranks)


def test_tensor_parallel_blocks_are_those_of_a_rank():
    assert block_bytes(block_size=4, tensor_parallel_size=4, **EXAMPLE) == 16_384
    shape = kv_cache_shape(num_blocks=7, block_size=16, tensor_parallel_size=4, **EXAMPLE)
    assert shape == (2, 4, 7, 16, 2, 128)


@given(
    num_blocks=st.integers(1, 99),
    block_size=st.integers(1, 999),
    num_layers=st.integers(1, 99),
    num_kv_heads=st.integers(1, 99),
    head_dim=st.integers(1, 256),
    dtype_bytes=st.sampled_from([1, 2, 4]),
)
def test_the_tensor_has_the_bytes_of_its_blocks(num_blocks, dtype_bytes, **shape):
    size = dtype_bytes
    for length in kv_cache_shape(num_blocks=num_blocks, **shape):
        size *= length
    assert size == num_blocks * block_bytes(dtype_bytes=dtype_bytes, **shape)
    block_size = shape.pop("block_size")
    assert size == num_blocks * block_size * slot_bytes(dtype_bytes=dtype_bytes, **shape)


def test_gpu_blocks_of_an_a100_with_a_13b_model():
    # 40 layers, 40 heads of 128 in fp16: 800 KiB a token, as the PagedAttention paper says.
    size = block_bytes(block_size=16, num_layers=40, num_kv_heads=40, head_dim=128)
    assert size == 16 * 800 * 1024
    blocks = num_gpu_blocks(
        total_bytes=40 << 30, gpu_memory_utilization=0.9, peak_bytes=24 << 30, block_bytes=size
    )
    assert blocks == 983  # 12 GiB


@pytest.mark.parametrize(
    ("total", "utilization", "peak", "size", "count"),
    [
        (100, 0.29, 0, 29, 1),  # 100 * 0.29 is 28.999999999999996 in binary
        (1000, 0.7, 0, 7, 100),
        (100, 1, 1, 33, 3),
        (100, 1.0, 2, 33, 2),
        (80 << 30, 0.9, 0, 1, 9 * (8 << 30)),
    ],
)
def test_gpu_blocks_at_a_boundary(total, utilization, peak, size, count):
    blocks = num_gpu_blocks(
        total_bytes=total, gpu_memory_utilization=utilization, peak_bytes=peak, block_bytes=size
    )
    assert blocks == count


@pytest.mark.parametrize("peak", [90, 81, 200])
def test_no_block_fits(peak):
    with pytest.raises(
        ValueError, match=rf"not one block fits.*total_bytes=100 are 90 bytes.*peak_bytes={peak}"
    ):
        num_gpu_blocks(total_bytes=100, gpu_memory_utilization=0.9, peak_bytes=peak, block_bytes=10)


def test_cpu_blocks():
    size = block_bytes(block_size=4, **EXAMPLE)
    assert num_cpu_blocks(swap_space_bytes=4 << 30, block_bytes=size) == 65_536
    assert num_cpu_blocks(swap_space_bytes=2 * size - 1, block_bytes=size) == 1
    assert num_cpu_blocks(swap_space_bytes=size - 1, block_bytes=size) == 0


@pytest.mark.parametrize("utilization", [0, -0.5, 1.01, 90, float("nan"), True])
def test_utilization_is_a_share(utilization):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=.*above 0 and at most 1"):
        num_gpu_blocks(
            total_bytes=100, gpu_memory_utilization=utilization, peak_bytes=0, block_bytes=1
        )


def test_a_reservation_holds_what_was_used():
    assert round(100 * reservation_waste(8192, 792), 1) == 90.3  # the worked example
    assert reservation_waste(100, 100) == reservation_waste(1, 1) == 0
    assert reservation_waste(100, 0) == 1
    with pytest.raises(ValueError, match="used_tokens=101 exceeds reserved_tokens=100"):
        reservation_waste(100, 101)
