import math
from itertools import pairwise

import pandas as pd
import pytest

from cache import Trace
from experiments import memory_waste
from experiments.harness import InputFile, Unavailable
from experiments.load.workloads import TraceFile
from experiments.memory_waste import arrival_steps, manager_of, serve

KINDS = ["used", "reserved", "internal", "external", "free"]


def trace_of(*requests: tuple[int, int], gap_ms: float = 0) -> Trace:
    rows = ((1000 + gap_ms * i, *lengths, []) for i, lengths in enumerate(requests))
    return Trace.from_requests(rows, name="tiny")


@pytest.mark.parametrize(
    ("system", "requests", "slots", "steps"),
    [
        # One request of 3 + 2 tokens at a time in 8 slots; the second waits for the first, in steps
        # with 3, then 4 tokens stored.
        ("max", [(3, 2)] * 2, (3.5, 1.5, 3, 0, 0), (4, 2, 1, 0)),
        ("oracle", [(3, 2)] * 2, (3.5, 1.5, 0, 3, 0), (4, 2, 1, 0)),
        # 2 + 4 slots of a run of 8, 5 of them needed: the output does not reach one.
        ("pow2", [(2, 3)] * 2, (3, 2, 1, 2, 0), (6, 3, 1, 0)),
        # The third waits while the first two store 3, then 4 tokens and fill the cache.  The second
        # makes room for the fifth token of the first, and comes back with its 5 beside the third.
        ("paged", [(3, 3)] * 3, (19 / 3, 0, 0, 0, 5 / 3), (6, 3, 5 / 3, 1)),
    ],
)
def test_memory_by_hand(system, requests, slots, steps):
    """Mean slots by kind of 8 while a request waits; steps, measured ones, running, preempted."""
    manager = manager_of(system, max_model_len=8, num_blocks=8, block_size=1)
    result = serve(trace_of(*requests), manager, [0.0] * len(requests))
    assert tuple(result.values())[:4] == steps
    assert [8 * result[f"{kind}_fraction"] for kind in KINDS] == pytest.approx(slots)
    assert manager.num_free_blocks == 8


def test_memory_of_a_token_without_waste_and_in_half_used_memory():
    rows = pd.DataFrame(
        {"trace": "t", "system": "paged", "block_size": 1, "used_fraction": [1, 0.5]}
    )
    table = memory_waste._bytes_per_token(rows)
    assert table["llama_8b_bytes"].tolist() == [4096, 8192]
    assert table["deepseek_v3_bytes"].tolist() == [1152, 2304]


def test_without_a_queue_there_is_nothing_to_measure():
    manager = manager_of("paged", max_model_len=8, num_blocks=16, block_size=1)
    with pytest.raises(Unavailable, match="higher load"):
        serve(trace_of((1, 1), (1, 1)), manager, [0.0, 5.0])


def test_arrivals_fill_the_wanted_memory():
    arrivals = arrival_steps(trace_of(*[(7, 4)] * 50, gap_ms=10), mean_slots=30)
    assert arrivals[0] == 0
    assert all(math.isclose(b - a, arrivals[1]) for a, b in pairwise(arrivals))
    slot_steps = 50 * sum(7 + i for i in range(1, 5))
    assert math.isclose(slot_steps / arrivals[-1], 30)


def test_a_sample_is_spread_over_the_trace_without_impossible_rows(inputs, monkeypatch):
    source = TraceFile(InputFile.of(inputs["lengths"]), None)
    everything, num_left_out = memory_waste.sample(source, 1000)
    assert (len(everything), num_left_out, max(everything.output_lengths)) == (40, 1, 7)
    some, _ = memory_waste.sample(source, 4)
    assert some.input_lengths.tolist() == [20, 30, 40, 50]
    monkeypatch.setattr(memory_waste, "MAX_OUTPUT_TOKENS", 4)
    with pytest.raises(Unavailable, match="azure has no output of at most 4 tokens"):
        memory_waste.sample(source, 4)


def test_pages_hold_more_than_reservations_and_every_slot_is_accounted_for(tiny_run):
    rows = tiny_run("memory_waste").rows
    shares = rows[[f"{kind}_fraction" for kind in KINDS]]
    assert (abs(shares.sum(axis=1) - 1) < 1e-12).all()
    assert set(rows["max_model_len"]) == {128}
    assert set(rows["requests_left_out"]) == {1}
    used = rows.set_index(["system", "block_size"])["used_fraction"]
    assert used["max", 1] < used["pow2", 1] < used["paged", 1]
    assert used["paged", 16] < used["paged", 1]
