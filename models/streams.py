"""Several callers share one engine: each caller gets a stream of its own requests' events."""

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from cache.blocks.session_hint import SessionHint
from cache.serving.outputs import RequestOutput, TokenOutput
from cache.serving.request import Request
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler
from models.prompts import tokenizer_errors

Event = TokenOutput | RequestOutput


class NewRequest(NamedTuple):
    token_ids: list[int]
    params: SamplingParams
    text: str | None
    """Text of the prompt, or None for token ids."""
    keys: Mapping[str, Any] = {}
    """Further arguments of ``Engine.add``."""


class OutputDecoder:
    """The decoder of one output, see ``cache.serving.output_text``.  The joined text is equal to
    ``tokenizer.decode`` of all tokens.

    Text is settled unless it ends in U+FFFD (possibly an incomplete character) or in a byte token:
    a later byte can make a whole run of byte tokens (``<0x0A> <0xE2>``) invalid.  New tokens are
    decoded together with the tokens that settled last, because the first token of a text may lose
    its blank.  After 64 tokens any text is settled, so the cost of a token is bounded.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, params.skip_special_tokens
        self._token_ids: list[int] = []
        self._num_settled, self._length = 0, 0  # settled tokens, and characters of their text
        self._pending = ""

    def __call__(self, token_ids: Sequence[int]) -> tuple[str, str]:
        if not token_ids:
            return "", self._pending
        self._token_ids += token_ids
        text = self._decode(self._token_ids)[self._length :]
        ends_open = text.endswith("\ufffd")
        is_byte = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_ids[-1]) or "")
        is_open = ends_open or is_byte or text == self._pending
        num_open, self._pending = len(self._token_ids) - self._num_settled, text
        if is_open and num_open < _MOST_OPEN + 3 * ends_open:  # up to 3 more bytes of a character
            return "", text
        if is_open and not text:  # special tokens
            del self._token_ids[self._num_settled :]
            return "", ""
        kept = num_open
        if is_open:  # a later byte token is decoded without this run of byte tokens
            ends = (
                k for k in range(1, 5) if not self._decode(self._token_ids[-k:]).endswith("\ufffd")
            )
            kept = next(ends, 1)
        self._token_ids, self._num_settled = self._token_ids[-kept:], kept
        self._length, self._pending = len(self._decode(self._token_ids)), ""
        return text, ""

    def _decode(self, token_ids: list[int]) -> str:
        skip = self._skip_special_tokens
        with tokenizer_errors("output"):
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip)


_BYTE_TOKEN = re.compile("<0x..>", re.DOTALL)
_MOST_OPEN = 64


class Streams:
    """Steps an engine for callers that wait for events.  Thread-safe.

    After a step that raises, the content of the cache is unknown: all requests are cancelled and
    the cache is emptied.  The caller that ran the step gets the exception.

    Args:
        new_scheduler: makes a new scheduler for the engine after a step that raised.
    """

    def __init__(self, engine: Any, new_scheduler: Callable[[], Scheduler]) -> None:
        self._engine, self._new_scheduler = engine, new_scheduler
        self._lock = threading.Lock()  # guards the engine, _requests and _outbox
        self._requests: dict[int, NewRequest] = {}
        self._outbox: defaultdict[int, list[Event]] = defaultdict(list)
        self._abandoned: list[int] = []  # not guarded by the lock

    def open(
        self, requests: Iterable[NewRequest], *, texts: bool = False, ticks: bool = False
    ) -> Iterator[Any]:
        """Add requests; returns an iterator over their events until all requests are finished.

        texts: if there is a tokenizer, each TokenOutput has the text of its token.
        ticks: yield None after a step without events, too.

        Closing or dropping the iterator cancels unfinished requests.
        """
        added: dict[int, NewRequest] = {}
        events = self._events(added, ticks)
        next(events)  # a generator that has not begun would skip its `finally`
        try:
            with self._lock:
                for request in requests:
                    tokens, keys = request.token_ids, {"stream_text": texts, **request.keys}
                    request_id = self._engine.add(tokens, request.params, **keys)
                    added[request_id] = self._requests[request_id] = request
        except BaseException:
            events.close()
            raise
        return events

    def abort(self, request_id: int) -> None:
        """Cancel a request; its stream then yields its output.  KeyError for an unknown request."""
        with self._lock:
            self._deliver([self._engine.abort(request_id)])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V.  Returns False, doing nothing, while a request is being served."""
        with self._lock:
            return self._engine.reset_prefix_cache()

    def hint_session(self, hint: SessionHint) -> None:
        """Replace the hint about a session, see ``Engine.hint_session``."""
        with self._lock:
            self._engine.hint_session(hint)

    def _events(self, requests: dict[int, NewRequest], ticks: bool) -> Generator[Any]:
        try:
            yield None
            remaining = set(requests)
            while remaining:
                events = self._next_events(remaining)
                if ticks and not events:
                    yield None
                for event in events:
                    if isinstance(event, RequestOutput):
                        remaining.discard(event.request_id)
                    yield event
        finally:
            self._abandon(requests)

    def _next_events(self, request_ids: set[int]) -> list[Event]:
        """New events of these requests.  If there are none yet, run a step first."""
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
            added = self._requests.pop(request.request_id, None)
            output = RequestOutput(
                request_id=request.request_id,
                prompt=None if added is None else added.text,
                prompt_token_ids=request.prompt_token_ids,
                outputs=outputs,
                stats=request.stats,
                error=request.error,
            )
            self._outbox[request.request_id].append(output)

    def _abandon(self, request_ids: Iterable[int]) -> None:
        """Cancel requests now, or after the current use of the engine.

        This thread itself may be using it: garbage collection drops iterators at any time."""
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
