"""The experiment decode_balance: the model's arithmetic, and what it must show."""

from __future__ import annotations

import dataclasses

import pytest

from experiments import decode_balance
from experiments.decode_balance import DecodeBalance, Piece, finish, splits_by_shapes


@pytest.mark.parametrize(
    ("programs", "places", "expected"),
    [
        pytest.param([[Piece(1, 60)]], 4, 1 + 60 / 30, id="alone, at its own most"),
        pytest.param([[Piece(1, 60)]] * 4, 4, 1 + 240 / 100, id="four share the bandwidth"),
        pytest.param([[Piece(1, 60)]] * 4, 2, 2 * (1 + 60 / 30), id="two wait for a place"),
        pytest.param([[Piece(1, 60), Piece(2, 0)]], 1, 1 + 2 + 2, id="piece by piece"),
        pytest.param([[Piece(1, 200)], [Piece(5, 30)]] * 2, 4, 5 + 30 / 25 + 50 / 30, id="late"),
        pytest.param([], 3, 0, id="nothing"),
    ],
)
def test_programs_that_share_100_bytes_a_second(programs, places, expected):
    assert finish(programs, places, 100.0, 30.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("programs", "num_tiles", "expected"),
    [
        pytest.param(8, 256, 29, id="batch of one"),
        pytest.param(8, 4, 4, id="no more than tiles"),
        pytest.param(212, 256, 1, id="nearly all places"),
        pytest.param(40 * 8, 32, 1, id="more than all"),
    ],
)
def test_flash_attn_2s_number_of_splits_on_an_h200(programs, num_tiles, expected):
    assert splits_by_shapes(programs, num_tiles, 264) == expected


def test_only_chunks_follow_the_lengths():
    """A long sequence among short ones takes one program as long as all of them together."""
    cell = dataclasses.replace(DecodeBalance(), batch="63 x 512 and 32k", gpu="H200 SXM")
    one, shapes, chunks = decode_balance.run_cell(cell)
    assert (one["way"], shapes["way"], chunks["way"]) == ("one program", "by shapes", "chunks")
    assert one["tokens"] == 63 * 512 + 32_768
    assert one["modelled_bound_us"] == pytest.approx(one["tokens"] * 4096 / 4.8e6)
    assert shapes["modelled_us"] == one["modelled_us"] > 2 * chunks["modelled_us"]
    assert chunks["modelled_us"] > chunks["modelled_bound_us"]
    assert (one["states_per_head"], chunks["states_per_head"]) == (0, 63 + 32)
