"""Next tokens from logits, for a batch of requests with sampling parameters of their own.

A token is drawn by the Gumbel-max trick: argmax(logits / temperature + Gumbel noise) is a sample of
softmax(logits / temperature).  It needs no normalisation and no cumulative sum, and the noise of a
row does not depend on the other rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from cache.serving.request import ScheduledSequence
from cache.serving.sampling_params import SamplingParams


def noise_seed(seed: int, sample: int, position: int) -> int:
    """Seed of the noise for output token ``position`` of output ``sample`` of a seeded request.

    Nothing else enters, so a request that was preempted, or ran in another batch, draws the same.
    32 bits, since a CPU generator uses no more of its seed.
    """
    digest = hashlib.blake2b(f"{seed} {sample} {position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def mask_top_k_top_p(
    logits: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None
) -> torch.Tensor:
    """Set to -inf the logits of all tokens but those that top-k and then top-p leave.

    Args:
        logits: (num_rows, vocab_size) floating point, already divided by the temperature.
        top_ks: (num_rows,) int64, vocab_size for all; None if all rows keep all.
        top_ps: (num_rows,) in logits' dtype; None if all rows keep all.

    Exactly min(k, vocab_size) tokens remain after top-k; among equal logits the lower ids do.
    Returns a new tensor.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if top_ks is not None:
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        dropped |= ranks >= top_ks[:, None]
    if top_ps is not None:
        probs = ordered.masked_fill(dropped, -torch.inf).softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # of all likelier tokens; 0 for the first
        dropped |= before >= top_ps[:, None]
        dropped[:, 0] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


