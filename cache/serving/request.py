"""Requests and their sequences in the scheduler and the engine."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache.blocks.sequence import Sequence

if TYPE_CHECKING:
    import numpy as np

    from cache.serving.beam_search import BeamSearch
    from cache.serving.output_text import OutputText
    from cache.serving.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = enum.auto()
    """Holds no blocks.  K/V it had before a preemption are dropped or in host memory."""
    RUNNING = enum.auto()
    """Holds blocks."""
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """The last token is an end-of-text or stop token, or completes a stop string."""
    LENGTH = "length"
    """It reached max_tokens, or the longest sequence that model and cache allow."""
    ABORT = "abort"
    """Cancelled by the caller."""
    ERROR = "error"
    """Its own work raised an error, or its logits were NaN or infinite; see ``Request.error``."""


class ScheduledSequence(Sequence):
    """One output of a request: its tokens, and its state in the scheduler.

    ``keys``: options of ``Sequence``.

    Attributes:
        request: the request.
        index: which of its outputs.
        order: (priority, request, sequence); the lowest goes first wherever sequences compete.
        pending_row: row of its unknown token among the tokens of the last step, or None.
        block_rows: for the runner: a ``table_version`` and the block tables of that version.
        num_pending_forks: sequences that fork from this one when its prompt is computed.
        num_host_tokens: its first tokens whose K/V is swapped out, to ``host_blocks`` or, if this
            list is empty, to blocks of the manager.
        num_dropped_tokens: tokens whose K/V the last preemption dropped; 0 once computed again.
        cumulative_logprob: sum of log p over the generated tokens; only beam search keeps it.
        logprobs: log p of each generated token, if the request asks for them.
        text: its text, if the request follows it; None before the first token.
    """

    seq_id: int

    def __init__(
        self, seq_id: int, token_ids: Iterable[int], request: Request, index: int, **keys: Any
    ) -> None:
        super().__init__(seq_id, token_ids, **keys)
        self.request = request
        self.index = index
        self.order = (request.priority, request.request_id, seq_id)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.pending_row: int | None = None
        self.block_rows: tuple[int, np.ndarray | None] = (-1, None)
        self.num_pending_forks = 0
        self.host_blocks: list[int] = []
        self.num_host_tokens = 0
        self.num_dropped_tokens = 0
        self.cumulative_logprob = 0.0
        self.logprobs: list[dict[int, float]] = []
        self.text: OutputText | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def max_num_tokens(self) -> int:
        """Most tokens it may have, prompt included."""
        return self.num_prompt_tokens + self.request.max_tokens

    def append_unknown(self, pending_row: int) -> None:
        """Add a token that was sampled but not read yet."""
        self.append_token(0)
        self.num_unknown_tokens, self.pending_row = 1, pending_row

    def drop_unknown(self) -> None:
        """Remove the unknown token, if there is one."""
        if self.num_unknown_tokens:
            self.token_ids.pop()
            self.num_unknown_tokens, self.pending_row = 0, None

    def fork(self, seq_id: Any) -> ScheduledSequence:
        """A copy with the same tokens, in no queue and with nothing in host memory."""
        child = super().fork(seq_id)
        child.order = (*self.order[:2], seq_id)
        child.host_blocks, child.num_host_tokens = [], 0
        child.num_pending_forks = 0
        child.logprobs = self.logprobs[:]
        return child


@dataclass(slots=True)
class RequestStats:
    """Times and counts of a request.  Times are the engine's clock, in seconds."""

    arrival_time: float
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    """Most tokens to generate per output."""
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    """When it was finished or cancelled."""
    was_aborted: bool = False
    num_cached_tokens: int = 0
    """Tokens of the prompt whose K/V were in the cache when it was first scheduled."""
    num_preemptions: int = 0
    """How often one of its sequences lost its blocks to another one."""
    num_swapped_tokens: int = 0
    """Tokens whose K/V preemptions moved to host memory."""
    num_recomputed_tokens: int = 0
    """Tokens whose K/V preemptions dropped, and that were computed again."""
    num_output_tokens: int = 0
    """Over all outputs."""
    longest_output: int = 0
    """Tokens of the longest output."""

    @property
    def finished(self) -> bool:
        return self.finish_time is not None and not self.was_aborted

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None before it.

        If the request was cancelled before it, seconds until the cancellation: a lower bound.
        """
        first = self.finish_time if self.first_token_time is None else self.first_token_time
        return None if first is None else first - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token of the longest output after its first token.

        None unless the request is finished and has two tokens or more.
        """
        if self.finish_time is None or self.was_aborted or self.longest_output < 2:
            return None
        assert self.first_token_time is not None
        return (self.finish_time - self.first_token_time) / (self.longest_output - 1)

    @property
    def normalized_latency(self) -> float | None:
        """Seconds from arrival to the end per token of the longest output; None before the end.

        The latency of the PagedAttention paper.  For a cancelled request the tokens are
        ``max_tokens``: a lower bound.
        """
        if self.finish_time is None:
            return None
        tokens = self.max_tokens if self.was_aborted else self.longest_output
        return (self.finish_time - self.arrival_time) / tokens


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its parameters, and its sequences, at least one.

    max_tokens: maximum number of generated tokens: the parameter, or less if model or cache end.
    stop_token_ids: tokens that end an output.
    has_text: whether its tokens get their texts: for streams and stop strings.
    priority: requests of lower priority are served earlier.
    search: its beam search, or None.
    error: why it ended with FinishReason.ERROR.
    """

    request_id: int
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    stats: RequestStats
    has_text: bool = False
    priority: int = 0
    search: BeamSearch | None = None
    sequences: list[ScheduledSequence] = field(default_factory=list)
    error: str | None = None
    is_followed: bool = field(init=False)
    """Whether a token needs more than being appended."""

    def __post_init__(self) -> None:
        self.is_followed = self.has_text or self.params.logprobs is not None

    @property
    def prompt_token_ids(self) -> list[int]:
        seq = self.sequences[0]
        return seq.token_ids[: seq.num_prompt_tokens].tolist()

    @property
    def is_finished(self) -> bool:
        return all(seq.status is Status.FINISHED for seq in self.sequences)
