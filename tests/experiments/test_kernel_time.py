"""The model of kernel time: its arithmetic, and its errors."""

import pandas as pd
import pytest

from experiments import gpu_times
from experiments.kernel_time import compiled, launch, model, sass
from experiments.kernel_time.model import Constants, Launch
from kernels.tiles import Chunking

CODE = {
    "kernel": "one",
    "programs": 2,
    "warps": 4,
    "start_cycles": 0,
    "start_trips": 0,
    "search_cycles": 351,
    "search_trips": 0,
    "state_cycles": 175.5,
    "fixed_cycles": 1755,
    "fixed_trips": 1,
    "tile_cycles": 3510,
    "tile_trips": 2,
    "instructions": 0,
    "wavefronts": 0,
    "spills": 0,
}
EMPTY = Constants(latency_ns=1000, bandwidth=1.0, floor_us=3.0)


def times(monkeypatch, launched: Launch, **code: float) -> float:
    """Microseconds on the H100, less the floor and the start of programs."""
    table = pd.DataFrame([{**CODE, **code}]).set_index("kernel")
    monkeypatch.setattr(model, "_kernels", lambda arch: table)
    time = model.microseconds("H100-SXM", pd.DataFrame([launched]), EMPTY).item()
    return time - 3 - (launched.programs + launched.empty) / 132 * 200 / 1755


def test_a_program_takes_its_cycles_and_round_trips_to_l2(monkeypatch):
    one = Launch("one", 1, 0, tiles=10, work=10, launches=2, tile_flops=0, asked=1, moved=1)
    trip = 0.3  # of 1 us
    assert times(monkeypatch, one) == pytest.approx(1 + trip + 10 * (2 + 2 * trip), rel=1e-3)
    more = one._replace(items=3, cycles=1755, launches=4, states=4, searches=2)
    added = 2 * (1 + trip) + 1 + 2 * model.LAUNCH_US + 4 * 0.1 + 2 * 0.2
    assert times(monkeypatch, more) == pytest.approx(times(monkeypatch, one) + added)


def test_programs_beyond_the_resident_ones_follow_and_half_a_program_runs_alone(monkeypatch):
    one = Launch("one", 264, 0, 1, 264, 2, 0, 1, 1)
    once = times(monkeypatch, one)
    twice = one._replace(programs=528, work=528)
    assert times(monkeypatch, twice) == pytest.approx(2.5 * once)


def test_memory_bounds_the_time_and_others_work_and_spills_add_to_it(monkeypatch):
    one = Launch("one", 264, 0, 100, 26400, 2, 0, 33.52e9, 33.52e9)
    assert times(monkeypatch, one, tile_cycles=0, tile_trips=0) == pytest.approx(10_003, rel=0.1)
    light = one._replace(asked=1, moved=1)
    base = times(monkeypatch, light)
    crowded = times(monkeypatch, light, instructions=351, wavefronts=100)
    assert crowded == pytest.approx(base + 100 * (0.5 * (351 + 700)) / 1755)
    spilled = times(monkeypatch, light, spills=10)
    assert spilled == pytest.approx(base + 100 * 2 * 8 * 10 / 1755)


def test_cycles_follow_the_control_codes():
    """A load sets scoreboard 0; the addition waits for it; the store's stall is 5."""
    load = sass.Instruction(0, "LDG.E R0", "LDG.E", 2, (0, 7), 0)
    add = sass.Instruction(16, "FADD R1", "FADD", 4, (7, 7), 1)
    store = sass.Instruction(32, "STG.E R1", "STG.E", 5, (7, 7), 0)
    assert sass.cycles([load, add, store], 300) == 300 + 4 + 5
    assert sass.cycles([load, add, store], 300, passes=3) == 309


def test_programs_of_decode_take_turns_at_chunks_or_shares_of_tiles():
    """Chunks have 16 tiles of 64 tokens. Programs: (tiles, runs, chunks, searches)."""
    even, may_run = launch._decode_programs([4096] * 3, 2, Chunking(16, 32), 64, 4, False)
    assert may_run
    assert even[:, :3].tolist() == [[96, 2, 6]] * 4
    turns, may_run = launch._decode_programs([4096, 1000], 2, Chunking(16, 32), 64, 4, False)
    assert not may_run
    assert turns[:, 0].tolist() == [48, 48, 32, 32]
    for lengths in ([64000, 900, 900, 3000], [5000] * 9, [70_000, *[1100] * 30]):
        table, _ = launch._decode_programs(lengths, 3, Chunking(16, 32), 64, 10, False)
        assert table[:, 0].sum() == 3 * sum(-(-length // 64) for length in lengths)
        assert table[:, 0].max() <= 1.5 * table[:, 0].mean()


def test_measured_rows_are_launched_as_their_engines_do():
    rows = gpu_times.rows("attention", kernel="triton", gpu="B200-SXM", phase="decode")
    rows = rows[rows["engine"] != "vllm 0.22.0"]
    one = rows[(rows["batch_size"] == 1) & (rows["context_tokens"] == 1024)]
    chosen = one[(one["q_heads"] == 16) & (one["kv_heads"] == 1)].head(1)
    launched = launch.launches(chosen).iloc[0]
    assert (launched["programs"], launched["tiles"], launched["empty"]) == (8, 4, 0)
    assert launched["moved"] == 1024 * (192 + 128) * 2


def test_a_gpu_and_a_kernel_that_there_are_not_are_refused_with_a_list():
    launched = pd.DataFrame([Launch("mine", 1, 0, 1, 1, 2, 0, 1, 1)])
    with pytest.raises(ValueError, match=r"^gpu='V100' is not in the table gpus; it has A100-SXM"):
        model.microseconds("V100", launched, EMPTY)
    with pytest.raises(ValueError, match=r"^'mine' is not in .*kernels.csv for sm_90; it has pag"):
        model.microseconds("H100-SXM", launched, EMPTY)


def test_medians_meet_their_bars_where_the_model_was_not_fitted(tiny_run):
    run = tiny_run("kernel_time")
    errors = run.rows[run.rows["part"] == "errors"].set_index("family")
    medians = errors.loc["all"].set_index(["phase", "left_out"])["error_median"]
    assert medians["decode", False] < 0.15
    assert medians["prefill", False] < 0.2
    assert medians["decode", True] < 0.2
    assert medians["prefill", True] < 0.25
    (missed,) = pd.read_csv(run.folder / "misses.csv")["family"]
    assert missed == errors["error_median"].drop("all").idxmax()
    ours = run.rows[run.rows["part"] == "ours"]
    assert (ours["modelled_low_us"] < ours["modelled_us"]).all()
    assert (ours["modelled_us"] < ours["modelled_high_us"]).all()
    even, skewed = (ours[ours["lengths"] == name] for name in ("even", "skewed"))
    assert even["measured_flash_attn3_us"].notna().any()
    assert skewed["measured_flash_attn3_us"].isna().all()


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("no.py", 2), ("--bogus", 2)])
def test_the_command_that_compiles_checks_its_arguments(argument, status):
    with pytest.raises(SystemExit, match=str(status)):
        compiled.main([argument])
