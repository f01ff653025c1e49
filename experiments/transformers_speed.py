"""Prefill and decode of the engine beside Hugging Face transformers, on a CPU, with equal weights.

Both compute in fp32 on the same weights with the same number of threads and PyTorch's products;
transformers uses PyTorch's sdpa and its dynamic cache.  They take turns, each first in every other
repeat, so that a disturbance of the machine affects both.  ``pagelab_over_transformers`` is the
median speed-up over the repeats.  A batch of prompts of one length, which need no padding, is
decoded greedily: the time to the first token is prefill, the rest is decode.  Prefix caching is
off.  Both give the same tokens.  Ratios differ between makes of CPU, so each row names its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from experiments import style
from experiments.harness import Axis, Count, Experiment, Options, Unavailable, one_of
from experiments.harness.environment import cpu_model
from experiments.load import engine_models
from experiments.load.engine_models import SMOLLM2

if TYPE_CHECKING:
    from models import LLM

SYSTEMS = ("pagelab", "transformers")


@dataclass(frozen=True, kw_only=True)
class TransformersSpeed(Options):
    """The grid: batches x threads."""

    sequences: Axis[Count] = (1, 8)
    prompt_tokens: Axis[Count] = (128, 512)
    """Tokens of each prompt."""
    threads: Axis[Count] = (1, 2)
    model: Annotated[str, one_of(("tiny", "llama-100m", SMOLLM2))] = SMOLLM2
    """A Llama of load/engine_models.py, or the checkpoint of `make model`."""
    output_tokens: Count = 32
    repeats: Count = 8
    block_size: Count = 16


def run_cell(cell: TransformersSpeed) -> list[dict[str, Any]]:
    from kernels.testing.hugging_face import import_transformers

    try:
        transformers = import_transformers()
    except ImportError as error:
        raise Unavailable(str(error)) from error
    llm = engine_models.make_llm(
        cell.model,
        **cell.columns("block_size", "threads", "seed"),
        device="cpu",
        enable_prefix_caching=False,
        max_model_len=cell.prompt_tokens + cell.output_tokens,
        max_num_seqs=cell.sequences,
    )
    theirs = _with_weights_of(llm, transformers)
    rng = np.random.default_rng(cell.seed)
    serve = {"pagelab": partial(_ours, llm), "transformers": partial(_theirs, theirs)}
    times: dict[str, list[tuple[float, float]]] = {system: [] for system in SYSTEMS}
    same = True
    for repeat in range(cell.repeats + 1):  # the first one warms up
        size = (cell.sequences, cell.prompt_tokens)
        prompts = rng.integers(llm.config.vocab_size, size=size).tolist()
        tokens = {}
        for system in SYSTEMS[:: 1 if repeat % 2 else -1]:
            tokens[system], *seconds = serve[system](prompts, cell.output_tokens)
            if repeat:
                times[system].append(tuple(seconds))
        same &= tokens["pagelab"] == tokens["transformers"]
    rows = []
    for phase, count in enumerate((cell.prompt_tokens, cell.output_tokens - 1)):
        rates = {
            system: cell.sequences * count / np.array(times[system])[:, phase] for system in SYSTEMS
        }
        for system in SYSTEMS:
            rows.append(
                {
                    **cell.columns("model", "threads", "output_tokens", "block_size", "repeats"),
                    "transformers_version": transformers.__version__,
                    "cpu": cpu_model(),
                    "phase": ("prefill", "decode")[phase],
                    **cell.columns("sequences", "prompt_tokens"),
                    "system": system,
                    "tokens_per_s": float(np.median(rates[system])),
                    "lowest_tokens_per_s": float(rates[system].min()),
                    "highest_tokens_per_s": float(rates[system].max()),
                    "pagelab_over_transformers": float(
                        np.median(rates["pagelab"] / rates["transformers"])
                    ),
                    "same_tokens": same,
                }
            )
    return rows


def _with_weights_of(llm: LLM, transformers):
    """A transformers model that reads the same tensors."""
    import torch

    from models.weights import checkpoint_tensors

    config, sizes = llm.config, {}
    for theirs in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps"):
        sizes[theirs] = getattr(config, theirs)
    fields = transformers.LlamaConfig(
        **sizes,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_q_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.ropes[0].theta},
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(fields, attn_implementation="sdpa")
    weights = {name: part.target for name, part in checkpoint_tensors(llm.model).items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(fields)  # has buffers of its own
    return model.eval()


def _ours(llm, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float, float]:
    """Tokens, seconds to the first token of each sequence, and seconds of the rest."""
    from models import SamplingParams, TokenOutput

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    tokens: dict[int, list[int]] = {}
    started, first = time.perf_counter(), 0.0
    for event in llm.stream(prompts, params):
        if isinstance(event, TokenOutput):
            tokens.setdefault(event.request_id, []).append(event.token_id)
            if not first and len(tokens) == len(prompts):
                first = time.perf_counter()
    return [tokens[key] for key in sorted(tokens)], first - started, time.perf_counter() - first


def _theirs(model, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float, float]:
    import torch
    from transformers import DynamicCache

    cache, tokens, times = DynamicCache(config=model.config), [], [time.perf_counter()]
    last = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(last, past_key_values=cache, logits_to_keep=1).logits
            last = logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens.append(last)
            last.tolist()
            times.append(time.perf_counter())
    return torch.cat(tokens, dim=1).tolist(), times[1] - times[0], times[-1] - times[1]


_LOOKS = {"pagelab": style.bar(style.BLUE), "transformers": style.bar(style.ORANGE, "////")}


def _draw(rows: style.DataFrame) -> style.Figure:
    """A panel per phase and number of threads, a group of bars per batch, with error bars to the
    extremes."""
    panels = list(rows.groupby(["threads", "phase"], sort=False))
    figure, axes, _ = style.panel_grid(len(panels), height=1.9, width=2.8, columns=2)
    for axis, ((threads, phase), of_panel) in zip(axes, panels, strict=True):
        table = of_panel.pivot(index=["sequences", "prompt_tokens"], columns="system")
        rates = table["tokens_per_s"]
        errors = rates - table["lowest_tokens_per_s"], table["highest_tokens_per_s"] - rates
        style.bars(axis, rates, _LOOKS, errors=errors)
        axis.set_xticks(range(len(rates)), [f"{n} x {length}" for n, length in rates.index])
        axis.set(
            title=f"{phase}, threads: {threads}", xlabel="sequences x prompt tokens", ylim=(0, None)
        )
    axes[0].set_ylabel(f"tokens per second ({rows['model'].iloc[0]})")
    axes[-1].set_xlabel(f"{axes[-1].get_xlabel()}\n{', '.join(rows['cpu'].unique())}")
    return style.shared_legend(figure, columns=2)


EXPERIMENT = Experiment(
    name="transformers_speed",
    figure="prefill and decode on a CPU beside Hugging Face transformers",
    options=TransformersSpeed(),
    quick=TransformersSpeed(model="tiny", sequences=(1, 8), prompt_tokens=(64,), repeats=3),
    run_cell=run_cell,
    plot=style.plotter({"transformers_speed": _draw}),
    timed=True,
)
