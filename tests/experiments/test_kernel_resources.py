"""The experiment kernel_resources: its table and its figure."""

from pathlib import Path

import pandas as pd

from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.shipped import shipped_calls


def test_rows_of_split_decode(tiny_run):
    rows = tiny_run("kernel_resources").rows
    assert list(rows["kernel"]) == ["paged_decode", "merge_splits"]
    row = rows[rows["kernel"] == "paged_decode"].iloc[0]
    assert row["programs_per_multiprocessor"] == 2
    assert row["limited_by"] == "registers"  # by shared memory as many
    assert row["warps_per_multiprocessor"] == 8
    assert row["occupancy"] == 8 / 64
    assert row["local_bytes"] == 0
    assert row["dots"] == row["tensor_core_dots"] == 2  # one loop, tails included
    assert row["async_copies_128_bit"] > row["loads_128_bit"] > 0
    assert row["tensor_core_family"].startswith("mma")


COMMITTED = Path(__file__).parents[2] / "results" / "kernel_resources" / "cpu" / "rows.csv"


def test_the_committed_table_has_every_shipped_configuration():
    rows = pd.read_csv(COMMITTED)
    committed = rows[["arch", "op", "config"]].drop_duplicates().itertuples(index=False, name=None)
    shipped = {(call.op, call.config) for call in shipped_calls()}
    assert set(committed) == {(arch, *call) for arch in ARCHITECTURES for call in shipped}