class Sampler:
    """Draws next tokens on the device of the logits.

    Args:
        seed: of the noise of requests without a seed of their own; None for an arbitrary one.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._shared = torch.Generator(device)
        self._own = torch.Generator(device)
        if seed is None:
            self._shared.seed()
        else:
            self._shared.manual_seed(noise_seed(seed, -1, -1))

    def draw(
        self, logits: torch.Tensor, rows: list[int], sequences: Sequence[ScheduledSequence]
    ) -> list[int]:
        """A next token for each sequence, from its row of ``logits``, (num_rows, vocab_size).

        Sequences of a request with a seed draw noise that depends on the seed, on which output
        they are and on how many tokens they have, and on nothing else.

        Raises FloatingPointError, naming the request, where a row has a NaN or an infinite largest
        logit.
        """
        if rows != list(range(len(logits))):
            logits = logits[rows]
        logits = _with_penalties(logits, sequences)
        params = [seq.request.params for seq in sequences]
        seeds = [
            None if p.seed is None else noise_seed(p.seed, seq.index, seq.num_output_tokens)
            for p, seq in zip(params, sequences, strict=True)
        ]
        chosen = self(logits, params, seeds)
        # argmax prefers a NaN; one answer for both questions, since each waits for the device
        is_sound = logits.gather(-1, chosen[:, None]).isfinite()[:, 0]
        tokens = torch.where(is_sound, chosen, -1).tolist()
        for seq, token in zip(sequences, tokens, strict=True):
            if token < 0:
                raise _not_finite(seq)
        return tokens

    def likeliest(
        self, logits: torch.Tensor, row: int, seq: ScheduledSequence, count: int
    ) -> list[tuple[float, int]]:
        """The ``count`` likeliest next tokens of a sequence (all, if there are fewer), the
        likeliest first, as (log p, token).  Raises FloatingPointError as ``draw`` does."""
        logprobs = logits[row].float().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(count, len(logprobs)))
        if not values[0].isfinite():
            raise _not_finite(seq)
        return list(zip(values.tolist(), tokens.tolist(), strict=True))

    def logprobs(self, logits: torch.Tensor, row: int, token: int, count: int) -> dict[int, float]:
        """log p of a token and of the ``count`` likeliest ones (all, if there are fewer)."""
        logprobs = logits[row].float().log_softmax(dim=-1)
        values, tokens = logprobs.topk(min(count, len(logprobs)))
        likeliest = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        return likeliest | {token: logprobs[token].item()}

    def __call__(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        noise_seeds: Sequence[int | None],
    ) -> torch.Tensor:
        """Choose a token for each row.

        Args:
            logits: (num_rows, vocab_size), any floating-point dtype.
            params: of the request of each row.
            noise_seeds: ``noise_seed(...)`` for rows of seeded requests, None for others.

        Returns (num_rows,) int64.
        """
        if all(p.temperature == 0 for p in params):
            return logits.argmax(dim=-1)
        greedy = logits.argmax(dim=-1) if any(p.temperature == 0 for p in params) else None
        device, vocab_size = logits.device, logits.shape[-1]
        # What fp32 holds, and logits divided by it: else the largest may all become inf, or NaN.
        temperatures = [
            min(max(p.temperature, 1e-30), 1e30) if p.temperature else 1.0 for p in params
        ]
        scores = logits.float() / torch.tensor(temperatures, device=device)[:, None]

        if any(p.min_p > 0 for p in params):
            shares = torch.tensor([p.min_p for p in params], device=device)
            least = scores.amax(dim=-1, keepdim=True) + shares.log()[:, None]
            scores = scores.masked_fill(scores < least, -torch.inf)
        top_ks = top_ps = None
        if any(0 < p.top_k < vocab_size for p in params):
            limits = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
            top_ks = torch.tensor(limits, device=device)
        if any(p.top_p < 1 for p in params):
            # Above 1 nothing is dropped, even where rounding lets the sum reach 1 early.
            top_ps = torch.tensor([p.top_p if p.top_p < 1 else 2.0 for p in params], device=device)
        if top_ks is not None or top_ps is not None:
            scores = mask_top_k_top_p(scores, top_ks, top_ps)

        tokens = (scores + self._gumbel(scores, noise_seeds)).argmax(dim=-1)
        if greedy is not None:
            is_greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
            tokens = torch.where(is_greedy, greedy, tokens)
        return tokens

    def _gumbel(self, like: torch.Tensor, noise_seeds: Sequence[int | None]) -> torch.Tensor:
        """Standard Gumbel noise, -log of an exponential variable."""
        noise = torch.empty_like(like)
        if any(seed is None for seed in noise_seeds):
            noise.exponential_(generator=self._shared)
        for row, seed in enumerate(noise_seeds):
            if seed is not None:
                noise[row].exponential_(generator=self._own.manual_seed(seed))
        tiny = torch.finfo(noise.dtype).tiny  # an exponential variable may round to 0
        return noise.clamp_(min=tiny).log_().neg_()


def _with_penalties(logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> torch.Tensor:
    """Logits of each sequence's next token after the penalties of its request, and without tokens
    that would end it too early; a new tensor where anything changes."""
    changed = [
        row
        for row, seq in enumerate(sequences)
        if seq.request.params.changes_logits(seq.num_output_tokens)
    ]
    if not changed:
        return logits
    logits = logits.to(torch.float32, copy=True)
    for row in changed:
        seq, scores = sequences[row], logits[row]
        params = seq.request.params
        tokens = torch.tensor(seq.token_ids, dtype=torch.int64, device=logits.device)
        if params.repetition_penalty != 1:
            penalty, old = params.repetition_penalty, scores[tokens]
            scores[tokens] = torch.where(old > 0, old / penalty, old * penalty)
        counts = tokens[seq.num_prompt_tokens :].bincount(minlength=len(scores))
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if seq.num_output_tokens < params.min_tokens:
            stops = [token for token in seq.request.stop_token_ids if token < len(scores)]
            scores[stops] = -torch.inf
    return logits


def _not_finite(seq: ScheduledSequence) -> FloatingPointError:
    return FloatingPointError(
        f"request {seq.request.request_id}: the logits after its {len(seq.token_ids)} tokens are "
        "NaN or infinite; the weights are damaged, or too large for the dtype"
    )
