"""The experiment serving."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
import torch

import cache
from cache.serving.open_loop import Run, Served, StepRecord
from experiments import serving
from experiments.harness import Absent
from experiments.load.request_lengths import LogNormalLengths

torch.set_num_threads(1)
TINY = {"duration_s": 0.1, "drain_s": 5.0, "mean_tokens": 24.0, "max_model_len": 64}


@pytest.fixture(autouse=True)
def _no_traces_dir(monkeypatch):
    monkeypatch.delenv("TRACES_DIR", raising=False)


def grid(**options):
    return list(serving.cells(serving.ServingOptions(**options)))


def request(**values) -> Served:
    defaults = {
        "arrived_s": 0.0,
        "prompt_length": 10,
        "output_length": 5,
        "stopped_s": 1.0,
        "finished": True,
        "first_token_s": 0.5,
        "was_scheduled": True,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
    }
    return Served(**{**defaults, **values})


def run_one(system, trace=None, **options):
    """The row of ``system`` on the chat workload, or on ``trace``."""
    traces = {} if trace is None else {"trace": (trace,)}
    *_, cell = grid(system=(system,), **{**TINY, "request_rate": (100,), **traces, **options})
    (row,) = serving.run_cell(cell)
    return row


@pytest.mark.slow
def test_the_command_line_from_lengths_to_the_figures(command_line, tmp_path):
    systems = ("contiguous_max", "vllm_v1")
    options = [word for system in systems for word in ("--system", system)]
    output = command_line(
        "run", "serving", *options, "--request-rate", 50, 2000, "--duration-s", 0.05,
        "--drain-s", 0.05, "--mean-tokens", 24, "--max-model-len", 64,
    ).stdout  # fmt: skip
    assert "serving: 8 cells, 8 run" in output

    folder = tmp_path / "results" / "serving" / "cpu"
    rows = pd.read_csv(folder / "rows.csv")
    assert list(rows["trace"].unique()) == ["log_normal_120_240", "multi_turn_chat"]
    assert list(rows["system"].unique()) == list(systems)
    assert set(rows["cache_slots"]) == {8 * 64}  # the same memory for all
    assert set(rows["requests"]) <= {2, 100}
    assert (rows["requests_finished"] <= rows["requests"]).all()
    assert (rows["saturated"] == (rows["requests_finished"] < rows["requests"])).all()
    assert (rows["normalized_latency_s"] > 0).all()
    assert (rows["ttft_p50_s"] <= rows["ttft_p99_s"]).all()
    assert rows[rows["system"] == "contiguous_max"]["peak_batched_requests"].max() <= 8
    assert (rows[rows["system"] != "vllm_v1"]["cached_prompt_fraction"] == 0).all()
    files = {"serving.pdf", "serving.png", "serving_tokens.pdf", "serving_tokens.png"}
    assert files <= {path.name for path in folder.iterdir()}
    summary = pd.read_csv(folder / "summary.csv")
    assert len(summary) == 4
    assert set(summary["highest_rate"]) == {2000}


def test_the_default_grid_has_lengths_alone_and_chats_with_common_prefixes():
    cells = grid()
    lengths = [cell for cell in cells if isinstance(cell.source, LogNormalLengths)]
    chats = [cell for cell in cells if cell not in lengths]
    assert {cell.source.name for cell in chats} == {"multi_turn_chat"}
    assert {cell.system for cell in lengths} == {
        "contiguous_max", "contiguous_pow2", "contiguous_oracle", "paged",
    }  # fmt: skip
    assert {cell.system for cell in chats} >= {"contiguous_oracle", "paged", "vllm_v1", "radix"}


def test_a_trace_of_lengths_runs_the_systems_without_prefix_caching(tmp_path):
    azure = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{10 + i}.5,{300 + i},{40 + i}" for i in range(20)]
    azure.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    assert "vllm_v1" not in {cell.system for cell in grid(trace=(azure,))}
    row = run_one("paged", azure, arrivals="trace", request_rate=(400,))
    assert (row["trace"], row["arrivals"], row["requests"]) == ("azure", "trace", 20)
    assert row["length_divisor"] == pytest.approx((309.5 + 49.5) / 24)
    assert not row["saturated"]
    assert row["seconds"] >= 19 / 400


@pytest.mark.parametrize("system", serving._SYSTEMS)
def test_every_system_serves_every_request_in_the_same_memory(system):
    row = run_one(system, request_rate=(200,))
    assert row["system"] == system
    assert (row["requests"], row["requests_finished"]) == (20, 20)
    assert row["cache_slots"] == 512
    assert 0 < row["mean_cache_usage"] <= 1
    assert 0 < row["normalized_latency_s"] < 5
    assert (row["cached_prompt_fraction"] > 0) == (
        system in ("vllm_v1", "vllm_v0", "radix", "nano_vllm")
    )


def test_paging_batches_more_requests_than_reservations():
    """Figure 13 of the paper.  The burst is more than fits, so memory decides."""
    burst = {"request_rate": (100_000,), "duration_s": 0.001, "drain_s": 20.0}
    peaks = {
        system: run_one(system, **burst)["peak_batched_requests"]
        for system in ("contiguous_max", "contiguous_pow2", "contiguous_oracle", "paged")
    }
    assert peaks["contiguous_max"] == 8
    assert peaks["contiguous_max"] < peaks["contiguous_pow2"] <= peaks["contiguous_oracle"]
    assert peaks["contiguous_oracle"] < peaks["paged"]


def test_saturated_cells_say_so_and_count_what_was_given_up():
    row = run_one("contiguous_max", request_rate=(20_000,), duration_s=0.01, drain_s=0.01)
    assert row["saturated"]
    assert row["requests_finished"] < row["requests"] == 200
    assert row["seconds"] < 5
    assert row["ttft_p99_s"] >= 0.01


def test_the_row_is_computed_of_the_run(monkeypatch):
    run = Run(
        [
            request(output_length=2, num_cached_tokens=4),
            request(finished=False, output_length=4, stopped_s=4.0, num_preemptions=3),
        ],
        [StepRecord(0.5, 0.5, 1, 0, 32), StepRecord(1.0, 0.5, 2, 3, 64)],
        seconds=4.0,
        generated_tokens=6,
    )
    monkeypatch.setattr(serving.open_loop, "serve", lambda *_, **__: run)
    monkeypatch.setattr(serving, "_warm_up", lambda cell: None)
    row = run_one("paged")
    assert row["normalized_latency_s"] == (0.5 + 1.0) / 2
    assert row["saturated"]
    assert (row["requests"], row["requests_finished"], row["preemptions"]) == (2, 1, 3)
    assert (row["mean_batched_requests"], row["peak_batched_requests"]) == (1.5, 2)
    assert row["mean_cache_usage"] == 48 / 128
    assert row["cached_prompt_fraction"] == 0.2
    assert (row["requests_per_second"], row["output_tokens_per_second"]) == (0.25, 1.5)
    assert row["tpot_mean_s"] == 0.5


def test_cells_of_all_rates_serve_the_same_requests_in_the_same_pattern(monkeypatch):
    calls = []

    def record(llm, prompts, lengths, arrivals, stop_s=None):
        calls.append((prompts, lengths, arrivals, stop_s))
        return Run([request()], [StepRecord(0.5, 0.5, 1, 0, 32)], seconds=1.0)

    monkeypatch.setattr(serving.open_loop, "serve", record)
    monkeypatch.setattr(serving, "_warm_up", lambda cell: None)
    for cell in grid(system=("paged",), **{**TINY, "request_rate": (100, 200)})[:2]:
        serving.run_cell(cell)
    (prompts, lengths, arrivals, stop), (more, longer, faster, _) = calls
    assert (len(prompts), len(more)) == (10, 20)
    assert more[:10] == prompts
    assert longer[:10] == lengths
    assert [2 * time for time in faster[:10]] == pytest.approx(arrivals)
    assert stop == arrivals[-1] + 5.0


def test_the_highest_rate_kept_up_with():
    rows = pd.DataFrame(
        {
            "trace": "t",
            "system": ["paged"] * 3 + ["contiguous_max"] * 2,
            "request_rate": [40, 10, 20, 10, 20],
            "saturated": [True, False, False, True, True],
            "requests_per_second": [25.0, 10.0, 20.0, 5.0, 6.0],
            "mean_batched_requests": [30.0, 5.0, 9.0, 8.0, 7.5],
            "cached_prompt_fraction": 0.0,
            "preemptions": [7, 0, 0, 0, 0],
        }
    )
    paged, contiguous = serving._summary(rows).to_dict("records")
    assert (paged["highest_rate_kept_up"], paged["requests_per_second_at_most"]) == (20, 25)
    assert (paged["batched_requests_there"], paged["preemptions_there"]) == (30, 7)
    assert contiguous["highest_rate_kept_up"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": ("orca",)}, "--system orca is unknown; choose from contiguous_max"),
        ({"request_rate": (5, 0)}, r"--request-rate must be above 0, got \(5, 0\)"),
        ({"drain_s": 0}, "--drain-s must be above 0"),
        ({"block_size": 5}, "--block-size must divide --max-model-len 1024, got 5"),
        ({"model": "gpt"}, "model='gpt' is unknown"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        grid(**options)


def test_broken_files_of_a_traces_folder_are_absent(tmp_path, monkeypatch):
    (tmp_path / "broken.jsonl").write_text('{"timestamp": 1}\n')
    cache.save_trace(
        cache.make_workload("multi_turn_chat", num_requests=5), tmp_path / "chat.jsonl"
    )
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    items = grid()
    assert [item.reason for item in items if isinstance(item, Absent)] == [
        "broken.jsonl:1: missing field 'input_length'"
    ]
    assert {i.source.name for i in items if not isinstance(i, Absent)} == {"chat.jsonl"}


def test_options_and_cells_have_the_same_fields():
    fields = {field.name for field in dataclasses.fields(serving.ServingCell)}
    assert fields - {"source"} == {
        field.name for field in dataclasses.fields(serving.ServingOptions)
    } - {"trace"}
