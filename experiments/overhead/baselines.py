"""Cache and scheduler code of other systems, driven for comparison where it can be imported.

It needs no GPU and no compiled part of theirs: ``pip install --no-deps --target vllm-0.33
vllm==0.33.0``, likewise the packages without which its import fails, and ``vllm-0.33`` in
``PYTHONPATH``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from experiments.harness import Unavailable


class VLLM:
    """vLLM's v1 code, imported: makes its KVCacheManagers and its scheduler.

    Raises Unavailable if vLLM, or one with the interfaces of 0.33, cannot be imported.
    """

    def __init__(self) -> None:
        try:
            import vllm
            from vllm.sampling_params import SamplingParams
            from vllm.utils.hashing import get_hash_fn_by_name
            from vllm.v1 import kv_cache_interface
            from vllm.v1.core import kv_cache_utils
            from vllm.v1.core.kv_cache_manager import KVCacheManager
            from vllm.v1.request import Request
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"vLLM 0.33 cannot be imported: {error}") from error
        self._version = vllm.__version__
        self._interface, self._utils = kv_cache_interface, kv_cache_utils
        self._manager, self._hash_function = KVCacheManager, get_hash_fn_by_name
        self._params = SamplingParams
        self._request = partial(Request, pooling_params=None)

    def hash_algorithms(self) -> list[str]:
        """``sha256``, vLLM's default, and ``xxhash`` (xxh3-128); both hash the pickled tokens."""
        return ["sha256", "xxhash"]

    def _hasher(self, hash_algorithm: str, block_size: int) -> Callable[[Any], list[bytes]]:
        hash_function = self._hash_function(hash_algorithm)
        self._utils.init_none_hash(hash_function)
        return self._utils.get_request_block_hasher(block_size, hash_function)

    def _config(self, num_blocks: int, block_size: int) -> Any:
        """One group of full attention, with a block more: vLLM's null block."""
        import torch

        spec = self._interface.FullAttentionSpec(
            block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.float16
        )
        return self._interface.KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[self._interface.KVCacheGroupSpec(["layer"], spec)],
        )

    def manager(self, hash_algorithm: str, num_blocks: int, block_size: int) -> VLLMManager:
        manager = self._manager(
            self._config(num_blocks, block_size),
            num_blocks * block_size,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        hasher = self._hasher(hash_algorithm, block_size)
        make = partial(self._request, sampling_params=self._params(max_tokens=1))
        return VLLMManager(self._version, hash_algorithm, manager, hasher, make)

    def scheduler(self, num_sequences: int, max_model_len: int, block_size: int) -> VLLMScheduler:
        """vLLM's scheduler with blocks for ``num_sequences`` of ``max_model_len`` tokens."""
        from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler

        num_blocks = num_sequences * -(-max_model_len // block_size)
        config = VllmConfig(
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=num_sequences,
                max_num_batched_tokens=max(8192, max_model_len),
                max_model_len=max_model_len,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=DeviceConfig(device="cpu"),
        )
        config.cache_config.num_gpu_blocks = num_blocks + 1
        config.model_config = _TextModel(max_model_len)
        # Requests without a grammar accept every token.
        grammars = SimpleNamespace(accept_tokens=lambda *_args, **_options: True)
        kv_cache_config = self._config(num_blocks, block_size)
        scheduler = Scheduler(config, kv_cache_config, grammars, block_size)
        hasher = self._hasher("sha256", block_size)

        def make(number: int, token_ids: list[int], num_output_tokens: int):
            params = self._params(max_tokens=num_output_tokens, ignore_eos=True)
            return self._request(str(number), token_ids, params, block_hasher=hasher)

        return VLLMScheduler(self._version, scheduler, make)


class _TextModel:
    """Stands in for vLLM's ModelConfig, which wants a checkpoint: a plain text model."""

    runner_type = "generate"

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def __getattr__(self, name: str) -> None:
        """Every other property is absent."""


class VLLMScheduler:
    """vLLM's scheduler in a closed loop; the model's part is left out."""

    def __init__(self, version: str, scheduler: Any, make: Callable[..., Any]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self.version = version
        self._scheduler, self._make, self._output = scheduler, make, ModelRunnerOutput
        self._numbers = itertools.count()

    def add(self, token_ids: list[int], num_output_tokens: int) -> None:
        self._scheduler.add_request(self._make(next(self._numbers), token_ids, num_output_tokens))

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def step(self) -> tuple[int, dict[str, float]]:
        """Number of requests that ended in this step, and the seconds of ``schedule()``."""
        scheduler = self._scheduler
        begin = time.perf_counter()
        scheduled = scheduler.schedule()
        seconds = time.perf_counter() - begin
        ids = list(scheduled.num_scheduled_tokens)
        requests = [scheduler.requests[id] for id in ids]
        # A token for each sequence whose tokens are all computed.
        tokens = [[1] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        before = len(scheduler.requests)
        output = self._output(ids, {id: row for row, id in enumerate(ids)}, tokens)
        scheduler.update_from_output(scheduled, output)
        return before - len(scheduler.requests), {"schedule": seconds}


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
        """Number of cached tokens of the prompt."""
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
