"""The experiment kernel_resources: its table and its figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments import kernel_resources
from kernels.compiled.architectures import ARCHITECTURES
from kernels.compiled.shipped import shipped_calls

REPOSITORY = Path(__file__).parents[2]


_RUN_CELL = """
import json
from experiments import kernel_resources as k
options = dict(op=("paged_decode_attention",), arch=("sm_90",), match="^bf16 d128 g4 split$")
(cell,) = k.cells(k.KernelResourcesOptions(**options))
print(json.dumps(k.run_cell(cell)))
"""


@pytest.fixture(scope="module")
def rows():
    """Split decode on one architecture, compiled in a process without the interpreter."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _RUN_CELL]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    return pd.DataFrame(json.loads(done.stdout))


@pytest.mark.slow
def test_rows_of_split_decode(rows):
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


@pytest.mark.slow
def test_the_figure_has_a_row_of_panels_per_metric(rows, tmp_path, drawn):
    kernel_resources.EXPERIMENT.plot(rows, tmp_path)
    assert len(drawn["resources"].axes) == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"op": ("nonesuch",)}, "--op 'nonesuch' is unknown; choose from store_kvcache"),
        ({"arch": ("sm_70",)}, "--arch 'sm_70' is unknown; choose from sm_80, sm_90"),
    ],
)
def test_bad_options(option, message):
    options = kernel_resources.KernelResourcesOptions(**option)
    with pytest.raises(ValueError, match=message):
        list(kernel_resources.cells(options))


COMMITTED = REPOSITORY / "results" / "kernel_resources" / "cpu" / "rows.csv"


def test_the_committed_table_has_every_shipped_configuration():
    rows = pd.read_csv(COMMITTED)
    committed = rows[["arch", "op", "config"]].drop_duplicates().itertuples(index=False, name=None)
    shipped = {(call.op, call.config) for call in shipped_calls()}
    assert set(committed) == {(arch, *call) for arch in ARCHITECTURES for call in shipped}
