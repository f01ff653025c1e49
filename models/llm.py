"""LLM: a checkpoint, a KV cache and an engine behind ``generate``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from cache import CacheManager, EvictionPolicy, make_manager, num_cpu_blocks, num_gpu_blocks
from cache.checks import at_least
from cache.serving.engine import Engine
from cache.serving.outputs import RequestOutput, TokenOutput
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler
from cache.sizing import utilization_share
from models.attention import AttentionBackend, make_backend
from models.config import ModelConfig
from models.decoder import build_model
from models.memory import available_host_bytes, profile_peak_bytes
from models.parallel import TensorParallel, is_distributed, join_tensor_parallel
from models.prompts import (
    Messages,
    Prompt,
    SaltedPrompt,
    list_prompts,
    load_chat_template,
    load_tokenizer,
    to_token_ids,
)
from models.runner import ModelRunner
from models.sampler import Sampler
from models.streams import NewRequest, Streams
from models.weights import load_kv_scales, load_weights, randomize_weights
from models.workers import LeadingEngine, Workers, has_workers, start_workers

HOST_KV_CACHE_BYTES = 4 << 30
HOST_KV_CACHE_SHARE = 0.25
"""Most host memory that the blocks of a kind take if their number is not given: these bytes, and
this share of what is available."""

_NOT_SERVED = {
    "sliding_window": "the window is that of the model, and vllm_v1 gives back what lies behind it"
}
"""Options of managers that are for replays."""

_CHOICES = {"preemption": ("recompute", "swap"), "scheduling": ("mixed", "prefill_first")}

_SIZES = (
    "block_size",
    "num_blocks",
    "num_host_blocks",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
)


class LLM:
    """Generates text with a model of ``models.config.FAMILIES`` on a paged KV cache.

        llm = LLM("path/to/Qwen3-0.6B")
        [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))
        print(output.outputs[0].text)

    Several threads may generate at a time.  A step that raises (KeyboardInterrupt, out of memory
    ...) cancels all requests and empties the cache; after that the LLM serves as before, unless
    its tensor-parallel ranks, which then end, were started by it.

    Args:
        model: folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer.json), or a
            ModelConfig, which gets random weights.
        device: "cuda" or "cpu"; a GPU if there is one.
        dtype: of weights and KV cache: that of the checkpoint on a GPU, fp32 on a CPU.
        kv_cache_dtype: "fp8_e4m3" for a KV cache of one byte per element; None for dtype.  Needs
            "triton" or "torch".  Keys and values are divided by the scales that a checkpoint has
            for them (one each per layer, as for vLLM), else by 1; beyond 448 they saturate.
        attention_backend: "triton" (the usual one on a GPU), "torch" (on a CPU), "flash_attn".
        manager: design of the cache manager, a key of ``cache.MANAGERS``.  Of a model all layers of
            which have a window, vllm_v1 gives back the blocks behind it, unless they may be
            swapped out or reused in part.
        policy: eviction policy, for designs with prefix caching.
        block_size: tokens of a block.
        num_blocks: blocks of the KV cache.  By default as many as fit: on a GPU into
            gpu_memory_utilization of its memory, beside what a profiling run of the largest batch
            took; on a CPU into a quarter of the available memory, up to 4 GiB, and no more than
            max_num_seqs of the longest sequences need.
        num_host_blocks: blocks of host memory for preemption="swap"; by default num_blocks, but no
            more than fit into a quarter of the available memory, up to 4 GiB.
        max_model_len: longest sequence, prompt included; by default what model and cache allow.
        max_num_seqs, max_num_batched_tokens: most sequences at a time, most tokens in a step.
        enable_prefix_caching: share the K/V of equal prefixes.
        enable_chunked_prefill: compute prompts in chunks where they exceed max_num_batched_tokens.
        scheduling: "mixed": a step decodes and computes prompts; "prefill_first": one or the other.
        preemption: "recompute" or "swap": what becomes of the K/V of a sequence that has to yield.
        tensor_parallel_size: number of processes, with a GPU each, that share the model: those
            that torchrun started, each of which makes its LLM and serves the same prompts; or
            else child processes of this one, which are started now.
        hash_algorithm: of the prefix cache; the manager's own by default.
        manager_options: further options of the manager's design.
        random_weights: ignore the checkpoint's weights.
        cuda_graphs: replay decoding from CUDA graphs; by default wherever that is possible: on a
            GPU, with "triton", or with "flash_attn" if block_size is a multiple of 256.
        overlap: launch a step before the tokens of the one before are read, see ``Engine.step``; by
            default on a GPU.  The tokens are the same.
        seed: of random weights, and of requests without a seed of their own.

    Raises ValueError, naming the argument or the file, for what does not fit together: an unknown
    architecture, absent or mismatched weights, a cache that holds not one sequence ...;
    FileNotFoundError for a folder that is not there; ImportError for an absent flash-attn.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        kv_cache_dtype: str | None = None,
        attention_backend: str | None = None,
        manager: str = "vllm_v1",
        policy: str | EvictionPolicy = "lru",
        block_size: int = 16,
        num_blocks: int | None = None,
        num_host_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        scheduling: str = "mixed",
        preemption: str = "recompute",
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.9,
        hash_algorithm: str | None = None,
        manager_options: Mapping[str, object] | None = None,
        random_weights: bool = False,
        cuda_graphs: bool | None = None,
        overlap: bool | None = None,
        seed: int = 0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        for name, choices in _CHOICES.items():
            if arguments[name] not in choices:
                raise ValueError(f"{name}={arguments[name]!r}: choose from {', '.join(choices)}")
        for name in _SIZES:
            if arguments[name] is not None:
                at_least(1, name, arguments[name])
        utilization_share(gpu_memory_utilization)
        if not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: needs an int")
        options = _manager_options(manager_options, hash_algorithm)
        folder = None if isinstance(model, ModelConfig) else Path(model)
        self.config = config = model if folder is None else ModelConfig.from_folder(folder)
        self.device = _device(device, tensor_parallel_size)
        self.dtype = _dtype(dtype, config, self.device)
        self.tokenizer = load_tokenizer(folder)
        self.chat_template = load_chat_template(folder)
        backend = make_backend(attention_backend, self.device)
        kv_dtype = _kv_dtype(kv_cache_dtype, self.dtype, backend)
        positions = config.max_position_embeddings
        if max_model_len is not None and max_model_len > positions:
            raise ValueError(f"max_model_len={max_model_len}: the model has {positions} positions")
        longest = max_model_len or positions

        workers = self._join_ranks(tensor_parallel_size, arguments)
        self.model = build_model(
            config,
            backend,
            dtype=self.dtype,
            device=self.device,
            max_positions=longest,
            tp=self._tp,
        )
        if folder is None or random_weights:
            randomize_weights(self.model, seed=seed, std=config.initializer_range)
        else:
            load_weights(self.model, folder)
            if kv_cache_dtype is not None:
                load_kv_scales(self.model, folder)

        block_bytes = config.kv_block_bytes(
            block_size, kv_dtype, tensor_parallel_size=tensor_parallel_size
        )
        if num_blocks is None:
            batch = {"num_seqs": max_num_seqs, "max_model_len": longest, "block_size": block_size}
            if self.device.type == "cpu":
                num_blocks = self._num_blocks_on_cpu(block_bytes, **batch)
            else:
                peak = profile_peak_bytes(
                    self.model, num_tokens=max_num_batched_tokens, kv_dtype=kv_dtype, **batch
                )
                num_blocks = self._num_blocks_on_gpu(block_bytes, peak, gpu_memory_utilization)
        if preemption == "recompute":
            num_host_blocks = 0
        elif num_host_blocks is None:
            num_host_blocks = min(num_blocks, max(1, self._num_blocks_in_host(block_bytes)))
        keeps_all = preemption == "swap" or options.get("partial_block_reuse")
        if manager == "vllm_v1" and not keeps_all:
            options["sliding_window"] = config.sliding_window
        if manager == "contiguous":
            options.setdefault("final_length", _final_length)
            longest_run = block_size << max(0, num_blocks.bit_length() - 1)
            options.setdefault("max_model_len", max_model_len or min(longest, longest_run))

        def new_scheduler() -> Scheduler:
            return Scheduler(
                make_manager(
                    manager,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    policy=policy,
                    enable_prefix_caching=enable_prefix_caching,
                    **options,
                ),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                num_host_blocks=num_host_blocks,
                chunked_prefill=enable_chunked_prefill,
                prefill_first=scheduling == "prefill_first",
            )

        scheduler = new_scheduler()
        self.max_model_len = _fit_max_model_len(max_model_len, longest, scheduler)
        can_capture = self.device.type == "cuda" and backend.can_capture(block_size)
        if cuda_graphs and not can_capture:
            raise ValueError(
                f"cuda_graphs=True: cannot capture attention_backend={backend.name!r} with "
                f"block_size={block_size} on {self.device}"
            )
        use_kernels = self.device.type == "cuda" or backend.name == "triton"
        runner = ModelRunner(
            self.model,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_dtype=kv_dtype,
            num_host_blocks=num_host_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            use_kernels=use_kernels,
            cuda_graphs=can_capture if cuda_graphs is None else cuda_graphs,
        )
        self.engine = Engine(
            scheduler,
            runner,
            Sampler(self.device, seed, use_kernels=use_kernels),
            max_model_len=self.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            text_of=None if self.tokenizer is None else self._text_of,
            overlap=self.device.type == "cuda" if overlap is None else overlap,
        )
        if workers is not None:
            self.engine = LeadingEngine(self.engine, workers)
        self._streams = Streams(self.engine, new_scheduler, self.tokenizer)

    @property
    def manager(self) -> CacheManager:
        """The cache manager; another one after a step that raised."""
        return self.engine.manager

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one or several prompts: texts, lists of token ids, SaltedPrompts of either.

        sampling_params: for all prompts, or one for each.

        Returns one output per prompt, in order.  Raises ValueError for prompts or parameters that
        do not fit; then nothing is generated.
        """
        events = self._streams.open(self._requests(prompts, sampling_params))
        done = [event for event in events if isinstance(event, RequestOutput)]
        return sorted(done, key=lambda output: output.request_id)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TokenOutput | RequestOutput]:
        """Generate as ``generate`` does; yields each token as it comes, and each request's outputs
        when it is finished.  Tokens of beam search come with the outputs only.

        Request ids rise in the order of the prompts.  Leaving the iteration cancels what remains.
        """
        return self._streams.open(self._requests(prompts, sampling_params), texts=True)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one or several chats, written by the checkpoint's template.

        messages: of a chat, ``[{"role": "user", "content": "..."}, ...]``.

        Returns and raises as ``generate``; ValueError also for a checkpoint without a template.
        """
        if self.chat_template is None or self.tokenizer is None:
            raise ValueError(
                "messages: a chat needs a chat template and a tokenizer.json in the model's folder"
            )
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.chat_template.render(chat) for chat in chats]
        # The template writes the special tokens itself.
        prompts = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        outputs = self.generate(prompts, sampling_params)
        return [
            dataclasses.replace(output, prompt=text)
            for output, text in zip(outputs, texts, strict=True)
        ]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V, as after a change of weights.  False, and nothing happens, while
        a request is being served; UnsupportedByDesign for a manager that cannot."""
        return self._streams.reset_prefix_cache()

    def abort(self, request_id: int) -> None:
        """Cancel a request that ``stream`` serves: its outputs, as far as they are, come next.

        Raises KeyError for a request that is unknown or finished.
        """
        self._streams.abort(request_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt.  Raises ValueError if the model came without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError(
                "prompt: a text needs a tokenizer.json in the model's folder; pass token ids"
            )
        return self.tokenizer.encode(text).ids

    def _text_of(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _requests(self, prompts, sampling_params) -> list[NewRequest]:
        """Each prompt with its parameters, once all of them are known to fit."""
        prompts = list_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params: {len(sampling_params)} for {len(prompts)} prompts; needs one "
                "for all, or one for each"
            )
        requests = []
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params[{i}]={params!r}: needs SamplingParams")
            try:
                salt = None
                if isinstance(prompt, SaltedPrompt):
                    prompt, salt = prompt.prompt, prompt.cache_salt
                text = prompt if isinstance(prompt, str) else None
                tokens = to_token_ids(prompt) if text is None else self.encode(text)
                self.engine.check(tokens, params)
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from None
            requests.append(NewRequest(tokens, params, text, salt))
        return requests

    def _join_ranks(self, size: int, arguments: Mapping[str, object]) -> Workers | None:
        """Take a place among the ranks; the others, if this process starts them, as workers."""
        for name in ("num_q_heads", "num_kv_heads", "intermediate_size"):
            first = TensorParallel(0, size)
            first.share(getattr(self.config, name), name, repeat=name == "num_kv_heads")
        workers = None
        if size > 1 and (has_workers() or not is_distributed()):
            workers = start_workers(size, self.device, arguments)
        self._tp = join_tensor_parallel(size, self.device)
        return workers

    def _num_blocks_on_gpu(self, block_bytes: int, peak_bytes: int, utilization: float) -> int:
        fitting = num_gpu_blocks(
            total_bytes=torch.cuda.mem_get_info(self.device)[1],
            gpu_memory_utilization=utilization,
            peak_bytes=peak_bytes,
            block_bytes=block_bytes,
        )
        return self._tp.least(fitting, self.device)  # all ranks keep the same tables

    def _num_blocks_on_cpu(
        self, block_bytes: int, *, num_seqs: int, max_model_len: int, block_size: int
    ) -> int:
        """What the largest batch needs, as far as it fits."""
        fitting = self._num_blocks_in_host(block_bytes)
        if not fitting:
            raise ValueError(
                f"block_size={block_size}: a block needs {block_bytes:,} bytes, more than the KV "
                f"cache gets of {available_host_bytes():,} available ones; give num_blocks, or "
                "choose a smaller block"
            )
        return min(num_seqs * -(-max_model_len // block_size), fitting)

    def _num_blocks_in_host(self, block_bytes: int) -> int:
        share = int(HOST_KV_CACHE_SHARE * available_host_bytes()) // self._tp.size
        fitting = num_cpu_blocks(
            swap_space_bytes=min(HOST_KV_CACHE_BYTES, share), block_bytes=block_bytes
        )
        return self._tp.least(fitting, self.device)


def _manager_options(
    options: Mapping[str, object] | None, hash_algorithm: str | None
) -> dict[str, object]:
    """Options of the manager's design, but for those that this engine cannot serve."""
    options = dict(options or {})
    for name, reason in _NOT_SERVED.items():
        if options.get(name):
            raise ValueError(f"manager_options: {name}={options[name]!r}: {reason}")
    if hash_algorithm is not None:
        options["hash_algorithm"] = hash_algorithm
    return options


