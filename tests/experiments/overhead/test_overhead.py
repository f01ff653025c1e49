"""The experiment overhead: its parts on their own, at tiny sizes."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import cache
from cache.serving.engine import Engine
from experiments import overhead
from experiments.harness import Absent, Unavailable
from experiments.overhead import engine, managers, replay
from experiments.overhead.baselines import HASH_ALGORITHMS, VLLMManager, VLLMScheduler


def test_the_tiny_run_has_every_part_with_its_phases_and_quantiles(tiny_run, inputs):
    rows = tiny_run("overhead").rows.set_index("part")
    assert (rows["us_p20"] <= rows["us"]).all()
    assert (rows["us"] <= rows["us_p80"]).all()
    of_managers = rows.loc["managers"]
    ours = of_managers[of_managers["implementation"] == "vllm_v1"]
    assert set(ours["phase"]) == {"sequence", "cycle", "hash", "lookup", "allocate", "free"}
    assert set(of_managers["implementation"]) >= set(managers._OURS)
    replays = rows.loc["replay"]
    references = cache.load_trace(inputs["prompts"]).num_block_references
    assert set(replays["block_references"]) == {references}
    if "libcachesim" in set(replays["implementation"]):
        rates = replays.pivot(index="policy", columns="implementation", values="block_hit_rate")
        # Per request and per reference differ a little, except for blocks that never return.
        assert (rates["pagelab"] - rates["libcachesim"]).abs().max() < 0.05


def test_replay_the_records_of_libcachesim_have_the_next_access():
    records = replay.oracle_general(np.array([5, 3, 5, 5, 0], np.int32))
    assert records.dtype.itemsize == 24
    assert list(records["id"]) == [6, 4, 6, 6, 1]
    assert list(records["next"]) == [2, -1, 3, -1, -1]
    assert set(records["size"]) == {1}


def test_replay_without_libcachesim_ours_is_timed_alone(monkeypatch):
    monkeypatch.setattr(replay.importlib.util, "find_spec", lambda name: None)
    few = {"trace": (Path("agent_loops"),), "policy": ("lru",), "trace_requests": 20, "repeats": 1}
    absent, cell = overhead.cells(overhead.Overhead(part=("replay",), **few))
    assert absent == Absent("libcachesim is not installed, or HOME cannot be written")
    monkeypatch.undo()
    rows = pd.DataFrame(overhead.run_cell(cell))
    assert list(rows["implementation"]) == ["pagelab"]
    assert "ratio" not in replay.table(rows)


def test_managers_half_of_each_prompt_is_cached():
    """The figures are quoted under this condition; it holds once the pool is full."""
    manager = cache.make_manager("vllm_v1", num_blocks=1024, block_size=16)
    prompts = managers._prompts(np.random.default_rng(0), 1024)
    hits, evicted = [], manager.stats.evicted_blocks
    for number in range(40):
        seq = cache.Sequence(number, next(prompts))
        hits.append(manager.allocate(seq))
        manager.free(seq)
    assert hits[20:] == [2048] * 20
    assert manager.stats.evicted_blocks - evicted > 20 * 128


def test_managers_are_compared_with_vllm_of_the_same_hash(monkeypatch):
    ours_of_theirs = {theirs: ours for ours, theirs in HASH_ALGORITHMS.items()}

    def stand_in(hash_algorithm: str, num_blocks: int, block_size: int):
        manager = managers._Ours("vllm_v1", ours_of_theirs[hash_algorithm], num_blocks)
        manager.name, manager.version, manager.hash_algorithm = "vLLM", "0.0", hash_algorithm
        return manager

    monkeypatch.setattr(managers, "VLLMManager", stand_in)
    cell = managers.ManagersCell(pool_blocks=512, pool_requests=2, vllm=True)
    rows = pd.DataFrame(overhead.run_cell(cell))
    theirs = rows[rows["implementation"] == "vLLM"]
    assert set(theirs["version"]) == {"0.0"}
    assert set(theirs["phase"]) == set(rows.loc[rows["implementation"] == "vllm_v1", "phase"])
    times = {("vLLM", "sha256"): 8, ("vLLM", "xxhash"): 4, ("vllm_v1", "sha256"): 2}
    times |= {("vllm_v1", "xxh3_128"): 2, ("vllm_v0", "xxh3_128"): 6}
    for (name, algorithm), us in times.items():
        chosen = (rows["implementation"] == name) & (rows["hash_algorithm"] == algorithm)
        rows.loc[chosen, "us"] = us
    table = managers.table(rows).set_index("name")
    ratios = {"vllm_v1 (sha256)": 2 / 8, "vllm_v1 (xxh3_128)": 2 / 4, "vllm_v0 (xxh3_128)": 6 / 4}
    ratios |= {f"vllm_v1 (xxh3_128) {policy}": 2 / 4 for policy in managers._OTHER_POLICIES}
    assert table["ratio_to_vllm"].dropna().to_dict() == ratios
    assert {"vLLM 0.0 (sha256)", "paged"} <= set(table.index)


def test_vllm_hits_what_ours_hits_and_its_scheduler_keeps_the_batch():
    """The comparison is of equal work; needs vLLM."""
    pytest.importorskip("vllm")
    theirs = [VLLMManager(name, 1024, 16) for name in HASH_ALGORITHMS.values()]
    ours = cache.make_manager("vllm_v1", num_blocks=1024, block_size=16)
    prompts = managers._prompts(np.random.default_rng(0), 1024)
    for number in range(40):
        token_ids = next(prompts)
        seq = cache.Sequence(number, token_ids)
        found = ours.allocate(seq)
        ours.free(seq)
        for manager in theirs:
            assert manager.cycle(manager.make(number, token_ids)) == found
    scheduler = VLLMScheduler(2, 64, 16)
    for count in (3, 1):
        scheduler.add([1, 2, 3], count)
    assert [scheduler.step()[0] for _ in range(4)] == [1, 0, 1, 0]


def test_without_vllm_its_rows_are_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Unavailable, match=r"vLLM 0\.33 cannot be imported"):
        VLLMManager("sha256", 512, 16)


def steps_of(manager: str = "vllm_v1", **options) -> pd.DataFrame:
    sizes = {"num_sequences": (3,), "lengths": (3, 9), "num_steps": 12, **options}
    cell = next(engine.cells(engine.Engine(manager=(manager,), **sizes)))
    return pd.DataFrame(engine.run_cell(cell))


@pytest.mark.parametrize("manager", engine.Engine().manager)
def test_the_phases_are_those_of_the_scheduler(manager, monkeypatch):
    """On a clock that advances by a second whenever it is read, at both ends of a phase."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(engine, "time", clock)
    rows = steps_of(manager, lengths=(200, 200), num_steps=4).set_index("phase")
    assert (rows["us_mean"] / 1e6).to_dict() == {"schedule": 1.0, "finish": 0.0}
    assert (steps_of(manager).set_index("phase")["us_mean"] > 0).all()


def test_the_number_of_running_requests_is_kept(monkeypatch):
    running = []
    step = Engine.step

    def noted(engine):
        tokens, finished = step(engine)
        running.append(len(engine.scheduler.running) + len(finished))
        return tokens, finished

    monkeypatch.setattr(Engine, "step", noted)
    steps_of(num_sequences=(5,), lengths=(1, 4), num_steps=40)
    assert len(running) >= 40
    assert set(running[-40:]) == {5}


def test_engine_steps_are_compared_with_vllm():
    ours = {"num_sequences": [4.0, 256.0]}
    rows = pd.concat(
        pd.DataFrame({**ours, "implementation": name, "phase": phase, "us": us, "us_mean": us})
        for name, phase, us in (
            ("paged", "schedule", [10.0, 50.0]), ("paged", "finish", [1.0, 10.0]),
            ("vLLM", "schedule", [100.0, 6000.0]),
        )
    )  # fmt: skip
    table = engine.table(rows)
    assert list(table["ratio_to_vllm"]) == [0.1, 50 / 6000, 1, 1]
    assert list(table["ratio_with_finish"]) == [0.11, 60 / 6000, 1, 1]
