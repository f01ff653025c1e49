"""The loop that serves requests: schedule, run, sample.

It handles token ids only.  Logits go from the runner to the sampler unread.
"""

import contextlib
import itertools
import math
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Set
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from cache.blocks.sequence import Sequence, pack_token_ids
from cache.blocks.session_hint import SessionHint
from cache.checks import as_int, shown
from cache.managers.base import CacheManager, UnsupportedByDesign
from cache.serving.beam_search import BeamSearch
from cache.serving.output_text import Decoder, OutputText
from cache.serving.outputs import CompletionOutput, TokenOutput
from cache.serving.request import FinishReason, Request, RequestStats, ScheduledSequence, Status
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler, Step


class Runner(Protocol):
    """Computes steps."""

    def run(self, step: Step, manager: CacheManager) -> Any:
        """Copy the blocks of a step and compute its tokens.

        Returns one row of logits for each sequence whose tokens are then all computed, in the order
        of the step.
        """


class Drawn(Protocol):
    """Tokens that are being sampled.  With overlap ``Step.drawn`` passes them to the runner."""

    def read(self) -> Items[int]:
        """Wait for the tokens."""


class Sampler(Protocol):
    """Samples tokens."""

    def draw(self, logits: Any, rows: list[int], sequences: list[ScheduledSequence]) -> Drawn:
        """Sample the next token of each sequence by the parameters of its request.

        rows: the row of ``logits`` for each sequence.
        """

    def topk_logprobs(
        self, logits: Any, row: int, seq: ScheduledSequence, count: int
    ) -> list[tuple[float, int]]:
        """The ``count`` likeliest next tokens (or all, if fewer), as (log p, token).

        Empty if logits are NaN or infinite.
        """

    def logprobs(self, logits: Any, row: int, token: int, count: int) -> dict[int, float]:
        """log p of ``token`` and of the ``count`` likeliest tokens."""


class _Unread(NamedTuple):
    """Sampled tokens that are not read yet."""

    tokens: Drawn
    logits: Any
    rows: list[int]
    sequences: list[ScheduledSequence]


class HostTokens(list[int]):
    """Sampled tokens that are already on the host."""

    def read(self) -> list[int]:
        return self


