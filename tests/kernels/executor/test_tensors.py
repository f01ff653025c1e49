"""What the executor knows of tensors beyond their extent: fresh ones, and those in tables."""

from __future__ import annotations

import pytest
import torch

from kernels.executor import Fault, FaultKind, run_ptx
from kernels.executor.tensors import AddressBook, FreshMemory

COPY = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 source, .param .u64 target)
{
	.reg .b32 %r<2>;
	.reg .b64 %d<6>;
	ld.param.b64 %d0, [source];
	ld.param.b64 %d1, [target];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d2, %r0, 4;
	add.s64 %d3, %d0, %d2;
	add.s64 %d4, %d1, %d2;
	ld.global.b32 %r1, [%d3];
	st.global.b32 [%d4], %r1;
	ret;
}
"""


def test_fresh_memory_may_be_read_once_it_is_written():
    numbers = torch.arange(32, dtype=torch.int32)
    with FreshMemory() as fresh:
        between, out = torch.empty(32, dtype=torch.int32), torch.empty_like(numbers)
        with pytest.raises(Fault) as raised:
            run_ptx(COPY, [between, out], fresh=fresh)
        assert (raised.value.kind, raised.value.tensor) == (FaultKind.UNWRITTEN, "source")
        run_ptx(COPY, [numbers, between], fresh=fresh)
        run_ptx(COPY, [between, out], fresh=fresh)
    assert torch.equal(out, numbers)


def test_a_part_that_is_written_leaves_the_rest_fresh():
    with FreshMemory() as fresh:
        whole = torch.empty(64, dtype=torch.int32)
        run_ptx(COPY, [torch.zeros(32, dtype=torch.int32), whole[16:48]], fresh=fresh)
        run_ptx(COPY, [whole[16:48], torch.empty(32, dtype=torch.int32)], fresh=fresh)
        with pytest.raises(Fault) as raised:
            run_ptx(COPY, [whole[17:49], torch.empty(32, dtype=torch.int32)], fresh=fresh)
    assert raised.value.thread == 31


def test_what_pytorch_writes_is_no_longer_fresh():
    with FreshMemory() as fresh:
        tensors = [torch.empty(32), torch.empty_strided((32,), (1,)), torch.zeros(2).new_empty(32)]
        assert all(fresh.unwritten(tensor) for tensor in tensors)
        for tensor in tensors:
            tensor[3] = 1.0
        assert not any(fresh.unwritten(tensor) for tensor in tensors)
        assert not any(fresh.unwritten(tensor.data) for tensor in tensors)
        assert not fresh.unwritten(torch.zeros(32))
    assert not FreshMemory().unwritten(torch.empty(32))


def test_tensors_whose_addresses_are_in_a_table():
    first, second = torch.zeros(4, 6)[:, :3], torch.zeros(5)
    with AddressBook() as book:
        table = torch.tensor([first.data_ptr(), 8, second.data_ptr() + 4])
        (window,) = book.named_in([table, None])
        assert (window.address, window.span) == (first.data_ptr(), 4 * (3 * 6 + 3))
        del first
        assert book.named_in([table]) == []
