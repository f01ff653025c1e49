"""How the tokens of a request are chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cache.checks import at_least


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        n: number of outputs of one prompt; they share its K/V.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only; 0 or -1 for all.
        top_p: among them, only the fewest whose probabilities sum up to top_p or more (nucleus
            sampling, Holtzman et al., 2020); 1 for all.  At least one token always remains.
        min_p: only tokens with at least this share of the largest probability; 0 for all.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        presence_penalty: subtracted once if the token is in the output.
        repetition_penalty: positive logits of tokens that the prompt or the output contains are
            divided by it, negative ones multiplied (Keskar et al., 2019); 1 for none.
        seed: a request with a seed gets the same tokens whatever else is in the batch.  Each of n
            outputs has its own noise.
        max_tokens: most tokens to generate; fewer if the model's context or the cache ends.
        min_tokens: nothing but max_tokens ends an output before it has this many tokens.
        stop: texts that end an output; its text ends before them, its tokens after.
        stop_token_ids: tokens that end an output, which includes them.
        skip_special_tokens: leave special tokens, such as the end-of-text token, out of the text.
        logprobs: return log p of each token and of this many of the likeliest tokens, before
            penalties and temperature.  None for none.
        ignore_eos: do not end at the model's end-of-text tokens.
        beam_width: number of beams of a beam search, which returns the n best; None samples.
        length_penalty: beams are ranked by sum(log p) / number of tokens ** length_penalty.

    Raises ValueError naming the argument for values outside these ranges.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | Collection[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, "n", self.n)
        at_least(1, "max_tokens", self.max_tokens)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, is_valid, what in _NEEDS:
            if not is_valid(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: needs {what}")
        if not (_is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens):
            raise ValueError(
                f"min_tokens={self.min_tokens!r}: needs an int from 0 to "
                f"max_tokens={self.max_tokens}"
            )
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        object.__setattr__(self, "stop", tuple(self.stop))
        if self.beam_width is not None:
            self._check_beam_search()

    def _check_beam_search(self) -> None:
        if not (_is_int(self.beam_width) and self.beam_width >= self.n):
            raise ValueError(
                f"beam_width={self.beam_width!r}: needs an int of at least n={self.n}, or None"
            )
        for name, idle in _IDLE_IN_BEAM_SEARCH.items():
            if getattr(self, name) not in idle:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: has no meaning for beam search "
                    f"(beam_width={self.beam_width}); leave it out"
                )

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the next token is always the likeliest by the model's logits."""
        return self.temperature == 0 and not self.min_tokens and not self.has_penalties

    @cached_property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of the next one."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the host must read the tokens of a step before it can schedule the next one."""
        return bool(
            self.n > 1
            or self.beam_width is not None
            or self.stop
            or self.logprobs is not None
            or self.min_tokens
            or self.has_penalties
        )


_IDLE_IN_BEAM_SEARCH = {
    "temperature": (0, 1),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "seed": (None,),
    "min_tokens": (0,),
    "stop": ((),),
    "logprobs": (None,),
}
"""Values that beam search accepts: it ranks by the model's own log p and samples nothing."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _are(items: object, is_valid: Callable[[Any], bool]) -> bool:
    is_collection = isinstance(items, Collection) and not isinstance(items, str | bytes)
    return is_collection and all(map(is_valid, items))


_PENALTY = (lambda v: _is_number(v) and abs(v) <= 2, "a number from -2 to 2")
_NEEDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "temperature",
        lambda v: _is_number(v) and 0 <= v < math.inf,
        "a finite number, 0 (greedy) or more",
    ),
    ("top_k", lambda v: _is_int(v) and v >= -1, "an int of at least 1, or 0 or -1 for all tokens"),
    ("top_p", lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and up to 1"),
    ("min_p", lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    ("frequency_penalty", *_PENALTY),
    ("presence_penalty", *_PENALTY),
    ("repetition_penalty", lambda v: _is_number(v) and 0 < v < math.inf, "a finite number above 0"),
    ("seed", lambda v: v is None or _is_int(v), "an int or None"),
    (
        "stop",
        lambda v: _are(v, lambda text: isinstance(text, str) and text),
        "a text, or a collection of texts, none of them empty",
    ),
    (
        "stop_token_ids",
        lambda v: _are(v, lambda token: _is_int(token) and token >= 0),
        "a collection of token ids",
    ),
    ("logprobs", lambda v: v is None or (_is_int(v) and v >= 0), "an int of at least 0, or None"),
    ("length_penalty", lambda v: _is_number(v) and abs(v) <= 100, "a number from -100 to 100"),
)
"""Fields, their checks, and what the error says they need."""
