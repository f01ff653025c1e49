"""The command ``pagelab generate --prompt "..."``."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Literal

from cache import UnsupportedByDesign
from cache.serving.outputs import RequestOutput
from cache.serving.sampling_params import SamplingParams
from models.hub import default_model
from models.llm import LLM
from models.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Generate text with a Hugging Face checkpoint on a paged KV cache."""

    model: str | None = None
    """A checkpoint: folder, GGUF file, or name on the Hugging Face hub.  By default SmolLM2, which
    `make model` installs."""
    prompt: tuple[str, ...] = ()
    """A prompt; may be given several times."""
    prompt_ids: tuple[str, ...] = ()
    """A prompt as token ids, separated by commas; may be given several times."""
    chat: bool = False
    """Format each prompt as a user's message with the checkpoint's chat template."""
    max_tokens: int | None = None
    """By default from the checkpoint's generation_config.json, else 64.  The defaults of
    temperature, top-k, top-p, min-p and the repetition penalty are read from this file, too."""
    stop: tuple[str, ...] = ()
    """A text that ends an output; may be given several times."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    n: int = 1
    """Outputs per prompt."""
    beam_width: int | None = None
    """Number of beams of a beam search, which returns the n best.  By default it samples."""
    seed: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    device: str | None = None
    dtype: str | None = None
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] | None = None
    """Dtype of the KV cache; by default the model's dtype."""
    attention_backend: Literal["triton", "torch", "flash_attn"] | None = None
    manager: str = "vllm_v1"
    """A cache manager by name, or your own as file.py:Class."""
    policy: str = "lru"
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    prefix_caching: bool = True
    scheduling: Literal["mixed", "prefill_first"] = "mixed"
    preemption: Literal["recompute", "swap"] = "recompute"
    tensor_parallel_size: int = 1
    """Number of processes that share the model, each with its own GPU."""
    random_weights: bool = False
    """Use random weights instead of the checkpoint's weights."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    try:
        import tyro

        repeated = (tyro.conf.UseAppendAction,)
        args = tyro.cli(Arguments, prog="pagelab generate", args=arguments, config=repeated)
        options = {k: v for k, v in vars(args).items() if k not in ("prompt", "prompt_ids", "chat")}
        prompts: list[Prompt] = [*args.prompt, *map(_token_ids, args.prompt_ids)]
        if not prompts:
            raise ValueError("--prompt: needs at least one prompt")
        if args.chat and args.prompt_ids:
            raise ValueError("--chat: takes each --prompt as a message, and no --prompt-ids")
        options["model"] = default_model() if args.model is None else args.model
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        given = {name: options.pop(name) for name in names & options.keys()}
        given = {name: value for name, value in given.items() if value is not None}
        SamplingParams(**given)  # raises for bad values before the model is loaded
        llm = LLM(enable_prefix_caching=options.pop("prefix_caching"), **options)
        params = dataclasses.replace(llm.default_sampling_params, **given)
        if args.chat:
            chats = [[{"role": "user", "content": prompt}] for prompt in args.prompt]
            outputs = llm.chat(chats, params)
        else:
            outputs = llm.generate(prompts, params)
    except (ValueError, OSError, ImportError, UnsupportedByDesign) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if ":" not in args.manager:
            raise
        print(f"error: {args.manager}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for output in outputs:
        _print(output, params)
    return 0


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--prompt-ids {text!r}: needs ints separated by commas") from None


def _print(output: RequestOutput, params: SamplingParams) -> None:
    prompt = output.prompt if output.prompt is not None else output.prompt_token_ids
    print(f"prompt: {prompt}")
    if params.beam_width is not None:
        print(f"beam search: the best {params.n} of {params.beam_width} beams; --n returns more")
    for completion in output.outputs:
        text = completion.text if completion.text is not None else completion.token_ids
        print(f"output {completion.index} ({completion.finish_reason}): {text}")
    stats = output.stats
    first, per_token = stats.time_to_first_token, stats.time_per_output_token
    print(
        f"{len(output.prompt_token_ids)} prompt tokens, {stats.num_cached_tokens} of them cached; "
        f"{stats.num_output_tokens} tokens generated"
        + ("" if first is None else f"; first after {first * 1e3:.1f} ms")
        + ("" if per_token is None else f", then {per_token * 1e3:.2f} ms each")
    )


if __name__ == "__main__":
    sys.exit(main())
