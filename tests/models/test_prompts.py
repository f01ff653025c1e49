from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from models.prompts import list_prompts, load_tokenizer, to_token_ids


@pytest.mark.parametrize(
    "prompt",
    ["a text", [1, 2], (1, 2), np.array([1, 2]), [np.int64(1)], torch.tensor([1, 2]), 7],
    ids=["text", "list", "tuple", "array", "numpy_ints", "tensor", "no_prompt"],
)
def test_one_prompt(prompt):
    [same] = list_prompts(prompt)
    assert same is prompt or same == list(prompt)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ([], 0),
        ([[]], 1),
        (["a", [1, 2], "b"], 3),
        (iter(["a", "b"]), 2),
        ([np.array([1]), np.array([2])], 2),
        (np.array([[1, 2], [3, 4]]), 2),
        (torch.tensor([[1, 2], [3, 4], [5, 6]]), 3),
        ([torch.tensor([1]), torch.tensor([2])], 2),
    ],
)
def test_several_prompts(prompts, count):
    assert len(list_prompts(prompts)) == count


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4])])
def test_token_ids_become_ints(prompt):
    token_ids = to_token_ids(prompt)
    assert token_ids == [3, 4]
    assert {type(token) for token in token_ids} == {int}


@pytest.mark.parametrize("prompt", [None, 7, [1.0], ["a"], [[1], [2]], np.array([0.5])])
def test_other_types_are_refused(prompt):
    with pytest.raises(ValueError, match="prompt: needs a text or token ids, got "):
        to_token_ids(prompt)


def test_a_tokenizer_neither_truncates_nor_pads(tmp_path):
    """A tokenizer.json may have the settings of its training batches."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("w1 w2 w3 w4 w5").ids == [1, 2, 3, 4, 5]


def test_a_damaged_tokenizer_is_named(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)
