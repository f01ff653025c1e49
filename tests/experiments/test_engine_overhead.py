from __future__ import annotations

import math

import pandas as pd
import pytest

from experiments import engine_overhead
from experiments.engine_overhead import EngineOverheadCell, EngineOverheadOptions, run_cell


def rows_of(model: str | None, **changes) -> pd.DataFrame:
    parameters = {
        "seed": 0,
        "model": model,
        "manager": "vllm_v1",
        "num_sequences": 3,
        "lengths": (3, 9),
        "num_steps": 12,
    }
    return pd.DataFrame(run_cell(EngineOverheadCell(**{**parameters, **changes})))


@pytest.mark.parametrize("manager", EngineOverheadOptions().manager)
def test_every_phase_of_every_step_takes_time(manager):
    rows = rows_of(None, manager=manager)
    assert list(rows["phase"]) == ["schedule", "prepare", "model", "rest"]
    assert (rows["us_per_step_p20"] > 0).all()
    assert (rows["us_per_step_p20"] <= rows["us_per_step"]).all()
    assert (rows["us_per_step"] <= rows["us_per_step_p80"]).all()
    assert rows["share"].isna().all()


def test_the_parts_of_a_step_with_a_model_add_up():
    rows = rows_of("tiny").set_index("phase")
    assert math.isclose(rows["share"].sum(), 1)
    means = rows["us_per_step_mean"]
    assert math.isclose(rows.loc["schedule", "share"], means["schedule"] / means.sum())
    assert rows["share"].idxmax() == "model"


def test_the_number_of_running_requests_is_kept(monkeypatch):
    running = []
    step = engine_overhead._Stopwatch.step

    def noted(self):
        result = step(self)
        running.append(len(self._engine.scheduler.running) + result[0])
        return result

    monkeypatch.setattr(engine_overhead._Stopwatch, "step", noted)
    rows_of(None, num_sequences=5, lengths=(1, 4), num_steps=40)
    assert len(running) >= 40
    assert set(running[-40:]) == {5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (9, 3)}, "--lengths 9 3"),
        ({"model_lengths": (0, 3)}, "--model-lengths 0 3"),
        ({"num_sequences": (4, 0)}, "at least 1"),
        ({"manager": ("vllm_v9",)}, "vllm_v9"),
        ({"model": "huge"}, "huge"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        list(engine_overhead.cells(EngineOverheadOptions(**options)))


def test_command_line(command_line, tmp_path):
    command = "run engine_overhead --num-sequences 1 2 --lengths 2 5 --num-steps 5 --model tiny"
    command += " --manager vllm_v1 --model-num-sequences 2 --model-lengths 2 5 --model-num-steps 5"
    command_line(*command.split(), "--out", tmp_path)
    rows = pd.read_csv(tmp_path / "engine_overhead" / "cpu" / "rows.csv")
    assert len(rows) == 3 * 4
    assert (tmp_path / "engine_overhead" / "cpu" / "engine_overhead.png").stat().st_size > 10_000
