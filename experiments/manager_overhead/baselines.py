"""Cache code of other systems, driven for comparison where it can be imported.

It needs no GPU and no compiled part of theirs: ``pip install --no-deps --target vllm-0.33
vllm==0.33.0``, likewise the packages without which its import fails, and ``vllm-0.33`` in
``PYTHONPATH``.  Two versions of vLLM cannot be imported into one process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import time
from array import array
from collections.abc import Callable
from typing import Any

from experiments.harness import Unavailable


class VLLM:
    """vLLM's v1 code, imported: makes its KVCacheManagers.

    Raises Unavailable if vLLM, or one with the interfaces of 0.11 to 0.33, cannot be imported.
    """

    def __init__(self) -> None:
        try:
            import torch
            import vllm
            from vllm.sampling_params import SamplingParams
            from vllm.v1 import kv_cache_interface
            from vllm.v1.core import kv_cache_utils
            from vllm.v1.core.kv_cache_manager import KVCacheManager
            from vllm.v1.request import Request

            try:
                from vllm.utils.hashing import get_hash_fn_by_name
            except ImportError:  # 0.11
                from vllm.utils import get_hash_fn_by_name
            self._hasher = kv_cache_utils.get_request_block_hasher
            self._init_none_hash = kv_cache_utils.init_none_hash
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"vLLM 0.11 to 0.33 cannot be imported: {error}") from error
        self._version = vllm.__version__
        self._interface, self._manager = kv_cache_interface, KVCacheManager
        self._hash_function = get_hash_fn_by_name
        self._dtype = torch.float16
        params = SamplingParams(max_tokens=1)
        known = _known(Request, pooling_params=None, eos_token_id=None)
        self._request = functools.partial(Request, sampling_params=params, **known)

    def hash_algorithms(self) -> list[str]:
        """vLLM's default and, where this version has it, the hash that is our default."""
        names = []
        for name in ("sha256", "xxhash"):
            with contextlib.suppress(ValueError):
                self._hash_function(name)
                names.append(name)
        return names

    def manager(self, hash_algorithm: str, num_blocks: int, block_size: int) -> VLLMManager:
        hash_function = self._hash_function(hash_algorithm)
        self._init_none_hash(hash_function)
        spec = self._interface.FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=8,
            head_size=128,
            dtype=self._dtype,
            **_known(self._interface.FullAttentionSpec, use_mla=False),
        )
        config = self._interface.KVCacheConfig(
            num_blocks=num_blocks + 1,  # one is vLLM's null block
            kv_cache_tensors=[],
            kv_cache_groups=[self._interface.KVCacheGroupSpec(["layer"], spec)],
        )
        sizes = dict.fromkeys(("scheduler_block_size", "hash_block_size"), block_size)
        manager = self._manager(
            config, num_blocks * block_size, **_known(self._manager, log_stats=False, **sizes)
        )
        hasher = self._hasher(block_size, hash_function)
        return VLLMManager(self._version, hash_algorithm, manager, hasher, self._request)


def _known(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that this version of the function takes."""
    taken = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in taken}


class VLLMManager:
    """A KVCacheManager of vLLM with one group of full attention, called as its scheduler does."""

    name = "vLLM"

    def __init__(
        self,
        version: str,
        hash_algorithm: str,
        manager: Any,
        hasher: Callable[[Any], list[bytes]],
        request: Callable[..., Any],
    ) -> None:
        self.version = version
        self.hash_algorithm = hash_algorithm
        """vLLM's name of it: ``sha256``, its default, and ``xxhash``, which is xxh3-128; both over
        the pickled tokens."""
        self._manager, self._hasher, self._request = manager, hasher, request

    def make(self, seq_id: int, token_ids: list[int]):
        """A request of one prompt."""
        return self._request(str(seq_id), token_ids)

    def hash(self, request) -> None:
        request.block_hashes = self._hasher(request)

    def lookup(self, request) -> tuple[Any, int]:
        """Cached blocks of the longest prefix that leaves a token to compute, and its tokens."""
        return self._manager.get_computed_blocks(request)[:2]

    def allocate(self, request, blocks, cached_tokens: int) -> None:
        new_tokens = request.num_tokens - cached_tokens
        if self._manager.allocate_slots(request, new_tokens, cached_tokens, blocks) is None:
            raise RuntimeError(f"vLLM's pool is too small for {request.num_tokens} tokens")

    def free(self, request) -> None:
        self._manager.free(request)

    def cycle(self, request) -> int:
        """Tokens of the prompt that were cached."""
        self.hash(request)
        blocks, cached_tokens = self.lookup(request)
        self.allocate(request, blocks, cached_tokens)
        self.free(request)
        return cached_tokens

    def phases(self, request) -> dict[str, float]:
        """Seconds of each phase of one cycle."""
        times = [time.perf_counter()]
        self.hash(request)
        times.append(time.perf_counter())
        found = self.lookup(request)
        times.append(time.perf_counter())
        self.allocate(request, *found)
        times.append(time.perf_counter())
        self.free(request)
        times.append(time.perf_counter())
        spans = (end - begin for begin, end in itertools.pairwise(times))
        return dict(zip(("hash", "lookup", "allocate", "free"), spans, strict=True))


class SGLangRadixCache:
    """SGLang's Python radix cache (``RadixCache``), without the memory pools around it.

    Raises Unavailable if SGLang, or one with these interfaces (0.5.23), cannot be imported.
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
            raise Unavailable(f"SGLang 0.5.23 cannot be imported: {error}") from error
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
