"""The experiment large_accuracy, its shapes divided to a size for the interpreter."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.bench.kernel_problems import OPS
from experiments.gpu import large_accuracy
from experiments.gpu.large_accuracy import FP8, LargeAccuracy

TINY = LargeAccuracy(
    scale=700, num_q_heads=2, num_kv_heads=1, head_dim=16, past_32_bits=False, dtype=(FP8,)
)


def test_every_op_is_right_and_drawn(drawn):
    rows = [row for cell in large_accuracy.cells(TINY) for row in large_accuracy.run_cell(cell)]
    table = pd.DataFrame(rows)
    assert table["passed"].all()
    assert set(table["kv_dtype"]) == {FP8}
    assert set(table["op"]) == set(OPS)
    large_accuracy.plot(table, Path())
    (axis,) = drawn["large_accuracy"].axes
    assert any("cascade, block 16" in tick.get_text() for tick in axis.get_yticklabels())


def test_the_largest_caches_need_more_than_32_bits_and_fit_a_gpu():
    cells = [
        cell for cell in large_accuracy.cells(LargeAccuracy()) if cell.shape.min_cache_elements
    ]
    assert {cell.shape.op for cell in cells} == {"decode", "prefill", "store", "copy"}
    for cell in cells:
        shape = cell.shape
        elements = shape.min_cache_elements // (2 if shape.op == "copy" else 1)
        used = shape.batch * (shape.context_len or 2 * shape.block_size) * 8 * 128
        assert elements - used > 2**31, "all that is used lies beyond"
        assert 2 * elements * 2 < 80e9
