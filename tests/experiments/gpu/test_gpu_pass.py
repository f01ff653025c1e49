"""gpu-pass: all stages at tiny sizes by the real command line, killed, resumed, out of time."""

from __future__ import annotations

import json
import re
import signal
import time

import pandas as pd
import pytest
import torch

from experiments.gpu import gpu_pass
from experiments.gpu.gpu_pass import STAGES, GpuPass, digest
from experiments.gpu.kernel_latency import PARTS

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")


def test_stages_are_experiments_with_options_of_theirs():
    for stage in STAGES:
        for tiny in (False, True) if stage.tiny is not None else (False,):
            experiment, options = stage.load(tiny=tiny)
            assert experiment.name == stage.experiment.split(".")[-1]
            assert isinstance(options, type(experiment.options))
    assert len({stage.name for stage in STAGES}) == len(STAGES)


@pytest.mark.slow
@on_cpu
def test_a_tiny_pass_runs_every_stage_without_times_and_resumes(command_line, tmp_path):
    command = ("gpu-pass", "--tiny", "--out", tmp_path / "out")
    first = command_line(*command).stdout
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"summary.txt", "environment.json", "results"}
    assert (out / "summary.txt").read_text() == first
    assert "no figures" not in first
    assert (out / "results/large_accuracy/cpu/large_accuracy.png").exists()
    assert json.loads((out / "environment.json").read_text())["packages"]["torch"]

    tiny = {stage.experiment.split(".")[-1] for stage in STAGES if stage.tiny is not None}
    tables = {path.parts[-3]: pd.read_csv(path) for path in out.glob("results/*/cpu/rows.csv")}
    assert set(tables) == tiny - {"block_size"}
    for rows in tables.values():
        if "bound" in rows:
            assert (rows["error"] <= rows["bound"]).all()
        assert "p50_us" not in rows or rows["p50_us"].isna().all()
    # Stages of one experiment share a table.
    assert set(tables["kernel_latency"]["op"]) == set(PARTS)

    again = command_line(*command, "--stage", "large_accuracy", "--stage", "moves").stdout
    assert "large_accuracy: 16 cells, 0 run, 16 finished earlier" in again
    assert "moves: 20 cells, 0 run, 20 finished earlier" in again
    assert (out / "summary.txt").read_text() == first + again


@on_cpu
def test_a_killed_pass_keeps_what_it_had(command_line, tmp_path, capsys):
    command = ("gpu-pass", "--tiny", "--out", tmp_path / "out")
    process = command_line.start(*command, "--stage", "moves", "--stage", "cascade")
    deadline = time.monotonic() + 110
    while not list(tmp_path.glob("out/results/kernel_latency/cpu/.cells/*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert gpu_pass.main([*map(str, command[1:]), "--stage", "moves"]) == 0
    resumed = re.search(r"moves: .* run, (\d+) finished earlier", capsys.readouterr().out)
    assert int(resumed[1]) > 0


@on_cpu
def test_without_time_no_stage_begins(tmp_path, capsys):
    run = GpuPass(tmp_path / "out", deadline=time.monotonic(), tiny=True)
    assert run.run() == 0
    reached = [line for line in capsys.readouterr().out.splitlines() if "not reached" not in line]
    assert reached == []


@on_cpu
def test_a_gpu_is_asked_for(tmp_path, capsys):
    assert gpu_pass.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "there is no GPU here; --tiny tries the stages without one" in error
    assert not (tmp_path / "out").exists()


def test_a_wrong_result_makes_the_pass_fail_and_is_told(tmp_path, monkeypatch, capsys):
    from experiments.harness.workers import Outcome

    def executor(self, tasks):
        for task in tasks:
            message = "WrongResult: pagelab is wrong: error 1, bound 0.1; no time is reported"
            yield Outcome(task.key, "failed", [], message, "", 0.0)

    monkeypatch.setattr(gpu_pass.Workers, "__call__", executor)
    run = GpuPass(tmp_path / "out", deadline=time.monotonic() + 60, tiny=True)
    stages = [stage for stage in STAGES if stage.name in ("decode", "prefill")]
    # 16 cells of each stage; those of the first are not tried again by the second.
    assert run.run(stages) == 32
    output = capsys.readouterr().out
    assert "0 run, 0 finished earlier, 16 FAILED" in output
    assert "32 x WrongResult: pagelab is wrong" in output


def test_a_stage_that_breaks_does_not_end_the_pass(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("disk full")

    monkeypatch.setattr(gpu_pass, "run_sweep", broken)
    run = GpuPass(tmp_path / "out", deadline=time.monotonic() + 60, tiny=True)
    assert run.run([stage for stage in STAGES if stage.name in ("accuracy", "decode")]) == 2
    output = capsys.readouterr().out
    assert output.count("RuntimeError: disk full") == 2
    assert "decode: FAILED" in output


def test_digests_show_what_was_measured():
    shape = {"op": "decode", "batch": [1, 1, 8], "query_len": 1, "prefix_len": 0}
    timed = pd.DataFrame(
        {
            **shape,
            "context_len": 512,
            "block_size": 256,
            "implementation": ["pagelab", "flash_attn_2", "pagelab"],
            "launch": ["graph", "eager", "graph"],
            "p50_us": [12.5, 14.0, 90.0],
            "bandwidth_fraction": [0.5, 0.45, 0.9],
            "matmul_fraction": 0.01,
            "peak_gb_per_s": 3012.3,
            "peak_tflop_per_s": 700.0,
        }
    )
    lines = digest(timed).splitlines()
    rates = "device copy, read and written: 3,012 GB/s; bf16 matrix product: 700 TFLOP/s"
    assert lines.pop(0) == rates
    assert lines[1].split() == ["column", "pagelab", "fa_2", "(eager)", "copy", "%", "matmul", "%"]
    assert lines[3].split() == ["1", "12.5", "14.0", "50.0", "1.0"]
    assert lines[4].split() == ["8", "90.0", "-", "90.0", "1.0"]

    judged = pd.DataFrame(
        {"op": ["store", "copy"], "passed": [True, False], "error": [0.0, 3.0], "bound": 1e-5}
    )
    assert "1 of 2 results within the bound" in digest(judged)
    assert "copy" in digest(judged)
    assert "store" not in digest(judged)


def test_a_digest_of_the_tile_sweep_is_its_decision():
    row = {"part": "decode", "batch": 1, "query_len": 1, "context_len": 512, "p50_us": 10.0}
    row |= {"tile_m": 16, "num_warps": 4, "num_stages": 5, "num_splits": None, "head_dim": 128}
    row |= {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    rows = pd.DataFrame(
        [
            {**row, "by_table": True, "tile_n": 64},
            {**row, "by_table": False, "tile_n": 32, "p50_us": 5.0},
        ]
    )
    assert "| (16, 32, 4, 5) | 0.500 | 0.500 |" in digest(rows)
    assert digest(rows.assign(p50_us=float("nan"))) == ""