def _fit_max_model_len(asked: int | None, longest: int, scheduler: Scheduler) -> int:
    """The longest sequence that the cache, and without chunked prefill one step, can hold."""
    fitting = scheduler.longest_sequence(longest)
    if not scheduler.chunked_prefill and fitting == scheduler.max_num_batched_tokens:
        limit = f"max_num_batched_tokens={fitting} without chunked prefill"
    else:
        limit = f"the KV cache of num_blocks={scheduler.manager.num_blocks}"
    if fitting < 2:
        raise ValueError(f"{limit} holds a sequence of {fitting} tokens; needs at least 2")
    if asked is not None and asked > fitting:
        raise ValueError(f"max_model_len={asked}: {limit} holds one of {fitting} tokens")
    return fitting


def _device(device: str | torch.device | None, tensor_parallel_size: int) -> torch.device:
    """The device asked for; each of several ranks on a machine has a GPU of its own."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: choose from cpu, cuda")
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r}: there is no GPU here")
        if device.index is None:
            index = os.environ.get("LOCAL_RANK") if tensor_parallel_size > 1 else None
            device = torch.device(
                "cuda", torch.cuda.current_device() if index is None else int(index)
            )
        torch.cuda.set_device(device)  # kernels are launched on the current one; needs an index
    return device


def _dtype(dtype: torch.dtype | str | None, config: ModelConfig, device: torch.device):
    if dtype is None:
        return config.dtype if device.type == "cuda" else torch.float32
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype={dtype!r}: choose from float16, bfloat16, float32")
    return chosen


def _kv_dtype(
    kv_cache_dtype: str | None, dtype: torch.dtype, backend: AttentionBackend
) -> torch.dtype:
    if kv_cache_dtype is None:
        return dtype
    if kv_cache_dtype != "fp8_e4m3":
        raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r}: choose from None, 'fp8_e4m3'")
    if not backend.has_fp8_cache:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r}: attention_backend={backend.name!r} has no fp8 "
            "cache; use 'triton' or 'torch'"
        )
    return torch.float8_e4m3fn


def _final_length(seq) -> int:
    """Tokens that a sequence has in the end, if it does not stop early: what an oracle knows."""
    return getattr(seq, "max_num_tokens", seq.num_tokens)
