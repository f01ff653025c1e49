"""The outputs of a request."""

from dataclasses import dataclass
from typing import Any

from cache.serving.request import FinishReason, RequestStats


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the outputs of a request."""

    index: int
    token_ids: list[int]
    """Generated tokens, including the one that ended the output."""
    finish_reason: FinishReason
    text: str | None = None
    """Without special tokens and the token that ended it, up to a stop string.  None if the model
    has no tokenizer."""
    cumulative_logprob: float | None = None
    """Sum of log p of the tokens; for beam search and for requests with logprobs."""
    logprobs: list[dict[int, float]] | None = None
    """For each token, log p of itself and of the likeliest tokens; for requests with logprobs."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of a prompt; for beam search the best first."""

    request_id: int
    prompt: str | None
    """None if the prompt was given as tokens."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    error: str | None = None
    """Why it ended with FinishReason.ERROR."""

    def __getitem__(self, name: str) -> Any:
        """A field of the first output, such as ``output["text"]`` as in nano-vLLM."""
        return getattr(self.outputs[0], name)


@dataclass(slots=True)
class TokenOutput:
    """A new token of an output, as streamed."""

    request_id: int
    index: int
    """Which of the request's outputs."""
    token_id: int
    finish_reason: FinishReason | None
    """None while more tokens follow."""
    text: str | None = None
    """Text that it settles; empty until a character is complete, and for special tokens.  None if
    the model has no tokenizer.  The outputs of a cancelled request may have more text."""
    logprobs: dict[int, float] | None = None
    """log p of this token and of the likeliest tokens; for requests with logprobs."""
