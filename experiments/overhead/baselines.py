"""vLLM's scheduler and cache manager, timed for comparison if vLLM 0.33 can be imported.

They need neither a GPU nor compiled code.  ``pip install --no-deps --target vllm-0.33
vllm==0.33.0`` installs vLLM without its dependencies.  Install missing packages into the same
folder (``apache-tvm-ffi`` for ``tvm_ffi``, ``pyzmq`` for ``zmq``), and put ``vllm-0.33`` in
``PYTHONPATH``.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

from experiments.harness import Unavailable

HASH_ALGORITHMS = {"sha256": "sha256", "xxh3_128": "xxhash"}
"""vLLM's names of our hash algorithms.  vLLM's default is sha256.  Both hash pickled tokens."""


class _VLLM:
    """vLLM's v1 code for one group of full attention.

    Raises Unavailable if no vLLM with the interfaces of 0.33 can be imported.
    """

    name = "vLLM"

    def __init__(self, hash_algorithm: str, num_blocks: int, block_size: int) -> None:
        import torch

        try:
            import vllm
            from vllm.sampling_params import SamplingParams
            from vllm.utils.hashing import get_hash_fn_by_name
            from vllm.v1 import kv_cache_interface
            from vllm.v1.core import kv_cache_utils
            from vllm.v1.request import Request
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"vLLM 0.33 cannot be imported: {error}") from error
        self.version = vllm.__version__
        self._params, self._request = SamplingParams, Request
        hash_function = get_hash_fn_by_name(hash_algorithm)
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_function)
        spec = kv_cache_interface.FullAttentionSpec(
            block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.float16
        )
        self._config = kv_cache_interface.KVCacheConfig(
            num_blocks=num_blocks + 1,  # one more for vLLM's null block
            kv_cache_tensors=[],
            kv_cache_groups=[kv_cache_interface.KVCacheGroupSpec(["layer"], spec)],
        )


class _TextModel:
    """Replaces vLLM's ModelConfig, which needs a checkpoint.  Describes a plain text model."""

    runner_type = "generate"

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def __getattr__(self, name: str) -> None:
        """All properties that are not defined here are None."""


class VLLMScheduler(_VLLM):
    """vLLM's scheduler in a closed loop without a model.  Its cache has blocks for
    ``num_sequences`` sequences of ``max_model_len`` tokens."""

    def __init__(self, num_sequences: int, max_model_len: int, block_size: int) -> None:
        num_blocks = num_sequences * -(-max_model_len // block_size)
        super().__init__("sha256", num_blocks, block_size)
        from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import ModelRunnerOutput

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
        # Requests without a grammar allow every token.
        grammars = SimpleNamespace(accept_tokens=lambda *_args, **_options: True)
        self._scheduler = Scheduler(config, self._config, grammars, block_size)
        self._output, self._numbers = ModelRunnerOutput, itertools.count()

    def add(self, token_ids: list[int], num_output_tokens: int) -> None:
        params = self._params(max_tokens=num_output_tokens, ignore_eos=True)
        self._scheduler.add_request(
            self._request(
                str(next(self._numbers)),
                token_ids,
                params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def step(self) -> tuple[int, dict[str, float]]:
        """Run a step.  Returns the number of ended requests and the seconds of ``schedule()``."""
        scheduler = self._scheduler
        begin = time.perf_counter()
        scheduled = scheduler.schedule()
        seconds = time.perf_counter() - begin
        ids = list(scheduled.num_scheduled_tokens)
        requests = [scheduler.requests[id] for id in ids]
        # One new token for each sequence whose tokens are all computed.
        tokens = [[1] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        before = len(scheduler.requests)
        output = self._output(ids, {id: row for row, id in enumerate(ids)}, tokens)
        scheduler.update_from_output(scheduled, output)
        return before - len(scheduler.requests), {"schedule": seconds}


class VLLMManager(_VLLM):
    """vLLM's KVCacheManager, called in the same way as vLLM's scheduler calls it."""

    policy = "lru"

    def __init__(self, hash_algorithm: str, num_blocks: int, block_size: int) -> None:
        super().__init__(hash_algorithm, num_blocks, block_size)
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.hash_algorithm = hash_algorithm
        self._one_token = self._params(max_tokens=1)
        self._manager = KVCacheManager(
            self._config,
            num_blocks * block_size,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )

    def make(self, seq_id: int, token_ids: list[int]) -> Any:
        return self._request(str(seq_id), token_ids, self._one_token, pooling_params=None)

    def cycle(self, request: Any) -> int:
        """Number of the prompt's tokens that are cached."""
        self.phases(request)
        return self._cached_tokens

    def phases(self, request: Any) -> dict[str, float]:
        """Seconds of each phase of one cycle."""
        times = [time.perf_counter()]
        request.block_hashes = self._hasher(request)
        times.append(time.perf_counter())
        blocks, self._cached_tokens = self._manager.get_computed_blocks(request)[:2]
        times.append(time.perf_counter())
        new_tokens = request.num_tokens - self._cached_tokens
        if self._manager.allocate_slots(request, new_tokens, self._cached_tokens, blocks) is None:
            raise RuntimeError(f"vLLM's pool is too small for {request.num_tokens} tokens")
        times.append(time.perf_counter())
        self._manager.free(request)
        times.append(time.perf_counter())
        spans = (end - begin for begin, end in itertools.pairwise(times))
        return dict(zip(("hash", "lookup", "allocate", "free"), spans, strict=True))
