"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cache.checks import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        n: number of outputs of one prompt; they share its K/V.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: only the k most likely tokens are drawn from; 0 or -1 for all.
        top_p: of those, only the fewest whose probabilities sum up to top_p or more (nucleus
            sampling, Holtzman et al., 2020); 1 for all.  At least one token always remains.
        seed: a request with a seed gets the same tokens whatever else is in the batch.  Output i
            of n draws noise of its own.
        max_tokens: most tokens to generate; fewer where the model's context or the cache ends.
        stop_token_ids: tokens that end an output, which then includes them.
        ignore_eos: do not end at the model's end-of-text tokens.
        beam_width: number of beams of beam search, of which the n best are returned; None samples.
        length_penalty: beams are ranked by sum(log p) / number of tokens ** length_penalty.

    Raises ValueError naming the argument for values outside these ranges.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 64
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        at_least(1, "n", self.n)
        at_least(1, "max_tokens", self.max_tokens)
        for name, valid, what in (
            (
                "temperature",
                _is_number(self.temperature) and 0 <= self.temperature < float("inf"),
                "a finite number, 0 (greedy) or more",
            ),
            (
                "top_k",
                _is_int(self.top_k) and self.top_k >= -1,
                "an int of at least 1, or 0 or -1 for all tokens",
            ),
            (
                "top_p",
                _is_number(self.top_p) and 0 < self.top_p <= 1,
                "a number above 0 and up to 1",
            ),
            ("seed", self.seed is None or _is_int(self.seed), "an int or None"),
            (
                "stop_token_ids",
                isinstance(stops, Collection)
                and not isinstance(stops, str | bytes)
                and all(_is_int(token) and token >= 0 for token in stops),
                "a collection of token ids",
            ),
            (
                "length_penalty",
                _is_number(self.length_penalty) and abs(self.length_penalty) <= 100,
                "a number from -100 to 100",
            ),
            (
                "beam_width",
                self.beam_width is None or (_is_int(self.beam_width) and self.beam_width >= self.n),
                f"an int of at least n={self.n}, or None",
            ),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)!r}: needs {what}")
        object.__setattr__(self, "stop_token_ids", frozenset(stops))
        draws = self.temperature not in (0, 1) or self.top_k > 0 or self.top_p < 1
        if self.beam_width is not None and (draws or self.seed is not None):
            raise ValueError(
                f"beam_width={self.beam_width!r}: beam search draws nothing, so seed, temperature, "
                "top_k and top_p have no meaning; leave them out"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
