"""The fake GPU raises the errors of a GPU and counts its waits."""

from __future__ import annotations

import pytest
import torch

import kernels


def test_tensors_report_where_they_are_and_compute(fake_gpu):
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert (x.device, x.is_cuda) == (torch.device("cuda", 0), True)
    assert (x @ x.T).tolist() == [[5.0, 14.0], [14.0, 50.0]]
    assert x.to("cuda") is x
    assert x.cpu().device.type == "cpu"
    x[[0]] = torch.ones(1, 3, device="cuda")
    assert x[:, 1].tolist() == [1.0, 4.0]
    assert torch.empty(3, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    "do",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.randn(3, device="cuda", generator=torch.Generator()),
        lambda x: torch.cuda.set_device("cuda"),
        lambda x: kernels.slot_mapping_from_positions(
            torch.zeros(1, dtype=torch.int64), *torch.zeros(2, 1, 1, dtype=torch.int32), 4
        ),
    ],
    ids=["two devices", "generator of the CPU", "device without an index", "pageable memory"],
)
def test_what_a_gpu_refuses_is_refused(do, fake_gpu):
    with pytest.raises((RuntimeError, ValueError)):
        do(torch.ones(3, device="cuda"))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.cuda.synchronize(),
    ],
    ids=["item", "mask", "to the host", "from the host", "new from values", "synchronize"],
)
def test_waits_are_counted_and_cannot_be_captured(wait, fake_gpu):
    x = torch.ones(3, device="cuda")
    before = fake_gpu.waits
    wait(x)
    assert fake_gpu.waits > before
    with (
        pytest.raises(RuntimeError, match="stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        wait(x)


def test_pinned_memory_is_copied_without_waiting(fake_gpu):
    pinned = torch.ones(3).pin_memory()
    assert (pinned.is_pinned(), torch.ones(3).is_pinned()) == (True, False)
    before = fake_gpu.waits
    assert pinned.to("cuda", non_blocking=True).device.type == "cuda"
    assert fake_gpu.waits == before


def test_copies_of_pinned_memory_are_over_when_the_host_has_waited(fake_gpu):
    pinned = torch.ones(3).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    back = (there + 1).to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    later = (there + 2).to("cpu", non_blocking=True)
    assert not event.query()
    assert back.tolist() == [99, 99, 99]
    event.synchronize()
    assert back.is_pinned()
    assert (back.tolist(), later.tolist()) == ([2, 2, 2], [99, 99, 99])
    pinned.to("cuda", non_blocking=True)
    pinned.fill_(5)
    with pytest.raises(AssertionError, match="written to during its copy"):
        torch.cuda.synchronize()


def test_a_graph_computes_at_replay_in_place(fake_gpu):
    x = torch.ones(2, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        y += 1
        view = y.view(4, 2)
    assert view.isnan().all()
    x.fill_(5)
    graph.replay()
    assert view.tolist() == [[11.0, 11.0]] * 4


def test_memory_of_live_tensors_is_counted(fake_gpu):
    x = torch.zeros(256, device="cuda")
    view = x[:3]
    assert fake_gpu.allocated == 1024
    y = x + 1
    del x
    assert fake_gpu.allocated == 2048, "the view keeps it"
    del view, y
    assert (fake_gpu.allocated, fake_gpu.peak) == (0, 2048)
