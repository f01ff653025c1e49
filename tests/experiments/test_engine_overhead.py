"""The experiment engine_overhead."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pandas as pd
import pytest

from cache.serving.engine import Engine
from experiments import engine_overhead
from experiments.engine_overhead import EngineOverhead

PHASES = ["schedule", "prepare", "model", "rest"]


def rows_of(model: str | None, manager: str = "vllm_v1", **options) -> pd.DataFrame:
    sizes = {"num_sequences": (3,), "lengths": (3, 9), "num_steps": 12, **options}
    cell = next(engine_overhead.cells(EngineOverhead(manager=(manager,), **sizes)))
    return pd.DataFrame(engine_overhead.run_cell(dataclasses.replace(cell, model=model)))


@pytest.mark.parametrize("manager", EngineOverhead().manager)
def test_every_phase_of_every_step_takes_time(manager):
    rows = rows_of(None, manager)
    assert list(rows["phase"]) == PHASES
    assert (rows["us_per_step_p20"] > 0).all()
    assert (rows["us_per_step_p20"] <= rows["us_per_step"]).all()
    assert (rows["us_per_step"] <= rows["us_per_step_p80"]).all()
    assert rows["share"].isna().all()


def test_the_parts_of_a_step_add_up(monkeypatch):
    """On a clock that goes on by a second whenever it is read: at both ends of what is timed.

    A step that ends no request reads it at its begin, around its schedule, around its run, around
    the preparation in that, and at its end: 7 seconds.
    """
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(engine_overhead, "time", clock)
    rows = rows_of("tiny", lengths=(200, 200), num_steps=4).set_index("phase")
    seconds = {"schedule": 1, "prepare": 1, "model": 2, "rest": 3}
    assert (rows["us_per_step_mean"] / 1e6).to_dict() == pytest.approx(seconds)
    assert (7 * rows["share"]).to_dict() == pytest.approx(seconds)


def test_the_number_of_running_requests_is_kept(monkeypatch):
    running = []
    step = Engine.step

    def noted(engine):
        tokens, finished = step(engine)
        running.append(len(engine.scheduler.running) + len(finished))
        return tokens, finished

    monkeypatch.setattr(Engine, "step", noted)
    rows_of(None, num_sequences=(5,), lengths=(1, 4), num_steps=40)
    assert len(running) >= 40
    assert set(running[-40:]) == {5}
