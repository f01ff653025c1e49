"""How the tokens of a request are chosen, and when it ends."""

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Real
from typing import Any

from cache.blocks.session_hint import SessionHint
from cache.checks import as_int, shown, true_or_false
from cache.options import UserOptions

MAX_N = 16_384
"""Most outputs of a request, as in vLLM: each takes a place in the waiting queue."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(UserOptions):
    """Sampling parameters of one request.

    Attributes:
        n: number of outputs of one prompt, at most MAX_N; they share its K/V.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only; 0 or -1 for all.
        top_p: among them, only the fewest whose probabilities sum up to top_p or more (nucleus
            sampling, Holtzman et al., 2020); 1 for all.  At least one token always remains.
        min_p: only tokens with at least this share of the largest probability; 0 for all.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        presence_penalty: subtracted once if the token is in the output.
        repetition_penalty: positive logits of tokens that the prompt or the output contains are
            divided by it, negative ones multiplied (Keskar et al., 2019); 1 for none.
        logit_bias: numbers that are added to the logits of tokens, by token id; -inf excludes a
            token.
        seed: an int of 64 bits.  A request with a seed gets the same tokens whatever else is in the
            batch.  Each of n outputs has its own noise.
        max_tokens: most tokens to generate; fewer if the model's context or the cache ends.  None:
            as many as these allow.
        min_tokens: nothing but max_tokens ends an output before it has this many tokens.
        stop: texts that end an output; its text ends before them, its tokens after.
        stop_token_ids: tokens that end an output, which includes them.
        skip_special_tokens: leave special tokens, such as the end-of-text token, out of the text.
        logprobs: return log p of each token and of this many of the likeliest tokens, before
            penalties and temperature.  None for none.
        ignore_eos: do not end at the model's end-of-text tokens.
        skip_reading_prefix_cache: compute the whole prompt, although the cache may hold a part.
            Other requests find its blocks.
        beam_width: number of beams of a beam search, which returns the n best: without n, the best
            beam alone.  None: no search, sampling.
        length_penalty: beams are ranked by sum(log p) / number of tokens ** length_penalty.
        session: hint for the eviction policy about the session of the request.  A plain id, a text
            or an int, is stored as SessionHint(id).  None: the request has no session.

    Raises ValueError naming the argument for values outside these ranges, and TypeError for an
    unknown argument.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | Collection[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    skip_reading_prefix_cache: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    session: SessionHint | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, (convert, is_valid, needs) in _FIELDS.items():
            given = getattr(self, name)
            try:
                value = convert(given)
                if not is_valid(value):
                    raise ValueError
            except Exception:  # iterators and foreign numbers raise any
                raise ValueError(f"{name}={shown(given)}: needs {needs}") from None
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={shown(self.min_tokens)}: needs an int from 0 to "
                f"max_tokens={shown(self.max_tokens)}"
            )
        if self.beam_width is not None:
            self._check_beam_search(self.beam_width)

    def _check_beam_search(self, width: int) -> None:
        if width < self.n:
            raise ValueError(
                f"beam_width={shown(width)}: needs an int of at least n={self.n}, or None"
            )
        for name, idle in _IDLE_IN_BEAM_SEARCH.items():
            if getattr(self, name) not in idle:
                raise ValueError(
                    f"{name}={shown(getattr(self, name))}: has no meaning for beam search "
                    f"(beam_width={shown(width)}); leave it out"
                )

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the next token is always the likeliest by the model's logits."""
        changes = self.min_tokens or self.logit_bias or self.has_penalties
        return self.temperature == 0 and not changes

    @cached_property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of the next one."""
        others = self.frequency_penalty or self.presence_penalty
        return bool(self.repetition_penalty != 1 or others)

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the host must read the tokens of a step before it can schedule the next one."""
        is_forked = self.n > 1 or self.beam_width is not None
        is_read = self.stop or self.logprobs is not None
        return bool(is_forked or is_read or self.min_tokens or self.has_penalties)


_IDLE_IN_BEAM_SEARCH = {
    "temperature": (0, 1), "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "min_tokens": (0,),
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": (None,), "seed": (None,), "stop": ((),), "logprobs": (None,),
}  # fmt: skip
"""Values that beam search accepts: it ranks by the model's own log p and samples nothing."""


_int = partial(as_int, "")
"""An int, also from NumPy.  Raises ValueError for any other value."""


def _int_or_none(value: Any) -> int | None:
    return None if value is None else _int(value)


def _number(value: Any) -> float:
    """The nearest finite float of a real number, or infinity.  Else raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    try:
        return float(value)
    except OverflowError:  # of an int
        return -sys.float_info.max if value < 0 else sys.float_info.max


def _items(value: object) -> tuple:
    if value is None:
        return ()
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(value)


_PENALTY = _number, lambda v: abs(v) <= 2, "a number from -2 to 2"
_FLAG = partial(true_or_false, ""), lambda v: True, "True or False"
_FIELDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool], str]] = {
    "n": (_int, lambda v: 1 <= v <= MAX_N, f"an int from 1 to {MAX_N:,}"),
    "temperature": (
        _number, lambda v: 0 <= v < math.inf, "a finite number, 0 (greedy) or more",
    ),
    "top_k": (_int, lambda v: v >= -1, "an int of at least 1, or 0 or -1 for all tokens"),
    "top_p": (_number, lambda v: 0 < v <= 1, "a number above 0 and up to 1"),
    "min_p": (_number, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "repetition_penalty": (_number, lambda v: 0 < v < math.inf, "a finite number above 0"),
    "seed": (
        _int_or_none, lambda v: v is None or -(2**63) <= v < 2**64, "an int of 64 bits, or None",
    ),
    "logit_bias": (
        lambda v: {_int(token): _number(bias) for token, bias in dict(v or ()).items()} or None,
        lambda v: v is None or (min(v) >= 0 and all(bias <= 1e38 for bias in v.values())),
        "a mapping of token ids to numbers up to 1e38; -inf excludes a token",
    ),
    "max_tokens": (
        _int_or_none,
        lambda v: v is None or 1 <= v < 2**63,
        "an int of at least 1, and of 64 bits, or None",
    ),
    "min_tokens": (_int, lambda v: v >= 0, "an int of at least 0"),
    "stop": (
        _items,
        lambda v: all(isinstance(text, str) and text for text in v),
        "a text, or a collection of texts, none of them empty",
    ),
    "stop_token_ids": (
        lambda v: frozenset(map(_int, _items(v))),
        lambda v: min(v, default=0) >= 0,
        "a collection of token ids",
    ),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "logprobs": (_int_or_none, lambda v: v is None or v >= 0, "an int of at least 0, or None"),
    "skip_reading_prefix_cache": _FLAG,
    "beam_width": (
        _int_or_none, lambda v: v is None or v >= 1, "an int of at least 1, or None"
    ),
    "length_penalty": (_number, lambda v: abs(v) <= 100, "a number from -100 to 100"),
    "session": (
        lambda v: v if v is None or isinstance(v, SessionHint) else SessionHint(v),
        lambda v: True, "a SessionHint, None, or a session's id: a text or an int below 2**53",
    ),
}  # fmt: skip
"""By field: its conversion, a test of the value, and the words of the error for a bad one."""
