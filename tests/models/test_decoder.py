from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.models.checkpoints import CHECKPOINTS

LENGTHS = [23, 9, 1, 40]


def prompts(vocab_size: int = 97, lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    ("backend", "block_size"), [("torch", 1), ("torch", 7), ("torch", 16), ("triton", 7)]
)
def test_logits_equal_those_of_transformers(
    checkpoint, backend, block_size, make_checkpoint, load_model, paged_batch
):
    _, oracle = make_checkpoint(checkpoint)
    token_ids = prompts()
    logits = paged_batch(load_model(checkpoint, backend), token_ids, block_size).step(LENGTHS)
    with torch.no_grad():
        expected = torch.cat([oracle(torch.tensor([ids])).logits[0] for ids in token_ids])
    assert expected.abs().max() > 1  # else the comparison would be empty
    assert_close(logits, expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_chunks_and_decoding_give_the_logits_of_a_whole_prefill(
    checkpoint, load_model, paged_batch
):
    model, token_ids = load_model(checkpoint), prompts()
    whole = paged_batch(model, token_ids, 8).step(LENGTHS).split(LENGTHS)
    batch = paged_batch(model, token_ids, 8, seed=5)
    steps = [[5, 8, 1, 0], [17, 1, 0, 33], [1, 0, 0, 1], [0, 0, 0, 6]]
    assert [sum(counts) for counts in zip(*steps, strict=True)] == LENGTHS
    pieces = [[] for _ in token_ids]
    for counts in steps:
        scheduled = [i for i, count in enumerate(counts) if count]
        logits = batch.step(counts).split([counts[i] for i in scheduled])
        for i, part in zip(scheduled, logits, strict=True):
            pieces[i].append(part)
    for parts, expected in zip(pieces, whole, strict=True):
        assert_close(torch.cat(parts), expected)


def test_the_dtype_of_the_weights_is_that_of_the_hidden_states(load_model, paged_batch):
    model = load_model("qwen3", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.table.dtype == torch.float32
    batch = paged_batch(model, prompts(), 16)
    batch.kv_cache = batch.kv_cache.bfloat16()
    assert batch.step(LENGTHS).dtype == torch.bfloat16
