"""slot_mapping_from_positions against its reference, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import reference, slot_mapping_from_positions
from kernels.testing.inputs import random_paged_batch


def assert_matches_reference(*args):
    slots = slot_mapping_from_positions(*args)
    assert slots.dtype == torch.int64
    assert torch.equal(slots, reference.slot_mapping_from_positions(*args))
    return slots


@given(data=st.data())
def test_matches_reference(data, device):
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 3, 7, 16, 24, 100, 1024]), label="block_size")
    lens = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4), label="lens")
    dtypes = st.sampled_from([torch.int32, torch.int64])
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16, "block_size": block_size}
    tables = random_paged_batch(lens, **shape, dtype=torch.float16, device=device).block_tables
    tables = torch.cat([tables, tables + 1], dim=1)[:, : tables.shape[1]]  # strided
    seq_ids = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    positions = torch.cat([torch.arange(n) for n in lens])
    torch.manual_seed(draw(st.integers(0, 2**16), label="seed"))
    keep = torch.randperm(len(positions))[: draw(st.integers(0, 600), label="num_tokens")]
    positions, seq_ids = positions[keep], seq_ids[keep]
    padding = torch.rand(len(keep)) < 0.2
    positions[padding] = torch.randint(-(2**31), 0, (int(padding.sum()),))
    seq_ids[padding] = torch.randint(-(2**31), 2**31, (int(padding.sum()),))
    assert_matches_reference(
        positions.to(device, draw(dtypes, label="positions")),
        tables,
        seq_ids.to(device, draw(dtypes, label="seq_ids")),
        block_size,
    )


def test_worked_example(device):
    tables = torch.tensor([[3, 1, -1], [2, 0, 7]], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 5, 9, 11, -1, 10, 14], device=device)
    seq_ids = torch.tensor([0, 0, 0, 1, 99, 0, 1], device=device)
    slots = assert_matches_reference(positions, tables, seq_ids, 5)
    assert slots.tolist() == [15, 5, 9, 36, -1, -1, 39]  # position 10 of row 0: entry -1


def test_slots_beyond_32_bits(device):
    tables = torch.tensor([[2**31 - 1]], dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    assert assert_matches_reference(zero + 15, tables, zero, 16).tolist() == [(2**31 - 1) * 16 + 15]


def test_table_rows_beyond_32_bit_offsets(device, huge_tensor):
    tables = huge_tensor(9, 2**30).view(torch.int32)  # rows of 2 GiB
    tables[8, 1] = 5
    positions = torch.tensor([3], dtype=torch.int32, device=device)
    assert slot_mapping_from_positions(positions, tables, positions + 5, 2).tolist() == [11]


def test_no_tokens(device):
    empty = torch.empty(0, dtype=torch.int64, device=device)
    tables = torch.empty(0, 3, dtype=torch.int32, device=device)
    assert assert_matches_reference(empty, tables, empty, 16).shape == (0,)


def test_position_past_the_table_on_a_gpu_is_no_slot(device):
    if device.type == "cpu":
        pytest.skip("host values are checked instead")
    tables = torch.zeros(1, 2, dtype=torch.int32, device=device)
    positions = torch.tensor([7, 8], device=device)
    assert assert_matches_reference(positions, tables, positions * 0, 4).tolist() == [3, -1]
