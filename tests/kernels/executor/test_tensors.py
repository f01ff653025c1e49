"""Unwritten tensors, and tensors that kernels access through an address table."""

import pytest
import torch

from kernels.executor import Fault, FaultKind
from kernels.executor.tensors import AddressBook, FreshMemory

from .conftest import caught

COPY = """
shl.b64 %d11, %d10, 2; add.s64 %d12, %d0, %d11; add.s64 %d13, %d1, %d11;
ld.global.b32 %r1, [%d12]; st.global.b32 [%d13], %r1;
"""


def test_fresh_memory_may_be_read_after_a_write(run_body):
    numbers = torch.arange(32, dtype=torch.int32)
    with FreshMemory() as fresh:
        between, out = torch.empty(32, dtype=torch.int32), torch.empty_like(numbers)
        fault = caught(run_body, COPY, between, out, fresh=fresh)
        assert (fault.kind, fault.tensor) == (FaultKind.UNWRITTEN, "p0")
        run_body(COPY, numbers, between, fresh=fresh)
        run_body(COPY, between, out, fresh=fresh)
    assert torch.equal(out, numbers)


def test_writing_a_part_leaves_the_rest_fresh(run_body):
    with FreshMemory() as fresh:
        whole, out = (torch.empty(count, dtype=torch.int32) for count in (64, 32))
        run_body(COPY, torch.zeros(32, dtype=torch.int32), whole[16:48], fresh=fresh)
        run_body(COPY, whole[16:48], out, fresh=fresh)
        assert caught(run_body, COPY, whole[17:49], out, fresh=fresh).thread == 31


MAKERS = {
    "empty": lambda: torch.empty(32),
    "empty_like": lambda: torch.empty_like(torch.zeros(32)),
    "empty_strided": lambda: torch.empty_strided((32,), (1,)),
    "empty_permuted": lambda: torch.empty_permuted((32, 1), (1, 0)),
    "new_empty": lambda: torch.zeros(2).new_empty(32),
    "resize_": lambda: torch.zeros(0).resize_(32),
}
WRITES = {
    "index": lambda tensor: tensor.__setitem__(3, 1.0),
    "numpy": lambda tensor: tensor.numpy().__setitem__(..., 1),
    "data": lambda tensor: tensor.data.normal_(),
    "view": lambda tensor: tensor[3:].fill_(0),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("write", WRITES)
def test_memory_written_by_the_host_is_not_fresh(run_body, make, write, inference):
    with torch.inference_mode(inference), FreshMemory() as fresh:
        tensor, out = MAKERS[make](), torch.zeros(32)
        with pytest.raises(Fault, match="read of memory that nothing wrote"):
            run_body(COPY, tensor, out, fresh=fresh)
        WRITES[write](tensor)
        run_body(COPY, tensor, out, fresh=fresh)
    assert not out.equal(torch.zeros(32))


def test_resizing_keeps_written_memory(run_body):
    with FreshMemory() as fresh:
        tensor = torch.ones(32).resize_(64)
        run_body(COPY, tensor[:32], torch.zeros(32), fresh=fresh)
        with pytest.raises(Fault, match="read of memory that nothing wrote"):
            run_body(COPY, tensor[32:], torch.zeros(32), fresh=fresh)
        assert not fresh.unwritten(torch.zeros(32))


def test_tensors_whose_addresses_are_in_a_table():
    first, second = torch.zeros(4, 6)[:, :3], torch.zeros(5)
    with AddressBook() as book:
        table = torch.tensor([first.data_ptr(), 8, second.data_ptr() + 4])
        (window,) = book.named_in([table, None])
        assert (window.address, window.span) == (first.data_ptr(), 4 * (3 * 6 + 3))
        del first
        assert book.named_in([table]) == []
