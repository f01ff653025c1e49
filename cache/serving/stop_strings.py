"""Stop strings: where they end a generated text."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def cut_at_stop(text: str, stops: Sequence[str], begin: int = 0) -> str:
    """The text before the first stop string that ends after the first ``begin`` characters."""
    places = (text.find(stop, max(0, begin - len(stop) + 1)) for stop in stops)
    return text[: min((i for i in places if i >= 0), default=len(text))]


class StopSearch:
    """Looks for stop strings in an output, token by token.

    As in vLLM, a stop string counts if it ends in the text of a token after the first
    ``min_tokens``.  Only the last characters are kept, so a token costs the same at any length.

    Args:
        decode: returns the text that a token adds to those before it.
    """

    def __init__(self, stops: Sequence[str], min_tokens: int, decode: Callable[[int], str]) -> None:
        self._stops, self._decode, self._skipped = stops, decode, min_tokens
        self._tail, self._longest = "", max(map(len, stops))

    def meets_stop(self, token_id: int) -> bool:
        """Add the next token; True if it completes a stop string."""
        begin = len(self._tail)
        text = self._tail + self._decode(token_id)
        self._tail = text[len(text) - min(len(text), self._longest - 1) :]
        if self._skipped:
            self._skipped -= 1
            return False
        return cut_at_stop(text, self._stops, begin) != text
