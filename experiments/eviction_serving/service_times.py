"""Step times of the engine: the parameters of ``cache.ServiceModel``, measured."""

from __future__ import annotations

import functools
import statistics

from cache import ServiceModel
from cache.serving import open_loop
from experiments.load import engine_models

_LENGTHS = {"cpu": (16, 512), "cuda": (2_048, 8_192)}
"""Prompt lengths; the difference of their times gives the time of a prompt token.  On a GPU,
shorter prompts take as long as their launches."""
_PROMPT = 16
"""Prompt tokens of the decoding sequences."""
_BATCH = 16
"""Sequences of the larger decode step; its difference to one sequence gives the time of each."""
_REPETITIONS = 5
_BLOCK_SIZE = 16


@functools.lru_cache(maxsize=1)
def measure_service(model: str, *, threads: int) -> ServiceModel:
    """The service model of ``model`` (a shape of engine_models) on this machine; cached.

    From medians: a step of a long prompt against a shorter one, and a step that decodes 16
    sequences against one that decodes a single sequence.  Attention to long contexts is not
    modelled.  Measuring also warms up the process.
    """
    import torch

    torch.set_num_threads(threads)
    short, long = _LENGTHS["cuda" if torch.cuda.is_available() else "cpu"]
    most_tokens = max(_BATCH * (_PROMPT + _REPETITIONS + 2), long)
    llm = engine_models.make_llm(
        model,
        num_blocks=most_tokens // _BLOCK_SIZE + 2 * _BATCH,
        block_size=_BLOCK_SIZE,
        enable_prefix_caching=False,
    )

    def step_seconds(num_sequences: int, prompt_length: int, output_length: int) -> list[float]:
        prompts = [[1] * prompt_length] * num_sequences
        lengths = [output_length] * num_sequences
        run = open_loop.serve(llm.engine, prompts, lengths, [0.0] * num_sequences)
        return [step.seconds for step in run.steps]

    def prefill_seconds(length: int) -> float:
        return statistics.median(step_seconds(1, length, 1)[0] for _ in range(_REPETITIONS))

    def decode_seconds(num_sequences: int) -> float:
        return statistics.median(step_seconds(num_sequences, _PROMPT, _REPETITIONS + 2)[1:])

    prefill_seconds(long)
    decode_seconds(_BATCH)
    per_token = (prefill_seconds(long) - prefill_seconds(short)) / (long - short)
    single = decode_seconds(1)
    per_sequence = max(0.0, (decode_seconds(_BATCH) - single) / (_BATCH - 1))
    return ServiceModel(
        step_seconds=max(single - per_sequence, 1e-9),
        prefill_tokens_per_second=1 / max(per_token, 1e-9),
        decode_seconds_per_sequence=per_sequence,
    )
