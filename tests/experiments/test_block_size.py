"""The experiment block_size."""

from pathlib import Path

import pandas as pd

import cache
from cache.traces.trace import Trace
from experiments import block_size
from experiments.harness import Absent
from experiments.harness.environment import committed


def grid(**options):
    return list(block_size.EXPERIMENT.checked_cells(block_size.BlockSize(**options)))


def test_coarse_blocks_cost_hits_and_slots(tiny_run, inputs):
    rows = tiny_run("block_size").rows
    hits = rows[rows["part"] == "hit_rate"]
    assert set(hits["trace"]) == {"chat"}
    assert set(hits["block_size"]) == {16, 32, 64}  # the trace cannot be cut finer
    bounded = hits[hits["capacity_fraction"] == 0.2].set_index("block_size")["token_hit_rate"]
    infinite = hits[hits["capacity_fraction"] > 1].set_index("block_size")["token_hit_rate"]
    assert (infinite >= bounded).all()
    assert infinite[16] > infinite[32] > infinite[64] > 0
    chat = cache.load_trace(inputs["chat"])
    tokens = int(chat.num_unique_blocks * 16 * 0.2)
    expected = cache.simulate(chat.coarsened(2), policy="lru", capacity_blocks=tokens // 32)
    assert bounded[32] == expected.token_hit_rate


def test_waste_by_hand(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,60,10\n"
        "2023-11-16 18:17:04.0319600,120,8\n"
        "2023-11-16 18:17:04.0319700,20,1738819\n"
    )
    cells = grid(trace=(path,), block_size=(4, 16, 32, 64), part=("waste", "hit_rate"))
    rows = [row for cell in cells for row in block_size.run_cell(cell)]
    assert [row["part"] for row in rows] == ["waste"] * 4
    assert {row["damaged_requests"] for row in rows} == {1}
    # 70 and 128 tokens in blocks of 64: 128 slots each.
    assert (rows[-1]["empty_slots"], rows[-1]["waste"]) == (58, 58 / 256)
    wasted = [row["waste"] for row in rows]
    assert wasted == sorted(wasted)


def test_a_trace_without_full_blocks_has_waste_only(tmp_path):
    path = tmp_path / "short.jsonl"
    requests = [(0, 20, 1, [0]), (1, 20, 1, [0])]
    cache.save_trace(Trace.from_requests(requests, name="short", block_size=16), path)
    cells = grid(trace=(path,), block_size=(32,), part=("waste", "hit_rate"))
    assert [row["part"] for cell in cells for row in block_size.run_cell(cell)] == ["waste"]


def test_latency_is_absent_without_a_gpu(monkeypatch):
    monkeypatch.setattr(block_size, "cuda_available", lambda: False)
    assert grid(part=("latency",)) == [Absent("latency: there is no GPU here")]


def test_blocks_longer_than_every_request_are_not_served():
    assert {cell.block_size for cell in grid(part=("serving",), block_size=(16, 2048))} == {16}


def test_the_latency_figure_has_bounds(drawn):
    rows = pd.read_csv(committed("block_size", "nvidia-h200") / "rows.csv")
    block_size.EXPERIMENT.plot(rows, Path())
    axes = drawn.pop("block_size_latency").axes
    assert not drawn
    assert len(axes) == 3
    for axis in axes:
        labels = {line.get_label() for line in axis.get_lines()}
        assert "bound: bytes at the measured peak" in labels
    assert block_size.EXPERIMENT.plot(rows.assign(p50_us=float("nan")), Path()) == []
