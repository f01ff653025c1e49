from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import UnsupportedByDesign, make_manager
from experiments import sharing
from experiments.load.workloads import REAL_TRACES
from experiments.sharing import BlockSteps, Sharing, decode


def decoded(
    prompt: int,
    output: int,
    num_sequences: int,
    drop_probability: float | None = None,
    *,
    manager: str = "vllm_v1",
    block_size: int = 4,
) -> tuple[BlockSteps, int]:
    """Blocks of one request, and how many were copied."""
    num_blocks = (num_sequences + 1) * -(-(prompt + output) // block_size) + 5
    cache_manager = make_manager(
        manager, num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=False
    )
    total = BlockSteps()
    decode(
        cache_manager,
        prompt_length=prompt,
        output_length=output,
        num_sequences=num_sequences,
        drop_probability=drop_probability,
        rng=random.Random(0),
        total=total,
    )
    assert cache_manager.num_free_blocks == num_blocks
    cache_manager.check_invariants()
    return total, cache_manager.stats.copied_blocks


def test_two_samples_of_a_prompt_that_ends_inside_a_block():
    # 7, 8, 9 tokens each: a shared block, a copied one, and from 9 on one more each.
    total, copied = decoded(6, 3, 2)
    assert total == BlockSteps(shared=3 + 3 + 5, apart=4 + 4 + 6)
    assert copied == 1
    assert math.isclose(total.saved_fraction, 3 / 14)


def test_two_samples_of_a_prompt_that_ends_on_a_boundary_copy_nothing():
    total, copied = decoded(8, 3, 2)
    assert total == BlockSteps(shared=3 * 4, apart=3 * 6)
    assert copied == 0


def test_one_sequence_saves_nothing():
    total, copied = decoded(6, 9, 1)
    assert (total.saved_fraction, copied) == (0, 0)


def test_beams_that_are_never_dropped_are_samples():
    assert decoded(6, 20, 3, 0.0) == decoded(6, 20, 3)


def test_beams_that_all_descend_from_the_best_share_all_but_the_last_block():
    # Each step all beams are forks of one: 8 + 4k tokens and then one block each.
    total, copied = decoded(8, 8, 3, 1.0)
    assert total.shared == 4 * (2 + 3) + 4 * (3 + 3)
    assert copied == 2 * 3 * 2  # within a block, two of the three beams copy it in each step


@pytest.mark.parametrize("drop_probability", [None, 0.1, 0.7])
def test_the_managers_with_fork_agree(drop_probability):
    v0 = decoded(30, 40, 4, drop_probability, manager="vllm_v0")
    assert v0 == decoded(30, 40, 4, drop_probability, manager="vllm_v1")


@given(
    prompt=st.integers(1, 20),
    output=st.integers(1, 20),
    num_sequences=st.integers(1, 5),
    drop_probability=st.none() | st.floats(0, 1),
    block_size=st.sampled_from([1, 3, 4, 16]),
)
def test_the_saving_is_bounded(prompt, output, num_sequences, drop_probability, block_size):
    total, _ = decoded(prompt, output, num_sequences, drop_probability, block_size=block_size)
    lengths = range(prompt + 1, prompt + output + 1)
    blocks = sum(-(-length // block_size) for length in lengths)
    assert total.apart == num_sequences * blocks
    # All beams in one block at best; at least the full blocks of the prompt are shared.
    shared_prompt = output * (prompt // block_size) * (num_sequences - 1)
    assert blocks <= total.shared <= total.apart - shared_prompt


def cell_of(**options) -> Sharing:
    defaults = {"lengths": ("20:60",), "num_sequences": (2,), "num_requests": 10}
    options = Sharing(drop_probability=(), **{**defaults, **options})
    return next(iter(sharing.cells(options)))


def saved(cell: Sharing) -> float:
    return sharing.run_cell(cell)[0]["saved_fraction"]


def test_the_same_seed_gives_the_same_row():
    cell = replace(cell_of(), drop_probability=0.2)
    assert sharing.run_cell(cell) == sharing.run_cell(cell)
    assert sharing.run_cell(cell) != sharing.run_cell(replace(cell, seed=1))


def test_more_sequences_and_more_drops_save_more():
    cell = cell_of()
    assert 0 < saved(cell) < saved(replace(cell, num_sequences=4))
    rare, often = (saved(replace(cell, drop_probability=p)) for p in (0.01, 0.3))
    assert saved(cell) < rare < often


def test_the_grid_has_synthetic_lengths_beside_the_traces(monkeypatch):
    monkeypatch.delenv("TRACES_DIR", raising=False)
    cells = list(sharing.cells(Sharing(num_sequences=(2, 3), drop_probability=(0.1,))))
    names = list(dict.fromkeys(cell.trace.name for cell in cells))
    assert names == ["log_normal_20_60", "log_normal_160_340", *(path.name for path in REAL_TRACES)]
    assert [(c.num_sequences, c.drop_probability) for c in cells[:4]] == [
        (2, None), (2, 0.1), (3, None), (3, 0.1),
    ]  # fmt: skip


def test_a_manager_without_fork_says_so():
    with pytest.raises(UnsupportedByDesign, match="'nano_vllm' does not offer fork"):
        sharing.run_cell(cell_of(manager=("nano_vllm",)))
