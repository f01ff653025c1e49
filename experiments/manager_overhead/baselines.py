"""Cache code of other systems, driven for comparison where it is installed."""

from __future__ import annotations

import itertools
import time
from array import array

from experiments.harness import Unavailable


class VLLMBlockPool:
    """vLLM v1's own block pool and block hashing: what its KVCacheManager does for one request.

    Raises Unavailable if vLLM, or one with these interfaces (0.11), is not installed.
    """

    name = "vLLM"
    hash_algorithm = "sha256"
    """vLLM's default, over the pickled tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        try:
            import vllm
            from vllm.sampling_params import SamplingParams
            from vllm.utils import sha256
            from vllm.v1.core.block_pool import BlockPool
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
            from vllm.v1.request import Request
        except ImportError as error:
            raise Unavailable(f"vLLM 0.11 is not installed: {error}") from error
        self.version = vllm.__version__
        self._block_size = block_size
        self._request, self._params = Request, SamplingParams(max_tokens=1)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        # One block is vLLM's null block.
        self.pool = BlockPool(num_blocks + 1, enable_caching=True)

    def make(self, seq_id: int, token_ids: list[int]):
        """A request of one prompt."""
        return self._request(str(seq_id), token_ids, self._params, None, None)

    def hash(self, request) -> None:
        request.block_hashes = self._hasher(request)

    def lookup(self, request) -> list:
        """Cached blocks of the longest prefix that leaves a token to compute."""
        hits = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._block_size]:
            found = self.pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hits += found
        return hits

    def allocate(self, request, hits: list) -> list:
        """Touch the hits, take the other blocks and cache them."""
        size = self._block_size
        self.pool.touch((hits,))
        blocks = hits + self.pool.get_new_blocks(-(-request.num_tokens // size) - len(hits))
        num_full = request.num_tokens // size
        self.pool.cache_full_blocks(request, blocks, len(hits), num_full, size, 0)
        return blocks

    def free(self, blocks: list) -> None:
        """Tail first."""
        self.pool.free_blocks(reversed(blocks))

    def cycle(self, request) -> None:
        self.hash(request)
        self.free(self.allocate(request, self.lookup(request)))

    def phases(self, request) -> dict[str, float]:
        """Seconds of each phase of one cycle."""
        times = [time.perf_counter()]
        self.hash(request)
        times.append(time.perf_counter())
        hits = self.lookup(request)
        times.append(time.perf_counter())
        blocks = self.allocate(request, hits)
        times.append(time.perf_counter())
        self.free(blocks)
        times.append(time.perf_counter())
        spans = (end - begin for begin, end in itertools.pairwise(times))
        return dict(zip(("hash", "lookup", "allocate", "free"), spans, strict=True))


class SGLangRadixCache:
    """SGLang's Python radix cache (``RadixCache``), without the memory pools around it.

    Raises Unavailable if SGLang, or one with these interfaces (0.5.23), is not installed.
    """

    name = "SGLang"
    hash_algorithm = ""

    def __init__(self, page_size: int) -> None:
        try:
            import sglang
            import torch
            from sglang.srt.mem_cache.base_prefix_cache import (
                EvictParams,
                InsertParams,
                MatchPrefixParams,
            )
            from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
        except ImportError as error:
            raise Unavailable(f"SGLang 0.5.23 is not installed: {error}") from error
        self.version = sglang.__version__
        self._key = RadixKey
        self._insert, self._match, self._evict = InsertParams, MatchPrefixParams, EvictParams
        self._slots = torch.arange

        class Slots:
            """Takes back what is evicted, and does nothing with it."""

            device = torch.device("cpu")

            def free_segment(self, slots, start_pos: int = 0) -> None:
                pass

        self.tree = RadixCache.create_simulated(mock_allocator=Slots(), page_size=page_size)

    def make(self, number: int, token_ids: list[int]):
        """The tokens of a prompt, in the form that SGLang keeps them in, and its slots."""
        first = number * len(token_ids)
        return array("q", token_ids), self._slots(first, first + len(token_ids))

    def insert(self, prompt) -> None:
        token_ids, slots = prompt
        self.tree.insert(self._insert(key=self._key(token_ids), value=slots))

    def match(self, prompt) -> int:
        """Cached tokens.  Unlike ours this does not yet give their slots."""
        return self.tree.match_prefix(self._match(key=self._key(prompt[0]))).device_prefix_len

    def evict(self, num_tokens: int) -> None:
        self.tree.evict(self._evict(num_tokens=num_tokens))

    @property
    def num_tokens(self) -> int:
        """Tokens in the tree."""
        return self.tree.evictable_size()
