"""LLM: generates text with a checkpoint, a KV cache and an engine."""

import dataclasses
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from cache import CacheManager, EvictionPolicy, Group, make_manager, num_cpu_blocks, num_gpu_blocks
from cache.blocks.session_hint import SessionHint
from cache.checks import at_least, shown, true_or_false
from cache.managers import TIER_OPTIONS, manager_class
from cache.options import UserOptions
from cache.serving.engine import Engine
from cache.serving.outputs import RequestOutput, TokenOutput
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import POLICIES, Scheduler
from cache.sizing import utilization_share
from models.attention import AttentionBackend, make_backend
from models.config import ModelConfig, default_sampling_params, eos_of_tokenizer
from models.decoder import CausalLM, build_model
from models.hub import checkpoint_path
from models.memory import available_host_bytes, profile_peak_bytes
from models.parallel import TensorParallel, is_distributed, join_tensor_parallel
from models.prompts import (
    Messages,
    Prompt,
    as_list,
    list_prompts,
    load_chat_template,
    load_tokenizer,
    split_prompt,
    to_transformers,
    tokenizer_errors,
)
from models.runner import ModelRunner
from models.sampler import Sampler
from models.streams import NewRequest, OutputDecoder, Streams
from models.weights import load_kv_scales, load_weights, randomize_weights
from models.workers import LeadingEngine, Workers, has_workers, start_workers

HOST_KV_CACHE_BYTES = 4 << 30
HOST_KV_CACHE_SHARE = 0.25
"""Default limits of a KV cache in host memory: bytes, and share of the available memory."""

