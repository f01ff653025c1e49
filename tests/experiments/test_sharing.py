"""The experiment sharing."""

import pytest

from cache import UnsupportedByDesign
from experiments import sharing
from experiments.sharing import Sharing


def row_of(monkeypatch=None, lengths=None, **options):
    if lengths:
        monkeypatch.setattr(sharing, "draw_lengths", lambda *_: lengths)
    values = {"like": "alpaca", "mode": "parallel", "num_sequences": 2, "manager": "vllm_v1"}
    (row,) = sharing.run_cell(Sharing(**{**values, "block_size": 4, "num_requests": 3, **options}))
    return row


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # Steps with 7 and 8 tokens each: a shared block, and a copied one.
        (([6], [3]), (3 + 3, 4 + 4, 1)),
        # A prompt that ends on a boundary: nothing is copied, and 9 tokens are 3 blocks.
        (([8], [3]), (4 + 4, 6 + 6, 0)),
    ],
)
def test_blocks_by_hand(monkeypatch, lengths, expected):
    row = row_of(monkeypatch, lengths)
    found = row["block_steps"], row["block_steps_apart"], row["copied_blocks"]
    assert found == expected
    assert row["saved_fraction"] == 1 - expected[0] / expected[1]


def test_the_managers_with_fork_agree():
    for mode in ("parallel", "beam"):
        v0, v1 = (row_of(mode=mode, manager=name) for name in ("vllm_v0", "vllm_v1"))
        assert v0 == {**v1, "manager": "vllm_v0"}


def test_the_seed_draws_the_lengths():
    assert row_of(seed=1)["mean_output_tokens"] != row_of()["mean_output_tokens"]


def test_a_manager_without_fork_stores_samples_apart_and_has_no_beams():
    assert row_of(manager="nano_vllm")["saved_fraction"] == 0
    with pytest.raises(UnsupportedByDesign, match="'nano_vllm' does not offer fork"):
        row_of(manager="nano_vllm", mode="beam")
