"""Uploads of arrays, on the fake GPU of ``tests/fake_cuda.py``."""

from __future__ import annotations

import numpy as np
import torch

from models.uploads import Uploads

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
    np.zeros((0, 4), dtype=np.int32),
    np.array([0.5], dtype=np.float32),
]


def check(tensors, arrays):
    for tensor, array in zip(tensors, arrays, strict=True):
        assert torch.equal(tensor.cpu(), torch.from_numpy(array.copy()))
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()


def test_on_a_cpu_nothing_is_copied():
    tensors = Uploads(torch.device("cpu"))(*ARRAYS)
    assert [t.tolist() for t in tensors] == [a.tolist() for a in ARRAYS]
    assert tensors[0].data_ptr() == ARRAYS[0].ctypes.data


def test_one_copy_a_call_and_no_wait(fake_gpu):
    upload = Uploads(torch.device("cuda", 0))
    waits = fake_gpu.waits
    tensors = upload(*ARRAYS)
    assert fake_gpu.waits == waits
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
    assert [t.device.type for t in tensors] == ["cuda"] * 4
    check(tensors, ARRAYS)
    [none] = upload(np.zeros(0, dtype=np.int64))
    assert none.shape == (0,)


def test_buffers_are_pinned_once_and_not_overwritten_while_they_are_read(fake_gpu, monkeypatch):
    """One buffer per call under way, until the host has waited."""
    upload, made, empty = Uploads(torch.device("cuda", 0)), [], torch.empty

    def count(*args, **options):
        made.append(bool(options.get("pin_memory")))
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", count)
    for step in range(16):
        numbers = [np.full(9 + step, 10 * step + i) for i in range(3)]
        tensors = [upload(array)[0] for array in numbers]
        torch.cuda.synchronize()
        check(tensors, numbers)
    assert sum(made) == 3 + 3, "a step's three calls, and once more when they had outgrown that"
