"""The figures drawn from the event log."""

from __future__ import annotations

import re
import sys

import pytest

import cache
from docs.examples import block_lives


@pytest.mark.parametrize("manager", ["vllm_v1", "vllm_v0", "nano_vllm", "radix"])
def test_the_lives_of_blocks(manager, tmp_path, capsys, monkeypatch):
    trace = cache.make_workload("rag", seed=1, num_requests=30)
    cache.save_trace(trace, tmp_path / "trace.jsonl.gz")
    out = tmp_path / "lives.png"
    options = ["--trace", tmp_path / "trace.jsonl.gz", "--manager", manager, "--num-blocks", 600]
    monkeypatch.setattr(sys, "argv", ["block_lives", *map(str, options), "--out", str(out)])
    block_lives.main()
    printed = capsys.readouterr().out
    [evictions] = re.findall(r"([\d,]+) evictions", printed)
    assert int(evictions.replace(",", "")) > 0
    assert out.stat().st_size > 10_000


def test_a_log_without_evictions_can_be_drawn(tmp_path):
    log = cache.EventLog()
    manager = cache.make_manager("radix", num_blocks=9, block_size=2, event_log=log)
    manager.allocate(cache.Sequence(0, range(5)))
    figure = block_lives.draw(log, 9)
    assert [line.get_ydata()[-1] for line in figure.axes[0].lines] == [3, 9]
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [
        [], ["no evictions"], ["no hits"],
    ]  # fmt: skip
