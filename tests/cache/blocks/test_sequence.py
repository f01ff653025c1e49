import pytest

from cache import MultiModalInput, Sequence
from cache.blocks.hashing import BlockHasher


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", []), ("lora_name", 1.5), ("lora_name", b"x"), ("cache_salt", 3),
        *(
            ("mm_inputs", value)
            for value in (
                [("a", -1, 2)], [("a", 0, 0)], [("a", 3, 2)], [("a", 2, 1), ("b", 0, 1)],
                [("a", 0, 2), ("b", 1, 1)], [(3, 0, 1)], [("a", 0, 1.5)], [("a", "0", 1)],
                [("a", 0)], [3],
            )
        ),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        Sequence(0, **({"token_ids": [1, 2, 3, 4]} | {name: value}))


def test_fork_copies_tokens_and_hashes():
    class Request(Sequence):
        pass

    parent = Request(0, range(8), mm_inputs=[("a", 1, 2)], lora_name="x", cache_salt="y")
    parent.temperature = 0.5
    hasher = BlockHasher("xxh3_128", 4)
    hasher.block_hashes(parent)
    parent.append_token(8)
    parent.num_computed_tokens = 8
    child = parent.fork(1)
    assert type(child) is Request
    assert (child.seq_id, child.temperature, child.num_prompt_tokens) == (1, 0.5, 8)
    assert (child.lora_name, child.cache_salt) == ("x", "y")
    assert child.mm_inputs == (MultiModalInput("a", 1, 2),)
    assert child.num_computed_tokens == 0
    for seq, token in ((parent, 1), (child, 2)):
        for _ in range(3):
            seq.append_token(token)
    assert parent.token_ids.tolist() == [*range(9), 1, 1, 1]
    assert child.token_ids.tolist() == [*range(9), 2, 2, 2]
    mine, others = hasher.block_hashes(parent), hasher.block_hashes(child)
    assert mine[:2] == others[:2]
    assert mine[2] != others[2]
    assert len(mine) == len(others) == 3
