"""The experiment block_size."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import cache
from cache.trace import Trace
from experiments import block_size


@pytest.fixture
def traces(tmp_path):
    """A chat in blocks of 16, and lengths with one damaged row."""
    chat = tmp_path / "chat.jsonl.gz"
    cache.save_trace(cache.make_workload("multi_turn_chat", num_requests=80, block_size=16), chat)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,60,10\n"
        "2023-11-16 18:17:04.0319600,120,8\n"
        "2023-11-16 18:17:04.0319700,20,1738819\n"
    )
    return chat, lengths


def test_the_command_line_from_traces_to_the_figure(command_line, traces, tmp_path):
    files = [word for trace in traces for word in ("--trace", trace)]
    sizes = ("--block-size", 4, 16, 32, 64)
    command_line("run", "block_size", *files, *sizes, "--capacity-percent", 20, "--jobs", 1)
    folder = tmp_path / "results" / "block_size" / "cpu"
    assert (folder / "block_size.png").stat().st_size > 10_000
    rows = pd.read_csv(folder / "rows.csv")

    hits = rows[rows["part"] == "hit_rate"]
    assert set(hits["trace"]) == {"chat"}
    assert set(hits["block_size"]) == {16, 32, 64}  # the trace cannot be cut finer
    bounded = hits[hits["capacity_fraction"] == 0.2].set_index("block_size")["token_hit_rate"]
    infinite = hits[hits["capacity_fraction"] > 1].set_index("block_size")["token_hit_rate"]
    assert (infinite >= bounded).all()
    assert infinite[16] > infinite[32] > infinite[64] > 0
    chat = cache.load_trace(traces[0])
    tokens = int(chat.num_unique_blocks * 16 * 0.2)
    expected = cache.simulate(chat.coarsened(2), policy="lru", capacity_blocks=tokens // 32)
    assert bounded[32] == expected.token_hit_rate

    waste = rows[(rows["part"] == "waste") & (rows["trace"] == "lengths")].set_index("block_size")
    assert list(waste["damaged_requests"]) == [1] * 4
    # 70 and 128 tokens in blocks of 64: 128 slots each.
    assert waste.loc[64, "empty_slots"] == 58
    assert waste.loc[64, "waste"] == 58 / 256
    assert waste["waste"].is_monotonic_increasing


@pytest.mark.parametrize("part", ["hit_rate", "partial_reuse", "waste"])
def test_each_part_alone_has_a_figure(traces, tmp_path, part):
    options = block_size.BlockSizeOptions(
        part=(part,), trace=traces[:1], block_size=(16, 32), capacity_percent=(20,)
    )
    rows = [row for cell in block_size.cells(options) for row in block_size.run_cell(cell)]
    assert {row["part"] for row in rows} == {part}
    block_size.plot(pd.DataFrame(rows), tmp_path)
    assert (tmp_path / "block_size.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--block-size", 0), "--block-size must be at least 1, got 0"),
        (("--latency-block-size", 0), "--latency-block-size must be at least 1, got 0"),
        (("--latency-context-len", 0), "--latency-context-len must be at least 1, got 0"),
        (("--capacity-percent", 101), "--capacity-percent must be above 0 and at most 100"),
        (("--policy", "lruu"), "policy='lruu' is unknown; choose from"),
    ],
)
def test_bad_options(options, message):
    field = options[0].removeprefix("--").replace("-", "_")
    value = options[1] if field == "policy" else (options[1],)
    with pytest.raises(ValueError, match=message):
        list(block_size.cells(block_size.BlockSizeOptions(**{field: value})))


def test_a_trace_without_full_blocks_has_waste_only(tmp_path):
    path = tmp_path / "short.jsonl"
    rows = [(0, 20, 1, [0]), (1, 20, 1, [0])]
    cache.save_trace(Trace.from_requests(rows, name="short", block_size=16), path)
    options = block_size.BlockSizeOptions(trace=(path,), block_size=(16, 32))
    cells = (c for c in block_size.cells(options) if isinstance(c, block_size.BlockSizeCell))
    parts = [row["part"] for c in cells for row in block_size.run_cell(c)]
    assert parts.count("waste") == 2


def test_latency_is_absent_without_a_gpu_and_can_be_run_alone(monkeypatch):
    only = block_size.BlockSizeOptions(part=("latency",))
    monkeypatch.setattr(block_size, "cuda_available", lambda: False)
    (absent,) = block_size.cells(only)
    assert absent.reason == "latency: there is no GPU here"
    monkeypatch.setattr(block_size, "cuda_available", lambda: True)
    cells = list(block_size.cells(only))
    assert len(cells) == 3 * 14 * 3
    assert all(cell.shape.op == "decode" for cell in cells)


def test_decode_is_right_at_odd_block_sizes(monkeypatch):
    monkeypatch.setattr(block_size, "cuda_available", lambda: True)
    options = block_size.BlockSizeOptions(
        part=("latency",),
        latency_block_size=(3, 24),
        latency_context_len=(10,),
        latency_batch=1,
        latency_implementation=("pagelab",),
        budget_ms=1.0,
    )
    rows = [row for cell in block_size.cells(options) for row in block_size.run_cell(cell)]
    assert [row["block_size"] for row in rows] == [3, 24]
    assert all(row["part"] == "latency" and row["error"] <= row["bound"] for row in rows)


def test_the_latency_figure_has_bounds(monkeypatch, timed_rows, drawn):
    monkeypatch.setattr(block_size, "cuda_available", lambda: True)
    rows = timed_rows(block_size.cells(block_size.BlockSizeOptions(part=("latency",))))
    rows = rows.assign(part="latency")
    block_size.plot(rows, Path())
    assert set(drawn) == {"block_size_latency"}
    axes = drawn["block_size_latency"].axes
    assert len(axes) == 6
    assert all(
        "bound: copy bandwidth" in {line.get_label() for line in axis.get_lines()} for axis in axes
    )
    assert block_size.plot(rows.assign(p50_us=float("nan")), Path()) == []
