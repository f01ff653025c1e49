"""What holds for every experiment: the command line at a tiny size, and options that it refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from experiments import cli
from experiments.harness import plot_results
from experiments.registry import EXPERIMENTS

RESULTS = Path(__file__).parents[2] / "results"
NUM_CELLS = {
    "block_size": 20,
    "engine_overhead": 3,
    "eviction": 9,
    "eviction_serving": 7,
    "kernel_counters": 3,
    "manager_overhead": 4,
    "memory_waste": 5,
    "preemption": 6,
    "replay_speed": 4,
    "serving": 4,
    "shared_prefix": 6,
    "sharing": 12,
}


@pytest.fixture(autouse=True)
def _no_traces_dir(monkeypatch):
    monkeypatch.delenv("TRACES_DIR", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_CELLS)
def test_a_tiny_run_gives_the_table_and_the_figures_and_is_not_repeated(
    name, tiny_run, command, tmp_path, request
):
    run = tiny_run(name)
    assert f"{name}: {NUM_CELLS[name]} cells, {NUM_CELLS[name]} run, 0 finished" in run.output
    published = RESULTS / name / "cpu"
    assert set(run.rows) == set(pd.read_csv(published / "rows.csv", nrows=0))
    written = {path.name for path in run.folder.iterdir()} - {".cells", "sweep.log"}
    assert written == {path.name for path in published.iterdir()}
    assert all(path.stat().st_size > 5_000 for path in run.folder.glob("*.png"))
    assert f"0 run, {NUM_CELLS[name]} finished earlier" in command(*run.command)

    alone = tmp_path / name / "cpu"
    alone.mkdir(parents=True)
    shutil.copy(run.folder / "rows.csv", alone)
    command("plot", name, "--out", tmp_path)
    assert {path.name for path in alone.iterdir()} == written - {"environment.json"}
    for drawn in alone.iterdir():
        assert drawn.read_bytes() == (run.folder / drawn.name).read_bytes(), drawn.name

    request.getfixturevalue("drawn")
    for part in parts_of(run.rows):
        (tmp_path / "rows.csv").write_text(part.to_csv(index=False))
        assert plot_results(EXPERIMENTS[name], tmp_path), "a table that lacks rows is drawn too"


def parts_of(rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Tables that lack cells: the first row alone, and each part of the experiment."""
    yield rows.head(1)
    for column in {"part", "model", "page_size", "policy"} & set(rows):
        yield from (part for _, part in rows.groupby(column))


NOT_ABOVE_0, AT_LEAST_1 = "needs a number above 0", "needs an int of at least 1"
PERCENT = f"{NOT_ABOVE_0}, at most 100"
REFUSED = """
block_size --block-size 0: AT_LEAST_1
block_size --latency-block-size 0: AT_LEAST_1
block_size --capacity-percent 101: PERCENT
block_size --policy lruu: policy='lruu' is unknown; choose from
engine_overhead --lengths 9 3: needs fewest and most, at least 1
engine_overhead --model-lengths 0 3: needs fewest and most, at least 1
engine_overhead --num-sequences 4 0| --num-sequences 0: AT_LEAST_1
engine_overhead --manager vllm_v9: needs one of
engine_overhead --model huge: needs one of tiny, llama-100m
eviction --policy lur: policy='lur' is unknown; choose from .*lru
eviction --policy none.py:Mine| no file none\\.py
eviction --trace none.jsonl| none\\.jsonl
eviction --trace /| / is a folder: .* TRACES_DIR
eviction --out /dev/null/x| --out: cannot write to /dev/null/x
eviction --capacity-percent 0: PERCENT
eviction --capacity-percent| --capacity-percent: needs at least one value
eviction --num-requests 0: AT_LEAST_1
eviction --seed -1: needs an int of at least 0
eviction --jobs 0| jobs must be at least 1, got 0
eviction_serving --capacity-percent 0: PERCENT
eviction_serving --skip-requests -1: needs an int of at least 0
eviction_serving --policy lru2: policy='lru2' is unknown
eviction_serving --model gpt: needs one of tiny
eviction_serving --timed-model gpt: needs one of tiny
eviction_serving --load 0: NOT_ABOVE_0
manager_overhead --pool-blocks 100: needs an int of at least 512
manager_overhead --requests 1: needs an int of at least 2
manager_overhead --tree-page-sizes 16 0| --tree-page-sizes 0: needs a divisor of 1024
manager_overhead --tree-page-sizes 1000: needs a divisor of 1024
manager_overhead --tree-prompts 0: AT_LEAST_1
kernel_accuracy --kernel x: needs one of .*copy_blocks
kernel_accuracy --block-size 0: AT_LEAST_1
kernel_counters --op x: needs one of decode, prefill
kernel_counters --sglang none.py| none\\.py
memory_waste --sequences-in-cache 0: AT_LEAST_1
memory_waste --load 0: NOT_ABOVE_0
preemption --cache-tokens 150: does not hold a request of 224 tokens in blocks of 1
preemption --block-size 0: AT_LEAST_1
preemption --context-tokens 5 0| --context-tokens 0: AT_LEAST_1
preemption --prompt-tokens 9 8: needs fewest and most, at least 1
preemption --output-tokens 0 8: needs fewest and most, at least 1
preemption --manager vllm_v9: needs one of
preemption --model gpt: needs one of tiny
replay_speed --repeats 0: AT_LEAST_1
replay_speed --capacity-percent 0: PERCENT
serving --system orca: needs one of contiguous_max
serving --request-rate 5 0| --request-rate 0: NOT_ABOVE_0
serving --drain-s 0: NOT_ABOVE_0
serving --block-size 5: needs a divisor of --max-model-len 1024
serving --model gpt: needs one of tiny
shared_prefix --manager paged: needs one of nano_vllm
shared_prefix --cached-percent 100: needs a number from 0 to below 100
shared_prefix --prompt-tokens 0: AT_LEAST_1
shared_prefix --prefix-tokens -1: needs an int of at least 0
shared_prefix --output-tokens 0: AT_LEAST_1
shared_prefix --threads 0: AT_LEAST_1
sharing --lengths 20: needs prompt and output tokens, as in 20:60
sharing --lengths 0:5: needs prompt and output tokens
sharing --drop-probability 1.5: needs a number from 0 to 1
sharing --num-sequences 0: AT_LEAST_1
sharing --num-requests 0: AT_LEAST_1
sharing --manager vllm_v9: needs one of
"""
"""``experiment options: what is said of them``, or ``experiment options| error``."""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_bad_value_is_refused_with_its_option_and_writes_nothing(
    line, capsys, tmp_path, monkeypatch
):
    for name in ("AT_LEAST_1", "NOT_ABOVE_0", "PERCENT"):
        line = line.replace(name, globals()[name])
    words, expected = re.fullmatch(r"(.*?)(\| .*|: .*)", line).groups()
    name, *options = words.split()
    message = expected[2:] if expected[0] == "|" else f"{' '.join(options)}{expected}"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", name, *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
