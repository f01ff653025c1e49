"""Streams of events from one engine: every caller gets the events of its own requests."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cache.serving.engine import Engine
from cache.serving.outputs import CompletionOutput, RequestOutput, TokenOutput
from cache.serving.request import Request
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler
from cache.serving.stop_strings import cut_at_stop

Event = TokenOutput | RequestOutput


class NewRequest(NamedTuple):
    token_ids: list[int]
    params: SamplingParams
    text: str | None
    """Text of the prompt; None if it was given as token ids."""
    cache_salt: str | bytes | None = None


def _text(tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams) -> str:
    """The text of an output, up to the stop string that ended it."""
    skip = params.skip_special_tokens
    text = tokenizer.decode(token_ids, skip_special_tokens=skip)
    if not params.stop:
        return text
    kept = tokenizer.decode(token_ids[: params.min_tokens], skip_special_tokens=skip)
    return cut_at_stop(text, params.stop, len(kept))


def new_decoder(tokenizer: Tokenizer, params: SamplingParams) -> Callable[[int], str]:
    """decode(token_id) -> the text that the token adds, "" while a character is incomplete."""
    stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
    return lambda token_id: stream.step(tokenizer, token_id) or ""


class _Decoder:
    """Gives each token of an output its text; together they are the text of the output.

    The possible beginning of a stop string is kept back.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._decode = new_decoder(tokenizer, params)
        self._token_ids: list[int] = []
        self._text, self._length = "", 0
        self._kept_back = max(map(len, params.stop), default=1) - 1

    def with_text(self, token: TokenOutput) -> TokenOutput:
        self._token_ids.append(token.token_id)
        self._text += self._decode(token.token_id)
        end = max(self._length, len(self._text) - self._kept_back)
        if token.finish_reason is not None:  # the stream keeps back an incomplete character
            self._text = _text(self._tokenizer, self._token_ids, self._params)
            end = len(self._text)
        text, self._length = self._text[self._length : end], end
        return token._replace(text=text)


class Streams:
    """Steps an engine for callers that wait for events.  Thread-safe.

    A step that raises cancels all requests and empties the cache, whose content is then unknown.
    The caller that ran the step gets the exception.

    Args:
        new_scheduler: makes the engine's scheduler after such a step.
        tokenizer: decodes outputs; None for token ids only.
    """

    def __init__(
        self, engine: Engine, new_scheduler: Callable[[], Scheduler], tokenizer: Tokenizer | None
    ) -> None:
        self._engine, self._new_scheduler, self._tokenizer = engine, new_scheduler, tokenizer
        self._lock = threading.Lock()  # guards the engine and the next two attributes
        self._requests: dict[int, NewRequest] = {}
        self._outbox: defaultdict[int, list[Event]] = defaultdict(list)
        self._abandoned: list[int] = []  # changes without the lock

    def open(self, requests: Iterable[NewRequest], *, texts: bool = False) -> Iterator[Event]:
        """Add requests; returns an iterator over their events until all are finished.

        texts: give tokens their texts, if there is a tokenizer.

        Closing or dropping the iterator cancels unfinished requests.
        """
        added: dict[int, NewRequest] = {}
        events = self._events(added, texts and self._tokenizer is not None)
        next(events)  # a generator that has not begun would skip its `finally`
        try:
            with self._lock:
                for request in requests:
                    request_id = self._engine.add(
                        request.token_ids, request.params, request.cache_salt
                    )
                    added[request_id] = self._requests[request_id] = request
        except BaseException:
            events.close()
            raise
        return events

    def abort(self, request_id: int) -> None:
        """Cancel a request; its output comes next.  Raises KeyError if it is not being served."""
        with self._lock:
            self._deliver([self._engine.abort(request_id)])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V; False if a request is being served."""
        with self._lock:
            return self._engine.reset_prefix_cache()

    def _events(self, requests: dict[int, NewRequest], texts: bool) -> Iterator[Event]:
        decoders: dict[tuple[int, int], _Decoder] = {}
        try:
            yield None
            remaining = set(requests)
            while remaining:
                for event in self._next_events(remaining):
                    if isinstance(event, RequestOutput):
                        remaining.discard(event.request_id)
                    elif texts:
                        output = event.request_id, event.index
                        if output not in decoders:
                            params = requests[event.request_id].params
                            decoders[output] = _Decoder(self._tokenizer, params)
                        event = decoders[output].with_text(event)
                    yield event
        finally:
            self._abandon(requests)

    def _next_events(self, request_ids: set[int]) -> list[Event]:
        """New events of these requests, after another step if there are none."""
        with self._lock:
            try:
                if not self._outbox.keys() & request_ids:
                    self._step()
                ready = sorted(self._outbox.keys() & request_ids)
                return [event for request_id in ready for event in self._outbox.pop(request_id)]
            finally:
                self._cancel_abandoned()

    def _step(self) -> None:
        if not self._engine.has_unfinished:
            raise RuntimeError("requests were finished or aborted past the streams that serve them")
        try:
            tokens, finished = self._engine.step()
        except BaseException:
            self._deliver(self._engine.restart(self._new_scheduler()))
            raise
        for token in tokens:
            self._outbox[token.request_id].append(token)
        self._deliver(finished)

    def _deliver(self, finished: Iterable[Request]) -> None:
        for request in finished:
            outputs = self._engine.completions(request)
            if self._tokenizer is not None:
                outputs = [self._with_text(output, request.params) for output in outputs]
            ours = self._requests.pop(request.request_id, None)
            output = RequestOutput(
                request_id=request.request_id,
                prompt=None if ours is None else ours.text,
                prompt_token_ids=request.prompt_token_ids,
                outputs=outputs,
                stats=request.stats,
            )
            self._outbox[request.request_id].append(output)

    def _with_text(self, output: CompletionOutput, params: SamplingParams) -> CompletionOutput:
        text = _text(self._tokenizer, output.token_ids, params)
        return dataclasses.replace(output, text=text)

    def _abandon(self, request_ids: Iterable[int]) -> None:
        """Cancel requests now, or after the current use of the engine.

        The current use may be in this thread: garbage collection drops iterators at any time.
        """
        self._abandoned.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._cancel_abandoned()
            finally:
                self._lock.release()

    def _cancel_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.pop()
            if request_id in self._engine.requests:
                self._deliver([self._engine.abort(request_id)])
            self._outbox.pop(request_id, None)
