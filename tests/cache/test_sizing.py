import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sizing import (
    block_bytes,
    kv_cache_shape,
    kv_heads_per_rank,
    latent_slot_bytes,
    num_cpu_blocks,
    num_gpu_blocks,
    reservation_waste,
    slot_bytes,
)

EXAMPLE = {"num_layers": 4, "num_kv_heads": 8, "head_dim": 128}


def test_worked_examples_of_blocks():
    assert block_bytes(block_size=4, dtype_bytes=2, **EXAMPLE) == 65_536
    of_13b = {"num_layers": 40, "num_kv_heads": 40, "head_dim": 128}
    assert block_bytes(block_size=16, **of_13b) == 16 * 800 * 1024


def test_a_latent_is_smaller_than_the_keys_and_values_of_8_heads():
    """One layer of DeepSeek-V3 and of Llama 3 8B, and all 61 layers of DeepSeek-V3."""
    row = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert latent_slot_bytes(num_layers=1, **row) == 1152
    assert slot_bytes(num_layers=1, num_kv_heads=8, head_dim=128) == 4096
    assert latent_slot_bytes(num_layers=61, **row) == 70_272
    assert latent_slot_bytes(num_layers=61, dtype_bytes=1, **row) == 35_136


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


@pytest.mark.parametrize(
    ("total", "utilization", "peak", "size", "count"),
    [
        # An A100 with a model of 13 B: 800 KiB a token, as the PagedAttention paper says.
        (40 << 30, 0.9, 24 << 30, 16 * 800 * 1024, 983),
        (100, 0.29, 0, 29, 1),  # 100 * 0.29 is 28.999999999999996 in binary
        (1000, 0.7, 0, 7, 100),
        (100, 1, 1, 33, 3),
        (100, 1.0, 2, 33, 2),
        (80 << 30, 0.9, 0, 1, 9 * (8 << 30)),
    ],
)
def test_gpu_blocks(total, utilization, peak, size, count):
    blocks = num_gpu_blocks(
        total_bytes=total, gpu_memory_utilization=utilization, peak_bytes=peak, block_bytes=size
    )
    assert blocks == count


@pytest.mark.parametrize(
    ("utilization", "peak", "says"),
    [
        *((0.9, peak, f"not one block fits.*=100 are 90 .*={peak}") for peak in (90, 81, 200)),
        *((bad, 0, "=.*above 0 and at most 1") for bad in (0, -0.5, 1.01, 90, float("nan"), True)),
    ],
)
def test_a_gpu_without_room_for_a_block(utilization, peak, says):
    with pytest.raises(ValueError, match=says):
        num_gpu_blocks(
            total_bytes=100, gpu_memory_utilization=utilization, peak_bytes=peak, block_bytes=10
        )


def test_cpu_blocks():
    size = block_bytes(block_size=4, **EXAMPLE)
    for space, count in ((4 << 30, 65_536), (2 * size - 1, 1), (size - 1, 0)):
        assert num_cpu_blocks(swap_space_bytes=space, block_bytes=size) == count


def test_a_reservation_holds_what_was_used():
    assert round(100 * reservation_waste(8192, 792), 1) == 90.3  # the worked example
    assert reservation_waste(100, 100) == reservation_waste(1, 1) == 0
    assert reservation_waste(100, 0) == 1
    with pytest.raises(ValueError, match="used_tokens=101 exceeds reserved_tokens=100"):
        reservation_waste(100, 101)
