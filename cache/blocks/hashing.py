"""Chained block hashes: a block is identified by its tokens and everything before them.

    H(block) = digest(H(parent block), token ids of the block, extra keys of the block)

Only full blocks are hashed.  The parent of the first block is all zeros.  K/V depend on more than
tokens, so there are extra keys, as in vLLM v1: the LoRA adapter, multi-modal inputs with their
position relative to the block, and a cache salt that separates tenants.  The adapter and the salt
enter the first block only; the chain carries them on.

The hashed bytes are the parent's digest, 4 bytes per token, and the extra keys, each part with its
kind and length.  So different inputs, say an equal LoRA name and salt, never give the same bytes.

With ``xxh3_128`` and ``sha256`` only the digests are compared: among a billion different blocks the
chance that two 128-bit digests agree is below 2e-21.  ``xxh3_128`` can be attacked on purpose;
``sha256`` (vLLM's default) is for tenants that do not trust each other.  ``xxh64`` is Nano-vLLM's;
64 bits are too few, so its manager compares the tokens of every hit.
"""

from collections.abc import Callable, Iterable
from hashlib import sha256
from struct import iter_unpack

from cache.blocks.sequence import ExtraKey, Sequence, encode_key

xxh3_128_digest: Callable[[bytes], bytes]
xxh64_digest: Callable[[bytes], bytes]
try:
    from xxhash import xxh3_128_digest, xxh64_digest
except ImportError:

    def _absent(_data: bytes) -> bytes:
        raise ImportError("hash_algorithm: xxh3_128 and xxh64 need the package xxhash, sha256 none")

    xxh3_128_digest = xxh64_digest = _absent


def sha256_digest(data: bytes) -> bytes:
    return sha256(data).digest()


HASH_ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {
    "xxh3_128": xxh3_128_digest,
    "sha256": sha256_digest,
    "xxh64": xxh64_digest,
}
"""The choices for ``hash_algorithm``: digest functions."""


def encode_extra_keys(keys: Iterable[ExtraKey]) -> bytes:
    """A unique encoding of a block's extra keys (b's1:a' is a str of length 1)."""
    encoded = []
    for key in keys:
        encoded.append(b"k%d:" % len(key))
        encoded += map(encode_key, key)
    return b"".join(encoded)


class BlockHasher:
    """Computes the hash chains of sequences, for one block size and one algorithm."""

    def __init__(self, algorithm: str, block_size: int) -> None:
        if not isinstance(algorithm, str) or algorithm not in HASH_ALGORITHMS:
            raise ValueError(
                f"hash_algorithm={algorithm!r} is unknown; choose from {', '.join(HASH_ALGORITHMS)}"
            )
        self.algorithm = algorithm
        self.block_size = block_size
        self._digest = HASH_ALGORITHMS[algorithm]
        self.digest_size = len(self._digest(b""))
        self._root = bytes(self.digest_size)
        self._name = (algorithm, block_size)
        self._tokens_of_block = f"{4 * block_size}s"

    def block_hashes(self, seq: Sequence) -> list[bytes]:
        """Digests of all full blocks of ``seq`` without unknown tokens; each is computed once.

        The sequence keeps the list, which the next call may extend.  Do not modify it.
        """
        chain = seq.hash_chains.setdefault(self._name, [])
        size, known = self.block_size, len(chain)
        end = (len(seq.token_ids) - seq.num_unknown_tokens) // size * size
        digest, digest_of = chain[-1] if chain else self._root, self._digest
        tokens = iter_unpack(self._tokens_of_block, seq.token_ids[known * size : end].tobytes())
        for position, (content,) in enumerate(tokens, known):
            if position * size < seq.keyed_length:
                keys = seq.extra_keys(position * size, (position + 1) * size)
                content += encode_extra_keys(keys)
            digest = digest_of(digest + content)
            chain.append(digest)
        return chain
