"""Dataclasses of options whose errors say what to write instead of an unknown option."""

from typing import Any, Self

from cache.retired import advice

_HERE: dict[str, str | None] = {
    "kvcache_block_size": "block_size",
    "num_kvcache_blocks": "num_blocks", "num_gpu_blocks_override": "num_blocks",
    "swap_space": "num_host_blocks with preemption='swap'", "preemption_mode": "preemption",
    "kv_offloading_size": "manager_options={'host_blocks': ...}",
    "kv_transfer_config": "manager_options={'host_blocks': ...}",
    "prefix_caching_hash_algo": "hash_algorithm", "use_v2_block_manager": "manager",
    "async_scheduling": "overlap", "compilation_config": "cuda_graphs",
    "revision": "model='NAME@REVISION'", "load_format": "random_weights",
    "eos": "stop_token_ids", "allowed_token_ids": "logit_bias, with -inf for all other tokens",
    "use_beam_search": "beam_width", "num_beams": "beam_width", "num_return_sequences": "n",
    "best_of": "n with logprobs=0, and rank the outputs by cumulative_logprob",
    "max_new_tokens": "max_tokens", "do_sample": "temperature", "output_kind": "LLM.stream",
    "chat_template": "LLM.chat(..., chat_template=...)",
    "bad_words": "logit_bias with -inf for single tokens",
} | dict.fromkeys((
    "quantization", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code",
    "download_dir", "hf_config", "hf_overrides", "cpu_offload_gb", "pipeline_parallel_size",
    "data_parallel_size", "distributed_executor_backend", "disable_log_stats", "enable_lora",
    "limit_mm_per_prompt", "speculative_config", "rope_scaling", "guided_decoding",
    "structured_outputs", "logits_processors", "prompt_logprobs", "hf_token", "task",
    "tokenizer_revision", "max_seq_len_to_capture", "enable_sleep_mode", "calculate_kv_scales",
    "max_logprobs",
    "truncate_prompt_tokens", "include_stop_str_in_output", "detokenize", "early_stopping",
    "spaces_between_special_tokens", "extra_args",
))  # fmt: skip
"""Options of vLLM, nano-vLLM and transformers: what to use here, or None if nothing does it."""


class UserOptions:
    """Base of a dataclass of options.  Its constructor raises TypeError for an unknown option.

    The error of an option of vLLM or nano-vLLM says what to use here, or that there is nothing.
    """

    __dataclass_fields__: dict[str, Any]

    def __new__(cls, *args: object, **options: object) -> Self:
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise TypeError(f"{_shown(cls)} has no option {name}; {cls._advice(name)}")
        return super().__new__(cls)

    @classmethod
    def _advice(cls, name: str) -> str:
        for other in UserOptions.__subclasses__():
            if name in other.__dataclass_fields__:
                return f"{_shown(other)} has it"
        if name in _HERE:
            here = _HERE[name]
            return f"use {here}" if here else "no option does the same, so leave it out"
        if line := advice(f"{name}="):
            return line
        from difflib import get_close_matches  # takes milliseconds, and only errors need it

        known = list(cls.__dataclass_fields__)
        nearest = "".join(f"did you mean {match}? " for match in get_close_matches(name, known, 1))
        return f"{nearest}choose from {', '.join(known)}"


def _shown(options: type[UserOptions]) -> str:
    return options.__name__.removesuffix("Options")