class Engine:
    """Serves requests, several at a time, step by step.

    Args:
        max_model_len: longest sequence, prompt included; at most the scheduler's.
        vocab_size: token ids must be below it.  None: no limit.
        eos_token_ids: end an output unless the request ignores them.
        overlap: schedule and launch a step before the tokens of the last one are read, so that the
            device does not wait for the host, see ``step``.  Off with blocks of one token.
        new_decoder: makes the decoder of one output of a request.  None without a tokenizer.
        on_step: called with each step after it has run, and with its duration in seconds, before
            its tokens are sampled.

    Attributes:
        clock: returns the time for statistics, in seconds; ``time.perf_counter``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        *,
        max_model_len: int,
        vocab_size: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        new_decoder: Callable[[SamplingParams], Decoder] | None = None,
        overlap: bool = False,
        on_step: Callable[[Step, float], None] | None = None,
    ) -> None:
        self.scheduler, self.runner, self.sampler = scheduler, runner, sampler
        self.manager: CacheManager = scheduler.manager
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.eos_token_ids, self.new_decoder, self.on_step = eos_token_ids, new_decoder, on_step
        # With blocks of one token an unknown token would fill its block at once.
        self.overlap = overlap and self.manager.block_size > 1
        self._unread: _Unread | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self.manager.clock = self.clock
        self.requests: dict[int, Request] = {}
        """Unfinished requests by their id."""
        self._request_ids = itertools.count()
        self._seq_ids = itertools.count()
        self._beam_searches: dict[int, BeamSearch] = {}  # of unfinished requests
        self._ended_sessions: dict[str | int, None] = {}  # the latest ones
        self._can_fork = self.manager.can_fork

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def check(
        self,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        cache_salt: str | bytes | None = None,
        *,
        priority: int = 0,
        **keys: Any,
    ) -> array:
        """The packed token ids of a request.  Raises the errors that ``add`` would raise for it."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r}: needs SamplingParams")
        self._check_session(params.session)
        if isinstance(prompt_token_ids, Set | Mapping):
            raise ValueError(f"prompt: needs a list of token ids, got {shown(prompt_token_ids)}")
        try:
            prompt_token_ids = pack_token_ids(prompt_token_ids)
        except Exception as error:  # iterators raise any
            raise ValueError(f"prompt: {error}") from None
        length = len(prompt_token_ids)
        if not length:
            raise ValueError("prompt: has no tokens; needs at least one")
        Sequence(None, prompt_token_ids, cache_salt=cache_salt, **keys)
        if as_int("priority", priority) and self.scheduler.policy != "priority":
            needs = 'needs 0, or a Scheduler(policy="priority")'
            raise ValueError(f"priority={shown(priority)}: {needs}")
        if self.vocab_size is not None and max(prompt_token_ids) >= self.vocab_size:
            given = f"token ids from {min(prompt_token_ids)} to {max(prompt_token_ids)}"
            raise ValueError(f"prompt: {given}; needs ids from 0 to {self.vocab_size - 1}")
        if length >= self.max_model_len:
            raise ValueError(
                f"prompt: has {length} tokens; needs at most {self.max_model_len - 1}, one less "
                f"than max_model_len={self.max_model_len}, which model and KV cache allow"
            )
        if params.beam_width is not None:
            self._check_beam_search(length, self._max_tokens(params, length), params.beam_width)
        most = max(params.logit_bias or (0,))
        if self.vocab_size is not None and most >= self.vocab_size:
            needs = f"needs ids from 0 to {self.vocab_size - 1}"
            raise ValueError(f"logit_bias: token id {most}; {needs}")
        if params.stop and self.new_decoder is None:
            raise ValueError(f"stop={params.stop!r}: texts need a tokenizer; give stop_token_ids")
        return prompt_token_ids

    def _max_tokens(self, params: SamplingParams, prompt_length: int) -> int:
        room = self.max_model_len - prompt_length
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _check_session(self, hint: SessionHint | None) -> None:
        if hint is not None and hint.session in self._ended_sessions:
            raise ValueError(f"session={shown(hint.session)}: has ended; needs a new session")

    def _check_beam_search(self, prompt_length: int, max_tokens: int, width: int) -> None:
        if not self._can_fork:
            raise UnsupportedByDesign(self.manager.name, "fork, which beam search needs")
        max_num_seqs = self.scheduler.max_num_seqs
        if width > max_num_seqs:
            needs = f"needs at most max_num_seqs={max_num_seqs}"
            raise ValueError(f"beam_width={shown(width)}: {needs}")
        block_size = self.manager.block_size
        longest = prompt_length + max_tokens
        needed = width * -(-longest // block_size)
        available = self.scheduler.longest_sequence(needed * block_size) // block_size
        if available < needed:
            raise ValueError(
                f"beam_width={width}: beams of {longest} tokens may need {needed} "
                f"blocks, all at a time; the cache has {available}"
            )

    def add(
        self,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        cache_salt: str | bytes | None = None,
        stream_text: bool = False,
        *,
        lora_name: str | int | None = None,
        mm_inputs: Items[tuple[str | bytes, int, int]] = (),
        priority: int = 0,
    ) -> int:
        """Add a request to the waiting queue; returns its id.

        At most max_num_seqs of its samples run at once.

        cache_salt: only requests with an equal salt share K/V; None and empty mean no salt.
        stream_text: give the request's tokens their texts, if there is a tokenizer.
        lora_name, mm_inputs: see ``Sequence``.  They are part of the content of its blocks.  The
            runner must apply the adapter and the inputs.
        priority: the lower, the earlier it is served; for ``Scheduler(policy="priority")``.

        Raises ValueError for a prompt that is empty, has ids out of range, or does not fit, for
        keys that cannot be hashed, for a priority with "fcfs", for a session that has ended, and
        for more beams than max_num_seqs or the cache allows; UnsupportedByDesign for beam search
        with a manager that cannot fork.  If it raises, also after an interrupt or an error of the
        policy, nothing is added.
        """
        keys = dict[str, Any](cache_salt=cache_salt, lora_name=lora_name, mm_inputs=mm_inputs)
        prompt_token_ids = self.check(prompt_token_ids, params, priority=priority, **keys)
        stops = frozenset(params.stop_token_ids)
        length = len(prompt_token_ids)
        max_tokens = self._max_tokens(params, length)
        request = Request(
            request_id=next(self._request_ids),
            params=params,
            max_tokens=max_tokens,
            stop_token_ids=stops if params.ignore_eos else stops | self.eos_token_ids,
            stats=RequestStats(self.clock(), length, max_tokens),
            has_text=self.new_decoder is not None and (stream_text or bool(params.stop)),
            priority=priority,
        )
        num_outputs = params.n if params.beam_width is None else params.beam_width
        group = min(num_outputs, self.scheduler.max_num_seqs) if self._can_fork else 1
        for index in range(0, num_outputs, group):  # the first of a group is forked
            seq = ScheduledSequence(next(self._seq_ids), prompt_token_ids, request, index, **keys)
            seq.num_pending_forks = min(group, num_outputs - index) - 1
            if params.session is not None:
                seq.hints = params.session.numbers
            request.sequences.append(seq)
        try:
            for seq in request.sequences:
                self.scheduler.add(seq)
            if params.beam_width is not None:
                search = BeamSearch(request, params.beam_width)
                request.search = self._beam_searches[request.request_id] = search
            self.requests[request.request_id] = request
            return request.request_id
        except BaseException:
            self.requests.pop(request.request_id, None)
            self._beam_searches.pop(request.request_id, None)
            for seq in request.sequences:
                self.scheduler.withdraw(seq)
            raise

    def hint_session(self, hint: SessionHint) -> None:
        """Replace the hint of a session's unfinished requests.  Without them, tell the policy now.

        A pause that is told now counts from now.  A hint with ``ends=True`` ends the session: now,
        or when a request with this hint finishes without being cancelled.  Raises ValueError for a
        session that has ended (the engine remembers the last 4,096), and for anything but a
        SessionHint.
        """
        if not isinstance(hint, SessionHint):
            raise ValueError(f"hint={shown(hint)}: needs a SessionHint")
        self._check_session(hint)
        requests = self._requests_of(hint)
        for request in requests:
            request.params = replace(request.params, session=hint)
            for seq in request.sequences:
                seq.hints = hint.numbers
        if not requests:
            self.manager.correct(hint)
            self._note_end(hint)

    def _requests_of(self, hint: SessionHint) -> list[Request]:
        """The unfinished requests of the session."""
        hints = [(request, request.params.session) for request in self.requests.values()]
        return [request for request, own in hints if own and own.session == hint.session]

    def _note_end(self, hint: SessionHint) -> None:
        if hint.ends:
            self._ended_sessions[hint.session] = None
            if len(self._ended_sessions) > 4096:
                del self._ended_sessions[next(iter(self._ended_sessions))]

    def abort(self, request_id: int) -> Request:
        """Cancel an unfinished request.  It keeps its tokens.  KeyError if there is none."""
        request = self.requests[request_id]
        self._end(request, FinishReason.ABORT)
        return request

    def _end(self, request: Request, reason: FinishReason) -> None:
        for seq in request.sequences:
            if seq.status is not Status.FINISHED:
                if reason is FinishReason.ABORT and seq.hints:  # the request may be tried again
                    seq.hints = (math.nan, math.nan, *seq.hints[2:3])
                self._finish_sequence(seq, reason)
        self._finish_request(request)

    def _fail(self, request: Request, error: Exception, finished: list[Request]) -> None:
        """End a request for an error of its own, unless it has ended."""
        if request.request_id in self.requests:
            self._end(request, FinishReason.ERROR)
            finished.append(request)
            _note_error(request, error)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached K/V, as after a change of weights.

        Returns False, and does nothing, while sequences hold blocks.  Raises UnsupportedByDesign
        for a manager that cannot.
        """
        return self.manager.reset_prefix_cache()

    def step(self) -> tuple[list[TokenOutput], list[Request]]:
        """Compute one batch; returns the new tokens and the requests that they finish.

        Beam search returns no tokens before it is finished.

        With ``overlap`` the tokens of a step are returned one step later.  The next step takes them
        from the device, and the host reads them after it has launched that step.  A sequence that
        they end has computed one token too many, which is dropped.  Tokens are read at once if a
        sequence in the step ``reads_tokens`` (penalties, stop strings ...), and before the next
        step if no running sequence has anything to compute in it.
        """
        outputs: list[TokenOutput] = []
        finished: list[Request] = []
        if self._unread is not None and not self.scheduler.has_tokens_to_compute:
            self._read(outputs, finished)
            if not self.requests:
                return outputs, finished
        step = self.scheduler.schedule()
        step.drawn = self._unread and self._unread.tokens
        for seq in step.admitted:
            stats = seq.request.stats
            if stats.first_scheduled_time is None:
                stats.first_scheduled_time = self.clock()
                stats.num_cached_tokens = seq.num_cached_tokens
        begin = self.clock() if self.on_step is not None else 0.0
        logits = self.runner.run(step, self.manager)
        if self.on_step is not None:
            self.on_step(step, self.clock() - begin)
        rows: list[int] = []
        drawing: list[ScheduledSequence] = []
        complete = [seq for seq in step.sequences if seq.num_computed_tokens == len(seq.token_ids)]
        has_beams = bool(self._beam_searches)
        for row, seq in enumerate(complete):
            search = seq.request.search if has_beams else None
            if search is not None:
                try:
                    best = self.sampler.topk_logprobs(logits, row, seq, search.num_candidates)
                    if not best:
                        raise _NotFinite(seq)
                    search.observe(seq, best)
                except Exception as error:
                    self._fail(seq.request, error, finished)
                continue
            rows.append(row)
            drawing.append(seq)
            if seq.num_pending_forks:
                samples = self._fork_samples(seq)
                rows += [row] * len(samples)
                drawing += samples

        drawn, reads = None, False
        if drawing:
            tokens, reads = self._draw(logits, rows, drawing, step.errors)
            drawn = _Unread(tokens, logits, rows, drawing)
        self._read(outputs, finished)  # the last step's, while the device computes this one
        reads = reads or any(seq.request.params.reads_tokens for seq in drawing)
        for seq, cause in step.errors:
            self._fail(seq.request, cause, finished)
        if self.overlap and not reads:
            self._unread = drawn and drawn._replace(logits=None)  # they are large
            self._count_on(drawing)
        else:
            self._unread = drawn
            self._read(outputs, finished)
        for search in list(self._beam_searches.values()):
            try:
                is_over = search.is_ready and self._advance(search, self.clock())
            except Exception as error:
                self._fail(search.request, error, finished)
                continue
            if is_over:
                finished.append(search.request)
                self._finish_request(search.request)
        return outputs, finished

    def _draw(
        self, logits: Any, rows: list[int], sequences: list[ScheduledSequence],
        errors: list[tuple[ScheduledSequence, Exception]],
    ) -> tuple[Drawn, bool]:  # fmt: skip
        """Sample; one by one if that raises, so that ``errors`` gets the sequences that cause it.

        Returns the tokens, and whether they had to be read.  Raises if several requests fail and
        none succeeds: then the cause is not a request.
        """
        try:
            return self.sampler.draw(logits, rows, sequences), False
        except Exception:
            failed: list[tuple[ScheduledSequence, Exception]] = []
            tokens = HostTokens()
            for row, seq in zip(rows, sequences, strict=True):
                try:
                    tokens += self.sampler.draw(logits, [row], [seq]).read()
                except Exception as error:
                    tokens.append(-1)
                    failed.append((seq, error))
            if (
                len(failed) == len(sequences)
                and len({seq.request.request_id for seq in sequences}) > 1
            ):
                raise
            errors += failed
            return tokens, True

    def _read(self, outputs: list[TokenOutput], finished: list[Request]) -> None:
        """Append the tokens that are not read yet, and finish the sequences that they end."""
        if self._unread is None:
            return
        drawn, self._unread = self._unread, None
        tokens = drawn.tokens.read()
        now = self.clock()
        for row, seq, token in zip(drawn.rows, drawn.sequences, tokens, strict=True):
            if seq.finish_reason:  # finished before this token could be known
                continue
            request = seq.request
            stats, logprobs, text = request.stats, None, None
            if token < 0:
                self._fail(request, _NotFinite(seq), finished)
                continue
            stops = token in request.stop_token_ids
            if request.is_followed:
                try:
                    count = request.params.logprobs
                    if count is not None:
                        logprobs = self.sampler.logprobs(drawn.logits, row, token, count)
                    if request.has_text:
                        text = self._text_of(seq)
                        stops = stops or text.append([token])  # a stop token has no text
                except Exception as error:
                    self._fail(request, error, finished)
                    continue
            if seq.num_unknown_tokens:
                seq.drop_unknown()
            seq.append_token(token)
            if stats.first_token_time is None:
                stats.first_token_time = now
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            if stops:
                self._finish_sequence(seq, FinishReason.STOP)
            elif len(seq.token_ids) == seq.num_prompt_tokens + request.max_tokens:
                self._finish_sequence(seq, FinishReason.LENGTH)
            reason = seq.finish_reason
            piece = None if text is None else text.next_piece()
            outputs.append(
                TokenOutput(request.request_id, seq.index, token, reason, piece, logprobs)
            )
            if reason and request.is_finished:
                finished.append(request)
                self._finish_request(request)

    def _count_on(self, sequences: list[ScheduledSequence]) -> None:
        """Continue sequences with tokens that are not read yet, unless these are their last."""
        for row, seq in enumerate(sequences):
            if seq.status is not Status.FINISHED and len(seq.token_ids) + 1 < seq.max_num_tokens:
                seq.append_unknown(row)

    def restart(self, scheduler: Scheduler) -> list[Request]:
        """Cancel all requests, and continue with another scheduler.  Returns the requests.

        Tokens generated so far are kept.  Call it after ``step`` has raised: the manager may then
        count K/V as cached that were never written.  ``scheduler`` has a new manager of the same
        size.
        """
        requests = list(self.requests.values())
        for request in requests:
            for seq in request.sequences:
                if seq.status is not Status.FINISHED:
                    seq.drop_unknown()
                    seq.status, seq.finish_reason = Status.FINISHED, FinishReason.ABORT
            self._finish_request(request)
        self._unread = None
        self.scheduler, self.manager = scheduler, scheduler.manager
        self.manager.clock = self.clock
        return requests

    def completions(self, request: Request) -> list[CompletionOutput]:
        """The outputs of a finished request, with their texts if there is a tokenizer."""
        outputs: list[tuple[CompletionOutput, OutputText | None]] = []
        if request.search is not None:
            for i, best in enumerate(request.search.best()):
                ended = best.token_ids, best.finish_reason, None, best.cumulative_logprob
                outputs.append((CompletionOutput(i, *ended), None))
        else:
            sequences = sorted(request.sequences, key=lambda seq: seq.index)
            outputs = [(_completion(seq), seq.text) for seq in sequences]
        if self.new_decoder is None:
            return [output for output, _ in outputs]
        return [self._with_text(request, *output) for output in outputs]

    def _new_text(self, params: SamplingParams, *stopping: Any) -> OutputText:
        assert self.new_decoder is not None
        return OutputText(self.new_decoder(params), *stopping)

    def _text_of(self, seq: ScheduledSequence) -> OutputText:
        """The text of ``seq``, which is decoded token by token."""
        if seq.text is None:
            params = seq.request.params
            seq.text = self._new_text(params, params.stop, params.min_tokens)
        return seq.text

    def _with_text(
        self, request: Request, output: CompletionOutput, text: OutputText | None
    ) -> CompletionOutput:
        """``output`` with its text, or with FinishReason.ERROR if it cannot be decoded.

        text: None if the tokens were not decoded yet.  Then no stop string ended the output.
        """
        try:
            if text is None:
                text = self._new_text(request.params)
                has_stop = output.finish_reason is FinishReason.STOP  # a token, which has no text
                text.append(output.token_ids[: len(output.token_ids) - has_stop])
            return replace(output, text=text.finish())
        except Exception as error:
            request.stats.was_aborted = True
            _note_error(request, error)
            return replace(output, finish_reason=FinishReason.ERROR)

    def _fork(self, seq: ScheduledSequence, index: int) -> ScheduledSequence:
        child = seq.fork(next(self._seq_ids))
        child.index = index
        self.scheduler.fork(seq, child)
        seq.request.sequences.append(child)
        return child

    def _fork_samples(self, seq: ScheduledSequence) -> list[ScheduledSequence]:
        """Fork the samples of a prompt that has just been computed."""
        indices = range(seq.index + 1, seq.index + 1 + seq.num_pending_forks)
        children = [self._fork(seq, index) for index in indices]
        seq.num_pending_forks = 0
        return children

    def _advance(self, search: BeamSearch, now: float) -> bool:
        """Replace the beams of a search by their successors; True if the search is over."""
        request = search.request
        if request.stats.first_token_time is None:
            request.stats.first_token_time = now
        expansion = search.expand()
        if expansion is None:
            for beam in search.beams:
                self._finish_sequence(beam, FinishReason.LENGTH)
            return True
        beams = []
        for beam, successors in expansion:
            if not successors:
                self.scheduler.finish(beam)
                continue
            beam.num_pending_forks = 0
            children = [self._fork(beam, beam.index) for _ in successors[1:]]
            for seq, (token, total) in zip((beam, *children), successors, strict=True):
                seq.append_token(token)
                seq.cumulative_logprob = total
                beams.append(seq)
        search.beams, request.sequences = beams, beams[:]
        return False

    def _finish_sequence(self, seq: ScheduledSequence, reason: FinishReason) -> None:
        self.scheduler.finish(seq)  # first: the policy may raise
        seq.drop_unknown()  # an aborted sequence may have one
        seq.finish_reason = reason
        if seq.text is not None:
            seq.text.finish()

    def _finish_request(self, request: Request) -> None:
        del self.requests[request.request_id]
        search = self._beam_searches.pop(request.request_id, None)
        if search is not None:
            lengths = [len(hypothesis.token_ids) for hypothesis in search.best()]
        else:
            lengths = [seq.num_output_tokens for seq in request.sequences]
        stats = request.stats
        stats.finish_time = self.clock()
        reasons = {seq.finish_reason for seq in request.sequences}
        stats.was_aborted = not reasons.isdisjoint((FinishReason.ABORT, FinishReason.ERROR))
        hint = request.params.session
        if hint and FinishReason.ABORT not in reasons and not self._requests_of(hint):
            self._note_end(hint)
        stats.num_output_tokens = sum(lengths)
        stats.longest_output = max(lengths, default=0)


class _NotFinite(ArithmeticError):
    def __init__(self, seq: ScheduledSequence) -> None:
        super().__init__(
            f"logits are NaN or infinite after {len(seq.token_ids)} tokens; the weights are "
            "damaged or too large for the dtype, or the sampling parameters leave no token"
        )


def _note_error(request: Request, error: Exception) -> None:
    kind = "" if isinstance(error, _NotFinite) else f"{type(error).__name__}: "
    request.error = f"{kind}{error}"
    with contextlib.suppress(RuntimeWarning):  # where warnings are errors
        message = f"request {request.request_id}: {request.error}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _completion(seq: ScheduledSequence) -> CompletionOutput:
    assert seq.finish_reason is not None
    token_ids, logprobs, total = seq.output_token_ids, None, None
    if seq.request.params.logprobs is not None:
        logprobs = seq.logprobs
        total = sum(of[token] for of, token in zip(logprobs, token_ids, strict=True))
    return CompletionOutput(seq.index, token_ids, seq.finish_reason, None, total, logprobs)
