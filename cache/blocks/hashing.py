"""Chained block hashes.  A hash identifies the tokens of a block and all tokens before the block.

    H(block) = digest(H(parent block), token ids of the block, extra keys of the block)

Only full blocks are hashed.  The parent hash of the first block is all zeros.  K/V do not depend on
tokens alone.  As in vLLM v1, the extra keys are the LoRA adapter, the multi-modal inputs with their
position relative to the block, and a cache salt that separates tenants.  The adapter and the salt
are keys of the first block only; through the chain, later hashes depend on them too.

The hashed bytes are the parent's digest, 4 bytes per token, and the extra keys.  Each part of a key
is stored with its type and length, so that different keys never give the same bytes.

With ``xxh3_128`` and ``sha256`` a hit compares only digests: among a billion different blocks the
chance that two 128-bit digests are equal is below 2e-21.  An attacker can construct collisions of
``xxh3_128``, so use ``sha256`` (vLLM's default) for tenants that do not trust each other.
Nano-vLLM uses ``xxh64``.  64 bits are too few, so its manager compares the tokens of every hit.
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
"""The choices for ``hash_algorithm``: name -> digest function."""


def encode_extra_keys(keys: Iterable[ExtraKey]) -> bytes:
    """Encode the extra keys of a block uniquely (b's1:a' is a str of length 1)."""
    encoded = []
    for key in keys:
        encoded.append(b"k%d:" % len(key))
        encoded += map(encode_key, key)
    return b"".join(encoded)


class BlockHasher:
    """Computes the hash chains of sequences for one block size and one algorithm."""

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
        self._name = (algorithm, block_size, 0)
        self._tokens_of_block = f"{4 * block_size}s"

    def block_hashes(self, seq: Sequence, group: int = 0) -> list[bytes]:
        """Return the keys of the full blocks of ``seq`` whose tokens are all known.

        A key is the block's digest.  The keys of a further ``group`` of layers end with its number,
        as in vLLM.  Each key is computed once.  The sequence owns the list: do not modify it.
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
        if not group:
            return chain
        keys_of_group = seq.hash_chains.setdefault((self.algorithm, size, group), [])
        suffix = group.to_bytes(4, "big")
        keys_of_group += [digest + suffix for digest in chain[len(keys_of_group) :]]
        return keys_of_group
