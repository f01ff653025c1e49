"""Fixtures that run experiments: the command line in its own process, or a sweep in this one."""

import contextlib
import fcntl
import importlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

import cache
from experiments import style
from experiments.harness import sweep
from experiments.harness.workers import execute

_SAVE = style.save  # the real one, also in tests that use the fixture drawn


@pytest.fixture(scope="session")
def tiny():
    """The module of the tiny experiment, importable by worker processes under its name."""
    sys.path.append(str(Path(__file__).parent))
    yield importlib.import_module("tiny_experiment")
    sys.path.pop()


TINY_RUNS = {
    "block_size": "22 --trace {chat} --trace {lengths} --block-size 4 16 32 64 "
    "--capacity-percent 20 --draw 0 --traffic 0.01",
    "engine": "15 --model tiny --threads 1 --trace {chat} --scale 8 --num-requests 40 "
    "--longest 800 --output-tokens 4 --bench-requests 2 --sequences 2 --prompt-tokens 9 "
    "--repeats 1 --block-size 4 16 --policy lru no_cache gittins random --pool-percent 20",
    "eviction": "9 --trace {chat} --capacity-percent 5 20 "
    "--policy lru --policy sieve --policy belady --policy {policy}:Mine",
    "eviction_serving": "26 --trace {chat} --policy {policy}:Mine --policy lru "
    "--policy queue_informed --pool-gib 1 4 --num-requests 60 --slices 2",
    "fp8_quality": "8 --model tiny --windows 2 --calibration-windows 1 --window-tokens 40 "
    "--threads 1",
    "hybrid": "25 --trace {chat} --model gpt-oss-120b --policy lru --policy arc --layout full r0",
    "memory_waste": "5 --trace {lengths} --block-size 1 16 --num-requests 40 "
    "--sequences-in-cache 2",
    "overhead": "5 --trace {prompts} --repeats 2 --policy lru --pool-blocks 512 1024 "
    "--pool-requests 4 --manager vllm_v1 --num-sequences 1 2 --lengths 2 5 --num-steps 5",
    "preemption": "4 --block-size 4 16 --context-tokens 40 --transfer-us 3 --draw 0 "
    "--traffic 0.01 --request-rate 40",
    "published_serving": "2 --case lambda_a100_10 bench_70b",
    "serving": "5 --load sharegpt alpaca_2_beams --host-ms 220 --draw 0 "
    "--system contiguous_max contiguous_oracle paged --traffic 0.01 --bisections 1",
    "sessions": "13 --trace {sessions} --policy lru gittins told_1 told_1_ends --seeds 2 "
    "--capacity-percent 20 --num-requests 30 --slices 1",
    "tier": "14 --trace {chat} --policy lru --policy {policy}:Mine --pool-gib 0.5 "
    "--host-gib 0.25 1 4096 8192 --store through exclusive --link-gb-s 52 1 --slices 1 ",
    "shared_prefix": "3 --load five_shot --draw 0 --traffic 0.02 --bisections 1",
    "sharing": "4 --like alpaca --num-sequences 2 3 --num-requests 3",
}
"""Number of cells and options of the smallest run of each experiment that shows all of its rows."""


@dataclass(frozen=True)
class TinyRun:
    """A finished run by the command line."""

    folder: Path

    @property
    def rows(self) -> pd.DataFrame:
        return pd.read_csv(self.folder / "rows.csv")

    @property
    def summary(self) -> pd.DataFrame:
        return pd.read_csv(self.folder / "summary.csv")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> dict[str, Path]:
    """Traces of 60 chats, 50 prompts and 4 sessions, lengths with a damaged last row, a policy."""
    folder = tmp_path_factory.mktemp("inputs")
    names = {"chat": "chat.jsonl.gz", "prompts": "prompts.jsonl.gz", "sessions": "s.jsonl.gz"}
    names |= {"lengths": "azure.csv", "policy": "policy.py"}
    paths = {name: folder / file for name, file in names.items()}
    chats = cache.make_workload("multi_turn_chat", seed=3, num_requests=60)
    cache.save_trace(chats, paths["chat"])
    prompts = cache.make_workload("shared_system_prompts", seed=0, num_requests=50)
    cache.save_trace(prompts, paths["prompts"])
    facts = {"agent": 0, "think_time": 9}
    turns = [(i, i * i % 7, i // 7 + 1) for i in range(60)]
    agents = cache.Trace.from_requests(
        [(i, 64 * n, 4, range(99 * s, 99 * s + n), {**facts, "session": s}) for i, s, n in turns],
        name="s",
    )
    cache.save_trace(agents, paths["sessions"])
    rows = [f"2023-11-16 18:17:{i:02}.0000000,{20 + i},{5 + i % 3}" for i in range(40)]
    # As in Azure's copies: the number of requests is glued to the last output.
    rows.append("2023-11-16 18:17:41.0000000,30,1734199")
    paths["lengths"].write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    paths["policy"].write_text(
        "from cache.policies.sieve import Sieve\n\n\nclass Mine(Sieve):\n    pass\n"
    )
    return paths


@pytest.fixture(scope="session")
def tiny_run(inputs, tmp_path_factory) -> Callable[[str], TinyRun]:
    """The tiny run of an experiment by name; run once for all test processes.

    A process for each run would spend most of its time on imports.
    """
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny_runs"
    out.mkdir(exist_ok=True)

    def run_here(name: str, options: str) -> str:
        from experiments import cli  # needs tyro, which a GPU machine may lack

        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(style, "save", _SAVE)
            patch.setattr(style, "_FORMATS", {"png": style._FORMATS["png"]})
            patch.setattr("importlib.metadata.distributions", list)  # reading them takes longest
            patch.setattr(sweep, "run_locally", lambda tasks, jobs: (execute(t) for t in tasks))
            words = [word.format(**inputs) for word in options.split()]
            assert cli.main(["run", name, *words, "--jobs=1", f"--out={out}"]) == 0
        return printed.getvalue()

    def run(name: str) -> TinyRun:
        num_cells, _, options = TINY_RUNS[name].partition(" ")
        output = out / f"{name}.txt"
        with (out / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not output.exists():
                output.write_text(run_here(name, options))
        assert f"{name}: {num_cells} cells, {num_cells} run, 0 finished" in output.read_text()
        return TinyRun(out / name / "cpu")

    return run


@pytest.fixture
def journal(tmp_path: Path) -> Callable[[], Counter[int]]:
    """Number of runs of each tiny cell with ``{"journal": str(tmp_path / "journal")}``."""

    def read() -> Counter[int]:
        path = tmp_path / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(int(line.split()[0]) for line in lines)

    return read


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The figures that a plot function saves, by name; no file is written."""
    figures = {}

    def lay_out(figure, folder: Path, name: str) -> list[Path]:
        figure.draw_without_rendering()
        figures[name] = figure
        return [folder / f"{name}.png"]

    monkeypatch.setattr(style, "save", lay_out)
    return figures
