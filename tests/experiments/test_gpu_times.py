"""Measured GPU times: rows, interpolation, and what the tables lack."""

import pandas as pd
import pytest
import zstandard

from experiments import gpu_times


def test_between_points_logarithms_are_linear_and_missing_large_ones_grow_in_proportion():
    points = pd.DataFrame({"a": [1, 4, 1], "b": [1, 1, 16], "s": [1.0, 16.0, 2.0]})
    times = gpu_times.Grid("a test", points.set_index(["a", "b"])["s"])
    assert times(a=2, b=1) == pytest.approx(4)
    assert times(a=1, b=4) == pytest.approx(2**0.5)
    assert times(a=4, b=16) == pytest.approx(8), "2 s times 4: not measured"
    assert times(a=0.5, b=1) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"^a=5 was not measured: a test has a from 1 to 4$"):
        times(a=[1, 5], b=1)


def test_what_the_tables_lack_is_listed():
    with pytest.raises(
        ValueError, match=r"kv_heads=3 .* for gpu='H100-SXM', .*; it has 1, 2, 4, 8, 64$"
    ):
        gpu_times.rows("attention", gpu="H100-SXM", q_heads=64, kv_heads=3)
    with pytest.raises(
        ValueError, match=r"gemm_bf16.csv.zst:1: no column kernel, only gpu, engine"
    ):
        gpu_times.rows("gemm_bf16", kernel="triton")
    with pytest.raises(ValueError, match=r"'n': 65536, .* has no row near it"):
        gpu_times.grid("gemm_bf16", ("m", "n", "k"), gpu="A100-SXM")(m=1, n=65536, k=65536)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a,b,2", "a,b,x"], r":3: num_gpus is 'x'; needs a number above 0"),
        (["a,b,2", ",b,2"], r":3: gpu is nan; needs a text"),
        (["a,b,2", "a,b,-1", "a,b,1"], r":3: num_gpus is -1; needs"),
        (["a,b,2", "", "a,b,1"], r":3: gpu is nan"),
        (["a,b,2", "a,b,2,9"], r":3: .*Expected 3 fields"),
        (None, r": is truncated or corrupt"),
    ],
)
def test_a_damaged_table_is_named_with_its_line(tmp_path, lines, message):
    path = tmp_path / "table.csv.zst"
    text = "\n".join(["gpu,engine,num_gpus", *(lines or ["a,b,2"] * 99)]) + "\n"
    content = zstandard.compress(text.encode())
    path.write_bytes(content if lines else content[:-5])
    with pytest.raises(ValueError, match=rf"^/.*/table\.csv\.zst{message}"):
        gpu_times.read(path)
