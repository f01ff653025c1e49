"""The experiment large_accuracy: its shapes. test_on_fake_gpu.py runs them, divided."""

from __future__ import annotations

from experiments.bench.kernel_problems import OPS
from experiments.gpu import large_accuracy
from experiments.gpu.large_accuracy import LargeAccuracy


def test_the_largest_caches_need_more_than_32_bits_and_fit_a_gpu():
    cells = list(large_accuracy.cells(LargeAccuracy()))
    assert {cell.shape.op for cell in cells} == set(OPS)
    cells = [cell for cell in cells if cell.shape.min_cache_elements]
    assert {cell.shape.op for cell in cells} == {"decode", "prefill", "store", "copy"}
    for cell in cells:
        shape = cell.shape
        elements = shape.min_cache_elements // (2 if shape.op == "copy" else 1)
        used = shape.batch * (shape.context_len or 2 * shape.block_size) * 8 * 128
        assert elements - used > 2**31, "all that is used lies beyond"
        assert 2 * elements * 2 < 80e9