_CHOICES = {
    "preemption": ("recompute", "swap"), "scheduling": ("mixed", "prefill_first"),
    "scheduling_policy": POLICIES, "kv_cache_dtype": (None, "fp8_e4m3"),
} | dict.fromkeys(("cuda_graphs", "overlap"), (None, True, False)) | dict.fromkeys(
    ("enable_prefix_caching", "enable_chunked_prefill", "random_weights", "enforce_eager"),
    (True, False),
)  # fmt: skip
_SIZES = (
    "block_size", "num_blocks", "num_host_blocks", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "tensor_parallel_size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LLMOptions(UserOptions):
    """Options of an ``LLM``, with the checks that need neither a model nor a device.

    Attributes:
        device: "cuda" or "cpu"; by default a GPU if there is one.
        dtype: dtype of weights and KV cache.  Default, also "auto": the checkpoint's dtype on a
            GPU, fp32 on a CPU.
        kv_cache_dtype: None or "auto", or "fp8_e4m3" for a KV cache of one byte per element.  Needs
            "triton" or "torch".  Keys and values are divided by the checkpoint's scales (one each
            per layer, as in vLLM), else by 1; magnitudes beyond 448 saturate.
        attention_backend: "triton" (default on a GPU), "torch" (default on a CPU), "flash_attn".
        manager: cache manager, a key of ``cache.MANAGERS``, or your own: a subclass of
            CacheManager, also as "file.py:Class".  If layers have windows, vllm_v1 divides
            the layers into groups and frees the blocks behind the windows, unless preemption is
            "swap".
        policy: eviction policy, for managers with prefix caching.
        block_size: tokens per block.
        num_blocks: number of blocks of the KV cache.  If layers are divided into groups, a block
            holds K/V of one group's layers.  Default on a GPU: as many as fit into
            gpu_memory_utilization of its memory minus the peak of a profiling run.  Default on a
            CPU: as many as fit into min(4 GiB, 25 % of available memory), but no more than
            max_num_seqs sequences of max_model_len need.
        num_host_blocks: number of blocks in host memory for preemption="swap".  Default:
            num_blocks, limited to min(4 GiB, 25 % of available memory).
        max_model_len: longest sequence, prompt included.  Default: as model and cache allow.
        max_num_seqs, max_num_batched_tokens: maximum number of sequences and tokens of a step.
        enable_prefix_caching: share the K/V of equal prefixes.
        enable_chunked_prefill: compute prompts longer than max_num_batched_tokens in chunks.
        scheduling: "mixed": a step decodes and prefills; "prefill_first": it does either.
        scheduling_policy: "fcfs", or "priority" for requests with a priority.
        preemption: "recompute" or "swap" the K/V of a preempted sequence.
        tensor_parallel_size: number of processes that share the model, each with its own GPU.
            Under torchrun every rank makes its own LLM and serves the same prompts.  Otherwise this
            LLM starts the other ranks as child processes.
        gpu_memory_utilization: see num_blocks.
        hash_algorithm: hash of the prefix cache.  Default: the manager's default.
        manager_options: further options of the manager, except sliding_window and groups.
            ``host_blocks`` keeps cached blocks in host memory, which must be available.
        random_weights: use random weights instead of the checkpoint's weights.
        cuda_graphs: replay decoding from CUDA graphs.  Default: True on a GPU with "triton", and
            with "flash_attn" if block_size is a multiple of 256.
        enforce_eager: True is vLLM's name of cuda_graphs=False.
        overlap: launch a step before the previous step's tokens are read, see ``Engine.step``.
            Default: True on a GPU.  Tokens do not change.
        seed: seed of random weights, and of requests without a seed of their own.

    Raises ValueError, naming the option, and TypeError for an unknown option.
    """

    device: str | torch.device | None = None
    dtype: torch.dtype | str | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    manager: str | type[CacheManager] = "vllm_v1"
    policy: str | EvictionPolicy = "lru"
    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling: str = "mixed"
    scheduling_policy: str = "fcfs"
    preemption: str = "recompute"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    hash_algorithm: str | None = None
    manager_options: Mapping[str, object] | None = None
    random_weights: bool = False
    cuda_graphs: bool | None = None
    enforce_eager: bool = False
    overlap: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_cache_dtype"):
            if str(getattr(self, name)) == "auto":
                object.__setattr__(self, name, None)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                choose = ", ".join(map(str, choices))
                raise ValueError(f"{name}={getattr(self, name)!r}: choose from {choose}")
        for name in _SIZES:
            if getattr(self, name) is not None:
                at_least(1, name, getattr(self, name))
        utilization_share(self.gpu_memory_utilization)
        if self.enforce_eager and self.cuda_graphs:
            raise ValueError("cuda_graphs=True: enforce_eager=True is cuda_graphs=False; give one")
        if self.enforce_eager:
            object.__setattr__(self, "cuda_graphs", False)
        if not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r}: needs an int")
        given = self.manager_options or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"manager_options={shown(given)}: needs a mapping")
        if "num_cpu_blocks" in given and manager_class(self.manager).can_swap:
            raise ValueError("manager_options: num_cpu_blocks is set by num_host_blocks; give this")
        for name in ("sliding_window", "groups"):
            if given.get(name) is not None:
                raise ValueError(
                    f"manager_options: {name}={given[name]!r}: the window is the model's; vllm_v1 "
                    "frees the blocks behind it"
                )
        if given.get("host_blocks") and self.preemption == "swap":
            raise ValueError(
                f"preemption='swap': manager_options host_blocks={given['host_blocks']!r} keep the "
                "blocks of preempted sequences; needs 'recompute'"
            )


