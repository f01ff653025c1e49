"""Next tokens from logits, for a batch of requests with different sampling parameters.

``kernels.sample_tokens`` or its PyTorch reference samples the tokens, with the same results.
Penalties and logprobs are computed here.
"""

import hashlib
import random
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

import kernels
from cache.serving.request import ScheduledSequence
from cache.serving.sampling_params import SamplingParams
from kernels import reference
from models.uploads import upload

_SMALL_TEMPERATURE = 0.01


def noise_seed(seed: int, sample: int, position: int) -> int:
    """63-bit noise seed for token ``position`` of output ``sample`` of a request with ``seed``.

    So preemption and the rest of the batch do not change the samples of a seeded request.
    """
    digest = hashlib.blake2b(f"{seed} {sample} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Drawn:
    """Sampled tokens that are being copied to the host.

    Attributes:
        tokens: (num_rows,) int64 on the device.  -1: the row of logits is not finite.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._on_host, self._arrived = tokens, None
        if tokens.is_cuda:
            # PyTorch allocates the copy in pinned memory and caches this memory.
            self._on_host = tokens.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        """Wait for the tokens, but not for later work on the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host.tolist()


class Sampler:
    """Samples next tokens on the device of the logits.

    Args:
        seed: seed of the noise for requests without a seed of their own.  None: a random seed.
        use_kernels: sample with the Triton kernel, else with its PyTorch reference.
    """

    def __init__(
        self, device: torch.device, seed: int | None = None, *, use_kernels: bool = False
    ) -> None:
        self._sample_tokens = (kernels if use_kernels else reference).sample_tokens
        self._device, self._shared = device, random.Random(seed)

    def draw(
        self, logits: Tensor, rows: list[int], sequences: Sequence[ScheduledSequence]
    ) -> Drawn:
        """Sample a next token for each sequence, without waiting for the tokens.

        logits: (num_rows, vocab_size).  rows: row of each sequence.  The token is -1 if the row
            has a NaN or its largest logit is infinite.

        The noise of a seeded request depends on its seed, the output's index and length only."""
        if rows != list(range(len(logits))):
            logits = logits[upload(self._device, np.array(rows))[0]]
        params = [seq.request.params for seq in sequences]
        if all(map(attrgetter("is_greedy"), params)):
            return Drawn(self._sample_tokens(logits))
        logits = _with_penalties(logits, params, sequences)
        seeds = [
            None if p.seed is None else noise_seed(p.seed, seq.index, seq.num_output_tokens)
            for p, seq in zip(params, sequences, strict=True)
        ]
        return Drawn(self(logits, params, seeds))

    def topk_logprobs(
        self, logits: Tensor, row: int, seq: ScheduledSequence, count: int
    ) -> list[tuple[float, int]]:
        """The ``count`` most likely next tokens of a sequence: (log p, token), in descending order.
        Empty if the row has a NaN or its largest logit is infinite."""
        logprobs = logits[row].float().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(count, len(logprobs)))
        if not values[0].isfinite():
            return []
        return list(zip(values.tolist(), tokens.tolist(), strict=True))

    def logprobs(self, logits: Tensor, row: int, token: int, count: int) -> dict[int, float]:
        """log p of ``token`` and of the ``count`` most likely tokens, by token."""
        logprobs = logits[row].float().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(count, len(logprobs)))
        likeliest = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        return likeliest | {token: logprobs[token].item()}

    def __call__(
        self, logits: Tensor, params: Sequence[SamplingParams], noise_seeds: Sequence[int | None]
    ) -> Tensor:
        """Choose a token for each row.

        Args:
            logits: (num_rows, vocab_size), any floating-point dtype.
            params: sampling parameters of each row.
            noise_seeds: ``noise_seed(...)`` for rows of seeded requests, else None.

        Returns (num_rows,) int64; -1 if a row has a NaN or its largest logit is infinite.
        """
        seeds = [self._shared.getrandbits(63) if s is None else s for s in noise_seeds]
        # Clamped to the range of fp32 and of the noise.  At 1e-30 only the largest logits count.
        temperatures = [
            min(max(p.temperature, 1e-30), 1e29) if p.temperature else 0 for p in params
        ]
        small = [row for row, t in enumerate(temperatures) if 0 < t < _SMALL_TEMPERATURE]
        if small:  # noise far below a logit would be rounded away
            logits = logits.to(torch.float32, copy=True)
            logits[small] -= logits[small].amax(dim=-1, keepdim=True)
        arrays: dict[str, np.ndarray] = {
            "noise_seeds": np.array(seeds, dtype=np.int64),
            "temperatures": np.array(temperatures, dtype=np.float32),
        }
        if any(p.min_p > 0 for p in params):
            arrays["min_ps"] = np.array([p.min_p for p in params], dtype=np.float32)
        vocab_size = logits.shape[-1]
        if any(0 < p.top_k < vocab_size for p in params):
            limits = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
            arrays["top_ks"] = np.array(limits, dtype=np.int64)
        if any(p.top_p < 1 for p in params):
            arrays["top_ps"] = np.array([p.top_p for p in params], dtype=np.float32)
        given = dict(zip(arrays, upload(self._device, *arrays.values()), strict=True))
        return self._sample_tokens(logits, **given)


def _with_penalties(
    logits: Tensor, params: list[SamplingParams], sequences: Sequence[ScheduledSequence]
) -> Tensor:
    """Apply biases, then penalties as in vLLM, and exclude stop tokens before min_tokens.

    Does not mutate ``logits``."""
    changed = [
        row
        for row, p in enumerate(params)
        if p.has_penalties or p.logit_bias or p.min_tokens > sequences[row].num_output_tokens
    ]
    if not changed:
        return logits
    logits = logits.to(torch.float32, copy=True)
    for row in changed:
        seq, p, scores = sequences[row], params[row], logits[row]
        if p.logit_bias:
            scores[[*p.logit_bias]] += scores.new_tensor([*p.logit_bias.values()])
        tokens = torch.tensor(seq.token_ids, dtype=torch.int64, device=logits.device)
        if p.repetition_penalty != 1:
            penalty, old = p.repetition_penalty, scores[tokens]
            scores[tokens] = torch.where(old > 0, old / penalty, old * penalty)
        counts = tokens[seq.num_prompt_tokens :].bincount(minlength=len(scores))
        scores -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
        if seq.num_output_tokens < p.min_tokens:
            stops = [token for token in seq.request.stop_token_ids if token < len(scores)]
            scores[stops] = -torch.inf
    return logits
