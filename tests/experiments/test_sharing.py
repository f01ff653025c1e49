from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import UnsupportedByDesign, make_manager
from experiments import sharing
from experiments.sharing import Sharing, decode


def decoded(
    prompt: int,
    output: int,
    num_sequences: int,
    drop_probability: float | None = None,
    *,
    manager: str = "vllm_v1",
    block_size: int = 4,
) -> tuple[int, int, int]:
    """Blocks of one request, shared and apart, and how many were copied."""
    num_blocks = (num_sequences + 1) * -(-(prompt + output) // block_size) + 5
    cache_manager = make_manager(
        manager, num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=False
    )
    rng = random.Random(0)
    counts = decode(cache_manager, prompt, output, num_sequences, drop_probability, rng)
    assert cache_manager.num_free_blocks == num_blocks
    cache_manager.check_invariants()
    return *counts, cache_manager.stats.copied_blocks


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        # 7, 8, 9 tokens each: a shared block, a copied one, and from 9 on one more each.
        ((6, 3, 2), (3 + 3 + 5, 4 + 4 + 6, 1)),
        # A prompt that ends on a boundary: nothing is copied.
        ((8, 3, 2), (3 * 4, 3 * 6, 0)),
        # Each step all beams are forks of one: 8 + 4k tokens and then one block each, and two of
        # three copy it in each step but the first of a block.
        ((8, 8, 3, 1.0), (4 * (2 + 3) + 4 * (3 + 3), 3 * (4 * 3 + 4 * 4), 2 * 3 * 2)),
    ],
)
def test_blocks_by_hand(request_, expected):
    assert decoded(*request_) == expected


def test_beams_that_are_never_dropped_are_samples():
    assert decoded(6, 20, 3, 0.0) == decoded(6, 20, 3)


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
    shared, apart, _ = decoded(
        prompt, output, num_sequences, drop_probability, block_size=block_size
    )
    lengths = range(prompt + 1, prompt + output + 1)
    blocks = sum(-(-length // block_size) for length in lengths)
    assert apart == num_sequences * blocks
    # All beams in one block at best; at least the full blocks of the prompt are shared.
    shared_prompt = output * (prompt // block_size) * (num_sequences - 1)
    assert blocks <= shared <= apart - shared_prompt


def cells(**options) -> list[Sharing]:
    return list(sharing.cells(Sharing(**options)))


def test_a_row_depends_on_the_seed_and_more_sequences_and_drops_save_more():
    cell = cells(num_sequences=(2,), num_requests=10, drop_probability=(0.2,))[1]

    def saved(**values):
        return sharing.run_cell(replace(cell, **values))[0]["saved_fraction"]

    assert saved() == saved() != saved(seed=1)
    assert 0 < saved(drop_probability=None) < saved(drop_probability=None, num_sequences=4)
    assert saved(drop_probability=None) < saved(drop_probability=0.01) < saved()


def test_a_manager_without_fork_says_so():
    with pytest.raises(UnsupportedByDesign, match="'nano_vllm' does not offer fork"):
        sharing.run_cell(cells(manager=("nano_vllm",), num_requests=1)[0])
