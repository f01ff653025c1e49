import numpy as np
import pandas as pd
import pytest

from experiments import fp8_quality
from experiments.fp8_quality import CACHES, Fp8Quality
from experiments.harness import Unavailable
from experiments.load import engine_models


def test_each_cache_changes_the_same_windows_in_its_own_way(tiny_run):
    run = tiny_run("fp8_quality")
    nats = run.rows.pivot(index="window", columns="cache", values="nats_per_token")
    assert len(nats) == 2
    # Scales that are powers of two round alike while numbers stay in fp8's range.
    assert nats["fp8, power of 2 per head"].equals(nats["fp8, saturated"])
    assert nats.loc[0].nunique() == len(CACHES) - 1
    assert abs(nats["bf16"] - nats["fp32"]).max() < abs(nats["fp8, scale 1"] - nats["fp32"]).max()
    summary = run.summary.set_index("cache")
    assert summary.loc["fp32", ["more_nats_per_token", "low", "high"]].eq(0).all()
    assert np.allclose(np.log(summary["perplexity"]), nats.mean()[summary.index], rtol=1e-3)


def test_a_cell_does_not_depend_on_the_one_before():
    sizes = {"model": "tiny", "windows": 2, "calibration_windows": 1, "window_tokens": 64}
    cells = [Fp8Quality(cache=f"fp8, {name}", **sizes) for name in ("saturated", "scale per head")]
    engine_models.window_llm.cache_clear()
    alone = fp8_quality.run_cell(cells[1])
    fp8_quality.run_cell(cells[0])
    assert fp8_quality.run_cell(cells[1]) == alone


def test_intervals_are_of_paired_differences():
    """Windows differ by 5 nats, the caches by 0.2 to 0.4."""
    nats = {"fp32": [1.0, 6.0, 3.0], "bf16": [1.2, 6.4, 3.3]}
    rows = [
        {"cache": cache, "window": window, "window_tokens": 9, "nats_per_token": value}
        for cache, values in nats.items()
        for window, value in enumerate(values)
    ]
    summary = fp8_quality._summary(pd.DataFrame(rows)).set_index("cache")
    assert summary.loc["bf16", "more_nats_per_token"] == pytest.approx(0.3)
    assert 0.19 < summary.loc["bf16", "low"] < 0.3 < summary.loc["bf16", "high"] < 0.41
    assert fp8_quality._summary(pd.DataFrame(rows[1:])) is None


def test_scales_are_chosen_on_other_windows():
    cell = Fp8Quality(windows=5, calibration_windows=2, window_tokens=3)
    judged, calibration = fp8_quality._windows(cell, list(range(22)))
    assert judged.shape == (5, 3)
    assert calibration.shape == (2, 3)
    assert len(np.unique(np.concatenate([judged, calibration]))) == 21
    with pytest.raises(ValueError, match=r"--windows, .* the text has 6, not 7"):
        fp8_quality._windows(cell, list(range(20)))


def test_without_the_checkpoint_there_is_a_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    engine_models.window_llm.cache_clear()
    with pytest.raises(Unavailable, match="run `make model`"):
        fp8_quality.run_cell(Fp8Quality(cache="bf16"))
