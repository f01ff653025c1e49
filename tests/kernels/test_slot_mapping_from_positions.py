"""Special positions; test_contract.py compares slot_mapping_from_positions with its reference."""

import pytest
import torch

from kernels import reference, slot_mapping_from_positions


def assert_matches_reference(*args):
    slots = slot_mapping_from_positions(*args)
    assert slots.dtype == torch.int64
    assert torch.equal(slots, reference.slot_mapping_from_positions(*args))
    return slots


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


def test_position_past_the_table_on_a_gpu_is_no_slot(device):
    if device.type == "cpu":
        pytest.skip("host values are checked instead")
    tables = torch.zeros(1, 2, dtype=torch.int32, device=device)
    positions = torch.tensor([7, 8], device=device)
    assert assert_matches_reference(positions, tables, positions * 0, 4).tolist() == [3, -1]
