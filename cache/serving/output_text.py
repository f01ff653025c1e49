"""The text of an output: streamed pieces, stop strings and the final text."""

from collections.abc import Callable, Collection, Sequence

Decoder = Callable[[Sequence[int]], tuple[str, str]]
"""Takes the next tokens of an output.  Returns the text that they settle, and the text after it,
which later tokens may change.  The latter ends in U+FFFD for an incomplete character."""


class OutputText:
    """The text of one output, token by token.

    Streamed pieces, stop strings and the final text have this one source, so they agree.

    Args:
        decode: decoder of this output alone.
        stops: stop strings.
        min_tokens: a stop string counts if it ends in the text of a later token, as in vLLM.
    """

    def __init__(self, decode: Decoder, stops: Collection[str] = (), min_tokens: int = 0) -> None:
        self._decode, self._stops = decode, stops
        self._kept_back = max(map(len, stops), default=1) - 1  # may begin a stop string
        self._num_skipped = min_tokens
        self._skipped_length = 0
        self._settled, self._pending = "", ""
        self._num_streamed = 0

    def append(self, token_ids: Sequence[int]) -> bool:
        """Add tokens; one at a time if there are stop strings.

        If they complete a stop string, cut the text before it and return True.
        """
        searched = len(self._settled)
        settled, self._pending = self._decode(token_ids)
        self._settled += settled
        whole = self._pending.rstrip("\ufffd")  # without an incomplete character
        if not self._num_skipped:
            return self._cut(searched, whole)
        self._num_skipped -= 1
        self._skipped_length = len(self._settled) + len(whole)
        return False

    def _cut(self, searched: int, pending: str) -> bool:
        """Cut the text before a stop string that ends after the first ``searched`` characters."""
        first = max(0, searched - self._kept_back)
        tail = self._settled[first:] + pending
        begin = max(searched, self._skipped_length) - first + 1
        places = (tail.find(stop, max(0, begin - len(stop))) for stop in self._stops)
        place = min((place for place in places if place >= 0), default=None)
        if place is None:
            return False
        self._settled, self._pending = self._settled[:first] + tail[:place], ""
        return True

    def next_piece(self) -> str:
        """The text to stream next.  The possible beginning of a stop string is kept back."""
        end = max(self._num_streamed, len(self._settled) - self._kept_back)
        piece, self._num_streamed = self._settled[self._num_streamed : end], end
        return piece

    def finish(self) -> str:
        """Settle all of the text; returns it."""
        if self._pending and not self._num_skipped:
            self._cut(len(self._settled), self._pending)
        self._settled += self._pending
        self._pending, self._kept_back = "", 0
        return self._settled
