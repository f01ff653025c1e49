import hashlib
from array import array

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cache import Sequence
from cache.blocks.hashing import HASH_ALGORITHMS, BlockHasher, encode_extra_keys
from cache.blocks.sequence import pack_token_ids

DIGESTS = {
    "xxh3_128": lambda data: xxhash.xxh3_128(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh64": lambda data: xxhash.xxh64(data).digest(),
}
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def hashes_of(tokens, *, algorithm="xxh3_128", block_size=4, **keys):
    return BlockHasher(algorithm, block_size).block_hashes(Sequence(0, tokens, **keys))


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
@given(tokens=TOKEN_IDS, block_size=st.integers(1, 7))
def test_a_chain_is_the_digest_of_parent_and_tokens(algorithm, tokens, block_size):
    digest = DIGESTS[algorithm]
    parent = bytes(len(digest(b"")))
    expected = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        words = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + block_size])
        parent = digest(parent + words)
        expected.append(parent)
    assert hashes_of(tokens, algorithm=algorithm, block_size=block_size) == expected


@given(
    tokens=TOKEN_IDS,
    more=st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=4),
    keys=st.sampled_from([{}, {"lora_name": "a"}, {"mm_inputs": [("image", 0, 1)]}]),
)
def test_hashes_of_a_growing_sequence_equal_those_made_at_once(tokens, more, keys):
    hasher, seq = BlockHasher("xxh3_128", 3), Sequence(0, tokens, **keys)
    hasher.block_hashes(seq)
    for chunk in more:
        for token in chunk:
            seq.append_token(token)
        chain = hasher.block_hashes(seq)
        whole = Sequence(1, seq.token_ids, **keys)
        assert chain == hasher.block_hashes(whole)
        assert len(chain) == seq.num_tokens // 3


def test_each_block_is_hashed_once_and_kept_with_the_sequence():
    hasher, seq = BlockHasher("xxh3_128", 2), Sequence(0, [1, 2, 3, 4, 5])
    calls = []
    digest = hasher._digest
    hasher._digest = lambda data: calls.append(data) or digest(data)
    first = hasher.block_hashes(seq)
    assert hasher.block_hashes(seq) is first
    assert len(calls) == 2
    seq.append_token(6)
    assert len(hasher.block_hashes(seq)) == 3
    assert len(calls) == 3


def test_an_image_is_named_by_its_position_in_the_block():
    seq = Sequence(0, range(12), mm_inputs=[("cat", 2, 6)], lora_name="x", cache_salt="y")
    assert seq.extra_keys(0, 4) == [("lora", "x"), ("salt", "y"), ("mm", "cat", 2, 6)]
    assert seq.extra_keys(4, 8) == [("mm", "cat", -2, 6)]
    assert seq.extra_keys(8, 12) == []
    parent = bytes(16)
    for depth, found in enumerate(BlockHasher("xxh3_128", 4).block_hashes(seq)):
        start = 4 * depth
        tokens, keys = seq.token_ids[start : start + 4], seq.extra_keys(start, start + 4)
        parent = DIGESTS["xxh3_128"](parent + tokens.tobytes() + encode_extra_keys(keys))
        assert found == parent


def test_similar_extra_keys_have_different_encodings():
    alike = [
        [("a", "b")], [("a",), ("b",)], [("ab",)], [("a", b"b")], [("a", "1:b")], [("as1:b",)],
        [("a", 1)], [("a", "1")], [()], [],
    ]  # fmt: skip
    assert len({encode_extra_keys(keys) for keys in alike}) == len(alike)


@pytest.mark.parametrize("bad", [-1, 2**32, 1.0, "1", None], ids=str)
def test_bad_token_ids_are_refused_with_their_position(bad):
    with pytest.raises(ValueError, match=r"token_ids\[2\]=.*2\*\*32"):
        pack_token_ids([0, 1, bad, -7])
    seq = Sequence(0, [5])
    with pytest.raises(ValueError, match="token_id="):
        seq.append_token(bad)
    assert np.frombuffer(seq.token_ids, np.uint32).tolist() == [5]  # without a copy


@pytest.mark.parametrize(
    "token_ids",
    [
        (1, 2, 300), array("q", [1, 2, 300]), np.array([1, 2, 300]),
        np.array([1, 2, 300], np.uint32), iter([1, 2, 300]), {1: "", 2: "", 300: ""},
    ],
    ids=lambda ids: type(ids).__name__,
)  # fmt: skip
def test_token_ids_may_come_in_any_iterable_of_ints(token_ids):
    assert pack_token_ids(token_ids).tolist() == [1, 2, 300]