class LLM:
    """Generates text with a model of ``models.config.FAMILIES`` on a paged KV cache.

        llm = LLM("path/to/Qwen3-0.6B")
        [output] = llm.generate("The capital of France is", SamplingParams(temperature=0))
        print(output.outputs[0].text)

    Several threads may generate at a time.  An error in the text, scores or samples of one request
    ends only that request, with finish_reason "error" and ``RequestOutput.error``.  A step that
    raises (KeyboardInterrupt, out of memory ...) cancels all requests and empties the cache.  The
    LLM can then serve new requests, unless it started tensor-parallel ranks: these are ended.

    Args:
        model: folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer.json), a
            GGUF file, a name on the hub ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@REVISION"), or a
            ModelConfig for a model with random weights.
        options: fields of LLMOptions.

    Raises ValueError, naming the argument or the file, for options that do not fit together, an
    unknown architecture, absent or mismatched weights, or a cache too small for a sequence.
    Raises TypeError for an unknown option; that of an option of vLLM or nano-vLLM says what to use.
    Raises FileNotFoundError for a missing folder, and ImportError if flash-attn is not installed.
    """

    def __init__(self, model: str | Path | ModelConfig, **options: Any) -> None:
        asked, folder = LLMOptions(**options), None
        if isinstance(model, ModelConfig):
            self.config = model
        else:
            folder = checkpoint_path(model)
            self.config = ModelConfig.from_folder(folder)
        self.device = _device(asked.device, asked.tensor_parallel_size)
        self.dtype = _dtype(asked.dtype, self.config, self.device)
        self.tokenizer = load_tokenizer(folder)
        if folder is not None and self.tokenizer is not None:
            ends = self.config.eos_token_ids | eos_of_tokenizer(folder, self.tokenizer)
            self.config = dataclasses.replace(self.config, eos_token_ids=ends)
        self.chat_template = load_chat_template(folder)
        self.default_sampling_params = default_sampling_params(folder)
        backend = make_backend(asked.attention_backend, self.device)
        kv_dtype = _kv_dtype(asked.kv_cache_dtype, self.dtype, backend)
        cuda_graphs = _use_graphs(asked, backend, self.device)
        positions = self.config.max_positions
        longest = asked.max_model_len or positions
        if longest > positions:
            raise ValueError(f"max_model_len={longest}: the model has {positions} positions")

        tier_blocks = _check_tier(asked, self.config, kv_dtype)
        workers = self._join_ranks(asked.tensor_parallel_size, {"model": model, **options})
        self.model = self._load_model(asked, folder, backend, longest)
        num_blocks, num_host_blocks = self._size_cache(asked, longest, kv_dtype)
        sizes = num_blocks, num_host_blocks, longest
        new_scheduler = partial(_new_scheduler, asked, self.config, *sizes)
        scheduler = new_scheduler()
        self.max_model_len = _fit_max_model_len(asked.max_model_len, longest, scheduler)
        use_kernels = self.device.type == "cuda" or backend.name == "triton"
        runner = ModelRunner(
            self.model,
            num_blocks=num_blocks, block_size=asked.block_size, kv_dtype=kv_dtype,
            num_host_blocks=num_host_blocks or tier_blocks,
            max_num_seqs=asked.max_num_seqs, max_model_len=self.max_model_len,
            use_kernels=use_kernels, cuda_graphs=cuda_graphs,
        )  # fmt: skip
        engine = Engine(
            scheduler,
            runner,
            Sampler(self.device, asked.seed, use_kernels=use_kernels),
            max_model_len=self.max_model_len,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            new_decoder=None if self.tokenizer is None else partial(OutputDecoder, self.tokenizer),
            overlap=self.device.type == "cuda" if asked.overlap is None else asked.overlap,
        )
        self.engine = engine if workers is None else LeadingEngine(engine, workers)
        self._streams = Streams(self.engine, new_scheduler)

    def __repr__(self) -> str:
        manager = self.manager
        return (
            f"LLM({self.config.architecture}, {self.dtype} on {self.device}, {manager.name}: "
            f"{manager.num_free_blocks} of {manager.num_blocks} blocks of {manager.block_size} "
            f"tokens free, max_model_len={self.max_model_len})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be copied or pickled: it holds device memory, locks and running "
            "requests; make one with LLM(...) in each process"
        )

    @property
    def manager(self) -> CacheManager:
        """The cache manager.  A step that raises replaces the manager by a new one."""
        return self.engine.manager

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Generate for one or several prompts.

        prompts: a prompt or a list of prompts.  A prompt is a text, a list of token ids, a mapping
            as in vLLM, or a SaltedPrompt.  A mapping is ``{"prompt": text}`` or
            ``{"prompt_token_ids": [...]}``.  With the key "cache_salt" it shares K/V only with
            prompts of the same salt.
        sampling_params: SamplingParams for all prompts, or a sequence with an item per prompt.
            Default: ``default_sampling_params``, read from generation_config.json.
        use_tqdm: show progress on stderr from the first second on.  None: if it is a terminal.
        priority: an int for all prompts, or a sequence.  Needs ``scheduling_policy="priority"``,
            which serves requests with smaller numbers first.

        Returns one output per prompt, in order.  Before anything is generated, raises the errors of
        ``Engine.add`` with the number of the prompt."""
        hide = None if use_tqdm is None else not true_or_false("use_tqdm", use_tqdm)
        requests = self._requests(prompts, sampling_params, priority)
        done, num_tokens = [], 0
        with tqdm(
            desc="generate", total=len(requests), unit="prompt", delay=1, miniters=0, disable=hide
        ) as progress:
            for event in self._streams.open(requests, ticks=True):
                num_tokens += isinstance(event, TokenOutput)
                progress.set_postfix_str(f"{num_tokens:,} tokens", refresh=False)
                if isinstance(event, RequestOutput):
                    done.append(event)
                progress.update(isinstance(event, RequestOutput))
        return sorted(done, key=lambda output: output.request_id)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[TokenOutput | RequestOutput]:
        """Generate as ``generate`` does, but yield each token as it comes, and each request's
        outputs when the request is finished.  Beam search yields only outputs.

        Request ids rise in the order of the prompts.  Leaving the iteration cancels unfinished
        requests.
        """
        requests = self._requests(prompts, sampling_params, priority)
        return self._streams.open(requests, texts=True)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one or several chats, with the checkpoint's chat template.

        messages: a chat, ``[{"role": "user", "content": "..."}, ...]``, or several.  A content may
            be a list of ``{"type": "text", "text": "..."}`` if the template accepts lists.
        template_options: options of ``ChatTemplate.render``, for example ``tools`` (functions or
            their JSON schemas), or variables such as ``enable_thinking``.
        chat_template_kwargs: more of them, as in vLLM.

        Returns and raises as ``generate`` and ``ChatTemplate.render`` do.  Also raises ValueError
        for a checkpoint without a chat template."""
        if self.chat_template is None or self.tokenizer is None:
            raise ValueError(
                "messages: a chat needs a chat template and a tokenizer.json in the model's folder"
            )
        chats = as_list(messages)
        chats = [chats] if chats and isinstance(chats[0], Mapping) else chats
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise ValueError(f"chat_template_kwargs={shown(chat_template_kwargs)}: needs a mapping")
        options = template_options | dict(chat_template_kwargs or {})
        texts = [self.chat_template.render(chat, **options) for chat in chats]
        # The rendered text already has the special tokens.
        prompts = [self.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(prompts, sampling_params, use_tqdm)
        return [
            dataclasses.replace(output, prompt=text)
            for output, text in zip(outputs, texts, strict=True)
        ]

    def memory_usage(self) -> str:
        """A table of the KV cache's memory now: for each group of layers its number of layers, its
        window, and the blocks and MiB that its sequences hold; retention, and the whole cache."""
        manager, mib = self.manager, self._block_bytes / 2**20
        lines = ["group   layers  window  blocks in use       MiB"]
        counts = manager.num_used_blocks()
        for number, (group, count) in enumerate(zip(self.model.groups, counts, strict=True)):
            window = group.window or "all"
            lines.append(
                f"{number:>5}{group.num_layers:>9}{window:>8}{count:>15,}{count * mib:>10,.1f}"
            )
        lines.append(
            f"retention: {getattr(manager, 'retention', None)}; the cache has "
            f"{manager.num_blocks:,} blocks of {manager.block_size} tokens, "
            f"{manager.num_blocks * mib:,.1f} MiB"
        )
        if manager.tier is not None:
            keys = manager.tier.pool.block_hashes
            lines.append(
                f"host memory: {len(keys) - keys.count(None):,} of {len(keys):,} blocks hold "
                f"cached content, {len(keys) * mib:,.1f} MiB"
            )
        return "\n".join(lines)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V, for example for new weights; see ``Engine.reset_prefix_cache``."""
        return self._streams.reset_prefix_cache()

    def hint_session(self, hint: SessionHint) -> None:
        """Correct the hint about a session, see ``Engine.hint_session``.

        An agent guesses the duration of its next tool, and corrects the guess when the tool runs:

            guess = SessionHint("agent-7", expected_pause_ms=2000, pause_spread=1)
            llm.generate(prompt, SamplingParams(session=guess))
            llm.hint_session(SessionHint("agent-7", expected_pause_ms=60_000, pause_spread=0.1))
            llm.generate(last_prompt, SamplingParams(session=SessionHint("agent-7", ends=True)))
        """
        self._streams.hint_session(hint)

    def abort(self, request_id: int) -> None:
        """Cancel a request that ``stream`` serves.  The stream then yields its outputs so far.

        Raises KeyError for a request that is unknown or finished.
        """
        self._streams.abort(request_id)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer and chat template as a tokenizer of transformers.

        ``tokenizer`` is the one of tokenizers that the LLM itself uses.  Raises ValueError for a
        checkpoint without a tokenizer, and ImportError without transformers."""
        if self.tokenizer is None:
            raise ValueError("get_tokenizer: there is no tokenizer.json in the model's folder")
        return to_transformers(self.tokenizer, self.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.  add_special_tokens: add the tokenizer's special tokens (BOS ...).

        Raises ValueError if the text cannot be tokenized or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                "prompt: a text needs a tokenizer.json in the model's folder; pass token ids"
            )
        if not isinstance(text, str):
            raise ValueError(f"prompt: needs a text, got {shown(text)}")
        with tokenizer_errors(f"prompt: {reprlib.repr(text)}"):
            text.encode()  # the error names a lone surrogate
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """Replace stop strings that are special tokens by stop tokens: texts do not show them."""
        if self.tokenizer is None or not params.skip_special_tokens:
            return params
        special = {
            token.content: token_id
            for token_id, token in self.tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content in params.stop
        }
        return dataclasses.replace(
            params,
            stop=[stop for stop in params.stop if stop not in special],
            stop_token_ids={*params.stop_token_ids, *special.values()},
        )

    def _requests(self, prompts: Any, sampling_params: Any, priority: Any) -> list[NewRequest]:
        """Check all prompts and parameters.  Returns a request for each prompt."""
        prompts, requests = list_prompts(prompts), []
        if sampling_params is None:
            sampling_params = self.default_sampling_params
        if not isinstance(sampling_params, SamplingParams | Sequence):
            raise ValueError(f"sampling_params={shown(sampling_params)}: needs SamplingParams")
        of_each = (
            _one_for_each("sampling_params", sampling_params, len(prompts)),
            _one_for_each("priority", priority, len(prompts)),
        )
        for i, (prompt, params, number) in enumerate(zip(prompts, *of_each, strict=True)):
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params[{i}]={shown(params)}: needs SamplingParams")
            try:
                text, tokens, salt = split_prompt(prompt, self.encode)
                if params.stop:
                    params = self._with_special_stops(params)
                keys: dict[str, Any] = {"priority": number, "cache_salt": salt}
                self.engine.check(tokens, params, **keys)
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from None
            requests.append(NewRequest(tokens, params, text, keys))
        return requests

    def _join_ranks(self, size: int, arguments: Mapping[str, Any]) -> Workers | None:
        """Join the tensor-parallel ranks.  Returns the workers if this process started ranks."""
        for name in ("num_q_heads", "num_kv_heads", "intermediate_size"):
            first = TensorParallel(0, size)
            first.share(getattr(self.config, name), name, repeat=name == "num_kv_heads")
        workers = None
        if size > 1 and (has_workers() or not is_distributed()):
            workers = start_workers(size, self.device, partial(_make_engine, dict(arguments)))
        self._tp = join_tensor_parallel(size, self.device)
        return workers

    def _load_model(
        self, asked: LLMOptions, folder: Path | None, backend: AttentionBackend, longest: int
    ) -> CausalLM:
        model = build_model(
            self.config, backend,
            dtype=self.dtype, device=self.device, tp=self._tp, max_positions=longest,
        )  # fmt: skip
        model.use_groups(_groups(asked, self.config))
        if folder is None or asked.random_weights:
            randomize_weights(model, seed=asked.seed, std=self.config.initializer_range)
            return model
        load_weights(model, folder)
        if asked.kv_cache_dtype is not None:
            load_kv_scales(model, folder)
        return model

    def _size_cache(
        self, asked: LLMOptions, longest: int, kv_dtype: torch.dtype
    ) -> tuple[int, int]:
        """Numbers of blocks on the device and, for swapping, in host memory; equal on all ranks."""
        num_blocks, num_host_blocks = asked.num_blocks, asked.num_host_blocks
        block_bytes = self._block_bytes = _block_bytes(asked, self.config, kv_dtype)
        if num_blocks is None and self.device.type == "cpu":
            num_blocks = self._num_blocks_in_host(block_bytes)
            if not num_blocks:
                raise ValueError(
                    f"block_size={asked.block_size}: a block needs {block_bytes:,} bytes, more "
                    f"than the KV cache gets of {available_host_bytes():,} available ones; give "
                    "num_blocks, or choose a smaller block"
                )
            of_longest = [-(-longest // asked.block_size)] * len(self.model.groups)
            num_blocks = min(num_blocks, asked.max_num_seqs * sum(of_longest))
        elif num_blocks is None:
            peak_bytes = profile_peak_bytes(
                self.model,
                num_tokens=asked.max_num_batched_tokens, num_seqs=asked.max_num_seqs,
                max_model_len=longest, block_size=asked.block_size, kv_dtype=kv_dtype,
            )  # fmt: skip
            fitting = num_gpu_blocks(
                total_bytes=torch.cuda.mem_get_info(self.device)[1],
                gpu_memory_utilization=asked.gpu_memory_utilization,
                peak_bytes=peak_bytes,
                block_bytes=block_bytes,
            )
            num_blocks = self._tp.min(fitting, self.device)
        if asked.preemption == "recompute":
            num_host_blocks = 0
        elif num_host_blocks is None:
            num_host_blocks = min(num_blocks, max(1, self._num_blocks_in_host(block_bytes)))
        return num_blocks, num_host_blocks

    def _num_blocks_in_host(self, block_bytes: int) -> int:
        share = int(HOST_KV_CACHE_SHARE * available_host_bytes()) // self._tp.size
        fitting = num_cpu_blocks(
            swap_space_bytes=min(HOST_KV_CACHE_BYTES, share), block_bytes=block_bytes
        )
        return self._tp.min(fitting, self.device)


def _groups(asked: LLMOptions, config: ModelConfig) -> tuple[Group, ...]:
    """The groups of layers that get block tables of their own."""
    if manager_class(asked.manager).can_group and asked.preemption != "swap":
        return config.groups
    return (Group(layers=tuple(range(config.num_layers))),)


def _block_bytes(asked: LLMOptions, config: ModelConfig, kv_dtype: torch.dtype) -> int:
    return config.kv_block_bytes(
        asked.block_size, kv_dtype, tensor_parallel_size=asked.tensor_parallel_size,
        num_layers=max(group.num_layers for group in _groups(asked, config)),
    )  # fmt: skip


def _check_tier(asked: LLMOptions, config: ModelConfig, kv_dtype: torch.dtype) -> int:
    """The number of blocks of the manager's tier in host memory.

    Raises the manager's errors, and ValueError if so much host memory is not available."""
    given: Mapping[str, Any] = asked.manager_options or {}
    num_blocks = at_least(0, "host_blocks", given.get("host_blocks", 0))
    options = {name: given[name] for name in TIER_OPTIONS if name in given}
    options["host_blocks"] = min(1, num_blocks)  # lists of all blocks may not fit in memory
    make_manager(
        asked.manager, num_blocks=1, block_size=asked.block_size,
        enable_prefix_caching=asked.enable_prefix_caching, **options,
    )  # fmt: skip
    if not num_blocks:
        return 0
    block_bytes = _block_bytes(asked, config, kv_dtype)
    needed = num_blocks * block_bytes * asked.tensor_parallel_size
    if needed > available_host_bytes():
        raise ValueError(
            f"manager_options: host_blocks={num_blocks} need {needed:,} bytes of host memory, "
            f"{available_host_bytes():,} are available"
        )
    return num_blocks


def _one_for_each(name: str, value: Any, count: int) -> Sequence[Any]:
    """One item for each of ``count`` prompts.  value: a sequence of items, or an item for all."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name}: {len(value)} for {count} prompts; needs one for all, or one for each"
        )
    return value


def _new_scheduler(
    asked: LLMOptions, config: ModelConfig, num_blocks: int, num_host_blocks: int, longest: int
) -> Scheduler:
    options: dict[str, Any] = dict(asked.manager_options or {})
    if asked.hash_algorithm is not None:
        options["hash_algorithm"] = asked.hash_algorithm
    groups = _groups(asked, config)
    if len(groups) > 1:
        options["groups"] = groups
    elif groups[0].window is not None:
        options["sliding_window"] = groups[0].window
    design = manager_class(asked.manager)
    if design.can_swap and num_host_blocks:
        options["num_cpu_blocks"], num_host_blocks = num_host_blocks, 0
    if design.reserves:
        longest_run = asked.block_size << max(0, num_blocks.bit_length() - 1)
        # The oracle's reservation: right for sequences that do not stop early.
        final_length = lambda seq: getattr(seq, "max_num_tokens", seq.num_tokens)  # noqa: E731
        options.setdefault("final_length", final_length)
        options.setdefault("max_model_len", asked.max_model_len or min(longest, longest_run))
    kv_cache = make_manager(
        asked.manager,
        num_blocks=num_blocks, block_size=asked.block_size, policy=asked.policy,
        enable_prefix_caching=asked.enable_prefix_caching, **options,
    )  # fmt: skip
    return Scheduler(
        kv_cache,
        max_num_seqs=asked.max_num_seqs, max_num_batched_tokens=asked.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        chunked_prefill=asked.enable_chunked_prefill,
        prefill_first=asked.scheduling == "prefill_first", policy=asked.scheduling_policy,
    )  # fmt: skip


def _use_graphs(asked: LLMOptions, backend: AttentionBackend, device: torch.device) -> bool:
    multiple = backend.captured_multiple
    can_capture = device.type == "cuda" and multiple > 0 and not asked.block_size % multiple
    if asked.cuda_graphs and not can_capture:
        raise ValueError(
            f"cuda_graphs=True: cannot capture attention_backend={backend.name!r} with "
            f"block_size={asked.block_size} on {device}"
        )
    return can_capture if asked.cuda_graphs is None else asked.cuda_graphs


def _fit_max_model_len(asked: int | None, longest: int, scheduler: Scheduler) -> int:
    """The longest sequence that the cache can hold; without chunked prefill also one step."""
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
    """The device to use.  The ranks on a machine use different GPUs."""
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
        torch.cuda.set_device(device)  # kernels run on the current device; it needs an index
    return device


def _dtype(
    dtype: torch.dtype | str | None, config: ModelConfig, device: torch.device
) -> torch.dtype:
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
    if not backend.has_fp8_cache:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r}: attention_backend={backend.name!r} has no fp8 "
            "cache; use 'triton' or 'torch'"
        )
    return torch.float8_e4m3fn


def _make_engine(arguments: dict[str, Any]) -> Any:
    """Make the engine of a worker rank."""
    return LLM(**arguments).engine
