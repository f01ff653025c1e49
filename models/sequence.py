"""Requests and their sequences, as the scheduler and the engine see them."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

import cache.sequence
from models.sampler import noise_seed
from models.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = enum.auto()
    """Holds no blocks; its K/V, if it had any, are gone, or in host memory."""
    RUNNING = enum.auto()
    """Holds blocks."""
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """The last token is an end-of-text or stop token."""
    LENGTH = "length"
    """max_tokens, or the longest sequence that model and cache allow, was reached."""
    ABORT = "abort"
    """Cancelled by the caller."""


class Sequence(cache.sequence.Sequence):
    """One output of a request: its tokens, its state, and what a swap left in host memory.

    ``num_computed_tokens``, kept by the manager, counts the tokens whose K/V are in the
    cache, or are being computed by the step that is scheduled.

    Attributes:
        request: what it is an output of.
        index: which output.
        order: place in the line; lower goes first, wherever sequences compete.
        block_row: the block table as the runner last saw it; None if it may have changed since.
        num_pending_forks: further sequences that fork from this one when its prompt is computed.
        is_swapped_by_manager: the manager, whose design can do so, has swapped it out.
        host_blocks: else the blocks of host memory that hold the K/V of its first
            ``num_host_tokens`` tokens.
        cumulative_logprob: sum of log p over the generated tokens; kept by beam search only.
    """

    def __init__(
        self,
        seq_id: int,
        token_ids: Items[int],
        request: Request,
        index: int,
    ) -> None:
        super().__init__(seq_id, token_ids)
        self.request = request
        self.index = index
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.block_row: np.ndarray | None = None
        self.num_pending_forks = 0
        self.is_swapped_by_manager = False
        self.host_blocks: list[int] = []
        self.num_host_tokens = 0
        self.cumulative_logprob = 0.0

    @property
    def order(self) -> tuple[int, int]:
        return self.request.request_id, self.seq_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def max_num_tokens(self) -> int:
        """Tokens, prompt included, at which it ends at the latest."""
        return self.num_prompt_tokens + self.request.max_tokens

    @property
    def next_noise_seed(self) -> int | None:
        """Seed of the noise that draws its next token; None if the request has no seed."""
        seed = self.request.params.seed
        if seed is None:
            return None
        return noise_seed(seed, self.index, self.num_output_tokens)

    def fork(self, seq_id: int) -> Sequence:
        """A copy with the same tokens, in no queue and with nothing in host memory."""
        child = super().fork(seq_id)
        child.host_blocks, child.num_host_tokens = [], 0
        child.num_pending_forks = 0
        return child


@dataclass(slots=True)
class RequestStats:
    """What happened to a request.  Times are those of the engine's clock, in seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int = 0
    """Tokens of the prompt whose K/V were in the cache when it was first scheduled."""
    num_preemptions: int = 0
    """How often one of its sequences lost its blocks to an older one."""
    num_swapped_tokens: int = 0
    """Tokens whose K/V were moved to host memory by preemptions."""
    num_output_tokens: int = 0
    """Over all outputs."""
    longest_output: int = 0
    """Tokens of the longest output."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token of the longest output, after the first token."""
        if self.finish_time is None or self.longest_output < 2:
            return None
        return (self.finish_time - self.first_token_time) / (self.longest_output - 1)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its parameters, and the sequences that came of it.

    max_tokens: most tokens to generate: those asked for, or fewer if the longest sequence that
        model and cache allow is shorter.
    stop_token_ids: tokens that end an output.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    stats: RequestStats
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(seq.status is Status.FINISHED for seq in self.sequences)
