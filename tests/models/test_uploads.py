"""Uploads of arrays, on the fake GPU of ``tests/fake_cuda.py``."""

import numpy as np
import torch

from models.uploads import upload

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
    np.zeros((0, 4), dtype=np.int32),
    np.array([0.5], dtype=np.float32),
]


def test_on_a_cpu_nothing_is_copied():
    tensors = upload(torch.device("cpu"), *ARRAYS)
    assert [t.tolist() for t in tensors] == [a.tolist() for a in ARRAYS]
    assert tensors[0].data_ptr() == ARRAYS[0].ctypes.data


def test_one_copy_a_call_and_no_wait(fake_gpu):
    device, waits = torch.device("cuda", 0), fake_gpu.waits
    tensors = upload(device, *ARRAYS)
    later = [upload(device, np.full(9, 10 + i))[0] for i in range(3)]  # before the host waits
    assert fake_gpu.waits == waits
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
    assert [t.device.type for t in tensors] == ["cuda"] * 4
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert torch.equal(tensor.cpu(), torch.from_numpy(array.copy()))
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
    assert [t.tolist() for t in later] == [[10 + i] * 9 for i in range(3)]
    [none] = upload(device, np.zeros(0, dtype=np.int64))
    assert none.shape == (0,)
